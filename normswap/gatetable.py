"""The table of gates: what each measured, and what it may be."""

from __future__ import annotations

from typing import TYPE_CHECKING

from normswap.tables import Table, one_a_token
from normswap.wording import few_sequences, interval, number, percent, severity, state_of

if TYPE_CHECKING:
    from normswap.figures import NormFigures, ParityReport

__all__ = ["gate_table"]


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
        ("tensors", _tensors_state(report), _tensor_rows(report)),
        ("folds", state_of(report, "folds"), _pair_rows(report, brief)),
        ("exact", state_of(report, "exact"), _exact_rows(report, controls)),
        ("norms", state_of(report, "norms"), _norm_rows(report)),
        ("served", _served_state(report), _served_rows(report, controls, brief)),
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


def _tensors_state(report: ParityReport) -> str:
    # A reader that was missed is told by the gate of the folds, and is a tensor that nothing explains all the same.
    unknown = report.tensors is not None and report.tensors.unexplained
    return "FAIL" if unknown and report.failures else state_of(report, "tensors", "settings")


def _tensor_rows(report: ParityReport) -> list[list[str]]:
    tensors = report.tensors
    if tensors is None:
        return []
    rows = [[tensors.summary, "", ""], ["bit for bit the same", f"{tensors.same} of {tensors.tensors}", ""]]
    if tensors.unexplained:
        rows.append(["changed, unexplained", str(len(tensors.unexplained)), "none" if report.failures else ""])
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
    how = f"{exact.dtype}, folds unrounded" if folded else f"both in {exact.dtype}"
    # Short enough that no line of a terminal's table has to leave a part of it out.
    rows = [[f"{'' if folded else 'relative '}error, {how}", number(exact.error), f"<= {exact.bound:g}"]]
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
    wide = [norm for norm in reached if norm.bound_ulp is None and norm.exact_ulp_swapped is not None]
    if wide:
        rows.append(_float32_row(report, wide))
    if len(reached) < len(report.norms):
        rows.append(["not reached by the inputs", str(len(report.norms) - len(reached)), ""])
    return rows


def _float32_row(report: ParityReport, norms: list[NormFigures]) -> list[str]:
    """Write how far the norm that is nearest to its budget is from the float64 truth."""
    budgets = [report.criterion.float32_budget * ((norm.exact_ulp_original or 0.0) + 1) for norm in norms]
    shares = [(norm.exact_ulp_swapped or 0.0) / budget for norm, budget in zip(norms, budgets, strict=True)]
    at = shares.index(max(shares))
    return ["worst units from the float64 truth", number(norms[at].exact_ulp_swapped), f"<= {number(budgets[at])}"]


def _served_state(report: ParityReport) -> str:
    state = state_of(report, "served")
    open_ = report.logits.ratio is None or not report.logits.judges
    return "note" if state == "ok" and open_ else state


def _served_rows(report: ParityReport, controls: bool, brief: bool) -> list[list[str]]:
    served, bounds = report.logits, report.criterion
    if served.ratio is None:
        return [["not measured: there is no finer reference than the original", "", ""]]
    few = few_sequences(report) if served.judges else ""
    # Where sequences are few, blocks of tokens are what is judged.
    over_tokens = bool(few) and served.ratio_interval_tokens is not None
    words = f"its 95% interval{' over tokens' if over_tokens else ''}"
    most, low = f"<= {bounds.ratio_max:g}", f"from <= {bounds.ratio_interval_low:g}"
    explained = []
    if served.ratio_explained is not None:
        # Then this one judges: what rounding the stored weights adds is no fault of theirs.
        explained = [["error, over what rounding explains", number(served.ratio_explained, 4), most]]
        most = low = ""
    if not served.judges:
        most = low = ""
    rows = [
        ["error, converted / original", number(served.ratio, 4), most],
        [words, interval(served.ratio_interval_tokens if over_tokens else served.ratio_interval), low],
        *explained,
    ]
    if few:
        rows.append([f"! the intervals rest on {few}", "", ""])
    if not served.judges:
        rows.append(["! too few numbers to judge by these ratios", "", ""])
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
        judged = served.kl_ratio_interval_tokens if over_tokens else served.kl_ratio_interval
        rows.append([words, interval(judged), low])
    if served.kl_converted is not None and not (brief and served.kl_ratio is not None):
        rows.append(
            [
                f"KL in nats a {'token' if one_a_token(report) else 'distribution'}",
                f"{number(served.kl_converted)} / {number(served.kl_original)}",
                "",
            ]
        )
    if served.top1_agreement is not None:
        top = f"{percent(served.top1_agreement)} / {percent(served.top1_agreement_original)}"
        rows.append(["top-1 as the reference", top, ""])
    return rows


def _layers_state(report: ParityReport) -> str:
    if report.departs is None:
        return "ok"
    return "FAIL" if report.failures else "note"


def _layer_rows(report: ParityReport) -> list[list[str]]:
    folded = sum(layer.folded is not None for layer in report.layers)
    compared = len(report.layers) - folded
    rows = []
    if report.departs is not None:
        found = next((layer for layer in report.layers if layer.name == report.departs), None)
        figures = [] if found is None else [("exact", found.error_exact), ("ratio", found.ratio)]
        words = ", ".join(f"{word} {number(figure)}" for word, figure in figures if figure is not None)
        rows.append(f"the first that departs is {report.departs}{' (' if words else ''}{words}{')' if words else ''}")
    elif compared:
        rows.append(f"none of {compared} departs")
    if folded:
        rows.append(f"{folded} not compared: a folded norm gives the result")
    return [[row, "", ""] for row in rows]


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
