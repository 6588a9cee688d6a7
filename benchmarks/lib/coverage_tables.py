"""The figures as tables: for the screen, the README and the page with every model type."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from coverage_figures import Figures, Refused, bars, is_row_wise
from coverage_parity import BOUND
from coverage_units import DTYPES

__all__ = ["BEGIN", "END", "page", "put_between_markers", "screen", "summary", "versions"]

BEGIN, END = "<!-- coverage -->", "<!-- /coverage -->"
NO_PLAN = "in no plan, though its result does not change with the scale of its input"
COMMAND = "python benchmarks/coverage.py --jobs 2 --write"


def versions() -> dict[str, str | None]:
    """Return the installed versions of what the figures depend on; None for what is absent."""
    found: dict[str, str | None] = {}
    for package in ("torch", "transformers", "timm", "liger-kernel"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def _short(cls: str) -> str:
    return cls.rsplit(".", 1)[-1]


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    lines = [f"| {' | '.join(head)} |", f"| {' | '.join('---' for _ in head)} |"]
    return [*lines, *(f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |" for row in rows)]


def summary(figures: Figures, installed: Mapping[str, str | None]) -> str:
    """Return the part of the README.

    Args:
        figures: what was measured.
        installed: the `versions` that it was measured with.
    """
    outside = sum(count for count, _ in figures.outside.values())
    reached, originals = figures.reached
    liger = ("not installed",) * 2
    if figures.liger is not None:
        types, instances, failures = figures.liger
        liger = f"{types} ({len(failures)} more fail)", f"{instances:,} ({instances / figures.norms:.1%})"
    hub_types, hub_instances = figures.hub
    lines = [
        f"Of the {figures.known - len(figures.unbuilt)} model types and variants of transformers "
        f"{installed['transformers']} that are built here, {figures.types} have modules that normalise rows, "
        f"{figures.norms:,} instances in all. `{COMMAND}` measures each of them, here on a CPU:",
        "",
        *_table(
            ("", "normswap", f"Liger-Kernel {installed['liger-kernel'] or ''}".strip(), "decorator of the Hub"),
            (
                ("model types in which it reaches norms", figures.types_swapped, liger[0], hub_types),
                (
                    "norms that it replaces (the decorator: may replace)",
                    f"{figures.swapped:,} ({figures.share:.2%})",
                    liger[1],
                    f"{hub_instances:,} ({hub_instances / figures.norms:.1%})",
                ),
                (
                    "of these within the unit bound in float32, float16 and bfloat16",
                    f"{figures.swapped - outside:,}",
                    "not measured",
                    "not measured",
                ),
                (
                    f"whole models that run, and compute the same within {BOUND:g} in float32",
                    f"{figures.parity} of {figures.ran}",
                    "not measured",
                    "not measured",
                ),
            ),
        ),
        "",
        f"{_own_code(figures)} In the runs of whole models {reached:,} swapped norms were called, and "
        f"{originals or 'none'} of them went back to the original's code; "
        f"for {len(figures.not_run)} models the zoo finds no inputs.",
    ]
    missed = [entry for entry in figures.refused if not entry.kind]
    if missed:
        lines += ["", "Norms of rows that are refused:", "", *_refusals(missed)]
    other = sum(entry.count for entry in figures.refused if entry.kind)
    lines += [
        "",
        f"Not counted are {other:,} modules that the recogniser refuses as something else (BatchNorm, GroupNorm, "
        f"blocks whose inner norm counts itself); with them the share is {figures.share_of_all:.1%}. "
        "[docs/coverage.md](docs/coverage.md) names each of their classes, and has a line for each model type.",
    ]
    return "\n".join(lines)


def _own_code(figures: Figures) -> str:
    """Say of how many swapped norms the original's own code runs in bfloat16, and why."""
    own, silent = (sum(held["bfloat16"].values()) for held in (figures.own_code, figures.silent))
    return (
        f"In bfloat16 {own or 'none'} of them run the original's own code, since its results there are those of no "
        f"known order of roundings, and the originals of {silent or 'none'} run in float32 only."
    )


def _refusals(entries: Iterable[Refused]) -> list[str]:
    return _table(
        ("class", "instances", "model types", "reason"),
        ((f"`{_short(entry.cls)}`", entry.count, _names(entry.types), entry.reason or NO_PLAN) for entry in entries),
    )


def _names(types: Iterable[str]) -> str:
    first, *rest = sorted(types)
    return first + (f" and {len(rest)} more" if rest else "")


def page(figures: Figures, records: Iterable[dict[str, Any]], installed: Mapping[str, str | None]) -> str:
    """Return the whole page, with a line for each model type."""
    used = ", ".join(f"{name} {number}" for name, number in installed.items() if number)
    part = summary(figures, installed).replace("docs/coverage.md", "coverage.md")
    lines = [
        "# Coverage",
        "",
        f"Written by `{COMMAND}`, with {used}.",
        "",
        part.partition("\n\nNorms of rows that are refused")[0],
        "",
        *_table(
            ("bar", "met", "figure"), ((demand, "yes" if met else "NO", said) for demand, met, said in bars(figures))
        ),
        "",
        "## Refused",
        "",
        "Norms of rows:",
        "",
        *_refusals(entry for entry in figures.refused if not entry.kind),
        "",
        "No norms of rows:",
        "",
        *_table(
            ("class", "instances", "model types", "what it is", "reason"),
            (
                (f"`{_short(entry.cls)}`", entry.count, _names(entry.types), entry.kind, entry.reason)
                for entry in figures.refused
                if entry.kind
            ),
        ),
        "",
        "Modules that bear the name of a norm and are none (they are blocks, or change no row):",
        "",
        ", ".join(f"`{_short(cls)}` ({count})" for cls, count in sorted(figures.others.items(), key=lambda e: -e[1])),
        "",
        "## Out of the unit bound",
        "",
        *_table(
            ("class", "instances", "what is out"), ((f"`{_short(c)}`", n, w) for c, (n, w) in figures.outside.items())
        ),
        "",
        "## The original's code in half precision",
        "",
        "Swapped norms whose original's own code runs in a dtype, since its results there are those of no known order "
        "of roundings, or that do not run in it, swapped or not:",
        "",
        *_table(
            ("class", "instances", "dtype", "what runs"),
            (
                (f"`{_short(cls)}`", count, dtype, words)
                for words, held in (("the original's code", figures.own_code), ("nothing", figures.silent))
                for dtype, classes in held.items()
                for cls, count in classes.items()
            ),
        ),
        "",
        "## Model types",
        "",
        "Units in the last place: the greatest distance of a swapped norm from its original, float32 / float16 / "
        "bfloat16. Whole model: the greatest relative error of an output in float32.",
        "",
        *_table(
            ("model type", "norms of rows", "swapped", "refused", "units", "whole model", "Liger", "Hub"),
            (_line(record) for record in sorted(records, key=lambda record: record["type"]) if "norms" in record),
        ),
        "",
        "Not built here: " + ", ".join(figures.unbuilt) + ".",
        "",
    ]
    return "\n".join(lines)


def _line(record: dict[str, Any]) -> tuple[object, ...]:
    rows = [norm for norm in record["norms"] if is_row_wise(norm)]
    swapped = [norm for norm in rows if norm["action"] == "swap"]
    worst = [max((norm["units"][name]["worst"] for norm in swapped), default=0.0) for name in DTYPES]
    parity = record["parity"]
    total = sum(norm["count"] for norm in rows)
    count = sum(norm["count"] for norm in swapped)
    hub = sum(norm["count"] for norm in rows if norm["hub"] and "Norm" in norm["hub"])
    error = "not run" if "not_run" in parity else f"{parity['error']:.2g}" + ("" if parity["passed"] else " FAILS")
    units = " / ".join(f"{value:.3g}" for value in worst) if swapped else "-"
    liger = "fails" if record["liger"] else sum(norm["liger"] for norm in rows)
    return record["type"], total, count, total - count, units, error, liger, hub


def screen(figures: Figures) -> list[str]:
    """Return the lines for a person who waits."""
    lines = [f"{'met' if met else 'NOT met':8}{demand}: {said}" for demand, met, said in bars(figures)]
    lines.append(f"{'':8}with what is no norm of rows: {figures.share_of_all:.2%}")
    lines.append(f"{'':8}worst units: " + ", ".join(f"{name} {value:.3g}" for name, value in figures.worst.items()))
    lines += [
        f"{'':8}in {dtype} {words}: "
        + (", ".join(f"{_short(cls)} {count}" for cls, count in classes.items()) or "none")
        for words, held in (("the original's code runs", figures.own_code), ("the original fails", figures.silent))
        for dtype, classes in held.items()
    ]
    lines.append(f"{'':8}norms called in whole models: {figures.reached[0]:,}, {figures.reached[1]} went back")
    hub_types, hub_instances = figures.hub
    lines.append(f"{'':8}decorator of the Hub: {hub_types} types, {hub_instances:,} instances")
    if figures.liger is None:
        lines.append(f"{'':8}Liger-Kernel: not installed")
    else:
        types, instances, failures = figures.liger
        lines.append(f"{'':8}Liger-Kernel: {types} types, {instances:,} instances; fails on {', '.join(failures)}")
    for title, entries in (
        ("refused, norms of rows", [entry for entry in figures.refused if not entry.kind]),
        ("refused, no norms of rows", [entry for entry in figures.refused if entry.kind]),
    ):
        lines += [
            f"{title}:",
            *(f"{e.count:7} {_short(e.cls)} ({_names(e.types)}): {e.reason or NO_PLAN}" for e in entries),
        ]
    lines += ["out of the unit bound:"]
    lines += [f"{count:7} {_short(cls)}: {words}" for cls, (count, words) in figures.outside.items()]
    lines += ["whole models that differ:"]
    lines += [f"        {name}: {parity}" for name, parity in figures.amiss.items()]
    lines += ["failed:", *(f"        {name}: {words}" for name, words in figures.crashed.items())]
    return lines


def put_between_markers(path: Path, text: str) -> None:
    """Write a generated part into a file, between `BEGIN` and `END`.

    Raises:
        ValueError: the file has no such markers.
    """
    whole = path.read_text(encoding="utf-8")
    if not re.search(f"{re.escape(BEGIN)}.*{re.escape(END)}", whole, re.DOTALL):
        raise ValueError(f"expected the markers {BEGIN} and {END} in {path}")
    before, _, rest = whole.partition(BEGIN)
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
