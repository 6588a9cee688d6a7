"""Figures that parity is judged by: units in the last place, relative errors, intervals, divergences."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = [
    "FLOAT32_NOISE",
    "Gap",
    "bootstrap_ratio",
    "chance_of_as_many",
    "gap",
    "masked_entries",
    "relative",
    "ulp_distance",
    "ulp_size",
]

# Units of float32, at the largest term, by which two right float32 implementations of one norm may differ before
# the last cast. The largest difference measured is 7: widths 64 to 16384, means up to 30 standard deviations,
# outliers of 100 times, sums in float32 by lanes and in float64.
FLOAT32_NOISE = 8

_INTEGER = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32}
# Numbers to compare at a time in float64: few enough for caches to hold, many enough that calls do not count.
_CHUNK = 1 << 18
# Logits beyond this are masks ("never this token"), not predictions: their difference says nothing.
_MASKED = 1e30


def _ordered(x: torch.Tensor) -> torch.Tensor:
    """Map floats to integers so that neighbouring floats are neighbouring integers and both zeros are 0."""
    kind = _INTEGER[x.dtype]
    bits = x.contiguous().view(kind).long()
    return torch.where(bits < 0, torch.iinfo(kind).min - bits, bits)


def ulp_size(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Distance between neighbouring numbers of a dtype at a magnitude.

    Args:
        x: any shape, any floating dtype.
        dtype: float16, bfloat16 or float32.

    Returns:
        float64, the shape of ``x``: ``2 ** (floor(log2 |x|) - p)`` with ``p`` mantissa bits, and no less than the
        spacing of the dtype's subnormal numbers.
    """
    info = torch.finfo(dtype)
    _, exponent = torch.frexp(x.double().abs().clamp(min=info.tiny, max=info.max))
    return torch.ldexp(torch.full_like(exponent, info.eps, dtype=torch.float64), exponent - 1)


def ulp_distance(a: torch.Tensor, b: torch.Tensor, at: torch.Tensor | None = None) -> torch.Tensor:
    """Distance of two tensors of one dtype in units in the last place.

    Without ``at``: how many representable numbers lie between ``a`` and ``b`` (plus one, if they differ). With
    ``at``: ``|a - b|`` in units of the dtype at the magnitude ``max(|a|, |b|, |at|)``, which is the fair measure
    where a small result is the difference of larger terms: their rounding cannot be smaller than their own unit.

    Args:
        a: any shape; float16, bfloat16 or float32.
        b: like ``a``.
        at: magnitude of the largest term that went into the result; broadcasts to ``a``.

    Returns:
        float64, the shape of ``a``; 0 where both are NaN, infinite where one is.
    """
    if at is None:
        distance = (_ordered(a) - _ordered(b)).abs().double()
    else:
        scale = torch.maximum(torch.maximum(a.abs(), b.abs()).double(), at.double().abs())
        distance = (a.double() - b.double()).abs() / ulp_size(scale, a.dtype)
        distance = torch.where(a == b, torch.zeros_like(distance), distance)
    one_nan = a.isnan() != b.isnan()
    both_nan = a.isnan() & b.isnan()
    return distance.masked_fill(both_nan, 0.0).masked_fill(one_nan, float("inf"))


def chance_of_as_many(count: int, expected: float) -> float:
    """Probability that a Poisson variable of this mean is at least ``count``.

    Args:
        count: what was counted.
        expected: the mean; 0 means that nothing is expected.

    Returns:
        1.0 for a count of 0; otherwise the regularised lower incomplete gamma function ``P(count, expected)``.
    """
    if count == 0:
        return 1.0
    arguments = (torch.tensor(float(value), dtype=torch.float64) for value in (count, expected))
    return float(torch.special.gammainc(*arguments))


def relative(errors: Sequence[float], sizes: Sequence[float]) -> float:
    """Pool squared errors and squared sizes of sequences into one relative RMS error; NaN stays NaN."""
    error, size = sum(errors), sum(sizes)
    if size > 0:
        return (error / size) ** 0.5
    return 0.0 if error == 0 else float("nan")


def bootstrap_ratio(
    converted: Sequence[float], original: Sequence[float], draws: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """Ratio of two pooled RMS errors with its 95% interval over sequences.

    Args:
        converted: squared error of each sequence, converted model.
        original: squared error of each sequence, original model.
        draws: resamplings of the sequences, with replacement.
        seed: of the resampling.

    Returns:
        ``sqrt(sum(converted) / sum(original))``, and the 2.5% and 97.5% quantiles of its resamplings. A ratio of
        0 to 0 is 1, of anything else to 0 infinite.
    """
    top = torch.tensor(list(converted), dtype=torch.float64)
    bottom = torch.tensor(list(original), dtype=torch.float64)
    if top.numel() == 0:
        return float("nan"), float("nan"), float("nan")

    def ratio(over: torch.Tensor, under: torch.Tensor) -> torch.Tensor:
        return torch.where((over == 0) & (under == 0), torch.ones_like(over), over / under).sqrt()

    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(top.numel(), (draws, top.numel()), generator=generator)
    sample = ratio(top[picks].sum(-1), bottom[picks].sum(-1)).sort().values
    if bool(sample.isnan().any()):
        return float(ratio(top.sum(), bottom.sum())), float("nan"), float("nan")
    low, high = sample[int(0.025 * (draws - 1))], sample[round(0.975 * (draws - 1))]
    return float(ratio(top.sum(), bottom.sum())), float(low), float(high)


@dataclass(frozen=True)
class Gap:
    """How far one output lies from the reference, for one sequence.

    Attributes:
        error: sum of squared differences.
        size: sum of the reference's squares.
        max_abs: greatest absolute difference.
        nonfinite: elements that are NaN or infinite.
    """

    error: float
    size: float
    max_abs: float
    nonfinite: int


def masked_entries(reference: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Say where a reference masks: with a huge number, or with an infinity that the other has as well.

    Args:
        reference: float32 or float64, any shape.
        other: like ``reference``, any dtype.

    Returns:
        bool, the shape of ``reference``.
    """
    other = other.to(reference.dtype)
    # Two equal infinities have no distance, though their difference is no number.
    equal = reference.isinf() & (other == reference)
    return equal | (reference.isfinite() & (reference.abs() >= _MASKED) & other.isfinite())


@torch.no_grad()
def gap(other: torch.Tensor, reference: torch.Tensor) -> Gap:
    """Measure the distance of an output from the reference in float64.

    Elements that the reference masks with a huge number are left out. A NaN or infinity makes the figures NaN or
    infinite.
    """
    left, right = other.reshape(-1), reference.reshape(-1)
    error = size = most = 0.0
    bad = 0
    for start in range(0, right.numel(), _CHUNK):
        r = right[start : start + _CHUNK].double()
        difference = (left[start : start + _CHUNK].double() - r).abs_()
        low, high = (float(end) for end in r.aminmax())
        if low <= -_MASKED or high >= _MASKED:
            masked = masked_entries(r, left[start : start + _CHUNK])
            difference, r = difference.masked_fill(masked, 0.0), r.masked_fill(masked, 0.0)
        error += float(difference.dot(difference))
        size += float(r.dot(r))
        peak = float(difference.max())
        # Once NaN, always NaN.
        most = peak if math.isnan(peak) or peak > most else most
        if not math.isfinite(error):
            bad += int((~left[start : start + _CHUNK].isfinite()).sum())
    return Gap(error, size, most, bad)
