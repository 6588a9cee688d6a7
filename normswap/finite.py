"""Find stored values that no weight may have: NaN, infinite values, integers in place of floats."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normswap.bits import FLOATS, count_bad
from normswap.errors import CheckpointError
from normswap.headers import Entry, load_pickle
from normswap.listing import follow
from normswap.shards import Checkpoint

__all__ = ["FiniteCheck", "check_finite", "check_floating", "pickle_pieces"]

# Small enough to stay in the processor's cache between reading and looking.
_CHUNK = 1 << 20
_INTEGERS = {"I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL"}


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


class FiniteCheck:
    """Looks at stored values piece by piece, and refuses the file in which some are NaN or infinite.

    Args:
        parameters: names of the model's parameters; in any other tensor, such as a stored mask, -inf is sound. None
            takes every tensor for a parameter.
    """

    def __init__(self, parameters: Collection[str] | None = None) -> None:
        self._known = None if parameters is None else _Names(parameters)
        self._bad: dict[str, int] = {}

    def look(self, key: str, dtype_name: str, piece: Any) -> bool:
        """Count what is bad in a piece of a tensor.

        Args:
            key: of the tensor.
            dtype_name: its dtype, as safetensors spells it.
            piece: raw bytes of whole values, uint8 ``(bytes,)``.

        Returns:
            Whether all of it is sound, which integers always are.
        """
        dtype = FLOATS.get(dtype_name)
        if dtype is None or not len(piece):
            return True
        masks = self._known is not None and key not in self._known
        count = count_bad(piece, dtype, allow_negative=masks)
        if count:
            self._bad[key] = self._bad.get(key, 0) + count
        return not count

    def settle(self, name: str) -> None:
        """Raise what was found in a file, once it was seen as a whole; the next look begins another file.

        Raises:
            CheckpointError: a tensor holds NaN or infinite values; it is named, with their number.
        """
        if self._bad:
            key = next(iter(self._bad))
            more = f" ({len(self._bad) - 1} more tensors of this file do as well)" if len(self._bad) > 1 else ""
            raise CheckpointError(
                f"{key} in {name} holds {self._bad[key]} NaN or infinite values{more}; the checkpoint is damaged, or "
                "its training diverged"
            )


def check_finite(checkpoint: Checkpoint, parameters: Collection[str] | None = None) -> None:
    """Read every floating-point tensor, a piece at a time, and refuse NaN and infinite values.

    Args:
        checkpoint: what `check_source` returned.
        parameters: as for `FiniteCheck`.

    Raises:
        CheckpointError: a tensor holds some; it is named, with their number.
    """
    check = FiniteCheck(parameters)
    for name in checkpoint.files:
        entries = {
            key: entry for key, entry in checkpoint.tensors.items() if entry.file == name and entry.dtype in FLOATS
        }
        real = follow(checkpoint.path, name)
        if checkpoint.format == "safetensors":
            pieces = _safetensors_pieces(real, name, entries)
        else:
            pieces = pickle_pieces(load_pickle(real, name, "cpu"), entries)
        for key, piece in pieces:
            check.look(key, entries[key].dtype, piece)
        check.settle(name)


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


def pickle_pieces(state: Mapping[str, torch.Tensor], entries: Mapping[str, Entry]) -> Iterator[tuple[str, Any]]:
    """Yield tensors that `load_pickle` returned as pieces of raw bytes, with their keys.

    Args:
        state: the tensors.
        entries: those of them that are wanted.
    """
    for key, tensor in state.items():
        if key in entries and tensor.numel():
            tensor = tensor.detach()
            flat = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)
            for piece in flat.view(torch.uint8).split(_CHUNK):
                yield key, piece.numpy()
