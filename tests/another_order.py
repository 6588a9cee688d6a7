"""A right implementation that sums in another order, as a GPU does: what false alarms are measured with."""

from __future__ import annotations

import torch


def _finish(
    n: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    n = n.float() if round_dtype is None else n.float().to(round_dtype).float()
    if weight is not None:
        n = n * (weight.float() + offset)
        n = n if round_dtype is None else n.to(out_dtype).float()
    return (n if bias is None else n + bias.float()).to(out_dtype)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """RMSNorm with statistics summed in float64."""
    wide = x.double()
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return _finish(n, weight, bias, offset, round_dtype, out_dtype or x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> torch.Tensor:
    """LayerNorm with statistics summed in float64."""
    wide = x.double()
    wide = wide - wide.mean(-1, keepdim=True)
    n = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return _finish(n, weight, bias, offset, round_dtype, out_dtype or x.dtype)
