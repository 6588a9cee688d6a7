"""Tensors that outlive a forward: what the model returns, and what its modules keep for later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

__all__ = ["kept", "returned"]

# Objects in objects are looked into this far.
_DEPTH = 4


def returned(output: Any, depth: int = _DEPTH) -> Iterator[torch.Tensor]:
    """Yield the tensors of a model's output, also in objects; what a cache keeps for the next step is none.

    Args:
        output: what a forward returned.
        depth: how many objects deep is looked.
    """
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from returned(value, depth)
    elif isinstance(output, (list, tuple, set)):
        for value in output:
            yield from returned(value, depth)
    elif depth and hasattr(output, "__dict__") and not isinstance(output, (type, nn.Module)) and not _is_cache(output):
        yield from returned(vars(output), depth - 1)


def kept(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors that modules hold beside their parameters and buffers, with the name of the attribute."""
    for name, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _OWN:
                for tensor in returned(value):
                    yield f"{name}.{key}" if name else key, tensor


# What a module keeps for torch, which never holds a result.
_OWN = set(vars(nn.Module())) | {"config", "generation_config"}


def _is_cache(value: object) -> bool:
    return hasattr(value, "get_seq_length") or hasattr(value, "update_recurrent_state")
