"""A parity report as one HTML file, and as a fragment for notebooks."""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from normswap import markup, tables
from normswap.gatetable import gate_table
from normswap.heatmap import heat_map
from normswap.plots import histogram_plot, histogram_rows, layer_plot
from normswap.wording import BINS, compared_with, few_sequences, headline, pair_of_names, percent

if TYPE_CHECKING:
    from normswap.figures import ParityReport

__all__ = ["to_fragment", "to_html"]

_SIGNS = {"pass": "✓", "fail": "✗", "inconclusive": "?"}
# Rows that stand open; longer tables are put away, and of changed tensors no more than these are written.
_OPEN, _CHANGES = 30, 50
# Reasons that stand open.
_SHOWN = 8
_REASONS = 50
# Neither a script nor anything from elsewhere runs or loads, whatever a name in the report may try.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"

# Where the words of the criterion pass on to another gate.
_OF_A_GATE = re.compile(r"(?<=\.) (?=\w+: )")

_Section = tuple[str, str, str]

_FAULTS = (
    "Faults put into this model, and the first gate that saw them: an error (exact), units in the last place or the "
    "share of bit-identical elements (norms)"
)
_WORDS = {
    "original, converted": "the checkpoint that is right by definition, and the one under test",
    "reference": "the original's stored weights in finer arithmetic than is served",
    "relative RMS": "root of the summed squared differences over that of the squared values; without unit",
    "unit in the last place": "step from one number of a dtype to the next one; 0 is bit-identical",
    "KL": "Kullback-Leibler divergence of next-token distributions from the reference's, in nats a token",
    "top-1": "how often the likeliest token is the reference's",
    "95% interval": "of a bootstrap over sequences, or over blocks of tokens where it says so",
    "residual stream": "what a layer hands to the next one",
    "gain, reader": "a norm's weight, and a weight that multiplies a norm's output",
    "call:row:channel": "where a norm's worst element is, all counted from 0",
}


def to_html(report: ParityReport) -> str:
    """Write a report as one self-contained page: no network, no script, light and dark, for screen and paper.

    Args:
        report: what was measured.

    Returns:
        The whole document; write it as UTF-8.
    """
    sections = [section for section in _sections(report) if section[2]]
    links = "".join(f'<li><a href="#{key}">{markup.escape(title)}</a></li>' for key, title, _ in sections)
    body = "".join(
        f'<section id="{key}" aria-labelledby="{key}-h"><h2 id="{key}-h">{markup.escape(title)}</h2>{inside}</section>'
        for key, title, inside in sections
    )
    title = f"{report.verdict.upper()}: {pair_of_names(report) or headline(report)}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{markup.escape(title)}</title>\n<style>\n{_style('report.css')}{_style('page.css')}</style>\n</head>\n"
        '<body class="normswap-report page">\n<a class="skip" href="#main">Skip to the report</a>\n'
        f'<header>{_verdict(report, "h1")}</header>\n<nav aria-label="Sections"><ul>{links}</ul></nav>\n'
        f'<main id="main" tabindex="-1">{body}</main>\n</body>\n</html>\n'
    )


def to_fragment(report: ParityReport) -> str:
    """Write a short form for notebooks: verdict, gates and the plot of the layers, with styles of their own.

    Args:
        report: what was measured.
    """
    # Several reports may stand in one notebook, and no two elements of a document may share a name.
    key = f"n{zlib.crc32(repr(report).encode('utf-8', 'replace')):08x}"
    parts = [_verdict(report, "p"), markup.gate_rows(gate_table(report, brief=True), "Gates")]
    if report.layers:
        parts.append(markup.figure(layer_plot(report, f"{key}-layers"), "Relative error after each layer"))
    return f'<div class="normswap-report"><style>{_style("report.css")}</style>{"".join(parts)}</div>'


def _style(name: str) -> str:
    return Path(__file__).with_name(name).read_text(encoding="utf-8")


def _verdict(report: ParityReport, heading: str) -> str:
    words = {
        "pass": "Every gate held, and would have noticed had it not.",
        "fail": "The two do not compute the same function:",
        "inconclusive": "Nothing failed, but a fault could have gone unseen:",
    }
    verdict = report.verdict
    badge = f'<span class="badge {verdict}"><span aria-hidden="true">{_SIGNS[verdict]}</span> {verdict.upper()}</span>'
    names = pair_of_names(report)
    parts = [
        f'<{heading} class="verdict">{badge} {markup.escape(names or headline(report))}</{heading}>',
        f'<p class="what">{markup.escape(headline(report))}</p>' if names else "",
        f"<p>{words[verdict]}</p>",
    ]
    for title, reasons in (("", report.failures), ("In doubt besides:", report.doubts)):
        if reasons:
            parts.append(f"<p>{title}</p>" if title and report.failures else "")
            parts.append(markup.listing(reasons[:_SHOWN]))
            if rest := reasons[_SHOWN:]:
                more = [f"and {len(rest) - _REASONS} more"] if len(rest) > _REASONS else []
                parts.append(markup.details(f"{len(rest)} more reasons", markup.listing([*rest[:_REASONS], *more])))
    return "".join(parts)


def _sections(report: ParityReport) -> Iterator[_Section]:
    yield "gates", "Gates", _gates(report)
    yield "compared", "What was compared", _compared(report)
    yield "layers", "Where: layer by layer", _layers(report)
    yield "norms", "Where: norm by norm", _norms(report)
    yield "units", "Units in the last place", _units(report)
    yield "tokens", "Outputs" if report.logits.tokens is None else "Outputs and tokens", _tokens(report)
    yield "generation", "Greedy continuations", _generation(report)
    yield "controls", "Faults put in on purpose", _controls(report)
    yield "pairs", "Folded gains and their readers", _pairs(report)
    yield "criterion", "Criterion", _criterion(report)
    yield "environment", "Environment", markup.facts(tables.environment(report))
    yield "inputs", "Inputs", markup.facts(report.inputs.items())
    yield "notes", "Notes", markup.listing(report.notes) if report.notes else ""
    yield "words", "Words", markup.facts(_WORDS.items())
    yield "again", "How to reproduce", f"<pre>{markup.escape(report.command)}</pre>" if report.command else ""


def _gates(report: ParityReport) -> str:
    return markup.gate_rows(gate_table(report), "What each gate measured, and what it may be")


def _compared(report: ParityReport) -> str:
    shape = " x ".join(str(size) for size in report.output.get("shape", []))
    facts: list[tuple[str, object]] = [
        ("checkpoint", report.checkpoint or "-"),
        ("against", compared_with(report) or "-"),
        ("output", f"{report.output['name']}{f', {shape} of one input' if shape else ''}"),
    ]
    found = report.tensors
    if found is None:
        return markup.facts(facts)
    facts.append(("tensors", f"{found.summary}; {found.same} of {found.tensors} are the same bit for bit"))
    if found.files is not None:
        facts.append(("files", found.files))
    if found.altered:
        facts.append(("altered since the conversion", ", ".join(found.altered)))
    parts = [markup.facts(facts)]
    for explained, words in ((False, "Tensors that nothing explains"), (True, "Tensors that differ, as explained")):
        parts.append(_changes(report, explained, words))
    settings = tables.setting_table(report)
    if settings.rows:
        parts.append(markup.table(settings, "Settings that differ", name=0))
    return "".join(parts)


def _changes(report: ParityReport, explained: bool, words: str) -> str:
    """Write the first of the changed tensors, and how many more there are."""
    changes = tables.change_table(report, explained=explained)
    count = len(changes.rows)
    if not count:
        return ""
    shown = markup.table(tables.Table(changes.head, changes.rows[:_CHANGES], changes.figures), words)
    if count > _CHANGES:
        shown += f"<p>{count - _CHANGES} more; the JSON report lists all.</p>"
    return markup.details(f"{words}: {count}", shown) if explained else shown


def _layers(report: ParityReport) -> str:
    if not report.layers:
        return ""
    where = "No layer departs." if report.departs is None else f"The first layer that departs is {report.departs}."
    folded = [layer.name for layer in report.layers if layer.folded is not None]
    if folded:
        more = f" and {len(folded) - 1} more" if folded[1:] else ""
        where += f" Not compared, as what is returned there is the result of a folded norm: {folded[0]}{more}."
    caption = f"Relative RMS error of the residual stream after each layer. {where}"
    data = markup.table(tables.layer_table(report.layers), "Errors of the residual stream")
    return markup.figure(layer_plot(report, "layers-plot"), caption, {"Data of this plot": data})


def _norms(report: ParityReport) -> str:
    if not report.norms:
        return ""
    caption = "Greatest distance of each norm from its original on the served activations, in units in the last place."
    data = markup.table(tables.norm_table(report.norms), "Norms on the served activations")
    return markup.figure(heat_map(report, "norms-plot"), caption, {f"Data: all {len(report.norms)} norms": data})


def _units(report: ParityReport) -> str:
    rows = histogram_rows(report)
    if not rows:
        return ""
    cells = [[name, *(f"{counts[at]:,}" for _, counts in rows)] for at, name in enumerate(BINS)]
    content = tables.Table(["units", *(name for name, _ in rows)], cells, frozenset(range(1, len(rows) + 1)))
    data = markup.table(content, "Elements by their distance in units in the last place", name=0)
    caption = "How far elements lie from the original's. Parts of a unit count as the next whole one."
    return markup.figure(histogram_plot(report, "units-plot"), caption, {"Data of this plot": data})


def _tokens(report: ParityReport) -> str:
    content = tables.token_table(report)
    if not content.rows:
        return "<p>Not measured: there is no finer reference than the original.</p>"
    few = few_sequences(report) if report.logits.judges else ""
    warning = (
        f'<p class="warning">The intervals over sequences rest on too few: {markup.escape(few)}.</p>' if few else ""
    )
    if not report.logits.judges:
        warning = '<p class="warning">The outputs have too few numbers for these ratios to be judged.</p>'
    what = "tokens" if tables.one_a_token(report) else "distributions"
    count = "" if report.logits.tokens is None else f", {report.logits.tokens:,} {what}"
    return warning + markup.table(content, f"Served outputs against the reference{count}", name=0)


def _generation(report: ParityReport) -> str:
    found = report.generation
    if found is None:
        return ""
    words = f"{found.same} of {found.prompts} prompts have the same {found.tokens} tokens after them."
    divergences = tables.divergence_table(report)
    if divergences.rows:
        words += (
            f" {len(divergences.rows)} part, {sum(entry.tie for entry in found.divergences)} of them where two tie."
        )
    if not divergences.rows:
        return f"<p>{words}</p>"
    caption = "Where continuations part; a tie is a margin that the served arithmetic cannot tell"
    return f"<p>{words}</p>{_folded_away(divergences, caption, 'partings')}"


def _controls(report: ParityReport) -> str:
    power, parts = report.power, []
    if power.smallest is not None:
        seen = f"{percent(power.smallest, 4)} on every other channel of one gain"
        parts.append(f"<p>The smallest fault that the gate exact would have seen: {markup.escape(seen)}")
        parts.append(f" ({markup.escape(power.norm)}).</p>" if power.norm else ".</p>")
    faults = tables.fault_table(report)
    if faults.rows:
        parts.append(markup.table(faults, _FAULTS))
    return "".join(parts)


def _pairs(report: ParityReport) -> str:
    pairs = tables.pair_table(report)
    if not pairs.rows:
        return ""
    words = f"<p>{sum(pair.passed for pair in report.pairs)} of {len(report.pairs)} are kept.</p>"
    return words + _folded_away(pairs, "Each fold computed again from the two checkpoints", "pairs")


def _folded_away(content: tables.Table, caption: str, words: str) -> str:
    """Write a table; a long one opens on demand, and what failed in it stands open before."""
    if len(content.rows) <= _OPEN:
        return markup.table(content, caption)
    bad = [row for row in content.rows if row[0] in ("FAIL", "no tie")][:_OPEN]
    shown = markup.table(tables.Table(content.head, bad, content.figures), f"{caption}: what failed") if bad else ""
    return shown + markup.details(f"All {len(content.rows)} {words}", markup.table(content, caption))


def _criterion(report: ParityReport) -> str:
    words = markup.listing(_OF_A_GATE.split(report.criterion.describe()))
    return words + markup.table(tables.bound_table(report.criterion), "Bounds", name=0)
