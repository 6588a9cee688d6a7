"""Bring folds to one checkpoint: decide, prove, hold against what is stored, and say how every tensor changes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap.checkpoint import Checkpoint
from normswap.edits import Edits, make_edits, unstorable
from normswap.errors import ModelError, NothingToPatchError
from normswap.factors import leave
from normswap.folding import Tied, make_fold_plan, with_values
from normswap.foldplan import Fold, FoldPlan
from normswap.foldproof import prove, prove_by_twin
from normswap.gains import check_fold, fold_
from normswap.loading import quantization
from normswap.patching import Patterns
from normswap.places import Read
from normswap.plan import Plan, make_plan
from normswap.rows import row_reader
from normswap.shrinking import is_as_built
from normswap.source import Source
from normswap.stored import StoredMap, map_stored
from normswap.untying import Untying, changes_when_untied, plan_untying, tying_readers, untie_, untie_config_text

__all__ = ["FoldWork", "fold", "plan_folds", "prepare_folds", "refuse_quantized"]

_CONFIG = "config.json"
_MODULES = "modules.json"
_NOT_QUANTIZED = "a gain cannot be folded into quantized weights exactly; fold the original and quantize that"


@dataclass(frozen=True)
class FoldWork:
    """All that is needed to fold the gains of one checkpoint.

    Attributes:
        plan: the decisions; what cannot be proved or stored is refused.
        edits: how the stored tensors change.
        config: the text of ``config.json`` after it; None where it stays as it is.
        notes: what a user should know.
    """

    plan: FoldPlan
    edits: Edits
    config: str | None
    notes: tuple[str, ...]

    def mark(self) -> str:
        """Return a text that is equal for equal work, for runs that are resumed."""
        return json.dumps([asdict(fold) for fold in self.plan.folds] + [self.config], sort_keys=True)


def refuse_quantized(config: Any, name: str) -> None:
    """Refuse to fold into weights that are quantized.

    Raises:
        ModelError: the configuration says that they are.
    """
    if method := quantization(config):
        raise ModelError(f"{name} is quantized ({method}), and {_NOT_QUANTIZED}; leave out --fold to patch it as it is")


def plan_folds(model: nn.Module, plan: Plan, config: Any, *, tied: Tied = "skip", as_built: bool = False) -> FoldPlan:
    """Decide from the class and its configuration which gains fold, and prove it on small models of the class.

    Args:
        model: of the class, on the meta device or elsewhere; it is not changed.
        plan: what `make_plan` found in it.
        config: its configuration.
        tied: as for `make_fold_plan`.
        as_built: whether the model is known to be as its class builds it; else it is compared.

    Returns:
        The decisions; a fold whose proof failed is refused with what was measured.

    Raises:
        ModelError: the data cannot be followed through the model, or it carries adapters of PEFT.
    """
    _refuse_adapters(model)
    if method := quantization(config):
        reason = f"the weights are quantized ({method}), and {_NOT_QUANTIZED}"
        return FoldPlan(tuple(Fold(d.name, "refuse", reason, spec=d.spec) for d in plan.decisions))
    # What is drawn on the way is nobody else's concern.
    with torch.random.fork_rng(devices=[]):
        return _proved(model, make_fold_plan(model, plan, tied=tied), config, as_built)


def _refuse_adapters(model: nn.Module) -> None:
    """Refuse a model with adapters of PEFT: those that are switched off read no row now, and do when they are on."""
    for name, module in model.named_modules():
        if type(module).__module__.startswith("peft.tuners"):
            raise ModelError(
                f"{name or type(model).__name__} is a layer of PEFT ({type(module).__name__}): merge the adapters into "
                "the model (merge_and_unload), or fold before they are attached"
            )


def _proved(model: nn.Module, folds: FoldPlan, config: Any, as_built: bool) -> FoldPlan:
    """Return a plan without the folds that cannot be proved on small models of the class.

    A model that is not as its class builds it from the configuration (without one, or with modules that were put in
    later) is copied with random weights instead.
    """
    if config is None or not (as_built or is_as_built(model, config)):
        return leave(folds, _prove_on_copy(model, folds))
    if folds.unties and (reason := _against_untying(model)):
        folds = leave(folds, {fold.name: reason for fold in folds.folds if fold.untie})
    return leave(folds, prove_by_twin(model, folds, make_fold_plan, config))


def _against_untying(model: nn.Module) -> str:
    try:
        return changes_when_untied(model)
    except ModelError as error:
        return f"the head cannot be untied: {error}"


def _none_folded(folds: FoldPlan) -> str:
    """Say why no gain folds: first what stands in the way, then what was not asked for."""
    unasked = ("not among the included names", "excluded by name")
    reasons = {fold.name: fold.reason for fold in folds.refusals}
    told = [name for name, reason in reasons.items() if reason not in unasked] or list(reasons)
    more = f" (and {len(told) - 5} more)" if len(told) > 5 else ""
    return "; ".join(f"{name}: {reasons[name]}" for name in told[:5]) + more


def _prove_on_copy(model: nn.Module, folds: FoldPlan) -> dict[str, str]:
    subject = with_values(model)
    if subject is None:
        reason = (
            f"it cannot be proved: {type(model).__name__} is not as its class and a configuration make it, so that no "
            f"small model can stand for it, and it is too large to be copied"
        )
        return {fold.name: reason for fold in folds.folds}
    try:
        return prove(subject.double().eval(), folds)
    except ModelError as error:
        return {fold.name: f"it cannot be proved: {error}" for fold in folds.folds}


def prepare_folds(
    source: Source,
    checkpoint: Checkpoint,
    model: nn.Module,
    plan: Plan,
    *,
    tied: Tied = "skip",
    asked: tuple[str, ...] = (),
    folds: FoldPlan | None = None,
    without: Mapping[str, str] | None = None,
    read: Read | None = None,
) -> FoldWork:
    """Decide which gains of a checkpoint fold, and how its tensors change for it. Weights are not read yet.

    Args:
        source: the checkpoint.
        checkpoint: its files.
        model: of its class on the meta device; a head that is untied is untied in it.
        plan: what `make_plan` found in it.
        tied: as for `make_fold_plan`.
        asked: patterns of norms that the user named; a final norm that other heads may read folds only if asked for.
        folds: decisions made before; by default they are made and proved now.
        without: norms that are left, with the reason, beside what is found here.
        read: reads the tensors of the checkpoint; as they are stored by default.

    Raises:
        ModelError: the weights are quantized, or the data cannot be followed through the model.
        NothingToPatchError: no gain can be folded.
    """
    refuse_quantized(source.config, source.name)
    folds = plan_folds(model, plan, source.config, tied=tied, as_built=True) if folds is None else folds
    folds = leave(folds, without or {})
    stored = map_stored(model, checkpoint)
    folds = leave(folds, _other_readers(source.path, model, checkpoint, stored, folds, asked))
    notes: list[str] = []
    untying, config = Untying({}, {}), None
    if folds.unties:
        try:
            untying = plan_untying(model, checkpoint, stored)
        except ModelError as error:
            folds = leave(folds, {fold.name: str(error) for fold in folds.folds if fold.untie})
    if folds.unties:
        config = untie_config_text((source.path / _CONFIG).read_text(encoding="utf-8"), model)
        notes += [note for note in [tying_readers(source.config)] if note]
        folds = _untied(model, plan, folds)
    read = row_reader(checkpoint) if read is None else read
    folds = leave(folds, unstorable(model, folds, stored, read, heads=untying.keys))
    if not folds.folds:
        raise NothingToPatchError(
            f"no gain of {source.name} can be folded, so nothing was written: {_none_folded(folds)}",
            {fold.name: fold.reason for fold in folds.refusals},
        )
    if config is not None and not folds.unties:
        raise ModelError(f"the head of {source.name} cannot be untied: {_first_untied_reason(folds)}")
    return FoldWork(folds, make_edits(model, folds, stored, read, heads=untying.keys), config, tuple(notes))


def _untied(model: nn.Module, plan: Plan, folds: FoldPlan) -> FoldPlan:
    """Untie the head of a model, and return the folds as they are then: its bias may be another parameter."""
    untie_(model)
    now = make_fold_plan(model, plan).by_name()
    decisions = []
    for fold in folds.decisions:
        other = now[fold.name]
        keeps = fold.action == "refuse" or (not fold.untie and other.action == "fold")
        decisions.append(fold if keeps else replace(other, untie=fold.untie))
    return FoldPlan(tuple(decisions))


def _first_untied_reason(folds: FoldPlan) -> str:
    return next(fold.reason for fold in folds.refusals if fold.untie)


def _other_readers(
    path: Path, model: nn.Module, checkpoint: Checkpoint, stored: StoredMap, folds: FoldPlan, asked: tuple[str, ...]
) -> dict[str, str]:
    """Leave the norm before the head where something that the class does not load may read it as well.

    That is layers of the checkpoint (multi-token prediction), or sentence-transformers, which pools the last rows.
    """
    unread = [key for key in stored.unread if len(checkpoint.tensors[key].shape) > 1]
    other = f"{unread[0]}, which the class does not load, and" if unread else ""
    if not other and (path / _MODULES).is_file():
        other = f"{_MODULES}, by which sentence-transformers pools the last rows, and"
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    if not other or head is None or getattr(head, "weight", None) is None:
        return {}
    names = {name for name, value in model.named_parameters(remove_duplicate=False) if value is head.weight}
    return {
        fold.name: (
            f"the checkpoint holds {other} which may read this norm as well; name the norm with --include to fold it "
            "all the same"
        )
        for fold in folds.folds
        if names & set(fold.parameters) and not any(fnmatchcase(fold.name, pattern) for pattern in asked)
    }


def fold(model: nn.Module, *, include: Patterns = None, exclude: Patterns = None, tied: Tied = "skip") -> nn.Module:
    """Fold every gain that can be folded into the weights that read it, in place.

    What `convert` does with ``fold=True``, for a model in memory, patched or not: the folds are found by following the
    data through one forward, proved on a small model of the class, computed in float64 and rounded once to the dtype
    of the weights. A norm keeps its parameters, which hold the identity then. To see first what would be folded, call
    `inspect` with ``fold=True``.

    Args:
        model: a model of transformers with floating-point weights.
        include: shell patterns (or one) of norm names; only these are folded.
        exclude: patterns of norms that are left alone.
        tied: ``"skip"`` leaves a norm that feeds a head tied to the embedding, ``"untie"`` gives the head a weight of
            its own.

    Returns:
        The model.

    Raises:
        ModelError: it is quantized, its parameters are no plain tensors, or the data cannot be followed through it;
            nothing was changed.
        NothingToPatchError: no gain can be folded.
        UsageError: an include pattern matches no norm.

    Example:
        >>> import torch, transformers, normswap
        >>> config = transformers.LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=1, vocab_size=64,
        ...     num_attention_heads=2, num_key_value_heads=2)
        >>> model = transformers.LlamaForCausalLM(config)
        >>> with torch.no_grad():
        ...     _ = model.model.norm.weight.fill_(2.0)
        >>> normswap.fold(model).model.norm.weight.unique().tolist()
        [1.0]
    """
    config = getattr(model, "config", None)
    refuse_quantized(config, type(model).__name__)
    folds = plan_folds(model, make_plan(model, include=include, exclude=exclude), config, tied=tied)
    if folds.unties:
        folds = _untied(model, make_plan(model, include=include, exclude=exclude), folds)
    folds = leave(folds, check_fold(model, folds))
    if not folds.folds:
        raise NothingToPatchError(
            f"no gain of {type(model).__name__} can be folded, so nothing was changed: {_none_folded(folds)}"
        )
    return fold_(model, folds)
