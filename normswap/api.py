"""The story, top to bottom: load, plan, swap, verify, save."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from normswap import checkpoint as ckpt
from normswap import loading
from normswap.converting import Conversion, convert
from normswap.errors import CheckpointError
from normswap.folding import Tied
from normswap.foldplan import FoldPlan
from normswap.foldwork import fold, plan_folds
from normswap.manifest import plan_of_manifest
from normswap.opening import open_source
from normswap.overview import render_plan
from normswap.patching import Patterns, apply_plan, patch, unpatch
from normswap.plan import Plan, make_plan
from normswap.verifying import verify

__all__ = ["Conversion", "Inspection", "convert", "fold", "inspect", "load", "patch", "unpatch", "verify"]


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
