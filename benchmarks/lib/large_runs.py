"""The ways of verifying a checkpoint that `verify_large.py` compares, each in a process of its own.

    python large_runs.py WAY CONVERTED ORIGINAL BUDGET TOKENS

prints its seconds, those of the processor, the verdict, how far the original as served is from the reference, and its
peak memory above what the imports take, as JSON.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path

import normswap.verifying
from normswap import measuring, offloading


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def main() -> None:
    """Run one way: ``streamed`` within the budget, or ``whole``."""
    way, converted, original, budget, tokens = sys.argv[1:]
    if way == "whole":
        measuring.needs_streaming = lambda *_: False
    elif way != "streamed":
        raise SystemExit(f"expected streamed or whole, got {way}")
    read = 0
    open_unit = offloading.Stream.open

    def counted(stream: offloading.Stream, unit: offloading.Unit) -> None:
        nonlocal read
        before = stream.loads
        open_unit(stream, unit)
        read += unit.size if stream.loads > before else 0

    offloading.Stream.open = counted
    before, begin = peak(), time.perf_counter()
    report = normswap.verifying.verify(
        converted, original, tokens=int(tokens), max_memory=int(budget) if way == "streamed" else None
    )
    usage = resource.getrusage(resource.RUSAGE_SELF)
    figures = {
        "seconds": time.perf_counter() - begin,
        "cpu": usage.ru_utime + usage.ru_stime,
        "imports": before,
        "peak": peak() - before,
        "read": read,
        "passed": report.passed,
        "failures": report.failures,
        "streamed": report.streamed,
        "exact": report.exact.error,
        "ratio": report.logits.ratio,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
