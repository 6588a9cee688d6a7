"""Write a PyTorch pickle anew with some of its tensors changed."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import torch

from normswap.errors import CheckpointError, RangeLost
from normswap.layout import Added, Edit
from normswap.narrowing import lost_range, narrow

__all__ = ["hash_file", "rewrite_pickle"]

_CHUNK = 1 << 22


def rewrite_pickle(
    state: Mapping[str, torch.Tensor],
    target: Path,
    edits: Mapping[str, Edit],
    added: Mapping[str, Added],
    piece: int,
) -> None:
    """Write the tensors of a pickle, changed and added ones among them.

    The changed tensors are held whole until they are written.

    Args:
        state: the tensors as `normswap.headers.load_pickle` returned them.
        target: the file to be written.
        edits: key to change, of tensors of this file.
        added: key to new tensor, likewise.
        piece: bytes of a tensor that are edited at a time.

    Raises:
        RangeLost: new values do not fit the stored dtype.
    """
    new = {}
    for key, value in state.items():
        new[key] = _edited(key, value, edits[key], piece) if key in edits else value
        for copy, item in added.items():
            if item.source == key:
                new[copy] = value.clone() if item.edit is None else _edited(copy, value, item.edit, piece)
    torch.save(new, target)


def hash_file(file: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        CheckpointError: it cannot be read.
    """
    digest, buffer = hashlib.sha256(), bytearray(_CHUNK)
    try:
        with file.open("rb", buffering=0) as stream:
            while count := stream.readinto(buffer):
                digest.update(memoryview(buffer)[:count])
    except OSError as error:
        raise CheckpointError(f"cannot read {file}: {error.strerror}") from error
    return digest.hexdigest()


def _edited(key: str, value: torch.Tensor, edit: Edit, piece: int) -> torch.Tensor:
    stored = value.detach()
    stored = stored.reshape(1) if stored.dim() == 0 else stored
    out = torch.empty(stored.shape, dtype=stored.dtype)
    count = max(1, piece * len(stored) // max(1, stored.numel() * stored.itemsize))
    for start in range(0, len(stored), count):
        values = edit.apply(stored[start : start + count].contiguous(), start)
        if lost := lost_range(narrow(values, out[start : start + count]), values):
            raise RangeLost(key, lost)
    return out.view(value.shape)
