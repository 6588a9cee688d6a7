"""A parity report as tables of words: what the terminal, the page and the model card set in their own ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from normswap.wording import interval, number, percent

if TYPE_CHECKING:
    from normswap.evidence import Fault, LayerFigures
    from normswap.figures import Criterion, NormFigures, ParityReport

__all__ = [
    "Table",
    "bound_table",
    "change_table",
    "divergence_table",
    "environment",
    "fault_table",
    "layer_table",
    "norm_table",
    "one_a_token",
    "pair_table",
    "setting_table",
    "token_table",
]

_MARK = {True: "ok", False: "FAIL", None: "-"}
# By the names that `--bound NAME=VALUE` takes.
_BOUNDS = {
    "exact_bound": "exact: greatest relative RMS difference",
    "control_scale": "exact: what the negative control multiplies every other channel of a gain by",
    "ratio_interval_low": "served: where the intervals of the two ratios may begin at most",
    "ratio_max": "served: greatest ratio of the errors, and root of the ratio of KL",
    "max_ulp": "norms: units in the last place",
    "max_ulp_rounded_twice": "norms: the same where the original rounds twice",
    "float32_budget": "norms in float32: error from the float64 truth, in errors of the original, plus one unit",
    "identical_bf16": "norms: least share of bit-identical elements in bfloat16",
    "identical_fp16": "norms: the same in float16",
    "chance": "norms: differing elements are laid to chance where it gives as many at least this often",
    "min_sequences": "served: sequences that the intervals need",
    "min_outputs": "served: numbers that the ratios need",
    "bootstrap": "served: resamplings behind an interval",
}


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


def token_table(report: ParityReport) -> Table:
    """Write what was measured on next-token distributions and outputs, each figure with its interval."""
    served, blocks = report.logits, "blocks of tokens"
    tokens = one_a_token(report)
    each = "nats a token" if tokens else "nats a distribution"
    measured: list[tuple[str, float | None, tuple[float, float] | None]] = [
        (f"KL(reference, original), {each}", served.kl_original, served.kl_original_interval),
        (f"KL(reference, converted), {each}", served.kl_converted, served.kl_interval),
        ("root of KL, converted / original, over sequences", served.kl_ratio, served.kl_ratio_interval),
        (f"root of KL, converted / original, over {blocks}", served.kl_ratio, served.kl_ratio_interval_tokens),
        ("top-1 as the reference, original", served.top1_agreement_original, served.top1_original_interval),
        ("top-1 as the reference, converted", served.top1_agreement, served.top1_interval),
        ("error, original", served.error_original, None),
        ("error, converted", served.error_converted, None),
        ("error, converted / original, over sequences", served.ratio, served.ratio_interval),
        (f"error, converted / original, over {blocks}", served.ratio, served.ratio_interval_tokens),
        ("error of rounding the stored weights alone", served.error_weights, None),
        ("error, over what rounding explains", served.ratio_explained, None),
        ("greatest absolute difference from the reference", served.max_abs, None),
    ]
    rows = []
    for words, figure, ends in measured:
        share = words.startswith("top-1")
        # Of one figure two intervals are told; where one of them was not taken, its row says nothing new.
        if figure is None or (" over " in words and ends is None) or (blocks in words and not tokens):
            continue
        rows.append([words, percent(figure) if share else number(figure, 4), interval(ends, parts=share)])
    return Table(["figure", "value", "95% interval"], rows, frozenset({1, 2}))


def one_a_token(report: ParityReport) -> bool:
    """Whether the outputs are one for each token, and not one for each image or sentence."""
    return len(report.output.get("shape", [])) != 2


def norm_table(norms: Iterable[NormFigures], *, brief: bool = False) -> Table:
    """Write one row a norm, units being those in the last place; the place is of the element furthest apart.

    Args:
        norms: in the order of the rows.
        brief: so that names have room in a terminal: without means and distances from the truth.
    """
    place = "call:row:channel"
    head = ["", "name", "most units", "bit-identical", place]
    if not brief:
        head = ["", "name", "most units", "mean units", "bound", "bit-identical", "error", "original's", place]
    rows = []
    for norm in norms:
        found = (norm.worst_call, norm.worst_row, norm.worst_channel)
        where = "-" if None in found else ":".join(map(str, found))
        cells = {
            "": _MARK[norm.passed],
            "name": norm.name,
            "most units": number(norm.max_ulp),
            "mean units": number(norm.mean_ulp),
            "bound": number(norm.bound_ulp),
            "bit-identical": percent(norm.bit_identical_fraction, 4),
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
            "departs" if layer.departs else "folded" if layer.folded is not None else "",
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
            *_fault_figures(fault),
            fault.detail or "-",
        ]
        for fault in report.power.faults
    ]
    return Table(["", "fault", "norm", "gate", "figure", "bound", "remark"], rows, frozenset({4, 5}))


def _fault_figures(fault: Fault) -> tuple[str, str]:
    """Write what the gate measured, and its bound: that of the norms is a share where units alone do not tell."""
    if fault.gate == "norms" and fault.bound is not None and fault.bound < 1:
        return percent(fault.figure, 4), percent(fault.bound, 4)
    return number(fault.figure), number(fault.bound)


def pair_table(report: ParityReport, *, brief: bool = False) -> Table:
    """Write the folded norms with the weights that read them, or with their number where it is to be brief."""
    rows = [
        [
            _MARK[pair.passed],
            pair.norm,
            str(len(pair.consumers)) if brief else ", ".join(pair.consumers),
            number(pair.error),
            number(pair.bound),
            "-" if pair.channel is None else str(pair.channel),
            number(pair.channel_error),
            number(pair.channel_bound),
        ]
        for pair in report.pairs
    ]
    read = "readers" if brief else "read by"
    head = ["", "norm", read, "error", "bound", "worst channel", "its error", "its bound"]
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
    """Write every bound of the criterion under the name that sets it, and what it bounds."""
    rows = [[name, f"{value:g}", _BOUNDS[name]] for name, value in asdict(criterion).items()]
    return Table(["bound", "value", "of"], rows, frozenset({1}))


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
