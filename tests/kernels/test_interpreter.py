"""The Triton kernels against the oracle, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter_process import SLOW_CASES, special_values
from norm_cases import Case, check, covering_cases

CASES = [case for kind in ("rms", "layer") for case in covering_cases(kind)]


def _check(case: Case, results: dict[str, Any]) -> None:
    result = results[str(case)]
    assert isinstance(result, torch.Tensor), result
    check(case, result)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_the_oracle(case: Case, interpreted: dict[str, Any]) -> None:
    _check(case, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_largest_case_agrees_with_the_oracle(case: Case, interpreted_slow: dict[str, Any]) -> None:
    _check(case, interpreted_slow)


def test_rounding_is_torchs(interpreted: dict[str, Any]) -> None:
    values = special_values()
    expected, got = values.to(torch.bfloat16), interpreted["rounding"]
    assert torch.equal(expected.isnan(), got.isnan())
    numbers = ~expected.isnan()
    # As integers, so that the signs of zeros count.
    assert torch.equal(expected[numbers].view(torch.int16), got[numbers].view(torch.int16))


def test_rows_do_not_see_their_neighbours(interpreted: dict[str, Any]) -> None:
    assert [name for name, same in interpreted["invariance"].items() if not same] == []


def test_explicit_triton_does_not_fall_back_to_the_interpreter(interpreted: dict[str, Any]) -> None:
    assert "needs a CUDA, ROCm or XPU device, got device 'cpu'" in interpreted["explicit triton"]
