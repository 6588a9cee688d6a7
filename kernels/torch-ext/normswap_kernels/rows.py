"""Rows of tensors of any strides as ``(R, G, D)``, copying nothing where torch's strides allow it.

``G`` is the number of rows that have gains of their own side by side: the groups of a grouped norm, the heads of a
gain of two dimensions, else 1. ``D`` is the length of a row, and ``R`` the number of everything before.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rows(NamedTuple):
    """How the tensors of one call are viewed.

    Attributes:
        shape: ``(R, G, D)``.
        order: permutation of the dimensions before viewing, or None; the same for all tensors of the call.
        per_head: whether ``G`` is the second to last dimension, not a part of the last one.
    """

    shape: tuple[int, int, int]
    order: list[int] | None
    per_head: bool

    def view(self, t: Tensor) -> Tensor:
        """View ``(..., N)`` as ``(R, G, D)``; a copy only where its rows cannot be addressed by three strides."""
        if self.order is not None:
            t = t.permute(self.order)
        return t.reshape(self.shape)

    def view_statistics(self, t: Tensor) -> Tensor:
        """View ``(..., groups)`` as ``(R, G)``; a copy only where it was allocated for other rows."""
        if self.order is not None:
            t = t.permute(self.order)
        return t.reshape(self.shape[:2])


def find_rows(x: Tensor, groups: int, per_head: bool, order: list[int] | None = None) -> Rows:
    """Say how the tensors of a call are viewed.

    Args:
        x: ``(..., N)``.
        groups: rows that the last dimension is split into.
        per_head: whether the second to last dimension has gains of its own.
        order: from `row_order`, where the results keep the memory order of ``x``.
    """
    if per_head:
        heads, width = x.shape[-2:]
    else:
        heads, width = groups, x.size(-1) // groups
    row = heads * width
    # An empty row leaves the number of rows undetermined.
    return Rows((x.numel() // row if row else 0, heads, width), order, per_head)


def row_order(x: Tensor, fixed: int = 1) -> list[int] | None:
    """Find the order of the leading dimensions in which the rows of ``x`` lie one behind the other.

    Args:
        x: ``(..., N)``.
        fixed: number of last dimensions that stay in their places.

    Returns:
        A permutation of all dimensions that makes ``x`` contiguous; None where ``x`` is contiguous already or no such
        order exists.
    """
    if x.dim() < 2 + fixed or x.is_contiguous():
        return None
    leading = sorted(range(x.dim() - fixed), key=lambda d: (x.stride(d), x.size(d)), reverse=True)
    order = [*leading, *range(x.dim() - fixed, x.dim())]
    return order if x.permute(order).is_contiguous() else None


def empty_rows(x: Tensor, dtype: torch.dtype, order: list[int] | None) -> Tensor:
    """Allocate ``(..., N)`` for ``x`` in a memory order; contiguous for None.

    An elementwise torch expression keeps the memory order of a permuted tensor, and callers rely on it when they
    permute back and call ``view``.
    """
    if order is None:
        # Quicker than to name shape and device.
        return torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return _empty(x.shape, dtype, x.device, order)


def empty_statistics(x: Tensor, groups: int, order: list[int] | None) -> Tensor:
    """Allocate ``(..., groups)``, a number for each row of ``x``: float64 for a float64 input, else float32."""
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    return _empty(torch.Size((*x.shape[:-1], groups)), dtype, x.device, order)


def _empty(shape: torch.Size, dtype: torch.dtype, device: torch.device, order: list[int] | None) -> Tensor:
    if order is None:
        return torch.empty(shape, dtype=dtype, device=device)
    out = torch.empty([shape[d] for d in order], dtype=dtype, device=device)
    return out.permute([order.index(d) for d in range(len(order))])
