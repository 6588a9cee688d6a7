"""The oracle: what the norms compute, in plain torch, with no regard to speed or memory.

`exact` is the truth in float64 that errors are measured from. `rounded` is the same formula in float32 with the
roundings that the operations promise; it is what a right implementation equals but for the order of its sums.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Kind = Literal["rms", "layer"]


def exact(
    kind: Kind,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
) -> Tensor:
    """Compute ``n * (weight + offset) + bias`` in float64 with no rounding on the way.

    ``n = x / sqrt(mean(x**2) + eps)`` (``rms``; Zhang and Sennrich 2019, arXiv:1910.07467) or
    ``n = (x - mean(x)) / sqrt(var(x) + eps)`` with the biased variance (``layer``; Ba et al. 2016,
    arXiv:1607.06450).

    Args:
        kind: ``"rms"`` or ``"layer"``.
        x: ``(..., N)``.
        weight: ``(N,)`` or None.
        bias: ``(N,)`` or None.
        eps: added under the root.
        offset: added to the weight.

    Returns:
        ``(..., N)`` float64; differentiable.
    """
    y = _normalise(kind, x.double(), eps)
    if weight is not None:
        y = y * (weight.double() + offset)
    return y if bias is None else y + bias.double()


def rounded(
    kind: Kind,
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute the norm in float32 and round where the operations say that they round.

    Args:
        kind: ``"rms"`` or ``"layer"``.
        x: ``(..., N)``, float32 or narrower.
        weight: ``(N,)`` or None.
        bias: ``(N,)`` or None.
        eps: added under the root.
        offset: added to the weight, in float32.
        round_dtype: dtype that the normalised row is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``x``.

    Returns:
        ``(..., N)`` in ``out_dtype``.
    """
    out_dtype = out_dtype or x.dtype
    y = _normalise(kind, x.float(), eps)
    if round_dtype is not None:
        y = y.to(round_dtype).float()
    if weight is not None:
        y = y * (weight.float() + offset)
        if round_dtype is not None:
            y = y.to(out_dtype).float()
    if bias is not None:
        y = y + bias.float()
    return y.to(out_dtype)


def _normalise(kind: Kind, x: Tensor, eps: float) -> Tensor:
    if kind == "layer":
        x = x - x.mean(-1, keepdim=True)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
