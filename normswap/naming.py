"""Collapse the module names of a deep model: layers to a pattern, patterns to the towers that they belong to."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

__all__ = ["name_pattern", "spelled_patterns", "towers"]

_NUMBER = re.compile(r"(?:(?<=\.)|^)\d+(?=\.|$)")
# Where a list of layer numbers would fill the line, its middle is left out.
_LONGEST = 24

Prefix = tuple[str, ...]


def name_pattern(name: str) -> str:
    """Return a module name with every layer or expert number replaced by ``*``.

    Example:
        >>> name_pattern("model.layers.3.mlp.experts.17.norm")
        'model.layers.*.mlp.experts.*.norm'
    """
    return _NUMBER.sub("*", name)


def spelled_patterns(groups: Sequence[Sequence[str]]) -> list[str]:
    """Name groups of modules whose names differ in numbers only, so that one group can be told from the other.

    Args:
        groups: module names; all have the same `name_pattern`.

    Returns:
        One pattern a group: ``*`` where all groups have the same numbers, else the numbers themselves.

    Example:
        >>> spelled_patterns([["layers.0.norm", "layers.3.norm"], ["layers.1.norm", "layers.2.norm"]])
        ['layers.{0,3}.norm', 'layers.{1-2}.norm']
    """
    numbers = [[set(place) for place in zip(*map(_numbers, names), strict=True)] for names in groups]
    spelled = []
    for names, own in zip(groups, numbers, strict=True):
        same = [all(other[at] == place for other in numbers) for at, place in enumerate(own)]
        words = iter(["*" if alike else _ranges(place) for alike, place in zip(same, own, strict=True)])
        spelled.append(_NUMBER.sub(lambda _, words=words: next(words), names[0]))  # type: ignore[misc]
    return spelled


def _numbers(name: str) -> list[int]:
    return [int(number) for number in _NUMBER.findall(name)]


def _ranges(numbers: set[int]) -> str:
    """Write ``{0,2-93}``; a single number without braces, a long list without its middle."""
    ordered = sorted(numbers)
    if len(ordered) == 1:
        return str(ordered[0])
    runs: list[list[int]] = []
    for number in ordered:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    words = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    if len(",".join(words)) > _LONGEST:
        words = [*words[:3], "…", words[-1]]
    return f"{{{','.join(words)}}}"


def towers(patterns: Iterable[str]) -> list[str]:
    """Find the parts of a model that have a stack of layers each: encoder and decoder, vision, audio and text.

    Args:
        patterns: what `name_pattern` returns.

    Returns:
        Prefixes of names, none of which is a prefix of another; ``[""]`` where all layers are in one part.

    Example:
        >>> towers(["model.visual.blocks.*.norm", "model.text.layers.*.norm", "model.text.norm"])
        ['model.visual', 'model.text']
    """
    stacks: dict[Prefix, None] = {}
    for pattern in patterns:
        parts = pattern.split(".")
        if "*" in parts:
            # What stands before the number is the list of layers; its owner is the part.
            stacks[tuple(parts[: max(0, parts.index("*") - 1)])] = None
    return [".".join(part) for part in _split((), list(stacks))]


def _split(node: Prefix, stacks: list[Prefix]) -> list[Prefix]:
    if node in stacks or not stacks:
        return [node]
    below: dict[Prefix, list[Prefix]] = {}
    for stack in stacks:
        below.setdefault(stack[: len(node) + 1], []).append(stack)
    parts = [(child, _split(child, inside)) for child, inside in below.items()]
    if len(parts) == 1:
        inner = parts[0][1]
        return inner if len(inner) > 1 else [node]
    return [part for child, inner in parts for part in (inner if len(inner) > 1 else [child])]
