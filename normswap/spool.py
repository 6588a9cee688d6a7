"""Outputs of a run that wait to be compared: in memory while they are few, in a temporary folder beyond."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch

from normswap.running import Output

__all__ = ["Spool"]

# Bytes that are kept in memory.
_IN_MEMORY = 512 << 20


@dataclass
class Spool:
    """Outputs by run and sequence.

    Attributes:
        folder: where files go; whoever made it removes it.
        room: bytes that may still be kept in memory.
    """

    folder: Path
    room: int = _IN_MEMORY
    kept: dict[tuple[str, int], dict[str, torch.Tensor]] = field(default_factory=dict)

    def put(self, name: str, index: int, output: Output) -> None:
        """Keep the tensors of one sequence of a run."""
        tensors = {key: tensor.cpu() for key, tensor in output.tensors.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size <= self.room:
            self.room -= size
            # A view would keep alive, and not count, what it is a part of.
            self.kept[name, index] = {key: tensor.clone() for key, tensor in tensors.items()}
        else:
            torch.save({key: tensor.clone() for key, tensor in tensors.items()}, self._file(name, index))

    def get(self, name: str, index: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors of one sequence of a run, on a device."""
        kept = self.kept.get((name, index))
        if kept is not None:
            return {key: tensor.to(device) for key, tensor in kept.items()}
        return torch.load(self._file(name, index), weights_only=True, map_location=device)

    def _file(self, name: str, index: int) -> Path:
        return self.folder / f"{name}-{index}.pt"
