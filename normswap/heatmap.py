"""The norms of a model as a map: a row for each kind, a column for each layer, the greatest unit in each cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normswap.markup import escape, svg
from normswap.naming import name_pattern
from normswap.wording import number, severity, shorten

if TYPE_CHECKING:
    from normswap.evidence import LayerFigures
    from normswap.figures import NormFigures, ParityReport

__all__ = ["heat_map", "stacks_of"]

_WIDTH, _LEFT, _ROW = 960.0, 222.0, 21.0
# Columns beside each other: so many that a cell still holds two digits.
_COLUMNS, _WIDEST = 48, 34.0
_STEPS = (0.0, 1.0, 2.0, 4.0, 8.0)
_WORDS = ("0", "to 1", "to 2", "to 4", "to 8", "more, or no number")


@dataclass
class Stack:
    """The norms of one list of layers.

    Attributes:
        name: of the list, such as ``model.layers``; empty for the norms outside any.
        rows: by kind, such as ``input_layernorm``, and layer, the worst norm of that place.
    """

    name: str
    rows: dict[str, dict[int, NormFigures]] = field(default_factory=dict)

    @property
    def columns(self) -> list[int]:
        """The layers, in order."""
        return sorted({column for row in self.rows.values() for column in row})


def stacks_of(norms: Sequence[NormFigures], layers: Sequence[LayerFigures]) -> list[Stack]:
    """Sort norms by the list of layers, kind and layer that their names tell.

    Args:
        norms: what was measured.
        layers: the layers that are known; where a norm is in none, the first number in its name counts.

    Returns:
        The lists in the order of their first norms; the norms outside any at the end.
    """
    known = {layer.name: layer for layer in layers}
    stacks: dict[str, Stack] = {}
    for norm in norms:
        stack, column, kind = _place(norm.name, known)
        row = stacks.setdefault(stack, Stack(stack)).rows.setdefault(kind, {})
        if column not in row or severity(norm) > severity(row[column]):
            row[column] = norm
    return sorted(stacks.values(), key=lambda stack: not stack.name)


def _place(name: str, known: dict[str, LayerFigures]) -> tuple[str, int, str]:
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        layer = known.get(".".join(parts[:end]))
        if layer is not None and layer.stack:
            return layer.stack, layer.index, name_pattern(".".join(parts[end:])) or "(itself)"
    at = next((at for at, part in enumerate(parts) if part.isdecimal() and part.isascii() and len(part) < 9), 0)
    if at == 0:
        return "", 0, name
    return ".".join(parts[:at]), int(parts[at]), name_pattern(".".join(parts[at + 1 :])) or "(itself)"


def heat_map(report: ParityReport, key: str = "norms") -> str:
    """Draw the greatest unit in the last place of every norm.

    Each cell holds its figure; one beyond its bound has an outline and a filled corner, one that the inputs did not
    reach a dash.

    Args:
        report: with at least one norm.
        key: no other drawing of the document has it.
    """
    parts = list(_legend())
    y = 44.0
    for stack in stacks_of(report.norms, report.layers):
        columns = stack.columns
        for start in range(0, len(columns), _COLUMNS):
            band, y = _band(stack, columns[start : start + _COLUMNS], y)
            parts += band
    failed = [norm.name for norm in report.norms if norm.passed is False]
    words = f"Beyond their bounds: {', '.join(failed[:20])}" if failed else "All that were reached keep their bounds"
    more = f" and {len(failed) - 20} more" if len(failed) > 20 else ""
    text = f"{len(report.norms)} norms, a row for each kind, a column for each layer. {words}{more}."
    return svg(key, "Greatest unit in the last place of each norm", text, (_WIDTH, y), parts)


def _band(stack: Stack, columns: Sequence[int], y: float) -> tuple[list[str], float]:
    """Draw some layers of a stack, and say where the next may begin."""
    width = min(_WIDEST, (_WIDTH - _LEFT - 10) / len(columns))
    words = stack.name or "outside the layers"
    parts = [
        f'<text class="label" x="{_LEFT - 8}" y="{y + 12:.1f}" text-anchor="end">{escape(shorten(words, 26))}</text>'
    ]
    if stack.name:
        # Numbers of two digits and more have no room in the narrowest cells.
        every = 1 if width > 18 or columns[-1] < 10 else 2 if columns[-1] < 100 else 3
        for at, column in enumerate(columns):
            x = _LEFT + (at + 0.5) * width
            if at % every == 0:
                parts.append(f'<text class="tick" x="{x:.1f}" y="{y + 12:.1f}" text-anchor="middle">{column}</text>')
    y += 18
    for kind, row in stack.rows.items():
        if not any(column in row for column in columns):
            continue
        parts.append(
            f'<text class="tick" x="{_LEFT - 8}" y="{y + 14:.1f}" text-anchor="end">{escape(shorten(kind, 28))}</text>'
        )
        for at, column in enumerate(columns):
            if column in row:
                parts += _cell(row[column], _LEFT + at * width, y, width - 1)
        y += _ROW
    return parts, y + 14


def _step(norm: NormFigures) -> int:
    value = norm.max_ulp
    if value is None or math.isnan(value):
        return len(_STEPS)
    return next((step for step, top in enumerate(_STEPS) if value <= top), len(_STEPS))


def _cell(norm: NormFigures, x: float, y: float, width: float) -> Iterator[str]:
    reached = norm.max_ulp is not None
    kind = f"h{_step(norm)}" if reached else "unreached"
    state = {True: "", False: ", beyond its bound", None: ", not reached"}[norm.passed]
    words = f"{norm.name}: {number(norm.max_ulp)}{state}"
    yield f'<g class="cell {kind}"><title>{escape(words)}</title>'
    yield f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{_ROW - 2}"/>'
    yield f'<text x="{x + width / 2:.1f}" y="{y + 13.5:.1f}" text-anchor="middle">{escape(_digits(norm))}</text></g>'
    if norm.passed is False:
        yield (
            f'<path class="failed" d="M{x + 1:.1f} {y + 1:.1f}h{width - 2:.1f}v{_ROW - 4}h{2 - width:.1f}z"/>'
            f'<path class="corner" d="M{x:.1f} {y:.1f}h7l-7 7z"/>'
        )


def _digits(norm: NormFigures) -> str:
    """Write a figure in two letters: rounded up, so that nothing looks smaller than it is; ``>`` is more than 99."""
    value = norm.max_ulp
    if value is None:
        return "-"
    if math.isnan(value):
        return "N"
    if 0 < value < 1:
        return f".{min(9, math.ceil(value * 10))}"
    return str(math.ceil(value)) if value <= 99 else ">"


def _legend() -> Iterator[str]:
    x = _LEFT
    yield f'<text class="label" x="{_LEFT - 8}" y="18" text-anchor="end">units in the last place</text>'
    for step, words in enumerate(_WORDS):
        yield f'<g class="cell h{step}"><rect x="{x:.1f}" y="6" width="18" height="16"/></g>'
        yield f'<text class="tick" x="{x + 23:.1f}" y="18">{words}</text>'
        x += 42 + 5.9 * len(words)
    yield f'<path class="failed" d="M{x + 1:.1f} 7h16v14h-16z"/><path class="corner" d="M{x:.1f} 6h7l-7 7z"/>'
    yield f'<text class="tick" x="{x + 23:.1f}" y="18">beyond its bound</text>'
    x += 42 + 5.9 * 16
    yield f'<g class="cell unreached"><rect x="{x:.1f}" y="6" width="18" height="16"/>'
    yield f'<text x="{x + 9:.1f}" y="18" text-anchor="middle">-</text></g>'
    yield f'<text class="tick" x="{x + 23:.1f}" y="18">not reached</text>'
