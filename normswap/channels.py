"""Norms over channels where they lie, on a CPU: bringing each row together would cost two copies more than it saves."""

from __future__ import annotations

import torch
from torch import Tensor

from normswap.spec import NormSpec

__all__ = ["norm_in_place", "takes"]


def takes(spec: NormSpec, x: Tensor, *parameters: Tensor | None) -> bool:
    """Return whether `norm_in_place` is for such a call: dense float32 on a CPU, with no gradient to be recorded.

    A norm whose original works on permuted views copies its input as ours does, and has no use for it.
    """
    return (
        spec.axis == "channels"
        and spec.dense
        and (spec.groups, spec.partial, spec.gain_position) == (1, None, "after")
        and x.is_cpu
        and x.is_contiguous()
        and all(t is None or t.dtype == torch.float32 for t in (x, *parameters))
        and not (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, *parameters)))
        and not torch.compiler.is_compiling()
    )


def norm_in_place(spec: NormSpec, x: Tensor, gain: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute a norm of dimension 1 in as few passes over memory as torch's primitives take, and one new tensor.

    Args:
        spec: what is computed.
        x: ``(N, C, ...)``, contiguous, float32, on the CPU.
        gain: effective gain ``(C,)`` or ``(1,)``, float32; or None.
        bias: likewise.

    Returns:
        ``(N, C, ...)``, contiguous, float32.
    """
    shape = (1, -1, *(1,) * (x.dim() - 2))
    row = x - x.mean(1, keepdim=True) if spec.kind == "layer" else x
    y = row * row
    moment = y.sum(1, keepdim=True) if spec.reduction == "sum" else y.mean(1, keepdim=True)
    if spec.eps_position == "inside":
        scale = torch.rsqrt(moment + spec.eps)
    elif spec.eps_position == "outside":
        scale = (moment.sqrt() + spec.eps).reciprocal()
    else:
        scale = moment.sqrt().clamp_min(spec.eps).reciprocal()
    torch.mul(row, scale, out=y)
    if gain is not None:
        y.mul_(gain.view(shape))
    if bias is not None:
        y.add_(bias.view(shape))
    return y
