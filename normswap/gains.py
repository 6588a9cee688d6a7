"""Fold gains into the weights that read them, in a model in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from normswap.conflicts import Owners, Reading, conflicts, norm_parameters, readings
from normswap.errors import ModelError
from normswap.factors import Channels, along, channels_of, factor_of
from normswap.foldplan import Fold, FoldPlan, stored_gain
from normswap.narrowing import lost_range, round_once

__all__ = ["check_fold", "fold_"]

# Elements that are worked on at a time, in float64.
_PIECE = 1 << 20


def check_fold(model: nn.Module, plan: FoldPlan) -> dict[str, str]:
    """Find the folds of a plan that would not be exact in this model; nothing is changed.

    Args:
        model: what the plan was made for, with its weights.
        plan: the decisions.

    Returns:
        Name of the norm to the reason: a parameter that other modules hold too, or a value that overflows or becomes
        zero in its dtype. With `normswap.factors.leave` the plan goes on without them.

    Raises:
        ModelError: the parameters are on the meta device, quantized or sharded, or not those of the plan.
    """
    return _Work(model, plan, rounded=True).faults()


def fold_(model: nn.Module, plan: FoldPlan, *, rounded: bool = True) -> nn.Module:
    """Fold every gain of a plan in place.

    The weights are multiplied in float64 and rounded once. Each norm keeps its gain, which becomes the identity in its
    own form (1, or 0 where the norm multiplies by ``1 + w``). All values are worked out and checked before the first
    is assigned. The parameters stay the same objects.

    Args:
        model: the model; swapped by `normswap.patch` or not.
        plan: the decisions.
        rounded: to the dtype of each parameter. Without, parameters and buffers of half precision become float32
            first, so that the folded weights stand there unrounded, as far as float32 holds them.

    Returns:
        The model.

    Raises:
        ModelError: a fold would not be exact (see `check_fold`), or this model cannot be folded; nothing was changed.
    """
    if faults := _Work(model, plan, rounded).faults():
        name, reason = next(iter(faults.items()))
        more = f" ({len(faults) - 1} more norms likewise)" if len(faults) > 1 else ""
        raise ModelError(f"cannot fold {name}{more}: {reason}; nothing was changed, leave these norms out of the plan")
    if not rounded:
        _widen(model)
    with torch.no_grad():
        _Work(model, plan, rounded).assign()
    return model


def _widen(model: nn.Module) -> None:
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and tensor.dtype.itemsize < 4:
            tensor.data = tensor.data.float()


@dataclass(frozen=True)
class _Change:
    """Rows of a parameter and what they become, unrounded; the norms that it is for."""

    parameter: nn.Parameter
    name: str
    start: int
    values: torch.Tensor
    nonzero: torch.Tensor
    norms: tuple[str, ...]


class _Work:
    """The changes that a plan makes to one model."""

    def __init__(self, model: nn.Module, plan: FoldPlan, rounded: bool) -> None:
        self._rounded = rounded
        self._owners = Owners(model)
        self._plan = plan
        self._found = conflicts(model, plan)
        _require_plain(self._owners, plan)
        self._channels: dict[str, Channels] = {}
        for fold in plan.folds:
            channels = channels_of(fold, *(self._norm_tensor(fold, at) for at in (0, 1)))
            if isinstance(channels, str):
                self._found.setdefault(fold.name, channels)
            else:
                self._channels[fold.name] = channels

    def faults(self) -> dict[str, str]:
        """Return the reasons why folds would not be exact."""
        for change in self._changes():
            dtype = change.parameter.dtype
            if not self._rounded and dtype.itemsize < 4:
                dtype = torch.float32
            if lost := lost_range(round_once(change.values, dtype), change.nonzero):
                for norm in change.norms:
                    self._found.setdefault(norm, f"in {change.name} {lost}")
        return self._found

    def assign(self) -> None:
        """Put the new values in place."""
        for change in self._changes():
            rounded = round_once(change.values, change.parameter.dtype)
            # A scalar parameter has no rows.
            target = change.parameter.data
            (target if target.dim() == 0 else target[change.start : change.start + len(rounded)]).copy_(rounded)
        for fold in self._plan.folds:
            gain, bias = (self._norm_tensor(fold, at) for at in (0, 1))
            channels = self._channels[fold.name]
            if gain is not None:
                assert fold.spec is not None
                gain.copy_(stored_gain(fold.spec, torch.ones(gain.numel(), dtype=torch.float64), gain))
            if bias is not None and channels.kept is not None:
                bias.copy_(round_once(channels.kept, bias.dtype).reshape(bias.shape))
            elif bias is not None and channels.moved is not None:
                bias.zero_()

    def _norm_tensor(self, fold: Fold, at: int) -> torch.Tensor | None:
        name = norm_parameters(fold)[at]
        return None if name is None else self._owners.get(name).data

    def _changes(self) -> Iterator[_Change]:
        """Yield what each weight and bias becomes; a bias before the weight that it is worked out from."""
        sound = [fold for fold in self._plan.folds if fold.name in self._channels]
        by_weight = readings(self._owners, sound)
        by_bias: dict[int, list[Reading]] = {}
        for uses in by_weight.values():
            for use in uses:
                if use.fold.bias == "move" and use.consumer.bias is not None:
                    by_bias.setdefault(id(self._owners.get(use.consumer.bias)), []).append(use)
        for uses in by_bias.values():
            yield self._bias_change(uses)
        for uses in by_weight.values():
            yield from self._weight_changes(uses)

    def _bias_change(self, uses: list[Reading]) -> _Change:
        name = uses[0].consumer.bias
        assert name is not None
        bias = self._owners.get(name)
        values = bias.data.to(torch.float64, copy=True)
        for use in uses:
            weight, moved = self._owners.get(use.consumer.parameter).data, self._channels[use.fold.name].moved
            assert moved is not None
            axis = use.consumer.axis
            shift = use.consumer.spread(moved, weight.shape[axis], 0.0).to(weight.device)
            values += contract(weight, shift, axis).to(values.device)
        # A sum may be zero, and no value is lost by that.
        return _Change(bias, name, 0, values, torch.zeros_like(values, dtype=torch.bool), _norms(uses))

    def _weight_changes(self, uses: list[Reading]) -> Iterator[_Change]:
        name = uses[0].consumer.parameter
        weight = self._owners.get(name)
        rows = weight.data
        axis = uses[0].consumer.axis
        parts = [(use.consumer, self._channels[use.fold.name]) for use in uses]
        factor = factor_of(parts, rows.shape[axis]).to(rows.device)
        step = max(1, _PIECE // max(1, rows[:1].numel()))
        for start in range(0, len(rows), step):
            piece = rows[start : start + step]
            own = along(factor[start : start + step] if axis == 0 else factor, axis, rows.dim())
            yield _Change(weight, name, start, piece.double() * own, (piece != 0) & (own != 0), _norms(uses))


def contract(weight: torch.Tensor, values: torch.Tensor, axis: int) -> torch.Tensor:
    """Contract one axis of a weight with values for its positions, in float64 and in pieces.

    Args:
        weight: any shape, any floating dtype.
        values: ``(weight.shape[axis],)``, float64.
        axis: the axis.

    Returns:
        Of the shape of the weight without the axis, float64.
    """
    step = max(1, _PIECE // max(1, weight[:1].numel()))
    pieces = weight.split(step)
    if axis:
        return torch.cat([torch.tensordot(piece.double(), values, ([axis], [0])) for piece in pieces])
    parts = (
        torch.tensordot(piece.double(), part, ([0], [0]))
        for piece, part in zip(pieces, values.split(step), strict=True)
    )
    return torch.stack(list(parts)).sum(0)


def _norms(uses: list[Reading]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(use.fold.name for use in uses))


def _require_plain(owners: Owners, plan: FoldPlan) -> None:
    for fold in plan.folds:
        consumers = (name for c in fold.consumers for name in (c.parameter, c.bias if fold.bias == "move" else None))
        for name in (*norm_parameters(fold), *consumers):
            if name is None:
                continue
            parameter = owners.get(name)
            if what := _special(parameter):
                raise ModelError(f"expected a plain floating-point tensor at {name}, it is {what}; fold before that")


def _special(parameter: nn.Parameter) -> str:
    """Say in what way a parameter is no plain tensor of numbers; empty for one that is."""
    if type(parameter).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return f"a {type(parameter).__name__} (sharded or quantized)"
    if parameter.is_meta:
        return "on the meta device, without values"
    if not parameter.dtype.is_floating_point or parameter.dtype.itemsize < 2:
        return f"{str(parameter.dtype).removeprefix('torch.')} (quantized)"
    return ""
