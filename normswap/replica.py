"""A private copy of one module, with random parameters of its own, to experiment on."""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["Replica", "Unfit", "input_name", "original_class"]

_HOOK_ATTRIBUTES = ("forward", "_hf_hook", "_old_forward")


class Unfit(Exception):
    """The module cannot be recognised, with the reason; `is_norm` if it behaves like a norm all the same."""

    def __init__(self, reason: str, *, is_norm: bool = False) -> None:
        super().__init__(reason)
        self.is_norm = is_norm


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's class as it was before a swap."""
    return getattr(type(module), "_normswap_original", type(module))


def input_name(cls: type[nn.Module]) -> str:
    """Return the name of the one tensor that the class's forward takes; empty where it has none."""
    named = _named_parameters(cls)
    return named[0] if named else ""


def _named_parameters(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return [p.name for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


class Replica:
    """A copy of a module: same class, same settings, no hooks, random parameters.

    Args:
        module: what is copied; it is neither run nor changed.
        device: where the copy's tensors are.

    Attributes:
        module: the copy.
        cls: its class, the original one.
        width: length of a row.
        tensors: name to tensor ``(width,)``, parameters and buffers alike; the copy reads these very tensors.

    Raises:
        Unfit: the module's tensors cannot be those of a norm over the last dimension.
    """

    def __init__(self, module: nn.Module, device: torch.device | str = "cpu") -> None:
        self.device = device
        self.cls = original_class(module)
        if "forward" in vars(module) and not hasattr(module, "_hf_hook"):
            raise Unfit("its forward was replaced on the instance")
        self.module = self.cls.__new__(self.cls)
        vars(self.module).update(_copied_state(module))
        self.tensors: dict[str, torch.Tensor] = {}
        self._names: tuple[str, ...] = ()
        self.width = self._find_width(module)

    def _find_width(self, module: nn.Module) -> int:
        shapes = {
            name: tuple(tensor.shape)
            for name, tensor in (*module._parameters.items(), *module._buffers.items())
            if tensor is not None
        }
        for name, size in shapes.items():
            if len(size) != 1:
                raise Unfit(f"its parameter {name} has shape {list(size)}, not that of one row")
        if len(set(shapes.values())) > 1 or len(shapes) > 2:
            raise Unfit(f"its parameters ({', '.join(shapes)}) are not a gain and a bias of one row")
        self._names = tuple(shapes)
        shape: Any = getattr(module, "normalized_shape", None)
        if isinstance(shape, (tuple, list)) and len(shape) > 1:
            raise Unfit(f"it normalises over {len(shape)} dimensions", is_norm=True)
        if shapes:
            width = next(iter(shapes.values()))[0]
        else:
            width = shape[0] if isinstance(shape, (tuple, list)) and shape else 96
        if width < 2:
            raise Unfit("its rows are one element long")
        return int(width)

    def check_signature(self) -> None:
        """Raise `Unfit` unless the forward takes one tensor and nothing else."""
        named = _named_parameters(self.cls)
        if len(named) > 1:
            raise Unfit(f"its forward takes ({', '.join(named)}); a gated or conditioned norm is not swapped yet")

    def numbers(self) -> Iterator[float]:
        """Yield the positive numbers among the module's settings, where eps is likely to be found."""
        for value in vars(self.module).values():
            if isinstance(value, float) and value > 0:
                yield value

    def randomise(self, dtype: torch.dtype, *, wide: bool = False) -> None:
        """Give the copy fresh random tensors of this dtype.

        Args:
            dtype: of the tensors.
            wide: with the sizes that trained models have, from 0 over 0.01 to 1000; else all between 0.2 and 2.
        """
        for name in self._names:
            magnitude = torch.empty(self.width).uniform_(0.2, 2.0)
            if wide:
                magnitude = 10 ** torch.empty(self.width).uniform_(-2.0, 3.0)
                magnitude[torch.rand(self.width) < 0.02] = 0.0
            sign = torch.where(torch.rand(self.width) < 0.3, -1.0, 1.0)
            self._give(name, (magnitude * sign).to(self.device, dtype))

    def adopt(self, module: nn.Module) -> None:
        """Give the copy the values of the module's own tensors."""
        for name in self._names:
            self._give(name, getattr(module, name).detach().clone())

    def track_gradients(self) -> None:
        """Have autograd record what the copy does with its parameters."""
        for name in self._names:
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
        """What a call may not change: plain settings, and each tensor with its count of in-place writes."""
        plain: dict[str, object] = {name: value for name, value in vars(self.module).items() if _plain(value)}
        tensors = {**self.module._parameters, **self.module._buffers}
        return plain | {name: (id(t), t._version) for name, t in tensors.items() if t is not None}

    def run(self, x: torch.Tensor, *, training: bool = False) -> torch.Tensor:
        """Run the copy.

        Args:
            x: ``(..., width)``.
            training: in training mode instead of evaluation mode.

        Raises:
            Unfit: it fails on this input, or what it returns is not one tensor of the input's shape.
        """
        vars(self.module)["training"] = training
        before, state = x.detach().clone(), self._state()
        try:
            y = self.cls.forward(self.module, x)
        except Exception as error:
            words = " ".join(str(error).split())[:80] or type(error).__name__
            raise Unfit(f"it does not run on rows of {self.width} numbers ({words})") from None
        if not torch.equal(x.detach().nan_to_num(1.0), before.nan_to_num(1.0)):
            raise Unfit("it changes its input in place")
        if self._state() != state:
            raise Unfit("it changes its own attributes or buffers when it runs")
        if not isinstance(y, torch.Tensor):
            raise Unfit(f"it returns a {type(y).__name__}, not one tensor", is_norm=False)
        if y.shape != x.shape:
            raise Unfit(f"it returns the shape {list(y.shape)} for {list(x.shape)}")
        if not y.is_floating_point():
            raise Unfit(f"it returns {y.dtype}")
        return y


def _plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str, type(None)))


def _copied_state(module: nn.Module) -> dict[str, object]:
    state: dict[str, object] = {}
    for name, value in vars(module).items():
        if name in _HOOK_ATTRIBUTES or name == "_normswap":
            continue
        if isinstance(value, torch.Tensor):
            raise Unfit(f"it holds the tensor {name} outside its parameters and buffers")
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            state[name] = OrderedDict()
        elif name in ("_parameters", "_buffers", "_modules"):
            state[name] = dict(value)
        else:
            state[name] = _copied_value(value)
    return state


def _copied_value(value: object) -> object:
    try:
        return copy.deepcopy(value)
    except Exception:
        # What cannot be copied (a lock, a process group) is shared; a norm's forward does not write it.
        return value
