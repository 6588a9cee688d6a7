"""Read stored tensors a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.layout import torch_dtype
from normswap.listing import follow
from normswap.shards import Checkpoint

__all__ = ["row_reader"]

_PIECE = 1 << 24


def row_reader(checkpoint: Checkpoint, *, piece: int = _PIECE) -> Callable[[str], Iterator[torch.Tensor]]:
    """Return a function that yields a stored tensor in pieces of whole rows, in order.

    Each piece is in memory that the next one overwrites; a number is one piece.

    Args:
        checkpoint: what `normswap.shards.check_source` returned.
        piece: bytes to be read at a time; a longer row is read whole.

    Returns:
        Takes the name of a tensor; raises CheckpointError where it is not there, cannot be read or holds no
        floating-point numbers.
    """
    loaded: dict[str, dict[str, Any]] = {}

    def read(key: str) -> Iterator[torch.Tensor]:
        if key not in checkpoint.tensors:
            raise CheckpointError(f"expected {key} in {checkpoint.path}, no file of the checkpoint holds it")
        entry = checkpoint.tensors[key]
        dtype = torch_dtype(key, entry)
        if checkpoint.format == "safetensors":
            yield from _from_safetensors(checkpoint, key, entry, dtype, piece)
            return
        if entry.file not in loaded:
            loaded.clear()
            loaded[entry.file] = load_pickle(follow(checkpoint.path, entry.file), entry.file, "cpu")
        tensor = loaded[entry.file][key].detach()
        yield from tensor.split(_row_count(tensor.shape, dtype, piece)) if tensor.dim() else (tensor,)

    return read


def _row_count(shape: tuple[int, ...], dtype: torch.dtype, piece: int) -> int:
    row = dtype.itemsize
    for size in shape[1:]:
        row *= size
    return max(1, piece // max(1, row))


def _from_safetensors(
    checkpoint: Checkpoint, key: str, entry: Entry, dtype: torch.dtype, piece: int
) -> Iterator[torch.Tensor]:
    assert entry.start is not None and entry.end is not None
    total = entry.end - entry.start
    rows = entry.shape[0] if entry.shape else 1
    count = min(rows, _row_count(entry.shape, dtype, piece))
    row = total // rows if rows else 0
    memory = torch.zeros(count * row, dtype=torch.uint8)
    try:
        with follow(checkpoint.path, entry.file).open("rb", buffering=0) as stream:
            stream.seek(entry.start)
            for start in range(0, rows, max(1, count)):
                here = min(count, rows - start)
                part = memory[: here * row]
                _fill(stream, part.numpy(), key)
                yield part.view(dtype).view(here, *entry.shape[1:]) if entry.shape else part.view(dtype).view(())
    except OSError as error:
        raise CheckpointError(f"cannot read {key} in {entry.file}: {error.strerror}") from error


def _fill(stream: Any, memory: Any, key: str) -> None:
    view = memoryview(memory)
    while view:
        count = stream.readinto(view)
        if not count:
            raise CheckpointError(f"{key} is cut short: its file changed while it was read; run again")
        view = view[count:]
