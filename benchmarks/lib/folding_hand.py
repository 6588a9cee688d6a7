"""Fold a model by hand and compare outputs: what normswap's plans are measured with, sharing no arithmetic with it."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from normswap.foldplan import Consumer, Fold

__all__ = ["distance", "drop_gains", "fold_by_hand", "results", "several", "widened"]


@torch.no_grad()
def fold_by_hand(model: nn.Module, folds: Iterable[Fold]) -> None:
    """Move the gains of these norms, and the biases where the plan says so, into what reads them.

    Args:
        model: changed in place; heads that a fold needs untied are given weights of their own.
        folds: decisions of a plan, all of them folds.
    """
    folds = tuple(folds)
    names = {parameter for fold in folds if fold.untie for parameter in fold.parameters}
    _untie(model, names)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    gains, scaled = {}, set()
    for fold in folds:
        gain = _gain(model, fold)
        effective = gains.setdefault(id(gain), (gain, gain.double().reshape(-1) + fold.spec.offset, fold))[1]
        bias = getattr(model.get_submodule(fold.name), fold.spec.bias_name) if fold.spec.bias else None
        for consumer in fold.consumers:
            weight = parameters[consumer.parameter]
            once = (id(gain), id(weight), consumer.axis, consumer.pieces)
            if once in scaled:
                continue
            scaled.add(once)
            wide = weight.double()
            if fold.bias == "move":
                shift = (wide * _columns(consumer, weight, bias.double().reshape(-1), 0.0)).sum(consumer.axis)
                target = parameters[consumer.bias]
                target.copy_((target.double() + shift.reshape(target.shape)).to(target.dtype))
            weight.copy_((wide * _columns(consumer, weight, effective, 1.0)).to(weight.dtype))
        if fold.bias == "move":
            bias.zero_()
        elif bias is not None:
            bias.copy_((bias.double() / effective.reshape(bias.shape)).to(bias.dtype))
    drop_gains(model, folds)


@torch.no_grad()
def drop_gains(model: nn.Module, folds: Iterable[Fold]) -> None:
    """Set gains to the identity and leave everything else: alone, it has to be seen in the output."""
    for fold in folds:
        gain = _gain(model, fold)
        gain.fill_(1.0 - fold.spec.offset)


def _gain(model: nn.Module, fold: Fold) -> torch.Tensor:
    assert fold.spec is not None and fold.spec.gain_name is not None, f"{fold.name} is folded and has no gain"
    return getattr(model.get_submodule(fold.name), fold.spec.gain_name)


def _columns(consumer: Consumer, weight: torch.Tensor, values: torch.Tensor, fill: float) -> torch.Tensor:
    """Lay channels out over the columns of a weight, in a shape that broadcasts against it."""
    laid = torch.full((weight.shape[consumer.axis],), fill, dtype=torch.float64)
    for piece in consumer.pieces:
        for column in range(piece.start, piece.stop):
            laid[column] = values[piece.channel + (column - piece.start) * piece.step]
    shape = [1] * weight.dim()
    shape[consumer.axis] = -1
    return laid.view(shape)


def _untie(model: nn.Module, names: Iterable[str]) -> None:
    for name in names:
        owner, _, attribute = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, attribute, nn.Parameter(getattr(module, attribute).detach().clone()))


def widened(inputs: Mapping[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Bring the floating-point inputs to a dtype."""
    return {
        key: value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for key, value in inputs.items()
    }


def several(inputs: Mapping[str, Any], count: int = 2) -> Iterator[dict[str, Any]]:
    """Yield inputs, and where they are nothing but text, others of the same shapes, so that more experts are hit."""
    yield dict(inputs)
    ids = inputs.get("input_ids")
    others = {key for key, value in inputs.items() if isinstance(value, torch.Tensor) and value.is_floating_point()}
    if ids is None or others or int(ids.max()) < 20:
        return
    for seed in range(count):
        drawn = torch.randint(10, 200, ids.shape, generator=torch.Generator().manual_seed(seed + 1))
        yield {**inputs, "input_ids": torch.where((ids >= 10) & (ids < 200), drawn, ids)}


@torch.no_grad()
def results(model: nn.Module, inputs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return every floating-point tensor of a model's output, in float64.

    Without a cache: what it keeps of normed rows changes with a fold, and so does what reads it later.
    """
    torch.manual_seed(0)
    if "use_cache" in inspect.signature(model.forward).parameters:
        inputs = {**inputs, "use_cache": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        copies = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in inputs.items()}
        out = model(**copies)
    leaves = tree_leaves(dict(out) if isinstance(out, Mapping) else out)
    return [leaf.double() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def distance(got: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """Return the largest relative distance of any tensor; infinite where numbers or shapes do not match.

    What stands for minus infinity in a mask would outweigh everything else, and is left out.
    """
    if [tensor.shape for tensor in got] != [tensor.shape for tensor in expected]:
        return float("inf")
    found = [0.0]
    for ours, theirs in zip(got, expected, strict=True):
        finite = theirs.abs() < 1e30
        if not torch.equal(finite, ours.abs() < 1e30):
            return float("inf")
        norm = float(theirs[finite].norm())
        found.append(float((ours[finite] - theirs[finite]).norm()) / norm if norm else 0.0)
    return max(found)
