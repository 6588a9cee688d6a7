"""Weights as quantizing libraries keep them: a parameter of integers with its scales, and a tensor that is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map


class IntegerParameter(nn.Parameter):
    """Integers with their scales as an attribute; not differentiable, as bitsandbytes' ``Int8Params`` is not."""

    scales: torch.Tensor

    def __new__(cls, weight: torch.Tensor) -> IntegerParameter:
        scales = weight.abs().amax(1, keepdim=True) / 127
        self = torch.Tensor._make_subclass(cls, (weight / scales).round().to(torch.int8), False)
        self.scales = scales
        return self


class IntegerLinear(nn.Module):
    """A linear layer of another base class than ``nn.Linear``."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = IntegerParameter(linear.weight.detach())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.weight.scales.to(x.dtype))


def with_integer_linears(model: nn.Module) -> nn.Module:
    """Replace every linear layer but the head, in place."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                setattr(module, name, IntegerLinear(child))
    return model


class PackedTensor(torch.Tensor):
    """A tensor without memory of its own, as torchao's are: whatever reads it reads integers times a scale."""

    integers: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, integers: torch.Tensor, scale: torch.Tensor) -> PackedTensor:
        return torch.Tensor._make_wrapper_subclass(cls, integers.shape, dtype=scale.dtype)

    def __init__(self, integers: torch.Tensor, scale: torch.Tensor) -> None:
        self.integers, self.scale = integers, scale

    @classmethod
    def pack(cls, value: torch.Tensor) -> PackedTensor:
        scale = value.abs().max() / 127
        return cls((value / scale).round().to(torch.int8), scale)

    def unpack(self) -> torch.Tensor:
        return self.integers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].integers, args[0].scale)
        args, kwargs = tree_map(lambda x: x.unpack() if isinstance(x, cls) else x, (args, kwargs or {}))
        return func(*args, **kwargs)


class NotingTensor(torch.Tensor):
    """A tensor that is told of every function that it goes into, and passes itself on."""

    seen: tuple[str, ...] = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen = (*cls.seen, getattr(func, "__name__", str(func)))
        return super().__torch_function__(func, types, args, kwargs or {})
