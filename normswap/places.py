"""Bring values from a parameter to the stored tensors that make it up, and back."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator

import torch

from normswap.labels import Positions
from normswap.stored import Stored

__all__ = [
    "Read",
    "add_at",
    "assemble",
    "cut",
    "extent",
    "from_parameter",
    "mesh",
    "numbered",
    "parameter_shape",
    "placed",
    "window",
]

Read = Callable[[str], Iterable[torch.Tensor]]
"""Yields a stored tensor in pieces of whole rows along its first axis, in order; one piece for a number."""

Index = slice | torch.Tensor


def extent(positions: Positions) -> int:
    """Return one more than the last of some positions."""
    return max(positions, default=-1) + 1


def parameter_shape(pieces: Iterable[Stored]) -> tuple[int, ...]:
    """Return the shape of a parameter from the stored tensors that make it up."""
    return tuple(max(map(extent, axis)) for axis in zip(*(piece.positions for piece in pieces), strict=True))


def placed(positions: Positions) -> Index:
    """Return positions as an index: a slice, which takes no copy, where their steps are all the same."""
    if isinstance(positions, range):
        return slice(positions.start, positions.stop, positions.step)
    return torch.tensor(positions, dtype=torch.long)


def window(positions: Positions, start: int, count: int) -> tuple[Positions, int]:
    """Pick the positions in ``[start, start + count)``.

    Args:
        positions: ascending.
        start: first of the window.
        count: its length.

    Returns:
        The positions, counted from ``start``, and the number of those before them.
    """
    before, stop = bisect_left(positions, start), bisect_left(positions, start + count)
    found = positions[before:stop]
    if isinstance(found, range):
        return range(found.start - start, found.stop - start, found.step), before
    return tuple(place - start for place in found), before


def cut(tensor: torch.Tensor, held: Iterable[Positions]) -> torch.Tensor:
    """Take some positions of each axis; a view where they are evenly spaced, else a copy."""
    for axis, places in enumerate(held):
        if isinstance(places, range):
            if places != range(tensor.shape[axis]):
                tensor = tensor[(slice(None),) * axis + (placed(places),)]
        else:
            tensor = tensor.index_select(axis, torch.tensor(places, dtype=torch.long))
    return tensor


def from_parameter(piece: Stored, values: torch.Tensor) -> torch.Tensor:
    """Lay values of a parameter out as a stored tensor has them.

    Args:
        piece: the stored tensor.
        values: of the parameter's shape.

    Returns:
        Of the shape of what the parameter takes of the stored tensor.
    """
    laid = values
    for axis, places in enumerate(piece.positions):
        laid = laid.index_select(axis, torch.tensor(list(places), dtype=torch.long))
    linked = [axis for axis, at in enumerate(piece.axes) if at is not None]
    loose = [axis for axis, at in enumerate(piece.axes) if at is None]
    order = sorted(linked, key=lambda axis: piece.axes[axis] or 0)
    laid = laid.permute([*order, *loose])
    return laid.reshape([len(places) for places in piece.held])


def assemble(pieces: tuple[Stored, ...], read: Read) -> torch.Tensor:
    """Read a whole parameter; meant for gains and biases.

    Args:
        pieces: the stored tensors that make it up.
        read: reads them.

    Returns:
        In the parameter's shape and the stored dtype.
    """
    whole: torch.Tensor | None = None
    for piece in pieces:
        stored = torch.cat([part.reshape(1) if part.dim() == 0 else part.clone() for part in read(piece.key)])
        if not piece.held:
            stored = stored.reshape(())
        part = _to_parameter(piece, cut(stored, piece.held))
        if whole is None:
            whole = part.new_zeros(parameter_shape(pieces))
        if part.dim():
            whole[mesh(piece.positions)] = part
        else:
            whole = part.clone()
    assert whole is not None
    return whole


def _to_parameter(piece: Stored, part: torch.Tensor) -> torch.Tensor:
    linked = [axis for axis in piece.axes if axis is not None]
    loose = [axis for axis in range(part.dim()) if axis not in linked]
    return part.permute([*linked, *loose]).reshape([len(places) for places in piece.positions])


def mesh(positions: Iterable[Positions]) -> tuple[torch.Tensor, ...]:
    """Return an index that takes every combination of positions, one tuple of them for each axis."""
    listed = [torch.tensor(list(places), dtype=torch.long) for places in positions]
    return torch.meshgrid(*listed, indexing="ij") if listed else ()


def add_at(whole: torch.Tensor, positions: list[Positions], part: torch.Tensor) -> None:
    """Add values to those of some positions of each axis."""
    if part.dim():
        whole[mesh(positions)] += part
    else:
        whole += part


def numbered(pieces: Iterable[torch.Tensor]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield pieces of rows with the number of their first row."""
    start = 0
    for piece in pieces:
        yield start, piece
        start += len(piece) if piece.dim() else 1
