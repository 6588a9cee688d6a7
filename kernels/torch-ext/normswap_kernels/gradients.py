"""Gradients of the norms by their closed formulas, in plain torch.

Roundings count as the identity. Arithmetic is float32, or float64 for a float64 input. The sums over rows run in a
fixed order, so the gradients of gain and bias are deterministic.
"""

from __future__ import annotations

import torch
from torch import Tensor

Gradients = tuple[Tensor, Tensor | None, Tensor | None]


def rms_norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    offset: float,
) -> Gradients:
    """Differentiate ``n * (weight + offset) + bias`` with ``n = x * r``, ``r = rsqrt(mean(x**2) + eps)``.

    With ``d = grad * (weight + offset)``: ``dx = r * (d - n * mean(d * n))``.

    Args:
        grad: ``(..., N)``, gradient of the result.
        x: ``(..., N)``.
        weight: ``(N,)`` or None.
        bias_dtype: dtype of the bias; None where there is none.
        eps: as in the forward.
        offset: as in the forward.

    Returns:
        Gradients of x, weight and bias, each in the dtype of its own.
    """
    wide = _wide(x)
    scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    normal = wide * scale
    dn, dw, db = _parameter_gradients(grad, normal, weight, bias_dtype, offset)
    dx = scale * (dn - normal * (dn * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), dw, db


def layer_norm_gradients(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    eps: float,
    offset: float,
) -> Gradients:
    """Differentiate ``n * (weight + offset) + bias`` with ``n = (x - mean(x)) * r``, ``r = rsqrt(var(x) + eps)``.

    With ``d = grad * (weight + offset)``: ``dx = r * (d - mean(d) - n * mean(d * n))``.

    Args:
        grad: ``(..., N)``, gradient of the result.
        x: ``(..., N)``.
        weight: ``(N,)`` or None.
        bias_dtype: dtype of the bias; None where there is none.
        eps: as in the forward.
        offset: as in the forward.

    Returns:
        Gradients of x, weight and bias, each in the dtype of its own.
    """
    wide = _wide(x)
    centred = wide - wide.mean(-1, keepdim=True)
    scale = torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    normal = centred * scale
    dn, dw, db = _parameter_gradients(grad, normal, weight, bias_dtype, offset)
    dx = scale * (dn - dn.mean(-1, keepdim=True) - normal * (dn * normal).mean(-1, keepdim=True))
    return dx.to(x.dtype), dw, db


def _parameter_gradients(
    grad: Tensor, normal: Tensor, weight: Tensor | None, bias_dtype: torch.dtype | None, offset: float
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dy = grad.to(normal.dtype)
    leading = list(range(dy.dim() - 1))
    db = None if bias_dtype is None else (dy.sum(leading) if leading else dy).to(bias_dtype)
    if weight is None:
        return dy, None, db
    dw = dy * normal
    dw = (dw.sum(leading) if leading else dw).to(weight.dtype)
    return dy * (weight.to(normal.dtype) + offset), dw, db


def _wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()
