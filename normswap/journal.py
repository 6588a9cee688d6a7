"""What an interrupted conversion leaves for the next one: finished files and a record of them."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from pathlib import Path

from normswap._version import __version__
from normswap.listing import follow
from normswap.shards import Checkpoint
from normswap.syncing import sync

__all__ = ["Journal", "fingerprint"]

_CHECKED = 1 << 16


def fingerprint(checkpoint: Checkpoint, changes: str) -> str:
    """Return a hash of all that decides what a conversion writes.

    Args:
        checkpoint: the source: names, sizes, times of change and the beginnings of its weight files count.
        changes: says in the caller's words what is changed, such as the plan as JSON.
    """
    digest = hashlib.sha256(json.dumps([__version__, str(checkpoint.path.resolve()), changes]).encode())
    for name in checkpoint.files:
        real = follow(checkpoint.path, name)
        state = real.stat()
        digest.update(json.dumps([name, str(real), state.st_size, state.st_mtime_ns]).encode())
        with real.open("rb") as stream:
            digest.update(stream.read(_CHECKED))
    for key, entry in checkpoint.tensors.items():
        digest.update(json.dumps([key, entry.file, entry.dtype, entry.shape, entry.start]).encode())
    return digest.hexdigest()


class Journal:
    """A record of the finished files of a folder, kept beside it and on the disk before it is relied on.

    Args:
        file: where it is kept.
        folder: the folder whose files it tells of.
        mark: the `fingerprint` of the conversion.
    """

    def __init__(self, file: Path, folder: Path, mark: str) -> None:
        self._file, self._folder, self._mark = file, folder, mark
        self._finished: dict[str, tuple[str, str]] = {}

    def open(self) -> None:
        """Take up the record where it is of this very conversion; else begin with an empty folder."""
        if self._read():
            # What is not recorded is unfinished, or stood there for a source that had other files.
            for file in sorted(self._folder.rglob("*")):
                if not file.is_dir() and str(file.relative_to(self._folder)) not in self._finished:
                    file.unlink()
            return
        self._finished = {}
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        self._file.write_text(json.dumps({"mark": self._mark}) + "\n", encoding="utf-8")
        sync(self._file)
        sync(self._file.parent)

    @property
    def begun(self) -> bool:
        """Whether anything is finished."""
        return bool(self._finished)

    def finished(self, name: str) -> tuple[str, str] | None:
        """Return the hashes of a finished file, of its source and its own; None where it has to be written."""
        return self._finished.get(name)

    def record(self, name: str, source: str, own: str) -> None:
        """Record a file that is on the disk under its name.

        Args:
            name: of the file, relative to the folder.
            source: SHA-256 of what it was made from.
            own: its own.
        """
        file = self._folder / name
        sync(file.parent)
        line = json.dumps({"name": name, "size": file.stat().st_size, "source": source, "own": own})
        with self._file.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        self._finished[name] = source, own

    def remove(self) -> None:
        """Remove the record, before the folder becomes something else."""
        self._file.unlink(missing_ok=True)
        sync(self._file.parent)

    def _read(self) -> bool:
        try:
            lines = self._file.read_text(encoding="utf-8").splitlines(keepends=True)
            if not lines or json.loads(lines[0]) != {"mark": self._mark} or not self._folder.is_dir():
                return False
            if not lines[-1].endswith("\n"):
                with self._file.open("a", encoding="utf-8") as stream:
                    stream.write("\n")
        except (OSError, ValueError):
            return False
        for line in lines[1:]:
            # A line that was cut off in the writing tells of nothing.
            with contextlib.suppress(ValueError, KeyError, TypeError, OSError):
                entry = json.loads(line)
                if line.endswith("\n") and (self._folder / entry["name"]).stat().st_size == entry["size"]:
                    self._finished[entry["name"]] = entry["source"], entry["own"]
        return True
