"""Say in words how one stored tensor differs from the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch

from normswap.gaps import Gap
from normswap.narrowing import round_once

__all__ = [
    "SHORT",
    "Rows",
    "cast_of",
    "centred",
    "describe",
    "narrowed",
    "nonfinite",
    "percent",
    "scaled",
    "told_signs",
]

SHORT = {"F64": "fp64", "F32": "fp32", "F16": "fp16", "BF16": "bf16", "F8_E4M3": "fp8 e4m3", "F8_E5M2": "fp8 e5m2"}
"""How dtypes are called in a summary."""

_HALVES = (torch.bfloat16, torch.float16)
# A mean this small, relative to the values, is none; and what may be left of what the means explain.
_NO_MEAN = 1e-3
_LEFT = 0.1
# A factor that rounding might have made of 1, in units of its dtype.
_NEAR_ONE = 4

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
    columns = None if axis else _column_means(rows)
    left = moved = size = 0.0
    for _, one, other in rows():
        if one.dim() != 2:
            return False
        wide = one.double()
        mean, magnitude = _means(wide) if columns is None else columns
        off, info = (other.double() - (wide - mean)).abs(), torch.finfo(other.dtype)
        # A mean is off by what the sum behind it was rounded to.
        room = info.eps * (wide.abs() + 2 * mean.abs() + 2 * magnitude) + info.smallest_normal * info.eps
        # `not within` would let NaN pass.
        if not bool((off <= room).all()):
            return False
        left, size = left + float(off.square().sum()), size + float(wide.square().sum())
        moved += float(mean.square().sum()) * (wide.numel() / mean.numel())
    return moved > _NO_MEAN**2 * size and left < _LEFT * moved


def _means(wide: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return wide.mean(-1, keepdim=True), wide.abs().mean(-1, keepdim=True)


def _column_means(rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    total, size, count = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64), 0
    for _, one, _other in rows():
        wide = one.double()
        total, size = total + wide.sum(0, keepdim=True), size + wide.abs().sum(0, keepdim=True)
        count += len(one) if one.dim() else 1
    return total / max(1, count), size / max(1, count)


def scaled(rows: Rows) -> float | None:
    """Return the one number that the original was multiplied by; None where that is not what was done."""
    product = square = eps = 0.0
    for _, one, other in rows():
        product += float((one.double() * other.double()).sum())
        square += float(one.double().square().sum())
        eps = torch.finfo(other.dtype).eps
    if not square or abs(product / square - 1) <= _NEAR_ONE * eps:
        return None
    factor = product / square
    gap = Gap(allowed=2)
    for start, one, other in rows():
        gap.add(one.double() * factor, other, start)
        if not gap.within:
            return None
    return factor


def told_signs(gap: Gap) -> str:
    """Say how many zeros have the other sign."""
    return f"equal but for the sign of zeros: {gap.signs} of {gap.values}"


def describe(gap: Gap) -> str:
    """Say how many values of a tensor differ, where, and by how much, from what was found of it."""
    told = [f"in {gap.beyond} of {gap.values} values"]
    dim = len(gap.spans)
    words = {1: ["channel {}"], 2: ["row {}", "column {}"]}.get(
        dim, [f"index {{}} of axis {axis}" for axis in range(dim)]
    )
    there = [word.format(first) for word, (first, last) in zip(words, gap.spans, strict=True) if first == last]
    if there and gap.beyond == 1:
        told += there
    elif there and dim > 1:
        told += [f"all in {' and '.join(there)}"]
    if gap.worst and math.isfinite(gap.worst):
        told += [f"by {'up to ' if gap.beyond > 1 else ''}{percent(gap.worst)}"]
    return ", ".join(told)


def percent(ratio: float) -> str:
    """Write a relative difference.

    Example:
        >>> percent(0.0201), percent(3.2), percent(0.00004), percent(96.3)
        ('2%', '320%', '0.004%', '96 times')
    """
    if ratio >= 10:
        return f"{ratio:.0f} times"
    return f"{100 * ratio:.0f}%" if ratio >= 0.995 else f"{100 * ratio:.2g}%"


def _bad(values: torch.Tensor) -> torch.Tensor:
    return ~torch.isfinite(values.float() if values.itemsize == 1 else values)
