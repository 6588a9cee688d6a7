"""Parity reports as text for a terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from normswap.figures import NormFigures, ParityReport

__all__ = ["render", "shorten"]

_WIDTH = 100
_GREEN, _RED, _DIM, _OFF = "\x1b[32m", "\x1b[31m", "\x1b[2m", "\x1b[0m"
_WORST = 5


def render(report: ParityReport, *, color: bool = False, verbose: bool = False) -> str:
    """Write a report for a terminal: the verdict, the gates, the worst norms, and what it rests on.

    Args:
        report: what `normswap.parity.measure` returned.
        color: whether to use ANSI colours.
        verbose: list every norm and the criterion in full.

    Returns:
        Lines of at most 100 columns, without a newline at the end.
    """

    def paint(code: str, text: str) -> str:
        return f"{code}{text}{_OFF}" if color else text

    head = paint(_GREEN, "PASS") if report.passed else paint(_RED, "FAIL")
    what = f"{report.output['name']}, {report.dtype} on {report.device}, backend {report.backend}"
    lines = [f"{head}  parity of {what}"]
    for failure in report.failures if verbose else report.failures[:_WORST]:
        lines += _wrap(failure, "  - ")
    if not verbose and len(report.failures) > _WORST:
        lines.append(f"  - and {len(report.failures) - _WORST} more; --json FILE lists all")
    lines += ["", *_table(_gates(report)), ""]
    norms = list(report.norms) if verbose else _worst(report.norms)
    if norms:
        lines.append("norms" if verbose else f"worst {len(norms)} of {len(report.norms)} norms")
        lines += [*_table(_norm_rows(norms)), ""]
    versions = " ".join(f"{name} {version}" for name, version in report.versions.items())
    facts = [
        ("environment", f"{report.device} ({report.device_name}), backend {report.backend}, dtype {report.dtype}, "
         f"reference {report.reference_dtype}; {versions}"),
        ("inputs", str(report.inputs["description"])),
        *[("note", note) for note in report.notes],
        ("criterion", report.criterion.describe()),
    ]  # fmt: skip
    for label, text in facts:
        lines += [paint(_DIM, line) for line in _wrap(text, f"{label:<12} ")]
    return "\n".join(lines)


def _gates(report: ParityReport) -> list[list[str]]:
    exact, served = report.exact, report.logits
    failed = {failure.split(":", 1)[0] for failure in report.failures}

    def row(gate: str, figure: str, value: str, bound: str, first: bool = True) -> list[str]:
        return [
            gate if first else "",
            ("FAIL" if gate in failed else "ok") if first else "",
            figure,
            value,
            bound,
        ]

    rows = [["gate", "", "figure", "value", "bound"]]
    folded = ", folds unrounded" if served.control is not None else ""
    rows.append(row("exact", f"relative error, both in float32{folded}", number(exact.error), f"<= {exact.bound:g}"))
    if exact.control is not None:
        words = f"the same with {exact.control.norm} x {exact.control.scale:g}"
        rows.append(row("exact", words, number(exact.control.error), f"> {exact.bound:g}", False))
    rows += [["norms", "FAIL" if "norms" in failed else "ok", *entry] for entry in _norm_summary(report)[:1]]
    rows += [["", "", *entry] for entry in _norm_summary(report)[1:]]
    bounds = report.criterion
    low, high = served.ratio_interval or (None, None)
    rows += [
        row("served", "error, converted / original", number(served.ratio, 4), f"<= {bounds.ratio_max:g}"),
        row("served", "its 95% interval", f"{number(low, 4)} to {number(high, 4)}",
            f"from <= {bounds.ratio_interval_low:g}", False),
        row("served", "error of the original", number(served.error_original), "", False),
        row("served", "error of the converted", number(served.error_converted), "", False),
    ]  # fmt: skip
    if served.control is not None:
        words = f"the same without {served.control.norm}'s gain"
        rows.append(row("served", words, number(served.control.ratio, 4), f"> {bounds.ratio_max:g}", False))
    if served.kl_converted is not None:
        kl = f"{number(served.kl_converted)} / {number(served.kl_original)}"
        rows.append(row("served", "KL, converted / original", f"{kl} nats", "", False))
        top = f"{served.top1_agreement:.2%} / {served.top1_agreement_original:.2%}"
        rows.append(row("served", "top-1 as the reference", top, "", False))
    return rows


def _norm_summary(report: ParityReport) -> list[list[str]]:
    reached = [norm for norm in report.norms if norm.calls]
    held = sum(norm.passed is True for norm in reached)
    rows = [["within their bounds", f"{held} of {len(reached)}", "all"]]
    units = [norm for norm in reached if norm.bound_ulp is not None and norm.max_ulp is not None]
    if units:
        worst = max(units, key=_severity)
        rows.append(["worst unit in the last place", number(worst.max_ulp), f"<= {worst.bound_ulp:g}"])
        least = min(norm.bit_identical_fraction or 0.0 for norm in units)
        rows.append(["least bit-identical", f"{least:.4%}", ""])
    if len(reached) < len(report.norms):
        rows.append(["not reached by the inputs", f"{len(report.norms) - len(reached)}", ""])
    return rows


def _severity(norm: NormFigures) -> tuple[bool, float, float]:
    value = norm.max_ulp or 0.0
    value = math.inf if math.isnan(value) else value
    return (norm.passed is False, value / (norm.bound_ulp or 1e3), 1 - (norm.bit_identical_fraction or 0.0))


def _worst(norms: Sequence[NormFigures]) -> list[NormFigures]:
    reached = [norm for norm in norms if norm.calls or norm.passed is False]
    return sorted(reached, key=_severity, reverse=True)[:_WORST]


def _norm_rows(norms: Iterable[NormFigures]) -> list[list[str]]:
    rows = [["", "name", "max ulp", "mean ulp", "identical", "error", "original's"]]
    for norm in norms:
        mark = {True: "ok", False: "FAIL", None: "-"}[norm.passed]
        same = "-" if norm.bit_identical_fraction is None else f"{norm.bit_identical_fraction:.4%}"
        figures = [number(norm.max_ulp), number(norm.mean_ulp), same]
        rows.append([mark, norm.name, *figures, number(norm.error_swapped), number(norm.error_original)])
    return rows


def number(value: float | None, digits: int = 3) -> str:
    """Write a figure shortly; what is missing or not a number says so."""
    if value is None:
        return "-"
    return f"{value:.{digits}g}" if math.isfinite(value) else str(value)


def _wrap(text: str, label: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=label, subsequent_indent=" " * len(label), break_on_hyphens=False)


def _table(rows: list[list[str]]) -> list[str]:
    """Align columns; the widest one gives way, from its middle, where a line would pass the page."""
    widths = _widths(rows)
    gaps = 2 * (len(widths) - 1)
    widest = widths.index(max(widths))
    widths[widest] = max(12, min(widths[widest], _WIDTH - gaps - sum(widths) + widths[widest]))
    return [_row([shorten(cell, width) for cell, width in zip(row, widths, strict=True)], widths) for row in rows]


def _widths(rows: list[list[str]]) -> list[int]:
    return [max(len(row[at]) for row in rows) for at in range(len(rows[0]))]


def _row(cells: list[str], widths: list[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def shorten(text: str, width: int) -> str:
    """Leave out the middle of what is too long."""
    if len(text) <= width:
        return text
    left = (width - 1) // 2
    return f"{text[:left]}…{text[len(text) - (width - 1 - left) :]}"
