"""The oracle: what the norms compute, in plain torch, with no regard to speed or memory.

`exact` is the truth in float64 that errors are measured from, differentiable. `rounded` is the same formula in
float32 with the roundings that the operations promise; it is what a right implementation equals but for the order
of its sums and the last digit of an exponential. `quantized` does the same for the quantizing operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .formula import QUANTIZED_MAXIMUM, Formula


def exact(
    formula: Formula,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the norm in float64 with no rounding on the way but that of the residual sum.

    The sum is an output and the row that is normalised, so its rounding is part of the function; it counts as the
    identity in the gradient.

    Args:
        formula: what to compute.
        x: ``(..., N)``, or ``(..., H, D)`` beside a weight of two dimensions.
        weight: ``(N,)`` or ``(H, D)``, or None.
        bias: of the shape of a weight, or None.
        residual: of the shape of ``x``, or None.
        gate: of the shape of ``x``, or None.

    Returns:
        The result and the sum with the residual (``x`` itself without one), both float64 of the shape of ``x``.
    """
    summed = x.double()
    if residual is not None:
        total = summed + residual.double()
        # Added in float32 as the implementations do, and passed on straight to the gradient.
        once = (total if x.dtype == torch.float64 else x.float() + residual.float()).to(formula.sum_dtype)
        summed = total + (once.double() - total).detach()
    return _apply(formula, summed, weight, bias, gate, torch.float64, rounding=False), summed


def rounded(
    formula: Formula,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    gate: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the norm in float32 and round where the operations say that they round.

    Args:
        formula: as in `exact`.
        x: as in `exact`, float32 or narrower.
        weight: as in `exact`.
        bias: as in `exact`.
        residual: as in `exact`.
        gate: as in `exact`.

    Returns:
        The result in ``formula.out_dtype`` and the sum in ``formula.sum_dtype`` (``x`` itself without a residual).
    """
    summed = x if residual is None else (x.float() + residual.float()).to(formula.sum_dtype)
    result = _apply(formula, summed.float(), weight, bias, gate, torch.float32, rounding=True)
    return result.to(formula.out_dtype), summed


def quantized(y: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize each row so that its largest magnitude becomes that of the dtype.

    ``scale = max|y| / maximum`` in float32 and ``q = y / scale``, rounded to nearest even; a row of zeros has scale 0
    and values 0. A row with a NaN or an infinity has the scale NaN or infinity, so that ``q * scale`` is not finite.

    Args:
        y: ``(..., N)``, a norm's result in the dtype that the unfused norm gives.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Returns:
        Values ``(..., N)`` of ``dtype`` and scales ``(..., 1)`` in float32.
    """
    y = y.float()
    scale = y.abs().amax(-1, keepdim=True) / QUANTIZED_MAXIMUM[dtype]
    # 0 / 0 and inf / inf are NaN, and stand for no number; a scale that is denormal is coarse.
    q = torch.nan_to_num(y / scale, nan=0.0, posinf=0.0, neginf=0.0)
    q = q.clamp(-QUANTIZED_MAXIMUM[dtype], QUANTIZED_MAXIMUM[dtype])
    if dtype == torch.int8:
        q = q.round()
    return q.to(dtype), scale


def _apply(
    formula: Formula,
    summed: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    gate: Tensor | None,
    compute: torch.dtype,
    rounding: bool,
) -> Tensor:
    def rounded_to(value: Tensor, dtype: torch.dtype | None) -> Tensor:
        return value if dtype is None or not rounding else value.to(dtype).to(compute)

    activated = None if gate is None else _activate(formula, gate.to(compute))
    v = summed
    if formula.gate_position == "before" and activated is not None:
        v = v * activated
    v, scale = _centre_and_scale(formula, v.unflatten(-1, (formula.groups, -1)))
    y = rounded_to((v * rounded_to(scale, formula.scale_dtype)).flatten(-2), formula.round_dtype)
    if weight is not None:
        y = rounded_to(y * (weight.to(compute) + formula.offset), formula.product_dtype)
    if bias is not None:
        y = y + bias.to(compute)
    if formula.gate_position == "after" and activated is not None:
        y = y * activated
    return y


def _centre_and_scale(formula: Formula, v: Tensor) -> tuple[Tensor, Tensor]:
    if formula.kind == "layer":
        v = v - v.mean(-1, keepdim=True)
    squares = v[..., : formula.partial or None].pow(2)
    moment = squares.mean(-1, keepdim=True) if formula.reduction == "mean" else squares.sum(-1, keepdim=True)
    if formula.eps_position == "inside":
        return v, 1 / torch.sqrt(moment + formula.eps)
    if formula.eps_position == "outside":
        return v, 1 / (torch.sqrt(moment) + formula.eps)
    return v, 1 / torch.sqrt(moment).clamp_min(formula.eps)


def _activate(formula: Formula, gate: Tensor) -> Tensor:
    return gate * torch.sigmoid(gate) if formula.activation == "silu" else torch.sigmoid(gate)
