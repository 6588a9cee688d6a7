"""Bring two checkpoints, or two modules, to the measurement of parity."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from normswap import loading, modules
from normswap.errors import ModelError
from normswap.foldplan import FoldPlan, effective_gain
from normswap.gains import fold_
from normswap.generating import check_generates
from normswap.inputs import Inputs, make_inputs
from normswap.loading import Source
from normswap.memory import young_collections
from normswap.offloading import load_streamed, needs_streaming, stream_of
from normswap.overlay import overlay_
from normswap.parity import Criterion, Dropped, NormUnderTest, ParityReport, measure
from normswap.patching import apply_plan, patch, unpatch
from normswap.plan import Plan, make_plan
from normswap.processes import launched, load_parallel
from normswap.processors import Processor, load_processor
from normswap.streamfold import fold_parallel_, fold_streamed_
from normswap.undertest import OriginalNorms, norms_under_test
from normswap.untying import untie_

__all__ = ["Serving", "measure_modules", "measure_sources"]

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
        reference: dtype of the reference's arithmetic; None for the usual one.
        tokens: how many tokens to measure on in all; None for the usual number.
        batch: how many sequences of unequal length run as one, padded; 1 for none.
        generate: tokens to write greedily and compare; 0 for none.
        budget: bytes that loading a model may take; None for what is free.
    """

    backend: str
    dtype: torch.dtype
    device: torch.device
    text: Path | None = None
    criterion: Criterion | None = None
    progress: Callable[[str, int, int], None] | None = None
    reference: torch.dtype | None = None
    tokens: int | None = None
    batch: int = 1
    generate: int = 0
    budget: int | None = None


def measure_sources(
    original: Source,
    converted: Source,
    plan_of: Callable[[nn.Module], Plan],
    serving: Serving,
    *,
    folds: FoldPlan | None = None,
    swap: bool = True,
    unrounded: bool = False,
    unexplained: Collection[str] = (),
    same: bool = False,
) -> ParityReport:
    """Measure a checkpoint against an original.

    Where gains were folded or values cast, the gate ``exact`` runs the original's weights under the converted
    checkpoint's configuration and code, with the folds made in memory, without the rounding to the stored dtype, and
    what is stored of tensors that nothing explains; the other gates run what is stored.

    Args:
        original: the checkpoint that is right by definition.
        converted: the checkpoint under test; may be the same.
        plan_of: which norms of the converted model are judged.
        serving: how both run.
        folds: gains that were folded in the converted checkpoint; None without.
        swap: whether the converted model is served with these norms swapped, or as it is.
        unrounded: whether what is stored is the original's values but for rounding; so wherever gains were folded.
        unexplained: names of stored tensors that are neither the original's nor what was done to it, which a whole
            model gets as they are.
        same: whether both are known to hold the same values under the same settings and code, so that gate ``exact``
            need not load them twice.

    Raises:
        CheckpointError, ModelError: a model cannot be loaded or run.
        UsageError: the text cannot be used.
    """
    pair = _Sources(original, converted, plan_of, serving, folds, swap)
    pair.originals.rounded, pair.unexplained, pair.same = unrounded, unexplained, same
    exact = pair.load_exact if folds is not None or unrounded else None
    tokenizer = loading.load_tokenizer(original)
    processor = load_processor(original)
    report = _measure(pair, original.config, serving, exact, tokenizer, processor, explained=not unexplained)
    return replace(report, streamed=pair.streamed)


class _Pair:
    """Two models that can be loaded as often as they are needed."""

    swap: bool
    dropped: list[Dropped]
    originals: OriginalNorms
    plan: Plan | None = None

    def load_original(self, dtype: torch.dtype) -> nn.Module:
        raise NotImplementedError

    def load_converted(self, dtype: torch.dtype) -> nn.Module:
        raise NotImplementedError

    def norms(self, model: nn.Module) -> list[NormUnderTest]:
        return norms_under_test(model, None if self.swap else self.plan, self.originals)


class _Sources(_Pair):
    """Two checkpoints."""

    def __init__(
        self,
        original: Source,
        converted: Source,
        plan_of: Callable[[nn.Module], Plan],
        serving: Serving,
        folds: FoldPlan | None,
        swap: bool,
    ) -> None:
        self.original, self.converted, self.plan_of = original, converted, plan_of
        self.serving, self.folds, self.swap = serving, folds, swap
        self.dropped: list[Dropped] = []
        self.originals = OriginalNorms([] if folds is None else [fold.name for fold in folds.folds])
        self.last: _Last | None = None
        self.same = False
        self.streamed, self.unexplained = False, cast(Collection[str], ())

    def load(self, source: Source, dtype: torch.dtype, *, untied: bool = False) -> nn.Module:
        self.last = None
        device = self.serving.device
        if launched():
            return _untied(load_parallel(source, dtype=dtype, device=device), untied)
        if needs_streaming(source, dtype, self.serving.budget):
            try:
                model = load_streamed(source, dtype=dtype, device=device, untied=untied)
            except ModelError as reason:
                warnings.warn(f"{reason}; trying that", stacklevel=2)
            else:
                self.streamed = True
                return model
        return _untied(loading.load_model(source, dtype=dtype, device=device), untied)

    def load_original(self, dtype: torch.dtype) -> nn.Module:
        if self.last is not None and self.last.dtype == dtype:
            return self.last.model
        model = self.load(self.original, dtype)
        if self.folds is not None and not self.dropped:
            self.dropped.extend(_droppable(model, self.folds))
        if dtype == self.serving.dtype:
            self.originals.keep(model, [decision.name for decision in self.plan_for(model).swaps])
        self.last = _Last(model, dtype)
        return model

    def taken(self, dtype: torch.dtype) -> nn.Module | None:
        """The original that was loaded last, to be made into what is under test; it is nobody else's from then on."""
        last, self.last = self.last, None
        whole = not launched() and last is not None and last.dtype == dtype and stream_of(last.model) is None
        return last.model if whole and last is not None else None

    def load_converted(self, dtype: torch.dtype) -> nn.Module:
        one = self.original.path.resolve() == self.converted.path.resolve()
        # What is served is loaded from its own files in any case.
        same = one or (self.same and dtype != self.serving.dtype)
        return self.prepared((self.taken(dtype) if same else None) or self.load(self.converted, dtype))

    def prepared(self, model: nn.Module) -> nn.Module:
        plan = self.plan_for(model)
        if self.swap:
            apply_plan(model, plan, backend=self.serving.backend, verify=False)
        return model

    def plan_for(self, model: nn.Module) -> Plan:
        if self.plan is None:
            self.plan = self.plan_of(model)
        return self.plan

    def load_exact(self, dtype: torch.dtype) -> nn.Module:
        folds = self.folds
        untied = folds is not None and folds.unties
        config = _settings(self.converted, self.original)
        model = None
        if config.to_diff_dict() == self.original.config.to_diff_dict() and not self.original.trust_remote_code:
            model = self.taken(dtype)
        if model is None:
            source = replace(self.original, config=config, settings_of=self.converted.path)
            model = self.load(source, dtype, untied=untied)
        else:
            _untied(model, untied)
        if folds is not None:
            fold = fold_parallel_ if launched() else fold_ if stream_of(model) is None else fold_streamed_
            fold(model, folds)
        if self.unexplained and stream_of(model) is None and not launched():
            overlay_(model, self.converted, self.unexplained, dtype)
        return self.prepared(model)


@dataclass(frozen=True)
class _Last:
    """The original as it was loaded last, without a change so far."""

    model: nn.Module
    dtype: torch.dtype


def _untied(model: nn.Module, untied: bool) -> nn.Module:
    if untied:
        untie_(model)
    return model


def _settings(converted: Source, original: Source) -> Any:
    """The converted checkpoint's configuration with the ties of the original, whose weights are to be loaded."""
    config = copy.deepcopy(converted.config)
    for name in ("", "text_config"):
        theirs, ours = (getattr(one.config, name, None) if name else one.config for one in (original, converted))
        mine = getattr(config, name, None) if name else config
        if mine is not None and theirs is not None and ours is not None and hasattr(theirs, "tie_word_embeddings"):
            mine.tie_word_embeddings = theirs.tie_word_embeddings
    return config


def _droppable(model: nn.Module, folds: FoldPlan) -> list[Dropped]:
    """Choose the folded gains that differ most from channel to channel, as what a fault would lose."""
    found = []
    for fold in folds.folds:
        assert fold.spec is not None and fold.spec.gain_name is not None
        gain = effective_gain(fold.spec, getattr(model.get_submodule(fold.name), fold.spec.gain_name))
        # A copy: in float64 this is the parameter itself, which is then folded in place.
        found.append(Dropped(fold.name, fold.spec, gain.cpu().clone()))
    return sorted(found, key=lambda one: float(one.gain.std() / one.gain.abs().mean()), reverse=True)[:_CONTROLS]


class _Modules(_Pair):
    """Two modules, of which copies are run."""

    def __init__(
        self,
        original: nn.Module,
        converted: nn.Module,
        serving: Serving,
        swap: bool,
        backend: str | None,
        folds: FoldPlan | None,
    ) -> None:
        self.original, self.converted, self.serving, self.backend = original, converted, serving, backend
        self.swap, self.folds = swap, folds
        self.dropped = [] if folds is None else _droppable(original, folds)
        self.originals = OriginalNorms([] if folds is None else [fold.name for fold in folds.folds])
        self.names = [] if original is converted else [decision.name for decision in make_plan(converted).swaps]

    def load_original(self, dtype: torch.dtype) -> nn.Module:
        model = unpatch(copy.deepcopy(self.original)).to(self.serving.device, dtype).eval()
        if dtype == self.serving.dtype:
            self.originals.keep(model, self.names)
        return model

    def load_converted(self, dtype: torch.dtype) -> nn.Module:
        model = copy.deepcopy(self.converted).to(self.serving.device, dtype).eval()
        patched = list(modules.fused_norms(model))
        if self.swap and not patched:
            return patch(model, backend=self.serving.backend, verify=False)
        for _, module, spec in patched if self.backend is not None else ():
            modules.swap(module, spec, self.backend or "")
        if not self.swap:
            self.plan = self.plan or make_plan(model)
        return model

    def load_exact(self, dtype: torch.dtype) -> nn.Module:
        assert self.folds is not None
        model = unpatch(copy.deepcopy(self.original)).to(self.serving.device, dtype).eval()
        fold_(model, self.folds)
        if self.swap:
            patch(model, backend=self.serving.backend, verify=False)
        return model


def measure_modules(
    converted: nn.Module,
    original: nn.Module,
    serving: Serving,
    *,
    backend: str | None = None,
    folds: FoldPlan | None = None,
) -> ParityReport:
    """Measure one module against another; copies are run, neither is changed.

    Args:
        converted: the module under test. With swapped norms it runs as it is; without, its norms are swapped for the
            measurement if it is `original` itself or a backend is asked for, else it runs as it is.
        original: the module that is right by definition; runs without swapped norms.
        serving: how both run.
        backend: what runs the swapped norms, if that was asked for.
        folds: that make `converted` of `original`, bit for bit; the gate ``exact`` runs them unrounded. None without.

    Raises:
        NothingToPatchError: `converted` is `original` and has no norm that can be swapped.
        ModelError: a model cannot be run.
    """
    patched = any(True for _ in modules.fused_norms(converted))
    swap = patched or converted is original or backend is not None
    pair = _Modules(original, converted, serving, swap, backend, folds)
    return _measure(pair, getattr(original, "config", None), serving, None if folds is None else pair.load_exact)


# From before the first model is loaded, since none that is let go may be among what is left alone.
@young_collections()
def _measure(
    pair: _Pair,
    config: object,
    serving: Serving,
    exact: _Loader | None = None,
    tokenizer: object = None,
    processor: Processor | None = None,
    *,
    explained: bool = True,
) -> ParityReport:
    if serving.progress is not None:
        serving.progress("choosing inputs", 0, 1)
    return measure(
        pair.load_original,
        pair.load_converted,
        pair.norms,
        _inputs(pair, config, serving, tokenizer, processor),
        dtype=serving.dtype,
        device=serving.device,
        backend=serving.backend,
        criterion=serving.criterion,
        progress=serving.progress,
        exact=exact,
        dropped=pair.dropped,
        folded=pair.originals.folded,
        reference=serving.reference,
        swapped=pair.swap,
        generate=serving.generate,
        tokenizer=tokenizer,
        budget=serving.budget,
        explained=explained,
    )


def _inputs(pair: _Pair, config: object, serving: Serving, tokenizer: object, processor: Processor | None) -> Inputs:
    # The arithmetic that the reference is run in first, so that the model is loaded once for both.
    dtype = serving.dtype if serving.dtype == torch.float32 else serving.reference or torch.float32
    try:
        model = pair.load_original(dtype)
        if serving.generate:
            check_generates(model, serving.generate)
        return make_inputs(
            model,
            config,
            tokenizer,
            text=serving.text,
            stacked=serving.batch == 1,
            tokens=serving.tokens,
            batch=serving.batch,
            processor=processor,
        )
    except ModelError as error:
        raise ModelError(f"{error}. Without a run nothing is measured; patch --no-verify goes on without") from error
