"""Hold a folded checkpoint against its original, tensor by tensor: is it what folding gives, and nothing else?"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from normswap.checkpoint import Checkpoint
from normswap.edits import Edits
from normswap.layout import FLOATS
from normswap.narrowing import round_once
from normswap.rows import row_reader

__all__ = ["recheck"]


def recheck(
    original: Checkpoint,
    converted: Checkpoint,
    edits: Edits,
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[str]:
    """Compute every folded tensor once more from the original, and compare it with what the converted one holds.

    Floating-point tensors that no fold touches have to be equal bit for bit. Figures of the algebra are taken on the
    way, see `normswap.algebra.Algebra`.

    Args:
        original: the checkpoint that was folded.
        converted: the folded one.
        edits: of the folds.
        progress: called with the tensors done and their number.

    Returns:
        What differs, in words; empty where the two agree.
    """
    faults = []
    expected = {**{key: key for key in original.tensors}, **{key: new.source for key, new in edits.added.items()}}
    missing, extra = sorted(expected.keys() - converted.tensors.keys()), sorted(converted.tensors.keys() - expected)
    faults += [f"{key} is missing" for key in missing]
    faults += [f"{key} is not of the original" for key in extra]
    before, after = row_reader(original), row_reader(converted)
    for done, (key, source) in enumerate(expected.items()):
        if progress is not None:
            progress(done, len(expected))
        if key in missing or original.tensors[source].dtype not in FLOATS:
            continue
        one, other = original.tensors[source], converted.tensors[key]
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            faults.append(f"{key} is {other.dtype} {list(other.shape)}, expected {one.dtype} {list(one.shape)}")
            continue
        edit = edits.added[key].edit if key in edits.added else edits.edits.get(key)
        if not _equal(_changed(before(source), edit), after(key)):
            what = f"what folding {', '.join(edits.norms[key][:3])} gives" if edit else "that of the original"
            faults.append(f"{key} is not {what}")
    return faults


def _changed(pieces: Iterator[torch.Tensor], edit: object) -> Iterator[torch.Tensor]:
    start = 0
    for rows in pieces:
        yield rows if edit is None else round_once(edit.apply(rows, start), rows.dtype)  # type: ignore[attr-defined]
        start += rows.shape[0] if rows.dim() else 1


def _equal(ones: Iterator[torch.Tensor], others: Iterator[torch.Tensor]) -> bool:
    return all(
        one.shape == other.shape and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
        for one, other in zip(ones, others, strict=True)
    )
