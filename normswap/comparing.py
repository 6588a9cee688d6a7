"""Compare two checkpoints of one architecture on disk, tensor by tensor, and say what was done to one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from normswap.bytewise import RawBytes, equal_bytes
from normswap.checkpoint import Checkpoint, altered_files, hash_weights, note_on_altered
from normswap.configdiff import TIES, compare_norms, compare_settings, note_on_settings
from normswap.errors import CheckpointError
from normswap.evidence import PairFigures, SettingChange, TensorChange, TensorFigures
from normswap.foldplan import FoldPlan
from normswap.inferring import Inferred, infer_folds, prepare
from normswap.judging import Judge
from normswap.manifest import folds_of_manifest
from normswap.sides import Pairing, Side, pair_up
from normswap.source import Source
from normswap.telling import UNREAD, failures_of, held_elsewhere, summarise

__all__ = ["Comparison", "compare_checkpoints"]

_STEP = "comparing tensors"


@dataclass(frozen=True)
class Comparison:
    """Two checkpoints compared on disk.

    Attributes:
        figures: tensor by tensor.
        pairs: each folded norm and its readers, from the stored tensors alone.
        folds: the gains that were folded, of which every stored tensor is as it should be; None without.
        failures: in words; each begins with ``"tensors: "``, ``"folds: "`` or ``"norms: "`` and names the first.
        notes: what a reader should know beside.
    """

    figures: TensorFigures
    pairs: list[PairFigures] = field(default_factory=list)
    folds: FoldPlan | None = None
    failures: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def compare_checkpoints(
    original: Source,
    before: Checkpoint,
    converted: Source,
    after: Checkpoint,
    *,
    manifest: dict[str, Any] | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Comparison:
    """Compare two checkpoints of one class, whoever made the second of the first.

    Tensors of the same bytes are done with. Of the others it is found out whether they were cast, tied or folded: from
    the manifest's folds where it has some, else every norm whose gain became the identity is taken for folded, and
    every tensor is held against what that gives. Some MB of either checkpoint are in memory at a time.

    Args:
        original: the checkpoint that is right by definition.
        before: its files.
        converted: the checkpoint under test.
        after: its files.
        manifest: that of the checkpoint under test, if it has one.
        progress: called with (step, done, total).

    Returns:
        What differs, whether it leaves the function as it was but for rounding, and the folds.

    Raises:
        CheckpointError: a file cannot be read, or the manifest names a norm that the model lacks.
        ModelError: a configuration gives no model.
    """
    return _Comparing(Side(original, before), Side(converted, after), manifest, progress).run()


class _Comparing:
    def __init__(
        self,
        before: Side,
        after: Side,
        manifest: dict[str, Any] | None,
        progress: Callable[[str, int, int], None] | None,
    ) -> None:
        self.before, self.after, self.manifest, self.progress = before, after, manifest, progress

    def run(self) -> Comparison:
        pairing = pair_up(self.before, self.after)
        same = self._same(pairing)
        folds, recorded = self._folds(pairing, same)
        judge = Judge(self.before, self.after, folds, strict=recorded)
        changes = [*self._paired(judge, pairing, same), *self._unpaired(judge, pairing)]
        settings = compare_settings(self.before, self.after)
        changes += self._tied_apart(judge, settings, {change.name for change in changes})
        with RawBytes(self.before.checkpoint) as ours, RawBytes(self.after.checkpoint) as theirs:
            changes = held_elsewhere(changes, ours, theirs, self.before.checkpoint)
        changes = self._in_order(_renamed(changes, folds.refused, self.before), pairing)
        if all(change.explained for change in changes):
            settings = [one for one in settings if one.name.rpartition(".")[2] != TIES]
        altered: list[str] = []
        other_source = False
        if self.manifest is not None:
            altered = altered_files(hash_weights(self.after.checkpoint), self.manifest)
            recorded = self.manifest["source"]["files"]
            other_source = bool(recorded) and recorded != hash_weights(self.before.checkpoint)
        pairs = judge.gate.figures()
        figures = TensorFigures(
            tensors=len(self.before.checkpoint.tensors),
            same=sum(same.values()),
            changes=changes,
            settings=settings,
            altered=altered,
            **summarise(self.before.checkpoint, self.after.checkpoint, pairing, changes, settings, folds),
        )
        failures = failures_of(changes, pairs, folds.refused, self.after.checkpoint)
        if settings or self.before.source.trust_remote_code:
            failures += compare_norms(self.before, self.after)
        notes = [*note_on_settings(settings), *note_on_altered(altered), *_notes_on_unread(changes, pairing)]
        if other_source:
            notes.append("the original's weight files are not those that the manifest says it was converted from")
        return Comparison(figures, pairs, _sound(folds, pairs), failures, notes)

    def _same(self, pairing: Pairing) -> dict[str, bool]:
        """Tell which tensors under test have the very bytes of their counterparts."""
        same = {}
        with RawBytes(self.before.checkpoint) as ours, RawBytes(self.after.checkpoint) as theirs:
            for done, (key, source) in enumerate(pairing.pairs.items()):
                self._tell(done, len(pairing.pairs))
                same[key] = equal_bytes(ours, source, theirs, key)
        return same

    def _folds(self, pairing: Pairing, same: dict[str, bool]) -> tuple[Inferred, bool]:
        """Return the folds to compare with, and whether the manifest records them."""
        if self.manifest is not None and self.manifest.get("folds"):
            folds = folds_of_manifest(self.manifest)
            known = {decision.name for decision in self.before.plan.decisions}
            if unknown := sorted({fold.name for fold in folds.folds} - known):
                raise CheckpointError(
                    f"the manifest names folds of {unknown[0]}, the model has no such norm; convert it again"
                )
            return prepare(self.before, folds), True
        unchanged = {pairing.pairs[key] for key in same if same[key]}
        if len(unchanged) == len(pairing.pairs):
            return Inferred(), False
        return infer_folds(self.before, self.after, unchanged.__contains__), False

    def _paired(self, judge: Judge, pairing: Pairing, same: dict[str, bool]) -> Iterator[TensorChange]:
        for done, (key, source) in enumerate(pairing.pairs.items()):
            self._tell(done, len(pairing.pairs))
            tied = key in pairing.tied
            edit = judge.edit_of(key, source, tied)
            if edit is not None:
                change = judge.folded(key, source, edit, same[key])
            elif not same[key]:
                change = judge.changed(key, source, tied)
            elif tied:
                file = self.after.checkpoint.tensors[key].file
                change = TensorChange(key, "tied", True, f"a copy of {source}, which the original ties it to", file)
            else:
                continue
            if change is not None and not change.explained and key in self.before.unread and key in self.after.unread:
                change = replace(change, explained=True, detail=f"{change.detail}; {UNREAD}")
            if change is not None:
                yield change

    def _unpaired(self, judge: Judge, pairing: Pairing) -> Iterator[TensorChange]:
        theirs = self.after.checkpoint.tensors
        for key, holder in pairing.left_out.items():
            if judge.equal(key, holder):
                yield TensorChange(key, "tied", True, f"left out; it is tied to {holder}, which equals it", None, 0.0)
            else:
                yield TensorChange(key, "tied", False, f"left out and tied to {holder}, which has other values")
        for key in (*pairing.missing, *pairing.unfilled):
            yield TensorChange(key, "missing", False, "is missing")
        for key in judge.lacking():
            yield TensorChange(key, "missing", False, "is missing: the fold gives the head a weight of its own")
        for key in pairing.extra:
            yield TensorChange(key, "extra", False, "is not of the original", theirs[key].file)
        for key in pairing.unread:
            kind, file = ("extra", theirs[key].file) if key in theirs else ("missing", None)
            yield TensorChange(key, kind, True, UNREAD, file)

    def _tied_apart(self, judge: Judge, settings: list[SettingChange], known: set[str]) -> Iterator[TensorChange]:
        """Find weights that the configuration under test ties although they are stored with other values."""
        flags = any(one.name.rpartition(".")[2] == TIES for one in settings)
        if not flags and not known:
            return
        for name, main in self.after.stored.twice.items():
            if name in self.before.stored.twice:
                continue
            (key, *_), (holder, *_) = self.after.holders(name), self.after.holders(main)
            if not judge.alike(key, holder):
                told = f"is stored with other values than {holder}, which config.json ties it to ({TIES})"
                yield TensorChange(key, "tied", False, told, self.after.checkpoint.tensors[key].file)

    def _in_order(self, changes: list[TensorChange], pairing: Pairing) -> list[TensorChange]:
        places = {key: number for number, key in enumerate(self.before.checkpoint.tensors)}
        last = len(places)
        return sorted(changes, key=lambda one: places.get(pairing.pairs.get(one.name, one.name), last))

    def _tell(self, done: int, total: int) -> None:
        if self.progress is not None:
            self.progress(_STEP, done, total)


def _renamed(changes: list[TensorChange], refused: dict[str, str], before: Side) -> list[TensorChange]:
    """Say of a gain that became the identity, and was not folded, that it did."""
    if not refused:
        return changes
    reasons = {}
    for decision in before.plan.decisions:
        if decision.name in refused and decision.spec is not None:
            for key in before.holders(f"{decision.name}.{decision.spec.gain_name}".removeprefix(".")):
                reasons[key] = f"became the identity: {refused[decision.name]}"
    return [replace(one, detail=reasons[one.name]) if one.name in reasons else one for one in changes]


def _sound(folds: Inferred, pairs: list[PairFigures]) -> FoldPlan | None:
    if folds.work is None:
        return None
    wrong = {pair.norm for pair in pairs if not pair.passed}
    plan = FoldPlan(tuple(fold for fold in folds.work.plan.decisions if fold.name not in wrong))
    return plan if plan.folds else None


def _notes_on_unread(changes: list[TensorChange], pairing: Pairing) -> list[str]:
    alone = pairing.unread
    other = [one.name for one in changes if one.explained and UNREAD in one.detail and one.name not in alone]
    told = ((alone, "only one of the two holds"), (other, "the two differ in"))
    return [f"{words} {_some(names)}, which the class does not load" for names, words in told if names]


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
