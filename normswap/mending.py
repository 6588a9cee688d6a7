"""Change inputs that a forward refused, by what it said: give what it lacked, or another size."""

from __future__ import annotations

import inspect
import itertools
import linecache
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normswap.recipes import Draw, Fixed, Ones, Part, Recipe, Row, Stacked
from normswap.settings import Settings

__all__ = ["Mender"]

_WORD = re.compile(r"[A-Za-z_]\w*")
_NUMBERS = re.compile(r"\d+")
# What was given, and what was wanted in its place.
_WANTED = (
    re.compile(r"\(\d+x(?P<old>\d+) and (?P<new>\d+)x\d+\)"),
    re.compile(r"\[\d+, (?P<old>\d+)\] X \[(?P<new>\d+), \d+\]"),
    re.compile(r"normalized_shape=\[(?P<new>\d+)\].* (?P<old>\d+)\]"),
    re.compile(r"to have (?P<new>\d+) channels, but got (?P<old>\d+)"),
)
# `name (`type` of shape `(a, b, c)`...`, as documented for each argument; what stands between is a type's name.
_DOCUMENTED = r"(?m)^\s*`?{}`?\s*[(:](.*)$"
_SHAPE = re.compile(r"of shape [`'\"]?\(([^)]*)\)")
_WHOLE = re.compile(r"(^|_)(ids?|idx|index|indices|timesteps|bbox|freq)$|position_ids|token_type")
_LARGEST = 1 << 12
_LARGEST_SIDE = 1 << 10
_MOST_PLACES = 4096
_MOST_CODEBOOKS = 64
_OTHER_TOKENS = 6


class Mender:
    """Mends recipes for one model.

    Args:
        model: whose forward takes the inputs.
        settings: its configuration.
        names: what its forward takes.
        width: of its hidden states, for what is given in their place.
    """

    def __init__(self, model: nn.Module, settings: Settings, names: list[str], width: int) -> None:
        self.settings, self.names, self.width = settings, names, width
        self.text = inspect.getdoc(type(model).forward) or ""
        self.text += "\n" + (inspect.getdoc(type(model)) or "")
        self.kinds = {name: found.annotation for name, found in inspect.signature(model.forward).parameters.items()}

    def mended(self, recipe: Recipe, batch: Mapping[str, Any], error: Exception) -> Iterator[Recipe]:
        """Yield what may be worth trying after an error, the likeliest first."""
        said = str(error)
        lacking = [name for name in self._named(error, said) if recipe.parts.get(name) is None]
        if lacking:
            every = "missing" in said and "required" in said
            for group in [lacking] if every else [[name] for name in lacking]:
                given = recipe
                for name in group:
                    part = self.fill(name, given)
                    given = given.give(**{name: part}) if part is not None else given
                if given is not recipe:
                    yield given
        numbers = list(dict.fromkeys(int(n) for n in _NUMBERS.findall(said) if len(n) < 9))
        if recipe.places and re.search("token|feature|placeholder|match", said):
            yield from self._placed(recipe, numbers)
        yield from self._dimensions(recipe, said)
        yield from self._stacked(recipe, said, numbers)
        yield from self._scaled(recipe, said, numbers)
        yield from self._resized(recipe, said, numbers)

    def _named(self, error: Exception, said: str) -> list[str]:
        """Arguments of the forward that the error, or the line that raised it, speaks of."""
        words = list(_WORD.findall(said))
        frames = []
        # Only where something was used that is not there does the line say what: others name what may well be absent.
        trace = error.__traceback__ if isinstance(error, (TypeError, AttributeError)) else None
        while trace is not None:
            frames.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno, trace.tb_frame.f_locals))
            trace = trace.tb_next
        for file, line, local in reversed(frames):
            words += [word for word in _WORD.findall(linecache.getline(file, line)) if local.get(word, 0) is None]
        return [name for name in dict.fromkeys(words) if name in self.names]

    def _placed(self, recipe: Recipe, numbers: list[int]) -> Iterator[Recipe]:
        for token, count in recipe.places.items():
            for number in numbers:
                for places in (number, number // self.width if number % self.width == 0 else 0):
                    if 0 < places <= _MOST_PLACES and places != count:
                        yield recipe.place(token, places)

    def _stacked(self, recipe: Recipe, said: str, numbers: list[int]) -> Iterator[Recipe]:
        """Give ids for each of several codebooks where ids do not fit into a shape."""
        if "shape '[" not in said and "must match" not in said and "unpack" not in said:
            return
        for name in ("decoder_input_ids", "input_ids"):
            part = recipe.parts.get(name)
            if part is None:
                continue
            told = self.settings.integer("num_codebooks", "num_quantizers", "num_channels", default=4) or 4
            before, part = (part.count, part.part) if isinstance(part, Stacked) else (0, part)
            for count in dict.fromkeys([*numbers, told]):
                if 1 < count <= _MOST_CODEBOOKS and count != before:
                    yield from (recipe.give(**{name: Stacked(part, count, first)}) for first in (True, False))

    def _dimensions(self, recipe: Recipe, said: str) -> Iterator[Recipe]:
        found = re.search(r"expected (\d), got (\d)|got (\d)D|(\d)D \(unbatched\) or (\d)D", said)
        if found is None and "unpack" not in said and "imension" not in said:
            return
        for name, part in recipe.parts.items():
            if isinstance(part, Draw) and len(part.shape) < 6:
                yield recipe.give(**{name: Draw((part.shape[0], 1, *part.shape[1:]))})
                if part.shape[0] == 1 and len(part.shape) > 2:
                    yield recipe.give(**{name: Draw(part.shape[1:])})

    def _resized(self, recipe: Recipe, said: str, numbers: list[int]) -> Iterator[Recipe]:
        """Give a dimension that the error names the size of another number in it."""
        pairs = [(int(old), int(new)) for pattern in _WANTED for old, new in map(_pair, pattern.finditer(said))]
        for old, new in dict.fromkeys([*pairs, *itertools.permutations(numbers, 2)]):
            for name, part in recipe.parts.items():
                if not isinstance(part, (Draw, Ones)) or not 0 < new <= _LARGEST:
                    continue
                if old > 1 and old in part.shape and old != new:
                    shape = list(part.shape)
                    at = len(shape) - 1 - shape[::-1].index(old)
                    shape[at] = new
                    yield recipe.give(**{name: replace(part, shape=tuple(shape))})

    def _scaled(self, recipe: Recipe, said: str, numbers: list[int]) -> Iterator[Recipe]:
        """Give a square image the size at which it makes as many tokens as the error names beside those it made."""
        for name, part in recipe.parts.items():
            if not isinstance(part, Draw) or len(part.shape) < 4 or part.shape[-1] != part.shape[-2]:
                continue
            pairs = [*itertools.permutations([number for number in numbers if number > 3], 2)]
            # Fewer places than are to be chosen.
            for new, old in [(4, 1)] if "index k out of range" in said else pairs:
                side = math.isqrt(part.shape[-1] ** 2 * new // old)
                if side * side * old == part.shape[-1] ** 2 * new and side <= _LARGEST_SIDE:
                    yield recipe.give(**{name: Draw((*part.shape[:-2], side, side))})

    def fill(self, name: str, recipe: Recipe) -> Part | None:
        """Return what to give under an argument's name; None where nothing is known of it.

        Args:
            name: of the argument.
            recipe: what it stands beside.
        """
        time = next((max(part.shape[-2:]) for part in recipe.parts.values() if isinstance(part, Draw)), None)
        if name.startswith("decoder_") and f"{name.removeprefix('decoder_')}" in recipe.parts:
            return recipe.parts[name.removeprefix("decoder_")]
        if self.kinds.get(name) in (int, "int"):
            return Fixed(self.settings.integer(name) or 1)
        documented = self._documented(name)
        many = next((part.shape[1] for part in recipe.parts.values() if isinstance(part, Draw) and _several(part)), 0)
        if many and recipe.text and documented is None and re.fullmatch(r"(image|cross)_attention_mask", name):
            return _Across(many)
        if "mask" in name and "encoder" not in name and documented is None:
            return _ones if recipe.text and time is None else Ones((1, time or 1), torch.bool)
        if re.search(r"(lens|lengths)$", name) and time is not None:
            return Fixed(torch.tensor([time]))
        if name.endswith("sizes"):
            return Ones((1,))
        if documented is not None:
            return documented
        if re.search(r"grid_thw$", name):
            return Fixed(torch.tensor([[1, 4, 4]]))
        if _WHOLE.search(name):
            return _zeros if recipe.text else Fixed(torch.zeros(1, _OTHER_TOKENS, dtype=torch.long))
        if re.search(r"states$|embeds$|embeddings?$|features$|feats$|latents$|inputs$|^x$|^query$|^memory$", name):
            return Draw((1, _OTHER_TOKENS, self._width_of(name)))
        return None

    def _width_of(self, name: str) -> int:
        own = [f"{name.removesuffix('_states')}_size", f"{name}_size", f"{name}_dim"]
        if name.startswith("encoder"):
            own += ["encoder_hidden_size", "cross_attention_hidden_size", "encoder_width"]
        return self.settings.integer(*own) or self.width

    def _documented(self, name: str) -> Part | None:
        """What the documentation of an argument says of its type and shape."""
        for line in re.findall(_DOCUMENTED.format(re.escape(name)), self.text):
            shapes = [found.group(1) for found in _SHAPE.finditer(line)]
            if not shapes:
                continue
            whole = bool(re.search(r"Long|Int|Bool", line)) or "mask" in name or bool(_WHOLE.search(name))
            # The most detailed of several that are allowed; a template that was not filled in stands for rows of text.
            longest = max(shapes, key=lambda shape: shape.count(",")).replace("{0}", "batch_size, sequence_length")
            words = [word.strip(" `") for word in longest.split(",") if word.strip(" `")]
            if "*" in longest or not words:
                continue
            sizes = tuple(self._size(word) for word in words)
            return _Whole(tuple(words), "mask" in name, sizes) if whole else Draw(sizes)
        return None

    def _size(self, word: str) -> int:
        if word.isdigit():
            return int(word)
        plain = word.removeprefix("config.").removeprefix("self.")
        if re.search("batch|^b$|num_images|n_images", plain):
            return 1
        if re.search(r"seq|len|num_tokens|tokens|num_queries|query|patches|frames|time", plain):
            return self.settings.integer(plain) or _OTHER_TOKENS
        if re.search(r"hidden|embed|width|dim|feature|channels", plain):
            return self.settings.integer(plain) or self.width
        return self.settings.integer(plain) or 4


class _Whole:
    """Zeros or ones of a documented shape, as long as the text where a dimension is the text's."""

    def __init__(self, words: tuple[str, ...], ones: bool, sizes: tuple[int, ...]) -> None:
        self.words, self.ones, self.sizes = words, ones, sizes

    def __call__(self, row: Row) -> torch.Tensor:
        sizes = tuple(
            row.ids.shape[1] if row.ids is not None and place == 1 and not word.isdigit() else size
            for place, (word, size) in enumerate(zip(self.words, self.sizes, strict=True))
        )
        return torch.full(sizes, int(self.ones))


@dataclass(frozen=True)
class _Across:
    """Ones for each of several images beside each token of the text."""

    many: int

    def __call__(self, row: Row) -> torch.Tensor:
        return _ones(row)[..., None].repeat(1, 1, self.many)


def _several(part: Draw) -> bool:
    """Whether it is several images."""
    return len(part.shape) == 5


def _pair(found: re.Match[str]) -> tuple[str, str]:
    return found["old"], found["new"]


def _ones(row: Row) -> torch.Tensor:
    assert row.ids is not None
    return torch.ones_like(row.ids)


def _zeros(row: Row) -> torch.Tensor:
    assert row.ids is not None
    return torch.zeros_like(row.ids)
