"""The criterion and the report: what was measured, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from normswap.evidence import Generation, LayerFigures, PairFigures, Power, TensorFigures

__all__ = ["SCHEMA", "Control", "Criterion", "Exact", "LostGain", "NormFigures", "ParityReport", "Served", "plain"]

# Of `ParityReport.to_dict`: raised whenever a reader of the former one would misread it.
SCHEMA = 2


def plain(value: Any) -> Any:
    """Make data safe for strict JSON: NaN and infinities become None, tuples lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry) for entry in value]
    return value


@dataclass(frozen=True)
class Criterion:
    """The bounds of the three gates; the defaults are the project's.

    Attributes:
        exact_bound: greatest relative RMS distance of the outputs when both models run in float32.
        control_scale: what the negative control multiplies every other channel of one norm by.
        ratio_interval_low: fails when the whole interval of the error ratio lies above it.
        ratio_max: fails when the ratio itself passes it.
        max_ulp: units in the last place that a norm may differ by from its original.
        max_ulp_rounded_twice: the same, where the original rounds twice.
        float32_budget: for float32 results, which have no coarser rounding to hide their arithmetic's: the greatest
            distance from the float64 truth may be this many times the original's own plus one unit.
        identical_bf16: least fraction of bit-identical elements of a bfloat16 result. The fraction that may differ
            grows as results are smaller than the terms whose difference they are (see `NormMeter`).
        identical_fp16: the same for a float16 result.
        chance: elements that differ are laid to chance where it gives as many at least this often.
        min_sequences: sequences that the interval needs.
        min_outputs: numbers in the compared outputs that the ratio needs to judge.
        bootstrap: resamplings behind the interval.
    """

    exact_bound: float = 1e-5
    control_scale: float = 1.02
    ratio_interval_low: float = 1.05
    ratio_max: float = 1.25
    max_ulp: float = 1.0
    max_ulp_rounded_twice: float = 2.0
    float32_budget: float = 2.0
    identical_bf16: float = 0.9999
    identical_fp16: float = 0.999
    chance: float = 1e-3
    min_sequences: int = 8
    min_outputs: int = 4096
    bootstrap: int = 2000

    def describe(self) -> str:
        """Say the criterion in plain words."""
        return (
            f"exact: both models in float32 agree to {self.exact_bound:g} relative RMS. norms: on the served "
            f"activations each norm is within {self.max_ulp:g} unit in the last place of its original, "
            f"{self.max_ulp_rounded_twice:g} where the original rounds twice, and {self.identical_bf16:.2%} of its "
            f"bfloat16 or {self.identical_fp16:.1%} of its float16 elements are bit-identical, but for what "
            f"chance explains (fewer where results are small differences of larger terms); a "
            f"float32 result is at most {self.float32_budget:g} times as "
            f"far from the float64 truth as the original plus one unit. served: the error against the reference "
            f"is at most {self.ratio_max:g} times the original's own, and the 95% bootstrap interval of that ratio "
            f"over sequences (over blocks of tokens, where there are fewer than {self.min_sequences} sequences) "
            f"reaches down to {self.ratio_interval_low:g}; the same holds for the root of KL(reference || converted) "
            "over KL(reference || original). No NaN passes, nor an infinity that the original lacks. power: every "
            "fault that was put in is seen by one gate, else the verdict is inconclusive."
        )

    def changed(self) -> dict[str, float]:
        """Return the bounds that are not the project's."""
        ours = asdict(Criterion())
        return {name: value for name, value in asdict(self).items() if value != ours[name]}

    def to_dict(self) -> dict[str, Any]:
        """Return the words and every bound."""
        return {"text": self.describe(), **asdict(self)}


@dataclass(frozen=True)
class Control:
    """A fault put in on purpose, and whether the exact gate saw it.

    Attributes:
        norm: the norm that was disturbed.
        scale: what every other channel of its result was multiplied by.
        error: relative RMS distance that came of it, on one sequence.
        detected: whether the gate's bound tells it from the conversion: it lies above the bound, or the bound was
            lowered to a tenth of it and the conversion keeps that.
    """

    norm: str
    scale: float
    error: float
    detected: bool


@dataclass(frozen=True)
class Exact:
    """Gate ``exact``: both models in float32.

    Attributes:
        error: relative RMS distance of the outputs.
        bound: what it may be; the criterion's, or less where the control asks for less.
        control: the negative control; None where no norm could be disturbed.
        dtype: of both models: that of the reference, or float64 where the original itself fails the bound in float32.
        error_original: relative RMS distance of the original in float32 from itself in float64, on the first
            sequences; None where that was not asked, since the bound is kept.
    """

    error: float
    bound: float
    control: Control | None
    dtype: str = "float32"
    error_original: float | None = None


@dataclass(frozen=True)
class LostGain:
    """The control of the gate ``served``: a folded gain, lost on purpose.

    Attributes:
        norm: whose gain.
        ratio: the error over the original's own, on two sequences.
        detected: whether it passes the bound of the ratio.
    """

    norm: str
    ratio: float
    detected: bool


@dataclass(frozen=True)
class Served:
    """Gate ``served``: errors against the reference, relative RMS over all sequences.

    Every figure is None where there is no reference: an original that is served in float32 and does not run in
    float64.

    Attributes:
        error_original: of the original as served.
        error_converted: of the converted model as served.
        ratio: the second over the first.
        ratio_interval: its 95% bootstrap interval over sequences.
        kl_original: mean KL(reference || original) in nats a token; None without logits.
        kl_converted: the same for the converted model.
        top1_agreement: fraction of tokens whose most likely entry is the reference's; None without logits.
        top1_agreement_original: the same for the original.
        max_abs: greatest absolute difference of the converted model from the reference.
        tokens: distributions compared; None without logits.
        control: the negative control; None where no gain was folded.
        ratio_interval_tokens: the 95% bootstrap interval of `ratio` over blocks of tokens.
        kl_ratio: root of ``kl_converted / kl_original``: a divergence grows with the square of an error.
        kl_ratio_interval: its 95% bootstrap interval over sequences.
        kl_ratio_interval_tokens: the same over blocks of tokens.
        kl_interval: 95% bootstrap interval of `kl_converted` over blocks of tokens.
        kl_original_interval: the same of `kl_original`.
        top1_interval: the same of `top1_agreement`.
        top1_original_interval: the same of `top1_agreement_original`.
        error_weights: of the converted model's stored weights in the reference's arithmetic: what rounding them once,
            as folding and casting have to, adds to the errors; None where that was not asked.
        ratio_explained: `error_converted` over what the original's error and this one come to together.
        judges: whether the ratios are held to their bounds; not where the outputs have too few numbers.
    """

    error_original: float | None = None
    error_converted: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    kl_original: float | None = None
    kl_converted: float | None = None
    top1_agreement: float | None = None
    top1_agreement_original: float | None = None
    max_abs: float | None = None
    tokens: int | None = None
    control: LostGain | None = None
    ratio_interval_tokens: tuple[float, float] | None = None
    kl_ratio: float | None = None
    kl_ratio_interval: tuple[float, float] | None = None
    kl_ratio_interval_tokens: tuple[float, float] | None = None
    kl_interval: tuple[float, float] | None = None
    kl_original_interval: tuple[float, float] | None = None
    top1_interval: tuple[float, float] | None = None
    top1_original_interval: tuple[float, float] | None = None
    error_weights: float | None = None
    ratio_explained: float | None = None
    judges: bool = True


@dataclass(frozen=True)
class NormFigures:
    """Gate ``norms``: one swapped norm on the served activations.

    Attributes:
        name: its name in the model.
        calls: how often the inputs reached it.
        elements: how many results were compared.
        dtype: of the results; None when never reached.
        max_ulp: greatest distance from the original in units in the last place.
        mean_ulp: mean of the same.
        bound_ulp: what `max_ulp` may be; None for a float32 result, which is held to its budget.
        bit_identical_fraction: fraction of elements with the original's very bits.
        bound_identical: what that may fall to; None for a float32 result.
        error_original: relative RMS distance of the original from the float64 truth.
        error_swapped: the same for the swapped norm.
        exact_ulp_original: greatest distance of the original from the truth, in units of its largest term.
        exact_ulp_swapped: the same for the swapped norm.
        passed: whether it keeps its bounds; None when never reached.
        histogram: how many elements lie 0, 1, 2, 3 to 4, 5 to 8, 9 to 16 and more units apart, the last also those
            where one is no number; empty when never reached. Parts of a unit count as the next whole one.
        worst_row: of the element furthest apart: which row of the call, from 0; None where all are equal.
        worst_call: in which call.
        worst_channel: in which channel.
    """

    name: str
    calls: int
    elements: int
    dtype: str | None = None
    max_ulp: float | None = None
    mean_ulp: float | None = None
    bound_ulp: float | None = None
    bit_identical_fraction: float | None = None
    bound_identical: float | None = None
    error_original: float | None = None
    error_swapped: float | None = None
    exact_ulp_original: float | None = None
    exact_ulp_swapped: float | None = None
    passed: bool | None = None
    histogram: list[int] = field(default_factory=list)
    worst_call: int | None = None
    worst_row: int | None = None
    worst_channel: int | None = None


@dataclass(frozen=True, repr=False)
class ParityReport:
    """What `measure` found, and the verdict.

    Attributes:
        failures: why the verdict is ``fail``; each begins with its gate (``exact``, ``norms``, ``served``).
        notes: what a reader should know beside the verdict.
        device: where it ran.
        device_name: the device in words.
        backend: which implementation of the norms ran.
        dtype: dtype of the served models.
        reference_dtype: dtype of the arithmetic behind the reference.
        inputs: what the models ran on.
        criterion: the bounds.
        output: name and shape (of one sequence) of what was compared.
        exact: gate ``exact``.
        logits: gate ``served``; named after what it compares in most models.
        norms: gate ``norms``, one for each norm.
        versions: of the software that ran.
        doubts: why the verdict is ``inconclusive`` where nothing failed: faults that no gate would have seen, each with
            what to change.
        checkpoint: what was verified, as it was named.
        against: what it was held against.
        command: the command that measures this again.
        tensors: the two compared tensor by tensor; None where both are one checkpoint.
        pairs: folded norms and their readers, from the stored tensors.
        layers: the residual stream, layer by layer, in the order that they ran.
        departs: name of the first layer that passes its bounds; None where none does.
        power: faults put in on purpose.
        generation: greedy continuations; None where they were not asked for.
        streamed: whether weights were loaded layer by layer, as they were needed.
        processes: how many processes the models were spread over.
    """

    failures: list[str]
    notes: list[str]
    device: str
    device_name: str
    backend: str
    dtype: str
    reference_dtype: str
    inputs: dict[str, Any]
    criterion: Criterion
    output: dict[str, Any]
    exact: Exact
    logits: Served
    norms: list[NormFigures]
    versions: dict[str, str] = field(default_factory=dict)
    doubts: list[str] = field(default_factory=list)
    checkpoint: str = ""
    against: str = ""
    command: str = ""
    tensors: TensorFigures | None = None
    pairs: list[PairFigures] = field(default_factory=list)
    layers: list[LayerFigures] = field(default_factory=list)
    departs: str | None = None
    power: Power = field(default_factory=Power)
    generation: Generation | None = None
    streamed: bool = False
    processes: int = 1

    @property
    def passed(self) -> bool:
        """Whether every gate held, and would have noticed had it not."""
        return not self.failures and not self.doubts

    @property
    def verdict(self) -> str:
        """``"pass"``, ``"fail"`` or ``"inconclusive"``."""
        if self.failures:
            return "fail"
        return "inconclusive" if self.doubts else "pass"

    def to_dict(self) -> dict[str, Any]:
        """Return the report as plain data that strict JSON can hold; a figure that is not finite is None."""
        data = {"schema": SCHEMA, "verdict": self.verdict, **asdict(self), "criterion": self.criterion.to_dict()}
        return plain(data)

    def __repr__(self) -> str:
        from normswap.wording import quiet_line

        return f"<{quiet_line(self)}>"

    def _repr_html_(self) -> str:
        """Show verdict, gates and layers in a notebook."""
        from normswap.page import to_fragment

        return to_fragment(self)
