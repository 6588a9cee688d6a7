"""Run a model on inputs that may not suit it, with or without values, and see what it came by or what it said."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from normswap import unreal
from normswap.quiet import quiet

__all__ = ["Attempt", "Attempts"]


@dataclass(frozen=True)
class Attempt:
    """What came of one call.

    Attributes:
        result: what was returned; None where the call failed.
        error: what the model's code raised.
        reached: places in `Attempts.watched` of the modules that the call came by.
    """

    result: Any
    error: Exception | None
    reached: frozenset[int]


class Attempts:
    """Calls of one model.

    Args:
        model: on any device; on the meta device nothing is computed.
        watched: the modules to be come by; None for all that hold parameters of their own.

    Attributes:
        watched: these modules.
    """

    def __init__(self, model: nn.Module, watched: Sequence[nn.Module] | None = None) -> None:
        self.model = model
        if watched is None:
            watched = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
        self.watched = list(watched)
        first = next((p for p in model.parameters() if p.is_floating_point()), torch.zeros(()))
        self.dtype, self.device = first.dtype, first.device

    def forward(self, batch: Mapping[str, Any]) -> Attempt:
        """Run the model's forward on keyword arguments that lie on the CPU."""
        return self.call(self.model, batch)

    def call(self, function: Callable[..., Any], batch: Mapping[str, Any]) -> Attempt:
        """Call the model, or a method of it, and catch whatever its code raises."""
        reached: set[int] = set()
        inputs = {name: self._moved(value) for name, value in batch.items()}
        devices = [self.device] if self.device.type == "cuda" else []
        mode = _WithoutValues() if self.device.type == "meta" else contextlib.nullcontext()
        before = [(module, _settings(module)) for module in self.model.modules()]
        with self._watched(reached), torch.random.fork_rng(devices=devices), torch.no_grad(), quiet():
            torch.manual_seed(0)
            try:
                with mode:
                    result = function(**inputs)
            # Whatever a model's code raises on inputs that it was not made for.
            except Exception as error:
                # Some forwards set themselves up for the size of what they are given.
                for module, settings in before:
                    vars(module).update(settings)
                return Attempt(None, error, frozenset(reached))
        return Attempt(result, None, frozenset(reached))

    def _moved(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        dtype = self.dtype if value.is_floating_point() else value.dtype
        # What is known stays known: code that looks at an image for padding finds something.
        return value.to("cpu" if self.device.type == "meta" else self.device, dtype)

    @contextlib.contextmanager
    def _watched(self, reached: set[int]) -> Iterator[None]:
        handles = [
            module.register_forward_hook(lambda *_, place=place: reached.add(place))
            for place, module in enumerate(self.watched)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _settings(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, (int, float, tuple))}


class _WithoutValues(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return unreal.run(func.overloadpacket.__name__, func, args, kwargs or {})
