"""Find stored values that no weight may have: NaN, infinite values, integers in place of floats."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.listing import follow
from normswap.shards import Checkpoint

__all__ = ["check_finite", "check_floating"]

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
_INTEGERS = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"}
# Bits of the smallest positive pattern that is no number: everything from it up to the sign bit is NaN or infinite.
_FIRST_BAD = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def check_floating(checkpoint: Checkpoint, parameters: Collection[str]) -> None:
    """Refuse integers where the model has floating-point parameters; only the headers are looked at.

    Args:
        checkpoint: what `check_source` returned, of a model that is not quantized.
        parameters: names of the model's floating-point parameters.

    Raises:
        CheckpointError: a tensor has such a dtype; it is named.
    """
    known = _Names(parameters)
    for key, entry in checkpoint.tensors.items():
        if entry.dtype in _INTEGERS and key in known:
            raise CheckpointError(
                f"expected floating-point numbers for the parameter {key} in {entry.file}, got dtype {entry.dtype}; "
                "the checkpoint is damaged, or quantized and config.json lacks its quantization_config"
            )


class _Names:
    """Names of parameters, as the model has them or with the prefix of its base model added or left out."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = {*names, *(name.partition(".")[2] for name in names)} - {""}
        self._whole = set(names)

    def __contains__(self, key: str) -> bool:
        return key in self._names or key.partition(".")[2] in self._whole


def check_finite(checkpoint: Checkpoint, parameters: Collection[str] | None = None) -> None:
    """Read every floating-point tensor, a piece at a time, and refuse NaN and infinite values.

    Args:
        checkpoint: what `check_source` returned.
        parameters: names of the model's parameters; in any other tensor, such as a stored mask, -inf is sound. None
            takes every tensor for a parameter.

    Raises:
        CheckpointError: a tensor holds some; it is named, with their number.
    """
    known = None if parameters is None else _Names(parameters)
    for name in checkpoint.files:
        entries = {
            key: entry for key, entry in checkpoint.tensors.items() if entry.file == name and entry.dtype in _FLOATS
        }
        real = follow(checkpoint.path, name)
        pieces = _safetensors_pieces if checkpoint.format == "safetensors" else _pickle_pieces
        bad: dict[str, int] = {}
        for key, piece in pieces(real, name, entries):
            masks = known is not None and key not in known
            if count := _count_bad(piece, _FLOATS[entries[key].dtype], allow_negative=masks):
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


def _count_bad(piece: Any, dtype: torch.dtype, *, allow_negative: bool = False) -> int:
    """Count the values of a piece of raw bytes that are NaN or infinite, or with `allow_negative` all but -inf."""
    first = _FIRST_BAD.get(dtype)
    if first is not None:
        width = dtype.itemsize
        # Sound weights are told by two passes over integers, ten times faster than by arithmetic on bf16.
        positive = int(piece.view(f"i{width}").max()) < first
        if positive and int(piece.view(f"u{width}").max()) < first | 1 << (8 * width - 1):
            return 0
    values = torch.from_numpy(piece.copy()).view(dtype)
    values = values.float() if dtype.itemsize == 1 else values
    bad = ~torch.isfinite(values)
    return int((bad & ~torch.isneginf(values) if allow_negative else bad).sum())
