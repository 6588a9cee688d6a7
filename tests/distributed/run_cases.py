"""Run every case on every rank: starting two processes costs more than all that they do."""

from __future__ import annotations

import fsdp_cases
import tensor_cases
import tensor_parallel_cases
from rank_cases import main

CASES = {**fsdp_cases.CASES, **tensor_cases.CASES, **tensor_parallel_cases.CASES}

if __name__ == "__main__":
    main(CASES)
