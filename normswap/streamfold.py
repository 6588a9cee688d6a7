"""Fold gains into a model whose weights are on disk: each weight is multiplied when it is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from normswap.conflicts import Owners, Reading, conflicts, norm_parameters, readings
from normswap.errors import ModelError
from normswap.factors import Channels, along, channels_of, factor_of
from normswap.foldplan import Fold, FoldPlan, stored_gain
from normswap.gains import contract
from normswap.narrowing import lost_range, round_once
from normswap.offloading import Stream, stream_of

__all__ = ["fold_streamed_"]

_Values = Callable[[torch.Tensor], torch.Tensor]
# Elements that are worked on at a time, in float64.
_PIECE = 1 << 20


def fold_streamed_(model: nn.Module, plan: FoldPlan) -> nn.Module:
    """Fold every gain of a plan into a streamed model, as `normswap.gains.fold_` does with one in memory.

    Gains and biases are changed at once; for a bias that moves, the weights that it is worked out from are read once.
    All other weights are changed whenever they are read, in float64, and rounded once to the model's dtype.

    Args:
        model: of `normswap.offloading.load_streamed`, with ``untied`` where a fold of the plan needs it.
        plan: the decisions.

    Returns:
        The model.

    Raises:
        ModelError: a fold would not be exact; nothing was changed. Values that leave the range of the dtype are told
            when they are read.
    """
    stream = stream_of(model)
    if stream is None:
        raise ValueError(f"expected a streamed model, got a {type(model).__name__} in memory")
    owners = Owners(model)
    found = conflicts(model, plan)
    channels: dict[str, Channels] = {}
    for fold in plan.folds:
        one = channels_of(fold, *(_norm_tensor(owners, fold, at) for at in (0, 1)))
        if isinstance(one, str):
            found.setdefault(fold.name, one)
        else:
            channels[fold.name] = one
    if found:
        name, reason = next(iter(found.items()))
        raise ModelError(f"cannot fold {name}: {reason}; nothing was changed, leave this norm out of the plan")
    changes = dict(_changes(stream, owners, plan, channels))
    before = stream.change

    def change(name: str, values: torch.Tensor) -> torch.Tensor:
        values = values if before is None else before(name, values)
        return changes[name](values) if name in changes else values

    stream.change = change
    with torch.no_grad():
        stream.refresh(changes)
    return model


def _norm_tensor(owners: Owners, fold: Fold, at: int) -> torch.Tensor | None:
    name = norm_parameters(fold)[at]
    return None if name is None else owners.get(name).data


def _changes(
    stream: Stream, owners: Owners, plan: FoldPlan, channels: dict[str, Channels]
) -> list[tuple[str, _Values]]:
    found: list[tuple[str, _Values]] = []
    biases: dict[int, list[Reading]] = {}
    for uses in readings(owners, plan.folds).values():
        weight = owners.get(uses[0].consumer.parameter)
        axis = uses[0].consumer.axis
        factor = factor_of([(use.consumer, channels[use.fold.name]) for use in uses], weight.shape[axis])
        found.append((stream.name_of(weight), partial(_multiplied, factor, axis, uses[0].consumer.parameter)))
        for use in uses:
            if use.fold.bias == "move" and use.consumer.bias is not None:
                biases.setdefault(id(owners.get(use.consumer.bias)), []).append(use)
    for uses in biases.values():
        assert uses[0].consumer.bias is not None
        bias = owners.get(uses[0].consumer.bias)
        found.append((stream.name_of(bias), partial(_moved, stream, owners, uses, channels)))
    for fold in plan.folds:
        gain, bias_name = norm_parameters(fold)
        if gain is not None:
            found.append((stream.name_of(owners.get(gain)), partial(_identity, fold)))
        if bias_name is not None:
            kept = channels[fold.name]
            found.append((stream.name_of(owners.get(bias_name)), partial(_left, kept)))
    return found


def _multiplied(factor: torch.Tensor, axis: int, name: str, values: torch.Tensor) -> torch.Tensor:
    factor = factor.to(values.device)
    step = max(1, _PIECE // max(1, values[:1].numel()))
    for start in range(0, len(values), step):
        piece = values[start : start + step]
        own = along(factor[start : start + step] if axis == 0 else factor, axis, values.dim())
        rounded = round_once(piece.double() * own, values.dtype)
        if lost := lost_range(rounded, (piece != 0) & (own != 0)):
            raise ModelError(f"cannot fold into {name}: {lost}; leave the norms that it reads out of the plan")
        piece.copy_(rounded)
    return values


def _moved(
    stream: Stream, owners: Owners, uses: Sequence[Reading], channels: dict[str, Channels], values: torch.Tensor
) -> torch.Tensor:
    total = values.to(torch.float64, copy=True)
    for use in uses:
        moved, axis = channels[use.fold.name].moved, use.consumer.axis
        assert moved is not None
        weight = stream.read(owners.get(use.consumer.parameter), changed=False)
        shift = use.consumer.spread(moved, weight.shape[axis], 0.0).to(weight.device)
        total += contract(weight, shift, axis).to(total.device)
    return round_once(total, values.dtype)


def _identity(fold: Fold, values: torch.Tensor) -> torch.Tensor:
    assert fold.spec is not None
    return stored_gain(fold.spec, torch.ones(values.numel(), dtype=torch.float64), values)


def _left(channels: Channels, values: torch.Tensor) -> torch.Tensor:
    """Return what stays of a norm's bias."""
    if channels.kept is not None:
        return round_once(channels.kept, values.dtype).reshape(values.shape)
    return torch.zeros_like(values) if channels.moved is not None else values
