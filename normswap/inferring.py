"""Find out from two checkpoints alone which gains were folded: those that became the identity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch

from normswap.errors import ModelError, NothingToPatchError
from normswap.factors import leave
from normswap.folding import make_fold_plan
from normswap.foldplan import Fold, FoldPlan, effective_gain
from normswap.foldwork import FoldWork, prepare_folds
from normswap.loading import build_meta, quantization
from normswap.places import Read, assemble
from normswap.plan import Decision, make_plan
from normswap.rows import row_reader
from normswap.sides import Side
from normswap.untying import is_tied

__all__ = ["Inferred", "infer_folds", "prepare"]


@dataclass(frozen=True)
class Inferred:
    """Folds that a comparison is made with.

    Attributes:
        work: how the original's tensors change by them; None where there are none.
        refused: norms whose gain became the identity although it cannot be folded, with the reason.
    """

    work: FoldWork | None = None
    refused: dict[str, str] = field(default_factory=dict)


def infer_folds(before: Side, after: Side, same: Callable[[str], bool]) -> Inferred:
    """Take every norm whose stored gain became the identity, while the original's is not, for folded.

    Args:
        before: the original.
        after: the checkpoint under test.
        same: whether a stored tensor of the original has its counterpart's very bytes.

    Raises:
        ModelError: the data cannot be followed through the model.
    """
    if quantization(before.source.config) or quantization(after.source.config):
        return Inferred()
    dropped = {d.name: d for d in before.plan.decisions if _dropped(d, before, after, same)}
    if not dropped:
        return Inferred()
    tied = is_tied(before.model)
    plan = make_fold_plan(before.model, before.plan, tied="untie" if tied else "skip")
    folds = tuple(_as_stored(fold, before, after) if fold.name in dropped else fold for fold in plan.decisions)
    refused = {fold.name: fold.reason for fold in folds if fold.name in dropped and fold.action == "refuse"}
    left = {fold.name: "its gain was left" for fold in folds if fold.name not in dropped}
    if tied:
        for fold in folds:
            if fold.untie and fold.name in dropped and (head := _still_tied(fold, after)):
                left[fold.name] = refused[fold.name] = head
    return prepare(before, leave(FoldPlan(folds), left), refused)


def prepare(before: Side, folds: FoldPlan, refused: dict[str, str] | None = None, read: Read | None = None) -> Inferred:
    """Work out how the original's stored tensors change by some folds.

    Args:
        before: the original.
        folds: made for its class.
        refused: norms that were left out before, with the reason.
        read: reads the original's tensors; as they are stored by default.
    """
    refused = dict(refused or {})
    if not folds.folds:
        return Inferred(None, refused)
    # Untying changes the model.
    model = build_meta(before.source) if folds.unties else before.model
    plan = make_plan(model) if folds.unties else before.plan
    try:
        work = prepare_folds(before.source, before.checkpoint, model, plan, folds=folds, asked=("*",), read=read)
    except NothingToPatchError as error:
        return Inferred(None, refused | {fold.name: error.reasons.get(fold.name, str(error)) for fold in folds.folds})
    except ModelError as error:
        return Inferred(None, refused | {fold.name: str(error) for fold in folds.folds})
    done = {fold.name for fold in work.plan.folds}
    now = work.plan.by_name()
    refused |= {fold.name: now[fold.name].reason for fold in folds.folds if fold.name not in done}
    return Inferred(work, refused)


def _dropped(decision: Decision, before: Side, after: Side, same: Callable[[str], bool]) -> bool:
    spec = decision.spec
    if spec is None or spec.gain == "none" or spec.gain_name is None:
        return False
    name = f"{decision.name}.{spec.gain_name}".removeprefix(".")
    ours, theirs = before.stored.by_parameter.get(name, ()), after.stored.by_parameter.get(name, ())
    if not ours or not theirs or all(same(piece.key) for piece in ours):
        return False
    was, now = (
        effective_gain(spec, assemble(pieces, row_reader(side.checkpoint)))
        for pieces, side in ((ours, before), (theirs, after))
    )
    return bool((now == 1).all()) and not bool((was == 1).all())


def _as_stored(fold: Fold, before: Side, after: Side) -> Fold:
    """Let a bias be moved or kept as the checkpoint under test has it."""
    if fold.action == "refuse" or fold.bias != "move" or fold.spec is None or fold.spec.bias_name is None:
        return fold
    name = f"{fold.name}.{fold.spec.bias_name}".removeprefix(".")
    theirs = after.stored.by_parameter.get(name, ())
    bias = assemble(theirs, row_reader(after.checkpoint)) if theirs else torch.zeros(1)
    return replace(fold, bias="keep") if bool((bias != 0).any()) else fold


def _still_tied(fold: Fold, after: Side) -> str:
    """Say which head that reads a norm has no weight of its own in the checkpoint under test; empty where none."""
    names = [name for name in fold.parameters if name in after.stored.tied]
    if not names:
        return ""
    return f"{names[0]}, which reads it, is still tied to {after.stored.tied[names[0]]} and not scaled"
