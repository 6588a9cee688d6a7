"""Inputs worth trying on a model, most telling first, from what its forward takes and its configuration says."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = ["Candidate", "embedding_size", "propose"]

_SPECIAL = re.compile(r"(^|_)token_(id|index)s?$|_(start|end)_id$|^(bos|eos|pad|unk|mask)_index$")
_POSITIONS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length",
    "max_target_positions", "max_source_positions", "max_2d_position_embeddings",
)  # fmt: skip
_TEXT_CONFIGS = ("text_config", "decoder", "llm_config", "thinker_config", "language_config")
_VISION_CONFIGS = ("vision_config", "encoder", "backbone_config", "vision_encoder_config")


@dataclass(frozen=True)
class Candidate:
    """Inputs to try.

    Attributes:
        kind: what they are, as in `normswap.inputs.Inputs`.
        length: tokens of a sequence, or the last dimension of the first tensor.
        shape: of the first tensor, in words.
        batches: keyword arguments of one forward each.
    """

    kind: str
    length: int
    shape: str
    batches: list[dict[str, Any]]


class Settings:
    """Reads a configuration and those nested in it."""

    def __init__(self, config: Any) -> None:
        self.configs: list[Any] = []
        self._collect(config)

    def _collect(self, config: Any) -> None:
        if any(config is known for known in self.configs):
            return
        self.configs.append(config)
        for value in list(vars(config).values()):
            if hasattr(value, "model_type") and hasattr(value, "to_dict"):
                self._collect(value)

    def sub(self, names: tuple[str, ...]) -> Settings | None:
        """Settings of the first nested configuration of one of these names."""
        for name in names:
            value = getattr(self.configs[0], name, None)
            if hasattr(value, "to_dict"):
                return Settings(value)
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
            for name, value in vars(config).items():
                if _SPECIAL.search(name):
                    for entry in value if isinstance(value, (list, tuple)) else [value]:
                        if isinstance(entry, int) and not isinstance(entry, bool):
                            found.add(entry)
        return found


def embedding_size(model: nn.Module) -> int | None:
    """How many token ids the model's input embedding takes; None if it does not say."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError, TypeError):
        return None
    size = getattr(embedding, "num_embeddings", None)
    if size is None:
        weight = getattr(embedding, "weight", None)
        size = weight.shape[0] if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None
    return size if isinstance(size, int) else None


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

    Args:
        model: what will run them.
        config: its configuration.
        names: what its forward takes.
        rows: token ids of real text; empty for seeded ids.
        sequences: how many sequences, where the number is free.
        length: tokens of a sequence.
        seed: of everything that is drawn.
    """
    settings = Settings(config)
    extra: dict[str, Any] = {"use_cache": False} if "use_cache" in names else {}
    maker = _Maker(model, settings, names, sequences, seed, extra)
    tokens = [maker.tokens(rows, cap) for cap in maker.lengths(rows, length)] if "input_ids" in names else []
    images = list(maker.images()) if "pixel_values" in names else []
    sounds = list(maker.sounds()) if {"input_features", "input_values"} & set(names) else []
    videos = list(maker.videos()) if "pixel_values_videos" in names else []
    media = [("image", images), ("audio", sounds), ("video", videos)]
    for kind, group in media:
        for batches in group:
            # With text beside it, as in CLIP, the media come first: with text alone their tower does not run.
            for text in tokens:
                yield maker.finish(f"{maker.word(rows)}+{kind}", text, batches)
            yield maker.finish(kind, None, batches)
    for text in tokens:
        yield maker.finish(maker.word(rows), text, None)


class _Maker:
    def __init__(
        self,
        model: nn.Module,
        settings: Settings,
        names: list[str],
        sequences: int,
        seed: int,
        extra: dict[str, Any],
    ) -> None:
        self.model, self.settings, self.names = model, settings, set(names)
        self.sequences, self.extra = sequences, extra
        self.generator = torch.Generator().manual_seed(seed)

    def word(self, rows: list[list[int]]) -> str:
        return "text" if rows else "ids"

    def lengths(self, rows: list[list[int]], length: int) -> list[int]:
        """Lengths worth trying, longest first: positions may be fewer than the configuration suggests."""
        text = self.settings.sub(_TEXT_CONFIGS) or self.settings
        caps = [value for name in _POSITIONS if (value := text.integer(name)) is not None]
        top = min([length, *caps, *([max(len(row) for row in rows)] if rows else [])])
        # RoBERTa and its kin lose as many positions as the padding id plus one.
        lost = (text.integer("pad_token_id", default=1) or 1) + 1
        return [n for n in dict.fromkeys((top, top - 2, top - lost, top // 2, top // 4, 16, 8)) if 1 < n <= top]

    def tokens(self, rows: list[list[int]], length: int) -> list[dict[str, Any]]:
        if rows:
            ids = [torch.tensor([row[: length - 1] + row[-1:] if len(row) > length else row]) for row in rows]
        else:
            ids = [self.seeded(length) for _ in range(self.sequences)]
        batches = []
        for row in ids:
            batch: dict[str, Any] = {"input_ids": row}
            if "attention_mask" in self.names:
                batch["attention_mask"] = torch.ones_like(row)
            if "decoder_input_ids" in self.names:
                batch["decoder_input_ids"] = self.shifted(row)
            batches.append(batch)
        return batches

    def seeded(self, length: int) -> torch.Tensor:
        text = self.settings.sub(_TEXT_CONFIGS) or self.settings
        sizes = [text.integer("vocab_size", "text_vocab_size", "src_vocab_size"), embedding_size(self.model)]
        top = min([size for size in sizes if size], default=100)
        special = self.settings.special_ids()
        pool = torch.tensor([i for i in range(min(top, 1 << 17)) if i not in special] or [0])
        return pool[torch.randint(len(pool), (1, length), generator=self.generator)]

    def shifted(self, ids: torch.Tensor) -> torch.Tensor:
        start = self.settings.value("decoder_start_token_id", "bos_token_id", "pad_token_id")
        start = start if isinstance(start, int) else 0
        limit = self.settings.integer("max_target_positions", default=ids.shape[1]) or ids.shape[1]
        return torch.cat([torch.tensor([[start]]), ids[:, :-1]], 1)[:, :limit]

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator)

    def images(self) -> Iterator[list[dict[str, Any]]]:
        vision = self.settings.sub(_VISION_CONFIGS) or self.settings
        channels = vision.integer("num_channels", "in_channels", "in_chans", default=3) or 3
        size = vision.value("image_size", "img_size")
        if isinstance(size, dict):
            size = (size.get("height", 224), size.get("width", 224))
        sizes = [tuple(size)[-2:] if isinstance(size, (list, tuple)) else (size, size)] if size else []
        for height, width in [*sizes, (224, 224), (64, 64)]:
            yield self.repeat("pixel_values", 1, channels, height, width)
        frames = vision.integer("num_frames", default=2) or 2
        for height, width in sizes:
            yield self.repeat("pixel_values", 1, frames, channels, height, width)

    def videos(self) -> Iterator[list[dict[str, Any]]]:
        for batches in self.images():
            pixels = batches[0]["pixel_values"]
            shape = (
                1,
                self.settings.integer("frames_per_clip", "num_frames", default=4) or 4,
                *pixels.shape[-3:],
            )
            yield self.repeat("pixel_values_videos", *shape)

    def sounds(self) -> Iterator[list[dict[str, Any]]]:
        name = "input_features" if "input_features" in self.names else "input_values"
        bins = self.settings.integer(
            "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_dim",
            default=80,
        ) or 80  # fmt: skip
        frames = [2 * n for n in [self.settings.integer("max_source_positions")] if n]
        frames += [n for n in [self.settings.integer("max_length")] if n and name == "input_values"]
        for count in [*frames, 256]:
            if name == "input_features" or count != 256:
                yield self.repeat(name, 1, bins, count)
            yield self.repeat(name, 1, count, bins)
        yield self.repeat(name, 1, 16000)
        yield self.repeat(name, 1, 1, 16000)

    def repeat(self, name: str, *shape: int) -> list[dict[str, Any]]:
        return [{name: self.draw(*shape)} for _ in range(self.sequences)]

    def finish(self, kind: str, text: list[dict[str, Any]] | None, media: list[dict[str, Any]] | None) -> Candidate:
        if text is None:
            assert media is not None
            batches = [dict(batch) for batch in media]
            if "decoder_input_ids" in self.names:
                for batch in batches:
                    limit = self.settings.integer("max_target_positions", default=32) or 32
                    batch["decoder_input_ids"] = self.shifted(self.seeded(min(32, limit)))
        elif media is None:
            batches = text
        else:
            batches = [{**a, **b} for a, b in zip(text, media, strict=False)]
        first = next(value for value in batches[0].values() if torch.is_tensor(value))
        shape = " x ".join(str(n) for n in first.shape)
        return Candidate(kind, first.shape[-1], shape, [{**batch, **self.extra} for batch in batches])
