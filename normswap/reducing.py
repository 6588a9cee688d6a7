"""Make a configuration smaller by general rules: widths, heads, experts, vocabulary and layers, for any family."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from normswap.settings import SPECIAL, Settings

__all__ = ["Indivisible", "Recipe", "layer_counts", "recipes", "reduce"]

_LAYERS = re.compile(r"(^|_)n_?layers?$|layers?$|^depths?$|_depths?$|(^|_)num_blocks$|^blocks_per_stage$")
_HEADS = re.compile(r"heads?$|^multi_query_group_num$|(^|_)n_?groups$")
_HEAD_WIDTH = re.compile(
    r"head_?(dim|size|width)s?$|(^|_)d_(head|kv)$|^dim_head$|^kv_channels$|^qk_\w*dim$|^rotary_(dim|ndims)$|rope_\w*dim$"
)
_STATE = re.compile(r"state_(size|dim)$|(^|_)d_state$")
_HIDDEN = re.compile(
    r"(^|_)(hidden_(size|dim)s?|d_model|n_embd|model_dim|dim_model|embed_dims?|emb_dim)$|^(dim|width|hidden_channels)$"
)
_WIDTH = re.compile(
    r"(_sizes?|_dims?|_ranks?|_channels|_widths?|_units|_features|^channels)$|^d_|^n_embd$|^n_inner$|^(dim|width)$"
    r"|^(embed|hidden|intermediate|inner|ffn?)_"
)
_NO_WIDTH = re.compile(
    r"vocab|patch|image|img|kernel|window|chunk|batch|max|position|stride|block|mel|num_channels|^in_cha|input|feature"
    r"|crop|pool|grid|merge|codebook_size|memory_size|cache|bins?$|frame|sample|temporal|buffer|sequence|context|step"
    r"|expand|d_conv|act|ratio|layer_norm|initial|drop|group|number|num_"
)
_EXPERTS = re.compile(r"experts?(_num)?$|expert_num$")
_CHOSEN = re.compile(r"top_?k$|per_tok(en)?$|budget$|(^|_)moe_k$|selected_experts$")
_PLACES = re.compile(r"^max_(source|target)_positions$")
_INDICES = re.compile(r"(ind(ex|ic|exe)e?s|idxs?|ids|layers)$")
_LEAST_WIDTH = 8
_SMALLEST_EXPERTS = 4
_TINY = 16
_LEAST_PATCHES = 16
_MOST_CHOSEN = 16
_MOST_PLACES = 128


class Indivisible(Exception):
    """A configuration cannot be made smaller in this way."""


@dataclass(frozen=True)
class Recipe:
    """How small to make a configuration.

    Attributes:
        width: about what the widest hidden state becomes; None keeps every width.
        layers: the most layers that a tower keeps; None keeps all.
        heads: whether there are fewer heads, and narrower ones, or all are kept, or all are as wide as they were.
        vocabulary: the most token ids; None keeps all, and the sizes of images and sounds too.
        experts: whether there are fewer experts.
    """

    width: int | None = None
    layers: int | None = None
    heads: Literal["fewer", "kept", "wide"] = "fewer"
    vocabulary: int | None = 512
    experts: bool = True


def recipes() -> Iterator[Recipe]:
    """Yield what is worth trying, from small to large, all with every layer."""
    for width in (64, 128, 256):
        yield Recipe(width)
    # Code that has the width of a head written into it.
    yield Recipe(64, heads="wide")
    for width in (64, 128, 256):
        yield Recipe(width, heads="kept", experts=False)
        yield Recipe(width, vocabulary=None)
    yield Recipe(None)
    yield Recipe(None, experts=False, vocabulary=None)


def layer_counts(config: Any) -> list[int]:
    """Return how many layers are worth trying, fewest first; the last is the whole model's number."""
    counts = [count for part in Settings(config).configs for count in _counts(part)]
    most = max(counts, default=1)
    return [count for count in (1, 2, 3, 4, 5, 6, 8, 9, 12, 16, 24) if count < most] + [most]


def reduce(config: Any, recipe: Recipe) -> Any:
    """Return a smaller copy of a configuration.

    One factor divides all widths, so that sums and products between them stay right. Where heads become fewer, by
    a factor of their own in each tower, the widths of heads are divided by what remains of the common factor.

    Args:
        config: of the model, with nested ones; not changed.
        recipe: how small.

    Raises:
        Indivisible: the numbers do not divide.
    """
    small = copy.deepcopy(config)
    parts = Settings(small).configs
    factor = _factor(parts, recipe)
    for part in parts:
        _Reducer(part, recipe, factor).run()
    if recipe.vocabulary is not None:
        _cut_vocabulary(parts, recipe.vocabulary)
    return small


def _factor(parts: list[Any], recipe: Recipe) -> int:
    width = recipe.width
    if width is None:
        return 1
    widest = max((v for part in parts for k, v in _numbers(part) if _HIDDEN.search(k)), default=0)
    if not widest:
        widest = max((v for part in parts for k, v in _numbers(part) if _is_width(k)), default=0)
    if widest < 2 * width:
        raise Indivisible(f"its widest hidden state, {widest}, is not twice {width}")
    factor = int(2 ** math.floor(math.log2(widest / width)))
    if recipe.heads == "wide":
        factor = math.gcd(factor, *(v for part in parts for k, v in _numbers(part) if _counts_heads(k) and v > 1))
        if factor == 1:
            raise Indivisible("its numbers of heads have no even divisor")
    return factor


def _numbers(part: Any) -> Iterator[tuple[str, int]]:
    """Yield the positive integers of a configuration, those in lists too."""
    for name, value in vars(part).items():
        for entry in value if isinstance(value, (list, tuple)) else [value]:
            if type(entry) is int and entry > 0 and not name.startswith("_"):
                yield name, entry


def _counts_heads(name: str) -> bool:
    return bool(_HEADS.search(name)) and not _HEAD_WIDTH.search(name)


def _is_width(name: str) -> bool:
    others = _HEADS.search(name) or _HEAD_WIDTH.search(name) or _STATE.search(name) or _LAYERS.search(name)
    return bool(_WIDTH.search(name)) and not (others or _NO_WIDTH.search(name) or SPECIAL.search(name))


def _counts(part: Any) -> set[int]:
    return {v for k, v in vars(part).items() if type(v) is int and v > 0 and _LAYERS.search(k)}


def _sections(table: dict[Any, Any]) -> Iterator[int]:
    """Yield how many frequencies belong to each kind of position."""
    for name, value in table.items():
        if isinstance(value, dict):
            yield from _sections(value)
        elif "section" in str(name) and isinstance(value, (list, tuple)):
            yield from value


class _Reducer:
    def __init__(self, part: Any, recipe: Recipe, factor: int) -> None:
        self.part, self.recipe, self.factor = part, recipe, factor
        self.layers = {count for count in _counts(part) if recipe.layers is not None and count > recipe.layers}
        self.fewer, self.narrower = self._split() if factor > 1 else (1, 1)

    def _split(self) -> tuple[int, int]:
        """Divide the common factor between the number of heads and their width."""
        heads = [v for k, v in _numbers(self.part) if _counts_heads(k) and v > 1]
        widths = [v for k, v in _numbers(self.part) if _HEAD_WIDTH.search(k)]
        hidden = [v for k, v in _numbers(self.part) if _HIDDEN.search(k)]
        sections = [v for value in vars(self.part).values() if isinstance(value, dict) for v in _sections(value)]
        if heads and not widths and len(hidden) == 1 and hidden[0] % max(heads) == 0:
            widths = [hidden[0] // max(heads)]
        for least in (2, 1):
            fewer = 1 if self.recipe.heads == "kept" else self.factor
            while fewer >= (self.factor if self.recipe.heads == "wide" else 1):
                narrower = self.factor // fewer
                kept = all(v % fewer == 0 and v // fewer >= least for v in heads)
                even = all(v % (2 * narrower) == 0 and v // narrower >= 4 for v in widths)
                if kept and even and all(v % narrower == 0 for v in sections):
                    return fewer, narrower
                fewer //= 2
        if not heads and not widths:
            return 1, self.factor
        raise Indivisible(f"its heads {heads} and their widths {widths} do not divide by {self.factor}")

    def run(self) -> None:
        for name, value in list(vars(self.part).items()):
            if name.startswith("_") or isinstance(value, bool) or SPECIAL.search(name):
                continue
            changed = self._value(name, value)
            if changed is not value and changed != value:
                setattr(self.part, name, changed)

    def _value(self, name: str, value: Any) -> Any:
        if type(value) is int and value > 0:
            return self._number(name, value)
        if isinstance(value, dict):
            return self._table(value)
        if isinstance(value, (list, tuple)) and value:
            return self._list(name, value)
        if isinstance(value, str) and len(value) in self.layers and not re.search(r"[a-z]", value):
            return value[: self.recipe.layers]
        return value

    def _number(self, name: str, value: int) -> int:
        if _LAYERS.search(name):
            return value if self.recipe.layers is None else min(value, self.recipe.layers)
        if _EXPERTS.search(name):
            return self._experts(value)
        if _CHOSEN.search(name) and value > _MOST_CHOSEN and self.recipe.experts:
            # More than a short sequence has: nothing would be left out, and what decides would not show.
            return _MOST_CHOSEN
        if _PLACES.search(name) and self.recipe.vocabulary is not None:
            return min(value, _MOST_PLACES)
        if name in ("image_size", "img_size") and self.recipe.vocabulary is not None:
            return self._image(value)
        return self._divided(name, value)

    def _image(self, value: int) -> int:
        """Give a large image fewer patches, in an even ratio."""
        patch = getattr(self.part, "patch_size", None)
        while type(patch) is int and value % (2 * patch) == 0 and value // patch > 2 * _LEAST_PATCHES:
            value //= 2
        return value

    def _divided(self, name: str, value: int) -> int:
        if self.factor == 1:
            return value
        if _counts_heads(name):
            return max(1, value // self.fewer)
        if _HEAD_WIDTH.search(name):
            return value // self.narrower
        if _STATE.search(name):
            return value if value <= 2 * _TINY else max(_TINY, value // self.narrower)
        if _is_width(name) and value >= _TINY:
            return max(_LEAST_WIDTH, round(value / self.factor))
        return value

    def _experts(self, value: int) -> int:
        if not self.recipe.experts or value <= 2 * _SMALLEST_EXPERTS:
            return value
        chosen = max((v for k, v in _numbers(self.part) if _CHOSEN.search(k) and v <= value), default=value)
        while value % 2 == 0 and value // 2 >= max(4 * chosen, _SMALLEST_EXPERTS):
            value //= 2
        return value

    def _list(self, name: str, value: Any) -> Any:
        numbers = all(type(entry) is int for entry in value)
        cap = self.recipe.layers
        if len(value) in self.layers:
            value = type(value)(value[:cap])
        elif numbers and self.layers and _INDICES.search(name) and all(0 <= n < max(self.layers) for n in value):
            assert cap is not None
            return type(value)([n for n in value if n < cap] or [cap - 1])
        if not numbers:
            return value
        if _LAYERS.search(name):
            return type(value)(n if cap is None else min(n, cap) for n in value)
        return type(value)(self._divided(name, n) if n > 0 else n for n in value)

    def _table(self, table: dict[Any, Any]) -> dict[Any, Any]:
        """Shorten what a table of rotary settings says for each frequency."""
        changed = {}
        for name, value in table.items():
            if isinstance(value, dict):
                value = self._table(value)
            elif isinstance(value, (list, tuple)) and value and self.narrower > 1:
                if "section" in str(name):
                    value = type(value)(entry // self.narrower for entry in value)
                elif "factor" in str(name) and len(value) % self.narrower == 0:
                    value = type(value)(value[: len(value) // self.narrower])
            changed[name] = value
        return changed


def _cut_vocabulary(parts: list[Any], most: int) -> None:
    """Give the vocabularies fewer ids, and the ids with a meaning that lay beyond them ids of their own at the end."""
    sizes = [(part, k, v) for part in parts for k, v in _numbers(part) if "vocab" in k and v > most]
    for part, name, _ in sizes:
        setattr(part, name, most)
    if not sizes:
        return
    beyond = sorted({i for part in parts for i in _special(part) if i >= most}, reverse=True)
    moved = {old: most - 1 - at for at, old in enumerate(beyond)}
    if len(moved) > most // 2:
        raise Indivisible(f"{len(moved)} of its token ids have a meaning")
    change: Callable[[Any], Any] = lambda value: moved.get(value, value) if type(value) is int else value  # noqa: E731
    for part in parts:
        for name, value in list(vars(part).items()):
            if SPECIAL.search(name):
                is_list = isinstance(value, (list, tuple))
                changed = type(value)(map(change, value)) if is_list else change(value)
                if changed != value:
                    setattr(part, name, changed)


def _special(part: Any) -> Iterator[int]:
    for name, value in vars(part).items():
        if SPECIAL.search(name):
            for entry in value if isinstance(value, (list, tuple)) else [value]:
                if type(entry) is int:
                    yield entry
