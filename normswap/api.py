"""The story, top to bottom: load, plan, swap, verify, save."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import checkpoint as ckpt
from normswap import loading, modules
from normswap.errors import CheckpointError, ParityError, UsageError
from normswap.loading import Source
from normswap.measuring import Serving, measure_modules, measure_sources, named_dtype
from normswap.overview import render_plan
from normswap.parity import Criterion, ParityReport
from normswap.patching import Patterns, apply_plan, patch, unpatch
from normswap.plan import Plan, make_plan
from normswap.quiet import first_line

__all__ = ["Conversion", "Inspection", "convert", "inspect", "load", "patch", "unpatch", "verify"]

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, repr=False)
class Inspection:
    """What is in a model and what would be done; printed, the table of ``normswap inspect``.

    Attributes:
        model: id, folder or class that was looked at.
        model_type: its config's ``model_type``; None for a module without config.
        plan: the decision for each norm, and the norms that are code and not modules.
    """

    model: str
    model_type: str | None
    plan: Plan

    def __repr__(self) -> str:
        return render_plan(self.plan)

    def to_dict(self) -> dict[str, Any]:
        """Return what ``normswap inspect --json`` prints."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "norms": [decision.to_dict() for decision in self.plan.decisions],
            "functions": [found.to_dict() for found in self.plan.functions],
        }


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        out: the folder that was written.
        plan: what was decided for each norm.
        report: the parity measurements; None when they were not asked for.
    """

    out: Path
    plan: Plan
    report: ParityReport | None


def inspect(
    model: nn.Module | str | Path,
    *,
    include: Patterns = None,
    exclude: Patterns = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
) -> Inspection:
    """Say what norms a model has and what `patch` would do with each. Reads the config only, never weights.

    Args:
        model: a module, a folder, or a Hub id.
        include: as for `patch`.
        exclude: as for `patch`.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run code that the checkpoint brings along.

    Raises:
        CheckpointError: no such folder, or a folder without a sound config.
        ModelError: the model type is unknown here.

    Example:
        >>> import torch, normswap
        >>> normswap.inspect(torch.nn.Sequential(torch.nn.LayerNorm(8))).plan.rows()[0]["action"]
        'swap'
    """
    if isinstance(model, nn.Module):
        model_type = getattr(getattr(model, "config", None), "model_type", None)
        return Inspection(type(model).__name__, model_type, make_plan(model, include=include, exclude=exclude))
    source = _resolve(model, revision=revision, trust_remote_code=trust_remote_code, weights=False)
    plan = make_plan(loading.build_meta(source), include=include, exclude=exclude)
    return Inspection(source.name, source.config.model_type, plan)


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
    source = _resolve(path, revision=kwargs.pop("revision", None), trust_remote_code=trust)
    manifest = ckpt.read_manifest(source.path)
    if manifest is None:
        raise CheckpointError(
            f"expected a folder with {ckpt.MANIFEST}, got {source.path} without; convert it first with "
            "`normswap patch`, or load it with transformers and call normswap.patch(model)"
        )
    dtype = kwargs.pop("torch_dtype", "auto")
    dtype, device = kwargs.pop("dtype", dtype), kwargs.pop("device", "cpu")
    model = loading.load_model(source, dtype=dtype, device=device, **kwargs)
    apply_plan(model, _plan_of_manifest(model, manifest), backend=backend, verify=True)
    return model


def _plan_of_manifest(model: nn.Module, manifest: dict[str, Any]) -> Plan:
    """Probe the model again and hold it to the specs that the manifest records."""
    recorded = {norm["name"]: norm["spec"] for norm in manifest["norms"]}
    plan = make_plan(model)
    found = {decision.name: decision.spec for decision in plan.swaps}
    for name, spec in recorded.items():
        now = found.get(name)
        # What an older version did not record is not held against it.
        computed = {} if now is None else {key: value for key, value in now.to_dict().items() if key in spec}
        if computed != spec:
            other = {key: (value, computed.get(key)) for key, value in spec.items() if computed.get(key) != value}
            differs = ", ".join(f"{key} {then!r}, got {value!r}" for key, (then, value) in other.items())
            raise CheckpointError(
                f"expected the norm {name} to compute what the manifest records ({differs if now else 'got none'}); "
                "the checkpoint or the model's code changed since it was converted: convert it again"
            )
    return Plan(tuple(decision for decision in plan.decisions if decision.name in recorded))


def convert(
    model: str | Path,
    out: str | Path,
    *,
    backend: str = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    text: str | Path | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
    criterion: Criterion | None = None,
    progress: Progress | None = None,
) -> Conversion:
    """Plan, verify and save: what ``normswap patch MODEL -o OUT`` does.

    The weights of OUT are byte for byte those of the source, under the same keys in the same shards; plain
    transformers loads it. The manifest ``normswap.json`` records what `load` swaps. The source is never written.

    Args:
        model: a folder or a Hub id.
        out: folder to be written; it appears whole or not at all.
        backend: as for `patch`.
        dtype: what the model is served in when it is verified (``"bfloat16"``, ``"float16"``, ``"float32"``);
            the checkpoint's own by default. Stored weights keep their dtype.
        device: where it is verified; a GPU if there is one, else the CPU.
        include: as for `patch`.
        exclude: as for `patch`.
        text: UTF-8 file to verify on, in place of the built-in prompts.
        overwrite: replace a checkpoint that is at `out`.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run code that the checkpoint brings along.
        verify: measure parity first, and save only if it holds.
        criterion: bounds of the verdict; DESIGN's three gates by default.
        progress: called with (step, done, total).

    Returns:
        Where it was saved, the plan and the measurements.

    Raises:
        ParityError: the verdict is fail; nothing was saved. Its ``report`` has the figures.
        CheckpointError: the source is missing, incomplete, damaged, or holds NaN or infinite weights (-inf is sound
            where it is no parameter) or integers where the model has floating-point parameters.
        ModelError: its class is unknown, or it cannot be run.
        OutputError: `out` exists or cannot be written.
        BackendError: the backend cannot run here.
        NothingToPatchError: no norm can be swapped.
        UsageError: an argument has a value that cannot be used.

    Warns:
        UserWarning: the folder holds a second set of weights, which is left behind; an exclude pattern matches no
            norm; weights of a pooler are missing.
    """
    out = Path(out)
    source = _resolve(model, revision=revision, trust_remote_code=trust_remote_code)
    checkpoint = _checked(source)
    ckpt.check_output(out, source.path, overwrite)
    serving = _serving(backend, dtype, device, source, text, criterion, progress)
    meta = loading.build_meta(source)
    plan = make_plan(meta, include=include, exclude=exclude)
    plan.require_swaps()
    parameters = dict(meta.named_parameters(remove_duplicate=False))
    if not getattr(source.config, "quantization_config", None):
        ckpt.check_floating(checkpoint, [name for name, value in parameters.items() if value.is_floating_point()])
    ckpt.check_finite(checkpoint, parameters)
    report = None
    if verify:
        report = measure_sources(source, source, lambda _: plan, serving)
        if not report.passed:
            raise ParityError(f"parity failed, so nothing was saved: {'; '.join(report.failures)}", report=report)
    with ckpt.AtomicFolder(out, overwrite=overwrite, source=source.path) as folder:
        hashes = ckpt.copy_checkpoint(checkpoint, folder, progress=_copying(progress))
        ckpt.write_manifest(folder, _manifest(source, hashes, plan, report, serving.backend))
    return Conversion(out, plan, report)


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
        serving = _serving(backend, dtype, device, checkpoint, text, criterion, progress)
        return measure_modules(checkpoint, against, serving)
    converted = _resolve(checkpoint, revision=revision, trust_remote_code=trust_remote_code)
    serving = _serving(backend, dtype, device, converted, text, criterion, progress)
    files = _checked(converted)
    manifest = ckpt.read_manifest(converted.path)
    original = converted
    if against is not None:
        original = _resolve(against, trust_remote_code=trust_remote_code)
    elif manifest is not None:
        original = _source_of(manifest, trust_remote_code)
    other = None
    if original.path.resolve() != converted.path.resolve():
        other = _checked(original)
        _require_one_class(converted, original)

    def plan_of(model: nn.Module) -> Plan:
        plan = make_plan(model) if manifest is None else _plan_of_manifest(model, manifest)
        plan.require_swaps()
        return plan

    report = measure_sources(original, converted, plan_of, serving)
    return replace(report, notes=[*report.notes, *ckpt.notes_on_weights(files, other, manifest)])


def _resolve(model: str | Path, **options: Any) -> Source:
    # An empty path would name the working folder.
    if isinstance(model, str) and not model.strip():
        raise CheckpointError(f"expected a model folder or a Hub id, got {model!r}: no such folder")
    return loading.resolve(model, **options)


def _checked(source: Source) -> ckpt.Checkpoint:
    checkpoint = ckpt.check_source(source.path)
    for note in checkpoint.notes:
        warnings.warn(f"{source.name}: {note}", stacklevel=3)
    return checkpoint


def _require_one_class(converted: Source, original: Source) -> None:
    # By name: code of a checkpoint gives each folder a class of its own.
    names = [loading.model_class(source).__name__ for source in (converted, original)]
    if names[0] != names[1]:
        raise UsageError(f"expected two checkpoints of one architecture, got {names[0]} and {names[1]}")


def _source_of(manifest: dict[str, Any], trust_remote_code: bool) -> Source:
    name, revision = manifest["source"]["name"], manifest["source"].get("revision")
    try:
        return _resolve(name, revision=revision, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(
            f"the source that {ckpt.MANIFEST} names cannot be read ({error}); name it with --against"
        ) from None


def _manifest(
    source: Source, hashes: dict[str, str], plan: Plan, report: ParityReport | None, backend: str
) -> dict[str, Any]:
    local = Path(source.name).is_dir()
    return {
        "source": {
            "name": str(source.path.resolve()) if local else source.name,
            "revision": source.revision,
            "files": hashes,
        },
        "norms": [{"name": d.name, "class": d.cls, "spec": d.spec.to_dict()} for d in plan.swaps if d.spec is not None],
        "refused": [{"name": d.name, "class": d.cls, "reason": d.reason} for d in plan.refusals],
        "folds": [],
        "backend": backend,
        "parity": None if report is None else report.to_dict(),
    }


def _serving(
    backend: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    model: Source | nn.Module,
    text: str | Path | None,
    criterion: Criterion | None,
    progress: Progress | None,
) -> Serving:
    stored = getattr(model.config if isinstance(model, Source) else model, "dtype", None)
    where = _device(device)
    return Serving(
        backend=modules.resolve_backend(backend, where),
        dtype=named_dtype(dtype if dtype is not None else stored or torch.float32),
        device=where,
        text=None if text is None else Path(text),
        criterion=criterion,
        progress=progress,
    )


def _device(given: str | torch.device | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        # Read back, for the meta device takes anything and computes nothing.
        torch.zeros(1, device=device).item()
    except Exception as error:
        reason = re.split(r"\.\s", first_line(error))[0].rstrip(".")
        raise UsageError(f"expected a device that torch can use here, got {str(given)!r}: {reason}") from None
    if device.type == "cpu" and device.index:
        raise UsageError(f"expected a device that torch can use here, got {str(given)!r}: there is one cpu, number 0")
    return device


def _copying(progress: Progress | None) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda done, total: progress("saving", done, total)
