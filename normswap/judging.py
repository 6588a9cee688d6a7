"""Hold one stored tensor against what is expected of it, and say what was done to it."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import cached_property, partial

import torch

from normswap.bits import FLOATS
from normswap.edits import Edits
from normswap.evidence import TensorChange
from normswap.foldgate import FoldGate
from normswap.foldplan import FoldPlan
from normswap.gaps import Gap
from normswap.headers import Entry
from normswap.inferring import Inferred, prepare
from normswap.narrowing import round_once
from normswap.recognising import SHORT, Rows, cast_of, centred, describe, narrowed, nonfinite, scaled, told_signs
from normswap.rowedits import TensorEdit
from normswap.rowpairs import RowPairs, cast_reader, is_floating
from normswap.sides import Side

__all__ = ["Judge"]

# Of the norms that a tensor was changed for.
_NAMED = 3
# Float32 sums in another order: their error grows with the root of their number.
_SUMMED = 4 * 2.0**-24


@dataclass
class Judge:
    """Decides about single tensors of the checkpoint under test.

    Attributes:
        before: the original.
        after: the checkpoint under test.
        folds: how the original's tensors change by folds.
        strict: whether folded tensors have to be rounded once, bit for bit.
    """

    before: Side
    after: Side
    folds: Inferred
    strict: bool = False

    def __post_init__(self) -> None:
        self._rows = RowPairs(self.before.checkpoint, self.after.checkpoint)
        work = self.folds.work
        self.edits: Edits | None = None if work is None else work.edits
        self.gate = FoldGate(FoldPlan(()) if work is None else work.plan)

    def edit_of(self, key: str, source: str, tied: bool) -> TensorEdit | None:
        """Return how folds change a tensor.

        Args:
            key: of the checkpoint under test.
            source: of the original.
            tied: whether the original stores it under another name only.
        """
        return None if self.edits is None else _edit_of(self.edits, key, source, tied)

    def lacking(self) -> list[str]:
        """Name the tensors that folds add and the checkpoint under test lacks."""
        return (
            [] if self.edits is None else [key for key in self.edits.added if key not in self.after.checkpoint.tensors]
        )

    def folded(self, key: str, source: str, edit: TensorEdit, same: bool) -> TensorChange | None:
        """Hold a tensor that folds change against what they give.

        Args:
            key: of the checkpoint under test.
            source: of the original.
            edit: how it changes.
            same: whether both have the same bytes.

        Returns:
            What was found; None where it is the original's, and is to be.
        """
        one, other = self._entry(self.before, source), self._entry(self.after, key)
        norms = list(edit.norms)
        if one.shape != other.shape or not is_floating(other.dtype):
            return self._fault(key, "shape" if one.shape != other.shape else "dtype", norms, self._forms(source, key))
        gap = Gap()
        for start, old, got in self._rows.rows(source, key):
            new = edit.apply(old, start)
            off = gap.add(new, got, start, self._slack(edit, old, new, got.dtype))
            self.gate.add(edit, old, new, got, off, start)
        self.gate.finish()
        if same and gap.exact:
            return None
        casts = one.dtype != other.dtype
        told = f"what folding {_named(norms)} gives"
        if casts:
            told += f", cast to {SHORT.get(other.dtype, other.dtype)}"
            gap = self._nearest(key, source, edit, gap)
        if gap.exact or (gap.within and (casts or not self.strict)):
            if not gap.exact:
                told += f"; {gap.off} of {gap.values} values are {_units(gap.units)} off, rounded in another way"
            elif gap.signs:
                told += f"; {told_signs(gap)}"
            return TensorChange(key, "folded", True, told, other.file, gap.error)
        return self._misfolded(key, source, norms, gap, same)

    def changed(self, key: str, source: str, tied: bool) -> TensorChange:
        """Say how a tensor differs from the original's that no fold changes."""
        one, other = self._entry(self.before, source), self._entry(self.after, key)
        tell = partial(TensorChange, key, file=other.file)
        copied = f", which {source} of the original is tied to" if tied else ""
        if one.shape != other.shape:
            return tell(kind="shape", explained=False, detail=f"is {self._forms(source, key)}")
        if not is_floating(one.dtype) or not is_floating(other.dtype):
            if one.dtype == other.dtype:
                return tell(kind="changed", explained=False, detail="differs")
            return tell(kind="dtype", explained=False, detail=f"is {self._forms(source, key)}")
        rows = partial(self._rows.rows, source, key)
        if bad := nonfinite(rows):
            return tell(
                kind="nonfinite", explained=False, detail=f"holds {bad} NaN or infinite value{'s' if bad > 1 else ''}"
            )
        gap = cast_of(rows)
        if one.dtype == other.dtype and gap.exact and gap.signs:
            return tell(kind="zeros", explained=True, detail=f"{told_signs(gap)}{copied}", error=0.0)
        if one.dtype != other.dtype and gap.exact:
            detail = f"{SHORT.get(one.dtype, one.dtype)} cast to {SHORT.get(other.dtype, other.dtype)}{copied}"
            detail += f"; {told_signs(gap)}" if gap.signs else ""
            return tell(kind="dtype", explained=True, detail=detail, error=gap.error)
        if one.dtype == other.dtype and one.dtype in ("F32", "F64") and (narrow := narrowed(rows)):
            name = str(narrow).removeprefix("torch.")
            detail = f"rounded to {name}, stored as {SHORT.get(other.dtype, other.dtype)}{copied}"
            return tell(kind="dtype", explained=True, detail=detail, error=gap.error)
        return tell(kind="changed", explained=False, detail=self._unknown(rows, gap), error=gap.error)

    def equal(self, one: str, other: str) -> bool:
        """Whether a tensor of the original and one under test have the same values, after a cast."""
        first, second = self._entry(self.before, one), self._entry(self.after, other)
        if first.shape != second.shape or not is_floating(first.dtype) or not is_floating(second.dtype):
            return False
        return cast_of(partial(self._rows.rows, one, other)).exact

    def alike(self, one: str, other: str) -> bool:
        """Whether two tensors under test have the same values."""
        first, second = self._entry(self.after, one), self._entry(self.after, other)
        if (first.dtype, first.shape) != (second.dtype, second.shape) or not is_floating(first.dtype):
            return False
        pairs = zip(self._rows.converted(one), self._rows.converted(other), strict=True)
        return all(torch.equal(mine, its) for mine, its in pairs)

    def _unknown(self, rows: Rows, gap: Gap) -> str:
        if along := centred(rows):
            one, of = ("row", "rows") if along == "rows" else ("column", "columns")
            effect = "changes an RMSNorm model" if self._has_rms else "may be made up for in a LayerNorm model"
            return f"has each {one}'s mean removed: its {of} were centred, which {effect}"
        if (factor := scaled(rows)) is not None:
            return f"is the original's times {factor:.4g}"
        return f"differs {describe(gap)}"

    @cached_property
    def _has_rms(self) -> bool:
        return any(d.spec is not None and d.spec.kind == "rms" for d in self.before.plan.decisions)

    @cached_property
    def _cast_edits(self) -> dict[str, Edits | None]:
        return {}

    def _nearest(self, key: str, source: str, edit: TensorEdit, gap: Gap) -> Gap:
        """Return the nearest of three ways: rounded once, folded and then cast, cast and then folded."""
        for way in (self._folded_first, self._cast_first):
            if gap.within:
                break
            other = way(key, source, edit)
            gap = other if other.beyond < gap.beyond else gap
        return gap

    def _folded_first(self, key: str, source: str, edit: TensorEdit) -> Gap:
        gap = Gap()
        for start, old, got in self._rows.rows(source, key):
            stored = round_once(edit.apply(old, start), old.dtype)
            # A unit of the dtype that was folded in may be many of the one that is stored.
            gap.add(stored, got, start, torch.finfo(old.dtype).eps * stored.double().abs())
        return gap

    def _cast_first(self, key: str, source: str, _edit: TensorEdit) -> Gap:
        name = self._entry(self.after, key).dtype
        dtype, gap = FLOATS[name], Gap()
        edits = self._edits_after_cast(name)
        edit = None if edits is None else _edit_of(edits, key, source, key not in self.before.checkpoint.tensors)
        if edit is None:
            gap.beyond = sys.maxsize
            return gap
        for start, old, got in self._rows.rows(source, key):
            rounded = round_once(old, dtype)
            new = edit.apply(rounded, start)
            gap.add(new, got, start, self._slack(edit, rounded, new, got.dtype))
        return gap

    def _edits_after_cast(self, name: str) -> Edits | None:
        if name not in self._cast_edits and self.folds.work is not None:
            read = cast_reader(self.before.checkpoint, FLOATS[name])
            work = prepare(self.before, self.folds.work.plan, read=read).work
            self._cast_edits[name] = None if work is None else work.edits
        return self._cast_edits[name]

    def _misfolded(self, key: str, source: str, norms: list[str], gap: Gap, same: bool) -> TensorChange:
        if same or self.equal(source, key):
            return self._fault(key, "changed", norms, "was not scaled: it is the original's", gap.error)
        if bad := nonfinite(partial(self._rows.rows, source, key)):
            return self._fault(
                key, "nonfinite", norms, f"holds {bad} NaN or infinite value{'s' if bad > 1 else ''}", gap.error
            )
        if gap.within:
            told = f"is not rounded once: {gap.off} of {gap.values} values are {_units(gap.units)} off"
        else:
            told = f"is not what folding gives {describe(gap)}"
        return self._fault(key, "changed", norms, told, gap.error)

    def _fault(self, key: str, kind: str, norms: list[str], told: str, error: float | None = None) -> TensorChange:
        self.gate.failed.update(norms)
        entry = self._entry(self.after, key)
        return TensorChange(key, kind, False, f"{told}, though {_named(norms)} was folded", entry.file, error)

    def _slack(self, edit: TensorEdit, old: torch.Tensor, new: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return how far a bias that takes another in may be off: each of three roundings, and the sum's own."""
        if self.strict or not any(put.add for put in edit.puts):
            return None
        wide = old.double()
        moved = new.double() - wide
        width = max(1, *(len(self._gains(norm)) for norm in edit.norms))
        sums = _SUMMED * width**0.5 * float(moved.square().mean().sqrt())
        return torch.finfo(dtype).eps * (wide.abs() + moved.abs() + new.abs()) + sums

    def _gains(self, norm: str) -> range:
        spec = self.gate.plan.by_name()[norm].spec
        return range((spec.width if spec is not None else None) or 1)

    def _entry(self, side: Side, key: str) -> Entry:
        return side.checkpoint.tensors[key]

    def _forms(self, source: str, key: str) -> str:
        one, other = self._entry(self.before, source), self._entry(self.after, key)
        return f"{other.dtype} {list(other.shape)}, the original's {one.dtype} {list(one.shape)}"


def _edit_of(edits: Edits, key: str, source: str, tied: bool) -> TensorEdit | None:
    added = edits.added.get(key)
    found = added.edit if added is not None else None if tied else edits.edits.get(source)
    return found if isinstance(found, TensorEdit) else None


def _named(norms: list[str]) -> str:
    more = f" and {len(norms) - _NAMED} more" if len(norms) > _NAMED else ""
    return ", ".join(norms[:_NAMED]) + more


def _units(count: int) -> str:
    return f"{count} unit{'s' if count > 1 else ''} in the last place"
