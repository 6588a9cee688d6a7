"""Which files of a checkpoint's folder go with its weights into a copy, and which links may be followed."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from normswap.errors import CheckpointError

__all__ = ["companions", "follow"]

MANIFEST = "normswap.json"
_JUNK = (".*", "*.lock", "*.incomplete", "*.tmp", "*~", "*.pyc", "__pycache__", "desktop.ini")
_OTHER_FRAMEWORKS = (
    *("*.h5", "*.msgpack", "*.onnx", "*.onnx_data*", "*.onnx.data", "*.gguf", "*.ggml", "*.ot", "*.tflite"),
    *("*.mlmodel", "*.mlpackage", "*.pth", "*.ckpt", "*.ckpt.*", "*.nemo", "*.engine"),
    *("openvino_model*", "consolidated*.safetensors", "params.json"),
)
_TRAINING = (
    *("optimizer*.pt", "optimizer*.bin", "optimizer*.safetensors", "scheduler*.pt", "scaler*.pt", "rng_state*"),
    *("trainer_state.json", "training_args.bin", "events.out.tfevents*", "zero_to_fp32.py", "latest"),
)
_FOLDERS = (
    *("onnx", "openvino", "coreml", "gguf", "original", "metal", "tflite"),
    *("runs", "logs", "wandb", "checkpoint-[0-9]*", "global_step[0-9]*"),
)
_WEIGHTS = (
    *("model.safetensors", "model.*.safetensors", "model-*-of-*.safetensors", "model.safetensors.index*.json"),
    *("pytorch_model.bin", "pytorch_model.*.bin", "pytorch_model-*-of-*.bin", "pytorch_model.bin.index*.json"),
    "pytorch_model.*.index.json",
)


def companions(folder: Path, weights: set[str]) -> list[str]:
    """List what must come along with the weights, by exclusion: whatever is not known to be useless is needed.

    Config, generation config, tokenizer, processor, chat templates, code, licence, README, extra heads and
    the sub-folders of sentence-transformers all pass. Left behind are, in every folder:

    - hidden files and folders (``.git``, ``.cache``), locks, half downloads, byte code;
    - weights of other frameworks (TensorFlow, Flax, ONNX, OpenVINO, GGUF, Core ML, ``original/``, ``*.pth``);
    - training state (optimizer, scheduler, random state, logs, ``checkpoint-N/``);
    - in the top folder: default weights that transformers does not load here (stale shards, pickles beside
      safetensors, variants such as ``model.fp16.safetensors``) and an earlier ``normswap.json``;
    - in a sub-folder: ``pytorch_model.bin`` where ``model.safetensors`` stands beside it.

    Args:
        folder: the checkpoint.
        weights: names, relative to it, that the caller copies as weights.

    Returns:
        Names relative to the folder, sorted.

    Raises:
        CheckpointError: a needed entry is a link that leaves the folder, a broken link or no plain file.
    """
    return sorted(name for name in _walk(folder, "") if name not in weights)


def follow(folder: Path, name: str) -> Path:
    """Return the file that a name in a checkpoint stands for.

    Links may stay in the folder or, in a snapshot of the Hub cache, lead to that model's blobs.

    Raises:
        CheckpointError: the link leaves the folder, is broken, or what it names is no plain file.
    """
    file = folder / name
    root = folder.resolve()
    try:
        real = file.resolve(strict=True)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(
            f"{name} in {folder} is a link to a file that is not there: half-downloaded; fetch the checkpoint again"
        ) from error
    blobs = [parent.parent / "blobs" for parent in root.parents if parent.name == "snapshots"]
    if not any(real.is_relative_to(allowed) for allowed in (root, *blobs)):
        raise CheckpointError(
            f"{name} in {folder} points outside its folder, to {real}; put the file itself there if you trust it"
        )
    if not stat.S_ISREG(real.stat().st_mode):
        raise CheckpointError(f"expected a plain file at {file}, got something else; remove it")
    return real


def _walk(folder: Path, prefix: str) -> Iterator[str]:
    with os.scandir(folder / prefix) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    for entry in entries:
        name = prefix + entry.name
        if entry.is_dir():
            if _matches(entry.name, (*_JUNK, *_FOLDERS, *_OTHER_FRAMEWORKS)):
                continue
            if entry.is_symlink():
                raise CheckpointError(f"{name} in {folder} is a link to a folder; put the folder itself there")
            yield from _walk(folder, f"{name}/")
        elif not _left_behind(entry.name, bool(prefix), names):
            follow(folder, name)
            yield name


def _left_behind(name: str, nested: bool, siblings: set[str]) -> bool:
    if _matches(name, (*_JUNK, *_OTHER_FRAMEWORKS, *_TRAINING)):
        return True
    if nested:
        return name == "pytorch_model.bin" and "model.safetensors" in siblings
    return name == MANIFEST or _matches(name, _WEIGHTS)


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)
