"""Bring two checkpoints, or two modules, to the measurement of parity."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import loading, modules
from normswap.errors import ModelError, UsageError
from normswap.foldplan import FoldPlan, effective_gain
from normswap.gains import fold_
from normswap.inputs import make_inputs
from normswap.loading import Source
from normswap.parity import Criterion, Dropped, NormUnderTest, ParityReport, measure
from normswap.patching import apply_plan, patch, unpatch
from normswap.plan import Plan
from normswap.replica import bare
from normswap.spec import NormSpec
from normswap.untying import untie_

__all__ = ["Serving", "measure_modules", "measure_sources", "named_dtype"]

# Gains that are tried as the control of the gate ``served``, until one shows.
_CONTROLS = 3
_Loader = Callable[[torch.dtype], nn.Module]


@dataclass(frozen=True)
class Serving:
    """How the models are run for the measurement.

    Attributes:
        backend: what runs the fused norms; resolved, not ``"auto"``.
        dtype: what the models are served in.
        device: where they run.
        text: file to read the inputs from; None for the built-in prompts.
        criterion: bounds of the verdict.
        progress: called with (step, done, total); None for silence.
    """

    backend: str
    dtype: torch.dtype
    device: torch.device
    text: Path | None = None
    criterion: Criterion | None = None
    progress: Callable[[str, int, int], None] | None = None


def measure_sources(
    original: Source,
    converted: Source,
    plan_of: Callable[[nn.Module], Plan],
    serving: Serving,
    *,
    folds: FoldPlan | None = None,
) -> ParityReport:
    """Measure a checkpoint with its norms swapped against an original.

    Where gains were folded, the gate ``exact`` runs the original with the folds made in memory in float32, without the
    rounding to the stored dtype; the other gates run what is stored.

    Args:
        original: the checkpoint that is right by definition.
        converted: the checkpoint under test; may be the same.
        plan_of: what is swapped in the converted model.
        serving: how both run.
        folds: gains that were folded in the converted checkpoint; None without.

    Raises:
        CheckpointError, ModelError: a model cannot be loaded or run.
        UsageError: the text cannot be used.
    """

    dropped: list[Dropped] = []

    def load_original(dtype: torch.dtype) -> nn.Module:
        model = loading.load_model(original, dtype=dtype, device=serving.device)
        if folds is not None and not dropped:
            dropped.extend(_droppable(model, folds))
        return model

    def load_exact(dtype: torch.dtype) -> nn.Module:
        assert folds is not None
        model = loading.load_model(original, dtype=dtype, device=serving.device)
        if folds.unties:
            untie_(model)
        fold_(model, folds)
        apply_plan(model, plan_of(model), backend=serving.backend, verify=False)
        return model

    def load_converted(dtype: torch.dtype) -> nn.Module:
        model = loading.load_model(converted, dtype=dtype, device=serving.device)
        apply_plan(model, plan_of(model), backend=serving.backend, verify=False)
        return model

    tokenizer = loading.load_tokenizer(original)
    exact = None if folds is None else load_exact
    return _measure(load_original, load_converted, original.config, tokenizer, serving, exact, dropped)


def _droppable(model: nn.Module, folds: FoldPlan) -> list[Dropped]:
    """Choose the folded gains that differ most from channel to channel, as what a fault would lose."""
    found = []
    for fold in folds.folds:
        assert fold.spec is not None and fold.spec.gain_name is not None
        gain = effective_gain(fold.spec, getattr(model.get_submodule(fold.name), fold.spec.gain_name))
        found.append(Dropped(fold.name, fold.spec, gain.cpu()))
    return sorted(found, key=lambda one: float(one.gain.std() / one.gain.abs().mean()), reverse=True)[:_CONTROLS]


def measure_modules(converted: nn.Module, original: nn.Module, serving: Serving) -> ParityReport:
    """Measure one module with its norms swapped against another (or the same) unpatched; copies are run.

    Raises:
        NothingToPatchError: `converted` has no norm that can be swapped.
        ModelError: a model cannot be run.
    """

    def load_original(dtype: torch.dtype) -> nn.Module:
        return unpatch(copy.deepcopy(original)).to(serving.device, dtype).eval()

    def load_converted(dtype: torch.dtype) -> nn.Module:
        model = unpatch(copy.deepcopy(converted)).to(serving.device, dtype).eval()
        return patch(model, backend=serving.backend, verify=False)

    return _measure(load_original, load_converted, getattr(original, "config", None), None, serving)


def _measure(
    original: _Loader,
    converted: _Loader,
    config: object,
    tokenizer: object,
    serving: Serving,
    exact: _Loader | None = None,
    dropped: Sequence[Dropped] = (),
) -> ParityReport:
    if serving.progress is not None:
        serving.progress("choosing inputs", 0, 1)
    try:
        inputs = make_inputs(original(serving.dtype), config, tokenizer, text=serving.text)
    except ModelError as error:
        raise ModelError(f"{error}. Without a run nothing is measured; --no-verify goes on without") from error
    return measure(
        original,
        converted,
        _norms_under_test,
        inputs,
        dtype=serving.dtype,
        device=serving.device,
        backend=serving.backend,
        criterion=serving.criterion,
        progress=serving.progress,
        exact=exact,
        dropped=dropped,
    )


def _norms_under_test(model: nn.Module) -> list[NormUnderTest]:
    return [_under_test(name, module, spec) for name, module, spec in modules.fused_norms(model)]


def _under_test(name: str, module: nn.Module, spec: NormSpec) -> NormUnderTest:
    def original(*args: Any, **kwargs: Any) -> Any:
        with bare(module, spec.then):
            return modules.original_forward(module, *args, **kwargs)

    return NormUnderTest(
        name=name,
        spec=spec,
        module=module,
        original=original,
        bind=modules.execution_of(module).bind,
        gain=lambda: getattr(module, spec.gain_name) if spec.gain_name else None,
        bias=lambda: getattr(module, spec.bias_name) if spec.bias_name else None,
    )


def named_dtype(given: str | torch.dtype) -> torch.dtype:
    """Return a dtype that models are served in, by name or as it is.

    Raises:
        UsageError: it is none of float32, float16 and bfloat16.
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UsageError(f"expected dtype float32, float16 or bfloat16, got {given!r}")
    return dtype
