"""Folds as changes of stored tensors, applied to some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from normswap.algebra import Algebra, Columns, region_of
from normswap.conflicts import Owners, Reading, conflicts, norm_parameters, readings
from normswap.errors import ModelError
from normswap.factors import Channels, channels_of, factor_of
from normswap.foldplan import Fold, FoldPlan, stored_gain
from normswap.layout import Added, Edit
from normswap.places import Read, add_at, assemble, cut, numbered, parameter_shape
from normswap.rowedits import Put, Scale, Scratch, TensorEdit
from normswap.stored import Stored, StoredMap

__all__ = ["Edits", "WeightEdit", "make_edits", "unstorable"]


@dataclass(frozen=True)
class WeightEdit:
    """A stored weight that gains are folded into.

    Attributes:
        parameter: its name in the class.
        key: the tensor that is written; a new one for a head that is untied.
        source: the stored tensor that is read.
        edit: how that changes.
        piece: how it holds the parameter.
        axis: of the stored tensor, along which its columns run.
        factor: of each column, in the stored order, float64.
    """

    parameter: str
    key: str
    source: str
    edit: Edit
    piece: Stored
    axis: int
    factor: torch.Tensor


@dataclass(frozen=True)
class Edits:
    """What folding changes in a checkpoint.

    Attributes:
        edits: stored tensor to its change.
        added: new tensor to what it copies and its change: heads that are untied.
        norms: stored or new tensor to the norms that it is changed for.
        weights: the weights among them.
        algebra: what is measured while the edits are applied.
    """

    edits: dict[str, Edit]
    added: dict[str, Added]
    norms: dict[str, tuple[str, ...]]
    weights: tuple[WeightEdit, ...]
    algebra: Algebra


def unstorable(
    model: nn.Module, plan: FoldPlan, stored: StoredMap, read: Read, *, heads: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Find the folds of a plan that this checkpoint cannot take, from its names, its gains and its biases.

    Args:
        model: of the class, on the meta device; heads that are to be untied are untied in it.
        plan: the decisions.
        stored: where its parameters are stored.
        read: reads a stored tensor.
        heads: `normswap.untying.Untying.keys`: parameter that is to be untied, to the new tensor on disk.

    Returns:
        Name of the norm to the reason. Weights are not read: that one leaves the range of its dtype is found out when
        it is written.
    """
    return _Maker(model, plan, stored, read, heads or {}).faults


def make_edits(
    model: nn.Module, plan: FoldPlan, stored: StoredMap, read: Read, *, heads: Mapping[str, str] | None = None
) -> Edits:
    """Say how every stored tensor changes when a plan is carried out.

    Gains and biases are read now. The weights are read where a norm's bias is moved, when the edit of the bias that
    takes it is first applied.

    Args:
        model: as for `unstorable`.
        plan: the decisions.
        stored: where the parameters are stored.
        read: reads a stored tensor.
        heads: as for `unstorable`.

    Raises:
        ModelError: `unstorable` has a reason against one of the folds.
    """
    maker = _Maker(model, plan, stored, read, heads or {})
    if maker.faults:
        name, reason = next(iter(maker.faults.items()))
        raise ModelError(f"cannot fold {name}: {reason}; leave it out of the plan")
    return maker.make()


class _Maker:
    """Works out the edits for one checkpoint."""

    def __init__(
        self, model: nn.Module, plan: FoldPlan, stored: StoredMap, read: Read, heads: Mapping[str, str]
    ) -> None:
        self._owners, self._plan, self._stored, self._read, self._heads = Owners(model), plan, stored, read, heads
        self.faults = conflicts(model, plan)
        self._tensors: dict[str, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
        self._channels: dict[str, Channels] = {}
        self._scratch, self._algebra = Scratch(), Algebra()
        self._edits: dict[str, TensorEdit] = {}
        self._added: dict[str, tuple[str, TensorEdit]] = {}
        self._weights: list[WeightEdit] = []
        self._known: dict[Hashable, tuple[torch.Tensor, Columns]] = {}
        for fold in plan.folds:
            if fold.name not in self.faults and (fault := self._fault(fold)):
                self.faults[fold.name] = fault

    def _fault(self, fold: Fold) -> str | None:
        for name in _concerned(fold):
            if reason := self._not_there(name):
                return reason
        gain, bias = (
            None if name is None else assemble(self._pieces(name), self._read) for name in norm_parameters(fold)
        )
        channels = channels_of(fold, gain, bias)
        if isinstance(channels, str):
            return channels
        self._tensors[fold.name], self._channels[fold.name] = (gain, bias), channels
        return None

    def _not_there(self, name: str) -> str | None:
        if name in self._stored.opaque:
            return f"{name} is not stored as it stands in the model: {self._stored.opaque[name]}"
        pieces = self._stored.by_parameter.get(name)
        if not pieces:
            return f"{name} is not stored in the checkpoint"
        for one, other in self._stored.twice.items():
            if name in (one, other) and not self._equal(*(self._stored.by_parameter[at] for at in (one, other))):
                return f"{one} is stored, and so is {other}, which it is tied to, with other values"
        new = self._heads.get(name)
        if new is None:
            heads = [head for head in self._heads if self._stored.by_parameter[head] == pieces]
            return f"{name} and {heads[0]} were one; make the plan from the untied model" if heads else None
        if new == pieces[0].key:
            return None
        if new in self._stored.by_key or new in self._stored.unread:
            return f"{name} is to be untied as {new}, and the checkpoint holds another tensor of that name"
        whole = tuple(map(range, parameter_shape(pieces)))
        if len(pieces) > 1 or (pieces[0].positions, pieces[0].held) != (whole, whole):
            return f"{name} is to be untied, and the embedding is not stored as it stands in the model"
        return None

    def _equal(self, ones: tuple[Stored, ...], others: tuple[Stored, ...]) -> bool:
        """Whether two parameters are stored alike, with the same values."""
        return len(ones) == len(others) and all(
            (one.axes, one.positions, one.held) == (other.axes, other.positions, other.held)
            and all(
                a.dtype == b.dtype and torch.equal(a, b)
                for a, b in zip(self._read(one.key), self._read(other.key), strict=True)
            )
            for one, other in zip(ones, others, strict=True)
        )

    def _pieces(self, name: str) -> tuple[Stored, ...]:
        """Return what a parameter is made up of, under this name; a tied one has its entries from another."""
        return tuple(replace(piece, parameter=name) for piece in self._stored.by_parameter[name])

    def make(self) -> Edits:
        """Return the edits."""
        everything = readings(self._owners, self._plan.folds)
        measured = {use.fold.name for uses in everything.values() for use in uses}
        firsts: dict[int, str] = {}
        for fold in self._plan.folds:
            gain = norm_parameters(fold)[0]
            first = fold.name if gain is None else firsts.setdefault(id(self._owners.get(gain)), fold.name)
            if fold.name in measured:
                self._algebra.norm(fold, *self._tensors[fold.name], self._channels[fold.name])
            else:
                # Of several norms of one gain the first stands for all: its weights are folded once.
                self._algebra.figures[fold.name] = self._algebra.figures[first]
            for name, values in self._norm_values(fold):
                for piece in self._pieces(name):
                    self._edit(piece, [fold.name]).puts.append(Put(piece, _Once(values)))
        by_bias: dict[int, list[Reading]] = {}
        for uses in everything.values():
            self._scale(uses)
            for use in uses:
                if use.fold.bias == "move" and use.consumer.bias is not None:
                    by_bias.setdefault(id(self._owners.get(use.consumer.bias)), []).append(use)
        for uses in by_bias.values():
            moved = _Once(partial(self._moved, uses))
            assert uses[0].consumer.bias is not None
            for piece in self._pieces(uses[0].consumer.bias):
                self._edit(piece, [use.fold.name for use in uses]).puts.append(Put(piece, moved, add=True))
        # What is untied without a norm that reads it, such as a bias of the head, is copied as it is.
        plain = {
            new: Added(source)
            for name, new in self._heads.items()
            if new not in self._added and new != (source := self._stored.by_parameter[name][0].key)
        }
        made = {**self._edits, **{key: edit for key, (_, edit) in self._added.items()}}
        return Edits(
            edits=dict(self._edits),
            added={**plain, **{key: Added(source, edit) for key, (source, edit) in self._added.items()}},
            norms={key: tuple(edit.norms) for key, edit in made.items()},
            weights=tuple(self._weights),
            algebra=self._algebra,
        )

    def _edit(self, piece: Stored, norms: Iterable[str]) -> TensorEdit:
        """Return the edit of a stored tensor, or of the new one of a head that is untied."""
        key, new = self._target(piece), TensorEdit(self._scratch, self._algebra)
        if key == piece.key:
            edit = self._edits.setdefault(key, new)
        else:
            edit = self._added.setdefault(key, (piece.key, new))[1]
        edit.norms.update(dict.fromkeys(norms))
        return edit

    def _target(self, piece: Stored) -> str:
        """Return the tensor that is written for a stored one."""
        return self._heads.get(piece.parameter, piece.key)

    def _norm_values(self, fold: Fold) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        """Yield a norm's gain and bias with what becomes of them, float64."""
        assert fold.spec is not None
        (gain_name, bias_name), (gain, bias) = norm_parameters(fold), self._tensors[fold.name]
        if gain_name is not None and gain is not None:
            ones = torch.ones(gain.numel(), dtype=torch.float64)
            yield gain_name, partial(stored_gain, fold.spec, ones, gain.double())
        channels = self._channels[fold.name]
        if bias_name is not None and bias is not None:
            if channels.kept is not None:
                yield bias_name, partial(channels.kept.reshape, bias.shape)
            elif channels.moved is not None:
                yield bias_name, partial(torch.zeros, bias.shape, dtype=torch.float64)

    def _scale(self, uses: list[Reading]) -> None:
        """Multiply a weight's columns."""
        consumer = uses[0].consumer
        pieces = self._pieces(consumer.parameter)
        size = parameter_shape(pieces)[consumer.axis]
        # A model may have thousands of experts, each a weight of its own, that read one norm.
        key = (size, *((use.fold.name, use.consumer.axis, use.consumer.pieces) for use in uses))
        if key not in self._known:
            parts = [(use.consumer, self._channels[use.fold.name]) for use in uses]
            self._known[key] = factor_of(parts, size), self._algebra.columns(uses, size)
        factor, columns = self._known[key]
        for piece in pieces:
            edit = self._edit(piece, columns.norms)
            at, own = piece.axes[consumer.axis], piece.take(factor, consumer.axis)
            edit.scales.append(Scale(piece, at, own))
            # A tensor that is one column has no row that could be quantized.
            if at is not None:
                self._weights.append(WeightEdit(piece.parameter, self._target(piece), piece.key, edit, piece, at, own))
            edit.columns.append((piece, consumer.axis, columns))

    def _moved(self, uses: list[Reading]) -> torch.Tensor:
        """Return what norms add to a bias through the weights that read them, float64."""
        total: torch.Tensor | None = None
        for use in uses:
            axis = use.consumer.axis
            pieces = self._pieces(use.consumer.parameter)
            shape = parameter_shape(pieces)
            moved = self._channels[use.fold.name].moved
            assert moved is not None
            if total is None:
                total = torch.zeros((*shape[:axis], *shape[axis + 1 :]), dtype=torch.float64)
            shift = use.consumer.spread(moved, shape[axis], 0.0)
            for piece in pieces:
                for start, rows in numbered(self._read(piece.key)):
                    self._add_moved(total, use, piece, shift, start, rows)
        assert total is not None
        return total

    def _add_moved(
        self, total: torch.Tensor, use: Reading, piece: Stored, shift: torch.Tensor, start: int, rows: torch.Tensor
    ) -> None:
        region, before = region_of(piece, start, rows)
        if region is None:
            return
        axis, part = use.consumer.axis, cut(rows, region)
        at, values = piece.axes[axis], piece.take(shift, axis)
        if at == 0:
            values = values[before : before + len(region[0])]
        added = part.double() * values if at is None else torch.tensordot(part.double(), values, ([at], [0]))
        self._algebra.bias(use, piece, part, values, added)
        left = [stored for stored in range(part.dim()) if stored != at]
        others = [dim for dim in range(len(piece.axes)) if dim != axis]
        linked = [left.index(stored) for dim in others if (stored := piece.axes[dim]) is not None]
        loose = [dim for dim in range(len(left)) if dim not in linked]
        positions = [
            piece.positions[dim][before : before + len(region[0])] if piece.axes[dim] == 0 else piece.positions[dim]
            for dim in others
        ]
        add_at(total, positions, added.permute([*linked, *loose]).reshape([len(places) for places in positions]))


class _Once:
    """Values that are worked out when they are first asked for."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make
        self._made: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        if self._made is None:
            self._made = self._make()
        return self._made


def _concerned(fold: Fold) -> list[str]:
    """Return the names of all parameters that a fold changes."""
    biases = [consumer.bias for consumer in fold.consumers] if fold.bias == "move" else []
    return [name for name in (*norm_parameters(fold), *fold.parameters, *biases) if name is not None]
