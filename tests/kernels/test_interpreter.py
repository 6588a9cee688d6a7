"""The Triton kernels against the oracle, in the interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from interpreter_process import (
    CASES,
    QUANTIZED_CASES,
    QUANTIZED_DTYPES,
    SLOW_CASES,
    SPECIAL_WIDTHS,
    quantizable_values,
    special_formula,
    special_rows,
    special_values,
)
from norm_cases import BF16, FP16, FP32, Case, check, check_statistics, ulps
from normswap_kernels.reference import quantized, rounded


def _check(case: Case, results: dict[str, Any]) -> None:
    found = results[str(case)]
    assert isinstance(found, tuple), found
    y, summed, scale, mean = found
    check(case, y, summed)
    assert (scale is not None) == case.save
    if scale is not None and case.rows:
        check_statistics(case, scale, mean)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_kernel_agrees_with_the_oracle(case: Case, interpreted: dict[str, Any]) -> None:
    _check(case, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_largest_case_agrees_with_the_oracle(case: Case, interpreted_slow: dict[str, Any]) -> None:
    _check(case, interpreted_slow)


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("case", QUANTIZED_CASES, ids=str)
def test_quantizing_is_the_norm_and_then_the_oracles_quantization(
    case: Case, dtype: torch.dtype, interpreted: dict[str, Any]
) -> None:
    found = interpreted[f"{case} to {dtype}"]
    assert isinstance(found, tuple), found
    values, scales, y = found
    check(case, y)
    if case.rows:
        expected, expected_scales = quantized(y, dtype)
        assert torch.equal(scales, expected_scales)
        assert torch.equal(values, expected.view(torch.int8))


@pytest.mark.parametrize("dtype", QUANTIZED_DTYPES, ids=str)
@pytest.mark.parametrize("eps", (0.0, 1e-6))
@pytest.mark.parametrize("width", SPECIAL_WIDTHS)
def test_special_rows_are_quantized_as_the_oracle_does(
    width: int, eps: float, dtype: torch.dtype, interpreted: dict[str, Any]
) -> None:
    found = interpreted[f"special {width} {eps} to {dtype}"]
    assert isinstance(found, tuple), found
    values, scales, y = found
    expected, expected_scales = quantized(y, dtype)
    torch.testing.assert_close(scales, expected_scales, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(values, expected.view(torch.int8))
    assert scales.isnan().any() and scales.isfinite().any()


@pytest.mark.parametrize("dtype", (FP32, FP16, BF16), ids=str)
@pytest.mark.parametrize("width", SPECIAL_WIDTHS)
@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_special_rows_are_what_the_formula_gives(
    kind: str, width: int, dtype: torch.dtype, interpreted: dict[str, Any]
) -> None:
    y = interpreted[f"special {kind} {width} {dtype}"]
    assert isinstance(y, torch.Tensor), y
    expected, _ = rounded(special_formula(kind, dtype), special_rows(width, dtype))
    assert torch.equal(y.isnan(), expected.isnan())
    y, expected = y.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)
    if dtype == FP32:
        torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))
    else:
        assert ulps(y, expected).max() <= 1


def test_rounding_is_torchs(interpreted: dict[str, Any]) -> None:
    values = special_values()
    expected, got = values.to(torch.bfloat16), interpreted["rounding"]
    assert torch.equal(expected.isnan(), got.isnan())
    numbers = ~expected.isnan()
    # As integers, so that the signs of zeros count.
    assert torch.equal(expected[numbers].view(torch.int16), got[numbers].view(torch.int16))


def test_rounding_to_float8_on_the_bits_is_torchs(interpreted: dict[str, Any]) -> None:
    expected = quantizable_values().to(torch.float8_e4m3fn).view(torch.int8)
    assert torch.equal(interpreted["e4m3"], expected)


def test_rounding_to_int8_is_torchs(interpreted: dict[str, Any]) -> None:
    expected = quantizable_values().clamp(-127, 127).round().to(torch.int8)
    assert torch.equal(interpreted["int8"], expected)


def test_rows_do_not_see_their_neighbours(interpreted: dict[str, Any]) -> None:
    found = interpreted["invariance"]
    assert isinstance(found, dict), found
    assert [name for name, same in found.items() if not same] == []


def test_rows_and_columns_past_two_to_the_31_are_found(interpreted: dict[str, Any]) -> None:
    found = interpreted["far"]
    if "memory" in found:
        pytest.skip(f"needs 4 GiB of address space: {found['memory']}")
    assert found == {"rows": True, "columns": True}


def test_explicit_triton_does_not_fall_back_to_the_interpreter(interpreted: dict[str, Any]) -> None:
    assert "needs a CUDA, ROCm or XPU device, got device 'cpu'" in interpreted["explicit triton"]
