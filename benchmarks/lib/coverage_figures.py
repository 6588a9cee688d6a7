"""From what was measured on each model to the figures and the bars."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from coverage_parity import BOUND
from coverage_units import DTYPES

__all__ = ["SHARE_BAR", "Figures", "Refused", "bars", "is_row_wise", "not_row_wise", "summarise"]

SHARE_BAR = 0.995
# What the recogniser itself says of a module that is no norm of rows. A reason that is not among these counts against
# the share, whatever the class is called.
_OTHER_KINDS = (
    (r"normalises over channels", "over channels and positions"),
    (r"normalises over the batch|running_mean", "over the batch"),
    (r"normalises over \d+ dimensions", "over several dimensions"),
    (r"rows are not independent", "over several rows"),
    (r"does not normalise", "a scale, no norm"),
)


def not_row_wise(norm: dict[str, Any]) -> str:
    """Say why a refused module is no norm of rows; empty where it is one, or where that is not known."""
    if norm["contains_norms"]:
        return "made of norms that count themselves"
    return next((kind for pattern, kind in _OTHER_KINDS if re.search(pattern, norm["reason"])), "")


def is_row_wise(norm: dict[str, Any]) -> bool:
    """Whether a module counts in the share: swapped, or refused for a reason that does not say it is something else."""
    return norm["action"] == "swap" or not not_row_wise(norm)


@dataclass
class Refused:
    """Modules of one class that are refused for one reason.

    Attributes:
        cls: the class.
        reason: as the plan gives it; empty for what behaves like a norm and is in no plan.
        kind: why it is no norm of rows; empty for one that is.
        count: instances.
        types: where they are.
    """

    cls: str
    reason: str
    kind: str
    count: int = 0
    types: set[str] = field(default_factory=set)


@dataclass
class Figures:
    """Figures over all models.

    Attributes:
        known: model types and variants of them that were asked for.
        unbuilt: those that cannot be built here, with the reason.
        crashed: those that normswap failed on, with what happened.
        types: those with norms of rows.
        types_swapped: those with swapped norms.
        norms: norms of rows, instances.
        swapped: those that are swapped.
        outside: swapped instances that are out of the unit bound in some dtype, by class, with the words.
        own_code: by dtype, classes and their swapped instances whose original's code runs on every call in it, since
            its results there are those of no known order of roundings.
        silent: by dtype, the same of those whose original does not run in it.
        worst: greatest distance in units in the last place, by dtype.
        refused: what is refused, most frequent first.
        ran: models that were run forward.
        parity: those that passed.
        amiss: those that did not, with the figures.
        not_run: those with swapped norms that were not run, with the reason.
        reached: swapped norms that were called in those runs; and of those the ones whose original ran all the same.
        worst_error: greatest relative error of an output among those that passed.
        liger: types and instances that Liger-Kernel reaches, and the types that it fails on; None where absent.
        hub: types and instances that carry the Hub's mark.
        others: classes that are norms by name only, with their count.
    """

    known: int
    unbuilt: dict[str, str] = field(default_factory=dict)
    crashed: dict[str, str] = field(default_factory=dict)
    types: int = 0
    types_swapped: int = 0
    norms: int = 0
    swapped: int = 0
    outside: dict[str, tuple[int, str]] = field(default_factory=dict)
    own_code: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in DTYPES})
    silent: dict[str, dict[str, int]] = field(default_factory=lambda: {name: {} for name in DTYPES})
    worst: dict[str, float] = field(default_factory=dict)
    refused: list[Refused] = field(default_factory=list)
    ran: int = 0
    parity: int = 0
    amiss: dict[str, dict[str, Any]] = field(default_factory=dict)
    not_run: dict[str, str] = field(default_factory=dict)
    reached: tuple[int, int] = (0, 0)
    worst_error: float = 0.0
    liger: tuple[int, int, dict[str, str]] | None = None
    hub: tuple[int, int] = (0, 0)
    others: dict[str, int] = field(default_factory=dict)

    @property
    def share(self) -> float:
        """Swapped norms over norms of rows."""
        return self.swapped / self.norms if self.norms else 0.0

    @property
    def share_of_all(self) -> float:
        """Swapped norms over all modules that the plans list, GroupNorm and BatchNorm among them."""
        every = self.swapped + sum(entry.count for entry in self.refused)
        return self.swapped / every if every else 0.0


def summarise(records: Iterable[dict[str, Any]], *, liger: bool) -> Figures:
    """Sum up.

    Args:
        records: what ``coverage_model.Walk.measure`` returns, one a model.
        liger: whether Liger-Kernel was there.
    """
    records = sorted(records, key=lambda record: record["type"])
    figures = Figures(known=len(records), liger=(0, 0, {}) if liger else None)
    refused: dict[tuple[str, str, str], Refused] = {}
    for record in records:
        name = record["type"]
        if "error" in record:
            figures.unbuilt[name] = record["error"]
            continue
        if "crash" in record:
            figures.crashed[name] = record["crash"]
            continue
        rows = [norm for norm in record["norms"] if is_row_wise(norm)]
        figures.types += bool(rows)
        figures.types_swapped += any(norm["action"] == "swap" for norm in rows)
        figures.norms += sum(norm["count"] for norm in rows)
        for norm in record["norms"]:
            if norm["action"] == "swap":
                _add_swapped(figures, norm)
            else:
                entry = Refused(norm["class"], norm["reason"], not_row_wise(norm), norm["count"])
                _add_refused(refused, name, entry)
        for other in record["others"]:
            cls, count = other["class"], other["count"]
            if other["behaves"]:
                figures.norms += count
                _add_refused(refused, name, Refused(cls, "", "", count))
            else:
                figures.others[cls] = figures.others.get(cls, 0) + count
        _add_peers(figures, record, rows)
        _add_parity(figures, name, record["parity"])
    figures.refused = sorted(refused.values(), key=lambda entry: (-entry.count, entry.cls))
    return figures


def _add_refused(refused: dict[tuple[str, str, str], Refused], name: str, entry: Refused) -> None:
    held = refused.setdefault((entry.cls, entry.reason, entry.kind), Refused(entry.cls, entry.reason, entry.kind))
    held.count += entry.count
    held.types.add(name)


def _add_swapped(figures: Figures, norm: dict[str, Any]) -> None:
    count = norm["count"]
    figures.swapped += count
    for dtype, units in norm["units"].items():
        figures.worst[dtype] = max(figures.worst.get(dtype, 0.0), units["worst"])
        if units["originals"] == units["calls"]:
            classes = (figures.own_code if units["calls"] else figures.silent)[dtype]
            classes[norm["class"]] = classes.get(norm["class"], 0) + count
    failures = [words for units in norm["units"].values() for words in units["failures"]]
    if failures:
        before, _ = figures.outside.get(norm["class"], (0, ""))
        figures.outside[norm["class"]] = before + count, "; ".join(failures)


def _add_peers(figures: Figures, record: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    marked = sum(norm["count"] for norm in rows if norm["hub"] and "Norm" in norm["hub"])
    figures.hub = figures.hub[0] + bool(marked), figures.hub[1] + marked
    if figures.liger is not None:
        types, instances, failures = figures.liger
        reached = sum(norm["liger"] for norm in rows)
        if record["liger"]:
            failures[record["type"]] = record["liger"]
        figures.liger = types + bool(reached), instances + reached, failures


def _add_parity(figures: Figures, name: str, parity: dict[str, Any]) -> None:
    if "not_run" in parity:
        if parity["not_run"] != "no norm is swapped":
            figures.not_run[name] = parity["not_run"]
        return
    figures.ran += 1
    figures.reached = figures.reached[0] + parity["norms_reached"], figures.reached[1] + parity["originals"]
    if parity["passed"]:
        figures.parity += 1
        figures.worst_error = max(figures.worst_error, parity["error"])
    else:
        figures.amiss[name] = parity


def bars(figures: Figures) -> Iterator[tuple[str, bool, str]]:
    """Yield what each bar demands, whether it is met, and the figure."""
    yield (
        f"at least {SHARE_BAR:.1%} of the norms of rows are swapped",
        figures.share >= SHARE_BAR,
        f"{figures.swapped:,} of {figures.norms:,}, {figures.share:.2%}",
    )
    outside = sum(count for count, _ in figures.outside.values())
    yield (
        f"each is within the unit bound in {', '.join(DTYPES)}",
        figures.swapped > 0 and outside == 0,
        f"{figures.swapped - outside:,} of {figures.swapped:,}",
    )
    unsaid = sum(entry.count for entry in figures.refused if not entry.reason)
    yield "every other one is refused with a reason", unsaid == 0, f"{unsaid} without"
    yield "no model type makes it fail", not figures.crashed, f"{len(figures.crashed)} of {figures.known} do"
    yield (
        f"each model that runs computes the same within {BOUND:g} in float32",
        figures.ran > 0 and figures.parity == figures.ran,
        f"{figures.parity} of {figures.ran}",
    )
