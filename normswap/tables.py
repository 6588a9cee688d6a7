"""A parity report as tables of words: what the terminal, the page and the model card set in their own ways."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from normswap.wording import interval, number, percent

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


def token_table(report: ParityReport) -> Table:
    """Write what is measured on next-token distributions and outputs, each with its interval."""
    served = report.logits
    rows = [
        ["KL(reference, original), nats a token", number(served.kl_original, 4), interval(served.kl_original_interval)],
        ["KL(reference, converted), nats a token", number(served.kl_converted, 4), interval(served.kl_interval)],
        ["root of their ratio, over sequences", number(served.kl_ratio, 4), interval(served.kl_ratio_interval)],
        ["root of their ratio, over tokens", number(served.kl_ratio, 4), interval(served.kl_ratio_interval_tokens)],
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
