"""Drawings of a report: the errors layer by layer, and the histogram of units in the last place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from normswap.markup import escape, svg
from normswap.wording import BINS, number, percent, shorten, worst_norms

if TYPE_CHECKING:
    from normswap.evidence import LayerFigures
    from normswap.figures import ParityReport

__all__ = ["histogram_plot", "histogram_rows", "layer_plot"]

_WIDTH = 960.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 64.0, 20.0, 56.0, 46.0
# Height of the drawing between the axes, and of the bands for what has no place on a logarithmic one.
_PLOT, _BAND = 250.0, 32.0
# From so many layers on the points are drawn small, and not every layer has its number.
_MANY, _LABELS = 48, 32


@dataclass(frozen=True)
class _Series:
    kind: str
    words: str
    value: Callable[[LayerFigures], float | None]


def _series(report: ParityReport) -> tuple[_Series, ...]:
    return (
        _Series("original", "original as served, from the reference", lambda layer: layer.error_original),
        _Series("converted", "converted as served, from the reference", lambda layer: layer.error_converted),
        _Series("exact", f"both in {report.exact.dtype}, from each other", lambda layer: layer.error_exact),
    )


def layer_plot(report: ParityReport, key: str = "layers") -> str:
    """Draw the relative RMS errors of the residual stream after each layer, on a logarithmic axis.

    The original's and the converted model's error against the reference, and that of both in float32 from each other,
    are told apart by marks and strokes as well as by colours. The first layer that departs is marked and named.

    Args:
        report: with at least one layer.
        key: no other drawing of the document has it.
    """
    layers, every = report.layers, _series(report)
    values = [value for series in every for layer in layers if (value := series.value(layer)) is not None]
    scale = _Scale.of(values)
    step = (_WIDTH - _LEFT - _RIGHT - 24) / max(1, len(layers) - 1)
    places = [_LEFT + 12 + step * at for at in range(len(layers))]
    if len(layers) == 1:
        places = [(_LEFT + _WIDTH - _RIGHT) / 2]
    parts = [*_axis(scale), *_ticks(layers, places, scale.bottom)]
    parts += _departing(report, places, scale.bottom)
    for series in every:
        parts += _drawn(series, layers, places, scale, small=len(layers) > _MANY)
    parts += _legend([series for series in every if any(series.value(layer) is not None for layer in layers)])
    where = "No layer departs." if report.departs is None else f"The first that departs is {report.departs}."
    text = f"{len(layers)} layers. {' '.join(_ends(series, layers) for series in every)} {where}"
    return svg(key, "Relative error after each layer", text, (_WIDTH, scale.bottom + _BOTTOM), parts)


def _ends(series: _Series, layers: Sequence[LayerFigures]) -> str:
    known = [value for layer in layers if (value := series.value(layer)) is not None]
    if not known:
        return f"{series.words}: not measured."
    last = "the last" if series.value(layers[-1]) is not None else "the last compared"
    return f"{series.words}: {number(known[0])} after the first layer, {number(known[-1])} after {last}."


@dataclass(frozen=True)
class _Scale:
    """A logarithmic axis of whole decades, with a band below for zeros and one above for what is no number."""

    low: int
    high: int
    zeros: bool
    broken: bool

    @classmethod
    def of(cls, values: Sequence[float]) -> _Scale:
        usual = [math.log10(value) for value in values if value > 0 and math.isfinite(value)]
        low = math.floor(min(usual, default=-7.0))
        high = max(math.ceil(max(usual, default=-5.0)), low + 1)
        return cls(low, high, any(value == 0 for value in values), any(not math.isfinite(value) for value in values))

    @property
    def top(self) -> float:
        return _TOP + (_BAND if self.broken else 0)

    @property
    def bottom(self) -> float:
        return self.top + _PLOT + (_BAND if self.zeros else 0)

    def height(self, value: float) -> float:
        if not math.isfinite(value):
            return _TOP + _BAND / 2
        if value <= 0:
            return self.bottom - _BAND / 2
        return self.top + _PLOT * (self.high - math.log10(value)) / (self.high - self.low)


def _axis(scale: _Scale) -> Iterator[str]:
    span = scale.high - scale.low
    every = 1 if span <= 10 else math.ceil(span / 10)
    marks = [(f"1e{exponent}", scale.height(10.0**exponent)) for exponent in range(scale.low, scale.high + 1, every)]
    marks += [("0", scale.height(0.0))] if scale.zeros else []
    marks += [("NaN, inf", scale.height(math.nan))] if scale.broken else []
    for words, y in marks:
        yield f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="tick" x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_LEFT}" y1="{_TOP}" y2="{scale.bottom:.1f}"/>'
    yield f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{scale.bottom:.1f}" y2="{scale.bottom:.1f}"/>'


def _ticks(layers: Sequence[LayerFigures], places: Sequence[float], bottom: float) -> Iterator[str]:
    """Yield the numbers of layers, and the names of their stacks where there are several."""
    every = math.ceil(len(layers) / _LABELS)
    stacks: dict[str, list[float]] = {}
    for layer, x in zip(layers, places, strict=True):
        stacks.setdefault(layer.stack, []).append(x)
        if layer.index % every == 0:
            yield f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{layer.index}</text>'
    for stack, own in stacks.items():
        x, words = (own[0] + own[-1]) / 2, shorten(f"layer of {stack}", max(16, int(110 / len(stacks))))
        yield f'<text class="label" x="{x:.1f}" y="{bottom + 34:.1f}" text-anchor="middle">{escape(words)}</text>'
        if own[0] != places[0]:
            yield f'<line class="axis" x1="{own[0] - 6:.1f}" x2="{own[0] - 6:.1f}" y1="{_TOP}" y2="{bottom:.1f}"/>'


def _departing(report: ParityReport, places: Sequence[float], bottom: float) -> Iterator[str]:
    at = next((at for at, layer in enumerate(report.layers) if layer.name == report.departs), None)
    if report.departs is None or at is None:
        return
    x = places[at]
    side, gap = ("start", 6) if x < _WIDTH / 2 else ("end", -6)
    words = escape(shorten(f"departs: {report.departs}", 52))
    yield f'<line class="departs" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 20}" y2="{bottom:.1f}"/>'
    yield f'<text class="departs" x="{x + gap:.1f}" y="{_TOP - 12}" text-anchor="{side}">{words}</text>'


def _drawn(
    series: _Series, layers: Sequence[LayerFigures], places: Sequence[float], scale: _Scale, *, small: bool
) -> Iterator[str]:
    """Yield a line for each stack, broken where a figure is missing, and a mark for each layer."""
    path, marks = [], []
    before: str | None = None
    for layer, x in zip(layers, places, strict=True):
        value = series.value(layer)
        if value is None:
            before = None
            continue
        y = scale.height(value)
        path.append(f"{'L' if before == layer.stack else 'M'}{x:.1f} {y:.1f}")
        before = layer.stack
        marks.append(_mark(series.kind, x, y, 2.0 if small else 3.4, f"{layer.name}: {number(value)}"))
    if path:
        yield f'<path class="line {series.kind}" d="{"".join(path)}"/>'
        yield f'<g class="mark {series.kind}">{"".join(marks)}</g>'


def _mark(kind: str, x: float, y: float, size: float, words: str = "") -> str:
    title = f"<title>{escape(words)}</title>" if words else ""
    if kind == "original":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size + 1.2:.1f}">{title}</circle>'
    if kind == "converted":
        return (
            f'<rect x="{x - size:.1f}" y="{y - size:.1f}" width="{2 * size:.1f}" height="{2 * size:.1f}">{title}</rect>'
        )
    far = f"{size * 1.4:.1f}"
    return f'<path d="M{x:.1f} {y - size * 1.4:.1f}l{far} {far}l-{far} {far}l-{far} -{far}z">{title}</path>'


def _legend(drawn: Sequence[_Series]) -> Iterator[str]:
    x = _LEFT
    for series in drawn:
        yield f'<path class="line {series.kind}" d="M{x:.1f} 14h30"/>'
        yield f'<g class="mark {series.kind}">{_mark(series.kind, x + 15, 14, 3.4)}</g>'
        yield f'<text class="label" x="{x + 36:.1f}" y="18">{escape(series.words)}</text>'
        x += 64 + 6.4 * len(series.words)


def _share(fraction: float) -> str:
    return percent(fraction, 4) if fraction >= 1e-6 else f"{number(100 * fraction, 2)}%"


def histogram_rows(report: ParityReport) -> list[tuple[str, list[int]]]:
    """Return the histogram of all norms together, and that of the worst one, each with its name."""
    counted = [norm for norm in report.norms if norm.histogram]
    if not counted:
        return []
    every = [sum(norm.histogram[at] for norm in counted if at < len(norm.histogram)) for at in range(len(BINS))]
    rows = [(f"all {len(counted)} norms", every)]
    worst = next((norm for norm in worst_norms(report, len(report.norms)) if norm.histogram), None)
    if worst is not None and len(counted) > 1 and any(worst.histogram[1:]):
        rows.append((f"the worst, {worst.name}", worst.histogram))
    return rows


def histogram_plot(report: ParityReport, key: str = "units") -> str:
    """Draw how many elements lie how many units in the last place from their original's, on a logarithmic axis.

    Args:
        report: with at least one norm that was reached.
        key: no other drawing of the document has it.
    """
    rows = histogram_rows(report)
    least = min((count / sum(counts) for _, counts in rows for count in counts if count and sum(counts)), default=1.0)
    decades = max(1, math.ceil(-math.log10(least)) + 1)
    left, right, bar = 86.0, 170.0, 13.0
    room = _WIDTH - left - right
    group = len(rows) * (bar + 2) + 9
    bottom = _TOP - 10 + group * len(BINS)
    parts = []
    for exponent in range(decades + 1):
        x = left + room * (1 - exponent / decades)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 14}" y2="{bottom:.1f}"/>')
        if exponent % math.ceil(decades / 10) == 0:
            words = percent(10.0**-exponent, max(0, exponent - 2))
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 15:.1f}" text-anchor="middle">{words}</text>')
    for at, words in enumerate(BINS):
        y = _TOP - 10 + group * at
        parts.append(f'<text class="label" x="{left - 8}" y="{y + group / 2:.1f}" text-anchor="end">{words}</text>')
        for series, (_, counts) in enumerate(rows):
            count, total = counts[at] if at < len(counts) else 0, sum(counts)
            length = room * (1 + math.log10(count / total) / decades) if count else 0.0
            place = y + series * (bar + 2)
            parts.append(
                f'<rect class="bar s{series}" x="{left}" y="{place:.1f}" width="{length:.1f}" height="{bar}"/>'
                f'<text class="tick" x="{left + length + 5:.1f}" y="{place + 10.5:.1f}">'
                f"{count:,}{f' ({_share(count / total)})' if count else ''}</text>"
            )
    parts.append(f'<line class="axis" x1="{left}" x2="{left}" y1="{_TOP - 14}" y2="{bottom:.1f}"/>')
    x = left
    for series, (words, _) in enumerate(rows):
        short = shorten(words, 70)
        parts.append(f'<rect class="bar s{series}" x="{x:.1f}" y="8" width="22" height="{bar}"/>')
        parts.append(f'<text class="label" x="{x + 28:.1f}" y="18">{escape(short)}</text>')
        x += 60 + 6.4 * len(short)
    label = "units in the last place, and the share of the elements that lie so far from the original's"
    parts.append(f'<text class="label" x="{left}" y="{bottom + 34:.1f}">{label}</text>')
    text = ". ".join(
        f"{words}: {', '.join(f'{count:,} at {name}' for name, count in zip(BINS, counts, strict=False) if count)}"
        for words, counts in rows
    )
    return svg(key, "Units in the last place", text, (_WIDTH, bottom + 44), parts)
