"""Hold folded weights against the originals while they pass by: ``W(g x + b) = W' x + b'``, before any rounding."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from normswap.conflicts import Reading
from normswap.factors import Channels
from normswap.foldplan import Consumer, Fold
from normswap.labels import Positions
from normswap.narrowing import round_once
from normswap.places import cut, window
from normswap.stored import Stored

__all__ = ["BOUND", "Algebra", "Columns", "Figure", "channel_of_column", "columns_within", "region_of"]

BOUND = 1e-12
"""What the relative error of a norm may be; float64 leaves some 1e-16 of each sum."""

_SAMPLES = 1


@dataclass
class Figure:
    """What was measured for one norm.

    Attributes:
        norm: its name.
        error: the largest ``|W(g x + b) - (W' x + b')|``, relative to the sum of the absolute products.
        control: the largest of the same with the gain dropped and the weights as they were.
        identity: whether the gain is 1 everywhere and nothing is left to be dropped.
        samples: number of outputs that were looked at.
    """

    norm: str
    error: float = 0.0
    control: float = 0.0
    identity: bool = False
    samples: int = 0

    @property
    def passed(self) -> bool:
        """Whether the error is within `BOUND`, and the control beyond it."""
        return self.samples > 0 and self.error <= BOUND and (self.identity or self.control > BOUND)

    def add(self, error: float, control: float) -> None:
        """Take one output in. NaN stays."""
        if not (math.isnan(self.error) or error <= self.error):
            self.error = error
        self.control = max(self.control, control)
        self.samples += 1


@dataclass(frozen=True)
class Columns:
    """What runs into the columns of a weight: ``norm`` before the fold and ``folded`` after it, float64 ``(columns,)``.

    Attributes:
        before: results of the norm for random rows.
        after: results of the norm with its gain moved away.
        norms: whose figures this concerns.
    """

    before: torch.Tensor
    after: torch.Tensor
    norms: tuple[str, ...]


@dataclass
class _Rounded:
    error: float = 0.0
    size: float = 0.0


@dataclass
class Algebra:
    """Collects the figures of all norms of one conversion.

    Attributes:
        figures: by the norm's name.
    """

    figures: dict[str, Figure] = field(default_factory=dict)
    _rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    _rounded: dict[str, _Rounded] = field(default_factory=dict)

    @property
    def roundings(self) -> dict[str, float]:
        """Relative root mean square error of the one rounding, by the weight's name, on the sampled outputs."""
        return {name: (sums.error / sums.size) ** 0.5 for name, sums in self._rounded.items() if sums.size}

    def norm(self, fold: Fold, gain: torch.Tensor | None, bias: torch.Tensor | None, channels: Channels) -> None:
        """Draw a row for a norm, and work out from the stored values what the norm makes of it.

        Args:
            fold: of the norm.
            gain: as stored.
            bias: as stored.
            channels: what the fold moves; only what it leaves in the norm is read.
        """
        size = channels.gain.numel()
        row = torch.randn(size, dtype=torch.float64, generator=_generator(fold.name))
        assert fold.spec is not None
        before = row
        if gain is not None:
            one = gain + 1.0 if fold.spec.gain == "1+w" and fold.spec.offset_dtype == "weight" else gain.double()
            if fold.spec.gain == "1+w" and fold.spec.offset_dtype != "weight":
                one = one + 1.0
            before = row * one.double().reshape(-1)
        after = row
        if bias is not None and channels.kept is not None:
            before, after = before + bias.double().reshape(-1), row + channels.kept
        self._rows[fold.name] = before, after
        self.figures[fold.name] = Figure(fold.name, identity=bool((channels.gain == 1).all()))

    def columns(self, uses: Sequence[Reading], size: int) -> Columns:
        """Lay the rows of all norms that a weight reads out over its columns."""
        before = torch.randn(size, dtype=torch.float64, generator=_generator(str(size)))
        after = before.clone()
        for use in uses:
            places, channels = channel_of_column(use.consumer)
            for row, laid in zip(self._rows[use.fold.name], (before, after), strict=True):
                laid[places] = row[channels]
        return Columns(before, after, tuple(dict.fromkeys(use.fold.name for use in uses)))

    def weight(
        self, piece: Stored, axis: int, columns: Columns, old: torch.Tensor, new: torch.Tensor, start: int
    ) -> None:
        """Compare some outputs of rows of a stored weight.

        Args:
            piece: how the stored tensor holds the weight.
            axis: of the weight, that is contracted.
            columns: what runs into it.
            old: rows ``[start, start + k)`` of the stored tensor.
            new: what they become, unrounded.
            start: number of the first.
        """
        region, before = region_of(piece, start, old)
        if region is None:
            return
        ran_in = [columns_within(piece, axis, values, before, region) for values in (columns.before, columns.after)]
        at = piece.axes[axis]
        olds, news = cut(old, region), cut(new, region)
        sums = self._rounded.setdefault(piece.parameter, _Rounded())
        for output in _some(olds.shape, at, f"{piece.key}:{start}"):
            was, now = olds[output].double().reshape(-1), news[output].double().reshape(-1)
            products = was * ran_in[0]
            scale = float(products.abs().sum())
            expected, got, dropped = (float(v) for v in (products.sum(), now @ ran_in[1], was @ ran_in[1]))
            for norm in columns.norms if scale else ():
                self.figures[norm].add(abs(got - expected) / scale, abs(dropped - expected) / scale)
            rounded = round_once(now, old.dtype).double()
            sums.error += float((rounded - now).square().sum())
            sums.size += float(now.square().sum())

    def bias(self, use: Reading, piece: Stored, old: torch.Tensor, moved: torch.Tensor, got: torch.Tensor) -> None:
        """Compare some of what rows of a weight add to the bias.

        Args:
            use: the weight and its norm.
            piece: how the stored tensor holds the weight.
            old: what the weight takes of some stored rows.
            moved: the norm's bias for each column of these rows, ``(columns,)``.
            got: the contraction of the two.
        """
        at = piece.axes[use.consumer.axis]
        for output in _some(old.shape, at, f"{piece.key}:bias"):
            products = old[output].double().reshape(-1) * moved
            if scale := float(products.abs().sum()):
                there = tuple(place for place in output if isinstance(place, int))
                self.figures[use.fold.name].add(abs(float(got[there]) - float(products.sum())) / scale, 0.0)


def region_of(piece: Stored, start: int, rows: torch.Tensor) -> tuple[list[Positions] | None, int]:
    """Return which positions of some stored rows a parameter takes, and how many rows of its own stand before them.

    Args:
        piece: how the stored tensor holds the parameter.
        start: number of the first row.
        rows: the rows.

    Returns:
        Positions for each axis of ``rows``, None where it takes nothing of these rows; and the number.
    """
    if not piece.held:
        return [], 0
    first, before = window(piece.held[0], start, len(rows))
    return ([first, *piece.held[1:]] if len(first) else None), before


def channel_of_column(consumer: Consumer) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns that read the norm, and the channel that each of them reads."""
    places = [torch.arange(piece.start, piece.stop) for piece in consumer.pieces]
    channels = [
        piece.channel + piece.step * torch.arange(piece.stop - piece.start, dtype=torch.long)
        for piece in consumer.pieces
    ]
    return torch.cat(places), torch.cat(channels)


def columns_within(
    piece: Stored, axis: int, values: torch.Tensor, before: int, region: Sequence[Positions]
) -> torch.Tensor:
    """Pick, of values for the columns of a weight, those of some rows of a stored tensor.

    Args:
        piece: how the stored tensor holds the weight.
        axis: of the weight, along which its columns run.
        values: ``(columns,)``.
        before: as `region_of` returns it.
        region: likewise.
    """
    mine = piece.take(values, axis)
    return mine[before : before + len(region[0])] if piece.axes[axis] == 0 else mine


def _some(shape: Sequence[int], axis: int | None, seed: str) -> list[tuple[int | slice, ...]]:
    """Choose a few outputs of a weight: an index that leaves only its columns."""
    outputs = []
    for number in range(_SAMPLES):
        drawn = zlib.crc32(f"{seed}:{number}".encode())
        output: list[int | slice] = []
        for at, size in enumerate(shape):
            output.append(slice(None) if at == axis else drawn % size)
            drawn //= size
        outputs.append(tuple(output))
    return outputs


def _generator(name: str) -> torch.Generator:
    return torch.Generator().manual_seed(zlib.crc32(name.encode()))


def worst(figures: Mapping[str, Figure]) -> Figure | None:
    """Return the figure with the largest error; None without any. A failed one goes before those that passed."""
    return max(figures.values(), key=lambda figure: (not figure.passed, figure.error), default=None)
