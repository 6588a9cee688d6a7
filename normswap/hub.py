"""From what the user named to a local folder: the folder itself, or a Hub id fetched into the normal cache."""

from __future__ import annotations

import os
import re
from pathlib import Path

from normswap.errors import CheckpointError, UsageError

__all__ = ["locate"]

_HUB_ID = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_CONFIG_ONLY = ["config.json", "*.py"]
# What `write_checkpoint` would leave behind anyhow: other frameworks' weights and training state.
_OTHER_FORMATS = [
    *(
        "*.h5",
        "*.msgpack",
        "*.onnx",
        "*.onnx_data",
        "*.gguf",
        "*.ggml",
        "*.ot",
        "*.tflite",
        "*.mlmodel",
        "*.pth",
    ),
    *(
        "onnx/*",
        "openvino/*",
        "coreml/*",
        "original/*",
        "metal/*",
        "optimizer.*",
        "scheduler.*",
        "rng_state*",
    ),
]


def locate(model: str | Path, *, revision: str | None, weights: bool) -> tuple[Path, str | None]:
    """Return the folder of a checkpoint and its commit where known.

    Args:
        model: a folder, or a Hub id.
        revision: branch, tag or commit of a Hub id; a folder has none.
        weights: False fetches the configuration and the code only.

    Raises:
        CheckpointError: there is no such folder, and the Hub has no such model or cannot be reached.
        UsageError: a revision was given for a folder.
    """
    name = os.fspath(model)
    path = Path(name).expanduser()
    if path.is_dir():
        if revision is not None:
            raise UsageError(f"expected a Hub id with a revision, got the folder {name}; leave the revision out")
        return path, _commit_of(path)
    if path.exists():
        raise CheckpointError(f"expected the folder of a checkpoint, got the file {name}; give its folder")
    if isinstance(model, Path) or not _HUB_ID.fullmatch(name):
        raise CheckpointError(f"expected a model folder or a Hub id, got {name!r}: no such folder")
    found = _fetch(name, revision, weights)
    return found, _commit_of(found)


def _commit_of(path: Path) -> str | None:
    resolved = path.resolve()
    inside = resolved.parent.name == "snapshots" and _COMMIT.fullmatch(resolved.name)
    return resolved.name if inside else None


def _fetch(name: str, revision: str | None, weights: bool) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        ignore = _ignored(name, revision) if weights else None
        allow = None if weights else _CONFIG_ONLY
        found = snapshot_download(name, revision=revision, allow_patterns=allow, ignore_patterns=ignore)
        return Path(found)
    except errors.GatedRepoError as error:
        raise CheckpointError(
            f"the Hub model {name} is gated: ask for access on its page, then log in with `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise CheckpointError(f"the Hub model {name} has no revision {revision!r}") from error
    except errors.RepositoryNotFoundError as error:
        raise CheckpointError(
            f"expected a model folder or a Hub id, got {name!r}: no such folder, and the Hub has no "
            "such model (a private one needs `hf auth login`)"
        ) from error
    except Exception as error:
        raise CheckpointError(
            f"expected a model folder or a Hub id, got {name!r}: no such folder and not reachable on the Hub "
            f"({type(error).__name__})"
        ) from error


def _ignored(name: str, revision: str | None) -> list[str]:
    """Leave out the pickles of a model that has safetensors."""
    from huggingface_hub import HfApi

    try:
        files = {file.rfilename for file in HfApi().model_info(name, revision=revision).siblings or []}
    except Exception:
        # `snapshot_download` meets the same trouble next: it finds the model in the cache or says why not.
        return _OTHER_FORMATS
    main = {"model.safetensors", "model.safetensors.index.json"}
    return [*_OTHER_FORMATS, *(["*.bin"] if main & files else [])]
