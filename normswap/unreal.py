"""Run operations on meta tensors whose integers are real, and answer what only values could answer.

Ids, positions and masks are computed for real, so that code which looks at them runs. What a model computes from its
weights has no values; where code asks for some (which experts were hit?), the answer is the one that leaves nothing
out: every position, every expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

__all__ = ["run"]

_MADE = {
    *("empty", "zeros", "ones", "full", "empty_like", "zeros_like", "ones_like", "full_like", "new_empty"),
    *("new_zeros", "new_ones", "new_full", "new_empty_strided", "empty_strided", "arange", "scalar_tensor"),
    *("randint", "eye", "tril_indices", "triu_indices", "linspace"),
}


def run(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one operation.

    Args:
        name: of the operation, without its overload.
        function: the operation.
        args: its arguments; tensors on the meta device, or integers and booleans on the CPU.
        kwargs: the rest of them.

    Returns:
        What it returns: floating tensors on the meta device, integers and booleans with values where those are known.
    """
    if name in _MADE:
        return _make(name, function, args, kwargs)
    flat, tree = tree_flatten((args, kwargs))
    tensors = [value for value in flat if isinstance(value, torch.Tensor)]
    unknown = any(value.device.type == "meta" for value in tensors)
    if not unknown:
        if _is_meta(kwargs.get("device")):
            if _becomes_float(kwargs) or (tensors and tensors[0].is_floating_point()):
                return function(*tree_map(_to_meta, args), **kwargs)
            kwargs = {**kwargs, "device": torch.device("cpu")}
        try:
            return function(*args, **kwargs)
        except NotImplementedError:
            # Code that takes the meta device for an accelerator asks for what a CPU cannot do.
            return function(*tree_map(_to_meta, args), **tree_map(_to_meta, kwargs))
    if name in ("_local_scalar_dense", "item"):
        dtype = tensors[0].dtype
        return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1
    if name == "is_nonzero":
        return True
    if name == "nonzero":
        return _every_position(tensors[0])
    if name == "_to_copy" and not _becomes_float(kwargs) and _is_meta(kwargs.get("device")):
        kwargs = {**kwargs, "device": torch.device("meta")}
    if name in ("index", "index_put", "index_put_", "_index_put_impl_"):
        args = (args[0], [part for index in args[1] for part in _as_positions(index)], *args[2:])
        flat, tree = tree_flatten((args, kwargs))
    if "grouped_mm" in name:
        # Its own meta kernel insists on the dtypes and strides of a GPU's.
        left, right = (value for value in args[:2])
        return left.new_empty((*left.shape[:-1], right.shape[-1]), device="meta")
    if name == "masked_select":
        mask = torch.broadcast_to(tensors[1], torch.broadcast_shapes(tensors[0].shape, tensors[1].shape))
        count = mask.numel() if mask.device.type == "meta" else int(mask.sum())
        return tensors[0].new_empty((count,), device="meta")
    if name.endswith("_") and tensors[0].device.type != "meta":
        # What is known stays as it was: code that looks at it finds something.
        return args[0]
    there, more = tree_unflatten([_to_meta(value) for value in flat], tree)
    if _is_cpu(more.get("device")):
        more = {**more, "device": torch.device("meta")}
    result = function(*there, **more)
    if name.endswith("_") and tensors and tensors[0] is args[0]:
        return args[0]
    return result


def _make(name: str, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    there = tree_map(_to_meta, args)
    shape = function(*there, **{**kwargs, "device": torch.device("meta")})
    like = args[0] if args and isinstance(args[0], torch.Tensor) else None
    where = kwargs.get("device") or (torch.device("cpu") if like is None else like.device)
    if _is_meta(where) and (shape.dtype.is_floating_point or shape.dtype.is_complex):
        return shape
    if like is not None:
        args = (torch.empty(like.shape, dtype=like.dtype), *args[1:])
    return function(*args, **{**kwargs, "device": torch.device("cpu")})


def _every_position(condition: torch.Tensor) -> torch.Tensor:
    return torch.ones(condition.shape, dtype=torch.bool).nonzero()


def _as_positions(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Write a mask as the positions that it names, one index for each of its dimensions."""
    if index is None or index.dtype not in (torch.bool, torch.uint8):
        return [index]
    return list((_every_position(index) if index.device.type == "meta" else index.nonzero()).unbind(1))


def _becomes_float(kwargs: dict[str, Any]) -> bool:
    dtype = kwargs.get("dtype")
    return dtype is not None and (dtype.is_floating_point or dtype.is_complex)


def _is_meta(device: Any) -> bool:
    return device is not None and torch.device(device).type == "meta"


def _is_cpu(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cpu"


def _to_meta(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) and value.device.type != "meta" else value
