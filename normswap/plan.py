"""Walk a model and decide, norm by norm, what would be done. Nothing is changed."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, Literal

from torch import nn

from normswap.errors import NothingToPatchError, UsageError
from normswap.inline import CodeNorm, find_code_norms
from normswap.naming import name_pattern, spelled_patterns
from normswap.probe import Refusal, probe, settings_key
from normswap.replica import original_class
from normswap.spec import NormSpec

__all__ = ["Decision", "Plan", "make_plan"]


@dataclass(frozen=True)
class Decision:
    """What would be done with one norm.

    Attributes:
        name: qualified module name, the first of them where a module has several.
        cls: name of its original class.
        action: ``"swap"`` or ``"refuse"``.
        reason: why it is refused; empty for a swap.
        spec: what it computes; None where that is not known.
        key: equal for norms of one class with the same settings and shapes.
        of_rows: whether it may be a norm of rows itself; a BatchNorm is none, nor is a module around other norms.
    """

    name: str
    cls: str
    action: Literal["swap", "refuse"]
    reason: str
    spec: NormSpec | None
    key: Hashable = None
    of_rows: bool = True

    @property
    def pattern(self) -> str:
        """The name with every layer or expert number replaced by ``*``."""
        return name_pattern(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as it stands in ``inspect --json``."""
        return {
            "name": self.name,
            "class": self.cls,
            "action": self.action,
            "reason": self.reason,
            "spec": None if self.spec is None else self.spec.to_dict(),
        }


@dataclass(frozen=True)
class Plan:
    """The decisions for every norm of a model, in the model's order.

    Attributes:
        decisions: one for each norm that is a module.
        functions: norms that are code and not modules; nothing is done with them.
    """

    decisions: tuple[Decision, ...]
    functions: tuple[CodeNorm, ...] = ()

    @property
    def swaps(self) -> tuple[Decision, ...]:
        """The norms that would be swapped."""
        return tuple(d for d in self.decisions if d.action == "swap")

    @property
    def refusals(self) -> tuple[Decision, ...]:
        """The norms that would be left alone."""
        return tuple(d for d in self.decisions if d.action == "refuse")

    def rows(self, *, by_width: bool = True) -> list[dict[str, Any]]:
        """Collapse the decisions to one row for each distinct (name pattern, class, spec, action, reason).

        Rows that differ in layer numbers only have them in their pattern: ``layers.{0,2-93}.norm``.

        Args:
            by_width: whether norms of different widths stand in rows of their own; else ``widths`` has all.

        Returns:
            ``{"pattern", "class", "spec", "count", "action", "reason", "of_rows", "widths"}`` each; ``spec`` is that
            of `NormSpec.to_dict` or None, for the first norm of the row.
        """
        groups: dict[tuple[Any, ...], list[Decision]] = {}
        alike: dict[str, dict[tuple[Any, ...], None]] = {}
        for d in self.decisions:
            spec = d.spec if by_width or d.spec is None else replace(d.spec, width=None)
            key = (d.pattern, d.cls, spec, d.action, d.reason)
            groups.setdefault(key, []).append(d)
            alike.setdefault(d.pattern, {})[key] = None
        patterns: dict[tuple[Any, ...], str] = {}
        for keys in alike.values():
            names = [[d.name for d in groups[key]] for key in keys]
            patterns.update(zip(keys, spelled_patterns(names), strict=True))
        return [
            {
                "pattern": patterns[key],
                "class": first.cls,
                "spec": None if first.spec is None else first.spec.to_dict(),
                "count": len(found),
                "action": first.action,
                "reason": first.reason,
                "of_rows": first.of_rows,
                "widths": sorted({d.spec.width for d in found if d.spec is not None and d.spec.width}),
            }
            for key, found in groups.items()
            for first in found[:1]
        ]

    def require_swaps(self) -> None:
        """Raise unless something would be swapped.

        Raises:
            NothingToPatchError: with the reasons of what was found and refused.
        """
        if self.swaps:
            return
        refused = [row for row in self.rows() if row["of_rows"]]
        shown = refused or self.rows()
        reasons = "; ".join(f"{row['pattern']} ({row['class']}): {row['reason']}" for row in shown[:5])
        if refused:
            count = sum(row["count"] for row in refused)
            raise NothingToPatchError(f"none of the {count} norms can be swapped, so nothing was changed: {reasons}")
        besides = [f"{len(self.decisions)} modules are no norms of rows: {reasons}"] if shown else []
        besides += [f"{len(self.functions)} are code, {self.functions[0].reason}"] if self.functions else []
        raise NothingToPatchError(
            "expected a model with at least one RMSNorm or LayerNorm, found none"
            f"{' (' + '; '.join(besides) + ')' if besides else ''}; nothing was changed"
        )


def make_plan(
    model: nn.Module,
    *,
    include: str | Iterable[str] | None = None,
    exclude: str | Iterable[str] | None = None,
) -> Plan:
    """Decide for every norm of a model whether it would be swapped, and if not, why.

    Args:
        model: any module; its parameters may be on the meta device.
        include: shell patterns (or one) of qualified module names; only these are swapped. ``*`` matches dots too.
        exclude: shell patterns (or one) of names that are left alone.

    Returns:
        The plan. A module that stands in several places is decided once.

    Raises:
        UsageError: an include pattern matches no norm.

    Warns:
        UserWarning: an exclude pattern matches no norm.
    """
    wanted, unwanted = _patterns(include), _patterns(exclude)
    aliases = _aliases(model) if wanted or unwanted else {}
    found: dict[Hashable, NormSpec | Refusal | None] = {}
    decisions, names_of, norms = [], {}, set()
    for name, module in model.named_modules():
        key = settings_key(module)
        if key not in found:
            found[key] = probe(module)
        result = found[key]
        if result is None:
            continue
        norms.add(original_class(module))
        cls = original_class(module).__name__
        names_of[name] = names = aliases.get(module, [name])
        if isinstance(result, Refusal):
            decisions.append(Decision(name, cls, "refuse", result.reason, None, key, result.of_rows))
        elif wanted and not _any_match(names, wanted):
            decisions.append(Decision(name, cls, "refuse", "not among the included names", result, key))
        elif _any_match(names, unwanted):
            decisions.append(Decision(name, cls, "refuse", "excluded by name", result, key))
        else:
            decisions.append(Decision(name, cls, "swap", "", result, key))
    _check_patterns(names_of, wanted, unwanted)
    around = {parent for decision in decisions for parent in _parents(decision.name)}
    apart = (replace(d, of_rows=False) if d.action == "refuse" and d.name in around else d for d in decisions)
    return Plan(tuple(apart), find_code_norms(model, norms))


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _patterns(given: str | Iterable[str] | None) -> Sequence[str]:
    if given is None:
        return ()
    return (given,) if isinstance(given, str) else tuple(given)


def _aliases(model: nn.Module) -> dict[nn.Module, list[str]]:
    """Return every name of every module; a shared one has several."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found.setdefault(module, []).append(name)
    return found


def _any_match(names: Sequence[str], patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


def _check_patterns(names_of: Mapping[str, Sequence[str]], wanted: Sequence[str], unwanted: Sequence[str]) -> None:
    examples = ", ".join(list(names_of)[:3])
    names = [alias for aliases in names_of.values() for alias in aliases]
    for pattern in wanted:
        if names and not _any_match(names, [pattern]):
            raise UsageError(f"include pattern {pattern!r} matches no norm; their names are like {examples}")
    for pattern in unwanted:
        if not _any_match(names, [pattern]):
            warnings.warn(f"exclude pattern {pattern!r} matches no norm", UserWarning, stacklevel=3)
