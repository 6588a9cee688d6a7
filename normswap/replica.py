"""A private copy of one module, with random parameters of its own, to experiment on."""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normswap.distributed import held
from normswap.signatures import parameter_names, required_names, takes_a_dictionary
from normswap.wrapping import has_own_forward, original_class, plain_state

__all__ = ["ANY_WIDTH", "CHANNELS", "Arrangement", "NotRun", "Replica", "Unfit", "bare", "followers", "original_class"]

# Length of a row for a norm that has no parameters to say it: with many divisors, for grouped ones.
ANY_WIDTH = 96
_MOST_CHILDREN = 3

Arrangement = Literal["rows", "flat", "sequence", "image", "volume", "heads"]
"""How rows lie in what a module takes.

``(..., width)``, ``(N, width)``, ``(N, width, L)``, ``(N, width, H, W)``, ``(N, width, D, H, W)``, or
``(N, L, heads, width / heads)`` with whole rows as the result.
"""
CHANNELS: tuple[Arrangement, ...] = ("sequence", "image", "volume")


class Unfit(Exception):
    """The module cannot be recognised, with the reason.

    Attributes:
        is_norm: whether it behaves like a norm all the same.
        of_rows: whether it may be a norm of rows; a BatchNorm is none.
    """

    def __init__(self, reason: str, *, is_norm: bool = False, of_rows: bool = True) -> None:
        super().__init__(reason)
        self.is_norm = is_norm
        self.of_rows = of_rows


class NotRun(Unfit):
    """The module fails on an input of this arrangement, or returns another shape: it may take another one."""


class Replica:
    """A copy of a module: same class, same settings, no hooks, random parameters.

    Args:
        module: what is copied; it is neither run nor changed.
        device: where the copy's tensors are.

    Attributes:
        module: the copy.
        cls: its class, the original one.
        shape: of one row: ``(width,)``, or ``(heads, width)`` beside a gain of that shape.
        sized: whether a parameter or a setting says so; a norm without takes rows of any length.
        stated: whether a setting does.
        tensors: name to tensor, parameters and buffers alike; the copy reads these very tensors.
        arrangement: how `run` hands rows over.
        joins: heads of a row in the arrangement ``"heads"``.
        names: what its forward calls its arguments.
        input_name: the argument that takes the row.
        gate_name: the argument that takes a gate; None where none is given to it.
        children: copies of its child modules (see `followers`), each of which is an identity in the copy.

    Raises:
        Unfit: the module's tensors cannot be those of a norm.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.cls = original_class(module)
        if has_own_forward(module):
            raise Unfit("its forward was replaced on the instance")
        self.module = self.cls.__new__(self.cls)
        state = _copied_state(module)
        self.children = {name: copy.deepcopy(child) for name, child in followers(module).items()}
        for child in self.children.values():
            if isinstance(child, nn.modules.dropout._DropoutNd) and child.p == 0:
                # One that is off now may be on later, and must stand where it is found then.
                child.p = 0.5
        vars(self.module).update(state)
        self.module._modules.update({name: nn.Identity() for name in self.children})
        self.tensors: dict[str, torch.Tensor] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.arrangement: Arrangement = "rows"
        self.joins = 1
        self.names = parameter_names(self.cls)
        self.input_name = self.names[0] if self.names else "x"
        self.gate_name: str | None = None
        self.shape = self._find_shape(self.module)
        self.stated = bool(getattr(self.module, "normalized_shape", None))
        self.sized = self.stated or any(math.prod(size) > 1 for size in self._shapes.values())

    @property
    def width(self) -> int:
        """Length of a row."""
        return self.shape[-1]

    def _find_shape(self, module: nn.Module) -> tuple[int, ...]:
        tensors = {name: t for name, t in (*module._parameters.items(), *module._buffers.items()) if t is not None}
        if any(is_lazy(tensor) for tensor in tensors.values()):
            raise Unfit("its parameters have no shapes yet: run the model once before")
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        self._shapes = shapes
        for name in shapes:
            dtype = getattr(module, name).dtype
            if math.prod(shapes[name]) > 1 and not dtype.is_floating_point:
                raise Unfit(f"its {name} holds {dtype}, not floating-point numbers")
        # A gain may be stored as (1, 1, width) or (width, 1, 1), and one number may stand for a whole row.
        rows = {name: tuple(n for n in size if n != 1) for name, size in shapes.items() if math.prod(size) != 1}
        if {"running_mean", "running_var"} & shapes.keys():
            raise Unfit("it applies stored statistics (running_mean, running_var), as a BatchNorm does", of_rows=False)
        if len(set(rows.values())) > 1 or len(shapes) > 2:
            raise Unfit(f"its parameters ({', '.join(shapes)}) are not a gain and a bias of one row")
        for name, size in rows.items():
            if len(size) > 2 or (len(size) == 2 and len(shapes[name]) > 2):
                raise Unfit(f"its parameter {name} has shape {list(shapes[name])}, not that of one row")
        given: Any = getattr(module, "normalized_shape", None)
        if isinstance(given, (tuple, list)) and len(given) > 1:
            raise Unfit(f"it normalises over {len(given)} dimensions", is_norm=True)
        if rows:
            shape = next(iter(rows.values()))
        else:
            shape = (int(given[0]),) if isinstance(given, (tuple, list)) and given else (ANY_WIDTH,)
        if shape[-1] < 2:
            raise Unfit("its rows are one element long")
        return shape

    def check_signature(self) -> None:
        """Raise `Unfit` unless the forward can be called with a row alone, or with a row and a gate."""
        if takes_a_dictionary(self.cls):
            raise Unfit(f"its forward takes a dictionary ({self.names[0]}), not a tensor")
        required = required_names(self.cls)
        if not self.names or len(required) > 2:
            raise Unfit(f"its forward takes ({', '.join(required)}), not a row, or a row and its gate")

    def numbers(self) -> Iterator[float]:
        """Yield the positive numbers among the module's settings, where eps is likely to be found."""
        for value in vars(self.module).values():
            if isinstance(value, float) and value > 0:
                yield value

    def head_counts(self) -> list[int]:
        """Return how many heads a row may have: settings of the module, where another is the length of such a head."""
        numbers = {value for value in vars(self.module).values() if type(value) is int and 1 < value < self.width}
        return sorted(number for number in numbers if self.width / number in numbers)

    def randomise(self, dtype: torch.dtype, *, wide: bool = False) -> None:
        """Give the copy fresh random tensors of this dtype.

        Args:
            dtype: of the tensors.
            wide: with the sizes that trained models have, from 0 over 0.01 to 1000; else all between 0.2 and 2.
        """
        for name, shape in self._shapes.items():
            magnitude = torch.empty(shape).uniform_(0.2, 2.0)
            if wide:
                magnitude = 10 ** torch.empty(shape).uniform_(-2.0, 3.0)
                magnitude[torch.rand(shape) < 0.02] = 0.0
            sign = torch.where(torch.rand(shape) < 0.3, -1.0, 1.0)
            self._give(name, (magnitude * sign).to(self.device, dtype))

    def adopt(self, module: nn.Module) -> None:
        """Give the copy the values of the module's own tensors."""
        for name in self._shapes:
            self._give(name, held(getattr(module, name).detach()).clone())

    def track_gradients(self) -> None:
        """Have autograd record what the copy does with its parameters."""
        for name in self._shapes:
            parameter = self.module._parameters.get(name)
            if parameter is not None:
                self.tensors[name] = parameter.requires_grad_()

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        self.tensors[name] = tensor
        if name in self.module._parameters:
            self.module._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        else:
            self.module._buffers[name] = tensor

    def get(self, name: str | None) -> torch.Tensor | None:
        """Return the tensor of this name; None for None."""
        return None if name is None else self.tensors[name]

    def _state(self) -> dict[str, object]:
        """What a call may not change: its attributes, and each tensor with its count of in-place writes."""
        state: dict[str, object] = {}
        for name, value in vars(self.module).items():
            if name not in ("_parameters", "_buffers", "_modules"):
                size = len(value) if isinstance(value, (list, dict, set, deque)) else None
                state[name] = value if _plain(value) else (id(value), size)
        tensors = {**self.module._parameters, **self.module._buffers}
        return state | {name: (id(t), t._version) for name, t in tensors.items() if t is not None}

    def arrange(self, x: torch.Tensor) -> torch.Tensor:
        """Bring rows into what the module takes.

        Args:
            x: ``(..., *shape)``; for an arrangement other than rows of any rank ``(2, even, width)``.
        """
        if self.arrangement == "flat":
            return x.reshape(-1, *self.shape)
        if self.arrangement == "rows":
            return x
        if self.arrangement == "heads":
            return x.unflatten(-1, (self.joins, -1))
        x = x.reshape(2, -1, self.width).movedim(-1, 1).contiguous()
        sizes = {"image": (-1, 2), "volume": (-1, 2, 2 if x.size(-1) % 4 == 0 else 1)}.get(self.arrangement)
        return x if sizes is None else x.unflatten(-1, sizes)

    def run(
        self, x: torch.Tensor, gate: torch.Tensor | None = None, *, training: bool = False, arranged: bool = False
    ) -> torch.Tensor:
        """Run the copy.

        Args:
            x: rows, as `arrange` takes them.
            gate: of the shape of ``x``; None to call it without.
            training: in training mode instead of evaluation mode.
            arranged: whether ``x`` and ``gate`` are as the module takes them already.

        Returns:
            The result as the module gives it, where ``arranged``; else of the shape of ``x``.

        Raises:
            Unfit: it fails on this input, or what it returns is not one tensor of the input's shape.
        """
        vars(self.module)["training"] = training
        given = x if arranged else self.arrange(x)
        arguments = {self.input_name: given}
        if gate is not None and self.gate_name is not None:
            arguments[self.gate_name] = gate if arranged else self.arrange(gate)
        before, state = given.detach().clone(), self._state()
        try:
            y = self.cls.forward(self.module, **arguments)
        except (Exception, SystemExit) as error:
            words = " ".join(str(error).split())[:80] or type(error).__name__
            tried = "" if self.sized else ", a length that no parameter of it says"
            raise NotRun(f"it does not run on rows of {self.width} numbers{tried} ({words})") from None
        if not torch.equal(given.detach().nan_to_num(1.0), before.nan_to_num(1.0)):
            raise Unfit("it changes its input in place")
        if self._state() != state:
            raise Unfit("it changes its own attributes or buffers when it runs")
        if not isinstance(y, torch.Tensor):
            raise Unfit(f"it returns a {type(y).__name__}, not one tensor", is_norm=False)
        if y.shape != (given.flatten(-2) if self.arrangement == "heads" else given).shape:
            raise NotRun(f"it returns the shape {list(y.shape)} for {list(given.shape)}")
        if not y.is_floating_point():
            raise Unfit(f"it returns {y.dtype}")
        if arranged or self.arrangement in ("rows", "heads"):
            return y
        return (y if self.arrangement == "flat" else y.flatten(2).movedim(1, -1)).reshape(x.shape)

    def run_whole(self, x: torch.Tensor, gate: torch.Tensor | None, *, training: bool) -> torch.Tensor:
        """Run the copy once with its children as they are, on rows as it takes them; for the arguments see `run`."""
        neutral = dict(self.module._modules)
        self.module._modules.update(self.children)
        try:
            return self.run(x, gate, training=training, arranged=True)
        finally:
            self.module._modules.update(neutral)


def followers(module: nn.Module) -> dict[str, nn.Module]:
    """Return the children of a module that could follow a norm of its own: few, without parameters or children.

    Empty where it has others too, or where one of them is a norm.
    """
    children = {name: child for name, child in plain_state(module)["_modules"].items() if child is not None}
    norms = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase)
    for child in children.values():
        bare = not (child._parameters or child._buffers or child._modules)
        if not bare or isinstance(child, norms) or len(children) > _MOST_CHILDREN:
            return {}
    return children


@contextmanager
def bare(module: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Put identities in the place of children of these names, inside the ``with`` block."""
    kept = {name: module._modules[name] for name in names}
    module._modules.update({name: nn.Identity() for name in kept})
    try:
        yield
    finally:
        module._modules.update(kept)


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _copied_state(module: nn.Module) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, value in plain_state(module).items():
        if isinstance(value, torch.Tensor):
            raise Unfit(f"it holds the tensor {name} outside its parameters and buffers")
        state[name] = value if name in ("_parameters", "_buffers", "_modules") else _copied_value(value)
    return state


def _copied_value(value: object) -> object:
    try:
        return copy.deepcopy(value)
    except Exception:
        # What cannot be copied (a lock, a process group) is shared; a norm's forward does not write it.
        return value
