"""The algebra of folds from two checkpoints alone: ``W(g x + b)`` against ``W' x + b'``, rounded as stored."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from normswap.algebra import channel_of_column, columns_within, region_of
from normswap.evidence import PairFigures
from normswap.factors import channel_count
from normswap.foldplan import Consumer, Fold, FoldPlan
from normswap.places import cut
from normswap.rowedits import TensorEdit
from normswap.stored import Stored

__all__ = ["FoldGate", "coarser", "rounding"]

# How much the root mean square of a sample of one output may stray from that of many.
_STRAY = 3.0
# Half a unit for the rounding, and one for the order in which another tool multiplies and rounds.
_CHANNEL = 1.5


def rounding(dtype: torch.dtype) -> tuple[float, float]:
    """Return what rounding to the nearest can do to a number: relative to it, and at least."""
    info = torch.finfo(dtype)
    return info.eps / 2, info.smallest_normal * info.eps / 2


def coarser(one: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return the dtype that rounds more: of a cast checkpoint, folds may have been rounded to either."""
    return max(one, other, key=lambda dtype: torch.finfo(dtype).eps)


@dataclass
class _Sums:
    error: float = 0.0
    size: float = 0.0
    outputs: int = 0
    numbers: int = 0
    channel: int | None = None
    channel_error: float = 0.0
    channel_bound: float = 0.0


@dataclass
class _Weight:
    """Sums over one stored tensor, for one norm that it reads."""

    error: torch.Tensor
    size: torch.Tensor
    count: torch.Tensor


@dataclass
class FoldGate:
    """Takes in the rows of folded tensors, and says for each norm how far off they are.

    Attributes:
        plan: the folds.
        failed: norms of which a stored tensor was found to be something else; their pairs do not pass.
    """

    plan: FoldPlan
    failed: set[str] = field(default_factory=set)
    _sums: dict[str, _Sums] = field(default_factory=dict)
    _weights: dict[str, _Weight] = field(default_factory=dict)
    _parts: dict[int, tuple[torch.Tensor, torch.Tensor, tuple[str, ...]]] = field(default_factory=dict)
    _channels: dict[tuple[str, str, int], torch.Tensor] = field(default_factory=dict)
    _dtypes: dict[str, torch.dtype] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._folds = {fold.name: fold for fold in self.plan.folds}

    def add(
        self, edit: TensorEdit, old: torch.Tensor, new: torch.Tensor, got: torch.Tensor, off: torch.Tensor, start: int
    ) -> None:
        """Take rows of a stored tensor in.

        Args:
            edit: what folding does to it.
            old: rows ``[start, start + k)`` of the original.
            new: what they become, unrounded.
            got: the same rows of the checkpoint under test.
            off: ``got - new``.
            start: number of the first.
        """
        for number, (piece, axis, columns) in enumerate(edit.columns):
            region, before = region_of(piece, start, old)
            if region is None:
                continue
            at = piece.axes[axis]
            ran_in = [columns_within(piece, axis, values, before, region) for values in (columns.before, columns.after)]
            was, now = (_contract(cut(rows, region), row, at) for rows, row in zip((old, got), ran_in, strict=True))
            if at == 0:
                # Rows of the tensor are columns of the weight: an output is complete with the last of them.
                had = self._parts.get(number)
                self._parts[number] = (was, now, columns.norms) if had is None else (had[0] + was, had[1] + now, had[2])
            else:
                self._outputs(was, now, columns.norms)
            count = len(region[0]) if at == 0 else None
            for norm in columns.norms:
                self._dtypes[norm] = coarser(old.dtype, got.dtype)
                channels = self._channels_of(norm, piece, axis)
                channels = channels[before : before + count] if count is not None else channels
                self._columns(norm, channels, cut(off, region), cut(new, region), at)
        if not edit.columns:
            for norm in edit.norms:
                if any(put.add for put in edit.puts):
                    self._sum(norm, float(off.double().square().sum()), float(new.double().square().sum()), got.numel())
                    self._dtypes[norm] = coarser(old.dtype, got.dtype)

    def finish(self) -> None:
        """Take a stored tensor as complete."""
        for was, now, norms in self._parts.values():
            self._outputs(was, now, norms)
        self._parts.clear()
        for norm, weight in self._weights.items():
            sums, (relative, least) = self._sums[norm], rounding(self._dtypes[norm])
            size = weight.size.sqrt()
            error = torch.where(size > 0, weight.error.sqrt() / size, weight.error.sqrt() * math.inf).nan_to_num(0.0)
            bound = _CHANNEL * 2 * (relative + least * weight.count.sqrt() / size.clamp_min(1e-300))
            worst = int((error / bound).argmax())
            sums.numbers += int(weight.count.sum())
            if sums.channel is None or float(error[worst] / bound[worst]) > sums.channel_error / sums.channel_bound:
                sums.channel, sums.channel_error = worst, float(error[worst])
                sums.channel_bound = float(bound[worst])
        self._weights.clear()
        self._channels.clear()

    def figures(self) -> list[PairFigures]:
        """Return what was found of each norm, in the order of the plan."""
        return [_figures(fold, self._sums[fold.name], self) for fold in self.plan.folds if self._found(fold.name)]

    def bound(self, norm: str) -> float:
        """Return how far outputs on random rows may be off for having been rounded once, relative."""
        sums, (relative, least) = self._sums[norm], rounding(self._dtypes[norm])
        smallest = least * math.sqrt(sums.numbers / sums.size) if sums.size else 0.0
        return (relative + smallest) * (1 + _STRAY / math.sqrt(max(1, sums.outputs)))

    def _found(self, norm: str) -> bool:
        return norm in self._sums and self._sums[norm].outputs > 0

    def _outputs(self, was: torch.Tensor, now: torch.Tensor, norms: tuple[str, ...]) -> None:
        error, size = float((now - was).square().sum()), float(was.square().sum())
        for norm in norms:
            self._sum(norm, error, size, was.numel())

    def _sum(self, norm: str, error: float, size: float, outputs: int) -> None:
        sums = self._sums.setdefault(norm, _Sums())
        sums.error, sums.size, sums.outputs = sums.error + error, sums.size + size, sums.outputs + outputs

    def _columns(self, norm: str, channels: torch.Tensor, off: torch.Tensor, new: torch.Tensor, at: int | None) -> None:
        size = channel_count(self._folds[norm])
        if norm not in self._weights:
            zeros = torch.zeros(3, size, dtype=torch.float64)
            self._weights[norm] = _Weight(*zeros)
        weight, mine = self._weights[norm], channels >= 0
        squares = [_by_column(values, at) for values in (off, new)]
        count = torch.full_like(squares[0], off.numel() // max(1, len(squares[0])))
        for total, values in zip((weight.error, weight.size, weight.count), (*squares, count), strict=True):
            total.index_add_(0, channels[mine], values[mine])

    def _channels_of(self, norm: str, piece: Stored, axis: int) -> torch.Tensor:
        """Return the channel that each column of a stored tensor reads, -1 for those that read something else."""
        consumer = _consumer(self._folds[norm], piece.parameter, axis)
        key = (norm, piece.key, axis)
        if key not in self._channels:
            places, channels = channel_of_column(consumer)
            size = max(int(places.max()), max(piece.positions[axis])) + 1
            laid = torch.full((size,), -1, dtype=torch.long)
            laid[places] = channels
            self._channels[key] = laid[torch.tensor(list(piece.positions[axis]))]
        return self._channels[key]


def _figures(fold: Fold, sums: _Sums, gate: FoldGate) -> PairFigures:
    error, bound = math.sqrt(sums.error / sums.size) if sums.size else 0.0, gate.bound(fold.name)
    held = error <= bound and sums.channel_error <= sums.channel_bound
    return PairFigures(
        norm=fold.name,
        consumers=list(fold.parameters),
        error=error,
        bound=bound,
        passed=held and fold.name not in gate.failed,
        channel=sums.channel,
        channel_error=sums.channel_error,
        channel_bound=sums.channel_bound,
    )


def _consumer(fold: Fold, parameter: str, axis: int) -> Consumer:
    named: Iterator[Consumer] = (one for one in fold.consumers if one.parameter == parameter and one.axis == axis)
    return next(named, None) or next(one for one in fold.consumers if one.axis == axis)


def _contract(rows: torch.Tensor, values: torch.Tensor, at: int | None) -> torch.Tensor:
    if at is None:
        return rows.double() * values
    return torch.tensordot(rows.double(), values, ([at], [0]))


def _by_column(values: torch.Tensor, at: int | None) -> torch.Tensor:
    """Sum the squares of all numbers of each column, float64."""
    if at is None:
        return values.double().square().sum().reshape(1)
    others = [axis for axis in range(values.dim()) if axis != at]
    return values.square().sum(others, dtype=torch.float64) if others else values.double().square()
