"""A file on its way to the disk: threads hash it, write it and flush it, and in the end it gets its name."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from normswap.errors import OutputError
from normswap.pipeline import Slot, Stage, write_all

__all__ = ["PART", "Sink", "Stages"]

PART = ".part"
"""What the name of an unfinished file ends in; it begins with a dot."""

# Data go to the disk this often, while the rest of the file is still in work.
_FLUSH = 1 << 26
_FSYNC = getattr(os, "fdatasync", os.fsync)


class Stages:
    """The threads of one run."""

    def __init__(self) -> None:
        self.source, self.target = Stage("hash-source"), Stage("hash-target")
        self.write, self.flush = Stage("write"), Stage("flush")
        self._stack = contextlib.ExitStack()
        self._sinks: list[Sink] = []

    def __enter__(self) -> Stages:
        # Left in the reverse order: the flushing waits for the others' work, and they never wait for its.
        for stage in (self.source, self.target, self.write, self.flush):
            self._stack.enter_context(stage)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        # What an error left unfinished; not before the threads have let go of it.
        for sink in self._sinks:
            sink.close()

    def keep(self, sink: Sink) -> None:
        """Close a file in the end, if it is not finished by then."""
        self._sinks.append(sink)


class Sink:
    """One file that is written in pieces.

    Args:
        stages: the threads.
        place: where it goes in the end.
        name: for messages.
        differs: whether it differs from the file that it comes from, and so has a hash of its own.

    Raises:
        OutputError: it cannot be made.
    """

    def __init__(self, stages: Stages, place: Path, name: str, *, differs: bool) -> None:
        self._stages, self._place, self._name = stages, place, name
        self._part = place.with_name(f".{place.name}{PART}")
        self._source, self._own = hashlib.sha256(), hashlib.sha256() if differs else None
        self._expected = self._unflushed = 0
        self._flushes: list[Future[None]] = []
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb", buffering=0)
        except OSError as error:
            raise self._refusal(error) from error

    def read(self, slot: Slot, view: Any) -> None:
        """Take bytes of the source into its hash."""
        slot.until(self._stages.source.do(self._source.update, view))

    def read_header(self, header: bytes) -> None:
        """Take the first bytes of the source into its hash."""
        self._stages.source.do(self._source.update, header)

    def put(self, slot: Slot, view: Any) -> None:
        """Write bytes at the end."""
        slot.until(self._stages.write.do(self._append, view))
        if self._own is not None:
            slot.until(self._stages.target.do(self._own.update, view))
        self._expected += len(view)
        self._unflushed += len(view)
        if self._unflushed >= _FLUSH:
            self._unflushed = 0
            self._flushes.append(self._stages.flush.do(self._sync))

    def finish(self, then: Callable[[str, str], Any]) -> Future[tuple[str, str]]:
        """Bring the file to the disk and give it its name, once all of it is written.

        Args:
            then: called after that with the hash of the source and the file's own.

        Returns:
            What will be both hashes.
        """
        source = self._stages.source.do(self._source.hexdigest)
        own = source if self._own is None else self._stages.target.do(self._own.hexdigest)
        # Queued behind every write, so that all of them are over when it answers.
        size = self._stages.write.do(lambda: os.fstat(self._file.fileno()).st_size)
        return self._stages.flush.do(self._settle, source, own, size, then)

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    def _append(self, view: Any) -> None:
        try:
            write_all(self._file, view)
        except OSError as error:
            raise self._refusal(error) from error

    def _sync(self) -> None:
        try:
            _FSYNC(self._file.fileno())
        except OSError as error:
            raise self._refusal(error) from error

    def _settle(
        self, source: Future[str], own: Future[str], size: Future[int], then: Callable[[str, str], Any]
    ) -> tuple[str, str]:
        if size.result() != self._expected:
            raise OutputError(f"cannot write {self._name}: {size.result()} of {self._expected} bytes were taken")
        # The system tells of a failed flush once: each has to be asked.
        for flush in self._flushes:
            flush.result()
        self._sync()
        self._file.close()
        try:
            self._part.replace(self._place)
        except OSError as error:
            raise self._refusal(error) from error
        hashes = source.result(), own.result()
        then(*hashes)
        return hashes

    def _refusal(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._name}: {error.strerror}")
