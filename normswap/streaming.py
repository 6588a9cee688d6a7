"""Write a checkpoint into a folder, shard by shard and piece by piece, with some of its tensors changed on the way.

One pass over the source hashes it, looks for NaN, changes what is to be changed, hashes the result and writes it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normswap.errors import CheckpointError, OutputError, RangeLost, UsageError
from normswap.finite import FiniteCheck, pickle_pieces
from normswap.headers import Entry, load_pickle
from normswap.journal import Journal
from normswap.layout import Added, Edit, Segment, check_written, lay_out, rewrite_index, torch_dtype
from normswap.listing import follow
from normswap.narrowing import lost_range, narrow
from normswap.pickles import hash_file, rewrite_pickle
from normswap.pipeline import Ring, one_thread, read_into
from normswap.shards import Checkpoint
from normswap.sink import Sink, Stages
from normswap.syncing import sync

__all__ = ["Added", "Edit", "Written", "write_checkpoint"]

_PIECE = 1 << 21
# What one piece takes at its most, in pieces: the buffers, the new values as float64 and what an edit needs besides.
_SHARE = 32
_LEAST_MEMORY = 1 << 25
_READ_AHEAD = 1 << 25


@dataclass(frozen=True)
class Written:
    """What was read and written.

    Attributes:
        source: SHA-256 of each weight file of the source, as it was read.
        files: SHA-256 of each weight file that was written; the same where nothing in it changed.
    """

    source: dict[str, str]
    files: dict[str, str]


def write_checkpoint(
    checkpoint: Checkpoint,
    target: Path,
    *,
    edits: Mapping[str, Edit] | None = None,
    added: Mapping[str, Added] | None = None,
    check: bool = True,
    parameters: Collection[str] | None = None,
    max_memory: int | None = None,
    journal: Journal | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Written:
    """Write the weights, and everything else that a loader needs (see `normswap.listing.companions`).

    Files, their tensors and the order of these stay as they are. A weight file in which nothing changes is copied
    byte for byte. In a changed safetensors file the header stays too, unless a tensor is added to it; a changed
    pickle is written anew by torch, with its tensors alone. The copy shares nothing with the source: links are
    followed, no hard links are made.

    Args:
        checkpoint: what `check_source` returned.
        target: an existing folder.
        edits: key to change, of stored tensors. New values are rounded once to the stored dtype.
        added: key to tensor that the source lacks; it goes into the file of the tensor that it copies, and into the
            index.
        check: look for NaN and infinite values. Edited tensors are looked at in any case.
        parameters: as for `normswap.finite.FiniteCheck`.
        max_memory: bytes to get along with, beside the interpreter and what `edits` holds; at least one row of the
            largest edited tensor is always held. A changed pickle takes its own size in any case.
        journal: of a run that can be resumed: files that it records are kept, and finished ones are recorded.
        progress: called with the bytes of the source that are done and their total.

    Returns:
        The hashes.

    Raises:
        CheckpointError: the source cannot be read, is damaged, changed meanwhile, or holds NaN or infinite values;
            a tensor to be edited is not there, is there twice, or is no floating-point tensor; what was
            written is not what the source and `added` say.
        RangeLost: new values do not fit the stored dtype.
        OutputError: the target cannot be written.
        UsageError: `max_memory` is too little for anything.
    """
    edits, added = edits or {}, added or {}
    _refuse_unknown(checkpoint, edits, added)
    with Stages() as stages, one_thread():
        writer = _Writer(checkpoint, target, edits, added, stages, _piece_size(max_memory))
        writer.finite = FiniteCheck(parameters)
        writer.check, writer.journal, writer.progress = check, journal, progress
        written = writer.run()
    if edits or added:
        rewrite_index(checkpoint, target, added)
    check_written(checkpoint, target, added)
    return written


def _piece_size(max_memory: int | None) -> int:
    if max_memory is None:
        return _PIECE
    if max_memory < _LEAST_MEMORY:
        raise UsageError(f"expected at least {_LEAST_MEMORY >> 20} MiB as --max-memory, got {max_memory} bytes")
    return min(_PIECE, max_memory // _SHARE // 4096 * 4096)


def _refuse_unknown(checkpoint: Checkpoint, edits: Mapping[str, Edit], added: Mapping[str, Added]) -> None:
    for key in (*edits, *(new.source for new in added.values())):
        if key not in checkpoint.tensors:
            raise CheckpointError(f"expected {key} in {checkpoint.path}, no file of the checkpoint holds it")
    for key in added:
        if key in checkpoint.tensors:
            raise CheckpointError(f"expected no {key} in {checkpoint.path}, {checkpoint.tensors[key].file} holds one")


def _row_bytes(key: str, entry: Entry) -> int:
    return math.prod(entry.shape[1:]) * torch_dtype(key, entry).itemsize


class _Writer:
    """The state of one run; `run` goes through the files."""

    finite: FiniteCheck
    check: bool
    journal: Journal | None
    progress: Callable[[int, int], None] | None

    def __init__(
        self,
        checkpoint: Checkpoint,
        target: Path,
        edits: Mapping[str, Edit],
        added: Mapping[str, Added],
        stages: Stages,
        piece: int,
    ) -> None:
        self._checkpoint, self._target = checkpoint, target
        self._edits, self._added = edits, added
        self._stages, self._piece = stages, piece
        self._total, self._done = checkpoint.size, 0
        changed = {*edits, *(new.source for new in added.values() if new.edit is not None)}
        rows = max((_row_bytes(key, checkpoint.tensors[key]) for key in changed), default=0)
        self._input = Ring(6 if rows <= piece else 2, max(piece, rows))
        self._output = Ring(4 if rows <= piece else 2, max(piece, rows) if changed else 0)

    def run(self) -> Written:
        """Write every file."""
        files = self._checkpoint.files
        hashes: dict[str, tuple[str, str]] = {}
        finishing: dict[str, Future[tuple[str, str]]] = {}
        for name in files:
            kept = None if self.journal is None else self.journal.finished(name)
            if kept is not None:
                hashes[name] = kept
                self._advance(follow(self._checkpoint.path, name).stat().st_size)
            else:
                finishing[name] = self._weights(name)
        for name in self._checkpoint.others:
            finishing[name] = self._copy(name, follow(self._checkpoint.path, name), None)
        self._input.drain()
        self._output.drain()
        hashes |= {name: work.result() for name, work in finishing.items()}
        if self._done != self._total:
            raise CheckpointError(
                f"{self._checkpoint.path} changed while it was copied: expected {self._total} bytes, got {self._done}; "
                "run again"
            )
        return Written({name: hashes[name][0] for name in files}, {name: hashes[name][1] for name in files})

    def _advance(self, count: int) -> None:
        self._done += count
        if self.progress is not None:
            self.progress(self._done, self._total)

    def _weights(self, name: str) -> Future[tuple[str, str]]:
        real = follow(self._checkpoint.path, name)
        if self._checkpoint.format == "pickle":
            return self._pickle(name, real)
        layout = lay_out(self._checkpoint, real, name, self._edits, self._added)
        with _Source(real, name) as source:
            sink = self._sink(name, differs=layout.changes)
            for begin in range(0, len(layout.header), self._piece):
                slot = self._input.take()
                piece = layout.header[begin : begin + self._piece]
                slot.memory[: len(piece)] = np.frombuffer(piece, np.uint8)
                sink.put(slot, slot.memory[: len(piece)])
            sink.read_header(layout.source_header)
            self._advance(len(layout.source_header))
            for segment in layout.segments:
                self._segment(source, sink, segment)
            source.require_unchanged()
        self.finite.settle(name)
        return sink.finish(self._recorder(name))

    def _segment(self, source: _Source, sink: Sink, segment: Segment) -> None:
        entry = segment.entry
        assert entry.start is not None and entry.end is not None
        row, step = 1, self._piece
        if segment.edit is not None:
            row = _row_bytes(segment.key, entry)
            step = max(1, self._piece // max(row, 1)) * row
        for begin in range(entry.start, entry.end, max(step, 1)):
            count = min(step, entry.end - begin)
            slot = self._input.take()
            view = slot.memory[:count]
            source.read(view, begin)
            if not segment.again:
                sink.read(slot, view)
                self._advance(count)
            sound = True
            if (self.check or segment.edit is not None) and not segment.again:
                sound = self.finite.look(segment.key, entry.dtype, view)
            if segment.edit is None or not sound:
                # What is not sound ends the run once the file was seen; until then its bytes stand for it.
                sink.put(slot, view)
            else:
                self._edit(sink, segment, view, (begin - entry.start) // row)

    def _edit(self, sink: Sink, segment: Segment, view: Any, start: int) -> None:
        assert segment.edit is not None
        slot = self._output.take()
        dtype = torch_dtype(segment.key, segment.entry)
        shape = (-1, *segment.entry.shape[1:])
        rows = torch.from_numpy(view).view(dtype).view(shape)
        out = slot.memory[: len(view)]
        rounded = torch.from_numpy(out).view(dtype).view(shape)
        values = segment.edit.apply(rows, start)
        if values.shape != rows.shape:
            raise ValueError(f"expected new values of shape {tuple(rows.shape)} for {segment.key}, got {values.shape}")
        narrow(values, rounded)
        if lost := lost_range(rounded, values):
            raise RangeLost(segment.key, lost)
        sink.put(slot, out)

    def _pickle(self, name: str, real: Path) -> Future[tuple[str, str]]:
        keys = {key: entry for key, entry in self._checkpoint.tensors.items() if entry.file == name}
        edits = {key: edit for key, edit in self._edits.items() if key in keys}
        added = {key: new for key, new in self._added.items() if new.source in keys}
        state: dict[str, torch.Tensor] = {}
        if self.check or edits or added:
            # Mapped once: what is mapped counts as memory of the process while it lasts.
            state = load_pickle(real, name, "cpu")
            for key, piece in pickle_pieces(state, keys):
                if self.check or key in edits:
                    self.finite.look(key, keys[key].dtype, piece)
            self.finite.settle(name)
        if not edits and not added:
            return self._copy(name, real, self._recorder(name))
        draft = self._target / name
        with _Source(real, name) as source:
            hashed = self._stages.source.do(hash_file, real)
            try:
                draft.parent.mkdir(parents=True, exist_ok=True)
                rewrite_pickle(state, draft, edits, added, self._piece)
                sync(draft)
                hashes = hashed.result(), hash_file(draft)
            except OSError as error:
                raise OutputError(f"cannot write {name}: {error.strerror}") from error
            source.require_unchanged()
        self._advance(source.size)
        record = self._recorder(name)
        return self._stages.flush.do(lambda: (record(*hashes), hashes)[1])

    def _copy(self, name: str, real: Path, then: Callable[[str, str], Any] | None) -> Future[tuple[str, str]]:
        with _Source(real, name) as source:
            sink = self._sink(name, differs=False)
            for begin in range(0, source.size, self._piece):
                slot = self._input.take()
                view = slot.memory[: min(self._piece, source.size - begin)]
                source.read(view, begin)
                sink.read(slot, view)
                sink.put(slot, view)
                self._advance(len(view))
            source.require_unchanged()
        return sink.finish(then or (lambda *_: None))

    def _sink(self, name: str, *, differs: bool) -> Sink:
        sink = Sink(self._stages, self._target / name, name, differs=differs)
        self._stages.keep(sink)
        return sink

    def _recorder(self, name: str) -> Callable[[str, str], Any]:
        journal = self.journal
        return (lambda *_: None) if journal is None else (lambda source, own: journal.record(name, source, own))


class _Source:
    """A file of the source, open."""

    def __init__(self, real: Path, name: str) -> None:
        self._name = name
        try:
            self._file = real.open("rb", buffering=0)
        except OSError as error:
            raise CheckpointError(f"cannot read {name}: {error.strerror}") from error
        self._state = os.fstat(self._file.fileno())
        self.size = self._state.st_size
        self._ahead = 0

    def __enter__(self) -> _Source:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def read(self, view: Any, offset: int) -> None:
        """Fill a buffer from an offset on, and ask the system for what comes next."""
        if hasattr(os, "posix_fadvise") and offset + _READ_AHEAD // 2 > self._ahead:
            os.posix_fadvise(self._file.fileno(), offset, _READ_AHEAD, os.POSIX_FADV_WILLNEED)
            self._ahead = offset + _READ_AHEAD
        try:
            whole = read_into(self._file, view, offset)
        except OSError as error:
            raise CheckpointError(f"cannot read {self._name}: {error.strerror}") from error
        if not whole:
            raise self._changed()

    def require_unchanged(self) -> None:
        """Refuse a file that was written to since it was opened."""
        now = os.fstat(self._file.fileno())
        if (now.st_size, now.st_mtime_ns) != (self._state.st_size, self._state.st_mtime_ns):
            raise self._changed()

    def _changed(self) -> CheckpointError:
        return CheckpointError(f"{self._name} changed while it was read; run again")
