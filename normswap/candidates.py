"""Inputs worth trying on a model, most telling first, from what its forward takes and its configuration says."""

from __future__ import annotations

import heapq
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.attempts import Attempts
from normswap.media import IMAGES, SERIES, SOUNDS, VIDEOS, images, series, sounds, videos
from normswap.mending import Mender
from normswap.recipes import Draw, Fixed, Part, Pick, Recipe, Row
from normswap.settings import Settings, embedding_size

__all__ = ["Candidate", "beside", "propose"]

_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_target_positions", "max_source_positions", "max_2d_position_embeddings",
)  # fmt: skip
_TEXT_CONFIGS = ("text_config", "decoder", "llm_config", "thinker_config", "language_config")
_MEDIA: tuple[tuple[str, tuple[str, ...], Callable[..., Iterator[dict[str, Part]]]], ...] = (
    ("image", IMAGES, images),
    ("audio", SOUNDS, sounds),
    ("video", VIDEOS, videos),
    ("series", SERIES, series),
)
# How often a form of inputs is tried where it is hoped to fit nearly as it is, where it is not, and all together;
# and how many changes are tried for what one failure said.
_FEW = 4
_TRIES = 24
_ALL = 300
# Numbers that are drawn for them, in all: sizes that an error asks for may be those of long videos.
_NUMBERS = 1 << 28
_CHANGES = 12
# How many forms of one kind may run and come by nothing new before the rest of them are left.
_IDLE = 2
# What text alone may draw once more.
_LEAST = 1 << 20


@dataclass(frozen=True)
class Candidate:
    """Inputs to try.

    Attributes:
        kind: what they are, as in `normswap.inputs.Inputs`.
        length: tokens of a sequence, or the last dimension of the first tensor.
        shape: of the first tensor, in words.
        batches: keyword arguments of one forward each.
        by: class of the checkpoint's processor, where that made them.
    """

    kind: str
    length: int
    shape: str
    batches: list[dict[str, Any]]
    by: str = ""


def propose(
    model: nn.Module,
    config: Any,
    names: list[str],
    rows: list[list[int]],
    sequences: int,
    length: int,
    seed: int,
) -> Iterator[Candidate]:
    """Yield inputs to try on a model.

    Text alone is yielded as it is. Where a model takes more than text, and once text alone did not satisfy, inputs
    are run first, changed by what the model's code says of them, and yielded only where they come by modules that none
    before came by.

    Args:
        model: what will run them; it may be on the meta device.
        config: its configuration.
        names: what its forward takes.
        rows: token ids of real text; empty for seeded ids.
        sequences: how many sequences, where the number is free.
        length: tokens of a sequence.
        seed: of everything that is drawn.
    """
    yield from _Search(model, Settings(config), names, rows, sequences, length, seed).candidates()


def beside(model: nn.Module, config: Any, names: list[str], sequences: int, seed: int) -> list[dict[str, Any]]:
    """Return what a forward takes beside images or sounds that come from elsewhere: ids for a decoder, no cache.

    Args:
        model: what will run them.
        config: its configuration.
        names: what its forward takes.
        sequences: how many to make.
        seed: of the ids.
    """
    search = _Search(model, Settings(config), names, [], sequences, 0, seed)
    parts = {**search.beside(), **search.extra}
    return [{name: part(Row(None, None, search.generator)) for name, part in parts.items()} for _ in range(sequences)]


@dataclass(frozen=True)
class _Failure:
    """What was said, without its numbers, after how many modules."""

    said: str
    depth: int


class _Search:
    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        names: list[str],
        rows: list[list[int]],
        sequences: int,
        length: int,
        seed: int,
    ) -> None:
        self.model, self.settings, self.names = model, settings, names
        self.rows, self.sequences, self.length = rows, sequences, length
        self.generator = torch.Generator().manual_seed(seed)
        self.word = "text" if rows else "ids"
        self.extra: dict[str, Part] = {"use_cache": Fixed(False)} if "use_cache" in names else {}
        self.attempts = Attempts(model)
        self.mender = Mender(model, settings, names, self._width())
        self.seen: set[int] = set()
        self.left = _ALL
        self.numbers = _NUMBERS
        self.media: dict[int, int] = {}
        self.tokens: dict[str, int] = {}
        for number, (kind, _, _) in enumerate(_MEDIA):
            token = settings.value(f"{kind}_token_id", f"{kind}_token_index")
            if isinstance(token, int):
                self.tokens[kind] = token
                # Images are 1, videos 2 and sounds 3 where a model numbers them.
                self.media[token] = (1, 3, 2, 4)[number]

    def _width(self) -> int:
        text = self.settings.sub(_TEXT_CONFIGS) or self.settings
        return text.integer("hidden_size", "d_model", "n_embd", "dim", "hidden_dim", "embed_dim", default=64) or 64

    # The order.

    def candidates(self) -> Iterator[Candidate]:
        texts = [self.texts(cap) for cap in self.lengths()] if "input_ids" in self.names else []
        plain = self.text() if texts else None
        kinds = [(kind, name, make) for kind, known, make in _MEDIA for name in known if name in self.names]
        if plain is not None and not kinds:
            for rows in texts:
                yield self.finish(plain, rows)
        rows = texts[0] if texts else []
        waiting = [self.forms(kind, name, make, plain) for kind, name, make in kinds]
        # First one of each kind that runs, as it is rather than changed, then all that are left.
        later = []
        for forms in waiting:
            plainly, changed, rest = itertools.tee(forms, 3)
            later.append(rest)
            fitting = list(itertools.islice(self.tested(plainly, rows, _FEW), 1))
            yield from fitting or itertools.islice(self.tested(changed, rows), 1)
        if plain is None:
            yield from self.tested(self.others(), [])
        elif kinds:
            # However long media were searched for.
            self.left, self.numbers = max(self.left, _TRIES), max(self.numbers, _LEAST)
            yield from self.tested([plain], rows)
        for rest in later:
            yield from self.tested(rest, rows, _FEW)
        if plain is not None:
            for shorter in texts if not kinds else texts[1:]:
                if self.seen:
                    break
                found, _ = self.mend(plain, shorter)
                # As it is it was yielded before.
                if found is not None and (kinds or found is not plain):
                    yield self.finish(found, shorter)
            if not self.seen and "inputs_embeds" in self.names:
                rows_in = Draw((1, self.length, self.mender.width))
                yield from self.tested([Recipe("tensor", {"inputs_embeds": rows_in, **self.extra})], [])
            yield from self.tested(self.enriched(plain), rows)

    def done(self) -> bool:
        return len(self.seen) == len(self.attempts.watched)

    def tested(self, recipes: Iterable[Recipe], rows: list[torch.Tensor], tries: int = _TRIES) -> Iterator[Candidate]:
        """Yield what runs, and comes by something new, until nothing is left or nothing more is to be hoped for."""
        idle = 0
        for recipe in recipes:
            if idle >= _IDLE or self.done():
                return
            found, ran = self.mend(recipe, rows, tries)
            if found is not None:
                yield self.finish(found, rows if found.text else [])
            idle += ran and found is None

    def forms(self, kind: str, name: str, make: Any, plain: Recipe | None) -> Iterator[Recipe]:
        for parts in make(name, self.names, self.settings):
            alone = Recipe(kind, {**parts, **self.beside(), **self.extra})
            if plain is not None:
                joint = Recipe(f"{self.word}+{kind}", {**plain.parts, **parts}, text=True)
                token = self.tokens.get(kind)
                if token is not None:
                    count = self.measured(kind, alone)
                    yield joint.place(token, count or 1)
                    continue
                # With text beside them, as in CLIP, media come first: with text alone their tower does not run.
                yield joint
            yield alone

    def others(self) -> Iterator[Recipe]:
        required = [
            name
            for name, parameter in inspect.signature(self.model.forward).parameters.items()
            if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        name = (required or self.names or [""])[0]
        if any(other.endswith(("grid_thw", "grid_hw", "grid_hws")) for other in self.names):
            for parts in images(name, self.names, self.settings):
                yield Recipe("image", {**parts, **self.extra})
        yield from self.unnamed(name)
        part = self.mender.fill(name, Recipe("tensor", {}))
        if part is not None:
            yield Recipe("tensor", {name: part, **self.extra})

    def enriched(self, plain: Recipe) -> Iterator[Recipe]:
        """Text with one more of what the forward takes."""
        for name in self.names:
            if name in plain.parts or name in ("inputs_embeds", "labels", "decoder_inputs_embeds"):
                continue
            part = self.mender.fill(name, plain)
            if isinstance(part, Draw):
                yield plain.give(**{name: part})

    # One form of inputs.

    def mend(self, recipe: Recipe, rows: list[torch.Tensor], tries: int = _TRIES) -> tuple[Recipe | None, bool]:
        """Return the recipe, changed until the model runs on it and comes by something new, and whether it ran."""
        order = itertools.count()
        waiting: list[tuple[int, int, Recipe, _Failure | None]] = [(0, next(order), recipe, None)]
        asked: set[str] = set()
        while waiting and tries and self.left and self.numbers > 0:
            _, _, recipe, before = heapq.heappop(waiting)
            key = repr((recipe.parts, recipe.places))
            if key in asked:
                continue
            asked.add(key)
            tries -= 1
            self.left -= 1
            try:
                batch = self.make(recipe, rows[0] if rows else None)
            except RuntimeError:
                continue
            self.numbers -= sum(value.numel() for value in batch.values() if torch.is_tensor(value))
            attempt = self.attempts.forward(batch)
            if attempt.error is None:
                if not attempt.reached - self.seen:
                    return None, True
                self.seen |= attempt.reached
                return recipe, True
            failure = _Failure(re.sub(r"\d+", "#", str(attempt.error)), len(attempt.reached))
            # A change after which the same is said at the same place was none for the better.
            if before is None or failure.said != before.said or failure.depth > before.depth:
                for other in itertools.islice(self.mender.mended(recipe, batch, attempt.error), _CHANGES):
                    heapq.heappush(waiting, (-failure.depth, next(order), other, failure))
        return None, False

    def measured(self, kind: str, alone: Recipe) -> int:
        """How many features the model makes of what is given; 0 where it does not say."""
        method = getattr(self.model, f"get_{kind}_features", None)
        if method is None:
            return 0
        taken = inspect.signature(method).parameters
        batch = {name: value for name, value in self.make(alone, None).items() if name in taken and name != "use_cache"}
        found = self.attempts.call(method, batch).result
        found = getattr(found, "pooler_output", found)
        many = [found] if isinstance(found, torch.Tensor) else found
        if not isinstance(many, (list, tuple)) or not all(isinstance(entry, torch.Tensor) for entry in many):
            return 0
        return sum(entry.numel() // entry.shape[-1] for entry in many if entry.dim())

    def make(self, recipe: Recipe, text: torch.Tensor | None) -> dict[str, Any]:
        return recipe.make(text if recipe.text else None, self.media, self.generator)

    def finish(self, recipe: Recipe, rows: list[torch.Tensor]) -> Candidate:
        texts: list[torch.Tensor | None] = [*rows] or [None] * self.sequences
        batches = [self.make(recipe, text) for text in texts]
        first = next(value for value in batches[0].values() if torch.is_tensor(value))
        shape = " x ".join(str(n) for n in first.shape)
        return Candidate(recipe.kind, first.shape[-1], shape, batches)

    # Text.

    def lengths(self) -> list[int]:
        """Lengths worth trying, longest first: positions may be fewer than the configuration suggests."""
        text = self.settings.sub(_TEXT_CONFIGS) or self.settings
        caps = [value for name in _POSITIONS if (value := text.integer(name)) is not None]
        top = min([self.length, *caps, *([max(len(row) for row in self.rows)] if self.rows else [])])
        # RoBERTa and its kin lose as many positions as the padding id plus one.
        lost = (text.integer("pad_token_id", default=1) or 1) + 1
        return [n for n in dict.fromkeys((top, top - 2, top - lost, top // 2, top // 4, 16, 8)) if 1 < n <= top]

    def texts(self, length: int) -> list[torch.Tensor]:
        if self.rows:
            return [torch.tensor([row[: length - 1] + row[-1:] if len(row) > length else row]) for row in self.rows]
        return [self.seeded(length, self.generator) for _ in range(self.sequences)]

    def text(self) -> Recipe:
        parts: dict[str, Part] = {"input_ids": _ids}
        if "attention_mask" in self.names:
            parts["attention_mask"] = _ones
        if "decoder_input_ids" in self.names:
            parts["decoder_input_ids"] = lambda row: self.shifted(_ids(row))
        parts |= {name: _marks for name in ("mm_token_type_ids",) if name in self.names and self.tokens}
        if "token_type_ids" in self.names and self.tokens:
            parts["token_type_ids"] = _marks
        return Recipe(self.word, {**parts, **self.extra}, text=True)

    def beside(self) -> dict[str, Part]:
        """What a decoder reads beside a medium."""
        if "decoder_input_ids" not in self.names:
            return {}
        limit = self.settings.integer("max_target_positions", default=32) or 32
        return {"decoder_input_ids": lambda row: self.shifted(self.seeded(min(32, limit), row.generator))}

    def seeded(self, length: int, generator: torch.Generator) -> torch.Tensor:
        text = self.settings.sub(_TEXT_CONFIGS) or self.settings
        sizes = [text.integer("vocab_size", "text_vocab_size", "src_vocab_size"), embedding_size(self.model)]
        top = min([size for size in sizes if size], default=100)
        special = self.settings.special_ids()
        pool = torch.tensor([i for i in range(min(top, 1 << 17)) if i not in special] or [0])
        return pool[torch.randint(len(pool), (1, length), generator=generator)]

    def shifted(self, ids: torch.Tensor) -> torch.Tensor:
        start = self.settings.value("decoder_start_token_id", "bos_token_id", "pad_token_id")
        start = start if isinstance(start, int) else 0
        limit = self.settings.integer("max_target_positions", default=ids.shape[1]) or ids.shape[1]
        return torch.cat([torch.tensor([[start]]), ids[:, :-1]], 1)[:, :limit]

    def unnamed(self, name: str) -> Iterator[Recipe]:
        """For a module of unknown make: ids where it embeds, else rows as wide as its first map, and images."""
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                yield Recipe("ids", {name: Pick(module.num_embeddings, (1, min(self.length, 32))), **self.extra})
                return
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                width = module.in_features if isinstance(module, nn.Linear) else module.normalized_shape[-1]
                yield Recipe("tensor", {name: Draw((1, 32, width)), **self.extra})
                break
        if any(isinstance(module, nn.Conv2d) for module in self.model.modules()):
            for parts in images(name, self.names, self.settings):
                yield Recipe("image", {**parts, **self.extra})


def _ids(row: Row) -> torch.Tensor:
    assert row.ids is not None
    return row.ids


def _ones(row: Row) -> torch.Tensor:
    return torch.ones_like(_ids(row))


def _marks(row: Row) -> torch.Tensor:
    assert row.marks is not None
    return row.marks
