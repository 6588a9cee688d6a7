"""Say in words how one stored tensor differs from the original's."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from normswap.gaps import Gap
from normswap.narrowing import round_once

__all__ = ["SHORT", "Rows", "cast_of", "centred", "describe", "narrowed", "nonfinite", "percent", "scaled"]

SHORT = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2"}
"""How dtypes are called in a summary."""

_HALVES = (torch.bfloat16, torch.float16)
# Values of one row at a time, whatever its length, are centred in float64; a mean this small is none.
_NO_MEAN = 1e-3

Rows = Callable[[], Iterator[tuple[int, torch.Tensor, torch.Tensor]]]
"""Yields the number of the first row, rows of the original, and the same rows of the checkpoint under test."""


def cast_of(rows: Rows) -> Gap:
    """Hold a tensor against the original's, rounded once to its dtype, or as torch casts it, whichever is nearer."""
    once, chained = Gap(allowed=0), Gap(allowed=0)
    for start, one, other in rows():
        once.add(one.double() if one.dtype == torch.float64 else one, other, start)
        if one.dtype == torch.float64:
            chained.add(one.to(other.dtype), other, start)
    return chained if chained.values and chained.off < once.off else once


def narrowed(rows: Rows) -> torch.dtype | None:
    """Return the dtype that the original's values were rounded to, where they are stored in a wider one again."""
    left = list(_HALVES)
    for _, one, other in rows():
        left = [dtype for dtype in left if torch.equal(round_once(one, dtype).to(other.dtype), other)]
        if not left:
            return None
    return left[0]


def nonfinite(rows: Rows) -> int:
    """Count the NaN and infinities that the original lacks."""
    return sum(int((_bad(other) & ~_bad(one)).sum()) for _, one, other in rows())


def centred(rows: Rows) -> str | None:
    """Say along what a matrix was centred, ``"rows"`` or ``"columns"``; None where it was not.

    Every value has to be the original's less the mean of its row (or column), but for three roundings to the stored
    dtype.
    """
    return next((word for axis, word in ((-1, "rows"), (0, "columns")) if _is_centred(rows, axis)), None)


def _is_centred(rows: Rows, axis: int) -> bool:
    means = None if axis else _column_means(rows)
    moved = size = 0.0
    for _, one, other in rows():
        if one.dim() != 2 or one.shape[axis] < 2:
            return False
        wide = one.double()
        mean = wide.mean(-1, keepdim=True) if means is None else means
        eps = torch.finfo(other.dtype).eps
        room = eps * (wide.abs() + 2 * mean.abs()) + torch.finfo(other.dtype).smallest_normal * eps
        # `not within` would let NaN pass.
        if not bool(((other.double() - (wide - mean)).abs() <= room).all()):
            return False
        moved, size = (
            moved + float(mean.square().sum()) * (wide.numel() / mean.numel()),
            size + float(wide.square().sum()),
        )
    return moved > _NO_MEAN**2 * size


def _column_means(rows: Rows) -> torch.Tensor:
    total, count = torch.zeros((), dtype=torch.float64), 0
    for _, one, _other in rows():
        total, count = total + one.double().sum(0, keepdim=True), count + len(one)
    return total / max(1, count)


def scaled(rows: Rows) -> float | None:
    """Return the one number that the original was multiplied by; None where that is not what was done."""
    product = square = 0.0
    for _, one, other in rows():
        product += float((one.double() * other.double()).sum())
        square += float(one.double().square().sum())
    if not square or not product:
        return None
    factor = product / square
    gap = Gap(allowed=2)
    for start, one, other in rows():
        gap.add(one.double() * factor, other, start)
        if not gap.within:
            return None
    return factor


def describe(gap: Gap, kind: str) -> str:
    """Say how many values differ, where, and by how much.

    Args:
        gap: what was found; its values beyond the allowed units are told.
        kind: ``"channel"`` for what a position of a tensor with one axis is.
    """
    told = f"in {gap.beyond} of {gap.values} values"
    names = [kind] if len(gap.spans) == 1 else ["row", *(["column"] if len(gap.spans) == 2 else [])]
    for name, (first, last), axis in zip(names, gap.spans, range(len(gap.spans)), strict=False):
        if first == last and (axis or len(gap.spans) == 1 or gap.beyond > 1 or len(names) > 1):
            told += f", {'all in ' if gap.beyond > 1 and len(gap.spans) > 1 else ''}{name} {first}"
    if gap.worst and gap.worst != float("inf"):
        told += f", by {'up to ' if gap.beyond > 1 else ''}{percent(gap.worst)}"
    return told


def percent(ratio: float) -> str:
    """Write a relative difference.

    Example:
        >>> percent(0.0201), percent(3.2), percent(0.00004)
        ('2%', '320%', '0.004%')
    """
    return f"{100 * ratio:.0f}%" if ratio >= 0.995 else f"{100 * ratio:.2g}%"


def _bad(values: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(values.float() if values.itemsize == 1 else values)
