"""What a model's configuration, and those nested in it, say about its inputs."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

__all__ = ["SPECIAL", "Settings", "embedding_size"]

SPECIAL = re.compile(r"(^|_)token_(id|index)s?$|_(start|end)_id$|^(bos|eos|pad|unk|mask)_index$")


class Settings:
    """Reads a configuration and those nested in it."""

    def __init__(self, config: Any) -> None:
        self.configs: list[Any] = []
        self._collect(config)

    def _collect(self, config: Any) -> None:
        if any(config is known for known in self.configs):
            return
        self.configs.append(config)
        for value in list(getattr(config, "__dict__", {}).values()):
            if hasattr(value, "model_type") and hasattr(value, "to_dict"):
                self._collect(value)

    def sub(self, names: tuple[str, ...]) -> Settings | None:
        """Settings of the first nested configuration of one of these names, the outermost first."""
        for config in self.configs:
            for name in names:
                value = getattr(config, name, None)
                if hasattr(value, "to_dict"):
                    return Settings(value)
        return None

    def side(self, *names: str) -> int | None:
        """The first positive integer under one of these names, or the last of several that stand there."""
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if isinstance(value, (list, tuple)) and value:
                    value = value[-1]
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return None

    def integer(self, *names: str, default: int | None = None) -> int | None:
        """The first positive integer found under one of these names."""
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
        return default

    def value(self, *names: str) -> Any:
        """The first value that is not None under one of these names."""
        for name in names:
            for config in self.configs:
                value = getattr(config, name, None)
                if value is not None:
                    return value
        return None

    def special_ids(self) -> set[int]:
        """Token ids that the configurations give a meaning to."""
        found: set[int] = set()
        for config in self.configs:
            for name, value in getattr(config, "__dict__", {}).items():
                if SPECIAL.search(name):
                    for entry in value if isinstance(value, (list, tuple)) else [value]:
                        if isinstance(entry, int) and not isinstance(entry, bool):
                            found.add(entry)
        return found


def embedding_size(model: nn.Module) -> int | None:
    """How many token ids the model's input embedding takes; None if it does not say."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        # A model of no library: its first table.
        embedding = next((module for module in model.modules() if isinstance(module, nn.Embedding)), None)
    size = getattr(embedding, "num_embeddings", None)
    if size is None:
        weight = getattr(embedding, "weight", None)
        size = weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
    return size if isinstance(size, int) else None
