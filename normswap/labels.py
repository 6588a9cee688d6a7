"""Learn by experiment how a conversion rearranges tensors: feed it labels, and read where each of them went."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["Layout", "Part", "Positions", "Unfollowable", "compact", "follow"]

Positions = range | tuple[int, ...]
Shapes = Mapping[str, Sequence[tuple[int, ...]]]
Convert = Callable[[dict[str, list[torch.Tensor]]], Mapping[str, Any]]

# A label tensor that would not fit into this many elements is not made; what needs it counts as unfollowable.
_LARGEST = 1 << 25


class Unfollowable(Exception):
    """A conversion is no rearrangement of whole axes, or could not be tried; the message says which."""


@dataclass(frozen=True)
class Part:
    """What one source tensor gives to a result.

    Attributes:
        source: number of the source tensor, counted through all patterns in their order.
        axes: for each axis of the result, the axis of the source that runs along it; None where there is none.
        positions: for each axis of the result, the positions of it that the source fills.
        held: for each axis of the source, the positions of it that the result takes, ascending. Where `axes` links
            two axes, both have the same count, one position of the result for each of the source.
    """

    source: int
    axes: tuple[int | None, ...]
    positions: tuple[Positions, ...]
    held: tuple[Positions, ...]


@dataclass(frozen=True)
class Layout:
    """A result of a conversion.

    Attributes:
        shape: of the result.
        parts: the sources' shares; together they fill it exactly once.
    """

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def follow(convert: Convert, sources: Shapes) -> dict[str, Layout]:
    """Run a conversion on labels instead of weights, and find what it does.

    Each run labels the sources along one axis only and repeats the labels along the others without storing them, so
    that stacks of experts of any size can be followed. Labels are large random numbers: arithmetic on them does not
    give labels again, and so cannot be taken for a rearrangement.

    Args:
        convert: takes a list of int64 tensors for each pattern, and returns the results by name.
        sources: the shapes of those tensors.

    Returns:
        A layout for each result, by name.

    Raises:
        Unfollowable: the conversion failed, changes values, repeats them, or does not keep axes whole.
    """
    shapes = [shape for group in sources.values() for shape in group]
    codes = _codes(max([len(shapes), *(size for shape in shapes for size in shape)]))
    depth = max(len(shape) for shape in shapes)
    makers: list[_Names | _Along] = [_Names(), *map(_Along, range(depth))]
    try:
        with _Thin():
            if sum(map(math.prod, shapes)) > _LARGEST:
                # Without memory first: what would take too much of it ends here.
                for make in makers:
                    _run(convert, sources, make, codes.to("meta"))
            which, *along = [_run(convert, sources, make, codes) for make in makers]
    except Unfollowable:
        raise
    except Exception as error:
        raise Unfollowable(f"its conversion cannot be tried: {type(error).__name__}: {error}") from error
    return {name: _layout(result, [labels[name] for labels in along], shapes, codes) for name, result in which.items()}


def compact(positions: Iterable[int]) -> Positions:
    """Return positions as a range where their steps are all the same and positive, else as a tuple."""
    found = tuple(positions)
    step = found[1] - found[0] if len(found) > 1 else 1
    if not found or step < 1:
        return found
    even = range(found[0], found[-1] + 1, step)
    return even if tuple(even) == found else found


@dataclass(frozen=True)
class _Names:
    """Labels each source tensor with its number."""

    def __call__(self, number: int, shape: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
        return codes[number]


@dataclass(frozen=True)
class _Along:
    """Labels positions along one axis; equal shapes get the very same memory, so that a stack of them stays thin."""

    axis: int

    def __call__(self, number: int, shape: tuple[int, ...], codes: torch.Tensor) -> torch.Tensor:
        if self.axis >= len(shape):
            return codes[0]
        return codes[: shape[self.axis]].reshape(-1, *(1,) * (len(shape) - self.axis - 1))


def _run(convert: Convert, sources: Shapes, make: _Names | _Along, codes: torch.Tensor) -> dict[str, torch.Tensor]:
    number = 0
    given: dict[str, list[torch.Tensor]] = {}
    for pattern, shapes in sources.items():
        given[pattern] = []
        for shape in shapes:
            given[pattern].append(make(number, shape, codes).expand(shape))
            number += 1
    return {name: value[0] if isinstance(value, list) else value for name, value in convert(given).items()}


def _codes(count: int) -> torch.Tensor:
    """Return distinct random labels, ascending, that no arithmetic on a few of them is likely to hit again."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(1 << 40, 1 << 60, (2 * count + 64,), generator=generator).unique()
    return codes[torch.randperm(len(codes), generator=generator)[:count]].sort().values


def _decode(labels: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    if labels.dtype != codes.dtype:
        raise Unfollowable(f"its conversion changes the dtype, to {labels.dtype}")
    labels = labels.contiguous()
    found = torch.searchsorted(codes, labels).clamp_(max=len(codes) - 1)
    if not torch.equal(codes[found], labels):
        raise Unfollowable("its conversion changes values, it is no rearrangement")
    return found


def _layout(
    which: torch.Tensor, along: list[torch.Tensor], shapes: list[tuple[int, ...]], codes: torch.Tensor
) -> Layout:
    thin = _decode(_narrowed(which), codes)
    values, order = thin.flatten().sort(stable=True)
    sources, counts = values.unique_consecutive(return_counts=True)
    learner = _Learner([_narrowed(labels) for labels in along], codes)
    parts, start = [], 0
    for source, count in zip(sources.tolist(), counts.tolist(), strict=True):
        if source >= len(shapes):
            raise Unfollowable("its conversion changes values, it is no rearrangement")
        places = torch.unravel_index(order[start : start + count], thin.shape)
        start += count
        box = [
            range(size) if thin.shape[axis] == 1 else compact(place.unique().tolist())
            for axis, (size, place) in enumerate(zip(which.shape, places, strict=True))
        ]
        if math.prod(len(place) for axis, place in enumerate(box) if thin.shape[axis] > 1) != count:
            raise Unfollowable("its conversion mixes the tensors position by position")
        parts.append(Part(source, *learner.part(shapes[source], box)))
    return Layout(tuple(which.shape), tuple(parts))


# Axes, positions and held, as in `Part`.
_Lie = tuple[tuple[int | None, ...], tuple[Positions, ...], tuple[Positions, ...]]


class _Learner:
    """Reads from labels how one source lies in its box of the result; once for boxes that hold the same labels."""

    def __init__(self, along: list[torch.Tensor], codes: torch.Tensor) -> None:
        self.along, self.codes = along, codes
        sizes = zip(*(labels.shape for labels in along), strict=True)
        self.told = {dim for dim, of_labels in enumerate(sizes) if max(of_labels) > 1}
        self.known: dict[Any, _Lie] = {}

    def part(self, shape: tuple[int, ...], box: list[Positions]) -> _Lie:
        # Along the other axes nothing varies: there, only the number of positions matters.
        kind = (shape, tuple(place if dim in self.told else len(place) for dim, place in enumerate(box)))
        if kind not in self.known:
            self.known[kind] = self._learn(shape, box)
        axes, positions, held = self.known[kind]
        return axes, tuple(positions[dim] if dim in self.told else place for dim, place in enumerate(box)), held

    def _learn(self, shape: tuple[int, ...], box: list[Positions]) -> _Lie:
        axes: list[int | None] = [None] * len(box)
        positions = list(box)
        held: list[Positions] = []
        for axis in range(len(shape)):
            labels = _cut(self.along[axis], box)
            varying = [dim for dim in range(labels.ndim) if bool((labels != labels.narrow(dim, 0, 1)).any())]
            if len(varying) > 1:
                raise Unfollowable("its conversion spreads an axis over several others")
            if not varying:
                held.append(compact(_decode(labels.flatten()[:1], self.codes).tolist()))
                continue
            dim = varying[0]
            if axes[dim] is not None:
                raise Unfollowable("its conversion lays two axes along one")
            for other in reversed(range(labels.ndim)):
                if other != dim:
                    labels = labels.select(other, 0)
            taken, order = _decode(labels, self.codes).sort()
            if len(taken.unique_consecutive()) != len(taken):
                raise Unfollowable("its conversion repeats values or merges axes")
            axes[dim] = axis
            positions[dim] = compact(torch.tensor(box[dim])[order].tolist())
            held.append(compact(taken.tolist()))
        _pair_single(axes, positions, shape, held)
        if any(axis is None and len(place) > 1 for axis, place in zip(axes, positions, strict=True)):
            raise Unfollowable("its conversion repeats values or merges axes")
        return tuple(axes), tuple(positions), tuple(held)


def _pair_single(
    axes: list[int | None], positions: list[Positions], shape: tuple[int, ...], held: list[Positions]
) -> None:
    """Pair axes of one position, which no label can tell apart: in their order, where there are as many of both."""
    free = [dim for dim, axis in enumerate(axes) if axis is None and len(positions[dim]) == 1]
    left = [axis for axis in range(len(shape)) if axis not in axes and len(held[axis]) == 1]
    if len(free) == len(left):
        for dim, axis in zip(free, left, strict=True):
            axes[dim] = axis


def _cut(labels: torch.Tensor, box: list[Positions]) -> torch.Tensor:
    for dim, place in enumerate(box):
        if labels.shape[dim] == 1:
            continue
        if isinstance(place, range) and place.step == 1:
            labels = labels.narrow(dim, place.start, len(place))
        else:
            labels = labels.index_select(dim, torch.tensor(place))
    return labels


def _narrowed(tensor: torch.Tensor) -> torch.Tensor:
    """Keep one position of each axis along which a tensor repeats itself without storing it."""
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim] > 1:
            tensor = tensor.narrow(dim, 0, 1)
    return tensor


class _Thin(TorchFunctionMode):
    """Keeps repeated axes unstored through the functions that would write them out; changes no value.

    Nothing writes into labels, so a copy may be the tensor itself.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return args[0]
        if func in _JOINS:
            result = _joined(*args, **kwargs, new=func is torch.stack)
        elif func in _RESHAPES:
            result = _reshaped(args[0], *args[1:], **kwargs)
        else:
            result = func(*args, **kwargs)
        for tensor in result if isinstance(result, (list, tuple)) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().nbytes() > 8 * _LARGEST:
                raise Unfollowable("its conversion is too large to try")
        return result


_COPIES = {torch.Tensor.contiguous, torch.Tensor.clone, torch.clone}
_JOINS = {torch.cat, torch.concat, torch.concatenate, torch.stack}
_RESHAPES = {torch.reshape, torch.Tensor.reshape}


def _joined(tensors: Sequence[torch.Tensor], dim: int = 0, *, new: bool) -> torch.Tensor:
    if new:
        dim %= tensors[0].ndim + 1
        tensors = [tensor.unsqueeze(dim) for tensor in tensors]
    dim %= tensors[0].ndim
    first = tensors[0]
    total = sum(tensor.shape[dim] for tensor in tensors)
    full = (*first.shape[:dim], total, *first.shape[dim + 1 :])
    thin = list(tensors)
    for axis in range(first.ndim):
        if axis != dim and all(tensor.stride(axis) == 0 or tensor.shape[axis] == 1 for tensor in tensors):
            thin = [tensor.narrow(axis, 0, 1) for tensor in thin]
    single = first.shape[dim] == 1 or first.stride(dim) == 0
    if single and all(_same(first, tensor, dim) for tensor in tensors):
        return thin[0].narrow(dim, 0, 1).expand(full)
    return torch.cat(thin, dim).expand(full)


def _same(first: torch.Tensor, other: torch.Tensor, dim: int) -> bool:
    """Tell whether two tensors hold the same memory, whatever their length along ``dim``."""
    shape, strides = list(other.shape), list(other.stride())
    shape[dim], strides[dim] = first.shape[dim], first.stride(dim)
    single = other.shape[dim] == 1 or other.stride(dim) == 0
    return (
        single
        and other.untyped_storage()._cdata == first.untyped_storage()._cdata
        and other.storage_offset() == first.storage_offset()
        and shape == list(first.shape)
        and strides == list(first.stride())
    )


def _reshaped(tensor: torch.Tensor, *shape: Any) -> torch.Tensor:
    full = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
    if -1 in full:
        at = full.index(-1)
        full[at] = tensor.numel() // math.prod(size for size in full if size != -1)
    thin, target = tensor, list(full)
    for dim, other in _kept_axes(tuple(tensor.shape), full):
        if tensor.stride(dim) == 0:
            thin, target[other] = thin.narrow(dim, 0, 1), 1
    return thin.reshape(target).expand(full)


def _kept_axes(shape: Sequence[int], target: Sequence[int]) -> list[tuple[int, int]]:
    """Pair the axes that a reshape leaves as they are: equal sizes with equal products before them."""
    before = {math.prod(target[:dim]): dim for dim, size in enumerate(target) if size > 1}
    return [
        (dim, before[product])
        for dim, size in enumerate(shape)
        if size > 1 and (product := math.prod(shape[:dim])) in before and target[before[product]] == size
    ]
