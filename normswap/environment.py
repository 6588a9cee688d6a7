"""What a measurement ran on, in words."""

from __future__ import annotations

import platform
from importlib import metadata

import torch

from normswap._version import __version__

__all__ = ["device_words", "versions"]


def device_words(device: torch.device) -> str:
    """Return a GPU's name; of a CPU, its architecture and the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{platform.machine()} {device.type}, {threads} thread{'' if threads == 1 else 's'}"


def versions() -> dict[str, str]:
    """Return the versions of the software that runs."""
    found = {"python": platform.python_version(), "normswap": __version__}
    for name in ("torch", "transformers", "triton"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
