"""Read rows of stored tensors of two checkpoints side by side."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from normswap.bits import FLOATS
from normswap.narrowing import round_once
from normswap.places import Read
from normswap.rows import row_reader
from normswap.shards import Checkpoint

__all__ = ["RowPairs", "cast_reader", "is_floating"]

# Numbers that are read at a time.
_COUNT = 1 << 20


def is_floating(dtype: str) -> bool:
    """Whether a dtype, as safetensors spells it, is one of real floating-point numbers."""
    return dtype in FLOATS and not dtype.startswith("C")


class RowPairs:
    """Yields the same rows of a tensor of one checkpoint and of one of another, a few MB at a time."""

    def __init__(self, before: Checkpoint, after: Checkpoint) -> None:
        self._before, self._after = before, after
        self._readers: dict[tuple[int, int], Read] = {}

    def rows(self, key: str, its_key: str) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
        """Yield the number of the first row, rows of the original and those of the other; of one shape."""
        start = 0
        for one, other in zip(self.original(key), self.converted(its_key), strict=True):
            yield start, one, other
            start += len(one) if one.dim() else 1

    def original(self, key: str) -> Iterator[torch.Tensor]:
        """Yield rows of a tensor of the original."""
        yield from self._reader(0, self._before, key)(key)

    def converted(self, key: str) -> Iterator[torch.Tensor]:
        """Yield rows of a tensor of the other one."""
        yield from self._reader(1, self._after, key)(key)

    def _reader(self, side: int, checkpoint: Checkpoint, key: str) -> Read:
        # Rows are counted, not bytes, so that two dtypes are cut at the same places.
        width = FLOATS[checkpoint.tensors[key].dtype].itemsize
        return self._readers.setdefault((side, width), row_reader(checkpoint, piece=_COUNT * width))


def cast_reader(checkpoint: Checkpoint, dtype: torch.dtype) -> Read:
    """Return a reader of a checkpoint's floating-point tensors as if all were rounded to a dtype."""
    read = row_reader(checkpoint)

    def cast(key: str) -> Iterator[torch.Tensor]:
        for rows in read(key):
            yield round_once(rows, dtype) if rows.dtype.itemsize > dtype.itemsize else rows.to(dtype)

    return cast
