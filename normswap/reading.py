"""Read a parameter of a model from the tensors of its checkpoint, some rows at a time."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from safetensors import safe_open

from normswap.headers import load_pickle
from normswap.labels import Positions
from normswap.listing import follow
from normswap.places import Read, cut, mesh, numbered, placed, window
from normswap.shards import Checkpoint
from normswap.stored import Stored

__all__ = ["read_into_parameter", "read_whole"]


def read_into_parameter(pieces: tuple[Stored, ...], target: torch.Tensor, read: Read) -> None:
    """Read a parameter from the stored tensors that make it up, rounded to its dtype.

    Args:
        pieces: of the parameter.
        target: of the parameter's shape, of any dtype and device; written.
        read: reads stored tensors in pieces of rows.
    """
    for piece in pieces:
        loose = [axis for axis in range(len(piece.held)) if axis not in piece.axes]
        order = [*(axis for axis in piece.axes if axis is not None), *loose]
        for start, rows in numbered(read(piece.key)):
            if not piece.held:
                target.copy_(rows.reshape(target.shape))
                continue
            found, before = window(piece.held[0], start, len(rows))
            if not found:
                continue
            values = cut(rows, (found, *piece.held[1:])).permute(order)
            positions = tuple(_part(piece, axis, before, len(found)) for axis in range(target.dim()))
            _put(target, positions, values.reshape([len(places) for places in positions]))


def _part(piece: Stored, axis: int, before: int, count: int) -> Positions:
    places = piece.positions[axis]
    return places[before : before + count] if piece.axes[axis] == 0 else places


def _put(target: torch.Tensor, positions: tuple[Positions, ...], values: torch.Tensor) -> None:
    if all(isinstance(places, range) for places in positions):
        target[tuple(placed(places) for places in positions)].copy_(values)
    else:
        target[mesh(positions)] = values.to(target.device, target.dtype)


def read_whole(checkpoint: Checkpoint, key: str) -> Iterator[torch.Tensor]:
    """Yield a stored tensor of any dtype in one piece; meant for small ones."""
    entry = checkpoint.tensors[key]
    file = follow(checkpoint.path, entry.file)
    if checkpoint.format == "pickle":
        yield load_pickle(file, entry.file, "cpu")[key].detach().clone()
    else:
        with safe_open(file, framework="pt") as opened:
            yield opened.get_tensor(key)
