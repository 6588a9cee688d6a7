"""Rows of a tensor of any strides as a matrix, copying nothing where torch's strides allow it."""

from __future__ import annotations

import torch
from torch import Tensor


def row_order(x: Tensor) -> list[int] | None:
    """Find the order of the leading dimensions in which the rows of ``x`` lie one behind the other.

    Args:
        x: ``(..., N)``.

    Returns:
        A permutation of all dimensions, the last one in its place, that makes ``x`` contiguous; None where ``x``
        is contiguous already or no such order exists.
    """
    if x.dim() < 3 or x.is_contiguous():
        return None
    leading = sorted(range(x.dim() - 1), key=lambda d: (x.stride(d), x.size(d)), reverse=True)
    order = [*leading, x.dim() - 1]
    return order if x.permute(order).is_contiguous() else None


def empty_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Allocate a result for ``x``: its memory order where its rows lie densely, contiguous otherwise.

    An elementwise torch expression keeps the memory order of a permuted tensor, and callers rely on it when they
    permute back and call ``view``.
    """
    order = row_order(x)
    if order is None:
        return torch.empty(x.shape, dtype=dtype, device=x.device)
    out = torch.empty([x.size(d) for d in order], dtype=dtype, device=x.device)
    return out.permute([order.index(d) for d in range(x.dim())])


def as_matrix(x: Tensor, out: Tensor) -> tuple[Tensor, Tensor]:
    """View ``x`` and its result as matrices with the same order of rows.

    Args:
        x: ``(..., N)``; copied only where its rows cannot be addressed by one stride.
        out: ``(..., N)`` from `empty_rows`, or contiguous.

    Returns:
        ``x`` as ``(R, N)`` and ``out`` as ``(R, N)``, the latter always a view.
    """
    if x.dim() == 2:
        return x, out
    order = None if out.is_contiguous() else row_order(out)
    if order is not None:
        x, out = x.permute(order), out.permute(order)
    # N = 0 leaves the number of rows undetermined for -1.
    shape = (x[..., 0].numel() if x.size(-1) else 0, x.size(-1))
    return x.reshape(shape), out.view(shape)
