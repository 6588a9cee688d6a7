"""Sequences that run as rows of one forward, and its outputs cut into those of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.errors import ModelError
from normswap.running import Output, device_of, dtype_of, run

__all__ = ["Group", "positional", "split", "stack"]

# Tokens of the sequences by which it is found out whether two run as one.
_TRIAL = 16


@dataclass(frozen=True)
class Group:
    """Sequences that run as the rows of one forward.

    Attributes:
        batch: keyword arguments of the forward, on the CPU.
        members: numbers of the sequences, from 0, in the order of the rows.
        valid: (rows, n) bool, which positions hold a sequence rather than padding; None where all do.
        positional: names of the outputs whose second dimension is the positions.
    """

    batch: dict[str, Any]
    members: list[int]
    valid: torch.Tensor | None = None
    positional: frozenset[str] = frozenset()

    def cut(self, tensor: torch.Tensor) -> list[torch.Tensor] | None:
        """Cut states into those of each sequence, without the padding.

        Args:
            tensor: (rows, n, ...), (n, rows, ...) or (rows x n, ...).

        Returns:
            One tensor (1, valid, ...) a sequence; None where the tensor has no such shape.
        """
        rows = len(self.members)
        length = next((value.shape[1] for value in self.batch.values() if _is_row(value)), None)
        if rows == 1 and self.valid is None:
            return [tensor]
        if length is None or tensor.dim() == 0:
            return None
        if tensor.dim() > 1 and tensor.shape[:2] == (length, rows) and length != rows:
            tensor = tensor.transpose(0, 1)
        elif tensor.shape[0] == rows * length and tensor.shape[0] != rows:
            tensor = tensor.unflatten(0, (rows, length))
        if tensor.dim() < 2 or tensor.shape[:2] != (rows, length):
            return None
        return [self._row(tensor, row, positions=True) for row in range(rows)]

    def _row(self, tensor: torch.Tensor, row: int, *, positions: bool) -> torch.Tensor:
        piece = tensor[row : row + 1]
        if positions and self.valid is not None:
            piece = piece[:, self.valid[row].to(tensor.device)]
        return piece


def split(output: Output, group: Group) -> list[Output]:
    """Cut what a group's forward gave into what each of its sequences gave, without the padding.

    Args:
        output: of the forward.
        group: that was run.

    Returns:
        One output a sequence, in the order of `Group.members`; every tensor has one row.

    Raises:
        ModelError: a tensor does not have one row a sequence.
    """
    rows = len(group.members)
    if rows == 1 and group.valid is None:
        return [output]
    for name, tensor in output.tensors.items():
        if tensor.dim() == 0 or tensor.shape[0] != rows:
            raise ModelError(
                f"expected the output {name} to have {rows} rows, one a sequence, got shape {list(tensor.shape)}; "
                "run the sequences one by one"
            )
    return [
        Output(
            output.name,
            {
                name: group._row(tensor, row, positions=name in group.positional)
                for name, tensor in output.tensors.items()
            },
        )
        for row in range(rows)
    ]


def positional(
    model: nn.Module, batches: Sequence[Mapping[str, Any]], shapes: Mapping[str, tuple[int, ...]]
) -> frozenset[str] | None:
    """Find out by one short forward whether sequences may run as rows of one.

    Args:
        model: that runs them.
        batches: keyword arguments of one sequence each.
        shapes: of the tensors that the first of them gave.

    Returns:
        Names of the outputs whose second dimension is the positions; None where sequences cannot be stacked, or an
        output cannot be cut.
    """
    tensors = [value for one in batches for value in one.values() if torch.is_tensor(value)]
    if len(batches) < 2 or not all(_is_row(value) and value.shape[0] == 1 for value in tensors):
        return None
    lengths = {value.shape[1] for one in batches[:2] for value in one.values() if torch.is_tensor(value)}
    short = max(1, min(_TRIAL, min(lengths, default=0) // 2))
    pair = stack([{name: _first(value, short) for name, value in one.items()} for one in batches[:2]])
    try:
        found = run(model, pair, dtype_of(model), device_of(model)).tensors
    except ModelError:
        return None
    length = max(value.shape[1] for value in batches[0].values() if torch.is_tensor(value))
    if found.keys() != shapes.keys():
        return None
    if not all(shapes[name][:1] == (1,) and tensor.shape[:1] == (2,) for name, tensor in found.items()):
        return None
    return frozenset(
        name for name, tensor in found.items() if (shapes[name][1:2], tensor.shape[1:2]) == ((length,), (short,))
    )


def stack(batches: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join sequences of equal shapes into the rows of one forward."""
    return {
        name: torch.cat([one[name] for one in batches]) if torch.is_tensor(value) else value
        for name, value in batches[0].items()
    }


def _is_row(value: Any) -> bool:
    return torch.is_tensor(value) and value.dim() == 2 and not value.is_floating_point()


def _first(value: Any, count: int) -> Any:
    return value[:, :count] if torch.is_tensor(value) else value
