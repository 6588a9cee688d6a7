"""An inspection as text for a terminal: what is in a model, part by part, and what would be done."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from normswap.foldplan import FoldPlan
from normswap.foldtable import render_folds
from normswap.naming import towers
from normswap.plan import Plan
from normswap.report import shorten

__all__ = ["render_plan", "spec_words"]

_WIDTH = 100
_HEAD = ["pattern", "class", "count", "action"]

_Cells = list[str]
# A heading, and under it words with the rows that they hold for.
_Section = tuple[str, dict[str, list[_Cells]]]


def render_plan(plan: Plan, folds: FoldPlan | None = None) -> str:
    """Write what is in a model and what would be done, a line for each kind of norm.

    Layers and experts are collapsed to patterns. What would be swapped stands under what it computes, in the parts
    of the model that have layers of their own (encoder, decoder, vision, audio); what is refused under its reason;
    what is no norm of rows itself (BatchNorm, a module around norms), and norms that are code, at the end.

    Args:
        plan: the decisions for a model.
        folds: the decisions about gains; they stand in a part of their own.

    Returns:
        Lines and a line or more of totals, without a newline at the end.
    """
    rows = plan.rows(by_width=False)
    refused = [row for row in rows if row["action"] != "swap" and row["of_rows"]]
    others = [row for row in rows if not row["of_rows"]]
    sections = [
        *_parts([row for row in rows if row["of_rows"]]),
        *_section("refused, by reason", refused),
        *_section("no norms of rows, left alone", others),
    ]
    if plan.functions:
        groups: dict[str, list[_Cells]] = {}
        for found in plan.functions:
            words = f"{found.kind}, {found.reason}"
            groups.setdefault(words, []).append([found.name or "(the model)", found.cls, str(found.count), "-"])
        sections.append(("norms that are code, nothing to swap", groups))
    lines = _lines(sections)
    lines += [*([""] if lines else []), *_totals(plan)]
    if folds is not None:
        lines += ["", *render_folds(folds)]
    return "\n".join(lines)


def _parts(rows: Sequence[Mapping[str, Any]]) -> list[_Section]:
    """Return a section for each part of the model: how many norms it has, and those that would be swapped."""
    prefixes = towers(_starred(row["pattern"]) for row in rows)
    parts: dict[str, list[Mapping[str, Any]]] = {prefix: [] for prefix in prefixes}
    for row in rows:
        parts.setdefault(_owner(row["pattern"], prefixes), []).append(row)
    sections = []
    for prefix, found in parts.items():
        swaps = [row for row in found if row["action"] == "swap"]
        swapped, total = (sum(row["count"] for row in some) for some in (swaps, found))
        counted = f"{_norms(total)}, {'all' if swapped == total else f'{swapped:,}'} to swap"
        heading = f"{prefix or 'elsewhere'}: {counted}" if len(parts) > 1 else ""
        if heading or swaps:
            sections.append((heading, _gathered(swaps, len(prefix) + 1 if prefix else 0)))
    return sections


def _starred(pattern: str) -> str:
    """Return a pattern with its numbers as ``*`` again."""
    return ".".join("*" if part[:1] == "{" or part.isdigit() else part for part in pattern.split("."))


def _owner(pattern: str, prefixes: Iterable[str]) -> str:
    return next((prefix for prefix in prefixes if not prefix or f"{pattern}.".startswith(f"{prefix}.")), "")


def _section(heading: str, rows: Sequence[Mapping[str, Any]]) -> list[_Section]:
    return [(heading, _gathered(rows, 0))] if rows else []


def _gathered(rows: Iterable[Mapping[str, Any]], cut: int) -> dict[str, list[_Cells]]:
    """Gather rows under what they compute, or under why they are refused; names lose their first `cut` letters."""
    groups: dict[str, list[_Cells]] = {}
    for row in rows:
        words = spec_words(row["spec"], row["widths"]) if row["action"] == "swap" else str(row["reason"])
        cells = [row["pattern"][cut:] or "(the model)", row["class"], f"{row['count']:,}", row["action"]]
        groups.setdefault(words, []).append(cells)
    return groups


def _lines(sections: Sequence[_Section]) -> list[str]:
    """Lay out sections in columns that are the same in all of them."""
    depth = 2 if any(heading for heading, _ in sections) else 0
    every = [_HEAD, *(cells for _, groups in sections for rows in groups.values() for cells in rows)]
    widths = [max(len(cells[at]) for cells in every) for at in range(len(_HEAD))]
    margin = " " * (depth + 2)
    # Names are what a person copies, so it is the class that gives way.
    widths[1] = min(widths[1], max(16, _WIDTH - len(margin) - 6 - widths[0] - widths[2] - widths[3]))
    lines = [_row(_HEAD, widths, margin)] if sections else []
    for heading, groups in sections:
        if heading:
            lines += ["", heading]
        for words, rows in groups.items():
            lines += textwrap.wrap(
                words,
                _WIDTH,
                initial_indent=" " * depth,
                subsequent_indent=" " * (depth + 4),
                break_on_hyphens=False,
            )
            lines += [_row(cells, widths, margin) for cells in rows]
    return lines


def _row(cells: _Cells, widths: Sequence[int], margin: str) -> str:
    name, cls, count, action = cells
    aligned = [name.ljust(widths[0]), shorten(cls, widths[1]).ljust(widths[1]), count.rjust(widths[2]), action]
    return (margin + "  ".join(aligned)).rstrip()


def _totals(plan: Plan) -> list[str]:
    refused = sum(decision.of_rows for decision in plan.refusals)
    others = len(plan.refusals) - refused
    total = len(plan.swaps) + refused
    parts = [f"{len(plan.swaps):,} to swap"] if plan.swaps else []
    parts += [f"{refused:,} to refuse"] if refused else []
    lines = [f"{_norms(total)}: {', '.join(parts)}" if total else "no norm found"]
    if others:
        lines.append(f"{others:,} {'module' if others == 1 else 'modules'} besides that are no norms of rows")
    if plan.functions:
        places = sum(found.count for found in plan.functions)
        lines.append(f"{places:,} {'place' if places == 1 else 'places'} where norms are code, not modules")
    return lines


def _norms(count: int) -> str:
    return f"{count:,} norm" if count == 1 else f"{count:,} norms"


def spec_words(spec: Mapping[str, Any], widths: Sequence[int] = ()) -> str:
    """Say in a few words what a norm computes, or several that differ in their widths alone."""
    layer, summed = spec["kind"] == "layer", spec.get("reduction") == "sum"
    width = f"width {spec['width']}" if spec.get("width") else "any width"
    if len(widths) > 1:
        width = f"widths {widths[0]} to {widths[-1]}"
    if spec.get("heads", 1) > 1:
        width += f", {spec['heads']} heads with gains of their own"
    parts = ["LayerNorm" if layer else "L2" if summed else "RMS", width]
    if spec.get("axis") == "channels":
        parts.append("over channels")
    if spec.get("groups", 1) > 1:
        parts.append(f"{spec['groups']} {'heads that it joins' if spec.get('joins', 1) > 1 else 'groups a row'}")
    if spec.get("partial"):
        parts.append(f"statistics of the first {spec['partial']} columns")
    position = {"outside": " outside the root", "clamp": " at least"}.get(spec.get("eps_position", ""), "")
    parts.append(f"eps {spec['eps']:g}{position}")
    gain = spec.get("gain", "w")
    if gain == "none":
        parts.append("no gain, bias" if spec.get("bias") else "no gain")
    else:
        before = " before the norm" if spec.get("gain_position") == "before" else ""
        parts.append(f"gain {gain}{before}" + (" + bias" if spec.get("bias") else ""))
        parts.append("cast before gain" if spec.get("cast") == "before_gain" else "cast after gain")
    if spec.get("gate"):
        names = {"silu": "SiLU", "sigmoid": "sigmoid"}
        where = f" {spec['gate_position']} the norm" if spec.get("gate_position") else ""
        parts.append(f"{names.get(spec['gate'], spec['gate'])} gate{where}")
    if spec.get("then"):
        parts.append(f"then {', '.join(spec['then'])}")
    if spec.get("own_code"):
        parts.append(f"its own code for {' and '.join(spec['own_code'])}")
    return ", ".join(parts)
