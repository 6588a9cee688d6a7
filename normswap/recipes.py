"""How a batch is made: what each argument of a forward holds, for one row of text or none."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

__all__ = ["Draw", "Fixed", "Numbered", "Ones", "Part", "Pick", "Recipe", "Row", "Stacked"]


@dataclass(frozen=True)
class Row:
    """What the parts of one batch are made from.

    Attributes:
        ids: (1, n) token ids, the places for other media among them; None without text.
        marks: (1, n), 0 for text, and the number of its medium for a place that holds something else.
        generator: of what is drawn.
    """

    ids: torch.Tensor | None
    marks: torch.Tensor | None
    generator: torch.Generator


@dataclass(frozen=True)
class Draw:
    """A floating tensor of this shape, drawn anew for each batch."""

    shape: tuple[int, ...]

    def __call__(self, row: Row) -> torch.Tensor:
        return torch.randn(*self.shape, generator=row.generator)


@dataclass(frozen=True)
class Numbered(Draw):
    """Rows (1, n, width) drawn anew, each behind the numbers, from 1, of its row and column in a grid so wide."""

    side: int

    def __call__(self, row: Row) -> torch.Tensor:
        made, at = super().__call__(row), torch.arange(self.shape[1])
        made[..., 0], made[..., 1] = at // self.side + 1, at % self.side + 1
        return made


@dataclass(frozen=True)
class Pick:
    """Whole numbers below ``top`` in this shape, drawn anew for each batch."""

    top: int
    shape: tuple[int, ...]

    def __call__(self, row: Row) -> torch.Tensor:
        return torch.randint(self.top, self.shape, generator=row.generator)


@dataclass(frozen=True)
class Ones:
    """Ones in this shape: a mask that hides nothing, or the smallest of sizes."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.long

    def __call__(self, row: Row) -> torch.Tensor:
        return torch.ones(self.shape, dtype=self.dtype)


@dataclass(frozen=True)
class Fixed:
    """A value that is the same in each batch."""

    value: Any

    def __call__(self, row: Row) -> Any:
        return self.value


Part = Callable[[Row], Any]


@dataclass(frozen=True)
class Stacked:
    """Ids of several codebooks: another part's (1, n) ids as (count, n), or as (1, n, count)."""

    part: Part
    count: int
    first: bool

    def __call__(self, row: Row) -> torch.Tensor:
        ids: torch.Tensor = self.part(row)
        return ids.repeat(self.count, 1) if self.first else ids[..., None].repeat(1, 1, self.count)


@dataclass(frozen=True)
class Recipe:
    """Keyword arguments of a forward, still to be made.

    Attributes:
        kind: as in `normswap.inputs.Inputs`.
        parts: what each argument holds.
        text: whether rows of text go into it.
        places: how many places for other media stand in the text, by token id.
    """

    kind: str
    parts: Mapping[str, Part]
    text: bool = False
    places: Mapping[int, int] = field(default_factory=dict)

    @property
    def elements(self) -> int:
        """How many numbers are drawn for one batch."""
        return sum(math.prod(part.shape) for part in self.parts.values() if isinstance(part, (Draw, Pick)))

    def give(self, **parts: Part) -> Recipe:
        """Return one with these arguments as well, or in place of those it had."""
        return replace(self, parts={**self.parts, **parts})

    def place(self, token: int, count: int) -> Recipe:
        """Return one with so many places for what this token stands for."""
        return replace(self, places={**self.places, token: count})

    def make(self, text: torch.Tensor | None, media: Mapping[int, int], generator: torch.Generator) -> dict[str, Any]:
        """Make the arguments.

        Args:
            text: (1, n) token ids; None where `text` is False.
            media: the number of its medium for each token id in `places`.
            generator: of what is drawn.
        """
        row = Row(None, None, generator)
        if text is not None:
            ids, marks = text, torch.zeros_like(text)
            for token, count in self.places.items():
                ids = torch.cat([ids[:, :1], torch.full((1, count), token), ids[:, 1:]], 1)
                marks = torch.cat([marks[:, :1], torch.full((1, count), media[token]), marks[:, 1:]], 1)
            row = Row(ids, marks, generator)
        return {name: part(row) for name, part in self.parts.items()}
