"""Convert a checkpoint: plan, fold if asked to, write, measure, and save only what holds."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from normswap import checkpoint as ckpt
from normswap import loading, opening
from normswap.algebra import BOUND, Figure, worst
from normswap.errors import ParityError, RangeLost, UsageError
from normswap.folding import Tied
from normswap.foldplan import FoldPlan
from normswap.foldwork import FoldWork, prepare_folds
from normswap.journal import Journal, fingerprint
from normswap.manifest import manifest_of
from normswap.measuring import Serving, measure_sources
from normswap.memory import free_memory
from normswap.opening import Progress, check_weights, open_source
from normswap.parity import Criterion, ParityReport
from normswap.patching import Patterns
from normswap.plan import Plan, make_plan
from normswap.progress import SAVING
from normswap.quantreport import QuantReport, quant_report
from normswap.rechecking import recheck
from normswap.resuming import ResumableFolder
from normswap.rows import row_reader
from normswap.sizes import parse_size
from normswap.source import Source
from normswap.spec import dtype_name
from normswap.streaming import Written, write_checkpoint
from normswap.untying import require_untied

__all__ = ["Conversion", "convert"]

# What a forward takes beside the weights, as a factor of them.
_HEADROOM = 1.3


@dataclass(frozen=True)
class Conversion:
    """A finished conversion.

    Attributes:
        out: the folder that was written.
        plan: what was decided for each norm.
        report: the parity measurements; None when they were not asked for, or the model is too large for them.
        folds: what was decided for each norm's gain; None when folding was not asked for.
        algebra: greatest relative error of ``W(g x + b) = W' x + b'`` before rounding, by norm.
        roundings: relative rounding error of each folded weight, by its name in the class.
        quantization: what folding does to rounding to few bits; None when it was not asked for.
        notes: what a user should know beside that.
    """

    out: Path
    plan: Plan
    report: ParityReport | None
    folds: FoldPlan | None = None
    algebra: dict[str, float] | None = None
    roundings: dict[str, float] | None = None
    quantization: QuantReport | None = None
    notes: tuple[str, ...] = ()


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
    tokens: int | None = None,
    overwrite: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    verify: bool = True,
    criterion: Criterion | None = None,
    fold: bool = False,
    tied: Tied = "skip",
    quant_report: bool = False,
    max_memory: int | str | None = None,
    resume: bool = False,
    progress: Progress | None = None,
) -> Conversion:
    """Plan, verify and save: what ``normswap patch MODEL -o OUT`` does.

    Without `fold` the weights of OUT are byte for byte those of the source, under the same keys in the same shards.
    With it, every gain that can be moved exactly is multiplied into the weights that read it, in float64 and rounded
    once; the norm's own tensor stays and holds the identity. Plain transformers loads either. The manifest
    ``normswap.json`` records what `load` swaps and what was folded. The source is never written; weights pass through
    memory a few MiB at a time.

    Args:
        model: a folder or a Hub id.
        out: folder to be written; it appears whole or not at all.
        backend: as for `patch`.
        dtype: what the model is served in when it is verified (``"bfloat16"``, ``"float16"``, ``"float32"``);
            the checkpoint's own by default. Stored weights keep their dtype.
        device: where it is verified; a GPU if there is one, else the CPU.
        include: as for `patch`; only these norms are folded, too.
        exclude: as for `patch`; these norms are not folded, either.
        text: UTF-8 file to verify on, in place of the built-in prompts.
        tokens: how many tokens to verify on in all; 2048 by default, where the model reads text.
        overwrite: replace a checkpoint that is at `out`.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: run code that the checkpoint brings along.
        verify: measure parity, and save only if it holds. A folded model that does not fit into memory in float32 is
            held to the algebra of each fold and the proof on a small model alone, and a note says so.
        criterion: bounds of the verdict; the project's three gates by default.
        fold: fold gains into the linear maps that read them.
        tied: what is done with a norm that feeds a head tied to the embedding: ``"skip"`` leaves its gain where it
            is, ``"untie"`` writes the head as a tensor of its own and says so in ``config.json``.
        quant_report: measure what folding does to the rounding errors of int8, int4 and fp8.
        max_memory: bytes that the writing gets along with, or a text such as ``"512MB"``.
        resume: keep what is finished when the run is interrupted, and go on from there.
        progress: called with (step, done, total).

    Returns:
        Where it was saved, the plans and the measurements.

    Raises:
        ParityError: the verdict is fail; nothing was saved. Its ``report`` has the figures.
        CheckpointError: the source is missing, incomplete, damaged, or holds NaN or infinite weights (-inf is sound
            where it is no parameter) or integers where the model has floating-point parameters.
        ModelError: its class is unknown, it cannot be run, or it is quantized and to be folded.
        OutputError: `out` exists or cannot be written.
        BackendError: the backend cannot run here.
        NothingToPatchError: no norm can be swapped, or no gain folded.
        UsageError: an argument has a value that cannot be used.

    Warns:
        UserWarning: the folder holds a second set of weights, which is left behind; an exclude pattern matches no
            norm; weights of a pooler are missing; an untied head is not what another program expects.
    """
    if not fold and (quant_report or tied != "skip"):
        raise UsageError("--tied and --quant-report are about folding; add --fold, or leave them out")
    out = Path(out)
    source = open_source(model, revision=revision, trust_remote_code=trust_remote_code)
    checkpoint = check_weights(source)
    ckpt.check_output(out, source.path, overwrite)
    serving = opening.serving(backend, dtype, device, source, text, criterion, progress, tokens=tokens)
    meta = loading.build_meta(source)
    plan = make_plan(meta, include=include, exclude=exclude)
    plan.require_swaps()
    parameters = dict(meta.named_parameters(remove_duplicate=False))
    if not getattr(source.config, "quantization_config", None):
        ckpt.check_floating(checkpoint, [name for name, value in parameters.items() if value.is_floating_point()])
    limit = parse_size(max_memory) if isinstance(max_memory, str) else max_memory
    job = _Job(source, checkpoint, out, overwrite, plan, serving, parameters, limit, resume)
    if not fold:
        return job.copy(verify)
    asked = (include,) if isinstance(include, str) else tuple(include or ())
    return job.fold(tied, asked, verify=verify, quantization=quant_report)


@dataclass(frozen=True)
class _Job:
    """One conversion whose norms are planned."""

    source: Source
    checkpoint: ckpt.Checkpoint
    out: Path
    overwrite: bool
    plan: Plan
    serving: Serving
    parameters: Mapping[str, torch.Tensor]
    max_memory: int | None
    resume: bool

    def copy(self, verify: bool) -> Conversion:
        report = None
        if verify:
            # Told before a long measurement; it is looked for again when the weights are copied.
            ckpt.check_finite(self.checkpoint, self.parameters)
            report = self._measured(self.source, None)
            _require_passed(report)
        with self._folder("") as (folder, journal):
            written = self._write(folder, journal, None)
            manifest = manifest_of(self.source, written, self.plan, report, self.serving.backend)
            ckpt.write_manifest(folder, manifest)
        return Conversion(self.out, self.plan, report)

    def fold(self, tied: Tied, asked: tuple[str, ...], *, verify: bool, quantization: bool) -> Conversion:
        self._tell("planning folds")
        without: dict[str, str] = {}
        folds: FoldPlan | None = None
        while True:
            # A fresh model each time, since untying changes it.
            model = loading.build_meta(self.source)
            work = prepare_folds(
                self.source, self.checkpoint, model, self.plan, tied=tied, asked=asked, folds=folds, without=without
            )
            try:
                return self._fold(work, verify=verify, quantization=quantization)
            except RangeLost as error:
                norms = work.edits.norms.get(error.key, ())
                if not norms:
                    raise
                folds = folds or work.plan
                without |= dict.fromkeys(norms, f"{error.key} would leave the range of its dtype: {error.what}")

    def _fold(self, work: FoldWork, *, verify: bool, quantization: bool) -> Conversion:
        for note in work.notes:
            warnings.warn(note, stacklevel=5)
        with self._folder(work.mark()) as (folder, journal):
            resumed = journal is not None and journal.begun
            written = self._write(folder, journal, work)
            if work.config is not None:
                (folder / "config.json").write_text(work.config, encoding="utf-8")
            converted = self._reopened(folder)
            files = check_weights(converted)
            if work.config is not None:
                require_untied(converted, files)
            notes: list[str] = []
            if resumed or verify:
                # The gates see what their inputs reach; this is every tensor, also those that an earlier run wrote.
                self._tell("comparing tensors")
                _require_equal(recheck(self.checkpoint, files, work.edits))
            figures = work.edits.algebra.figures
            _require_algebra(figures, work.plan)
            report = None
            if verify and (reason := _too_large(self.parameters, self.source)):
                notes.append(reason)
            elif verify:
                report = self._measured(converted, work.plan)
                _require_passed(report)
            algebra = {name: figure.error for name, figure in figures.items()}
            manifest = manifest_of(
                self.source, written, self.plan, report, self.serving.backend, folds=work.plan, algebra=algebra
            )
            ckpt.write_manifest(folder, manifest)
            table = quant_report(work.edits, row_reader(self.checkpoint)) if quantization else None
        return Conversion(
            self.out, self.plan, report, work.plan, algebra, dict(work.edits.algebra.roundings), table, tuple(notes)
        )

    @contextmanager
    def _folder(self, mark: str) -> Iterator[tuple[Path, Journal | None]]:
        if not self.resume:
            with ckpt.AtomicFolder(self.out, overwrite=self.overwrite, source=self.source.path) as folder:
                yield folder, None
            return
        place = ResumableFolder(
            self.out, mark=fingerprint(self.checkpoint, mark), overwrite=self.overwrite, source=self.source.path
        )
        with place as folder:
            yield folder, place.journal

    def _write(self, folder: Path, journal: Journal | None, work: FoldWork | None) -> Written:
        progress = self.serving.progress
        return write_checkpoint(
            self.checkpoint,
            folder,
            edits=None if work is None else work.edits.edits,
            added=None if work is None else work.edits.added,
            parameters=self.parameters,
            max_memory=self.max_memory,
            journal=journal,
            progress=None if progress is None else lambda done, total: progress(SAVING, done, total),
        )

    def _measured(self, converted: Source, folds: FoldPlan | None) -> ParityReport:
        report = measure_sources(self.source, converted, lambda _: self.plan, self.serving, folds=folds)
        return replace(report, checkpoint=str(self.out), against=self.source.name, command=self._command())

    def _command(self) -> str:
        """Write the command that measures this again, with all that it would not choose by itself."""
        serving = self.serving
        usual = opening.serving("auto", None, serving.device, self.source, None, None, None)
        options = {
            "--text": serving.text,
            "--tokens": serving.tokens,
            "--dtype": None if serving.dtype == usual.dtype else dtype_name(serving.dtype),
            "--backend": None if serving.backend == usual.backend else serving.backend,
        }
        words = [word for name, value in options.items() if value is not None for word in (name, str(value))]
        trusted = ["--trust-remote-code"] if self.source.trust_remote_code else []
        return shlex.join(["normswap", "verify", str(self.out), *words, *trusted])

    def _reopened(self, folder: Path) -> Source:
        found = loading.resolve(folder, trust_remote_code=self.source.trust_remote_code)
        return replace(found, name=self.source.name, revision=self.source.revision)

    def _tell(self, step: str) -> None:
        if self.serving.progress is not None:
            self.serving.progress(step, 0, 1)


def _require_passed(report: ParityReport) -> None:
    if report.failures:
        raise ParityError(f"parity failed, so nothing was saved: {'; '.join(report.failures)}", report=report)
    if not report.passed:
        raise ParityError(f"parity is inconclusive, so nothing was saved: {'; '.join(report.doubts)}", report=report)


def _require_equal(faults: list[str]) -> None:
    if faults:
        raise ParityError(f"folds: what was written is not what folding gives: {'; '.join(faults[:3])}")


def _require_algebra(figures: Mapping[str, Figure], plan: FoldPlan) -> None:
    """Hold each fold to its algebra; one that was not measured did not pass."""
    missing = [fold.name for fold in plan.folds if fold.name not in figures]
    failed = worst({name: figure for name, figure in figures.items() if not figure.passed})
    if missing:
        raise ParityError(f"algebra: {missing[0]} was not measured, so nothing was saved")
    if failed is not None:
        raise ParityError(
            f"algebra: {failed.norm}: folded and original differ by {failed.error:.3g} before rounding, expected at "
            f"most {BOUND:g}, in {failed.samples} samples (with the gain dropped: {failed.control:.3g}); nothing was "
            "saved"
        )


def _too_large(parameters: Mapping[str, torch.Tensor], source: Source) -> str:
    """Say that a model does not fit into this machine's memory in float32; empty where it does or nobody knows."""
    needed = 4 * sum({id(value): value.numel() for value in parameters.values()}.values())
    free = free_memory()
    if free is None or needed * _HEADROOM <= free:
        return ""
    return (
        f"{source.name} takes {needed / 1e9:.1f} GB in float32 and {free / 1e9:.1f} GB of memory are free, so the "
        "whole model was not run: each fold was held to its algebra before rounding and to the proof on a small model "
        "of the class, and the rounding errors are those of each weight. `normswap verify` runs it layer by layer"
    )
