"""One measurement: the runs of both models, what is compared between them, and the report."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap.controls import Dropped, judge_lost, lose_gains
from normswap.environment import device_words, versions
from normswap.errors import ModelError
from normswap.evidence import Fault, LayerFigures
from normswap.figures import Criterion, Exact, NormFigures, ParityReport, Served
from normswap.gates import OF_A_RATIO, judge_exact, judge_norm, judge_reach, judge_served, with_weights
from normswap.inputs import Group, Inputs, Output, run, split
from normswap.lockstep import current, forwards
from normswap.memory import young_collections
from normswap.meter import NormUnderTest, watching
from normswap.power import Trial, doubts_of, held_to, in_the_norm_alone, in_the_whole_model, power_of, reached
from normswap.processes import everywhere, gathered
from normswap.residual import Layer, Stream, Sums, judge_layers, layers_of
from normswap.spec import dtype_name
from normswap.spool import Spool
from normswap.stats import Gap, gap, relative
from normswap.tokenwise import Rows, compare_rows
from normswap.trials import try_rows
from normswap.writing import Writing

__all__ = ["Loader", "Progress", "Session"]

# Sequences that a lost gain is run on.
_CONTROL_SEQUENCES = 2
# Elements of one norm that are compared: so many, or this many times the tokens.
_FEWEST_ELEMENTS, _ELEMENTS_A_TOKEN = 1 << 17, 256
Loader = Callable[[torch.dtype], nn.Module]
Progress = Callable[[str, int, int], None]


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
class Session:
    """One measurement: its parameters, and the failures, doubts and notes it gathers.

    ``room`` is how many bytes the outputs of one forward, and what is kept of the residual stream, may take each; None
    for as many as go fast. ``explained`` and ``folded`` are those of `normswap.parity.measure`.
    """

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
    room: int | None = None
    explained: bool = True
    folded: Collection[str] = ()

    def __post_init__(self) -> None:
        self.groups = self.inputs.groups() if self.room is None else self.inputs.groups(self.room)
        self.writing = Writing(self.inputs)

    def report(self, dtype: torch.dtype, reference_dtype: torch.dtype | None, backend: str) -> ParityReport:
        """Run both models and put everything together; see `normswap.parity.measure`."""
        with young_collections():
            return self._report(dtype, reference_dtype, backend)

    def _report(self, dtype: torch.dtype, reference_dtype: torch.dtype | None, backend: str) -> ParityReport:
        if self.inputs.sequences < self.criterion.min_sequences:
            self.notes.append(
                f"expected at least {self.criterion.min_sequences} sequences for the interval, got "
                f"{self.inputs.sequences}, so it is taken over blocks of tokens; give more text"
            )
        if dtype == torch.float32:
            # Float32 against itself would have no error to compare with.
            reference_dtype, reference = torch.float64, self.float64_reference()
            a = self.run_original(dtype, reference, keep="float32", served=True)
            exact = self.run_exact(dtype, "float32") if self.exact else None
            b = self.run_converted(dtype, reference, exact=None if self.exact else "float32", served=True)
            exact = exact or b
        else:
            reference_dtype, reference = reference_dtype or torch.float32, "reference"
            self.run_original(reference_dtype, None, keep=reference)
            exact = self.run_exact(reference_dtype, reference)
            a = self.run_original(dtype, reference, keep=None, served=True)
            b = self.run_converted(dtype, reference, exact=None, served=True)
        assert exact.exact is not None
        exact.exact = self.exact_in_float64(exact.exact, "float32" if dtype == torch.float32 else "reference")
        served = Served()
        if reference is not None:
            numbers = math.prod(self.output["shape"]) * self.inputs.sequences
            served, failures, doubts, notes = judge_served(a.sequences, b.sequences, numbers, self.criterion)
            if self.exact is not None and self.explained and any(OF_A_RATIO in one for one in (*failures, *doubts)):
                served, failures, doubts = self.judge_with_weights(
                    served, failures, a, b, numbers, reference, reference_dtype
                )
            self.failures += failures
            self.doubts += doubts
            self.notes += notes
            control, notes = judge_lost(self.lost, [rows.gap for rows in a.sequences], self.criterion)
            served, self.notes = replace(served, control=control), self.notes + notes
        layers = self.judge_layers(exact.layers_exact, a.layers, b.layers)
        self.doubts += doubts_of(self.faults)
        generation, failures = self.writing.judge(dtype, partial(self.loaded, self.original, reference_dtype))
        self.failures += failures
        return ParityReport(
            failures=everywhere(self.failures),
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
            generation=generation,
        )

    def judge_with_weights(
        self, served: Served, failures: list[str], a: _Run, b: _Run, numbers: int, reference: str, dtype: torch.dtype
    ) -> tuple[Served, list[str], list[str]]:
        """Judge once more, with what rounding the stored weights adds: the original was not rounded a second time."""
        weights = _Run()
        with self.loaded(self.converted, dtype) as model:
            for index, output in self.outputs(model, dtype, "stored weights"):
                self.compare(weights, reference, index, output)
        both = with_weights(a.sequences, weights.sequences)
        judged, left, doubts, _ = judge_served(both, b.sequences, numbers, self.criterion)
        errors = [rows.gap for rows in weights.sequences]
        error = relative([one.error for one in errors], [one.size for one in errors])
        self.notes.append(
            f"served: {error:.3g} is what rounding the stored weights adds by itself; of that and the original's own "
            f"error together the converted model's is {judged.ratio:.4g} times, which is what counts"
        )
        kept = [failure for failure in failures if OF_A_RATIO not in failure]
        return replace(served, error_weights=error, ratio_explained=judged.ratio), [*kept, *left], doubts

    def judge_layers(self, exact: Sums | None, original: Sums | None, converted: Sums | None) -> list[LayerFigures]:
        order = next((stream.order for stream in self.streams.values()), [])
        failed = any(failure.startswith("served:") for failure in self.failures)
        folded = {layer: norm for stream in self.streams.values() for layer, norm in stream.folded.items()}
        return judge_layers(
            self.layers,
            order,
            exact,
            original,
            converted,
            self.criterion,
            bound=self.criterion.exact_bound,
            served_failed=failed,
            folded=folded,
        )

    def run_exact(self, dtype: torch.dtype, reference: str) -> _Run:
        return self.run_converted(dtype, None, exact=reference, served=False)

    def exact_in_float64(self, exact: Exact, name: str) -> Exact:
        """Where the gate failed in float32, see whether the original keeps the bound itself, and judge in float64."""
        failed = [failure for failure in self.failures if failure.startswith("exact: error")]
        if not failed or exact.dtype != "float32" or not math.isfinite(exact.error):
            return exact
        wide, own, gaps = torch.float64, [], []
        try:
            with self.loaded(self.original, wide) as model:
                for index, output in self.outputs(model, wide, "original"):
                    own.append(gap(self.spool.get(name, index, self.device)[output.name], output.main))
                    self.spool.put("float64", index, output)
            error = relative([one.error for one in own], [one.size for one in own])
            exact = replace(exact, error_original=error)
            if error <= self.criterion.exact_bound:
                return exact
            with self.loaded(self.exact or self.converted, wide) as model:
                for index, output in self.outputs(model, wide, "converted"):
                    gaps.append(self.gaps("float64", index, output))
        except ModelError as reason:
            self.notes.append(f"exact: whether the original keeps the bound itself is not known: {reason}")
            return exact
        judged, failures, _ = judge_exact(gaps, self.output["name"], exact.control, self.criterion)
        self.notes.append(
            f"exact: the original itself fails this bound: in float32 it is {error:.3g} from what it gives in float64; "
            f"both in float64 differ by {judged.error:.3g}, which is what counts"
        )
        self.failures = [failure for failure in self.failures if failure not in failed] + failures
        return replace(exact, error=judged.error, dtype="float64")

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
        """The group whose forward is running."""
        number = current()
        assert number is not None
        return self.groups[number]

    def outputs(self, model: nn.Module, dtype: torch.dtype, what: str) -> Iterator[tuple[int, Output]]:
        done = 0
        runs = forwards(model, [group.batch for group in self.groups], dtype, self.device)
        for group in self.groups:
            self.progress(f"{what} in {dtype_name(dtype)}", done, self.inputs.sequences)
            _, output = next(runs)
            for index, one in zip(group.members, split(gathered(output), group), strict=True):
                self.check_name(one)
                yield index, one
            done += len(group.members)

    def check_name(self, output: Output) -> None:
        others = [name for name, tensor in output.tensors.items() if name != output.name and tensor.numel() > 1]
        self.output = self.output or {"name": output.name, "shape": list(output.main.shape), "others": others}
        if output.name != self.output["name"]:
            raise ModelError(f"expected the output {self.output['name']!r} from every run, got {output.name!r}")

    def comparing(self, stream: str | None, model: nn.Module, folded: Collection[str] = ()) -> Any:
        if stream is None or stream not in self.streams:
            return nullcontext()
        return self.streams[stream].comparing(model, self.current, folded)

    def run_original(
        self, dtype: torch.dtype, reference: str | None, keep: str | None, *, served: bool = False
    ) -> _Run:
        """Run the original, compare it with the reference and keep its outputs, each if a name is given."""
        result = _Run()
        if keep is not None:
            most = Stream.most if self.room is None else min(Stream.most, self.room // 4)
            self.streams[keep] = Stream(self.inputs.sequences, most=most)
        with self.loaded(self.original, dtype) as model:
            self.layers = self.layers or [layer for layer, _ in layers_of(model)]
            keeping = nullcontext() if keep is None else self.streams[keep].keeping(model, self.current)
            with keeping, self.comparing(reference, model) as result.layers:
                for index, output in self.outputs(model, dtype, "original"):
                    if count := _nonfinite(output.main):
                        self.failures.append(
                            f"served: the original itself gives {count} NaN or infinite values in {dtype_name(dtype)} "
                            f"on sequence {index + 1}; nothing can be compared with them"
                        )
                    if keep is not None:
                        self.spool.put(keep, index, output)
                    if reference is not None:
                        self.compare(result, reference, index, output)
            if served:
                self.writing.write(model)
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
                self.comparing(reference, model, self.folded) as result.layers,
                self.comparing(exact, model, self.folded) as result.layers_exact,
            ):
                for index, output in self.outputs(model, dtype, "converted"):
                    if exact is not None:
                        exact_gaps.append(self.gaps(exact, index, output))
                    if reference is not None:
                        self.compare(result, reference, index, output)
            if exact is not None:
                self.judge_exact(result, exact_gaps, model, dtype, list(order.values()))
            if reference is not None:
                self.lost += lose_gains(model, self.dropped, partial(self.distances, model, dtype, reference))
            trial_failures = try_rows(under_test, dtype, self.device, self.criterion) if served else []
            if served:
                live = [norm for norm in under_test if norm.name in order]
                self.faults = in_the_norm_alone(self.faults, live, dtype, self.device, self.criterion)
                self.writing.write(model)
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
        control, faults = in_the_whole_model(order, Trial(model, self.inputs, dtype, self.device), self.criterion)
        result.exact, failures, doubts = judge_exact(gaps, self.output["name"], control, self.criterion)
        result.exact = replace(result.exact, dtype=dtype_name(dtype))
        self.failures += failures
        self.doubts += doubts
        if not doubts:
            self.faults = held_to(faults, result.exact.bound)

    def distances(self, model: nn.Module, dtype: torch.dtype, reference: str) -> list[Gap]:
        """Run some sequences and measure how far they are from the reference."""
        found: list[Gap] = []
        for group in self.inputs.some(_CONTROL_SEQUENCES):
            outputs = split(gathered(run(model, group.batch, dtype, self.device)), group)
            for index, output in zip(group.members, outputs, strict=True):
                found.append(gap(output.main, self.spool.get(reference, index, self.device)[output.name]))
        return found


def _nonfinite(tensor: torch.Tensor) -> int:
    """Count the NaN and infinite elements; the extremes are found in a tenth of the time where there are none."""
    if not tensor.numel() or all(math.isfinite(float(end)) for end in tensor.aminmax()):
        return 0
    return int((~tensor.isfinite()).sum())
