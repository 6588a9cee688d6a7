"""Two compared checkpoints in a few words: the summary, what the files are like, and what fails."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

from normswap.bytewise import RawBytes
from normswap.evidence import PairFigures, SettingChange, TensorChange
from normswap.inferring import Inferred
from normswap.recognising import SHORT
from normswap.rowpairs import is_floating
from normswap.shards import Checkpoint
from normswap.sides import Pairing

__all__ = ["UNREAD", "failures_of", "held_elsewhere", "summarise", "told_as_zeros"]

UNREAD = "the class does not load it"
"""What is told of a stored tensor that is read by nothing here."""

# Tensors that are named, and those that are told one by one.
_NAMED, _TOLD = 3, 5
# Tensors that are looked for under other names, and numbers that one of them may have unless it changed too.
_SOUGHT, _SMALL = 256, 1 << 20
_FORMATS = {"safetensors": "safetensors", "pickle": ".bin"}


def held_elsewhere(
    changes: list[TensorChange], ours: RawBytes, theirs: RawBytes, original: Checkpoint
) -> list[TensorChange]:
    """Say of tensors with an unknown change whose values they hold, where these are another tensor's.

    Args:
        changes: what was found.
        ours: bytes of the original.
        theirs: bytes of the checkpoint under test.
        original: the original.
    """
    unknown = [one for one in changes if one.kind == "changed" and not one.explained and one.file is not None]
    if not unknown or len(unknown) > _SOUGHT:
        return changes
    names = {one.name for one in unknown}
    forms = {(theirs.entry(name).dtype, theirs.entry(name).shape) for name in names}
    found: dict[bytes, list[str]] = {}
    for key, entry in original.tensors.items():
        if (entry.dtype, entry.shape) in forms and (key in names or math.prod(entry.shape) <= _SMALL):
            found.setdefault(ours.digest(key), []).append(key)
    told = []
    for one in changes:
        # Several tensors of the same values say nothing about which of them was taken.
        holders = found.get(theirs.digest(one.name), []) if one.name in names else []
        if len(holders) == 1 and holders[0] != one.name:
            one = replace(one, detail=f"holds the values of {holders[0]}")
        told.append(one)
    return told


def summarise(
    before: Checkpoint,
    after: Checkpoint,
    pairing: Pairing,
    changes: list[TensorChange],
    settings: list[SettingChange],
    folds: Inferred,
) -> dict[str, Any]:
    """Return ``summary``, ``kind`` and ``files`` of `normswap.evidence.TensorFigures`."""
    files = _files(before, after, pairing)
    words: dict[str, list[str]] = {}
    if folded := _folded(changes, folds):
        words["folded"] = [folded]
    if cast := _cast(before, after, pairing, changes):
        words["cast"] = [cast]
    if signs := [one for one in changes if one.kind == "zeros"]:
        words["zeros"] = [told_as_zeros(len(signs))]
    unknown = [one for one in changes if not one.explained]
    lost = [one.name for one in unknown if one.kind == "missing"]
    more = [one.name for one in unknown if one.kind == "extra"]
    rest = [one.name for one in unknown if one.kind not in ("missing", "extra")]
    if unknown:
        words["unknown"] = [
            *([f"unknown change in {_count(len(rest), 'tensor')}"] if rest else []),
            *([f"{_count(len(lost), 'tensor')} missing"] if lost else []),
            *([f"{_count(len(more), 'tensor')} too many"] if more else []),
        ]
    beside = [one for one in changes if one.explained and (one.kind == "tied" or UNREAD in one.detail)]
    if not words and (files or beside):
        tied, unread = ([o.name for o in beside if (o.kind == "tied") is kind] for kind in (True, False))
        words["rearranged"] = [
            *([f"the same tensors in {files}" if files[0].isdigit() else files] if files else []),
            *([f"tied tensors written out or left out: {_names(tied)}"] if tied else []),
            *(
                [f"{_count(len(unread), 'tensor')} that the class does not load differ{'s' * (len(unread) == 1)}"]
                * bool(unread)
            ),
        ]
    if not words:
        words["identical"] = ["identical tensors" if settings else "identical"]
    told = [word for group in words.values() for word in group]
    if settings:
        told.append(f"other settings: {_names([one.name for one in settings])}")
    return {"summary": ", ".join(told), "kind": "+".join(words), "files": files}


def told_as_zeros(count: int) -> str:
    """Say of how many tensors only zeros have another sign."""
    return f"equal but for the sign of zeros in {_count(count, 'tensor')}"


def _folded(changes: list[TensorChange], folds: Inferred) -> str:
    """Count the gains that are in at least one weight, and these weights."""
    if folds.work is None:
        return ""
    keys = {one.name for one in changes if one.kind == "folded"}
    edits = [one for one in folds.work.edits.weights if one.key in keys]
    norms = {norm for one in edits for norm in folds.work.edits.norms[one.key]}
    weights = {one.parameter for one in edits}
    return f"{_count(len(norms), 'gain')} folded into {_count(len(weights), 'linear')}" if norms else ""


def _files(before: Checkpoint, after: Checkpoint, pairing: Pairing) -> str | None:
    """Say how weight files differ: their format, their number, what lies in which, and names of tensors."""
    told = []
    if len(before.files) != len(after.files):
        told.append(f"{_count(len(after.files), 'file')} instead of {len(before.files)}")
    if before.format != after.format:
        told.append(f"{_FORMATS[after.format]} instead of {_FORMATS[before.format]}")
    places = ({}, {})  # type: tuple[dict[str, set[str]], dict[str, set[str]]]
    for key, source in pairing.pairs.items():
        if key not in pairing.tied:
            places[0].setdefault(before.tensors[source].file, set()).add(source)
            places[1].setdefault(after.tensors[key].file, set()).add(source)
    if not told and sorted(map(sorted, places[0].values())) != sorted(map(sorted, places[1].values())):
        told.append("tensors in other files of the same number")
    if pairing.renamed:
        told.append(f"{_count(len(pairing.renamed), 'tensor')} renamed")
    return ", ".join(told) or None


def _cast(before: Checkpoint, after: Checkpoint, pairing: Pairing, changes: list[TensorChange]) -> str:
    cast = [
        one.name for one in changes if one.explained and one.kind in ("dtype", "folded") and one.name in after.tensors
    ]
    to = Counter(
        after.tensors[name].dtype
        for name in cast
        if name in pairing.pairs and after.tensors[name].dtype != before.tensors[pairing.pairs[name]].dtype
    )
    if not to:
        narrow = [one for one in changes if one.explained and one.kind == "dtype"]
        return f"{_count(len(narrow), 'tensor')} {narrow[0].detail}" if narrow else ""
    floating = [
        entry.dtype for key, entry in after.tensors.items() if is_floating(entry.dtype) and key in pairing.pairs
    ]
    if len(to) == 1 and floating.count(*to) == len(floating):
        return f"cast to {SHORT.get(*to, *to)}"
    return "; ".join(f"{_count(count, 'tensor')} cast to {SHORT.get(name, name)}" for name, count in to.items())


def failures_of(
    changes: list[TensorChange], pairs: list[PairFigures], refused: dict[str, str], after: Checkpoint
) -> list[str]:
    """Say what changes the function, in few lines: faults of folds first, then those of tensors.

    Args:
        changes: what was found.
        pairs: the folded norms.
        refused: norms whose gain became the identity without a fold, with the reason.
        after: the checkpoint under test.
    """
    unknown = [one for one in changes if not one.explained]
    lines = [f"folds: {name}: its gain became the identity: {reason}" for name, reason in refused.items()]
    unknown = [one for one in unknown if not one.detail.startswith("became the identity: ")]
    folded = [one for one in unknown if " was folded" in one.detail]
    lines += _lines("folds", folded, after)
    named = {norm for one in folded for norm in (pair.norm for pair in pairs) if norm in one.detail}
    lines += [
        f"folds: {pair.norm}: its readers are {pair.error:.2g} off on random rows, {pair.bound:.2g} is what rounding "
        f"once explains; channel {pair.channel} alone is {pair.channel_error or 0.0:.2g} off"
        for pair in pairs
        if not pair.passed and pair.norm not in named
    ][:_NAMED]
    return lines + _lines("tensors", [one for one in unknown if one not in folded], after)


def _lines(gate: str, unknown: list[TensorChange], after: Checkpoint) -> list[str]:
    if not unknown:
        return []
    files = {one.file for one in unknown}
    names = {one.name for one in unknown}
    if len(files) == 1 and len(after.files) > 1 and len(names) > 1 and (file := files.pop()) is not None:
        held = {key for key, entry in after.tensors.items() if entry.file == file}
        if held == names:
            return [f"{gate}: every tensor of {file} differs: is it of another checkpoint?"]
    told = [f"{gate}: {one.name} {one.detail}" for one in unknown]
    if len(told) <= _TOLD:
        return told
    return [f"{gate}: unknown change in {len(told)} tensors: {_names([o.name for o in unknown])}", *told[:_NAMED]]


def _names(names: list[str]) -> str:
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
