"""Compare two modules value by value: what a checkpoint's comparison is on disk, for models that are in memory."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch
from torch import nn

from normswap.errors import ModelError, UsageError
from normswap.evidence import TensorChange, TensorFigures
from normswap.factors import leave
from normswap.folding import make_fold_plan
from normswap.foldplan import FoldPlan, effective_gain
from normswap.gains import check_fold, fold_
from normswap.gaps import Gap
from normswap.patching import unpatch
from normswap.plan import make_plan
from normswap.recognising import describe, told_signs
from normswap.spec import dtype_name
from normswap.telling import told_as_zeros

__all__ = ["compare_modules", "find_folds", "naming", "require_values", "told_as_folded", "unseen_changes"]

# Changed values are named up to so many.
_SHOWN = 5


def require_values(*models: nn.Module) -> None:
    """Refuse modules on the meta device, which have no values to run with.

    Raises:
        UsageError: a parameter or buffer is there.
    """
    for model in models:
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if value.is_meta:
                raise UsageError(
                    f"expected modules with weights, got {type(model).__name__} with {name} on the meta device; load "
                    "its weights first"
                )


@torch.no_grad()
def compare_modules(original: nn.Module, converted: nn.Module) -> TensorFigures:
    """Compare the parameters and persistent buffers of two modules by name.

    Nothing is made of a change: whether it is one of the function, the gates have to say.

    Args:
        original: the module that is right by definition; on any device but meta.
        converted: the module under test.
    """
    ours, theirs = (
        {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
        for model in (original, converted)
    )
    changes, same = [], 0
    for name, value in ours.items():
        other = theirs.get(name)
        if other is None:
            changes.append(TensorChange(name, "missing", False, "is missing"))
        elif value.shape != other.shape:
            words = f"{list(other.shape)}, the original has {list(value.shape)}"
            changes.append(TensorChange(name, "shape", False, words))
        elif value.dtype != other.dtype:
            words = f"{dtype_name(other.dtype)}, the original has {dtype_name(value.dtype)}"
            changes.append(TensorChange(name, "dtype", False, words))
        elif (change := _changed(name, value, other.to(value.device))) is not None:
            changes.append(change)
        else:
            same += 1
    changes += [TensorChange(name, "extra", False, "is not of the original") for name in theirs.keys() - ours.keys()]
    return TensorFigures(*_summed_up(changes), len(ours), same, changes)


def _summed_up(changes: list[TensorChange]) -> tuple[str, str]:
    """Return summary and kind."""
    differing = sum(not one.explained for one in changes)
    told = [] if not differing else ["1 tensor differs" if differing == 1 else f"{differing} tensors differ"]
    kinds = ["unknown"] * len(told)
    if signs := len(changes) - differing:
        told, kinds = [told_as_zeros(signs), *told], ["zeros", *kinds]
    return (", ".join(told), "+".join(kinds)) if changes else ("identical", "identical")


@torch.no_grad()
def find_folds(original: nn.Module, converted: nn.Module) -> FoldPlan | None:
    """Find the folds that make one module of another, bit for bit, as `normswap.fold` does; None where none do.

    Args:
        original: the module that is right by definition; it is not changed.
        converted: the module under test.
    """
    model = unpatch(copy.deepcopy(original))
    theirs, dropped = dict(converted.named_parameters()), []
    plan = make_plan(model)
    for decision in plan.decisions:
        spec = decision.spec
        if spec is None or spec.gain_name is None:
            continue
        name = f"{decision.name}.{spec.gain_name}".removeprefix(".")
        gains = (dict(model.named_parameters()).get(name), theirs.get(name))
        one, other = (None if gain is None else bool((effective_gain(spec, gain) == 1).all()) for gain in gains)
        if one is False and other:
            dropped.append(decision.name)
    if not dropped:
        return None
    try:
        folds = make_fold_plan(model, plan)
        folds = leave(folds, {fold.name: "its gain was left" for fold in folds.folds if fold.name not in dropped})
        folds = leave(folds, check_fold(model, folds))
        if {fold.name for fold in folds.folds} != set(dropped):
            return None
        fold_(model, folds)
    except ModelError:
        return None
    return None if compare_modules(model, converted).unexplained else folds


def told_as_folded(figures: TensorFigures, folds: FoldPlan) -> TensorFigures:
    """Say of tensors that differ that folds explain it, where `find_folds` has shown that they do."""
    weights = {consumer.parameter for fold in folds.folds for consumer in fold.consumers}
    told = [
        f"{count} {what}{'' if count == 1 else 's'}"
        for count, what in ((len(folds.folds), "gain"), (len(weights), "linear"))
    ]
    changes = [replace(one, kind="folded", explained=True, detail="what folding gives") for one in figures.changes]
    return replace(figures, kind="folded", summary=f"{told[0]} folded into {told[1]}", changes=changes)


def _changed(name: str, one: torch.Tensor, other: torch.Tensor) -> TensorChange | None:
    if not one.is_floating_point():
        return None if torch.equal(one, other) else TensorChange(name, "changed", False, "differs")
    gap = Gap(allowed=0)
    gap.add(one.reshape(-1) if one.dim() == 0 else one, other.reshape(-1) if one.dim() == 0 else other, 0)
    if gap.exact:
        return TensorChange(name, "zeros", True, told_signs(gap), None, 0.0) if gap.signs else None
    return TensorChange(name, "changed", False, f"differs {describe(gap)}", None, gap.error)


def naming(figures: TensorFigures) -> list[str]:
    """Name the tensors that differ, as reasons beside a gate that failed."""
    found = figures.unexplained
    more = [f"tensors: and {len(found) - _SHOWN} more differ"] if len(found) > _SHOWN else []
    return [f"tensors: {change.name} {change.detail}" for change in found[:_SHOWN]] + more


def unseen_changes(figures: TensorFigures) -> list[str]:
    """Return a doubt where tensors differ, for when no output does: the inputs do not reach them."""
    found = figures.unexplained
    if not found:
        return []
    names = ", ".join(change.name for change in found[:_SHOWN])
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return [
        f"tensors: {names}{more} differ, and no output does: nothing that ran reads what differs there; give inputs "
        "that do (--tokens, --text)"
    ]
