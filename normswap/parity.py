"""Measure whether a converted model computes what the original computes, and give a verdict."""

from __future__ import annotations

import gc
import math
import platform
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap._version import __version__
from normswap.controls import Dropped, judge_lost
from normswap.errors import ModelError
from normswap.figures import Control, Criterion, Exact, NormFigures, ParityReport, Served
from normswap.gates import judge_exact, judge_norm, judge_reach, judge_served
from normswap.inputs import Inputs, Output, run
from normswap.meter import NormMeter, NormUnderTest, trial_inputs, watching
from normswap.stats import Gap, Tokens, compare_tokens, gap, relative

__all__ = ["Criterion", "Dropped", "NormFigures", "NormUnderTest", "ParityReport", "measure"]

# Sequences that a control is run on.
_CONTROL_SEQUENCES = 2
Loader = Callable[[torch.dtype], nn.Module]
Progress = Callable[[str, int, int], None]


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
    progress: Progress | None = None,
    exact: Loader | None = None,
    dropped: Sequence[Dropped] = (),
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
        progress: called with (stage, done, total) before each step.
        exact: loads the model that the gate ``exact`` runs, where that is not the converted one: with gains folded
            and not rounded.
        dropped: gains that the converted model has folded, for the control of the gate ``served``.

    Returns:
        The figures and the verdict.

    Raises:
        ModelError: a model does not run on the inputs.
    """
    criterion = criterion or Criterion()
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        session = _Session(original, converted, norms, inputs, torch.device(device), criterion, Path(folder))
        session.progress = progress or session.progress
        session.exact, session.dropped = exact, dropped
        return session.report(dtype, backend)


@dataclass
class _Run:
    """What one pass of a model over the inputs gave."""

    exact: Exact | None = None
    gaps: list[Gap] = field(default_factory=list)
    tokens: Tokens | None = None
    norms: list[NormFigures] = field(default_factory=list)

    def compare(self, reference: torch.Tensor, tensor: torch.Tensor, *, logits: bool) -> None:
        self.gaps.append(gap(tensor, reference))
        if logits:
            found = compare_tokens(reference, tensor)
            self.tokens = found if self.tokens is None else self.tokens + found


@dataclass
class _Session:
    """One measurement: its parameters, and the failures and notes it gathers."""

    original: Loader
    converted: Loader
    norms: Callable[[nn.Module], list[NormUnderTest]]
    inputs: Inputs
    device: torch.device
    criterion: Criterion
    folder: Path
    progress: Progress = lambda stage, done, total: None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    exact: Loader | None = None
    dropped: Sequence[Dropped] = ()
    lost: list[tuple[str, list[Gap]]] = field(default_factory=list)

    def report(self, dtype: torch.dtype, backend: str) -> ParityReport:
        if len(self.inputs.batches) < self.criterion.min_sequences:
            self.notes.append(
                f"expected at least {self.criterion.min_sequences} sequences for the interval, got "
                f"{len(self.inputs.batches)}; give more text"
            )
        if dtype == torch.float32:
            # Float32 against itself would have no error to compare with.
            reference_dtype, reference = torch.float64, self.float64_reference()
            a = self.run_original(dtype, reference, keep="float32")
            exact = self.run_exact(dtype, "float32") if self.exact else None
            b = self.run_converted(dtype, reference, exact=None if self.exact else "float32", served=True)
            exact = exact or b.exact
        else:
            reference_dtype, reference = torch.float32, "reference"
            self.run_original(torch.float32, None, keep=reference)
            exact = self.run_exact(torch.float32, reference)
            a = self.run_original(dtype, reference, keep=None)
            b = self.run_converted(dtype, reference, exact=None, served=True)
        assert exact is not None
        served = Served()
        if reference is not None:
            numbers = math.prod(self.output["shape"]) * len(self.inputs.batches)
            served, failures, notes = judge_served(a.gaps, b.gaps, a.tokens, b.tokens, numbers, self.criterion)
            self.failures += failures
            self.notes += notes
            control, notes = judge_lost(self.lost, a.gaps, self.criterion)
            served, self.notes = replace(served, control=control), self.notes + notes
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
            norms=b.norms,
            versions=_versions(),
        )

    def run_exact(self, dtype: torch.dtype, reference: str) -> Exact | None:
        return self.run_converted(dtype, None, exact=reference, served=False).exact

    def float64_reference(self) -> str | None:
        try:
            self.run_original(torch.float64, None, keep="reference")
        except ModelError as error:
            self.notes.append(f"no reference, so errors as served are not measured, only exact and norms: {error}")
            return None
        return "reference"

    @contextmanager
    def loaded(self, loader: Loader, dtype: torch.dtype) -> Iterator[nn.Module]:
        model = loader(dtype).eval()
        first = next(model.parameters(), None)
        if first is not None and first.device.type != self.device.type:
            model = model.to(self.device)
        # The grouped product of experts has no float64.
        if dtype == torch.float64 and callable(choose := getattr(model, "set_experts_implementation", None)):
            choose("eager")
        try:
            yield model
        finally:
            del model
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def outputs(self, model: nn.Module, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Output]]:
        count = len(self.inputs.batches)
        for index, batch in enumerate(self.inputs.batches):
            self.progress(f"{what} in {_name(dtype)}", index, count)
            output = run(model, batch, dtype, self.device)
            others = [name for name, tensor in output.tensors.items() if name != output.name and tensor.numel() > 1]
            self.output = self.output or {
                "name": output.name,
                "shape": list(output.main.shape),
                "others": others,
            }
            if output.name != self.output["name"]:
                raise ModelError(f"expected the output {self.output['name']!r} from every run, got {output.name!r}")
            yield index, output

    def save(self, name: str, index: int, output: Output) -> None:
        torch.save({key: tensor.cpu() for key, tensor in output.tensors.items()}, self.folder / f"{name}-{index}.pt")

    def load(self, name: str, index: int) -> dict[str, torch.Tensor]:
        return torch.load(self.folder / f"{name}-{index}.pt", weights_only=True, map_location=self.device)

    def run_original(self, dtype: torch.dtype, reference: str | None, keep: str | None) -> _Run:
        """Run the original, compare it with the reference and keep its outputs, each if a name is given."""
        result = _Run()
        with self.loaded(self.original, dtype) as model:
            for index, output in self.outputs(model, dtype, "original"):
                if count := int((~output.main.isfinite()).sum()):
                    self.failures.append(
                        f"served: the original itself gives {count} NaN or infinite values in {_name(dtype)} on "
                        f"sequence {index + 1}; nothing can be compared with them"
                    )
                if keep is not None:
                    self.save(keep, index, output)
                if reference is not None:
                    self.compare(result, reference, index, output)
        return result

    def compare(self, result: _Run, reference: str, index: int, output: Output) -> None:
        expected = self.load(reference, index)[output.name]
        result.compare(expected, output.main, logits=output.name == "logits")

    def gaps(self, exact: str, index: int, output: Output) -> dict[str, Gap]:
        """Distances of every tensor of an output from the original's, by name; nothing of it may lack."""
        expected = self.load(exact, index)
        found = {}
        for name in (self.output["name"], *self.output["others"]):
            tensor = output.tensors.get(name)
            if tensor is None or tensor.shape != expected[name].shape:
                got = "none" if tensor is None else list(tensor.shape)
                raise ModelError(f"expected the output {name} of shape {list(expected[name].shape)}, got {got}")
            found[name] = gap(tensor, expected[name])
        return found

    def try_rows(self, norms: list[NormUnderTest], dtype: torch.dtype) -> list[str]:
        """Run each norm beside its original on rows that the inputs may not bring; return the failures."""
        failures = []
        for norm in norms:
            meter = NormMeter(norm.spec)
            for trial in trial_inputs(norm.spec):
                arguments = {name: tensor.to(self.device, dtype) for name, tensor in trial.items()}
                x, gate = arguments[norm.spec.input_name], arguments.get(norm.spec.gate_name or "")
                with torch.no_grad():
                    expected, got = norm.original(**arguments), norm.swapped(**arguments)
                    meter.add(x, norm.gain(), norm.bias(), expected, got, gate)
            failures += judge_norm(f"{norm.name} on trial rows", meter, self.criterion)[1]
        return failures

    def run_converted(self, dtype: torch.dtype, reference: str | None, *, exact: str | None, served: bool) -> _Run:
        """Run the converted model once: against the original's outputs named ``exact``, and as served."""
        result = _Run()
        exact_gaps: list[dict[str, Gap]] = []
        with self.loaded(self.converted if served or self.exact is None else self.exact, dtype) as model:
            under_test = self.norms(model)
            sample = max(1 << 16, (1 << 19) // max(1, len(self.inputs.batches)))
            with _reached(under_test) as order, watching(under_test if served else [], sample) as meters:
                for index, output in self.outputs(model, dtype, "converted"):
                    if exact is not None:
                        exact_gaps.append(self.gaps(exact, index, output))
                    if reference is not None:
                        self.compare(result, reference, index, output)
            if exact is not None:
                control = self.control(model, dtype, list(order.values()), exact)
                result.exact, failures = judge_exact(exact_gaps, self.output["name"], control, self.criterion)
                self.failures += failures
            if reference is not None:
                self.lose_gains(model, dtype, reference)
            trial_failures = self.try_rows(under_test, dtype) if served else []
        if served:
            judged = [judge_norm(name, meter, self.criterion) for name, meter in meters.items()]
            result.norms = [figures for figures, _ in judged]
            failures, notes = judge_reach(result.norms)
            self.failures += [failure for _, failed in judged for failure in failed] + failures + trial_failures
            self.notes += notes
        return result

    def lose_gains(self, model: nn.Module, dtype: torch.dtype, reference: str) -> None:
        for one in self.dropped:
            gaps = []
            handle = model.get_submodule(one.name).register_forward_hook(one.hook)
            try:
                for index, batch in enumerate(self.inputs.batches[:_CONTROL_SEQUENCES]):
                    output = run(model, batch, dtype, self.device)
                    gaps.append(gap(output.main, self.load(reference, index)[output.name]))
            finally:
                handle.remove()
            self.lost.append((one.name, gaps))

    def control(self, model: nn.Module, dtype: torch.dtype, reached: list[NormUnderTest], exact: str) -> Control | None:
        """Disturb one norm and see whether the exact gate would notice; the last one first, it is the surest."""
        best: Control | None = None
        reference = self.load(exact, 0)[self.output["name"]]
        for at in dict.fromkeys(int((len(reached) - 1) * part) for part in (1, 0, 0.5, 0.25, 0.75) if reached):
            norm, scale = reached[at], self.criterion.control_scale
            handle = norm.module.register_forward_hook(_disturb(scale))
            try:
                disturbed = run(model, self.inputs.batches[0], dtype, self.device).main
            finally:
                handle.remove()
            found = gap(disturbed, reference)
            error = relative([found.error], [found.size])
            control = Control(norm.name, scale, error, error > self.criterion.exact_bound)
            if control.detected:
                return control
            best = control if best is None or control.error > best.error else best
        return best


@contextmanager
def _reached(norms: list[NormUnderTest]) -> Iterator[dict[str, NormUnderTest]]:
    """Collect the norms that are called, in the order of their last call."""
    order: dict[str, NormUnderTest] = {}

    def note(norm: NormUnderTest) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            order.pop(norm.name, None)
            order[norm.name] = norm

        return hook

    handles = []
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} {device.type}, {torch.get_num_threads()} threads"


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "normswap": __version__}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
