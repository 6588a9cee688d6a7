"""Fold gains into a model that is not all in this process's memory: on disk, or divided among processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap.conflicts import Owners, Reading, conflicts, norm_parameters, readings
from normswap.distributed import distribute, involved
from normswap.errors import ModelError
from normswap.factors import Channels, along, channels_of, factor_of
from normswap.foldplan import Fold, FoldPlan, stored_gain
from normswap.gains import contract
from normswap.narrowing import lost_range, round_once
from normswap.offloading import stream_of

__all__ = ["fold_parallel_", "fold_streamed_"]

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
    found = _changes(model, plan, partial(stream.read, changed=False))
    changes = {stream.name_of(parameter): change for parameter, change in found}
    before = stream.change

    def change(name: str, values: torch.Tensor) -> torch.Tensor:
        values = values if before is None else before(name, values)
        return changes[name](values) if name in changes else values

    stream.change = change
    with torch.no_grad():
        stream.refresh(changes)
    return model


def fold_parallel_(model: nn.Module, plan: FoldPlan) -> nn.Module:
    """Fold every gain of a plan into a model that is divided among processes, in place; all of them call this.

    One weight at a time is whole on every process while it is folded.

    Args:
        model: of `normswap.processes.load_parallel`.
        plan: the decisions.

    Returns:
        The model.

    Raises:
        ModelError: a fold would not be exact, or a weight is divided in a way that cannot be undone.
    """
    with torch.no_grad():
        found = _changes(model, plan, _whole)
        # A bias that moves is worked out from weights as they were.
        news = [(parameter, change(_whole(parameter))) for parameter, change in found if parameter.dim() < 2]
        for parameter, change in found:
            if parameter.dim() >= 2:
                _give(parameter, change(_whole(parameter)))
        for parameter, values in news:
            _give(parameter, values)
    return model


def _whole(parameter: nn.Parameter) -> torch.Tensor:
    given: Any = parameter.detach()
    return given.full_tensor().clone() if involved(given) else given.clone()


def _give(parameter: nn.Parameter, values: torch.Tensor) -> None:
    if not involved(parameter):
        parameter.copy_(values)
        return
    given: Any = parameter
    divided: Any = distribute(values, given)
    given.to_local().copy_(divided.to_local())


def _changes(
    model: nn.Module, plan: FoldPlan, read: Callable[[nn.Parameter], torch.Tensor]
) -> list[tuple[nn.Parameter, _Values]]:
    """Find what becomes of each parameter; ``read`` gives the values of one as they were."""
    owners = Owners(model)
    refused = conflicts(model, plan)
    channels: dict[str, Channels] = {}
    for fold in plan.folds:
        names = norm_parameters(fold)
        one = channels_of(fold, *(None if name is None else read(owners.get(name)) for name in names))
        if isinstance(one, str):
            refused.setdefault(fold.name, one)
        else:
            channels[fold.name] = one
    if refused:
        name, reason = next(iter(refused.items()))
        raise ModelError(f"cannot fold {name}: {reason}; nothing was changed, leave this norm out of the plan")
    found: list[tuple[nn.Parameter, _Values]] = []
    biases: dict[int, list[Reading]] = {}
    for uses in readings(owners, plan.folds).values():
        name, axis = uses[0].consumer.parameter, uses[0].consumer.axis
        weight = owners.get(name)
        factor = factor_of([(use.consumer, channels[use.fold.name]) for use in uses], weight.shape[axis])
        found.append((weight, partial(_multiplied, factor, axis, name)))
        for use in uses:
            if use.fold.bias == "move" and use.consumer.bias is not None:
                biases.setdefault(id(owners.get(use.consumer.bias)), []).append(use)
    for uses in biases.values():
        assert uses[0].consumer.bias is not None
        found.append((owners.get(uses[0].consumer.bias), partial(_moved, owners, read, uses, channels)))
    for fold in plan.folds:
        gain, bias = norm_parameters(fold)
        if gain is not None:
            found.append((owners.get(gain), partial(_identity, fold)))
        if bias is not None:
            found.append((owners.get(bias), partial(_left, channels[fold.name])))
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
    owners: Owners,
    read: Callable[[nn.Parameter], torch.Tensor],
    uses: Sequence[Reading],
    channels: dict[str, Channels],
    values: torch.Tensor,
) -> torch.Tensor:
    total = values.to(torch.float64, copy=True)
    for use in uses:
        moved, axis = channels[use.fold.name].moved, use.consumer.axis
        assert moved is not None
        weight = read(owners.get(use.consumer.parameter))
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
