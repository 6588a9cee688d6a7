"""Read single stored tensors of a checkpoint, some rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch

from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.layout import torch_dtype
from normswap.listing import follow
from normswap.pipeline import read_into
from normswap.shards import Checkpoint

__all__ = ["row_reader"]

_PIECE = 1 << 22


def row_reader(checkpoint: Checkpoint, piece: int = _PIECE) -> Callable[[str], Iterator[torch.Tensor]]:
    """Return a function that yields the rows of a stored tensor in order, some at a time.

    What it yields has the stored dtype and all axes but the first whole; a tensor without axes is one piece. Each
    piece has memory of its own.

    Args:
        checkpoint: what `check_source` returned.
        piece: bytes of a piece; one row may be more.

    Raises:
        CheckpointError: (by the function) no such tensor, one that is no floating-point tensor, or a file that cannot
            be read.
    """
    # A pickle is mapped, which takes time and no memory; most tensors asked for in a row are in one file.
    pickle = lru_cache(maxsize=1)(lambda name: load_pickle(follow(checkpoint.path, name), name, "cpu"))

    def read(key: str) -> Iterator[torch.Tensor]:
        entry = checkpoint.tensors.get(key)
        if entry is None:
            raise CheckpointError(f"expected {key} in {checkpoint.path}, no file of the checkpoint holds it")
        dtype = torch_dtype(key, entry)
        if checkpoint.format == "pickle":
            tensor = pickle(entry.file)[key].detach()
            yield from tensor.split(_rows(entry, dtype, piece)) if tensor.dim() else (tensor,)
        else:
            yield from _stored(follow(checkpoint.path, entry.file), key, entry, dtype, piece)

    return read


def _rows(entry: Entry, dtype: torch.dtype, piece: int) -> int:
    row = torch.Size(entry.shape[1:]).numel() * dtype.itemsize
    return max(1, piece // max(1, row))


def _stored(file: Path, key: str, entry: Entry, dtype: torch.dtype, piece: int) -> Iterator[torch.Tensor]:
    assert entry.start is not None and entry.end is not None
    size = entry.end - entry.start
    step = _rows(entry, dtype, piece) * torch.Size(entry.shape[1:]).numel() * dtype.itemsize if entry.shape else size
    shape = (-1, *entry.shape[1:]) if entry.shape else ()
    try:
        with file.open("rb", buffering=0) as stream:
            for begin in range(0, size, max(1, step)):
                memory = np.empty(min(step, size - begin), np.uint8)
                if not read_into(stream, memory, entry.start + begin):
                    raise CheckpointError(f"{entry.file} changed while it was read: {key} is cut short; run again")
                yield torch.from_numpy(memory).view(dtype).view(shape)
    except OSError as error:
        raise CheckpointError(f"cannot read {key} in {entry.file}: {error.strerror}") from error
