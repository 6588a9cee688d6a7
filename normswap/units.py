"""Distances in units in the last place, and the bound that a swapped norm must keep."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from normswap.spec import Rounding

__all__ = ["UnitBound", "ulp_distance", "unit_bound"]


@dataclass(frozen=True)
class UnitBound:
    """How far a swapped norm's result may lie from the original's.

    Attributes:
        max_ulp: greatest distance of one element, in units in the last place.
        identical: least fraction of elements that are bit-identical; 0.0 where nothing is asked.
    """

    max_ulp: float
    identical: float


def unit_bound(where: Rounding) -> UnitBound:
    """Return the unit bound for a norm that rounds there: one unit, two where it rounds twice.

    In bfloat16 at least 99.99% of the elements are bit-identical, in float16 99.9%.
    """
    identical = {torch.bfloat16: 0.9999, torch.float16: 0.999}.get(where.unit, 0.0)
    return UnitBound(2.0 if where.twice else 1.0, identical)


def ulp_distance(
    a: torch.Tensor, b: torch.Tensor, at: torch.Tensor | None = None, *, unit: torch.dtype | None = None
) -> torch.Tensor:
    """Return ``|a - b|`` in units in the last place.

    The unit is the spacing of the numbers of `unit` at ``max(|a|, |b|, |at|)``, never below that at its smallest
    normal number. `at` names the largest operand of a final addition: where ``n * g`` and ``b`` cancel, the
    rounding of the operands, not of the small difference, is the unit of the result.

    Args:
        a: ``(...)``, a floating dtype.
        b: ``(...)``, the same dtype.
        at: broadcastable to ``(...)``, or None.
        unit: the dtype whose unit is meant; that of `a` and `b` by default. A result stored wider than it was
            rounded on its way is measured in the narrower unit.

    Returns:
        ``(...)`` float64. Equal values, equal infinities and NaN beside NaN are 0; any other pair with a NaN or
        an infinity is infinite.

    Raises:
        TypeError: the dtypes differ.
    """
    if a.dtype != b.dtype:
        raise TypeError(f"expected two tensors of one dtype, got {a.dtype} and {b.dtype}")
    info = torch.finfo(unit or a.dtype)
    x, y = a.double(), b.double()
    scale = torch.maximum(x.abs(), y.abs())
    if at is not None:
        scale = torch.maximum(scale, at.double().abs())
    scale = scale.clamp(min=info.tiny, max=info.max)
    spacing = torch.exp2(torch.floor(torch.log2(scale))) * info.eps
    same = (x == y) | (x.isnan() & y.isnan())
    distance = (x - y).abs() / spacing
    distance = torch.where(distance.isfinite(), distance, torch.full_like(distance, torch.inf))
    return torch.where(same, torch.zeros_like(distance), distance)
