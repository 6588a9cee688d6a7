"""What a conversion did, as lines for a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING

from normswap.foldtable import reason_pattern, totals

if TYPE_CHECKING:
    from normswap.converting import Conversion

__all__ = ["outcome_lines"]


def outcome_lines(done: Conversion) -> Iterator[str]:
    """Yield what was swapped, folded and left alone, and what was not measured."""
    found = sum(decision.of_rows for decision in done.plan.decisions)
    yield f"{len(done.plan.swaps)} of {found} norms swapped; saved to {done.out}"
    for row in done.plan.rows(by_width=False):
        if row["action"] == "refuse":
            yield f"  left alone: {row['count']} x {row['pattern']} ({row['class']}): {row['reason']}"
    if done.folds is not None:
        yield from _folds(done)
    for note in done.notes:
        yield f"note: {note}"
    if done.report is None and not done.notes:
        yield "parity was not measured (--no-verify)"
    if done.quantization is not None:
        yield ""
        yield done.quantization.to_text()


def _folds(done: Conversion) -> Iterator[str]:
    assert done.folds is not None
    yield totals(done.folds, "folded")
    if done.algebra:
        worst = max(done.algebra.values())
        yield f"  before rounding, folded and original differ by at most {worst:.2g} on random rows"
    if done.report is not None:
        yield "  every stored tensor is its fold rounded once, or the original's, bit for bit"
    if done.roundings:
        some = done.roundings.values()
        yield f"  rounding to the stored dtype: {min(some):.2g} to {max(some):.2g} relative, weight by weight"
    groups: dict[tuple[str, str], int] = {}
    for fold in done.folds.refusals:
        key = fold.pattern, reason_pattern(fold.reason)
        groups[key] = groups.get(key, 0) + 1
    for (pattern, reason), count in groups.items():
        yield from textwrap.wrap(f"  gain kept: {count} x {pattern}: {reason}", 100, subsequent_indent="    ")
