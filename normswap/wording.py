"""Figures and verdicts in words: what every form of a report says alike."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from normswap.figures import NormFigures, ParityReport

__all__ = [
    "BINS",
    "clean",
    "compared_with",
    "few_sequences",
    "gate_of",
    "headline",
    "interval",
    "number",
    "pair_of_names",
    "percent",
    "quiet_line",
    "severity",
    "shorten",
    "state_of",
    "worst_norms",
]

BINS = ("0", "1", "2", "3 to 4", "5 to 8", "9 to 16", "more")
"""What the places of `NormFigures.histogram` count, in units in the last place."""

# From here on a figure is written with an exponent.
_WHOLE = 1e6
# Marks that turn the direction of the text after them, so that a name can look like another.
_TURNING = {"LRE", "RLE", "PDF", "LRO", "RLO", "LRI", "RLI", "FSI", "PDI"}


def clean(text: object) -> str:
    """Write what a terminal, a browser or a reader could take for more than text as its code.

    Names come from checkpoints that others made. Line ends and tabs become spaces.

    Example:
        >>> clean("norm\\x1b[31m")
        'norm\\\\x1b[31m'
    """
    return "".join(_clean(letter) for letter in str(text))


def _clean(letter: str) -> str:
    if letter in "\n\r\t":
        return " "
    if unicodedata.category(letter) in ("Cc", "Cs") or unicodedata.bidirectional(letter) in _TURNING:
        return ascii(letter)[1:-1]
    return letter


def number(value: float | None, digits: int = 3) -> str:
    """Write a figure shortly; what is missing or not a number says so."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    # Without an exponent as long as that is no longer.
    return f"{value:.0f}" if 10**digits <= abs(value) < _WHOLE else f"{value:.{digits}g}"


def percent(value: float | None, digits: int = 2) -> str:
    """Write a fraction as a percentage."""
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{value:.{digits}%}"


def interval(ends: tuple[float, float] | None, digits: int = 4, *, parts: bool = False) -> str:
    """Write an interval, of fractions as percentages where ``parts`` is set; of what has none a dash."""
    if ends is None or None in ends:
        return "-"
    low, high = ends
    if math.isnan(low) and math.isnan(high):
        return "NaN"
    if parts:
        return f"{percent(low)} to {percent(high)}"
    return f"{number(low, digits)} to {number(high, digits)}"


def headline(report: ParityReport) -> str:
    """Say what was compared, and how it ran."""
    return f"parity of {report.output['name']}, {report.dtype} on {report.device}, backend {report.backend}"


def compared_with(report: ParityReport) -> str:
    """Say what was held against; empty where it has no name."""
    # Of two modules the classes are named, and these are the same.
    if not report.against or report.against != report.checkpoint or report.tensors is not None:
        return report.against
    return "itself, its norms as they are"


def pair_of_names(report: ParityReport) -> str:
    """Say what was held against what; empty where neither has a name."""
    return " against ".join(name for name in (report.checkpoint, compared_with(report)) if name)


def gate_of(reason: str) -> str:
    """Return the gate that a failure or doubt begins with."""
    return reason.partition(":")[0].strip()


def state_of(report: ParityReport, *gates: str) -> str:
    """Return ``"FAIL"``, ``"doubt"`` or ``"ok"``, by what the failures and doubts begin with."""
    if any(gate_of(reason) in gates for reason in report.failures):
        return "FAIL"
    return "doubt" if any(gate_of(reason) in gates for reason in report.doubts) else "ok"


def few_sequences(report: ParityReport) -> str:
    """Say how many sequences the intervals rest on where they are fewer than the criterion wants; else nothing."""
    sequences: Any = report.inputs.get("sequences")
    wanted = report.criterion.min_sequences
    if not isinstance(sequences, int) or sequences >= wanted:
        return ""
    return f"{sequences} {'sequence' if sequences == 1 else 'sequences'} only, {wanted} wanted"


def severity(norm: NormFigures) -> tuple[bool, float, float]:
    """Order norms by how near they are to their bounds; what failed comes last."""
    value = norm.max_ulp or 0.0
    value = math.inf if math.isnan(value) else value
    return (norm.passed is False, value / (norm.bound_ulp or 1e3), 1 - (norm.bit_identical_fraction or 0.0))


def worst_norms(report: ParityReport, count: int) -> list[NormFigures]:
    """Return the norms nearest to their bounds, or furthest beyond, the worst first."""
    reached = [norm for norm in report.norms if norm.calls or norm.passed is False]
    return sorted(reached, key=severity, reverse=True)[:count]


def quiet_line(report: ParityReport) -> str:
    """Say the verdict and the worst figure: the first failure or doubt, else what came nearest to its bound.

    Norms that keep their bounds are left out: one unit is both what a right swap of 16-bit norms shows and their bound.
    """
    reasons = report.failures or report.doubts
    head = report.verdict.upper()
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return f"{head}  {shorten(clean(reasons[0]), 98 - len(head) - len(more))}{more}"
    worst = max(_shares(report), default=None)
    return head if worst is None else f"{head}  {shorten(clean(worst[1]), 98 - len(head))}"


def _shares(report: ParityReport) -> Iterator[tuple[float, str]]:
    """Yield how much of its bound each figure uses, with the figure in words."""
    bounds, served = report.criterion, report.logits
    if not served.judges:
        ratios = []
    elif served.ratio_explained is None:
        low, _ = served.ratio_interval or (None, None)
        kl_low, _ = served.kl_ratio_interval or (None, None)
        ratios = [
            ("served: error, converted / original,", served.ratio, bounds.ratio_max),
            ("served: 95% interval of error, converted / original, from", low, bounds.ratio_interval_low),
            ("served: root of KL, converted / original,", served.kl_ratio, bounds.ratio_max),
            ("served: 95% interval of root of KL, converted / original, from", kl_low, bounds.ratio_interval_low),
        ]
    else:
        ratios = [("served: error, over what rounding explains,", served.ratio_explained, bounds.ratio_max)]
    figures = [
        ("exact: error", report.exact.error, report.exact.bound),
        *ratios,
        *((f"folds: error of {pair.norm}", pair.error, pair.bound) for pair in report.pairs),
    ]
    for words, value, bound in figures:
        if value is not None and math.isfinite(value) and bound:
            yield value / bound, f"{words} {number(value, 4)} <= {bound:g}"


def shorten(text: str, width: int) -> str:
    """Leave out the middle of what is too long."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"
