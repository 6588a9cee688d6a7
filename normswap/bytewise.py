"""Compare stored tensors by their bytes, whatever their dtype, in bounded memory."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.listing import follow
from normswap.pipeline import read_into
from normswap.shards import Checkpoint

__all__ = ["RawBytes", "equal_bytes"]

_PIECE = 1 << 22


class RawBytes:
    """Reads the bytes of the tensors of one checkpoint; a context manager, since it keeps files open.

    Args:
        checkpoint: what `check_source` returned.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._stack = ExitStack()
        self._streams: dict[str, Any] = {}
        self._real = lru_cache(maxsize=None)(lambda name: follow(checkpoint.path, name))
        self._memory = np.empty(_PIECE, np.uint8)
        self._pickle = lru_cache(maxsize=1)(lambda name: load_pickle(follow(checkpoint.path, name), name, "cpu"))

    def __enter__(self) -> RawBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._streams.clear()

    def entry(self, key: str) -> Entry:
        """Return where and what a tensor is."""
        return self._checkpoint.tensors[key]

    def place(self, key: str) -> tuple[Path, int] | None:
        """Return the real file of a tensor and where its bytes begin; None in a pickle."""
        entry = self.entry(key)
        return None if entry.start is None else (self._real(entry.file), entry.start)

    def pieces(self, key: str) -> Iterator[Any]:
        """Yield the bytes in order, 4 MB at a time, uint8; each piece is overwritten by the next.

        Raises:
            CheckpointError: the file cannot be read, or changed.
        """
        entry = self.entry(key)
        if entry.start is None or entry.end is None:
            plain = self._pickle(entry.file)[key].detach().contiguous().reshape(-1)
            step = max(1, _PIECE // max(1, plain.itemsize))
            for part in plain.split(step) if plain.numel() else ():
                yield part.view(torch.uint8).numpy()
            return
        try:
            stream = self._stream(entry.file)
            for begin in range(entry.start, entry.end, _PIECE):
                memory = self._memory[: min(_PIECE, entry.end - begin)]
                if not read_into(stream, memory, begin):
                    raise CheckpointError(f"{entry.file} changed while it was read: {key} is cut short; run again")
                yield memory
        except OSError as error:
            raise CheckpointError(f"cannot read {key} in {entry.file}: {error.strerror}") from error

    def digest(self, key: str) -> bytes:
        """Return a hash of dtype, shape and bytes."""
        entry = self.entry(key)
        found = hashlib.blake2b(f"{entry.dtype}{entry.shape}".encode(), digest_size=16)
        for piece in self.pieces(key):
            found.update(memoryview(piece))
        return found.digest()

    def _stream(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = self._stack.enter_context(self._real(name).open("rb", buffering=0))
        return self._streams[name]


def equal_bytes(one: RawBytes, key: str, other: RawBytes, its_key: str) -> bool:
    """Whether two stored tensors have one dtype, one shape and the same bytes.

    Raises:
        CheckpointError: a file cannot be read.
    """
    mine, its = one.entry(key), other.entry(its_key)
    if (mine.dtype, mine.shape) != (its.dtype, its.shape):
        return False
    place, its_place = one.place(key), other.place(its_key)
    if place is not None and its_place is not None and place[1] == its_place[1] and place[0].samefile(its_place[0]):
        return True
    return all(np.array_equal(a, b) for a, b in zip(one.pieces(key), other.pieces(its_key), strict=True))
