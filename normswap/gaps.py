"""How far stored values lie from those that are expected, in units of their last place, while they pass by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from normswap.narrowing import round_once

__all__ = ["Gap", "unit_distance"]

_WHOLE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_LARGEST = torch.iinfo(torch.int64).max


def unit_distance(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Count the numbers of a dtype that lie between two values, the second one included.

    Zeros of either sign are one apart. A NaN lies beyond infinity, and far from every number.

    Args:
        one: any floating-point dtype and shape.
        other: the same.

    Returns:
        int64, of the same shape.

    Example:
        >>> unit_distance(torch.tensor([1.0, 1.0]), torch.tensor([1.0, 1.0 + 2**-22])).tolist()
        [0, 2]
    """
    kind = _WHOLE[one.itemsize]
    end = torch.iinfo(kind).max
    places = []
    for values in (one, other):
        bits = values.contiguous().view(kind).to(torch.int64)
        places.append(torch.where(bits < 0, bits ^ end, bits))
    gap = (places[0] - places[1]).abs_()
    return gap.masked_fill_(gap < 0, _LARGEST)


def _other_signs(gap: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Find where two values are zeros of both signs."""
    found = gap == 1
    # In float32 the smallest numbers of float64 would be zeros as well.
    return found & (one.double() == 0) & (other.double() == 0) if bool(found.any()) else found


@dataclass
class Gap:
    """What was found of one tensor.

    Attributes:
        values: numbers that were compared.
        off: how many have other values than the expected ones, rounded once.
        signs: how many zeros have the other sign, which are not `off`: no sum of products tells them apart.
        units: the largest distance of these, in units in the last place.
        beyond: how many are further off than `allowed`.
        allowed: units that another order of roundings explains.
        worst: the largest relative difference of those that are beyond.
        spans: for each axis the first and the last position of those that are beyond.
    """

    allowed: int = 1
    values: int = 0
    off: int = 0
    signs: int = 0
    units: int = 0
    beyond: int = 0
    worst: float = 0.0
    spans: list[tuple[int, int]] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    _error: float = 0.0
    _size: float = 0.0

    def add(
        self, expected: torch.Tensor, got: torch.Tensor, start: int, slack: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Take some rows in.

        Args:
            expected: unrounded or of the stored dtype.
            got: as stored, of the same shape.
            start: number of the first row.
            slack: how far a value may lie from the expected one, however many units that is.

        Returns:
            The difference, float64 or float32, of the same shape.
        """
        exact = expected if expected.dtype in (torch.float32, torch.float64) else expected.float()
        difference = got.to(exact.dtype) - exact
        self.values += got.numel()
        self.shape = tuple(got.shape[1:])
        self._error += float(torch.linalg.vector_norm(difference)) ** 2 if got.numel() else 0.0
        self._size += float(torch.linalg.vector_norm(exact)) ** 2 if got.numel() else 0.0
        rounded = expected if expected.dtype == got.dtype else round_once(expected, got.dtype)
        if torch.equal(rounded.contiguous().view(torch.uint8), got.contiguous().view(torch.uint8)):
            return difference
        gap = unit_distance(rounded, got)
        signs = _other_signs(gap, rounded, got)
        self.signs += int(signs.sum())
        gap = gap.masked_fill_(signs, 0)
        self.off += int((gap != 0).sum())
        self.units = max(self.units, int(gap.max()))
        far = gap > self.allowed
        if slack is not None:
            far &= ~(difference.abs() <= slack)
        if count := int(far.sum()):
            self.beyond += count
            self._see(far, difference, exact, start)
        return difference

    @property
    def error(self) -> float:
        """Relative root mean square distance from the expected values, before their rounding."""
        if not self._size:
            return 0.0 if not self._error else math.inf
        return math.sqrt(self._error / self._size)

    @property
    def exact(self) -> bool:
        """Whether every value is the expected one, rounded once; a zero may have either sign."""
        return self.off == 0

    @property
    def within(self) -> bool:
        """Whether every value is within `allowed` units of the expected one, or within its slack."""
        return self.beyond == 0

    def _see(self, far: torch.Tensor, difference: torch.Tensor, exact: torch.Tensor, start: int) -> None:
        ratio = (difference[far] / exact[far]).abs().nan_to_num(nan=math.inf, posinf=math.inf)
        self.worst = max(self.worst, float(ratio.max()))
        spans = []
        for axis in range(far.dim()):
            others = tuple(dim for dim in range(far.dim()) if dim != axis)
            places = (far.any(dim=others) if others else far).nonzero()
            first = start if axis == 0 else 0
            spans.append((first + int(places[0]), first + int(places[-1])))
        self.spans = [
            (min(old[0], new[0]), max(old[1], new[1])) for old, new in zip(self.spans or spans, spans, strict=True)
        ]
