"""What was found out on the way: about a norm's output, and about a weight that reads some."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from normswap.spec import NormSpec

__all__ = ["EMBEDDING", "UNREAD", "Norm", "Read", "bias_words", "meaning"]

# The code of a column that no product has read yet.
UNREAD = -9
EMBEDDING = "embedding"


_MEANINGS = {
    "add": "it is added to something else",
    "sub": "it is subtracted from something else, or that from it",
    "mul": "it is multiplied with itself or with another norm's output",
    "mm": "it is multiplied with what is no weight",
    "bmm": "it is multiplied with what is no weight",
    "copy": "it is written into something else",
    "index_add": "it is added to something else",
    "index_put": "it is written into something else",
}


@dataclass(eq=False)
class Norm:
    """A norm on the way, or several of one gain, and what was found out about the output."""

    names: list[str]
    module: nn.Module
    spec: NormSpec | None
    first: int = 0
    channels: int = 0
    blockers: dict[str, None] = field(default_factory=dict)
    plain: bool = True
    waiting: set[int] = field(default_factory=set)

    @property
    def reached(self) -> bool:
        """Whether a forward came by each of its modules."""
        return not self.waiting


@dataclass
class Read:
    """All products of one weight along one axis with marked tensors."""

    name: str
    axis: int
    codes: torch.Tensor
    parts: dict[tuple[int, ...], int] = field(default_factory=dict)
    biases: dict[int | None, None] = field(default_factory=dict)


def bias_words(read: Read) -> str:
    return f"bias of {read.name}"


def meaning(operation: str) -> str:
    """Say what it means that an operation reads a norm's output."""
    return _MEANINGS.get(
        operation, "attention scores are taken of it" if "attention" in operation else "not linear in it"
    )
