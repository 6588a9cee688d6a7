"""Parity reports as text for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from normswap import tables
from normswap.figures import ParityReport
from normswap.gatetable import gate_table
from normswap.wording import clean, headline, pair_of_names, quiet_line, shorten, worst_norms

__all__ = ["render", "shorten"]

_NARROW, _WIDE = 84, 100
_GREEN, _RED, _YELLOW, _DIM, _OFF = "\x1b[32m", "\x1b[31m", "\x1b[33m", "\x1b[2m", "\x1b[0m"
_COLOR = {"pass": _GREEN, "fail": _RED, "inconclusive": _YELLOW}
# What the short form lists before it counts the rest.
_REASONS, _NORMS, _NOTES = 5, 3, 4

_Section = tuple[str, tables.Table]


def render(report: ParityReport, *, color: bool = False, verbose: bool = False, quiet: bool = False) -> str:
    """Write a report for a terminal: the verdict, what failed, the gates, the worst norms, and what it rests on.

    Args:
        report: what `normswap.parity.measure` returned.
        color: whether to use ANSI colours.
        verbose: list every norm, layer, tensor and fault, and the criterion in full.
        quiet: one line only: the verdict and the worst figure.

    Returns:
        Lines of at most 84 columns, 100 where it is verbose or quiet, without a newline at the end.
    """

    def paint(code: str, text: str) -> str:
        return f"{code}{text}{_OFF}" if color else text

    word = report.verdict.upper()
    if quiet:
        line = quiet_line(report)
        return paint(_COLOR[report.verdict], word) + line.removeprefix(word)
    width = _WIDE if verbose else _NARROW
    first, *rest = _wrap(headline(report), f"{word}  ", width)
    lines = [paint(_COLOR[report.verdict], word) + first.removeprefix(word), *rest]
    if names := pair_of_names(report):
        lines += _wrap(names, " " * (len(word) + 2), width)
    for reasons in (report.failures, report.doubts):
        lines += _listed(reasons, len(reasons) if verbose else _REASONS, width)
    gates = gate_table(report, brief=not verbose)
    lines += ["", *_table(gates, width), ""]
    for title, table in _sections(report, verbose):
        lines += [title, *_table(table, width), ""]
    for label, text in _facts(report, verbose):
        lines += [paint(_DIM, line) for line in _wrap(text, f"{label:<12} ", width)]
    return "\n".join(lines)


def _listed(reasons: list[str], most: int, width: int) -> list[str]:
    lines = [line for reason in reasons[:most] for line in _wrap(reason, "  - ", width)]
    if len(reasons) > most:
        lines.append(f"  - and {len(reasons) - most} more; --json FILE lists all")
    return lines


def _sections(report: ParityReport, verbose: bool) -> Iterator[_Section]:
    """Yield the tables that stand below the gates, each under its heading."""
    count = len(report.norms)
    if not verbose:
        worst = worst_norms(report, _NORMS)
        if failed := [norm for norm in worst if norm.passed is False]:
            beyond = sum(norm.passed is False for norm in report.norms)
            first = f", the worst {len(failed)}" if beyond > len(failed) else ""
            title = f"beyond their bounds {beyond} of {count} norms{first}; units in the last place"
            yield title, tables.norm_table(failed, brief=True)
        return
    every = [
        (f"norms: {count}; units in the last place", tables.norm_table(report.norms, brief=True)),
        ("residual stream", tables.layer_table(report.layers)),
        ("faults put in on purpose", tables.fault_table(report)),
        ("tensors that nothing explains", tables.change_table(report, explained=False)),
        ("tensors that differ, as explained", tables.change_table(report, explained=True, brief=True)),
        ("settings that differ", tables.setting_table(report)),
        ("folded gains and their readers", tables.pair_table(report, brief=True)),
        ("where continuations part", tables.divergence_table(report)),
        ("outputs and tokens", tables.token_table(report)),
    ]
    yield from ((title, table) for title, table in every if table.rows)


def _facts(report: ParityReport, verbose: bool) -> Iterator[tuple[str, str]]:
    facts = tables.environment(report)
    yield "environment", ", ".join(f"{name} {value}" for name, value in facts)
    yield "inputs", str(report.inputs["description"])
    for note in report.notes if verbose else report.notes[:_NOTES]:
        yield "note", note
    if not verbose and len(report.notes) > _NOTES:
        yield "note", f"and {len(report.notes) - _NOTES} more; -v lists all"
    if verbose:
        yield "criterion", report.criterion.describe()
    if report.command:
        yield "again", report.command


def _wrap(text: str, label: str, width: int) -> list[str]:
    # A command that is taken over by hand has to stay whole, word by word.
    whole = label.startswith("again")
    return textwrap.wrap(
        clean(text),
        width,
        initial_indent=label,
        subsequent_indent=" " * len(label),
        break_on_hyphens=False,
        break_long_words=not whole,
    )


def _table(table: tables.Table, width: int) -> list[str]:
    """Align columns; the widest ones give way, from their middles, where a line would pass the page.

    A cell that nothing follows runs on over the columns behind it.
    """
    rows = [[clean(cell) for cell in row] for row in (table.head, *table.rows)]
    last = [max((at for at, cell in enumerate(row) if cell), default=0) for row in rows]
    widths = [
        max((len(row[at]) for row, end in zip(rows, last, strict=True) if at < end or at == len(row) - 1), default=0)
        for at in range(len(table.head))
    ]
    room = width - 2 * (len(widths) - 1)
    while sum(widths) > room and max(widths) > 8:
        widest = widths.index(max(widths))
        second = max((size for at, size in enumerate(widths) if at != widest), default=0)
        widths[widest] -= max(1, min(sum(widths) - room, widths[widest] - second))
    return [line for row, end in zip(rows, last, strict=True) for line in _row(row[: end + 1], widths, width)]


def _row(cells: list[str], widths: list[int], width: int) -> list[str]:
    """Write one row; its last cell has the rest of the page and more lines, if it is not in the last column."""
    *first, final = cells
    start = "".join(f"{shorten(cell, size).ljust(size)}  " for cell, size in zip(first, widths, strict=False))
    if len(cells) == len(widths) or not final:
        return [f"{start}{shorten(final, widths[-1])}".rstrip()]
    return textwrap.wrap(final, width, initial_indent=start, subsequent_indent=" " * len(start), break_on_hyphens=False)
