"""The gradients on a CPU without a compiler: torch's primitives over blocks of rows, as `cpu_blocks` has them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .cpu_blocks import SERIAL, activate, scalar, scratch, sum_rows
from .formula import Formula
from .gradients import passing

# Columns that torch adds up at a time in a sum over rows, or a multiple: four vectors of the longest.
_COLUMNS = 64


def arithmetic(row: Tensor, rstd: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic: the sum of a float64 input may be narrower, and what it gave is not."""
    return torch.float64 if torch.float64 in (row.dtype, rstd.dtype) else torch.float32


def backward(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    gain: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    drow: Tensor,
    dgate: Tensor | None,
    wanted: tuple[bool, bool],
    kept: Sequence[Tensor | None] | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Differentiate one block by the formula of `gradients.closed_form`.

    Args:
        formula: what the forward computed.
        grad: ``(R, G, D)`` or ``(R, D)``, as all of these, gradient of the result.
        grad_sum: ``(R, G, D)``, gradient of the sum with the residual, or None.
        row: ``(R, G, D)``, what was normalised, before a gate.
        gate: ``(R, G, D)`` or None.
        gain: ``(G, D)``, the weight with its offset, in the dtype of the arithmetic, or None.
        rstd: ``(R, G, 1)``, the scale of each row, not rounded to ``formula.scale_dtype``.
        mean: ``(R, G, 1)``, the mean of each row; None for RMSNorm.
        drow: ``(R, G, D)``, for the gradient of ``row``.
        dgate: ``(R, G, D)``, for the gradient of the gate, or None.
        wanted: whether the gradients of gain and bias are.
        kept: room for ``R * G * D`` numbers for each gradient that is wanted, to compute in the calling thread (but
            for the sums of many narrow rows); None to use all threads.

    Returns:
        The block's part of the gradients of gain and bias, ``(G, D)``, or None where not wanted.
    """
    if kept is None:
        return _differentiate(formula, grad, grad_sum, row, gate, gain, rstd, mean, drow, dgate, wanted, (None, None))
    # The sums over all rows of the block, since their digits depend on what is summed at once.
    terms = [None if t is None else t[: row.numel()].view(row.shape) for t in kept]
    tensors = grad, grad_sum, row, gate, rstd, mean, drow, dgate, *terms
    length = max(1, (SERIAL - 1) // row[0].numel())
    for start in range(0, row.size(0), length):
        a, b, c, d, scale, centre, e, f, *g = (None if t is None else t[start : start + length] for t in tensors)
        assert a is not None and c is not None and scale is not None and e is not None
        _differentiate(formula, a, b, c, d, gain, scale, centre, e, f, (False, False), g)
    dgain, dshift = (None if t is None else _sum_columns_alone(t) for t in terms)
    return dgain, dshift


def _differentiate(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    gain: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    drow: Tensor,
    dgate: Tensor | None,
    wanted: tuple[bool, bool],
    terms: Sequence[Tensor | None],
) -> tuple[Tensor | None, Tensor | None]:
    """Differentiate rows; write what the gradients of gain and bias are the sums of to ``terms``, where given."""
    product, normal, activated, along, slope, dy = scratch(row.shape, arithmetic(row, rstd))
    width = row.size(-1)
    normal.copy_(row)
    if gate is not None:
        activate(formula, gate, activated, product, slope)
        if formula.gate_position == "before":
            normal.mul_(activated)
    if formula.kind == "layer":
        assert mean is not None
        normal.sub_(mean)
    through = None if formula.eps_position == "inside" else _passed(formula, normal, product, along)
    if formula.scale_dtype is not None:
        applied = rstd.to(formula.scale_dtype).to(rstd.dtype)
        passed = passing(rstd, applied)
        through = passed if through is None else through * passed
        rstd = applied
    normal.mul_(rstd)
    dy.copy_(grad)
    if gate is not None and formula.gate_position == "after":
        assert dgate is not None
        torch.mul(dy, normal, out=product)
        if gain is not None:
            product.mul_(gain)
        dgate.copy_(product.mul_(slope))
        dy.mul_(activated)
    dshift = _sum_columns(dy) if wanted[1] else None
    torch.mul(dy, normal, out=product)
    dgain = _sum_columns(product) if wanted[0] else None
    for term, values in zip(terms, (product, dy), strict=True):
        if term is not None:
            term.copy_(values)
    if gain is not None:
        product.mul_(gain)
        dy.mul_(gain)
    counted = formula.partial or width
    share = 1.0 if formula.reduction == "sum" else 1.0 / counted
    sum_rows(product, along)
    if through is not None:
        along.mul_(through)
    # No operation that multiplies and adds: torch rounds it once or twice, as the elements are split over threads.
    along.mul_(scalar(share, along.dtype))
    if formula.kind == "layer":
        means = torch.empty_like(along)
        sum_rows(dy, means)
        dy.sub_(means.mul_(scalar(1.0 / width, means.dtype)))
    if counted == width:
        dy.sub_(normal.mul_(along))
    else:
        dy[..., :counted].sub_(normal[..., :counted].mul_(along))
    dy.mul_(rstd)
    if gate is not None and formula.gate_position == "before":
        assert dgate is not None
        product.copy_(row)
        dgate.copy_(product.mul_(dy).mul_(slope))
        dy.mul_(activated)
    if grad_sum is not None:
        dy.add_(grad_sum if grad_sum.dtype == dy.dtype else product.copy_(grad_sum))
    drow.copy_(dy)
    return dgain, dshift


def _passed(formula: Formula, v: Tensor, square: Tensor, root: Tensor) -> Tensor:
    """Return how much of the moment's gradient passes through the scale; from the moment, which the scale blurs."""
    counted = formula.partial or v.size(-1)
    torch.mul(v[..., :counted], v[..., :counted], out=square[..., :counted])
    sum_rows(square[..., :counted], root)
    if formula.reduction == "mean":
        root.div_(scalar(counted, root.dtype))
    root.sqrt_()
    if formula.eps_position == "outside":
        return torch.where(root > 0, 1 + formula.eps / root, 0.0)
    return (root > formula.eps).to(root.dtype)


def _sum_columns(block: Tensor) -> Tensor:
    count = block.size(0)
    if count == 1:
        return block[0].clone()
    if count >= SERIAL and count == block.numel():
        # One result would be summed by several threads in parts, as many as there are.
        return block.expand(*block.shape[:-1], 2).sum(0)[..., :1]
    return block.sum(0)


def _sum_columns_alone(block: Tensor) -> Tensor:
    """Add up as `_sum_columns` does, to the last digit, some columns at a time, so that one thread does it."""
    count, size = block.size(0), block[0].numel()
    columns = (SERIAL - 1) // count // _COLUMNS * _COLUMNS
    if count == 1 or not columns or size <= columns:
        return _sum_columns(block)
    rows, total = block.view(count, size), torch.empty_like(block[0])
    for parts in zip(rows.split(columns, 1), total.view(size).split(columns), strict=True):
        torch.sum(parts[0], 0, out=parts[1])
    return total
