"""Outputs of a run that wait to be compared: in memory while they are few, in a temporary file beyond."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from io import FileIO

import torch

from normswap.errors import OutputError
from normswap.running import Output

__all__ = ["Spool"]

# Bytes that are kept in memory.
_IN_MEMORY = 512 << 20


@dataclass(frozen=True)
class _Written:
    """Where a tensor stands in the file."""

    start: int
    dtype: torch.dtype
    shape: torch.Size


@dataclass
class Spool:
    """Outputs by run and sequence.

    The file has no name, so that nothing of it is left behind, however the process ends.

    Attributes:
        room: bytes that may still be kept in memory.
    """

    room: int = _IN_MEMORY
    kept: dict[tuple[str, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    _written: dict[tuple[str, int], dict[str, _Written]] = field(default_factory=dict)
    _file: FileIO | None = None

    def put(self, name: str, index: int, output: Output) -> None:
        """Keep the tensors of one sequence of a run.

        Raises:
            OutputError: the file cannot be written.
        """
        tensors = {key: tensor.cpu() for key, tensor in output.tensors.items()}
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        if size <= self.room:
            self.room -= size
            # A view would keep alive, and not count, what it is a part of.
            self.kept[name, index] = {key: tensor.clone() for key, tensor in tensors.items()}
        else:
            self._written[name, index] = {key: self._append(tensor) for key, tensor in tensors.items()}

    def get(self, name: str, index: int, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the tensors of one sequence of a run, on a device."""
        kept = self.kept.get((name, index))
        if kept is None:
            kept = {key: self._read(entry) for key, entry in self._written[name, index].items()}
        return {key: tensor.to(device) for key, tensor in kept.items()}

    def close(self) -> None:
        """Give the file's space back."""
        if self._file is not None:
            self._file.close()

    def _append(self, tensor: torch.Tensor) -> _Written:
        values = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="normswap-", buffering=0)  # noqa: SIM115
            start = self._file.seek(0, 2)
            done = 0
            # One call writes 2 GiB at most.
            while done < values.numel():
                done += self._file.write(values[done:].numpy().data)
        except OSError as error:
            raise OutputError(
                f"cannot keep outputs in {tempfile.gettempdir()}: {error.strerror}; make room there, name another "
                "folder with TMPDIR, or give fewer tokens (--tokens)"
            ) from None
        return _Written(start, tensor.dtype, tensor.shape)

    def _read(self, entry: _Written) -> torch.Tensor:
        assert self._file is not None
        values = torch.empty(entry.shape, dtype=entry.dtype)
        self._file.seek(entry.start)
        flat, done = values.view(-1).view(torch.uint8), 0
        while done < flat.numel():
            done += self._file.readinto(flat[done:].numpy().data)
        return values
