"""Gradients of the norms by their closed formula, in plain torch: the check of the kernels and the second derivative.

Roundings count as the identity; but for that of the scale, by which the gradient is multiplied as the row was.
Arithmetic is float32, or float64 for a float64 input. Differentiable in its turn.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from .formula import Formula


class Gradients(NamedTuple):
    """Gradients of one norm, each in the dtype of its own tensor; None where there is none.

    Attributes:
        row: of the row that is normalised: of ``x``, and of the residual and ``x`` alike where they are summed.
        gate: of the gate.
        weight: of the gain.
        bias: of the bias.
    """

    row: Tensor
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None


def closed_form(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
) -> Gradients:
    """Differentiate a norm.

    With ``p = n * (weight + offset) + bias``, ``d = grad * (weight + offset)`` (times the activation of a gate after
    the norm) and ``c = 1 / D`` (``1 / partial`` or 1 for other moments)::

        dv = scale * (d - mean(d) [layer] - k * c * n * sum(d * n) [the first ``partial`` elements])

    where ``k`` is 1 for eps inside the root, ``1 / (1 - scale * eps)`` outside it, and 1 or 0 where a clamp lets
    through or not. With a scale that is rounded, its own derivative is that of the scale before::

        dv = rounded * (d - n * (scale / rounded)**3 * k * c * sum(d * n) [...]) with n = v * rounded

    Args:
        formula: what the forward computed.
        grad: ``(..., N)``, gradient of the result.
        grad_sum: ``(..., N)``, gradient of the sum with the residual, or None.
        row: ``(..., N)``, ``x`` or the sum with the residual.
        gate: ``(..., N)`` or None.
        weight: ``(N,)`` or ``(H, D)``, or None.
        bias_dtype: dtype of the bias; None where there is none.

    Returns:
        The gradients.
    """
    # A float64 input may have a narrower sum; its result's gradient is float64.
    compute = torch.float64 if torch.float64 in (row.dtype, grad.dtype) else torch.float32
    wide, dy = row.to(compute), grad.to(compute)
    activated, slope = (None, None) if gate is None else _activation(formula, gate.to(compute))
    before = formula.gate_position == "before"
    v = (wide * activated if before and activated is not None else wide).unflatten(-1, (formula.groups, -1))
    if formula.kind == "layer":
        v = v - v.mean(-1, keepdim=True)
    counted = v[..., : formula.partial or None]
    share = 1.0 if formula.reduction == "sum" else 1.0 / max(counted.size(-1), 1)
    moment = counted.pow(2).sum(-1, keepdim=True) * share
    scale, through = _scale(formula, moment)
    if formula.scale_dtype is not None:
        rounded = scale + (scale.to(formula.scale_dtype).to(compute) - scale).detach()
        through = through * passing(scale, rounded)
        scale = rounded
    normal = v * scale

    flat = normal.flatten(-2)
    gain = None if weight is None else weight.to(compute) + formula.offset
    dgate = None
    if gate is not None and not before:
        assert slope is not None and activated is not None
        dgate = dy * (flat if gain is None else flat * gain) * slope
        dy = dy * activated
    shape = row.shape[-1:] if weight is None else weight.shape
    db = None if bias_dtype is None else dy.reshape(-1, *shape).sum(0).to(bias_dtype)
    dw = None if weight is None else (dy * flat).reshape(-1, *shape).sum(0).to(weight.dtype)
    d = (dy if gain is None else dy * gain).unflatten(-1, (formula.groups, -1))

    along = through * share * (d * normal).sum(-1, keepdim=True)
    centred = d - d.mean(-1, keepdim=True) if formula.kind == "layer" else d
    if formula.partial:
        inside = torch.arange(v.size(-1), device=v.device) < formula.partial
        along = torch.where(inside, along, 0.0)
    dv = (scale * (centred - normal * along)).flatten(-2)
    if before and gate is not None:
        assert slope is not None and activated is not None
        dgate = dv * wide * slope
        dv = dv * activated
    if grad_sum is not None:
        dv = dv + grad_sum.to(compute)
    return Gradients(dv.to(row.dtype), None if gate is None or dgate is None else dgate.to(gate.dtype), dw, db)


def passing(scale: Tensor, rounded: Tensor) -> Tensor:
    """Return how much of the moment's own gradient passes through a scale that was rounded; 0 of one rounded to 0."""
    return torch.where(rounded > 0, scale / rounded, 0.0).pow(3)


def _scale(formula: Formula, moment: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scale of each row, and how much of the moment's own gradient passes through it."""
    if formula.eps_position == "inside":
        return torch.rsqrt(moment + formula.eps), torch.ones_like(moment)
    root = torch.sqrt(moment)
    if formula.eps_position == "outside":
        scale = 1 / (root + formula.eps)
        # The root has no slope at 0; there the row counts as constant.
        return scale, torch.where(root > 0, 1 / (root * scale).clamp_min(torch.finfo(root.dtype).tiny), 0.0)
    return 1 / root.clamp_min(formula.eps), (root > formula.eps).to(root.dtype)


def _activation(formula: Formula, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Return the activation of the gate and its derivative."""
    sigmoid = torch.sigmoid(gate)
    if formula.activation == "sigmoid":
        return sigmoid, sigmoid * (1 - sigmoid)
    return gate * sigmoid, sigmoid * (1 + gate * (1 - sigmoid))
