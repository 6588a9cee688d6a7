"""How the rows of one stored tensor change: some positions are multiplied, replaced or added to."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from normswap.algebra import Algebra, Columns, region_of
from normswap.exact import Fit
from normswap.factors import along
from normswap.labels import Positions
from normswap.places import cut, from_parameter
from normswap.stored import Stored

__all__ = ["Put", "Scale", "Scratch", "TensorEdit"]


class Scratch(threading.local):
    """One buffer for each dtype and thread, used again by every edit."""

    def __init__(self) -> None:
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def copy(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return a copy of some rows in a dtype, which is overwritten by the next call."""
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < rows.numel():
            buffer = self._buffers[dtype] = torch.empty(rows.numel(), dtype=dtype)
        return buffer[: rows.numel()].view(rows.shape).copy_(rows)


@dataclass
class Scale:
    """Positions of a stored tensor that are multiplied, by factors along one axis, or by one number."""

    piece: Stored
    axis: int | None
    factor: torch.Tensor
    _fit: dict[torch.dtype, Fit] = field(default_factory=dict)
    _narrow: torch.Tensor | None = None

    def fits(self, rows: torch.Tensor) -> bool:
        """Return whether float32 holds the products with these rows."""
        if rows.dtype not in self._fit:
            self._fit[rows.dtype] = Fit(self.factor, rows.dtype)
        return self._fit[rows.dtype].holds(rows)

    def apply(self, rows: torch.Tensor, start: int) -> None:
        """Change rows ``[start, start + k)`` in place; float64, or float32 where that is exact."""
        region, before = region_of(self.piece, start, rows)
        if region is None:
            return
        factor = self.factor
        if rows.dtype == torch.float32:
            if self._narrow is None:
                self._narrow = factor.float()
            factor = self._narrow
        if self.axis is not None:
            factor = factor[before : before + len(region[0])] if self.axis == 0 else factor
            factor = along(factor, self.axis, rows.dim())
        _change(rows, region, lambda part: part * factor, lambda part: part.mul_(factor))


@dataclass
class Put:
    """Positions of a stored tensor that are replaced, or added to."""

    piece: Stored
    values: Callable[[], torch.Tensor]
    add: bool = False

    def apply(self, rows: torch.Tensor, start: int) -> None:
        """Change rows ``[start, start + k)`` in place; float64, or float32 where that is exact."""
        region, before = region_of(self.piece, start, rows)
        if region is None:
            return
        values = from_parameter(self.piece, self.values())
        values = values[before : before + len(region[0])] if region else values
        if self.add:
            _change(rows, region, lambda part: part + values, lambda part: part.add_(values))
        else:
            _change(rows, region, lambda part: values, lambda part: part.copy_(values))


def _change(
    rows: torch.Tensor,
    region: list[Positions],
    new: Callable[[torch.Tensor], torch.Tensor],
    in_place: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Change some positions, in place where a view can show them."""
    if all(isinstance(places, range) for places in region):
        in_place(cut(rows, region))
        return
    index = torch.meshgrid(*(torch.tensor(list(places)) for places in region), indexing="ij")
    rows[index] = new(rows[index])


@dataclass
class TensorEdit:
    """All that changes in one stored tensor."""

    scratch: Scratch
    algebra: Algebra
    scales: list[Scale] = field(default_factory=list)
    puts: list[Put] = field(default_factory=list)
    columns: list[tuple[Stored, int, Columns]] = field(default_factory=list)
    norms: dict[str, None] = field(default_factory=dict)

    def apply(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Return the new values of some rows, not yet rounded; see `normswap.layout.Edit`."""
        narrow = not self.puts and all(scale.fits(rows) for scale in self.scales)
        new = self.scratch.copy(rows, torch.float32 if narrow else torch.float64)
        for scale in self.scales:
            scale.apply(new, start)
        for put in self.puts:
            put.apply(new, start)
        for piece, axis, columns in self.columns:
            self.algebra.weight(piece, axis, columns, rows, new, start)
        return new
