"""The decisions about gains as text for a terminal: which weights take which gains, and what keeps its own."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from normswap.foldplan import Fold, FoldPlan
from normswap.naming import name_pattern, spelled_patterns

__all__ = ["reason_pattern", "render_folds"]

_WIDTH = 100
_BIAS = {"none": "", "move": "; its bias goes into theirs", "keep": "; its bias stays, divided by the gain"}


def render_folds(folds: FoldPlan) -> list[str]:
    """Write a line for each kind of norm: what its gain would be folded into, or why it stays.

    Norms whose names differ in numbers only, and that have the same readers or the same reason, stand together.

    Args:
        folds: the decisions for a model.

    Returns:
        Lines of at most 100 columns where names allow it.
    """
    lines = [*_kinds("gains to fold", folds.folds), *_kinds("gains that stay", folds.refusals)]
    total, done = len(folds.decisions), len(folds.folds)
    weights = {name for fold in folds.folds for name in fold.parameters}
    lines.append(f"{done:,} of {total:,} gains to fold into {len(weights):,} weights")
    return lines


def _kinds(heading: str, some: Sequence[Fold]) -> list[str]:
    groups: dict[tuple[str, str], list[str]] = {}
    for fold in some:
        groups.setdefault((fold.pattern, _words(fold)), []).append(fold.name)
    alike: dict[str, list[tuple[str, str]]] = {}
    for key in groups:
        alike.setdefault(key[0], []).append(key)
    spelled: dict[tuple[str, str], str] = {}
    for keys in alike.values():
        spelled.update(zip(keys, spelled_patterns([groups[key] for key in keys]), strict=True))
    lines = [heading] if groups else []
    for key, names in groups.items():
        lines.append(f"  {spelled[key]}  ({len(names):,})")
        lines += _wrapped(key[1])
    return [*lines, ""] if lines else []


def _words(fold: Fold) -> str:
    if fold.action == "refuse":
        return reason_pattern(fold.reason)
    untied = "; the head is untied" if fold.untie else ""
    return f"into {_patterns(fold.parameters)}{_BIAS[fold.bias]}{untied}"


def _patterns(names: Iterable[str]) -> str:
    return ", ".join(dict.fromkeys(name_pattern(name) for name in names))


def reason_pattern(text: str) -> str:
    """Replace the layer numbers of the names in a sentence, so that equal reasons of many layers are one."""
    return " ".join(name_pattern(word) if "." in word.strip(".;:,") else word for word in text.split(" "))


def _wrapped(text: str) -> list[str]:
    margin = " " * 6
    return textwrap.wrap(text, _WIDTH, initial_indent=margin, subsequent_indent=margin, break_on_hyphens=False)
