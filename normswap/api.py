"""The story, top to bottom: load, plan, swap, verify, save."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from normswap import checkpoint as ckpt
from normswap import loading, modules
from normswap.errors import CheckpointError, ParityError, UsageError
from normswap.inputs import Inputs, make_inputs
from normswap.loading import Source
from normswap.parity import Criterion, NormUnderTest, ParityReport, measure
from normswap.plan import Plan, make_plan
from normswap.spec import NormSpec

__all__ = ["Conversion", "Inspection", "convert", "inspect", "load", "patch", "unpatch", "verify"]

ModelT = TypeVar("ModelT", bound=nn.Module)
Patterns = str | Iterable[str] | None
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Inspection:
    """What is in a model and what would be done.

    Attributes:
        model: id, folder or class that was looked at.
        model_type: its config's ``model_type``; None for a module without config.
        plan: the decision for each norm.
    """

    model: str
    model_type: str | None
    plan: Plan

    def to_dict(self) -> dict[str, Any]:
        """Return what ``normswap inspect --json`` prints."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "norms": [decision.to_dict() for decision in self.plan.decisions],
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


def patch(
    model: ModelT,
    *,
    backend: str = "auto",
    include: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
) -> ModelT:
    """Swap every norm that can be proved for its fused implementation, in place.

    Parameters stay the same objects under the same keys; `unpatch` undoes it; patching twice is harmless.

    Args:
        model: any module, on any device (the meta device too).
        backend: ``"auto"`` (Triton on a GPU, ``cpu`` on the CPU), ``"triton"``, ``"cpu"`` or ``"interpret"``.
        include: shell patterns of module names; only these are swapped.
        exclude: shell patterns of module names that are left alone.
        verify: compare each distinct norm with its original on the spot, before anything is changed.

    Returns:
        The same model.

    Raises:
        NothingToPatchError: no norm can be swapped; the message has the reasons.
        ParityError: a fused norm is out of the unit bound; nothing was changed.
        BackendError: the backend cannot run on the model's device.
        UsageError: an include pattern matches no norm.

    Example:
        >>> import torch, normswap
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> normswap.patch(model)[1]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, normswap='auto')
    """
    plan = make_plan(model, include=include, exclude=exclude)
    plan.require_swaps()
    _apply(model, plan, backend=backend, verify=verify)
    return model


def _apply(model: nn.Module, plan: Plan, *, backend: str, verify: bool) -> None:
    chosen = [(decision, model.get_submodule(decision.name)) for decision in plan.swaps]
    for device in {_device_of(module) for _, module in chosen}:
        modules.resolve_backend(backend, device)
    if verify:
        seen = set()
        for decision, module in chosen:
            assert decision.spec is not None
            key = (decision.key, _device_of(module), _dtype_of(module))
            if key not in seen:
                seen.add(key)
                modules.check_swap(module, decision.name, decision.spec, backend)
    for decision, module in chosen:
        assert decision.spec is not None
        modules.swap(module, decision.spec, backend)


def _device_of(module: nn.Module) -> torch.device:
    tensor = next(module.parameters(), None)
    # Meta tensors are offloaded or not loaded yet; what runs will be brought to the CPU at least.
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    tensor = next(module.parameters(), None)
    return None if tensor is None else tensor.dtype


def unpatch(model: ModelT) -> ModelT:
    """Put back every original norm, in place; a model without swapped norms is returned as it is.

    Raises:
        ModelError: a swapped norm was wrapped by something else since (FSDP); nothing was changed.

    Example:
        >>> import torch, normswap
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        >>> normswap.unpatch(normswap.patch(model))[0]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True)
    """
    for _, module, _ in list(modules.fused_norms(model)):
        modules.unswap(module)
    return model


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
        config = getattr(model, "config", None)
        found = Inspection(type(model).__name__, getattr(config, "model_type", None), _plan(model, include, exclude))
        return found
    source = loading.resolve(model, revision=revision, trust_remote_code=trust_remote_code, weights=False)
    plan = _plan(loading.build_meta(source), include, exclude)
    return Inspection(source.name, source.config.model_type, plan)


def _plan(model: nn.Module, include: Patterns, exclude: Patterns) -> Plan:
    return make_plan(model, include=include, exclude=exclude)


def load(path: str | Path, *, backend: str = "auto", **kwargs: Any) -> nn.Module:
    """Load a converted checkpoint with its fused norms on.

    Args:
        path: a folder that `convert` wrote.
        backend: as for `patch`.
        kwargs: what ``from_pretrained`` takes (``dtype``, ``device_map``, ``attn_implementation``…), and
            ``trust_remote_code``.

    Returns:
        The model, of the class that the checkpoint names, in evaluation mode.

    Raises:
        CheckpointError: the folder is no converted checkpoint, or its norms are not those of its manifest.
    """
    trust = bool(kwargs.pop("trust_remote_code", False))
    source = loading.resolve(path, revision=kwargs.pop("revision", None), trust_remote_code=trust)
    manifest = ckpt.read_manifest(source.path)
    if manifest is None:
        raise CheckpointError(
            f"expected a folder with {ckpt.MANIFEST}, got {source.path} without; convert it first with "
            "`normswap patch`, or load it with transformers and call normswap.patch(model)"
        )
    model = loading.load_model(source, dtype=kwargs.pop("dtype", "auto"), device=kwargs.pop("device", None), **kwargs)
    _apply(model, _plan_of_manifest(model, manifest), backend=backend, verify=True)
    return model


def _plan_of_manifest(model: nn.Module, manifest: dict[str, Any]) -> Plan:
    """Probe the model again and hold it to the specs that the manifest records."""
    recorded = {norm["name"]: NormSpec.from_dict(norm["spec"]) for norm in manifest["norms"]}
    plan = make_plan(model)
    found = {decision.name: decision.spec for decision in plan.swaps}
    for name, spec in recorded.items():
        if found.get(name) != spec:
            raise CheckpointError(
                f"expected the norm {name} to compute {spec}, as the manifest records, got {found.get(name)}; "
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
        progress: called with (stage, done, total).

    Returns:
        Where it was saved, the plan and the measurements.

    Raises:
        ParityError: the verdict is fail; nothing was saved. Its ``report`` has the figures.
        CheckpointError: the source is missing, incomplete, damaged or holds NaN or infinite weights.
        ModelError: its class is unknown, or it cannot be run.
        OutputError: `out` exists or cannot be written.
        BackendError: the backend cannot run here.
        NothingToPatchError: no norm can be swapped.
    """
    out = Path(out)
    source = loading.resolve(model, revision=revision, trust_remote_code=trust_remote_code)
    checkpoint = ckpt.check_source(source.path)
    ckpt.check_output(out, source.path, overwrite)
    device = _device(device)
    running = modules.resolve_backend(backend, device)
    plan = make_plan(loading.build_meta(source), include=include, exclude=exclude)
    plan.require_swaps()
    ckpt.check_finite(checkpoint)
    report = None
    if verify:
        report = _measure_source(
            source, source, lambda _: plan, _dtype(dtype, source), device, running, text, criterion, progress
        )
        if not report.passed:
            raise ParityError(
                f"parity failed, so nothing was saved: {'; '.join(report.failures)}", report=report
            )
    with ckpt.AtomicFolder(out, overwrite=overwrite, source=source.path) as folder:
        hashes = ckpt.copy_checkpoint(
            checkpoint, folder, progress=None if progress is None else lambda done, total: progress("save", done, total)
        )
        ckpt.write_manifest(folder, _manifest(source, hashes, plan, report, running))
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
        progress: called with (stage, done, total).

    Returns:
        The measurements and the verdict; a failed verdict is returned, not raised.

    Raises:
        CheckpointError, ModelError, BackendError, NothingToPatchError, UsageError: as for `convert`.
    """
    device = _device(device)
    running = modules.resolve_backend(backend, device)
    if isinstance(checkpoint, nn.Module) or isinstance(against, nn.Module):
        return _measure_modules(checkpoint, against, dtype, device, running, text, criterion, progress)
    options = {"trust_remote_code": trust_remote_code}
    converted = loading.resolve(checkpoint, revision=revision, **options)
    ckpt.check_source(converted.path)
    manifest = ckpt.read_manifest(converted.path)
    original = converted
    if against is not None:
        original = loading.resolve(against, **options)
    elif manifest is not None:
        original = _source_of(manifest, options)
    if original is not converted:
        ckpt.check_source(original.path)

    def plan_of(model: nn.Module) -> Plan:
        plan = make_plan(model) if manifest is None else _plan_of_manifest(model, manifest)
        plan.require_swaps()
        return plan

    served = _dtype(dtype, converted)
    return _measure_source(original, converted, plan_of, served, device, running, text, criterion, progress)


def _source_of(manifest: dict[str, Any], options: dict[str, Any]) -> Source:
    name, revision = manifest["source"]["name"], manifest["source"]["revision"]
    try:
        return loading.resolve(name, revision=revision, **options)
    except CheckpointError as error:
        raise CheckpointError(
            f"the source that {ckpt.MANIFEST} names cannot be read ({error}); name it with --against"
        ) from None


def _measure_source(
    original: Source,
    converted: Source,
    plan_of: Callable[[nn.Module], Plan],
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    text: str | Path | None,
    criterion: Criterion | None,
    progress: Progress | None,
) -> ParityReport:
    def load_original(dtype: torch.dtype) -> nn.Module:
        return loading.load_model(original, dtype=dtype, device=device)

    def load_converted(dtype: torch.dtype) -> nn.Module:
        model = loading.load_model(converted, dtype=dtype, device=device)
        _apply(model, plan_of(model), backend=backend, verify=False)
        return model

    inputs = make_inputs(
        load_original(dtype), original.config, loading.load_tokenizer(original), text=_path(text)
    )
    return _measure(load_original, load_converted, inputs, dtype, device, backend, criterion, progress)


def _measure_modules(
    converted: nn.Module | str | Path,
    original: nn.Module | str | Path | None,
    dtype: str | torch.dtype | None,
    device: torch.device,
    backend: str,
    text: str | Path | None,
    criterion: Criterion | None,
    progress: Progress | None,
) -> ParityReport:
    original = converted if original is None else original
    if not isinstance(original, nn.Module) or not isinstance(converted, nn.Module):
        raise UsageError(
            f"expected two modules or two checkpoints, got {type(converted).__name__} and {type(original).__name__}"
        )
    first, second = original, converted

    def load_original(dtype: torch.dtype) -> nn.Module:
        return unpatch(copy.deepcopy(first)).to(device, dtype).eval()

    def load_converted(dtype: torch.dtype) -> nn.Module:
        model = unpatch(copy.deepcopy(second)).to(device, dtype).eval()
        return patch(model, backend=backend, verify=False)

    served = _named_dtype(dtype) if dtype is not None else getattr(second, "dtype", torch.float32)
    config = getattr(first, "config", None)
    inputs = make_inputs(load_original(served), config, None, text=_path(text))
    return _measure(load_original, load_converted, inputs, served, device, backend, criterion, progress)


def _measure(
    original: Callable[[torch.dtype], nn.Module],
    converted: Callable[[torch.dtype], nn.Module],
    inputs: Inputs,
    dtype: torch.dtype,
    device: torch.device,
    backend: str,
    criterion: Criterion | None,
    progress: Progress | None,
) -> ParityReport:
    return measure(
        original,
        converted,
        _norms_under_test,
        inputs,
        dtype=dtype,
        device=device,
        backend=backend,
        criterion=criterion or Criterion(),
        progress=progress,
    )


def _norms_under_test(model: nn.Module) -> list[NormUnderTest]:
    return [_under_test(name, module, spec) for name, module, spec in modules.fused_norms(model)]


def _under_test(name: str, module: nn.Module, spec: NormSpec) -> NormUnderTest:
    return NormUnderTest(
        name=name,
        spec=spec,
        module=module,
        original=lambda x: modules.original_forward(module, x),
        gain=lambda: getattr(module, spec.gain_name) if spec.gain_name else None,
        bias=lambda: getattr(module, spec.bias_name) if spec.bias_name else None,
    )


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
        "norms": [
            {"name": d.name, "class": d.cls, "spec": d.spec.to_dict()} for d in plan.swaps if d.spec is not None
        ],
        "refused": [{"name": d.name, "class": d.cls, "reason": d.reason} for d in plan.refusals],
        "folds": [],
        "backend": backend,
        "parity": None if report is None else report.to_dict(),
    }


def _device(given: str | torch.device | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise UsageError(f"expected a device that torch can use here, got {given!r}: {reason}") from None
    return device


def _dtype(given: str | torch.dtype | None, source: Source) -> torch.dtype:
    if given is not None:
        return _named_dtype(given)
    stored = getattr(source.config, "dtype", None) or torch.float32
    return _named_dtype(stored)


def _named_dtype(given: str | torch.dtype) -> torch.dtype:
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UsageError(f"expected dtype float32, float16 or bfloat16, got {given!r}")
    return dtype


def _path(given: str | Path | None) -> Path | None:
    return None if given is None else Path(given)
