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
from normswap.finite import check_finite
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
