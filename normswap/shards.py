"""Find the weight files that transformers would load from a folder, and check them before anything happens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from normswap.errors import CheckpointError
from normswap.headers import Entry, read_pickle, read_safetensors
from normswap.listing import companions, follow

__all__ = ["Checkpoint", "check_source", "files_to_copy"]

_CANDIDATES = (
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
_UNUSABLE = ("*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.pth", "model.*.safetensors", "pytorch_model.*.bin")


@dataclass(frozen=True)
class Checkpoint:
    """A checked checkpoint folder.

    Attributes:
        path: the folder.
        format: of the weights.
        files: names of the weight files, in the order in which transformers reads them.
        index_name: name of the index; None where the weights are one file.
        index: what it holds.
        tensors: key to file, dtype, shape and place.
        others: names of the other files that a loader needs, the index among them.
        notes: what a user should know, such as a second set of weights that is left behind.
    """

    path: Path
    format: Literal["safetensors", "pickle"]
    files: tuple[str, ...]
    index_name: str | None
    index: dict[str, Any] | None
    tensors: dict[str, Entry]
    others: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files that belong to it."""
        return sum((self.path / name).stat().st_size for name in (*self.files, *self.others))


def check_source(path: Path) -> Checkpoint:
    """Check a checkpoint from its index and the headers of its shards; no tensor data is read.

    Raises:
        CheckpointError: no weights, a damaged index, or a shard that is missing, half-downloaded, truncated,
            outside the folder, unsafe to load, or without a tensor that the index puts there.
    """
    try:
        return _check(Path(path))
    except OSError as error:
        raise CheckpointError(f"cannot read the checkpoint {path}: {error.strerror}: {error.filename}") from error


def files_to_copy(path: Path) -> tuple[str, ...]:
    """List the names of all files that belong to the checkpoint, without checking the shards."""
    main = _main_file(path)
    index = _read_index(path, main) if main.endswith(".index.json") else None
    files = sorted(set(index["weight_map"].values())) if index else [main]
    return (*files, *_others(path, files, main if index else None))


def _check(path: Path) -> Checkpoint:
    main = _main_file(path)
    index_name = main if main.endswith(".index.json") else None
    index = _read_index(path, main) if index_name else None
    weight_map: dict[str, str] = index["weight_map"] if index else {}
    files = sorted(set(weight_map.values())) if index else [main]
    pickle = main.startswith("pytorch_model.bin")
    expected: dict[str, list[str]] = {}
    for key, shard in weight_map.items():
        expected.setdefault(shard, []).append(key)
    tensors: dict[str, Entry] = {}
    for name in files:
        real = _shard(path, name, index_name)
        found = read_pickle(real, name) if pickle else read_safetensors(real, name)
        for key in expected.get(name, ()):
            if key not in found:
                raise CheckpointError(
                    f"{index_name} says that {key} is in {name}, which has no such tensor; index and shards belong "
                    "to different checkpoints"
                )
        tensors.update({key: found[key] for key in found if weight_map.get(key, name) == name})
    if not tensors:
        raise CheckpointError(f"expected tensors in {path}, its weight files hold none")
    others = _others(path, files, index_name)
    format_: Literal["safetensors", "pickle"] = "pickle" if pickle else "safetensors"
    return Checkpoint(path, format_, tuple(files), index_name, index, tensors, others, _notes(path, main))


def _main_file(path: Path) -> str:
    named = _named_by_config(path)
    if named is not None:
        return named
    for name in _CANDIDATES:
        if (path / name).is_file() or (path / name).is_symlink():
            return name
    if any(path.glob("*.incomplete")) or any(path.glob(".cache/huggingface/download/**/*.incomplete")):
        raise CheckpointError(f"{path} is half-downloaded: it holds *.incomplete and no weights; fetch it again")
    unusable = sorted(file.name for pattern in _UNUSABLE for file in path.glob(pattern))
    raise CheckpointError(
        f"expected weights in {path} ({' or '.join(_CANDIDATES)}), there are none"
        + (f"; {', '.join(unusable[:3])} is not what transformers loads by default" if unusable else "")
    )


def _named_by_config(path: Path) -> str | None:
    try:
        name = json.loads((path / "config.json").read_text(encoding="utf-8")).get("transformers_weights")
    except (OSError, ValueError, AttributeError):
        # The config is read and complained about elsewhere; here it only may name the weights.
        return None
    if not isinstance(name, str):
        return None
    if not name.endswith((".safetensors", ".safetensors.index.json")):
        raise CheckpointError(f"config.json names {name!r} as transformers_weights, expected a safetensors file")
    _refuse_outside(name, "config.json")
    return name


def _read_index(path: Path, name: str) -> dict[str, Any]:
    real = follow(path, name)
    try:
        index = json.loads(real.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"expected JSON in {name}, got something else; fetch the checkpoint again") from error
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"expected a weight_map in {name}, there is none; fetch the checkpoint again")
    for key, shard in weight_map.items():
        if not isinstance(shard, str) or not shard:
            raise CheckpointError(f"expected the name of a shard for {key} in {name}, got {shard!r}")
        _refuse_outside(shard, name)
    return index


def _refuse_outside(shard: str, where: str) -> None:
    pure = PurePosixPath(shard)
    if pure.is_absolute() or ".." in pure.parts or "\\" in shard or ":" in shard or "\0" in shard:
        raise CheckpointError(f"{where} points outside its folder, to {shard!r}; refused")


def _shard(path: Path, name: str, index_name: str | None) -> Path:
    file = path / name
    if not file.exists() and not file.is_symlink():
        partial = [*path.glob(f"{name}*.incomplete"), *path.glob(".cache/huggingface/download/**/*.incomplete")]
        state = "half-downloaded" if partial else "it is not there"
        raise CheckpointError(
            f"{index_name or 'config.json'} names the shard {name}, {state}; fetch the checkpoint again"
        )
    return follow(path, name)


def _others(path: Path, files: list[str], index_name: str | None) -> tuple[str, ...]:
    found = companions(path, set(files))
    if index_name and index_name not in found:
        found.append(index_name)
    return tuple(found)


def _notes(path: Path, main: str) -> tuple[str, ...]:
    stem = main.removesuffix(".index.json")
    if main == stem and (path / f"{stem}.index.json").is_file():
        return (f"{main} and {main}.index.json are both there: transformers loads {main}, the rest is left behind",)
    return ()
