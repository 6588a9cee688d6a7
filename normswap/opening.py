"""Open what the user named: a checkpoint, a device, a backend, a dtype."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import checkpoint as ckpt
from normswap import loading, modules
from normswap.dtypes import named_dtype
from normswap.errors import CheckpointError, UsageError
from normswap.loading import Source
from normswap.measuring import Serving
from normswap.parity import Criterion
from normswap.quiet import first_line

__all__ = ["Progress", "check_weights", "open_source", "require_one_class", "serving", "source_of_manifest"]

Progress = Callable[[str, int, int], None]


def open_source(model: str | Path, **options: Any) -> Source:
    """Find a checkpoint, see `normswap.source.resolve`."""
    # An empty path would name the working folder.
    if isinstance(model, str) and not model.strip():
        raise CheckpointError(f"expected a model folder or a Hub id, got {model!r}: no such folder")
    return loading.resolve(model, **options)


def check_weights(source: Source) -> ckpt.Checkpoint:
    """Check the weight files of a checkpoint, and warn of what is left behind."""
    checkpoint = ckpt.check_source(source.path)
    for note in checkpoint.notes:
        warnings.warn(f"{source.name}: {note}", stacklevel=3)
    return checkpoint


def require_one_class(converted: Source, original: Source) -> None:
    """Refuse two checkpoints of different architectures."""
    # By name: code of a checkpoint gives each folder a class of its own.
    names = [loading.model_class(source).__name__ for source in (converted, original)]
    if names[0] != names[1]:
        raise UsageError(f"expected two checkpoints of one architecture, got {names[0]} and {names[1]}")


def source_of_manifest(manifest: dict[str, Any], trust_remote_code: bool) -> Source:
    """Find the checkpoint that a converted one was made from."""
    name, revision = manifest["source"]["name"], manifest["source"].get("revision")
    try:
        return open_source(name, revision=revision, trust_remote_code=trust_remote_code)
    except CheckpointError as error:
        raise CheckpointError(
            f"the source that {ckpt.MANIFEST} names cannot be read ({error}); name it with --against"
        ) from None


def serving(
    backend: str,
    dtype: str | torch.dtype | None,
    device: str | torch.device | None,
    model: Source | nn.Module,
    text: str | Path | None,
    criterion: Criterion | None,
    progress: Progress | None,
    **more: Any,
) -> Serving:
    """Settle how models are run for a measurement; what is not given is the checkpoint's own.

    Args:
        backend: see `normswap.api.verify`.
        dtype: likewise.
        device: likewise.
        model: what is verified.
        text: see `normswap.api.verify`.
        criterion: likewise.
        progress: likewise.
        **more: further settings of `Serving`, by name.
    """
    stored = getattr(model.config if isinstance(model, Source) else model, "dtype", None)
    where = _device(device)
    return Serving(
        backend=modules.resolve_backend(backend, where),
        dtype=named_dtype(dtype if dtype is not None else stored or torch.float32),
        device=where,
        text=None if text is None else Path(text),
        criterion=criterion,
        progress=progress,
        **more,
    )


def _device(given: str | torch.device | None) -> torch.device:
    if given is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(given)
        # Read back, for the meta device takes anything and computes nothing.
        torch.zeros(1, device=device).item()
    except Exception as error:
        reason = re.split(r"\.\s", first_line(error))[0].rstrip(".")
        raise UsageError(f"expected a device that torch can use here, got {str(given)!r}: {reason}") from None
    if device.type == "cpu" and device.index:
        raise UsageError(f"expected a device that torch can use here, got {str(given)!r}: there is one cpu, number 0")
    return device
