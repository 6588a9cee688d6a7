"""The three gates: figures in, verdicts out. Every comparison is written so that a NaN fails it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from normswap.figures import Control, Criterion, Exact, NormFigures, Served
from normswap.meter import NormMeter
from normswap.stats import Gap, bootstrap_ratio, chance_of_as_many, relative
from normswap.tokenwise import Rows, bootstrap_mean, joined, ratio_over_blocks
from normswap.wording import interval as ends
from normswap.wording import number

__all__ = ["OF_A_RATIO", "judge_exact", "judge_norm", "judge_reach", "judge_served", "with_weights"]

OF_A_RATIO = "converted / original"
"""What the reasons hold that speak of a ratio of two errors, or of its interval."""

# Where the control stays below the bound, the error must stay this many times below the control.
_MARGIN = 10

_HALF = (torch.float16, torch.bfloat16)


def judge_exact(
    gaps: Sequence[Mapping[str, Gap]], main: str, control: Control | None, criterion: Criterion
) -> tuple[Exact, list[str], list[str]]:
    """Judge both models in float32.

    Args:
        gaps: distance of each output of the converted model from the original's, one mapping a sequence.
        main: the output that the figures are of; the others are held to the same bound.
        control: the negative control; None where no norm was reached.
        criterion: the bounds.

    Returns:
        The figures, the failures and the doubts in words: a gate that sees no fault neither passes nor fails.
    """
    bound = criterion.exact_bound
    errors = {
        name: relative([entry[name].error for entry in gaps], [entry[name].size for entry in gaps]) for name in gaps[0]
    }
    error = errors.pop(main)
    failures = [
        f"exact: error{_measured(value)} of {name}{_bound(value, criterion)}"
        for name, value in errors.items()
        if not value <= criterion.exact_bound
    ]
    if control is not None and not control.detected and control.error > 0:
        # The norms move this output less than the bound: only a tighter one can tell a fault.
        bound = min(bound, control.error / _MARGIN)
        if error <= bound:
            return Exact(error, bound, replace(control, detected=True)), failures, []
    if not error <= criterion.exact_bound:
        failures.append(f"exact: error{_measured(error)}{_bound(error, criterion)}")
    doubts = []
    # What gives no numbers fails, and leaves nothing to see a fault in.
    if control is not None and not control.detected and math.isfinite(control.error):
        doubts.append(
            f"exact: the gate is blind here: error {error:.3g}, while {control.scale:g} times every other channel "
            f"of {control.norm} moves the output by {control.error:.3g} only; take a reference in float64 "
            "(--reference float64) or inputs that reach the norms (--text)"
        )
    return Exact(error, bound, control), failures, doubts


def _measured(error: float) -> str:
    return "" if math.isnan(error) else f" {error:.3g}"


def _bound(error: float, criterion: Criterion) -> str:
    return " is no number" if math.isnan(error) else f" above {criterion.exact_bound:g}"


def judge_norm(name: str, meter: NormMeter, criterion: Criterion) -> tuple[NormFigures, list[str]]:
    """Judge one norm on the served activations.

    Args:
        name: of the norm.
        meter: what was collected about it.
        criterion: the bounds.

    Returns:
        The figures, and the failures; each names the norm, the figure and the bound.
    """
    failures = [f"norms: {name}: {problem}" for problem in dict.fromkeys(meter.problems)]
    if meter.elements == 0:
        passed = False if failures else None
        return NormFigures(name, meter.calls, 0, passed=passed), failures
    coarse = meter.dtype in _HALF or meter.twice
    bound = criterion.max_ulp_rounded_twice if meter.twice else criterion.max_ulp
    unit = meter.dtype if meter.dtype in _HALF else meter.middle
    base = criterion.identical_bf16 if unit == torch.bfloat16 else criterion.identical_fp16
    least = max(0.0, 1 - (1 - base) * meter.cancellation)
    if coarse:
        # A float32 product of equal 16-bit rows may be rounded otherwise where it is fused with the bias.
        same = meter.identical if meter.dtype in _HALF else meter.agreeing
        if not meter.max_ulp <= bound:
            failures.append(f"norms: {name}: {number(meter.max_ulp, 4)} units in the last place off, above {bound:g}")
        differing = meter.elements - same
        if not chance_of_as_many(differing, (1 - least) * meter.elements) >= criterion.chance:
            failures.append(
                f"norms: {name}: share of bit-identical elements {same / meter.elements:.4%} below {least:.4%}: "
                f"{differing} of {meter.elements} elements differ, more than chance explains"
            )
    else:
        budget = criterion.float32_budget * (meter.exact_ulp_original + 1)
        if not meter.exact_ulp_swapped <= budget:
            failures.append(
                f"norms: {name}: {number(meter.exact_ulp_swapped, 4)} units in the last place of float32 from the "
                f"float64 truth, above {budget:.4g} = {criterion.float32_budget:g} x (the original's "
                f"{meter.exact_ulp_original:.4g} + 1)"
            )
    if meter.nonfinite_differs:
        failures.append(
            f"norms: {name}: NaN or inf at {meter.nonfinite_differs} places where the original has another value"
        )
    size = meter.square_exact
    figures = NormFigures(
        name=name,
        calls=meter.calls,
        elements=meter.elements,
        dtype=str(meter.dtype).removeprefix("torch."),
        max_ulp=meter.max_ulp,
        mean_ulp=meter.sum_ulp / meter.elements,
        bound_ulp=bound if coarse else None,
        bit_identical_fraction=meter.identical / meter.elements,
        bound_identical=least if coarse else None,
        error_original=relative([meter.square_original], [size]),
        error_swapped=relative([meter.square_swapped], [size]),
        exact_ulp_original=meter.exact_ulp_original,
        exact_ulp_swapped=meter.exact_ulp_swapped,
        passed=not failures,
        histogram=list(meter.histogram),
        **(
            {}
            if meter.worst is None
            else dict(zip(("worst_call", "worst_row", "worst_channel"), meter.worst, strict=True))
        ),
    )
    return figures, failures


def judge_reach(norms: Sequence[NormFigures], *, swapped: bool = True) -> tuple[list[str], list[str]]:
    """Say which norms the inputs did not reach.

    Args:
        norms: the figures.
        swapped: whether they are swapped ones, of which at least one has to be reached.

    Returns:
        Failures, when none was reached, and notes, when some were not.
    """
    missed = [entry.name for entry in norms if entry.calls == 0]
    if not norms and not swapped:
        return [], ["no norm was recognised: neither their results nor faults put into them were measured"]
    if not norms:
        return ["norms: the converted model has no swapped norm"], []
    if len(missed) == len(norms) and swapped:
        return [f"norms: none of the {len(norms)} swapped norms was reached by the inputs"], []
    if missed:
        return [], [f"{len(missed)} norms not reached by the inputs: {', '.join(missed)}"]
    return [], []


def with_weights(original: Sequence[Rows], weights: Sequence[Rows]) -> list[Rows]:
    """Add the errors of rounded weights to those of rounded activations, as independent errors add up.

    Args:
        original: distance of the original as served, one entry a sequence.
        weights: distance of the converted model's stored weights in the reference's arithmetic.
    """

    def added(one: Rows, other: Rows) -> Rows:
        kl = None if one.kl is None or other.kl is None else one.kl + other.kl
        return replace(one, error=one.error + other.error, kl=kl)

    return [added(one, other) for one, other in zip(original, weights, strict=True)]


def judge_served(
    original: Sequence[Rows], converted: Sequence[Rows], numbers: int, criterion: Criterion
) -> tuple[Served, list[str], list[str], list[str]]:
    """Judge the models as served by their distances from the reference.

    The divergences are held to the same bounds as the errors, by the root of their ratio: a divergence grows with the
    square of an error.

    Args:
        original: distance of the original, one entry a sequence.
        converted: distance of the converted model, one entry a sequence.
        numbers: how many numbers the outputs have in all. Where they are few (class scores of some images), the ratio
            of two roundings is left to chance and does not judge.
        criterion: the bounds.

    Returns:
        The figures, the failures, the doubts and the notes, in words.
    """
    failures: list[str] = []
    doubts: list[str] = []
    notes: list[str] = []
    sizes = [float(rows.size.sum()) for rows in original]
    errors_a, errors_b = ([float(rows.error.sum()) for rows in side] for side in (original, converted))
    ratio, low, high = bootstrap_ratio(errors_b, errors_a, criterion.bootstrap)
    worse = sum(b.nonfinite > a.nonfinite for a, b in zip(original, converted, strict=True))
    if worse:
        failures.append(f"served: NaN or inf in {worse} sequences where the original has fewer or none")
    # Too few sequences have no spread of their own; their tokens, in blocks, have.
    judged = ratio_over_blocks(
        [rows.error for rows in converted], [rows.error for rows in original], criterion.bootstrap
    )
    few, judges = len(original) < criterion.min_sequences, True
    if numbers < criterion.min_outputs and not math.isnan(ratio):
        notes.append(
            f"served: {numbers} numbers are too few for the ratio of errors to judge (at least "
            f"{criterion.min_outputs}); exact and norms decide"
        )
        judges = False
    else:
        interval = judged if few else (low, high)
        failed, doubts = _beyond("error", "original equals the reference", ratio, interval, criterion)
        failures += failed
    served = Served(
        error_original=relative(errors_a, sizes),
        error_converted=relative(errors_b, sizes),
        ratio=ratio,
        ratio_interval=(low, high),
        max_abs=joined(converted).max_abs if converted else 0.0,
        ratio_interval_tokens=judged,
        judges=judges,
    )
    figures, failed, open_ = _judge_tokens(original, converted, few, criterion)
    if numbers >= criterion.min_outputs:
        failures, doubts = failures + failed, doubts + open_
    return replace(served, **figures), failures, doubts, notes


def _judge_tokens(
    original: Sequence[Rows], converted: Sequence[Rows], few: bool, criterion: Criterion
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Compare next-token distributions; nothing is found in outputs that are none."""
    if any(rows.kl is None or rows.same is None for rows in (*original, *converted)) or not original:
        return {}, [], []
    kl_a, kl_b = ([rows.kl.clamp(min=0.0) for rows in side] for side in (original, converted))  # type: ignore[union-attr]
    same_a, same_b = ([rows.same.double() for rows in side] for side in (original, converted))  # type: ignore[union-attr]
    sums_a, sums_b = ([float(kl.sum()) for kl in side] for side in (kl_a, kl_b))
    ratio, low, high = bootstrap_ratio(sums_b, sums_a, criterion.bootstrap)
    blocks = ratio_over_blocks(kl_b, kl_a, criterion.bootstrap)
    means = {
        "kl_original": kl_a,
        "kl_converted": kl_b,
        "top1_agreement_original": same_a,
        "top1_agreement": same_b,
    }
    spreads = {
        "kl_original_interval": kl_a,
        "kl_interval": kl_b,
        "top1_original_interval": same_a,
        "top1_interval": same_b,
    }
    figures: dict[str, Any] = {name: float(torch.cat(values).mean()) for name, values in means.items()}
    figures |= {name: bootstrap_mean(values, criterion.bootstrap) for name, values in spreads.items()}
    figures |= {"kl_ratio": ratio, "kl_ratio_interval": (low, high), "kl_ratio_interval_tokens": blocks}
    figures["tokens"] = sum(len(kl) for kl in kl_b)
    interval = blocks if few else (low, high)
    equal = "original has the reference's distributions"
    return figures, *_beyond("root of KL", equal, ratio, interval, criterion)


def _beyond(
    name: str, equal: str, ratio: float, interval: tuple[float, float], criterion: Criterion
) -> tuple[list[str], list[str]]:
    """Hold a ratio and its interval to the bounds; a NaN passes none.

    Returns:
        The failures, and the doubts: a ratio beyond its bound of which the interval says that it may be chance, as
        where one token that goes to another expert outweighs all else.
    """
    if math.isinf(ratio):
        return [f"served: {name}, {OF_A_RATIO}, is infinite: the {equal}, the converted model does not"], []
    if math.isnan(ratio):
        return [f"served: {name}, {OF_A_RATIO}, is no number"], []
    low, high = interval
    told = f"served: {name}, {OF_A_RATIO}, {number(ratio, 4)} above {criterion.ratio_max:g}"
    if low <= 1 <= high and ratio > criterion.ratio_max:
        words = f"{told}, but its 95% interval, {low:.4g} to {high:.4g}, holds 1, so that chance may be all of it"
        return [], [f"{words}; give more tokens (--tokens)"]
    failures = [] if ratio <= criterion.ratio_max else [told]
    if not low <= criterion.ratio_interval_low:
        failures.append(
            f"served: 95% interval of {name}, {OF_A_RATIO}, {ends((low, high))} lies above "
            f"{criterion.ratio_interval_low:g}"
        )
    return failures, []
