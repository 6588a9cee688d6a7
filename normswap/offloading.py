"""Run a model whose weights stay on disk: each part is read when it runs, and let go after."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from normswap.memory import free_memory, give_back, share_arena
from normswap.quiet import quiet
from normswap.reading import read_into_parameter, read_whole
from normswap.rows import row_reader
from normswap.shards import Checkpoint, check_source
from normswap.skeleton import DTYPES, Skeleton, build_skeleton
from normswap.source import Source
from normswap.stored import Stored
from normswap.untying import untie_
from normswap.waiting import Waiting, empty_out, fill

__all__ = ["Change", "Gate", "Stream", "Unit", "load_streamed", "needs_streaming", "stream_of"]

Change = Callable[[str, torch.Tensor], torch.Tensor]

# Elements of a parameter that is not worth letting go: gains and biases.
_SMALL = 1 << 16
# Bytes that are worth returning to the system at once.
_LARGE = 1 << 24
# Bytes of a layer that is read as one.
_UNIT = 1 << 30
# What is free is not all for the weights: outputs, activations and the next checkpoint's pages need room too.
_SHARE = 0.7
_KEY = "_normswap_stream"


@dataclass(eq=False)
class Unit:
    """A part of a model whose weights are read and let go together.

    Attributes:
        name: of its module.
        module: the module; its weights are there while its forward runs.
        parameters: of it and all modules inside, those that are not always there.
        order: its place among the units of the model.
    """

    name: str
    module: nn.Module
    parameters: list[nn.Parameter]
    order: int

    @property
    def size(self) -> int:
        """Bytes that it takes while it is open."""
        return sum(parameter.numel() * parameter.dtype.itemsize for parameter in self.parameters)


class Gate(Protocol):
    """Decides when a unit that is about to run is opened, and when it is closed."""

    def enter(self, unit: Unit) -> None:
        """Return once the unit is open."""

    def leave(self, unit: Unit) -> None:
        """Take note that its forward has ended."""


@dataclass(eq=False)
class _Held:
    """A parameter that is read from disk."""

    name: str
    pieces: tuple[Stored, ...]
    users: int = 0


@dataclass(eq=False)
class Stream:
    """The weights of one model, on disk.

    Attributes:
        model: the model.
        checkpoint: where they are.
        units: in the model's order; no parameter that is not always there is outside of all of them, but for those
            that no module's forward stands for, which stay once they were read.
        change: alters a parameter when it is read, by its name; None for nothing.
        gate: who opens and closes units; the model's own order without.
        loads: how many times a unit was read.
        device: where the model runs.
    """

    model: nn.Module
    checkpoint: Checkpoint
    units: list[Unit] = field(default_factory=list)
    change: Change | None = None
    gate: Gate | None = None
    loads: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _held: dict[int, _Held] = field(default_factory=dict)
    _open: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._rows = row_reader(self.checkpoint)

    def read(self, parameter: nn.Parameter, *, changed: bool = True) -> torch.Tensor:
        """Read a parameter of the model.

        Args:
            parameter: one that is on disk.
            changed: whether `change` is applied.

        Returns:
            Its values, in memory of their own.

        Raises:
            CheckpointError: a file cannot be read.
        """
        held = self._held[id(parameter)]
        values = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        read_into_parameter(held.pieces, values, self._rows)
        if changed and self.change is not None:
            values = self.change(held.name, values)
        return values

    def hold(self, name: str, parameter: nn.Parameter, pieces: tuple[Stored, ...]) -> None:
        """Let go of a parameter; from now on it is read when it is needed."""
        self._held[id(parameter)] = _Held(name, pieces)
        empty_out(parameter, self.touch)

    def name_of(self, parameter: nn.Parameter) -> str:
        """Return the name by which `change` is told of a parameter."""
        return self._held[id(parameter)].name

    def refresh(self, names: Collection[str]) -> None:
        """Read parameters again that are there, so that they are as `change` has them."""
        for parameter in self.model.parameters():
            held = self._held.get(id(parameter))
            if held is not None and held.name in names and not isinstance(parameter, Waiting):
                parameter.data = self.read(parameter)

    def touch(self, parameter: nn.Parameter) -> None:
        """Read a parameter that is read outside of every unit it is in; it stays."""
        self._held[id(parameter)].users += 1
        fill(parameter, self.read(parameter))

    def open(self, unit: Unit) -> None:
        """Read what a unit needs; as often as this is called it has to be closed."""
        count = self._open.get(unit.order, 0)
        self._open[unit.order] = count + 1
        if count:
            return
        self.loads += 1
        for parameter in unit.parameters:
            held = self._held[id(parameter)]
            held.users += 1
            if isinstance(parameter, Waiting):
                fill(parameter, self.read(parameter))

    def close(self, unit: Unit) -> None:
        """Let go of a unit, unless it is open for another reason."""
        count = self._open.get(unit.order, 0)
        if count > 1:
            self._open[unit.order] = count - 1
            return
        if not count:
            return
        del self._open[unit.order]
        for parameter in unit.parameters:
            held = self._held[id(parameter)]
            held.users -= 1
            if held.users == 0 and not isinstance(parameter, Waiting):
                empty_out(parameter, self.touch)
        if unit.size >= _LARGE:
            give_back()

    def close_all(self) -> None:
        """Let go of every unit."""
        for unit in self.units:
            while unit.order in self._open:
                self.close(unit)

    def watch(self, unit: Unit) -> None:
        """Add a unit, which is opened before its forward and closed after it."""
        self.units.append(unit)
        unit.module.register_forward_pre_hook(partial(self._before, unit))
        unit.module.register_forward_hook(partial(self._after, unit), always_call=True)

    def _before(self, unit: Unit, *_: Any) -> None:
        (self.gate or self).enter(unit)

    def _after(self, unit: Unit, *_: Any) -> None:
        (self.gate or self).leave(unit)

    def enter(self, unit: Unit) -> None:
        """Open a unit that is about to run."""
        self.open(unit)

    def leave(self, unit: Unit) -> None:
        """Close a unit that has run."""
        self.close(unit)


def stream_of(model: nn.Module) -> Stream | None:
    """Return where the weights of a model come from; None for a model in memory."""
    return vars(model).get(_KEY)


def load_streamed(
    source: Source,
    *,
    dtype: torch.dtype,
    device: str | torch.device = "cpu",
    change: Change | None = None,
    untied: bool = False,
    small: int = _SMALL,
    unit_bytes: int = _UNIT,
) -> nn.Module:
    """Build a model whose weights are read when they are needed, bit for bit those of `normswap.loading.load_model`.

    A layer (a child of a module list) is read before its forward and let go after it; what is outside of the lists
    goes module by module. A weight that is read without its module's forward being called, as of an embedding that
    is the head too, is read at that moment and stays. Gains, biases, buffers and other small tensors are always
    there. Parameters are plain `torch.nn.Parameter` while they are there, the same objects all the time.

    Several forwards at once read each layer once for all: see `normswap.lockstep`.

    Args:
        source: what `normswap.loading.resolve` found.
        dtype: as for `normswap.loading.load_model`.
        device: where the model runs.
        change: given the name of a parameter and its values, returns those that the model is to have.
        untied: whether the head gets a weight of its own, as by `normswap.untying.untie_`.
        small: elements of a parameter that is always there.
        unit_bytes: size from which on a layer is taken apart, and what is inside is read one by one.

    Raises:
        CheckpointError: tensors are missing or damaged, or the shards are.
        ModelError: the weights cannot be read one by one (quantized, or no rearrangement of what is stored).
    """
    share_arena()
    skeleton = build_skeleton(source, dtype)
    model = skeleton.model
    if untied:
        with quiet():
            untie_(model)
    stream = Stream(model, skeleton.checkpoint, change=change, device=torch.device(device))
    _bring(skeleton, stream, small)
    for name, module in _units(model, unit_bytes):
        inside = {id(parameter): parameter for parameter in module.parameters() if isinstance(parameter, Waiting)}
        if inside:
            stream.watch(Unit(name, module, list(inside.values()), len(stream.units)))
    vars(model)[_KEY] = stream
    return model


def needs_streaming(source: Source, dtype: torch.dtype, budget: int | None = None) -> bool:
    """Whether a checkpoint is too large to be loaded whole, from the headers of its files.

    Args:
        source: the checkpoint.
        dtype: in which it would be loaded.
        budget: bytes to get along with; what is free by default.
    """
    room = free_memory() if budget is None else budget
    if room is None:
        return False
    size = 0
    for entry in check_source(source.path).tensors.values():
        stored = DTYPES.get(entry.dtype)
        width = dtype.itemsize if stored is None or stored.is_floating_point else stored.itemsize
        size += torch.Size(entry.shape).numel() * width
    return size > room * _SHARE


def _bring(skeleton: Skeleton, stream: Stream, small: int) -> None:
    """Put every parameter on the device: emptied, or with its values where it is small."""
    model, stored = skeleton.model, skeleton.stored
    there: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        for store in (module._parameters, module._buffers):
            for key, value in store.items():
                if value is None:
                    continue
                if id(value) not in there:
                    full = f"{name}.{key}" if name else key
                    there[id(value)] = _brought(stream, value, full, stored.by_parameter.get(full), small)
                store[key] = there[id(value)]


def _brought(
    stream: Stream,
    value: torch.Tensor,
    name: str,
    pieces: tuple[Stored, ...] | None,
    small: int,
) -> torch.Tensor:
    device = stream.device
    if not value.is_meta or pieces is None:
        moved = value.detach().to(device)
        return nn.Parameter(moved, value.requires_grad) if isinstance(value, nn.Parameter) else moved
    if not isinstance(value, nn.Parameter) or not value.is_floating_point():
        whole = torch.empty(value.shape, dtype=value.dtype, device=device)
        read_into_parameter(pieces, whole, partial(read_whole, stream.checkpoint))
        return nn.Parameter(whole, requires_grad=False) if isinstance(value, nn.Parameter) else whole
    parameter = nn.Parameter(torch.empty((), dtype=value.dtype, device=device).expand(value.shape), value.requires_grad)
    stream.hold(name, parameter, pieces)
    if value.numel() <= small:
        stream.touch(parameter)
    return parameter


def _units(model: nn.Module, unit_bytes: int) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules that are read as one, each once, in the model's order."""
    seen: set[int] = set()

    def size(module: nn.Module) -> int:
        return sum(one.numel() * one.dtype.itemsize for one in module.parameters() if isinstance(one, Waiting))

    def walk(name: str, module: nn.Module, listed: bool) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        children = list(module.named_children())
        if not children or (listed and size(module) <= unit_bytes):
            yield name, module
            return
        for key, child in children:
            yield from walk(f"{name}.{key}".removeprefix("."), child, listed or isinstance(module, nn.ModuleList))

    yield from walk("", model, False)
