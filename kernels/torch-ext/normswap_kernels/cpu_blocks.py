"""The CPU implementation without a compiler: torch's primitives over blocks of rows that stay in the cache.

What is slow in an eager norm on a CPU is its temporaries, each as large as the input. Here the same primitives run
in the same order on a block of rows at a time, in buffers that are reused, so that results are those of the eager
class bit for bit; but for gates, whose activations are made of an exponential here. Arithmetic is float32, or float64
for a float64 input.

The operations run on torch's own threads. Threads of ours would share the cores with torch's, which go on spinning for
a while after each operation (measured beside a model's linear layers on two cores: three times slower). Each
operation ends with a barrier, which is dear on a busy machine, so blocks are as large as the cache allows; and where
more threads can run than there are cores, they are so small that torch runs them in the calling thread.

A block is ``(..., D)`` with as many rows as fit, its parameters ``(D,)`` or ``(G, D)``, its statistics ``(..., 1)``.
"""

from __future__ import annotations

import functools
import threading
from typing import NamedTuple

import torch
from torch import Tensor

from .cpu_memory import in_large_pages
from .formula import QUANTIZED_MAXIMUM, Formula

# Torch runs an operation on fewer elements than this (at::internal::GRAIN_SIZE) in the calling thread.
SERIAL = 2**15

# Elements of a block: 8 MB of float32. Fewer mean more barriers, which a busy machine pays for; more leave the cache.
BLOCK = 2**21

# Buffers of a block that a call may need: values, squares, and three for gates and gradients.
_BUFFERS = 5

# Views of the scratch space that are kept: a model has few shapes of a decoding step.
_KEPT_VIEWS = 64

_local = threading.local()


class Parameters(NamedTuple):
    """Gain and bias in the dtypes that they are applied in.

    Attributes:
        gain: the weight with its offset, or None.
        shift: the bias, or None.
        narrow: whether both can be applied in the output's dtype with the roundings of the formula.
    """

    gain: Tensor | None
    shift: Tensor | None
    narrow: bool


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of the arithmetic."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def parameters(formula: Formula, weight: Tensor | None, bias: Tensor | None, compute: torch.dtype) -> Parameters:
    """Bring gain and bias to the dtype that they are applied in.

    A product of two narrow numbers that is rounded once is the same in torch's narrow multiplication and in
    float32, so parameters of the middle and output dtype stay as they are and save two conversions of each row.
    """
    out = formula.out_dtype
    narrow = (
        formula.round_dtype == out
        and formula.gate_position != "after"
        and (weight is None or (weight.dtype == out and not formula.offset and formula.product_dtype in (None, out)))
        and (bias is None or (bias.dtype == out and (weight is None or formula.product_dtype == out)))
    )
    if not narrow:
        if weight is not None and weight.dtype != compute:
            weight = weight.to(compute)
        if bias is not None and bias.dtype != compute:
            bias = bias.to(compute)
    if weight is not None and formula.offset:
        weight = weight + scalar(formula.offset, compute)
    return Parameters(weight, bias, narrow)


def forward(
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    applied: Parameters,
    y: Tensor,
    summed: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
) -> None:
    """Compute one block.

    Args:
        formula: what to compute.
        x: ``(..., D)``.
        residual: of the shape of ``x``, or None.
        gate: of the shape of ``x``, or None.
        applied: gain and bias.
        y: ``(..., D)``, for the result.
        summed: ``(..., D)``, for the sum with the residual; None without one.
        rstd: ``(..., 1)``, for the scale of each row, or None.
        mean: ``(..., 1)``, for the mean of each row, or None.
    """
    compute = compute_dtype(x)
    square, value, activated, total = scratch(x.shape, compute)[:4]
    row = x
    if residual is not None:
        assert summed is not None
        add(x, residual, summed, value, square)
        row = summed
    if formula.gate_position != "none":
        assert gate is not None
        activate(formula, gate, activated, square)
    if formula.gate_position == "before":
        value.copy_(row)
        row = torch.mul(value, activated, out=value)
    elif row.dtype != compute:
        row = value.copy_(row)
    if formula.kind == "layer":
        sum_rows(row, total)
        total.div_(scalar(x.size(-1), compute))
        if mean is not None:
            mean.copy_(total)
        row = torch.sub(row, total, out=value)
    _find_scale(formula, row, square, total)
    if rstd is not None:
        rstd.copy_(total)
    _round(total, formula.scale_dtype, total)
    _finish(formula, torch.mul(row, total, out=value), y, applied, activated)


def quantize(y: Tensor, values: Tensor, scales: Tensor) -> None:
    """Quantize a block as `reference.quantized` does.

    Args:
        y: ``(R, N)``, float32 numbers of the output's dtype; overwritten.
        values: ``(R, N)``, for the quantized values.
        scales: ``(R, 1)`` float32, for the scales.
    """
    most = QUANTIZED_MAXIMUM[values.dtype]
    largest = torch.maximum(y.amax(-1, keepdim=True), y.amin(-1, keepdim=True).neg_())
    torch.div(largest, most, out=scales)
    y.div_(scales).nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0).clamp_(-most, most)
    values.copy_(y.round_() if values.dtype == torch.int8 else y)


def add(x: Tensor, residual: Tensor, summed: Tensor, one: Tensor, other: Tensor) -> None:
    """Add in float32 and round to the dtype of ``summed``; ``one`` and ``other`` are scratch space."""
    if x.dtype == residual.dtype == summed.dtype:
        torch.add(x, residual, out=summed)
    else:
        summed.copy_(one.copy_(x).add_(other.copy_(residual)))


@functools.lru_cache(maxsize=256)
def scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Give a number as a tensor: torch makes one of each number anew, which takes longer than the sum of a row."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype, device="cpu")


def _find_scale(formula: Formula, row: Tensor, square: Tensor, total: Tensor) -> None:
    counted = formula.partial or row.size(-1)
    if formula.partial:
        row, square = row[..., :counted], square[..., :counted]
    torch.mul(row, row, out=square)
    sum_rows(square, total)
    width = scalar(counted if formula.reduction == "mean" else 1.0, total.dtype)
    eps = scalar(formula.eps, total.dtype)
    if formula.eps_position == "inside":
        # eps + sum / width in one call, with the roundings of mean and +.
        torch.addcdiv(eps, total, width, out=total)
        total.rsqrt_()
        return
    total.div_(width).sqrt_()
    if formula.eps_position == "outside":
        total.add_(eps)
    else:
        total.clamp_min_(formula.eps)
    total.reciprocal_()


def activate(formula: Formula, gate: Tensor, activated: Tensor, scratch: Tensor, slope: Tensor | None = None) -> None:
    """Write the activation of a gate and, where asked for, its derivative; ``scratch`` is of their shape too."""
    # The same function forward and backward: what is centred by a saved mean must be what the mean was taken of. And
    # neither torch.sigmoid nor silu, which treat the last elements of a thread's share otherwise than the rest, so
    # that a row's result would depend on the rows beside it.
    scratch.copy_(gate)
    torch.neg(scratch, out=activated).exp_().add_(1)
    if formula.activation == "sigmoid":
        activated.reciprocal_()
        if slope is not None:
            torch.neg(activated, out=slope).add_(1).mul_(activated)
        return
    if slope is not None:
        torch.reciprocal(activated, out=slope)
    torch.div(scratch, activated, out=activated)
    if slope is not None:
        # s * (1 + gate * (1 - s)) = s + activated * (1 - s).
        slope.add_(torch.neg(slope, out=scratch).add_(1).mul_(activated))


def _finish(formula: Formula, value: Tensor, y: Tensor, applied: Parameters, activated: Tensor) -> None:
    """Round, apply gain, bias and gate, round: from ``value``, which is overwritten, to ``y``."""
    gain, shift, narrow = applied
    dtype, wide = y.dtype, value.dtype
    if narrow:
        if dtype == wide and gain is not None:
            torch.mul(value, gain, out=y)
        else:
            y.copy_(value)
            if gain is not None:
                y.mul_(gain)
        if shift is not None:
            y.add_(shift)
        return
    gated = formula.gate_position == "after"
    _round(value, formula.round_dtype, y)
    if gain is not None:
        value.mul_(gain)
        if shift is not None or gated or formula.product_dtype != dtype:
            _round(value, formula.product_dtype, y)
    if shift is not None:
        value.add_(shift)
    if gated:
        value.mul_(activated)
    y.copy_(value)


def _round(value: Tensor, dtype: torch.dtype | None, room: Tensor) -> None:
    """Round in place; ``room`` is of the shape of ``value`` and may be written to."""
    if dtype is None or dtype == value.dtype:
        return
    value.copy_(room.copy_(value) if room.dtype == dtype else value.to(dtype))


def sum_rows(rows: Tensor, total: Tensor) -> None:
    """Add up each row in the order of torch's sum, the same for a row alone as for one among others."""
    width = rows.size(-1)
    if width >= SERIAL and total.numel() == 1:
        # Twice the same row: a sum with two results is not split over threads, and so is the same as among other rows.
        total.copy_(rows.reshape(1, width).expand(2, width).sum(-1, True)[:1].view(total.shape))
    else:
        torch.sum(rows, -1, True, out=total)


def scratch(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Give this thread's scratch space, undefined: the fourth has one number for each row, the others the shape."""
    views: dict[object, tuple[Tensor, ...]] | None = getattr(_local, "views", None)
    if views is None:
        views = _local.views = {}
        _local.space = {}
    found = views.get((shape, dtype))
    if found is not None:
        return found  # type: ignore[return-value]
    size = shape.numel()
    space = _local.space.get(dtype)
    if space is None or space.size(1) < size:
        # Space born in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            space = torch.empty((_BUFFERS + 1, max(size, SERIAL)), dtype=dtype, device="cpu")
        in_large_pages(space)
        if size <= BLOCK:
            _local.space[dtype] = space
            views.clear()
    with torch.inference_mode(False):
        buffers = [buffer[:size].view(shape) for buffer in space[:_BUFFERS]]
        totals = space[_BUFFERS, : size // shape[-1]].view(*shape[:-1], 1)
        found = (*buffers[:3], totals, *buffers[3:])
    if size <= BLOCK:
        if len(views) >= _KEPT_VIEWS:
            views.clear()
        views[shape, dtype] = found
    return found  # type: ignore[return-value]
