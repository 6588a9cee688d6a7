"""The story, top to bottom: load, plan, swap, verify, save."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import checkpoint as ckpt
from normswap import loading, opening
from normswap.converting import Conversion, convert
from normswap.errors import CheckpointError, UsageError
from normswap.folding import Tied
from normswap.foldplan import FoldPlan
from normswap.foldwork import fold, plan_folds, prepare_folds
from normswap.manifest import folds_of_manifest, plan_of_manifest
from normswap.measuring import measure_modules, measure_sources
from normswap.opening import Progress, check_weights, open_source, require_one_class, source_of_manifest
from normswap.overview import render_plan
from normswap.parity import Criterion, ParityReport
from normswap.patching import Patterns, apply_plan, patch, unpatch
from normswap.plan import Plan, make_plan
from normswap.rechecking import recheck
from normswap.source import Source
from normswap.untying import require_untied

__all__ = ["Conversion", "Inspection", "convert", "fold", "inspect", "load", "patch", "unpatch", "verify"]


# Tensors that differ are named up to this many.
_SHOWN = 5


@dataclass(frozen=True, repr=False)
class Inspection:
    """What is in a model and what would be done; printed, the table of ``normswap inspect``.

    Attributes:
        model: id, folder or class that was looked at.
        model_type: its config's ``model_type``; None for a module without config.
        plan: the decision for each norm, and the norms that are code and not modules.
        folds: what would become of each norm's gain; None where that was not asked for.
    """

    model: str
    model_type: str | None
    plan: Plan
    folds: FoldPlan | None = None

    def __repr__(self) -> str:
        return render_plan(self.plan, self.folds)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``normswap inspect --json`` prints."""
        decided = () if self.folds is None else self.folds.decisions
        folds = {fold.name: {"fold": fold.to_dict()} for fold in decided}
        return {
            "model": self.model,
            "model_type": self.model_type,
            "norms": [{**decision.to_dict(), **folds.get(decision.name, {})} for decision in self.plan.decisions],
            "functions": [found.to_dict() for found in self.plan.functions],
        }


def inspect(
    model: nn.Module | str | Path,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    fold: bool = False,
    tied: Tied = "skip",
) -> Inspection:
    """Say what norms a model has and what `patch` would do with each. Reads the config only, never weights.

    Args:
        model: a module, a folder, or a Hub id.
        include: as for `patch`.
        exclude: as for `patch`.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run code that the checkpoint brings along.
        fold: say also which gains would be folded into which weights. Each fold is proved on a small random model of
            the class, of a few MB.
        tied: as for `convert`.

    Raises:
        CheckpointError: no such folder, or a folder without a sound config.
        ModelError: the model type is unknown here; with `fold`, the data cannot be followed through the model.

    Example:
        >>> import torch, normswap
        >>> normswap.inspect(torch.nn.Sequential(torch.nn.LayerNorm(8))).plan.rows()[0]["action"]
        'swap'
    """
    if isinstance(model, nn.Module):
        config = getattr(model, "config", None)
        name, model_type = type(model).__name__, getattr(config, "model_type", None)
        plan = make_plan(model, include=include, exclude=exclude)
        return Inspection(name, model_type, plan, plan_folds(model, plan, config, tied=tied) if fold else None)
    source = open_source(model, revision=revision, trust_remote_code=trust_remote_code, weights=False)
    meta = loading.build_meta(source)
    plan = make_plan(meta, include=include, exclude=exclude)
    folds = plan_folds(meta, plan, source.config, tied=tied, as_built=True) if fold else None
    return Inspection(source.name, source.config.model_type, plan, folds)


def load(path: str | Path, *, backend: str = "auto", **kwargs: Any) -> nn.Module:
    """Load a converted checkpoint with its fused norms on.

    Args:
        path: a folder that `convert` wrote.
        backend: as for `patch`.
        kwargs: what ``from_pretrained`` takes (``dtype`` or ``torch_dtype``, ``device_map``,
            ``attn_implementation``…), and ``trust_remote_code``.

    Returns:
        The model, of the class that the checkpoint names, in evaluation mode.

    Raises:
        CheckpointError: the folder is no converted checkpoint, its manifest is damaged, or its norms are not those
            of its manifest.
    """
    trust = bool(kwargs.pop("trust_remote_code", False))
    source = open_source(path, revision=kwargs.pop("revision", None), trust_remote_code=trust)
    manifest = ckpt.read_manifest(source.path)
    if manifest is None:
        raise CheckpointError(
            f"expected a folder with {ckpt.MANIFEST}, got {source.path} without; convert it first with "
            "`normswap patch`, or load it with transformers and call normswap.patch(model)"
        )
    dtype = kwargs.pop("torch_dtype", "auto")
    dtype, device = kwargs.pop("dtype", dtype), kwargs.pop("device", "cpu")
    model = loading.load_model(source, dtype=dtype, device=device, **kwargs)
    apply_plan(model, plan_of_manifest(model, manifest), backend=backend, verify=True)
    return model


def verify(
    checkpoint: nn.Module | str | Path,
    against: nn.Module | str | Path | None = None,
    *,
    backend: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    text: str | Path | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    criterion: Criterion | None = None,
    progress: Progress | None = None,
) -> ParityReport:
    """Measure whether a checkpoint with its norms swapped computes what the original computes.

    Folds that a manifest records are computed once more from the original, and every tensor of the checkpoint is
    compared with what they give.

    Args:
        checkpoint: a converted folder, any checkpoint (its norms are swapped for the measurement), or a module
            (copies of it are measured; it is not changed).
        against: the original. By default the source that the manifest names; without a manifest, the checkpoint
            itself unpatched.
        backend: as for `patch`.
        dtype: what both are served in; the checkpoint's own by default.
        device: where both run.
        text: UTF-8 file to measure on.
        revision: branch, tag or commit of a Hub id `checkpoint`.
        trust_remote_code: run code that the checkpoints bring along.
        criterion: bounds of the verdict.
        progress: called with (step, done, total).

    Returns:
        The measurements and the verdict; a failed verdict is returned, not raised.

    Raises:
        CheckpointError: a checkpoint is missing, incomplete or damaged, or the manifest is; its norms are not those of
            the manifest.
        ModelError, BackendError, NothingToPatchError: as for `convert`.
        UsageError: the two are not of one architecture, or an argument has a value that cannot be used.

    Warns:
        UserWarning: a folder holds a second set of weights, which is not read; weights of a pooler are missing.
    """
    if isinstance(checkpoint, nn.Module) or isinstance(against, nn.Module):
        against = checkpoint if against is None else against
        if not isinstance(checkpoint, nn.Module) or not isinstance(against, nn.Module):
            kinds = f"{type(checkpoint).__name__} and {type(against).__name__}"
            raise UsageError(f"expected two modules or two checkpoints, got {kinds}")
        serving = opening.serving(backend, dtype, device, checkpoint, text, criterion, progress)
        return measure_modules(checkpoint, against, serving)
    converted = open_source(checkpoint, revision=revision, trust_remote_code=trust_remote_code)
    serving = opening.serving(backend, dtype, device, converted, text, criterion, progress)
    files = check_weights(converted)
    manifest = ckpt.read_manifest(converted.path)
    original = converted
    if against is not None:
        original = open_source(against, trust_remote_code=trust_remote_code)
    elif manifest is not None:
        original = source_of_manifest(manifest, trust_remote_code)
    other = None
    if original.path.resolve() != converted.path.resolve():
        other = check_weights(original)
        require_one_class(converted, original)

    def plan_of(model: nn.Module) -> Plan:
        plan = make_plan(model) if manifest is None else plan_of_manifest(model, manifest)
        plan.require_swaps()
        return plan

    folds = None if manifest is None or not manifest.get("folds") else folds_of_manifest(manifest)
    faults: list[str] = []
    if folds is not None and other is not None:
        faults = [f"folds: {fault}" for fault in _recheck(original, other, converted, files, folds)]
    report = measure_sources(original, converted, plan_of, serving, folds=None if other is None else folds)
    notes = [*report.notes, *ckpt.notes_on_weights(files, other, manifest)]
    return replace(report, failures=[*faults[:_SHOWN], *report.failures], notes=notes)


def _recheck(
    source: Source, original: ckpt.Checkpoint, converted: Source, files: ckpt.Checkpoint, folds: FoldPlan
) -> list[str]:
    model = loading.build_meta(source)
    plan = make_plan(model)
    if unknown := sorted({fold.name for fold in folds.folds} - {decision.name for decision in plan.decisions}):
        raise CheckpointError(f"the manifest names folds of {unknown[0]}, the model has no such norm; convert it again")
    work = prepare_folds(source, original, model, plan, folds=folds, asked=("*",))
    faults = recheck(original, files, work.edits)
    if work.config is not None:
        try:
            require_untied(converted, files)
        except CheckpointError as error:
            faults.append(str(error))
    return faults
