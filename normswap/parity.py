"""Measure whether a converted model computes what the original computes, and give a verdict."""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap.controls import Dropped, judge_lost
from normswap.environment import device_words, versions
from normswap.errors import ModelError
from normswap.evidence import Fault, LayerFigures
from normswap.figures import Criterion, Exact, NormFigures, ParityReport, Served
from normswap.gates import judge_exact, judge_norm, judge_reach, judge_served
from normswap.inputs import Group, Inputs, Output, run, split
from normswap.meter import NormMeter, NormUnderTest, trial_inputs, watching
from normswap.power import Trial, control_of, doubts_of, in_the_norm_alone, in_the_whole_model, power_of, reached
from normswap.residual import Layer, Stream, Sums, judge_layers, layers_of
from normswap.spec import dtype_name
from normswap.spool import Spool
from normswap.stats import Gap, gap
from normswap.tokenwise import Rows, compare_rows

__all__ = ["Criterion", "Dropped", "NormFigures", "NormUnderTest", "ParityReport", "measure"]

# Sequences that a lost gain is run on.
_CONTROL_SEQUENCES = 2
# Elements of one norm that are compared: so many, or this many times the tokens.
_FEWEST_ELEMENTS, _ELEMENTS_A_TOKEN = 1 << 17, 256
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
    reference: torch.dtype | None = None,
    swapped: bool = True,
) -> ParityReport:
    """Run original and converted on the same inputs and judge by three gates.

    The reference is the original's stored weights in float32 arithmetic (in float64 where the models are served in
    float32, or where that is asked for). ``exact``: both in the reference's dtype agree (in float32 where they are
    served so). ``norms``: each norm, on the activations of the served run, is within the unit bound of its own
    original. ``served``: the converted model is as near to the reference as the original is. Beside the gates the
    residual stream is compared layer by layer, and faults are put in that some gate has to see. One model is in memory
    at a time; the reference's outputs wait, in a temporary folder where they are many.

    Args:
        original: loads the original in a dtype.
        converted: loads the converted model in a dtype.
        norms: lists the norms of a converted model that are judged.
        inputs: what to run on.
        dtype: dtype that the models are served in.
        device: where they run.
        backend: which implementation of the norms runs; goes to the report.
        criterion: the bounds; the project's by default.
        progress: called with (stage, done, total) before each step.
        exact: loads the model that the gate ``exact`` runs, where that is not the converted one: with gains folded
            and not rounded.
        dropped: gains that the converted model has folded, for the control of the gate ``served``.
        reference: dtype of the reference's arithmetic, float32 or float64; by default float32, and float64 where the
            models are served in float32.
        swapped: whether the converted model has swapped norms, so that it is a failure if none is reached.

    Returns:
        The figures and the verdict.

    Raises:
        ModelError: a model does not run on the inputs.
    """
    criterion = criterion or Criterion()
    with tempfile.TemporaryDirectory(prefix="normswap-") as folder:
        session = _Session(
            original, converted, norms, inputs, torch.device(device), criterion, Spool(Path(folder)), swapped
        )
        session.progress = progress or session.progress
        session.exact, session.dropped = exact, dropped
        return session.report(dtype, reference, backend)


@dataclass
class _Run:
    """What one pass of a model over the inputs gave."""

    exact: Exact | None = None
    rows: dict[int, Rows] = field(default_factory=dict)
    norms: list[NormFigures] = field(default_factory=list)
    layers: Sums | None = None
    layers_exact: Sums | None = None

    @property
    def sequences(self) -> list[Rows]:
        return [self.rows[index] for index in sorted(self.rows)]


@dataclass
class _Session:
    """One measurement: its parameters, and the failures, doubts and notes it gathers."""

    original: Loader
    converted: Loader
    norms: Callable[[nn.Module], list[NormUnderTest]]
    inputs: Inputs
    device: torch.device
    criterion: Criterion
    spool: Spool
    swapped: bool = True
    progress: Progress = lambda stage, done, total: None
    failures: list[str] = field(default_factory=list)
    doubts: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    output: dict[str, Any] = field(default_factory=dict)
    exact: Loader | None = None
    dropped: Sequence[Dropped] = ()
    lost: list[tuple[str, list[Gap]]] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    streams: dict[str, Stream] = field(default_factory=dict)
    layers: list[Layer] = field(default_factory=list)
    running: Group | None = None

    def __post_init__(self) -> None:
        self.groups = self.inputs.groups()

    def report(self, dtype: torch.dtype, reference_dtype: torch.dtype | None, backend: str) -> ParityReport:
        if self.inputs.sequences < self.criterion.min_sequences:
            self.notes.append(
                f"expected at least {self.criterion.min_sequences} sequences for the interval, got "
                f"{self.inputs.sequences}, so it is taken over blocks of tokens; give more text"
            )
        if dtype == torch.float32:
            # Float32 against itself would have no error to compare with.
            reference_dtype, reference = torch.float64, self.float64_reference()
            a = self.run_original(dtype, reference, keep="float32")
            exact = self.run_exact(dtype, "float32") if self.exact else None
            b = self.run_converted(dtype, reference, exact=None if self.exact else "float32", served=True)
            exact = exact or b
        else:
            reference_dtype, reference = reference_dtype or torch.float32, "reference"
            self.run_original(reference_dtype, None, keep=reference)
            exact = self.run_exact(reference_dtype, reference)
            a = self.run_original(dtype, reference, keep=None)
            b = self.run_converted(dtype, reference, exact=None, served=True)
        assert exact.exact is not None
        served = Served()
        if reference is not None:
            numbers = math.prod(self.output["shape"]) * self.inputs.sequences
            served, failures, notes = judge_served(a.sequences, b.sequences, numbers, self.criterion)
            self.failures += failures
            self.notes += notes
            control, notes = judge_lost(self.lost, [rows.gap for rows in a.sequences], self.criterion)
            served, self.notes = replace(served, control=control), self.notes + notes
        layers = self.judge_layers(exact.layers_exact, a.layers, b.layers)
        self.doubts += doubts_of(self.faults)
        return ParityReport(
            failures=self.failures,
            notes=self.notes,
            device=str(self.device),
            device_name=device_words(self.device),
            backend=backend,
            dtype=dtype_name(dtype),
            reference_dtype=dtype_name(reference_dtype),
            inputs=self.inputs.to_dict(),
            criterion=self.criterion,
            output=self.output,
            exact=exact.exact,
            logits=served,
            norms=b.norms,
            versions=versions(),
            doubts=self.doubts,
            layers=layers,
            departs=next((layer.name for layer in layers if layer.departs), None),
            power=power_of(self.faults, exact.exact),
        )

    def judge_layers(self, exact: Sums | None, original: Sums | None, converted: Sums | None) -> list[LayerFigures]:
        order = next((stream.order for stream in self.streams.values()), [])
        failed = any(failure.startswith("served:") for failure in self.failures)
        bound = self.criterion.exact_bound
        return judge_layers(
            self.layers, order, exact, original, converted, self.criterion, bound=bound, served_failed=failed
        )

    def run_exact(self, dtype: torch.dtype, reference: str) -> _Run:
        return self.run_converted(dtype, None, exact=reference, served=False)

    def float64_reference(self) -> str | None:
        try:
            self.run_original(torch.float64, None, keep="reference")
        except ModelError as error:
            self.streams.pop("reference", None)
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

    def current(self) -> Group:
        assert self.running is not None
        return self.running

    def outputs(self, model: nn.Module, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Output]]:
        done = 0
        for group in self.groups:
            self.progress(f"{what} in {dtype_name(dtype)}", done, self.inputs.sequences)
            self.running = group
            for index, output in zip(
                group.members, split(run(model, group.batch, dtype, self.device), group), strict=True
            ):
                self.check_name(output)
                yield index, output
            done += len(group.members)

    def check_name(self, output: Output) -> None:
        others = [name for name, tensor in output.tensors.items() if name != output.name and tensor.numel() > 1]
        self.output = self.output or {"name": output.name, "shape": list(output.main.shape), "others": others}
        if output.name != self.output["name"]:
            raise ModelError(f"expected the output {self.output['name']!r} from every run, got {output.name!r}")

    def comparing(self, stream: str | None, model: nn.Module) -> Any:
        if stream is None or stream not in self.streams:
            return nullcontext()
        return self.streams[stream].comparing(model, self.current)

    def run_original(self, dtype: torch.dtype, reference: str | None, keep: str | None) -> _Run:
        """Run the original, compare it with the reference and keep its outputs, each if a name is given."""
        result = _Run()
        if keep is not None:
            self.streams[keep] = Stream(self.inputs.sequences)
        with self.loaded(self.original, dtype) as model:
            self.layers = self.layers or [layer for layer, _ in layers_of(model)]
            keeping = nullcontext() if keep is None else self.streams[keep].keeping(model, self.current)
            with keeping, self.comparing(reference, model) as result.layers:
                for index, output in self.outputs(model, dtype, "original"):
                    if count := int((~output.main.isfinite()).sum()):
                        self.failures.append(
                            f"served: the original itself gives {count} NaN or infinite values in {dtype_name(dtype)} "
                            f"on sequence {index + 1}; nothing can be compared with them"
                        )
                    if keep is not None:
                        self.spool.put(keep, index, output)
                    if reference is not None:
                        self.compare(result, reference, index, output)
        return result

    def compare(self, result: _Run, reference: str, index: int, output: Output) -> None:
        expected = self.spool.get(reference, index, self.device)[output.name]
        wide = output.main.dtype not in (torch.bfloat16, torch.float16)
        result.rows[index] = compare_rows(expected, output.main, logits=output.name == "logits", wide=wide)

    def gaps(self, exact: str, index: int, output: Output) -> dict[str, Gap]:
        """Distances of every tensor of an output from the original's, by name; nothing of it may lack."""
        expected = self.spool.get(exact, index, self.device)
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
        failures, seen = [], set()
        for norm in norms:
            meter, key = NormMeter(norm.spec), (norm.spec, type(norm.module))
            for trial in trial_inputs(norm.spec, eps_alone=key in seen):
                arguments = {name: tensor.to(self.device, dtype) for name, tensor in trial.items()}
                x, gate = arguments[norm.spec.input_name], arguments.get(norm.spec.gate_name or "")
                with torch.no_grad():
                    expected, got = norm.original(**arguments), norm.swapped(**arguments)
                    meter.add(x, norm.gain(), norm.bias(), expected, got, gate)
            seen.add(key)
            failures += judge_norm(f"{norm.name} on trial rows", meter, self.criterion)[1]
        return failures

    def run_converted(self, dtype: torch.dtype, reference: str | None, *, exact: str | None, served: bool) -> _Run:
        """Run the converted model once: against the original's outputs named ``exact``, and as served."""
        result = _Run()
        exact_gaps: list[dict[str, Gap]] = []
        with self.loaded(self.converted if served or self.exact is None else self.exact, dtype) as model:
            under_test = self.norms(model)
            tokens = self.inputs.sequences * max(1, self.inputs.length)
            sample = max(_FEWEST_ELEMENTS, _ELEMENTS_A_TOKEN * tokens) // len(self.groups)
            with (
                reached(under_test) as order,
                watching(under_test if served else [], sample) as meters,
                self.comparing(reference, model) as result.layers,
                self.comparing(exact, model) as result.layers_exact,
            ):
                for index, output in self.outputs(model, dtype, "converted"):
                    if exact is not None:
                        exact_gaps.append(self.gaps(exact, index, output))
                    if reference is not None:
                        self.compare(result, reference, index, output)
            if exact is not None:
                self.judge_exact(result, exact_gaps, model, dtype, list(order.values()))
            if reference is not None:
                self.lose_gains(model, dtype, reference)
            trial_failures = self.try_rows(under_test, dtype) if served else []
            if served:
                live = [norm for norm in under_test if norm.name in order]
                self.faults = in_the_norm_alone(self.faults, live, dtype, self.device, self.criterion)
        if served:
            judged = [judge_norm(name, meter, self.criterion) for name, meter in meters.items()]
            result.norms = [figures for figures, _ in judged]
            failures, notes = judge_reach(result.norms, swapped=self.swapped)
            self.failures += [failure for _, failed in judged for failure in failed] + failures + trial_failures
            self.notes += notes
        return result

    def judge_exact(
        self,
        result: _Run,
        gaps: list[dict[str, Gap]],
        model: nn.Module,
        dtype: torch.dtype,
        order: list[NormUnderTest],
    ) -> None:
        trial = Trial(model, self.inputs, dtype, self.device)
        control = control_of(order, trial.error, self.criterion)
        result.exact, failures, doubts = judge_exact(gaps, self.output["name"], control, self.criterion)
        self.failures += failures
        self.doubts += doubts
        if not doubts:
            self.faults = in_the_whole_model(order, trial.error, result.exact.bound)

    def lose_gains(self, model: nn.Module, dtype: torch.dtype, reference: str) -> None:
        for one in self.dropped:
            gaps: list[Gap] = []
            handle = model.get_submodule(one.name).register_forward_hook(one.hook)
            try:
                for group in self.groups:
                    if len(gaps) >= _CONTROL_SEQUENCES:
                        break
                    outputs = split(run(model, group.batch, dtype, self.device), group)
                    for index, output in zip(group.members, outputs, strict=True):
                        gaps.append(gap(output.main, self.spool.get(reference, index, self.device)[output.name]))
            finally:
                handle.remove()
            self.lost.append((one.name, gaps))
