"""A checkpoint on disk: check it, hash it, copy it, and say in its manifest what was done to it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from normswap._version import __version__
from normswap.atomic import AtomicFolder, check_output
from normswap.errors import CheckpointError, OutputError
from normswap.headers import Entry, load_pickle
from normswap.listing import MANIFEST, follow
from normswap.shards import Checkpoint, check_source

__all__ = [
    "MANIFEST",
    "AtomicFolder",
    "Checkpoint",
    "check_finite",
    "check_output",
    "check_source",
    "copy_checkpoint",
    "hash_weights",
    "read_manifest",
    "write_manifest",
]

_CHUNK = 1 << 24
_SCHEMA = 1
_FLOATS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "C64": "float32",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}


def check_finite(checkpoint: Checkpoint) -> None:
    """Read every floating-point tensor, a piece at a time, and refuse NaN and infinite values.

    Raises:
        CheckpointError: a tensor holds some; it is named, with their number.
    """
    for name in checkpoint.files:
        entries = {key: entry for key, entry in checkpoint.tensors.items() if entry.file == name}
        real = follow(checkpoint.path, name)
        pieces = _safetensors_pieces if checkpoint.format == "safetensors" else _pickle_pieces
        counts: dict[str, int] = {}
        for key, piece in pieces(real, name, entries):
            counts[key] = counts.get(key, 0) + _count_bad(piece)
        bad = {key: count for key, count in counts.items() if count}
        if bad:
            key = next(iter(bad))
            more = f" (and {len(bad) - 1} more tensors of this file do)" if len(bad) > 1 else ""
            raise CheckpointError(
                f"{key} in {name} holds {bad[key]} NaN or infinite values{more}; the checkpoint is damaged, or its "
                "training diverged"
            )


def hash_weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of each weight file, by name."""
    return {name: _stream(follow(checkpoint.path, name), None, lambda _: None) for name in checkpoint.files}


def copy_checkpoint(
    checkpoint: Checkpoint, target: Path, *, progress: Callable[[int, int], None] | None = None
) -> dict[str, str]:
    """Copy the weights byte for byte, and everything else that a loader needs (see `normswap.listing.companions`).

    The copy shares nothing with the source: links are followed, no hard links are made. The source is read once
    and never written. Memory is bounded by one piece of 16 MiB.

    Args:
        checkpoint: what `check_source` returned.
        target: an existing folder.
        progress: called with the bytes copied so far and their total.

    Returns:
        The SHA-256 of each weight file as it was read, by name.

    Raises:
        CheckpointError: a file of the source cannot be read or changed meanwhile.
        OutputError: the target cannot be written.
    """
    total, done = checkpoint.size, 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, total)

    hashes = {}
    for name in (*checkpoint.files, *checkpoint.others):
        digest = _stream(follow(checkpoint.path, name), target / name, advance)
        if name in checkpoint.files:
            hashes[name] = digest
    if done != total:
        raise CheckpointError(
            f"{checkpoint.path} changed while it was copied: expected {total} bytes, got {done}; run again"
        )
    return hashes


def write_manifest(target: Path, data: dict[str, Any]) -> None:
    """Write ``normswap.json`` into a folder: the data, the schema's number and the version of normswap.

    Raises:
        TypeError: the data is not plain JSON data.
        ValueError: it holds NaN or an infinite number, which JSON has not.
    """
    if not isinstance(data, dict):
        raise TypeError(f"expected a dict for {MANIFEST}, got a {type(data).__name__}")
    full = {"schema": _SCHEMA, "normswap": __version__, **data}
    (target / MANIFEST).write_text(json.dumps(full, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def read_manifest(path: Path) -> dict[str, Any] | None:
    """Read the ``normswap.json`` of a checkpoint; None where it has none.

    Raises:
        CheckpointError: it is not JSON, or of a schema that this version does not know.
    """
    file = path / MANIFEST
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"expected JSON in {file}, got something else; convert the checkpoint again") from error
    schema = data.get("schema") if isinstance(data, dict) else None
    if schema != _SCHEMA:
        raise CheckpointError(
            f"expected schema {_SCHEMA} in {file}, got {schema!r}; upgrade normswap (this is {__version__})"
        )
    return data


def _stream(source: Path, target: Path | None, advance: Callable[[int], None]) -> str:
    """Hash a file in pieces, and write it to the target where there is one."""
    digest = hashlib.sha256()
    try:
        stream = source.open("rb")
    except OSError as error:
        raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
    with stream:
        if target is None:
            for piece in _pieces(stream, source):
                digest.update(piece)
                advance(len(piece))
            return digest.hexdigest()
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with target.open("xb") as out:
                for piece in _pieces(stream, source):
                    digest.update(piece)
                    out.write(piece)
                    advance(len(piece))
        except OSError as error:
            raise OutputError(f"cannot write {target.name}: {error.strerror}") from error
    return digest.hexdigest()


def _pieces(stream: Any, source: Path) -> Iterator[memoryview]:
    buffer = bytearray(_CHUNK)
    while True:
        try:
            count = stream.readinto(buffer)
        except OSError as error:
            raise CheckpointError(f"cannot read {source}: {error.strerror}") from error
        if not count:
            return
        yield memoryview(buffer)[:count]


def _safetensors_pieces(file: Path, name: str, entries: dict[str, Entry]) -> Iterator[tuple[str, Any]]:
    import torch

    with file.open("rb") as stream:
        for key, entry in entries.items():
            if entry.dtype not in _FLOATS or entry.start is None or entry.end is None:
                continue
            dtype = getattr(torch, _FLOATS[entry.dtype])
            stream.seek(entry.start)
            left = entry.end - entry.start
            while left:
                data = bytearray(min(left, _CHUNK))
                if stream.readinto(data) != len(data):
                    raise CheckpointError(f"{name} changed while it was read: {key} is cut short; run again")
                left -= len(data)
                yield key, torch.frombuffer(data, dtype=dtype)


def _pickle_pieces(file: Path, name: str, entries: dict[str, Entry]) -> Iterator[tuple[str, Any]]:
    for key, tensor in load_pickle(file, name, "cpu").items():
        if key in entries and (tensor.is_floating_point() or tensor.is_complex()) and tensor.numel():
            flat = tensor.reshape(-1)
            for piece in flat.split(_CHUNK // 4):
                yield key, piece


def _count_bad(piece: Any) -> int:
    import torch

    if piece.is_complex():
        piece = torch.view_as_real(piece)
    if piece.element_size() == 1:
        piece = piece.float()
    # One pass that spreads NaN, with no temporaries; only damaged pieces are looked at again.
    low, high = torch.aminmax(piece)
    if bool(torch.isfinite(low)) and bool(torch.isfinite(high)):
        return 0
    return int((~torch.isfinite(piece)).sum())
