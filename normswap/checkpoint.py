"""A checkpoint on disk: check it, hash it, copy it, and say in its manifest what was done to it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from normswap._version import __version__
from normswap.atomic import AtomicFolder, check_output
from normswap.errors import CheckpointError
from normswap.finite import check_finite, check_floating
from normswap.listing import MANIFEST, follow
from normswap.pickles import hash_file
from normswap.shards import Checkpoint, check_source
from normswap.spec import NormSpec
from normswap.streaming import write_checkpoint

__all__ = [
    "MANIFEST",
    "AtomicFolder",
    "Checkpoint",
    "altered_files",
    "check_finite",
    "check_floating",
    "check_output",
    "check_source",
    "hash_weights",
    "note_on_altered",
    "read_manifest",
    "write_checkpoint",
    "write_manifest",
]

_SCHEMA = 1


def hash_weights(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the SHA-256 of each weight file, by name.

    Raises:
        CheckpointError: a file cannot be read.
    """
    return {name: hash_file(follow(checkpoint.path, name)) for name in checkpoint.files}


def altered_files(hashes: dict[str, str], manifest: dict[str, Any]) -> list[str]:
    """Name the weight files whose hashes are not those that a manifest records, and those that are not there.

    Args:
        hashes: what `hash_weights` returned.
        manifest: of the checkpoint.
    """
    # Manifests of before folding record the source's hashes alone, which the copy's were then.
    recorded = manifest.get("files") or manifest["source"]["files"]
    return sorted(name for name in {*hashes, *recorded} if hashes.get(name) != recorded.get(name)) if recorded else []


def note_on_altered(files: list[str]) -> list[str]:
    """Return a note that names altered files; none without."""
    if not files:
        return []
    more = f" and {len(files) - 3} more" if len(files) > 3 else ""
    return [f"the weights were changed since the conversion ({', '.join(files[:3])}{more})"]


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
        CheckpointError: it is not JSON, of a schema that this version does not know, or lacks what `load` needs.
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
        newer = isinstance(schema, int) and schema > _SCHEMA
        what = f"upgrade normswap (this is {__version__})" if newer else "convert the checkpoint again"
        raise CheckpointError(f"expected schema {_SCHEMA} in {file}, got {schema!r}; {what}")
    if fault := _fault(data):
        raise CheckpointError(f"{MANIFEST} in {path} is damaged: {fault}; convert the checkpoint again")
    return data


def _fault(data: dict[str, Any]) -> str | None:
    """Say what a manifest lacks of what is read from it later; None for a sound one."""
    source, norms = data.get("source"), data.get("norms")
    if not isinstance(source, dict):
        return f"expected an object under source, got {_shown(data, 'source')}"
    if not isinstance(source.get("name"), str):
        return f"expected a text under source.name, got {_shown(source, 'name')}"
    if not isinstance(source.get("revision"), str | None):
        return f"expected a text or null under source.revision, got {_shown(source, 'revision')}"
    if not isinstance(source.get("files"), dict):
        return f"expected an object under source.files, got {_shown(source, 'files')}"
    if not isinstance(norms, list):
        return f"expected a list under norms, got {_shown(data, 'norms')}"
    if not norms:
        return "expected at least one norm under norms, it is empty"
    for number, norm in enumerate(norms):
        where = f"norms[{number}]"
        if not isinstance(norm, dict):
            return f"expected an object at {where}, got {json.dumps(norm)[:60]}"
        if not isinstance(norm.get("name"), str):
            return f"expected a text under {where}.name, got {_shown(norm, 'name')}"
        if not isinstance(norm.get("spec"), dict):
            return f"expected an object under {where}.spec, got {_shown(norm, 'spec')}"
        try:
            NormSpec.from_dict(norm["spec"])
        except (TypeError, ValueError) as error:
            return f"{where}.spec is no spec: {error}"
    return None


def _shown(data: dict[str, Any], key: str) -> str:
    return json.dumps(data[key])[:60] if key in data else "none"
