"""Tell which part of which parameter a tensor is, through views and casts, from strides and offsets alone."""

from __future__ import annotations

import math
from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import nn

from normswap.spec import NormSpec

__all__ = ["Region", "Weights", "alike_key"]


@dataclass(frozen=True)
class _Run:
    """A dimension of a tensor, as positions of one axis of a parameter: ``start``, ``start + step`` and so on."""

    size: int
    stride: int
    axis: int
    start: int
    step: int


@dataclass(frozen=True)
class Region:
    """A tensor that is a part of a parameter.

    Attributes:
        parameter: the parameter.
        runs: for each dimension of the tensor, the positions that it takes of one axis.
        key: equal for tensors that are the same part.
        volume: number of elements.
    """

    parameter: nn.Parameter
    runs: tuple[_Run, ...]
    key: tuple[int, ...]
    volume: int

    def positions(self, dim: int) -> tuple[int, range]:
        """Return the axis of the parameter that a dimension runs along, -1 for none, and its positions there."""
        run = self.runs[dim]
        return run.axis, range(run.start, run.start + run.size * run.step, run.step)


class Weights:
    """Knows parameters again by the memory that they lie in.

    Args:
        parameters: those to be known.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._layouts: dict[int, tuple[nn.Parameter, tuple[_Run, ...], int, torch.Tensor]] = {}
        for parameter in parameters:
            runs = tuple(
                _Run(size, stride, axis, 0, 1)
                for axis, (size, stride) in enumerate(zip(parameter.shape, parameter.stride(), strict=True))
            )
            self._layouts.setdefault(_storage(parameter), (parameter, runs, int(parameter.storage_offset()), parameter))

    def owner(self, tensor: torch.Tensor) -> nn.Parameter | None:
        """Return the parameter that a tensor is a part or a copy of; None where it is of none."""
        found = self._layouts.get(_storage(tensor))
        return None if found is None else found[0]

    def note_copy(self, source: torch.Tensor, copy: torch.Tensor) -> None:
        """Take note that a new tensor holds the elements of a part of a parameter, position by position."""
        region = self.find(source)
        if region is None or _storage(copy) == _storage(source):
            return
        runs = tuple(
            _Run(run.size, stride, run.axis, run.start, run.step)
            for run, stride in zip(region.runs, copy.stride(), strict=True)
        )
        # The copy itself is kept, or its memory might become another tensor's.
        self._layouts[_storage(copy)] = (region.parameter, runs, int(copy.storage_offset()), copy)

    def find(self, tensor: torch.Tensor) -> Region | None:
        """Return what part of a parameter a tensor is; None where that cannot be told."""
        known = self._layouts.get(_storage(tensor))
        if known is None:
            return None
        parameter, layout, base, _ = known
        rest = int(tensor.storage_offset()) - base
        starts: dict[int, int] = {}
        for at in sorted(range(len(layout)), key=lambda at: -layout[at].stride):
            if layout[at].stride:
                starts[at], rest = divmod(rest, layout[at].stride)
        runs = []
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
            if not stride or size == 1:
                # The same again and again, or a dimension that the parameter has not.
                runs.append(_Run(1, 0, -1, 0, 1))
                continue
            found = _carrier(layout, stride)
            if found is None:
                return None
            run = layout[found]
            start = run.start + starts.get(found, 0) * run.step
            runs.append(_Run(size, stride, run.axis, start, run.step * (stride // run.stride)))
        key = (id(parameter), int(tensor.storage_offset()) - base, *tensor.shape, *tensor.stride())
        return Region(parameter, tuple(runs), key, math.prod(run.size for run in runs))


def _carrier(layout: tuple[_Run, ...], stride: int) -> int | None:
    """The dimension with the largest stride that a stride is a multiple of."""
    fits = [at for at, run in enumerate(layout) if run.stride and run.size and stride and stride % run.stride == 0]
    return max(fits, key=lambda at: (layout[at].stride, layout[at].size), default=None)


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def alike_key(module: nn.Module, spec: NormSpec | None) -> Hashable:
    """Return what is equal for norms that compute the same with the same gain and bias, held in several modules."""
    if spec is None or spec.gain_name is None:
        return id(module)
    bias = getattr(module, spec.bias_name) if spec.bias and spec.bias_name else None
    return spec, id(getattr(module, spec.gain_name)), id(bias)
