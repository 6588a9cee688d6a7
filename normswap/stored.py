"""Which tensors of a checkpoint hold which parameters of the model's class, and how their axes correspond."""

from __future__ import annotations

from collections.abc import Iterable
from copy import deepcopy
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from normswap.headers import Entry
from normswap.labels import Layout, Part, Positions, Unfollowable, follow
from normswap.renames import Group, follows_another, group_keys, shared_names
from normswap.shards import Checkpoint

__all__ = ["Stored", "StoredMap", "map_stored"]

_PLAIN = {"F64", "F32", "F16", "BF16"}


@dataclass(frozen=True)
class Stored:
    """What one stored tensor gives to one parameter.

    Attributes:
        key: name of the tensor on disk.
        parameter: qualified name in the class.
        axes: for each axis of the parameter, the axis of the stored tensor that runs along it; None where the stored
            tensor is one slice, such as one expert of a stack.
        positions: for each axis of the parameter, which of its positions this tensor holds, in the stored order.
        held: for each axis of the stored tensor, which of its positions the parameter takes, ascending: all of them
            unless one stored tensor is split over several parameters. With ``axes[i] = a``, position
            ``held[a][n]`` of the stored tensor is position ``positions[i][n]`` of the parameter.
    """

    key: str
    parameter: str
    axes: tuple[int | None, ...]
    positions: tuple[Positions, ...]
    held: tuple[Positions, ...]

    def take(self, values: torch.Tensor, axis: int) -> torch.Tensor:
        """Pick, of values along an axis of the parameter, those of this tensor, in the stored order.

        Args:
            values: ``(size,)``, one for each position of the parameter along ``axis``.
            axis: of the parameter.

        Returns:
            ``(count,)`` along the stored axis ``axes[axis]``, for its positions ``held[axes[axis]]``; one value where
            the tensor is a slice there.
        """
        places = self.positions[axis]
        if isinstance(places, range):
            return values[places.start : places.stop : places.step]
        return values[torch.tensor(places)]


@dataclass(frozen=True)
class StoredMap:
    """Where each parameter of a model is stored.

    Persistent buffers count as parameters here: whatever the class loads.

    Attributes:
        by_parameter: the tensors that make up each parameter, by every name that it has in the class. They cover it
            exactly once. A name that shares the tensor of another (see ``tied``) has that one's entries.
        by_key: what each stored tensor gives, and to which parameters; mostly one.
        unread: stored tensors that the class does not load: other heads, stale buffers.
        missing: parameters that nothing on disk holds, neither under their own name nor under that of a tied one.
        opaque: parameters whose stored form is no rearrangement of their values, with the reason.
        tied: names whose parameter is stored under another name only, with that name.
        twice: names of a tied parameter that are stored although another of its names is stored too, with the other.
            transformers 5 loads both and ties them only where they are equal; transformers 4 takes the other.
    """

    by_parameter: dict[str, tuple[Stored, ...]]
    by_key: dict[str, tuple[Stored, ...]]
    unread: tuple[str, ...]
    missing: tuple[str, ...]
    opaque: dict[str, str]
    tied: dict[str, str]
    twice: dict[str, str]


def map_stored(model: nn.Module, checkpoint: Checkpoint) -> StoredMap:
    """Find for each parameter of a model the tensors of a checkpoint that hold it. No tensor data is read.

    Names are followed through transformers' own renames. Where transformers converts (stacks experts, joins or splits
    projections, transposes), its conversion is run on labels to learn what it does (`normswap.labels.follow`), once
    for all layers of a kind.

    Args:
        model: what `normswap.loading.build_meta` returned for this checkpoint.
        checkpoint: what `normswap.shards.check_source` returned.

    Raises:
        CheckpointError: transformers refuses the names of the stored tensors for this class.
    """
    return _Mapper(model, checkpoint.tensors).map()


class _Mapper:
    def __init__(self, model: nn.Module, tensors: dict[str, Entry]) -> None:
        self.model, self.tensors = model, tensors
        # Values that are no tensors are the extra state of a module, which has no axes.
        state = model.state_dict(keep_vars=True)
        self.state = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
        self.found: dict[str, tuple[Stored, ...]] = {}
        self.opaque: dict[str, str] = {}
        self.used: set[str] = set()
        self.learnt: dict[Any, dict[int, Layout] | str] = {}

    def map(self) -> StoredMap:
        for group in group_keys(self.model, self.tensors):
            if group.parameter in self.state:
                self._add(group)
        self._refuse_shared()
        tied, twice = self._ties()
        for alias, name in tied.items():
            if name in self.found:
                self.found[alias] = self.found[name]
            else:
                self.opaque[alias] = self.opaque[name]
        by_key: dict[str, tuple[Stored, ...]] = {}
        for name, pieces in self.found.items():
            for piece in pieces if name not in tied else ():
                by_key[piece.key] = (*by_key.get(piece.key, ()), piece)
        known = self.found.keys() | self.opaque.keys()
        return StoredMap(
            by_parameter=self.found,
            by_key=by_key,
            unread=tuple(key for key in self.tensors if key not in by_key and key not in self.used),
            missing=tuple(name for name in self.state if name not in known),
            opaque=self.opaque,
            tied=tied,
            twice=twice,
        )

    def _add(self, group: Group) -> None:
        keys = [key for part in group.keys.values() for key in part]
        if group.converter is None:
            del keys[1:]
        try:
            if group.converter is None:
                layouts = {group.parameter: _as_it_is(self.tensors[keys[0]].shape)}
            else:
                layouts = self._converted(group)
        except Unfollowable as reason:
            for name in group.names():
                if name in self.state:
                    self._refuse(name, keys, str(reason))
            return
        for name, layout in layouts.items():
            if name in self.state:
                self._set(name, layout, keys)

    def _set(self, name: str, layout: Layout, keys: list[str]) -> None:
        expected = self.state[name]
        sources = [keys[part.source] for part in layout.parts]
        if layout.shape != tuple(expected.shape):
            self._refuse(name, keys, f"stored as {list(layout.shape)}, the class expects {list(expected.shape)}")
            return
        packed = sorted({self.tensors[key].dtype for key in sources} - _PLAIN)
        if expected.is_floating_point() and packed:
            self._refuse(name, keys, f"stored as {', '.join(packed)}, which is quantized or packed")
            return
        self.opaque.pop(name, None)
        self.found[name] = tuple(
            Stored(key, name, part.axes, part.positions, part.held)
            for key, part in zip(sources, layout.parts, strict=True)
        )

    def _refuse(self, name: str, keys: Iterable[str], reason: str) -> None:
        self.found.pop(name, None)
        self.opaque[name] = reason
        self.used.update(keys)

    def _converted(self, group: Group) -> dict[str, Layout]:
        shapes = {pattern: [self.tensors[key].shape for key in keys] for pattern, keys in group.keys.items()}
        names = group.names()
        expected = tuple(tuple(self.state[name].shape) if name in self.state else None for name in names)
        kind = (id(group.converter), expected, tuple((pattern, tuple(sizes)) for pattern, sizes in shapes.items()))
        if kind in self.learnt:
            known = self.learnt[kind]
            if isinstance(known, str):
                raise Unfollowable(known)
            return {names[number]: layout for number, layout in known.items()}
        try:
            layouts = follow(_Conversion(group, self.model), shapes)
        except Unfollowable as reason:
            self.learnt[kind] = str(reason)
            raise
        # Results under other names than these cannot be named for another layer.
        if set(layouts) <= set(names):
            self.learnt[kind] = {names.index(name): layout for name, layout in layouts.items()}
        return layouts

    def _refuse_shared(self) -> None:
        """Refuse parameters that take the same stored values: a change for one of them would change the other."""
        readers: dict[str, list[Stored]] = {}
        for pieces in self.found.values():
            for piece in pieces:
                readers.setdefault(piece.key, []).append(piece)
        for key, reading in readers.items():
            for one, other in combinations(reading, 2):
                if all(not set(some).isdisjoint(more) for some, more in zip(one.held, other.held, strict=True)):
                    for name, rival in ((one.parameter, other.parameter), (other.parameter, one.parameter)):
                        keys = [piece.key for piece in self.found.get(name, ())]
                        self._refuse(name, keys, f"takes the same values of {key} as {rival}")

    def _ties(self) -> tuple[dict[str, str], dict[str, str]]:
        tied: dict[str, str] = {}
        twice: dict[str, str] = {}
        for names in shared_names(self.state):
            there = [name for name in names if name in self.found or name in self.opaque]
            if not there:
                continue
            main = next((name for name in there if not follows_another(self.model, name)), there[0])
            tied |= {name: main for name in names if name not in there}
            twice |= {name: main for name in there if name != main}
        return tied, twice


class _Conversion:
    """Runs transformers' conversion of a group on labels, and shows it a model of the dtype of labels."""

    def __init__(self, group: Group, model: nn.Module) -> None:
        self.parameter, self.converter, self.model = group.parameter, group.converter, _Shapes(model)

    def __call__(self, tensors: dict[str, list[torch.Tensor]]) -> dict[str, Any]:
        # A conversion keeps what it collected: a copy for each use.
        converter: Any = deepcopy(self.converter)
        converter.collected_tensors.update(tensors)
        return converter.convert(self.parameter, model=self.model, config=self.model.config)


class _Shapes:
    """Stands in for a model in a conversion: parameters of the same shapes, in the dtype of labels."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def get_parameter(self, name: str) -> torch.Tensor:
        shape = self._model.get_parameter(name).shape
        return torch.zeros((), dtype=torch.int64, device="meta").expand(shape)


def _as_it_is(shape: tuple[int, ...]) -> Layout:
    whole = tuple(range(size) for size in shape)
    return Layout(shape, (Part(0, tuple(range(len(shape))), whole, whole),))
