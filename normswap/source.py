"""A checkpoint that was found: its folder, its commit and its configuration."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import transformers

from normswap.errors import CheckpointError, ModelError
from normswap.hub import locate
from normswap.quiet import first_line, quiet

__all__ = ["Source", "resolve"]


@dataclass(frozen=True)
class Source:
    """A checkpoint that was found, with its configuration.

    Attributes:
        name: what the user gave.
        path: the local folder: the one given, or the Hub snapshot.
        revision: the commit where known, else None.
        config: the configuration that ``config.json`` describes.
        trust_remote_code: whether Python code that the checkpoint carries may run.
        settings_of: another checkpoint's folder whose configuration this is, and whose code runs; None for its own.
    """

    name: str
    path: Path
    revision: str | None
    config: transformers.PretrainedConfig
    trust_remote_code: bool
    settings_of: Path | None = None


def resolve(
    model: str | Path, *, revision: str | None = None, trust_remote_code: bool = False, weights: bool = True
) -> Source:
    """Find a checkpoint and read its configuration.

    Args:
        model: a folder, or a Hub id such as ``"org/name"``, which is fetched into the normal cache.
            ``HF_HUB_OFFLINE`` and the other Hub settings are honoured.
        revision: branch, tag or commit of a Hub id.
        trust_remote_code: whether Python code that the checkpoint carries may run.
        weights: False fetches the configuration and the code only.

    Raises:
        CheckpointError: no such folder or Hub id, no ``config.json``, or one that is not JSON.
        ModelError: a model type that transformers does not know, or one that needs its own code.

    Example:
        >>> resolve("./absent")
        Traceback (most recent call last):
        normswap.errors.CheckpointError: expected a model folder or a Hub id, got './absent': no such folder
    """
    path, commit = locate(model, revision=revision, weights=weights)
    data = _read_config(path)
    return Source(str(model), path, commit, _config(path, data, trust_remote_code), trust_remote_code)


def _read_config(path: Path) -> dict[str, Any]:
    file = path / "config.json"
    if not file.is_file():
        raise CheckpointError(f"expected config.json in {path}, there is none{_hint(path)}")
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CheckpointError(f"expected JSON in {file}, got something else: {first_line(error)}") from error
    if not isinstance(data, dict):
        raise CheckpointError(f"expected a JSON object in {file}, got a {type(data).__name__}")
    return data


def _hint(path: Path) -> str:
    if (path / "adapter_config.json").is_file():
        return "; this is an adapter: merge it into its base model and save that"
    folders = sorted(found.parent.name for found in path.glob("*/config.json"))
    if folders:
        return f"; give the sub-folder that holds the model ({', '.join(folders[:5])})"
    if any(path.glob("*.gguf")):
        return "; a GGUF file must be converted to a Hugging Face checkpoint first"
    return "; give the folder of a Hugging Face checkpoint"


def _config(path: Path, data: dict[str, Any], trust: bool) -> transformers.PretrainedConfig:
    kind = data.get("model_type")
    own_code = "AutoConfig" in (data.get("auto_map") or {})
    known = isinstance(kind, str) and kind in transformers.CONFIG_MAPPING
    if own_code and not trust and not known:
        raise ModelError(
            f"{path} has model type {kind!r}, which is defined by Python code in the checkpoint; read that "
            "code and, if you trust it, allow it with --trust-remote-code (trust_remote_code=True)"
        )
    if kind is not None and not known and not own_code:
        raise ModelError(
            f"transformers {transformers.__version__} does not know the model type {kind!r} of {path}; "
            "upgrade transformers, or pass --trust-remote-code if the checkpoint brings its own code"
        )
    try:
        with quiet():
            return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=trust)
    except Exception as error:
        if kind is None:
            raise CheckpointError(
                f"expected a model_type in {path / 'config.json'}, there is none; give the folder of a "
                "transformers model"
            ) from error
        raise ModelError(f"cannot read {path / 'config.json'} as a {kind!r} config: {first_line(error)}") from error
