"""The decisions about gains as text for a terminal: which weights take which gains, and what keeps its own."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from normswap.foldplan import Fold, FoldPlan
from normswap.naming import name_pattern, spelled_patterns

__all__ = ["reason_pattern", "render_folds", "totals"]

_WIDTH = 100
# Action, name pattern and words.
_Key = tuple[str, str, str]
_BIAS = {"none": "", "move": "; its bias goes into theirs", "keep": "; its bias stays, divided by the gain"}


def render_folds(folds: FoldPlan) -> list[str]:
    """Write a line for each kind of norm: what its gain would be folded into, or why it stays.

    Norms whose names differ in numbers only, and that have the same readers or the same reason, stand together.

    Args:
        folds: the decisions for a model.

    Returns:
        Lines of at most 100 columns where names allow it.
    """
    groups: dict[_Key, list[str]] = {}
    for fold in folds.decisions:
        groups.setdefault((fold.action, fold.pattern, _words(fold)), []).append(fold.name)
    alike: dict[str, list[_Key]] = {}
    for key in groups:
        alike.setdefault(key[1], []).append(key)
    spelled: dict[_Key, str] = {}
    for keys in alike.values():
        spelled.update(zip(keys, spelled_patterns([groups[key] for key in keys]), strict=True))
    lines = []
    for action, heading in (("fold", "gains to fold"), ("refuse", "gains that stay")):
        some = [key for key in groups if key[0] == action]
        lines += [heading] if some else []
        for key in some:
            lines += [f"  {spelled[key]}  ({len(groups[key]):,})", *_wrapped(key[2])]
        lines += [""] if some else []
    return [*lines, totals(folds, "to fold")]


def totals(folds: FoldPlan, done: str) -> str:
    """Say how many gains of how many go into how many weights."""
    weights = len({name for fold in folds.folds for name in fold.parameters})
    some, every = len(folds.folds), len(folds.decisions)
    gains, taken = "gain" if every == 1 else "gains", "weight" if weights == 1 else "weights"
    return f"{some:,} of {every:,} {gains} {done} into {weights:,} {taken}"


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
