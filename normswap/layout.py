"""What a rewritten weight file holds, in order: its header and the ranges of the source that its data come from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from normswap.bits import FLOATS
from normswap.errors import CheckpointError
from normswap.headers import BITS, Entry, read_safetensors
from normswap.shards import Checkpoint, check_source

__all__ = ["Added", "Edit", "Segment", "ShardLayout", "check_written", "lay_out", "rewrite_index", "torch_dtype"]


class Edit(Protocol):
    """How one stored tensor changes."""

    def apply(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        """Return new values for some rows, not yet rounded.

        Args:
            rows: ``(k, ...)``, rows ``[start, start + k)`` of the stored tensor in its dtype; a view of a buffer that
                is used again after the call.
            start: number of the first.

        Returns:
            The same shape, float64, or float32 where that holds every new value exactly. It is read before the next
            call, and may be a buffer of the edit's own.
        """
        ...


@dataclass(frozen=True)
class Added:
    """A tensor that the source lacks: another stored tensor once more, under a name of its own.

    Attributes:
        source: the tensor that is copied; dtype, shape and file are its own.
        edit: how the copy changes; None for a plain one.
    """

    source: str
    edit: Edit | None = None


@dataclass(frozen=True)
class Segment:
    """A tensor of the written file.

    Attributes:
        key: its name there.
        entry: the tensor of the source that it comes from.
        edit: how it changes.
        again: whether it is an added copy, whose source is read a second time.
    """

    key: str
    entry: Entry
    edit: Edit | None
    again: bool = False


@dataclass(frozen=True)
class ShardLayout:
    """A safetensors file as it will be written.

    Attributes:
        source_header: the first bytes of the source, up to the data.
        header: those of the written file; the same ones where nothing is added.
        segments: the tensors, in the order of their data.
    """

    source_header: bytes
    header: bytes
    segments: tuple[Segment, ...]

    @property
    def changes(self) -> bool:
        """Whether the written file differs from the source."""
        return any(segment.edit is not None or segment.again for segment in self.segments)


def torch_dtype(key: str, entry: Entry) -> torch.dtype:
    """Return the dtype of a stored tensor that is to be edited.

    Raises:
        CheckpointError: it is no real floating-point dtype.
    """
    if entry.dtype not in FLOATS or entry.dtype.startswith("C"):
        raise CheckpointError(f"expected floating-point numbers in {key} to fold a gain into, got {entry.dtype}")
    return FLOATS[entry.dtype]


def lay_out(
    checkpoint: Checkpoint, file: Path, name: str, edits: Mapping[str, Edit], added: Mapping[str, Added]
) -> ShardLayout:
    """Lay a rewritten safetensors file out. An added tensor stands right behind the one that it copies.

    Args:
        checkpoint: the source.
        file: one of its weight files.
        name: its name relative to the checkpoint.
        edits: key to change; keys of other files are passed over.
        added: key to new tensor; likewise.

    Raises:
        CheckpointError: the file changed, a tensor to be edited stands in two files or has a dtype that cannot be.
    """
    entries = read_safetensors(file, name)
    for key in {*edits, *(new.source for new in added.values())} & entries.keys():
        if checkpoint.tensors[key].file != name:
            raise CheckpointError(
                f"{key} stands in {checkpoint.tensors[key].file} and in {name}; expected it once, for the two may be "
                "loaded in either order: mend the checkpoint"
            )
    begin = min((entry.start for entry in entries.values() if entry.start is not None), default=file.stat().st_size)
    with file.open("rb") as stream:
        source_header = stream.read(begin)
    copies: dict[str, list[tuple[str, Added]]] = {}
    for key, new in added.items():
        copies.setdefault(new.source, []).append((key, new))
    segments = []
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start or 0, item[1].end or 0)):
        segments.append(Segment(key, entry, edits.get(key)))
        segments += [Segment(new, entry, item.edit, again=True) for new, item in copies.get(key, ())]
    for segment in segments:
        if segment.edit is not None:
            torch_dtype(segment.key, segment.entry)
    header = source_header
    if any(segment.again for segment in segments):
        header = _new_header(source_header, segments)
    return ShardLayout(source_header, header, tuple(segments))


def _new_header(source: bytes, segments: list[Segment]) -> bytes:
    old = json.loads(source[8:].decode("utf-8"))
    places, position = {}, 0
    for segment in segments:
        assert segment.entry.start is not None and segment.entry.end is not None
        size = segment.entry.end - segment.entry.start
        places[segment.key] = [position, position + size]
        position += size
    behind: dict[str, list[str]] = {}
    latest = ""
    for segment in segments:
        latest = latest if segment.again else segment.key
        if segment.again:
            behind.setdefault(latest, []).append(segment.key)
    new: dict[str, Any] = {}
    for key, value in old.items():
        new[key] = value if key == "__metadata__" else {**value, "data_offsets": places[key]}
        for copy in behind.get(key, ()):
            new[copy] = {**value, "data_offsets": places[copy]}
    text = json.dumps(new, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
    # The data of a safetensors file begin at a multiple of eight bytes.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def rewrite_index(checkpoint: Checkpoint, target: Path, added: Mapping[str, Added]) -> None:
    """Write the index anew: the map with the added tensors, and its totals counted from the headers.

    Args:
        checkpoint: the source; nothing is written where it has no index.
        target: the folder of the new checkpoint.
        added: key to new tensor.
    """
    if checkpoint.index is None or checkpoint.index_name is None:
        return
    weight_map = {**checkpoint.index["weight_map"]}
    weight_map.update({key: checkpoint.tensors[new.source].file for key, new in added.items()})
    entries = [*checkpoint.tensors.values(), *(checkpoint.tensors[new.source] for new in added.values())]
    numbers = [math.prod(entry.shape) for entry in entries]
    totals = {
        "total_size": sum(count * BITS[entry.dtype] // 8 for count, entry in zip(numbers, entries, strict=True)),
        "total_parameters": sum(numbers),
    }
    metadata = checkpoint.index.get("metadata")
    index = {**checkpoint.index, "weight_map": weight_map}
    if isinstance(metadata, dict):
        index["metadata"] = {**metadata, **{key: count for key, count in totals.items() if key in metadata}}
    text = json.dumps(index, indent=2, ensure_ascii=False) + "\n"
    (target / checkpoint.index_name).write_text(text, encoding="utf-8")


def check_written(checkpoint: Checkpoint, target: Path, added: Mapping[str, Added]) -> None:
    """Read a written checkpoint as a loader would, and hold its index and headers against the source.

    Args:
        checkpoint: the source.
        target: the folder that was written.
        added: tensors that the source lacks.

    Raises:
        CheckpointError: a tensor is missing, there twice, or of another dtype or shape; another file would be
            loaded; a file is not whole.
    """
    written = check_source(target)
    if (written.format, written.files, written.index_name) != (
        checkpoint.format,
        checkpoint.files,
        checkpoint.index_name,
    ):
        raise _wrong(target, f"expected {', '.join(checkpoint.files[:3])} to be loaded, got {written.files[:3]}")
    expected = {key: (entry.file, entry.dtype, entry.shape) for key, entry in checkpoint.tensors.items()}
    expected |= {key: expected[new.source] for key, new in added.items()}
    found = {key: (entry.file, entry.dtype, entry.shape) for key, entry in written.tensors.items()}
    for key in sorted({*expected, *found}):
        if expected.get(key) != found.get(key):
            raise _wrong(target, f"expected {expected.get(key, 'no tensor')} for {key}, got {found.get(key, 'none')}")
    if added and written.index is not None and (lost := set(added) - set(written.index["weight_map"])):
        raise _wrong(target, f"{written.index_name} lacks {', '.join(sorted(lost))}")


def _wrong(target: Path, what: str) -> CheckpointError:
    return CheckpointError(f"the checkpoint written to {target} is wrong: {what}; the disk, or normswap, is at fault")
