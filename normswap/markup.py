"""The bricks of an HTML report: escaped text, tables, figures and their data."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from normswap.wording import clean

if TYPE_CHECKING:
    from normswap.tables import Table

__all__ = ["details", "escape", "facts", "figure", "gate_rows", "listing", "svg", "table"]

# What a cell says of its row, with a sign so that it does not rest on its colour.
_SIGNS = {
    "ok": ("ok", "✓"),
    "seen": ("ok", "✓"),
    "tie": ("ok", "="),
    "FAIL": ("bad", "✗"),
    "no tie": ("bad", "✗"),
    "departs": ("bad", "✗"),
    "doubt": ("doubt", "?"),
    "NOT seen": ("doubt", "?"),
    "note": ("doubt", "!"),
}


def escape(text: object) -> str:
    """Make any text safe in an element and in a quoted attribute."""
    return html.escape(clean(text), quote=True)


def table(content: Table, caption: str, *, name: int = 1) -> str:
    """Write a table whose rows are named by one of their cells.

    Args:
        content: headings and rows.
        caption: what it shows; read first by a screen reader.
        name: the column that names a row.
    """
    rows = "".join(
        f"<tr>{''.join(_cell(cell, at, content, row_name=at == name) for at, cell in enumerate(row))}</tr>"
        for row in content.rows
    )
    return _framed(caption, f"{_head(content)}<tbody>{rows}</tbody>")


def gate_rows(content: Table, caption: str) -> str:
    """Write the table of gates: the rows of a gate are one group under its name."""
    groups: list[list[list[str]]] = []
    for row in content.rows:
        if row[0]:
            groups.append([])
        groups[-1].append(row)
    bodies = []
    for group in groups:
        span = len(group)
        start = (
            f'<th scope="rowgroup" rowspan="{span}">{escape(group[0][0])}</th>'
            f'<td rowspan="{span}">{_state(group[0][1])}</td>'
        )
        rows = [f"<tr>{'' if at else start}{_measured(row[2:])}</tr>" for at, row in enumerate(group)]
        bodies.append(f"<tbody>{''.join(rows)}</tbody>")
    return _framed(caption, _head(content) + "".join(bodies), "gates")


def _measured(cells: list[str]) -> str:
    figure, *rest = cells
    if not any(rest):
        return f'<td colspan="{len(cells)}">{escape(figure)}</td>'
    # On a narrow screen lines may end between figures and not within one.
    words = [" ".join(f"<span>{escape(word)}</span>" for word in cell.split()) for cell in rest]
    return f"<td>{escape(figure)}</td>{''.join(f'<td class=short>{cell}</td>' for cell in words)}"


def _framed(caption: str, inside: str, kind: str = "plain") -> str:
    # What may be wider than the screen scrolls by itself, and by the keyboard.
    return (
        f'<div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">'
        f'<table class="{kind}"><caption>{escape(caption)}</caption>{inside}</table></div>'
    )


def _head(content: Table) -> str:
    cells = []
    for at, heading in enumerate(content.head):
        words = escape(heading) if heading else '<span class="hidden">state</span>'
        cells.append(f'<th scope="col"{_set(at, content)}>{words}</th>')
    return f"<thead><tr>{''.join(cells)}</tr></thead>"


def _set(at: int, content: Table) -> str:
    return ' class="figure"' if at in content.figures else ""


def _cell(cell: str, at: int, content: Table, *, row_name: bool = False) -> str:
    if row_name:
        return f'<th scope="row"{_set(at, content)}>{escape(cell)}</th>'
    return f"<td{_set(at, content)}>{escape(cell) if content.head[at] else _state(cell)}</td>"


def _state(word: str) -> str:
    if word not in _SIGNS:
        return escape(word)
    kind, sign = _SIGNS[word]
    return f'<span class="state {kind}"><span aria-hidden="true">{sign}</span> {escape(word)}</span>'


def facts(entries: Iterable[tuple[str, object]]) -> str:
    """Write names with their values."""
    rows = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in entries)
    return f"<dl>{rows}</dl>"


def listing(entries: Iterable[str]) -> str:
    """Write a list of sentences."""
    return f"<ul>{''.join(f'<li>{escape(entry)}</li>' for entry in entries)}</ul>"


def details(summary: str, inside: str) -> str:
    """Put away what is long until it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>{inside}</details>"


def svg(key: str, title: str, text: str, size: tuple[float, float], parts: Iterable[str]) -> str:
    """Write a drawing that is read as one image.

    Args:
        key: no other drawing of the document has it.
        title: name of the image.
        text: what it shows, for those who do not see it.
        size: width and height, in units of the drawing.
        parts: its elements.
    """
    width, height = size
    return (
        f'<svg role="img" aria-labelledby="{key}-title {key}-text" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}"><title id="{key}-title">{escape(title)}</title>'
        f'<desc id="{key}-text">{escape(text)}</desc>{"".join(parts)}</svg>'
    )


def figure(drawing: str, caption: str, data: Mapping[str, str] | None = None) -> str:
    """Set a drawing above its caption, and its data as tables that open below.

    Args:
        drawing: what `svg` returned.
        caption: what is seen.
        data: tables by the words that open them.
    """
    below = "".join(details(summary, inside) for summary, inside in (data or {}).items())
    return (
        f'<figure><div class="scroll" role="region" tabindex="0" aria-label="{escape(caption)}">{drawing}</div>'
        f"<figcaption>{escape(caption)}</figcaption>{below}</figure>"
    )
