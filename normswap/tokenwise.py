"""Distances of two outputs row by row (token by token), and the spread of what is summed over them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from normswap.stats import Gap, bootstrap_ratio, masked_entries

__all__ = ["Rows", "bootstrap_mean", "compare_rows", "in_blocks", "joined", "ratio_over_blocks"]

# Numbers to compare at a time: few enough for caches to hold, many enough that calls do not count.
_CHUNK = 1 << 19
# Up to so many numbers, float64 costs nothing that would be noticed.
_FEW = 1 << 22
# Beyond this a square may overflow float32.
_LARGE = 1e15
# Neighbouring tokens err alike: what is resampled is runs of so many.
_BLOCK = 16


@dataclass(frozen=True)
class Rows:
    """How far one output lies from the reference, for each of its rows.

    Attributes:
        error: float64 ``(rows,)``, sum of squared differences.
        size: float64 ``(rows,)``, sum of the reference's squares.
        kl: float64 ``(rows,)``, KL(reference || other) in nats; None without logits.
        same: bool ``(rows,)``, whether the most likely entry is the reference's; None without logits.
        max_abs: greatest absolute difference; NaN where one is.
        nonfinite: elements of the other that are NaN or infinite.
    """

    error: torch.Tensor
    size: torch.Tensor
    kl: torch.Tensor | None
    same: torch.Tensor | None
    max_abs: float
    nonfinite: int

    @property
    def gap(self) -> Gap:
        """The sums over all rows."""
        return Gap(float(self.error.sum()), float(self.size.sum()), self.max_abs, self.nonfinite)


@torch.no_grad()
def compare_rows(reference: torch.Tensor, other: torch.Tensor, *, logits: bool, wide: bool = True) -> Rows:
    """Measure the distance of an output from the reference, row by row.

    With ``p`` the reference's distribution and ``d`` the difference of the logits less its mean under ``p``,
    ``KL(reference || other) = log(1 + sum p (exp(d) - 1 - d))``, which loses nothing where both nearly agree.
    Elements that the reference masks with a huge number are left out of error and size.

    Args:
        reference: ``(..., width)``.
        other: like ``reference``.
        logits: whether rows are next-token logits.
        wide: whether to compute in float64; float32 is enough where the two differ by half precision's roundings.

    Returns:
        One entry for each row; all of one row where the output has one dimension.
    """
    width = reference.shape[-1] if reference.dim() else 1
    reference, other = reference.reshape(-1, max(width, 1)), other.reshape(-1, max(width, 1))
    wide = wide or reference.numel() <= _FEW or reference.dtype == torch.float64
    step = max(1, _CHUNK // max(1, width))
    parts = [
        _compare(reference[start : start + step], other[start : start + step], logits, wide)
        for start in range(0, reference.shape[0], step)
    ]
    nothing = torch.zeros(0, dtype=torch.float64)
    return joined(parts) if parts else Rows(nothing, nothing, None, None, 0.0, 0)


def _compare(reference: torch.Tensor, other: torch.Tensor, logits: bool, wide: bool) -> Rows:
    peak = max((abs(float(end)) for end in reference.aminmax()), default=0.0) if reference.numel() else 0.0
    dtype = torch.float64 if wide or not peak < _LARGE else torch.float32
    r, o = reference.to(dtype), other.to(dtype)
    d = o - r
    kl = same = None
    if logits:
        same = (r.argmax(-1) == o.argmax(-1)).cpu()
    if not peak < _LARGE:
        masked = masked_entries(r, o)
        d = d.masked_fill(masked, 0.0)
        size = _squares(r.masked_fill(masked, 0.0))
    else:
        size = _squares(r)
    if logits:
        kl = _divergence(r, d)
    error = _squares(d)
    nonfinite = 0 if bool(error.isfinite().all()) else int((~other.isfinite()).sum())
    return Rows(error, size, kl, same, float(d.abs_().max()) if d.numel() else 0.0, nonfinite)


def _squares(values: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(values, dim=-1).double().square().cpu()


def _divergence(r: torch.Tensor, d: torch.Tensor) -> torch.Tensor:
    p = r.softmax(-1)
    centred = d - torch.linalg.vecdot(p, d)[:, None]
    return torch.linalg.vecdot(p, centred.expm1().sub_(centred)).log1p_().double().cpu()


def joined(parts: Sequence[Rows]) -> Rows:
    """Put rows of several outputs, or parts of one, after another."""
    peaks = [part.max_abs for part in parts]
    kl, same = ([getattr(part, name) for part in parts] for name in ("kl", "same"))
    return Rows(
        torch.cat([part.error for part in parts]),
        torch.cat([part.size for part in parts]),
        None if any(value is None for value in kl) else torch.cat(kl),
        None if any(value is None for value in same) else torch.cat(same),
        math.nan if any(math.isnan(peak) for peak in peaks) else max(peaks, default=0.0),
        sum(part.nonfinite for part in parts),
    )


def in_blocks(sequences: Iterable[torch.Tensor]) -> torch.Tensor:
    """Sum values over runs of neighbouring tokens, none of which passes from one sequence to the next.

    Args:
        sequences: ``(tokens,)`` each.

    Returns:
        float64 ``(blocks,)``.
    """
    sums = [part.double().sum() for values in sequences for part in values.split(_BLOCK)]
    return torch.stack(sums) if sums else torch.zeros(0, dtype=torch.float64)


def ratio_over_blocks(
    converted: Sequence[torch.Tensor], original: Sequence[torch.Tensor], draws: int
) -> tuple[float, float]:
    """The 95% interval of the ratio of two pooled RMS errors over blocks of tokens.

    Args:
        converted: squared errors ``(tokens,)``, one tensor a sequence.
        original: the same of the original.
        draws: resamplings.
    """
    _, low, high = bootstrap_ratio(in_blocks(converted).tolist(), in_blocks(original).tolist(), draws)
    return low, high


def bootstrap_mean(sequences: Sequence[torch.Tensor], draws: int = 2000, seed: int = 0) -> tuple[float, float]:
    """The 95% bootstrap interval of a mean over tokens, over blocks of them.

    Args:
        sequences: a value for each token ``(tokens,)``, one tensor a sequence.
        draws: resamplings of the blocks, with replacement.
        seed: of the resampling.
    """
    sums = in_blocks(sequences)
    counts = in_blocks([torch.ones_like(values, dtype=torch.float64) for values in sequences])
    if not len(sums) or not bool(sums.isfinite().all()):
        return math.nan, math.nan
    generator = torch.Generator().manual_seed(seed)
    picks = torch.randint(len(sums), (draws, len(sums)), generator=generator)
    means = (sums[picks].sum(-1) / counts[picks].sum(-1)).sort().values
    return float(means[int(0.025 * (draws - 1))]), float(means[round(0.975 * (draws - 1))])
