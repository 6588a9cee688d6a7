"""Measure whether a converted model computes what the original computes, and give a verdict."""

from __future__ import annotations

import gc
import platform
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap.errors import ModelError
from normswap.figures import Control, Criterion, Exact, NormFigures, ParityReport, Served, judge
from normswap.inputs import Inputs, run
from normswap.meter import NormUnderTest, watching
from normswap.stats import Gap, bootstrap_ratio, gap, kl_and_top1, relative

__all__ = ["Criterion", "NormFigures", "NormUnderTest", "ParityReport", "measure"]

Loader = Callable[[torch.dtype], nn.Module]


def measure(
    original: Loader,
    converted: Loader,
    norms: Callable[[nn.Module], list[NormUnderTest]],
    inputs: Inputs,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    criterion: Criterion | None = None,
    progress: Callable[[str], None] | None = None,
) -> ParityReport:
    """Run original and converted on the same inputs and judge by three gates.

    The reference is the original's stored weights in float32 arithmetic (in float64 where the models are served in
    float32). ``exact``: both in float32 agree. ``norms``: each swapped norm, on the activations of the served run,
    is within the unit bound of its own original. ``served``: the converted model is as near to the reference as the
    original is. One model is in memory at a time; the reference's outputs wait in a temporary folder.

    Args:
        original: loads the original in a dtype.
        converted: loads the converted model in a dtype.
        norms: lists the swapped norms of a converted model.
        inputs: what to run on.
        dtype: dtype that the models are served in.
        device: where they run.
        backend: which implementation of the norms runs; goes to the report.
        criterion: the bounds; the project's by default.
        progress: called with a few words before each step.

    Returns:
        The figures and the verdict.

    Raises:
        ModelError: a model does not run on the inputs.
    """
    criterion = criterion or Criterion()
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        session = _Session(original, converted, norms, inputs, torch.device(device), criterion, Path(folder))
        session.progress = progress or (lambda text: None)
        return session.report(dtype, backend)


class _Session:
    """One measurement: its parameters, and the failures and notes it gathers."""

    progress: Callable[[str], None]

    def __init__(
        self,
        original: Loader,
        converted: Loader,
        norms: Callable[[nn.Module], list[NormUnderTest]],
        inputs: Inputs,
        device: torch.device,
        criterion: Criterion,
        folder: Path,
    ) -> None:
        self.original, self.converted, self.norms = original, converted, norms
        self.inputs, self.device, self.criterion, self.folder = inputs, device, criterion, folder
        self.failures: list[str] = []
        self.notes: list[str] = []
        self.output: dict[str, Any] = {}

    def report(self, dtype: torch.dtype, backend: str) -> ParityReport:
        if len(self.inputs.batches) < self.criterion.min_sequences:
            self.notes.append(
                f"{len(self.inputs.batches)} sequences are fewer than the {self.criterion.min_sequences} that the "
                f"interval needs; give more text"
            )
        reference_dtype = torch.float64 if dtype == torch.float32 else torch.float32
        self.spool("reference", reference_dtype)
        if dtype == torch.float32:
            gaps_a, words_a = self.serve_original(dtype, keep="float32")
            exact, gaps_b, words_b, figures = self.run_converted(dtype, exact="float32", served=True)
        else:
            exact, *_ = self.run_converted(torch.float32, exact="reference", served=False)
            gaps_a, words_a = self.serve_original(dtype, keep=None)
            _, gaps_b, words_b, figures = self.run_converted(dtype, exact=None, served=True)
        assert exact is not None
        served = self.judge_served(gaps_a, gaps_b, words_a, words_b)
        return ParityReport(
            failures=self.failures,
            notes=self.notes,
            device=str(self.device),
            device_name=_device_name(self.device),
            backend=backend,
            dtype=_name(dtype),
            reference_dtype=_name(reference_dtype),
            inputs=self.inputs.to_dict(),
            criterion=self.criterion,
            output=self.output,
            exact=exact,
            logits=served,
            norms=figures,
            versions=_versions(),
        )

    @contextmanager
    def loaded(self, loader: Loader, dtype: torch.dtype) -> Iterator[nn.Module]:
        """Load a model, and let go of it at the end."""
        model = loader(dtype).eval()
        first = next(model.parameters(), None)
        if first is not None and first.device.type != self.device.type:
            model = model.to(self.device)
        try:
            yield model
        finally:
            del model
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def outputs(self, model: nn.Module, dtype: torch.dtype, what: str) -> Iterator[tuple[int, torch.Tensor]]:
        count = len(self.inputs.batches)
        for index, batch in enumerate(self.inputs.batches):
            self.progress(f"{what} in {_name(dtype)}: sequence {index + 1} of {count}")
            name, tensor = run(model, batch, dtype, self.device)
            self.output = self.output or {"name": name, "shape": list(tensor.shape)}
            if name != self.output["name"]:
                raise ModelError(f"expected the output {self.output['name']!r} from every run, got {name!r}")
            yield index, tensor

    def save(self, name: str, index: int, tensor: torch.Tensor) -> None:
        torch.save(tensor.cpu(), self.folder / f"{name}-{index}.pt")

    def load(self, name: str, index: int) -> torch.Tensor:
        return torch.load(self.folder / f"{name}-{index}.pt", weights_only=True, map_location=self.device)

    def spool(self, name: str, dtype: torch.dtype) -> None:
        with self.loaded(self.original, dtype) as model:
            for index, tensor in self.outputs(model, dtype, "original"):
                self.refuse_nonfinite(tensor, dtype, index)
                self.save(name, index, tensor)

    def serve_original(
        self, dtype: torch.dtype, keep: str | None
    ) -> tuple[list[Gap], tuple[float, int, int] | None]:
        gaps: list[Gap] = []
        words: list[tuple[float, int, int]] = []
        with self.loaded(self.original, dtype) as model:
            for index, tensor in self.outputs(model, dtype, "original"):
                self.refuse_nonfinite(tensor, dtype, index)
                if keep is not None:
                    self.save(keep, index, tensor)
                self.compare(index, tensor, gaps, words)
        return gaps, _total(words)

    def compare(
        self, index: int, tensor: torch.Tensor, gaps: list[Gap], words: list[tuple[float, int, int]]
    ) -> None:
        reference = self.load("reference", index)
        gaps.append(gap(tensor, reference))
        if self.output["name"] == "logits":
            words.append(kl_and_top1(reference, tensor))

    def refuse_nonfinite(self, tensor: torch.Tensor, dtype: torch.dtype, index: int) -> None:
        if count := int((~tensor.isfinite()).sum()):
            self.failures.append(
                f"served: the original itself gives {count} NaN or infinite values in {_name(dtype)} on sequence "
                f"{index + 1}; nothing can be compared with them"
            )

    def run_converted(
        self, dtype: torch.dtype, *, exact: str | None, served: bool
    ) -> tuple[Exact | None, list[Gap], tuple[float, int, int] | None, list[NormFigures]]:
        """Run the converted model once, for the gates that this dtype serves."""
        gaps: list[Gap] = []
        exact_gaps: list[Gap] = []
        words: list[tuple[float, int, int]] = []
        result: Exact | None = None
        figures: list[NormFigures] = []
        with self.loaded(self.converted, dtype) as model:
            under_test = self.norms(model)
            with _reached(under_test) as order, watching(under_test if served else []) as meters:
                for index, tensor in self.outputs(model, dtype, "converted"):
                    if exact is not None:
                        exact_gaps.append(gap(tensor, self.load(exact, index)))
                    if served:
                        self.compare(index, tensor, gaps, words)
            if exact is not None:
                control = self.control(model, dtype, [norm for norm in order if norm in under_test], exact)
                result = self.judge_exact(exact_gaps, control)
        if served:
            for name, meter in meters.items():
                entry, failed = judge(name, meter, self.criterion)
                figures.append(entry)
                self.failures += failed
            self.judge_reach(figures)
        return result, gaps, _total(words), figures

    def control(
        self, model: nn.Module, dtype: torch.dtype, reached: list[NormUnderTest], exact: str
    ) -> Control | None:
        """Disturb one norm and see whether the exact gate would notice; the last one first, it is the surest."""
        best: Control | None = None
        picks = (
            [reached[at] for at in dict.fromkeys((-1 % len(reached), 0, len(reached) // 2))]
            if reached
            else []
        )
        reference = self.load(exact, 0)
        for norm in picks:
            self.progress(f"negative control on {norm.name}")
            handle = norm.module.register_forward_hook(_disturb(self.criterion.control_scale))
            try:
                _, tensor = run(model, self.inputs.batches[0], dtype, self.device)
            finally:
                handle.remove()
            found = gap(tensor, reference)
            error = relative([found.error], [found.size])
            control = Control(
                norm.name, self.criterion.control_scale, error, error > self.criterion.exact_bound
            )
            best = best if best is not None and not control.error > best.error else control
            if control.detected:
                return control
        return best

    def judge_exact(self, gaps: list[Gap], control: Control | None) -> Exact:
        bound = self.criterion.exact_bound
        error = relative([entry.error for entry in gaps], [entry.size for entry in gaps])
        if not error <= bound:
            self.failures.append(f"exact: error {error:.3g} above {bound:g}")
        if control is not None and not control.detected:
            self.failures.append(
                f"exact: the gate is blind here: {control.scale:g} times every other channel of {control.norm} moves "
                f"the output by {control.error:.3g} only, not above {bound:g}"
            )
        return Exact(error, bound, control)

    def judge_reach(self, figures: list[NormFigures]) -> None:
        missed = [entry.name for entry in figures if entry.calls == 0]
        if figures and len(missed) == len(figures):
            self.failures.append(f"norms: none of the {len(figures)} swapped norms was reached by the inputs")
        elif not figures:
            self.failures.append("norms: the converted model has no swapped norm")
        elif missed:
            self.notes.append(f"not reached by the inputs: {', '.join(missed)}")

    def judge_served(
        self,
        original: list[Gap],
        converted: list[Gap],
        words_a: tuple[float, int, int] | None,
        words_b: tuple[float, int, int] | None,
    ) -> Served:
        sizes = [entry.size for entry in original]
        errors_a, errors_b = [entry.error for entry in original], [entry.error for entry in converted]
        ratio, low, high = bootstrap_ratio(errors_b, errors_a, self.criterion.bootstrap)
        worse = sum(b.nonfinite > a.nonfinite for a, b in zip(original, converted, strict=True))
        if worse:
            self.failures.append(f"served: NaN or inf in {worse} sequences where the original has none")
        if sum(errors_a) == 0 and sum(errors_b) > 0:
            self.failures.append(
                "served: ratio is infinite: the original as served equals the reference, the converted does not"
            )
        elif not ratio <= self.criterion.ratio_max:
            self.failures.append(f"served: ratio {ratio:.4g} above {self.criterion.ratio_max:g}")
        if not low <= self.criterion.ratio_interval_low:
            self.failures.append(
                f"served: ratio_interval [{low:.4g}, {high:.4g}] lies above {self.criterion.ratio_interval_low:g}"
            )
        return Served(
            error_original=relative(errors_a, sizes),
            error_converted=relative(errors_b, sizes),
            ratio=ratio,
            ratio_interval=(low, high),
            kl_original=words_a[0] / words_a[2] if words_a else None,
            kl_converted=words_b[0] / words_b[2] if words_b else None,
            top1_agreement=words_b[1] / words_b[2] if words_b else None,
            top1_agreement_original=words_a[1] / words_a[2] if words_a else None,
            max_abs=_peak([entry.max_abs for entry in converted]),
            tokens=words_b[2] if words_b else None,
        )


@contextmanager
def _reached(norms: list[NormUnderTest]) -> Iterator[list[NormUnderTest]]:
    """List the norms that are called, in the order of their last call."""
    order: list[NormUnderTest] = []
    handles = []

    def note(norm: NormUnderTest) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            if norm in order:
                order.remove(norm)
            order.append(norm)

        return hook

    try:
        for norm in norms:
            handles.append(norm.module.register_forward_pre_hook(note(norm)))
        yield order
    finally:
        for handle in handles:
            handle.remove()


def _disturb(scale: float) -> Callable[..., torch.Tensor]:
    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        factor = torch.ones(output.shape[-1], dtype=output.dtype, device=output.device)
        # Every other channel: a norm or softmax further on would cancel a common factor.
        factor[::2] = scale
        return output * factor

    return hook


def _total(words: list[tuple[float, int, int]]) -> tuple[float, int, int] | None:
    if not words:
        return None
    return sum(w[0] for w in words), sum(w[1] for w in words), sum(w[2] for w in words)


def _peak(values: list[float]) -> float:
    return float("nan") if any(value != value for value in values) else max(values, default=0.0)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("normswap", "torch", "transformers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
