"""Is what a contender gives right? Nobody is timed unchecked, and what is wrong is marked."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from bench_cases import Case, Inputs
from normswap_kernels.gradients import closed_form
from normswap_kernels.reference import exact, quantized, rounded
from torch import Tensor

CHECKED_ROWS = 64
_CHUNK_ELEMENTS = 1 << 22

Rows = list[int] | slice

RIGHT, OTHER_ROUNDING, WRONG = "right", "other rounding", "wrong"


class Oracle:
    """What is right for a case: results and gradients of its first and last rows, and gradients of the parameters."""

    def __init__(self, case: Case, inputs: Inputs, gradients: Sequence[Tensor]) -> None:
        self._case = case
        half = min(CHECKED_ROWS // 2, case.rows)
        self._rows = sorted({*range(half), *range(case.rows - half, case.rows)})
        with torch.no_grad():
            if case.direction == "forward":
                i = _take(inputs, self._rows)
                y, summed = rounded(case.formula, i.x, i.weight, i.bias, residual=i.residual, gate=i.gate)
                truth, _ = exact(case.formula, i.x, i.weight, i.bias, residual=i.residual, gate=i.gate)
                self._truth, self._summed = truth, None if i.residual is None else summed
                self._rounded, self._own = y, _errors(y, truth)
                self._quantized = quantized(y, case.operation.quantized) if case.operation.quantized else None
            else:
                self._differentiate(inputs, gradients)

    def judge(self, results: Sequence[Tensor]) -> str:
        """Say whether results are right.

        Args:
            results: of the forward as the operation returns them, or the gradients of `Inputs.differentiable`.

        Returns:
            `RIGHT`: near to float64 and, in 16 bits, with the oracle's very elements but for one in a thousand.
            `OTHER_ROUNDING`: near, with other elements, so that a rounding is made elsewhere. `WRONG`: neither; near is
            within four times the largest and three times the typical error of the oracle itself.
        """
        with torch.no_grad():
            if self._case.direction == "backward":
                return _worst(self._judge_gradients(results))
            if self._quantized is not None:
                return self._judge_quantized(results)
            # The sum is rounded once, and so has one right value.
            if self._summed is not None and not torch.equal(results[1][self._rows], self._summed):
                return WRONG
            return self._grade(results[0][self._rows])

    def _grade(self, y: Tensor) -> str:
        largest, typical = _errors(y, self._truth)
        # Sums in another order differ by some roundings of float32, whatever the result's dtype.
        order = 4 * torch.finfo(torch.float32).eps
        if not (largest <= 4 * self._own[0] + 2 * order and typical <= 3 * self._own[1] + order):
            return WRONG
        if self._case.dtype == torch.float32:
            return RIGHT
        return RIGHT if (y != self._rounded).float().mean() <= 1e-3 else OTHER_ROUNDING

    def _judge_quantized(self, results: Sequence[Tensor]) -> str:
        assert self._quantized is not None
        values, scales = (t[self._rows].float() for t in results)
        expected, expected_scales = (t.float() for t in self._quantized)
        off = (scales.reshape(-1) / expected_scales.reshape(-1) - 1).abs().max()
        # A last digit of the row or of its maximum moves the values that lie between two steps.
        step = 1.0 if self._case.operation.quantized == torch.int8 else 32.0
        if not (off <= 1e-2 and (values - expected).abs().max() <= step):
            return WRONG
        return RIGHT if off <= 1e-6 and (values != expected).float().mean() <= 1e-3 else OTHER_ROUNDING

    def _differentiate(self, inputs: Inputs, gradients: Sequence[Tensor]) -> None:
        """Keep the gradients of some rows, and those of the parameters, which all rows add to."""
        case = self._case
        sums: list[Tensor | None] = [None, None]
        for rows in _chunks(case):
            found = self._closed_form(inputs, gradients, rows)
            for k, gradient in enumerate((found[2], found[3])):
                if gradient is not None:
                    before = sums[k]
                    sums[k] = gradient if before is None else before + gradient
        row, gate, *_ = self._closed_form(inputs, gradients, self._rows)
        self._expected = (row, gate, *sums)

    def _closed_form(self, inputs: Inputs, gradients: Sequence[Tensor], rows: Rows) -> tuple[Tensor | None, ...]:
        i = _take(inputs, rows)
        row = i.x if i.residual is None else (i.x.float() + i.residual.float()).to(self._case.dtype)
        grad, grad_sum = (*(g[rows] for g in gradients), None)[:2]
        wide = [None if t is None else t.double() for t in (grad, grad_sum, row, i.gate, i.weight)]
        assert wide[0] is not None and wide[2] is not None
        bias = None if i.bias is None else torch.float64
        return tuple(closed_form(self._case.formula, wide[0], wide[1], wide[2], wide[3], wide[4], bias))

    def _judge_gradients(self, results: Sequence[Tensor]) -> Iterator[str]:
        op = self._case.operation
        row, gate, weight, bias = self._expected
        expected = [row, row if op.residual else None, gate, weight, bias]
        names = [t for t in expected if t is not None]
        for result, truth in zip(results, names, strict=True):
            of_rows = truth is row or truth is gate
            # Of float32 the arithmetic takes more digits than the last rounding does.
            unit = max(torch.finfo(self._case.dtype).eps, 8 * torch.finfo(torch.float32).eps)
            if not of_rows:
                # Sums over all rows, in one order or another.
                unit += torch.finfo(torch.float32).eps * self._case.rows**0.5
            largest, typical = _errors(result[self._rows] if of_rows else result, truth)
            if largest <= 2 * unit and typical <= 0.5 * unit:
                yield RIGHT
            else:
                yield OTHER_ROUNDING if largest <= 16 * unit and typical <= 2 * unit else WRONG


def _take(inputs: Inputs, rows: Rows) -> Inputs:
    x, residual, gate = (None if t is None else t.detach()[rows] for t in (inputs.x, inputs.residual, inputs.gate))
    assert x is not None
    weight, bias = (None if t is None else t.detach() for t in (inputs.weight, inputs.bias))
    return Inputs(x, residual, gate, weight, bias)


def _chunks(case: Case) -> Iterator[slice]:
    step = max(1, _CHUNK_ELEMENTS // case.width)
    for start in range(0, case.rows, step):
        yield slice(start, start + step)


def _errors(result: Tensor, truth: Tensor) -> tuple[float, float]:
    """Return the largest error by the largest magnitude of its row, and the root mean square of both by one another."""
    error, tiny = result.double() - truth, torch.finfo(torch.float32).tiny
    largest = (error.abs() / truth.abs().amax(-1, keepdim=True).clamp_min(tiny)).max()
    typical = error.square().mean().sqrt() / truth.square().mean().sqrt().clamp_min(tiny)
    if not (torch.isfinite(largest) and torch.isfinite(typical)):
        return math.inf, math.inf
    return float(largest), float(typical)


def _worst(verdicts: Iterator[str]) -> str:
    return max(verdicts, key=(RIGHT, OTHER_ROUNDING, WRONG).index)
