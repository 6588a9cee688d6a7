"""What becomes of a norm's output under each operation: does every element stay its own channel's gain times something?

A mark gives each element of a tensor the code of the channel whose gain it is proportional to. Moving elements moves
codes; multiplying by what has no code keeps them; adding keeps them where both terms have the same code. Whatever is
not listed here ends the way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["ELSE", "ZERO", "Blocked", "Mark", "apply_op", "contraction"]

# Codes of elements that hold no norm's channel: something else, and a zero, which any factor leaves alone.
ELSE, ZERO = -1, -2

_RESHAPES = {"view", "_unsafe_view", "reshape", "_reshape_alias"}
_MOVES = {
    *("permute", "transpose", "t", "expand", "slice", "select", "split", "split_with_sizes", "unbind", "unsqueeze"),
    *("squeeze", "repeat", "flip", "roll", "unfold", "diagonal", "channel_shuffle", "pixel_unshuffle", "pixel_shuffle"),
}
_COPIES = {"alias", "detach", "clone", "lift", "lift_fresh", "contiguous", "_to_copy"}
_INDEXED = {"index", "index_select", "gather"}


class Blocked(Exception):
    """An operation that is not linear in the marked tensor, channel by channel."""


@dataclass(frozen=True)
class Mark:
    """The codes of one tensor.

    Attributes:
        codes: int32 on the CPU, of the tensor's shape.
        plain: whether the elements are the norm's output as it is, only moved; a constant that the norm adds then
            arrives as a constant.
    """

    codes: torch.Tensor
    plain: bool = True


@dataclass(frozen=True)
class Contraction:
    """A product that sums over one dimension of each of two tensors.

    Attributes:
        left: the first tensor, and the dimension of it that is summed over.
        right: the second, likewise.
        bias: what is added to the product, if anything.
        plain: whether a row that is the same everywhere gives the same product everywhere, and with one column each.
    """

    left: tuple[torch.Tensor, int]
    right: tuple[torch.Tensor, int]
    bias: torch.Tensor | None = None
    plain: bool = True


def contraction(name: str, args: Sequence[Any]) -> Contraction | None:
    """Recognise a matrix product or a convolution without groups.

    Args:
        name: of the operation, without its overload.
        args: its arguments.
    """
    if name in ("mm", "bmm", "matmul", "mv", "dot") and len(args) >= 2:
        left, right = args[0], args[1]
        return Contraction((left, left.dim() - 1), (right, max(0, right.dim() - 2)))
    if name in ("addmm", "baddbmm") and len(args) >= 3:
        bias, left, right = args[:3]
        return Contraction((left, left.dim() - 1), (right, right.dim() - 2), bias)
    if "grouped_mm" in name and len(args) >= 2:
        left, right = args[0], args[1]
        return Contraction((left, left.dim() - 1), (right, right.dim() - 2))
    if name in ("linear", "_linear") and len(args) >= 2:
        left, right = args[0], args[1]
        return Contraction((left, left.dim() - 1), (right, right.dim() - 1), args[2] if len(args) > 2 else None)
    if name == "convolution" and args[8] == 1 and not args[6]:
        return Contraction((args[0], 1), (args[1], 1), args[2], plain=False)
    return None


def apply_op(
    name: str,
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: dict[str, Any],
    mark_of: Callable[[Any], Mark | None],
) -> Any:
    """Return the marks of what an operation returns: one, or a list of them.

    Args:
        name: of the operation, without its overload and a trailing underscore.
        function: the operation.
        args: its arguments; at least one tensor among them has a mark.
        kwargs: the rest of them.
        mark_of: gives the mark of an argument; None where it has none.

    Raises:
        Blocked: the result is not proportional to the gains, element by element.
    """
    first = mark_of(args[0]) if args else None
    if name in _COPIES and first is not None:
        return first
    if name in _RESHAPES and first is not None:
        return Mark(first.codes.reshape(args[1]), first.plain)
    if name in _MOVES and first is not None:
        return _moved(function(first.codes, *args[1:], **kwargs), first.plain)
    if name in _INDEXED and first is not None:
        return Mark(_indexed(name, function, first.codes, args[1:], kwargs), first.plain)
    if name == "neg" and first is not None:
        return Mark(first.codes, False)
    if name in ("cat", "stack"):
        marks = [mark_of(part) for part in args[0]]
        codes = [_codes(part, mark) for part, mark in zip(args[0], marks, strict=True)]
        return Mark(function(codes, *args[1:], **kwargs), all(mark.plain for mark in marks if mark))
    if name in ("mul", "div"):
        return _multiplied(name, args, mark_of)
    if name in ("add", "sub"):
        return _added(args, mark_of)
    if name == "where" and len(args) == 3:
        return _added(args[1:], mark_of)
    if name == "masked_fill" and first is not None:
        if not _is_zero(args[2]):
            raise Blocked
        return Mark(first.codes, False)
    if name == "constant_pad_nd" and first is not None:
        if len(args) > 2 and not _is_zero(args[2]):
            raise Blocked
        return Mark(function(first.codes, args[1], ZERO), False)
    if name in ("sum", "mean") and first is not None:
        return _reduced(function, first, args[1:], kwargs)
    raise Blocked


def _moved(result: Any, plain: bool) -> Any:
    return [Mark(codes, plain) for codes in result] if isinstance(result, (list, tuple)) else Mark(result, plain)


def _indexed(
    name: str, function: Callable[..., Any], codes: torch.Tensor, args: Sequence[Any], kwargs: dict[str, Any]
) -> torch.Tensor:
    if name == "index":
        indices = [part for index in args[0] for part in _positions(index)]
        return function(codes, indices, **kwargs)
    return function(
        codes, *(_positions(value)[0] if isinstance(value, torch.Tensor) else value for value in args), **kwargs
    )


def _positions(index: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Indices have to be known: unknown ones are taken for the first position, an unknown mask for every one."""
    if index is None or index.device.type != "meta":
        return [index]
    if index.dtype == torch.bool:
        return list(torch.ones(index.shape, dtype=torch.bool).nonzero().unbind(1))
    return [torch.zeros(index.shape, dtype=index.dtype)]


def _codes(part: torch.Tensor, mark: Mark | None) -> torch.Tensor:
    return torch.full(part.shape, ELSE, dtype=torch.int32) if mark is None else mark.codes


def _multiplied(name: str, args: Sequence[Any], mark_of: Callable[[Any], Mark | None]) -> Mark:
    left, right = mark_of(args[0]), mark_of(args[1])
    if left is not None and right is not None:
        raise Blocked
    if left is None and name == "div":
        raise Blocked
    mark, other = (left, args[1]) if left is not None else (right, args[0])
    assert mark is not None
    codes = mark.codes
    if isinstance(other, torch.Tensor):
        codes = torch.broadcast_to(codes, torch.broadcast_shapes(codes.shape, other.shape))
    return Mark(codes, False)


def _added(args: Sequence[Any], mark_of: Callable[[Any], Mark | None]) -> Mark:
    marks = [mark_of(part) for part in args[:2]]
    codes = []
    for part, mark in zip(args[:2], marks, strict=True):
        if mark is not None:
            codes.append(mark.codes)
        elif _is_zero(part):
            codes.append(torch.tensor(ZERO, dtype=torch.int32))
        else:
            raise Blocked
    left, right = torch.broadcast_tensors(*codes)
    result = torch.where(left == ZERO, right, left)
    if not bool(((left == right) | (left == ZERO) | (right == ZERO)).all()):
        raise Blocked
    return Mark(result, False)


def _reduced(function: Callable[..., Any], mark: Mark, args: Sequence[Any], kwargs: dict[str, Any]) -> Mark:
    dims = args[0] if args else None
    if not dims:
        raise Blocked
    keep = bool(args[1]) if len(args) > 1 else bool(kwargs.get("keepdim", False))
    low, high = (getattr(mark.codes, name)(dims, keepdim=keep) for name in ("amin", "amax"))
    if not torch.equal(low, high):
        raise Blocked
    return Mark(low, False)


def _is_zero(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.device.type != "meta" and value.dim() == 0 and float(value) == 0.0
    return isinstance(value, (int, float)) and value == 0
