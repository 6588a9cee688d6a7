"""Inputs worth trying on a model, most telling first, from what its forward takes and its configuration says."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.settings import Settings, embedding_size

__all__ = ["Candidate", "propose"]

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
            if kind == "image" and maker.image_token is not None:
                # Without a place in the text for each of its features an image is refused or ignored.
                if tokens and (placed := maker.placed(tokens[0], batches)):
                    yield maker.finish(f"{maker.word(rows)}+{kind}", placed, batches)
                continue
            # With text beside it, as in CLIP, the media come first: with text alone their tower does not run.
            for text in tokens:
                yield maker.finish(f"{maker.word(rows)}+{kind}", text, batches)
            yield maker.finish(kind, None, batches)
    for text in tokens:
        yield maker.finish(maker.word(rows), text, None)
    if not (tokens or images or sounds or videos) and names:
        for batches in maker.unnamed(names[0], length):
            yield maker.finish("ids" if not batches[0][names[0]].is_floating_point() else "tensor", None, batches)


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
        token = settings.value("image_token_id", "image_token_index")
        self.image_token: int | None = token if isinstance(token, int) else None

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

        if "image_grid_thw" in self.names:
            yield self.patches(vision, channels)
        for many in (1, 5, 3, 2) if self.image_token is not None else ():
            for height, width in sizes:
                batches = self.repeat("pixel_values", 1, many, channels, height, width)
                if "image_sizes" in self.names:
                    batches = [{**batch, "image_sizes": torch.tensor([[height, width]])} for batch in batches]
                yield batches

    def patches(self, vision: Settings, channels: int) -> list[dict[str, Any]]:
        """Images that were cut into patches beforehand, with their grid."""
        patch, depth = vision.integer("patch_size", default=14), vision.integer("temporal_patch_size", default=1)
        assert patch is not None and depth is not None
        side = 4 * (vision.integer("spatial_merge_size", default=2) or 2)
        batches = self.repeat("pixel_values", side * side, channels * depth * patch * patch)
        return [{**batch, "image_grid_thw": torch.tensor([[1, side, side]])} for batch in batches]

    @torch.no_grad()
    def placed(self, text: list[dict[str, Any]], media: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Put as many image tokens into each text, after its first token, as the model has features for an image."""
        features = getattr(self.model, "get_image_features", None)
        first = next(self.model.parameters(), torch.zeros(()))
        if features is None or self.image_token is None:
            return []
        taken = inspect.signature(features).parameters
        images = {
            name: value.to(first.device, first.dtype if value.is_floating_point() else None)
            for name, value in media[0].items()
            if name in taken
        }
        try:
            found = features(**images)
            found = getattr(found, "pooler_output", found)
            many = [found] if isinstance(found, torch.Tensor) else list(found)
            count = sum(entry.numel() // entry.shape[-1] for entry in many)
        # Whatever a model's code raises on an image that it was not made for.
        except Exception:
            return []
        batches = []
        for batch in text:
            ids = batch["input_ids"]
            marks = torch.zeros(1, ids.shape[1] + count, dtype=torch.long)
            marks[:, 1 : 1 + count] = 1
            images_in = torch.full((1, count), self.image_token)
            more: dict[str, Any] = {"input_ids": torch.cat([ids[:, :1], images_in, ids[:, 1:]], 1)}
            if "attention_mask" in batch:
                more["attention_mask"] = torch.ones_like(marks)
            more |= {name: marks for name in ("token_type_ids", "mm_token_type_ids") if name in self.names}
            batches.append({**batch, **more})
        return batches

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

    def unnamed(self, name: str, length: int) -> Iterator[list[dict[str, Any]]]:
        """For a module of unknown make: ids where it embeds some, else rows as wide as its first map."""
        for module in self.model.modules():
            if isinstance(module, nn.Embedding):
                top, shape = module.num_embeddings, (1, min(length, 32))
                yield [{name: torch.randint(top, shape, generator=self.generator)} for _ in range(self.sequences)]
                return
            if isinstance(module, (nn.Linear, nn.LayerNorm)):
                width = module.in_features if isinstance(module, nn.Linear) else module.normalized_shape[-1]
                yield self.repeat(name, 1, 32, width)
                return

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
