"""Find NaN and infinite values in a checkpoint's weights, a piece at a time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.listing import follow
from normswap.shards import Checkpoint

__all__ = ["check_finite"]

# Small enough to stay in the processor's cache between reading and looking.
_CHUNK = 1 << 20
_FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C128": torch.float64,
    "C64": torch.float32,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
# Bits of the smallest positive pattern that is no number: everything from it up to the sign bit is NaN or infinite.
_FIRST_BAD = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every floating-point tensor, a piece at a time, and refuse NaN and infinite values.

    Raises:
        CheckpointError: a tensor holds some; it is named, with their number.
    """
    for name in checkpoint.files:
        entries = {
            key: entry for key, entry in checkpoint.tensors.items() if entry.file == name and entry.dtype in _FLOATS
        }
        real = follow(checkpoint.path, name)
        pieces = _safetensors_pieces if checkpoint.format == "safetensors" else _pickle_pieces
        bad: dict[str, int] = {}
        for key, piece in pieces(real, name, entries):
            if count := _count_bad(piece, _FLOATS[entries[key].dtype]):
                bad[key] = bad.get(key, 0) + count
        if bad:
            key = next(iter(bad))
            more = f" ({len(bad) - 1} more tensors of this file do as well)" if len(bad) > 1 else ""
            raise CheckpointError(
                f"{key} in {name} holds {bad[key]} NaN or infinite values{more}; the checkpoint is damaged, or its "
                "training diverged"
            )


def _safetensors_pieces(file: Path, name: str, entries: dict[str, Entry]) -> Iterator[tuple[str, Any]]:
    buffer = np.empty(_CHUNK, np.uint8)
    with file.open("rb", buffering=0) as stream:
        for key, entry in entries.items():
            if entry.start is None or entry.end is None:
                continue
            stream.seek(entry.start)
            left = entry.end - entry.start
            while left:
                piece = buffer[: min(left, _CHUNK)]
                _fill(stream, piece, name, key)
                left -= len(piece)
                yield key, piece


def _fill(stream: Any, piece: Any, name: str, key: str) -> None:
    filled = 0
    while filled < len(piece):
        try:
            count = stream.readinto(memoryview(piece)[filled:])
        except OSError as error:
            raise CheckpointError(f"cannot read {key} in {name}: {error.strerror}") from error
        if not count:
            raise CheckpointError(f"{name} changed while it was read: {key} is cut short; run again")
        filled += count


def _pickle_pieces(file: Path, name: str, entries: dict[str, Entry]) -> Iterator[tuple[str, Any]]:
    for key, tensor in load_pickle(file, name, "cpu").items():
        if key in entries and tensor.numel():
            tensor = tensor.detach()
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            for piece in flat.view(torch.uint8).split(_CHUNK):
                yield key, piece.numpy()


def _count_bad(piece: Any, dtype: torch.dtype) -> int:
    """Count the values of a piece of raw bytes that are NaN or infinite."""
    first = _FIRST_BAD.get(dtype)
    if first is not None:
        width = dtype.itemsize
        # Sound weights are told by two passes over integers, ten times faster than by arithmetic on bf16.
        positive = int(piece.view(f"i{width}").max()) < first
        if positive and int(piece.view(f"u{width}").max()) < first | 1 << (8 * width - 1):
            return 0
    values = torch.from_numpy(piece.copy()).view(dtype)
    return int((~torch.isfinite(values.float() if dtype.itemsize == 1 else values)).sum())
