"""A parity report as tables of words: what the terminal, the page and the model card set in their own ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from normswap.wording import few_sequences, interval, number, percent, severity, state_of

if TYPE_CHECKING:
    from normswap.evidence import LayerFigures
    from normswap.figures import Criterion, NormFigures, ParityReport

__all__ = [
    "Table",
    "bound_table",
    "change_table",
    "divergence_table",
    "environment",
    "fault_table",
    "gate_table",
    "layer_table",
    "norm_table",
    "pair_table",
    "setting_table",
    "token_table",
]

_MARK = {True: "ok", False: "FAIL", None: "-"}


@dataclass(frozen=True)
class Table:
    """Rows of words under their headings.

    Attributes:
        head: one heading a column.
        rows: as many cells each as there are headings.
        figures: columns of figures, which are set to the right where that can be.
    """

    head: list[str]
    rows: list[list[str]]
    figures: frozenset[int] = frozenset()


def gate_table(report: ParityReport, *, brief: bool = False) -> Table:
    """Write what each gate measured and what it may be, and what stands beside the gates.

    Args:
        report: what was measured.
        brief: leave out what other rows and tables say: the errors behind the ratios, the worst pair, and the single
            controls where several faults were put in.

    Returns:
        Columns gate, state, figure, value and bound; a gate's name and state stand in its first row only. A figure
        that is a sentence has neither value nor bound.
    """
    controls = not (brief and report.power.faults)
    parts = [
        ("tensors", state_of(report, "tensors"), _tensor_rows(report)),
        ("folds", state_of(report, "folds"), _pair_rows(report, brief)),
        ("exact", state_of(report, "exact"), _exact_rows(report, controls)),
        ("norms", state_of(report, "norms"), _norm_rows(report)),
        ("served", state_of(report, "served"), _served_rows(report, controls, brief)),
        ("layers", _layers_state(report), _layer_rows(report)),
        ("power", state_of(report, "power"), _power_rows(report)),
        ("generation", state_of(report, "generation"), _generation_rows(report)),
    ]
    rows = [
        [gate if at == 0 else "", state if at == 0 else "", *entry]
        for gate, state, entries in parts
        for at, entry in enumerate(entries)
    ]
    return Table(["gate", "", "figure", "value", "bound"], rows)


def _tensor_rows(report: ParityReport) -> list[list[str]]:
    tensors = report.tensors
    if tensors is None:
        return []
    rows = [[tensors.summary, "", ""], ["bit for bit the same", f"{tensors.same} of {tensors.tensors}", ""]]
    if tensors.unexplained:
        rows.append(["changed, unexplained", str(len(tensors.unexplained)), "none"])
    if tensors.settings:
        rows.append(["settings that differ", str(len(tensors.settings)), ""])
    if tensors.altered:
        rows.append(["files altered since conversion", str(len(tensors.altered)), "none"])
    return rows


def _pair_rows(report: ParityReport, brief: bool) -> list[list[str]]:
    if not report.pairs:
        return []
    kept = sum(pair.passed for pair in report.pairs)
    rows = [["folded gains kept", f"{kept} of {len(report.pairs)}", "all"]]
    worst = max(report.pairs, key=lambda pair: (not pair.passed, pair.error / pair.bound if pair.bound else 0.0))
    return rows if brief else [*rows, [f"worst: {worst.norm}", number(worst.error), f"<= {number(worst.bound)}"]]


def _exact_rows(report: ParityReport, controls: bool) -> list[list[str]]:
    exact = report.exact
    folded = report.logits.control is not None
    how = f"{exact.dtype}, unrounded folds" if folded else f"both in {exact.dtype}"
    rows = [[f"relative error, {how}", number(exact.error), f"<= {exact.bound:g}"]]
    if exact.error_original is not None:
        rows.append(["the original's own, in float32", number(exact.error_original), ""])
    if controls and exact.control is not None:
        words = f"the same with {exact.control.norm} x {exact.control.scale:g}"
        rows.append([words, number(exact.control.error), f"> {exact.bound:g}"])
    return rows


def _norm_rows(report: ParityReport) -> list[list[str]]:
    reached = [norm for norm in report.norms if norm.calls]
    held = sum(norm.passed is True for norm in reached)
    rows = [["within their bounds", f"{held} of {len(reached)}", "all"]]
    units = [norm for norm in reached if norm.bound_ulp is not None and norm.max_ulp is not None]
    if units:
        worst = max(units, key=severity)
        rows.append(["worst unit in the last place", number(worst.max_ulp), f"<= {worst.bound_ulp:g}"])
        least = min(norm.bit_identical_fraction or 0.0 for norm in units)
        rows.append(["least bit-identical", percent(least, 4), ""])
    if len(reached) < len(report.norms):
        rows.append(["not reached by the inputs", str(len(report.norms) - len(reached)), ""])
    return rows


def _served_rows(report: ParityReport, controls: bool, brief: bool) -> list[list[str]]:
    served, bounds = report.logits, report.criterion
    few = few_sequences(report)
    # Where sequences are few, blocks of tokens are what is judged.
    over_tokens = bool(few) and served.ratio_interval_tokens is not None
    words = f"its 95% interval{' over tokens' if over_tokens else ''}"
    most, low = f"<= {bounds.ratio_max:g}", f"from <= {bounds.ratio_interval_low:g}"
    explained = []
    if served.ratio_explained is not None:
        # Then this one judges: what rounding the stored weights adds is no fault of theirs.
        explained = [["error, over what rounding explains", number(served.ratio_explained, 4), most]]
        most = low = ""
    rows = [
        ["error, converted / original", number(served.ratio, 4), most],
        [words, interval(served.ratio_interval_tokens if over_tokens else served.ratio_interval), low],
        *explained,
    ]
    if few:
        rows.append([f"! the intervals rest on {few}", "", ""])
    if not brief:
        errors = f"{number(served.error_converted)} / {number(served.error_original)}"
        rows.append(["the errors, relative RMS", errors, ""])
        if served.error_weights is not None:
            rows.append(["of rounding the stored weights alone", number(served.error_weights), ""])
    if controls and served.control is not None:
        words_lost = f"the same without {served.control.norm}'s gain"
        rows.append([words_lost, number(served.control.ratio, 4), f"> {bounds.ratio_max:g}"])
    if served.kl_ratio is not None:
        rows.append(["root of KL, converted / original", number(served.kl_ratio, 4), most])
        rows.append(["its 95% interval", interval(served.kl_ratio_interval), "" if over_tokens else low])
    if served.kl_converted is not None and not (brief and served.kl_ratio is not None):
        rows.append(["KL in nats a token", f"{number(served.kl_converted)} / {number(served.kl_original)}", ""])
    if served.top1_agreement is not None:
        top = f"{percent(served.top1_agreement)} / {percent(served.top1_agreement_original)}"
        rows.append(["top-1 as the reference", top, ""])
    return rows


def _layers_state(report: ParityReport) -> str:
    if report.departs is None:
        return "ok"
    return "FAIL" if report.failures else "note"


def _layer_rows(report: ParityReport) -> list[list[str]]:
    if not report.layers:
        return []
    if report.departs is None:
        return [[f"none of {len(report.layers)} departs", "", ""]]
    found = next((layer for layer in report.layers if layer.name == report.departs), None)
    figures = [] if found is None else [("exact", found.error_exact), ("ratio", found.ratio)]
    words = ", ".join(f"{word} {number(figure)}" for word, figure in figures if figure is not None)
    return [[f"the first that departs is {report.departs}{' (' if words else ''}{words}{')' if words else ''}", "", ""]]


def _power_rows(report: ParityReport) -> list[list[str]]:
    power = report.power
    tried = [fault for fault in power.faults if fault.detected is not None]
    rows = []
    if tried:
        rows.append(["faults put in and seen", f"{sum(bool(f.detected) for f in tried)} of {len(tried)}", "all"])
    if power.smallest is not None:
        where = f" in {power.norm}" if power.norm else ""
        rows.append([f"a gain {percent(power.smallest, 4)} off would be seen{where}", "", ""])
    return rows


def _generation_rows(report: ParityReport) -> list[list[str]]:
    found = report.generation
    if found is None:
        return []
    same = f"{found.same} of {found.prompts}"
    ties = sum(entry.tie for entry in found.divergences)
    return [[f"the same {found.tokens} tokens", f"{same}, {ties} tied" if ties else same, "all, or tied"]]


def token_table(report: ParityReport) -> Table:
    """Write what is measured on next-token distributions and outputs, each with its interval."""
    served = report.logits
    rows = [
        ["KL(reference, original), nats a token", number(served.kl_original, 4), interval(served.kl_original_interval)],
        ["KL(reference, converted), nats a token", number(served.kl_converted, 4), interval(served.kl_interval)],
        ["root of their ratio, over sequences", number(served.kl_ratio, 4), interval(served.kl_ratio_interval)],
        [
            "top-1 agreement, original",
            percent(served.top1_agreement_original),
            interval(served.top1_original_interval, parts=True),
        ],
        ["top-1 agreement, converted", percent(served.top1_agreement), interval(served.top1_interval, parts=True)],
        ["error of the original", number(served.error_original, 4), "-"],
        ["error of the converted", number(served.error_converted, 4), "-"],
        ["ratio of the errors, over sequences", number(served.ratio, 4), interval(served.ratio_interval)],
        ["ratio of the errors, over tokens", number(served.ratio, 4), interval(served.ratio_interval_tokens)],
        ["error of rounding the stored weights alone", number(served.error_weights, 4), "-"],
        ["ratio of the errors, with that one", number(served.ratio_explained, 4), "-"],
        ["greatest difference from the reference", number(served.max_abs, 4), "-"],
    ]
    return Table(["figure", "value", "95% interval"], rows, frozenset({1, 2}))


def norm_table(norms: Iterable[NormFigures], *, brief: bool = False) -> Table:
    """Write one row a norm; the place is of the element furthest apart.

    Args:
        norms: in the order of the rows.
        brief: so that names have room in a terminal: without means and distances from the truth.
    """
    place = "call:row:channel"
    head = ["", "name", "max ulp", "identical", place]
    if not brief:
        head = ["", "name", "max ulp", "mean ulp", "bound", "identical", "error", "original's", place]
    rows = []
    for norm in norms:
        found = (norm.worst_call, norm.worst_row, norm.worst_channel)
        where = "-" if None in found else ":".join(map(str, found))
        cells = {
            "": _MARK[norm.passed],
            "name": norm.name,
            "max ulp": number(norm.max_ulp),
            "mean ulp": number(norm.mean_ulp),
            "bound": number(norm.bound_ulp),
            "identical": percent(norm.bit_identical_fraction, 4),
            "error": number(norm.error_swapped),
            "original's": number(norm.error_original),
            place: where,
        }
        rows.append([cells[heading] for heading in head])
    return Table(head, rows, frozenset(range(2, len(head))))


def layer_table(layers: Iterable[LayerFigures]) -> Table:
    """Write the residual stream, one row a layer."""
    rows = [
        [
            "departs" if layer.departs else "",
            layer.name,
            number(layer.error_exact),
            number(layer.error_original),
            number(layer.error_converted),
            number(layer.ratio, 4),
            interval(layer.ratio_interval),
        ]
        for layer in layers
    ]
    head = ["", "layer", "exact", "original", "converted", "ratio", "its 95% interval"]
    return Table(head, rows, frozenset(range(2, len(head))))


def change_table(report: ParityReport, *, explained: bool, brief: bool = False) -> Table:
    """Write the tensors that differ.

    Args:
        report: what was measured.
        explained: those that leave the function as it was, or those that may not.
        brief: so that names have room in a terminal: without details and files.
    """
    changes = [] if report.tensors is None else report.tensors.changes
    rows = [
        [change.kind, change.name, number(change.error), *([] if brief else [change.detail, change.file or "-"])]
        for change in changes
        if change.explained == explained
    ]
    return Table(["kind", "tensor", "error", *([] if brief else ["detail", "file"])], rows, frozenset({2}))


def setting_table(report: ParityReport) -> Table:
    """Write the settings that differ."""
    settings = [] if report.tensors is None else report.tensors.settings
    rows = [[entry.name, _value(entry.original), _value(entry.converted)] for entry in settings]
    return Table(["setting", "original", "converted"], rows)


def _value(value: object) -> str:
    return "not set" if value is None else str(value)


def fault_table(report: ParityReport) -> Table:
    """Write the faults that were put in, and which gate saw them."""
    seen = {True: "seen", False: "NOT seen", None: "not tried"}
    rows = [
        [
            seen[fault.detected],
            fault.kind,
            fault.norm or "-",
            fault.gate or "-",
            number(fault.figure),
            number(fault.bound),
            fault.detail or "-",
        ]
        for fault in report.power.faults
    ]
    return Table(["", "fault", "norm", "gate", "figure", "bound", "remark"], rows, frozenset({4, 5}))


def pair_table(report: ParityReport) -> Table:
    """Write the folded norms with the weights that read them."""
    rows = [
        [
            _MARK[pair.passed],
            pair.norm,
            ", ".join(pair.consumers),
            number(pair.error),
            number(pair.bound),
            "-" if pair.channel is None else str(pair.channel),
            number(pair.channel_error),
            number(pair.channel_bound),
        ]
        for pair in report.pairs
    ]
    head = ["", "norm", "read by", "error", "bound", "worst channel", "its error", "its bound"]
    return Table(head, rows, frozenset(range(3, len(head))))


def divergence_table(report: ParityReport) -> Table:
    """Write where greedy continuations part."""
    found = [] if report.generation is None else report.generation.divergences
    rows = []
    for entry in found:
        words = entry.words or ("", "")
        original, converted = (
            f"{token} {word!r}" if word else str(token)
            for token, word in zip((entry.original, entry.converted), words, strict=True)
        )
        kind = "tie" if entry.tie else "no tie"
        figures = [number(entry.margin), number(entry.resolution)]
        rows.append([kind, str(entry.prompt), str(entry.position), original, converted, *figures])
    head = ["", "prompt", "after", "original", "converted", "margin", "resolution"]
    return Table(head, rows, frozenset({1, 2, 5, 6}))


def bound_table(criterion: Criterion) -> Table:
    """Write every bound of the criterion under the name that sets it."""
    return Table(
        ["bound", "value"], [[name, f"{value:g}"] for name, value in asdict(criterion).items()], frozenset({1})
    )


def environment(report: ParityReport) -> list[tuple[str, str]]:
    """Say what ran, as names with their values."""
    device = f"{report.device} ({report.device_name})" if report.device_name else report.device
    facts = [
        ("device", device),
        ("backend", report.backend),
        ("dtype", report.dtype),
        ("reference", report.reference_dtype),
    ]
    if report.processes > 1:
        facts.append(("processes", str(report.processes)))
    if report.streamed:
        facts.append(("weights", "loaded layer by layer, as they were needed"))
    return [*facts, *report.versions.items()]
