"""Images, sounds, videos and series in the forms that models take them, from what a configuration says of them."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator

import torch

from normswap.recipes import Draw, Fixed, Numbered, Ones, Part
from normswap.settings import Settings

__all__ = ["IMAGES", "SERIES", "SOUNDS", "VIDEOS", "images", "series", "sounds", "videos"]

IMAGES = ("pixel_values", "flattened_patches", "pixel_values_images", "image", "images")
VIDEOS = ("pixel_values_videos",)
SERIES = ("past_values",)
SOUNDS = (
    "input_features", "input_values", "audio_values", "audio_input_features", "input_audio", "audio", "spectrogram",
    "audio_features", "audio_mel", "mel_spectrogram",
)  # fmt: skip

_VISION_CONFIGS = ("vision_config", "encoder", "backbone_config", "vision_encoder_config")
_AUDIO_CONFIGS = ("audio_config", "speech_config", "encoder_config", "audio_encoder_config")
# Steps of a series that are enough where a model takes very many.
_SHORT = 64
_GRID = re.compile(r"grid_(thw|hws?)$")
_PLACES = re.compile(r"^(pixel|image|patch|vision)\w*position_ids$")
_SOUND_MASK = re.compile(r"^(input_features?|input_values|features?|audio|padding)\w*mask$|^mask$")


def images(name: str, names: Collection[str], settings: Settings) -> Iterator[dict[str, Part]]:
    """Yield forms of one image under an argument's name, the likeliest first, with what else describes it."""
    vision = settings.sub(_VISION_CONFIGS) or settings
    channels = vision.integer("num_channels", "in_channels", "in_chans", default=3) or 3
    sizes, patch = _sizes(vision), vision.side("patch_size") or 14
    masked = bool({"pixel_attention_mask", "spatial_shapes"} & set(names))
    patched = name == "flattened_patches" or any(map(_GRID.search, names)) or any(map(_PLACES.search, names))
    if patched:
        yield from _patches(name, names, vision, channels)
    for height, width in [*sizes, (224, 224), (64, 64)]:
        yield _sized({name: Draw((1, channels, height, width))}, names, height, width, patch)
    frames = vision.integer("num_frames", default=2) or 2
    for height, width in sizes or [(64, 64)]:
        yield {name: Draw((1, frames, channels, height, width))}
    if not any(map(_GRID.search, names)) and masked:
        yield from _patches(name, names, vision, channels)
    for height, width in sizes or [(64, 64)]:
        for many in (1, 5, 3, 2):
            yield _sized({name: Draw((1, many, channels, height, width))}, names, height, width, patch)
        if "aspect_ratio_ids" in names:
            tiles = vision.integer("max_num_tiles", default=4) or 4
            yield {
                name: Draw((1, 1, tiles, channels, height, width)),
                "aspect_ratio_ids": Ones((1, 1)),
                "aspect_ratio_mask": Ones((1, 1, tiles)),
            }
    if not patched and not masked:
        yield from _patches(name, names, vision, channels)


def videos(name: str, names: Collection[str], settings: Settings) -> Iterator[dict[str, Part]]:
    """Yield forms of one video."""
    vision = settings.sub(_VISION_CONFIGS) or settings
    channels = vision.integer("num_channels", "in_channels", "in_chans", default=3) or 3
    if any(map(_GRID.search, names)):
        yield from _patches(name, names, vision, channels, word="video")
    counts = [n for n in [settings.integer("frames_per_clip", "num_frames")] if n]
    for height, width in _sizes(vision) or [(64, 64)]:
        for frames in dict.fromkeys([*counts, 4, 2, 16]):
            yield {name: Draw((1, frames, channels, height, width))}


def sounds(name: str, names: Collection[str], settings: Settings) -> Iterator[dict[str, Part]]:
    """Yield forms of one sound: features over time either way round, or a wave; with masks where there are any."""
    audio = settings.sub(_AUDIO_CONFIGS) or settings
    bins = audio.integer(
        "num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size", "input_feat_size",
        "n_mels", "input_dim", default=settings.integer("num_mel_bins", "feature_size", default=80),
    ) or 80  # fmt: skip
    frames = [2 * n for n in [audio.integer("max_source_positions")] if n]
    frames += [n for n in [audio.integer("max_length")] if n and name == "input_values"]
    wave = name not in ("input_features", "audio_input_features", "audio_features", "spectrogram", "mel_spectrogram")
    shapes: list[tuple[int, ...]] = []
    for count in [*frames, 256, 200]:
        if not wave or count not in (256, 200):
            shapes.append((1, bins, count))
        shapes.append((1, count, bins))
    shapes += [(1, 16000), (1, 1, 16000), (1, 1, 1001, 64)]
    if not wave:
        shapes.append((bins, 200))
    masks = [other for other in names if _SOUND_MASK.search(other)]
    for shape in shapes:
        time = max(shape[-2:])
        for mask in [*masks, None]:
            parts: dict[str, Part] = {name: Draw(shape)}
            if mask is not None:
                parts[mask] = Ones((1, time), torch.bool)
            yield parts


def series(name: str, names: Collection[str], settings: Settings) -> Iterator[dict[str, Part]]:
    """Yield forms of one series of numbers with what is known of its times, past and to come."""
    lags = settings.value("lags_sequence")
    past = settings.integer("context_length", default=32) or 32
    past += max(lags) if isinstance(lags, (list, tuple)) and lags else 0
    ahead = settings.integer("prediction_length", default=4) or 4
    known = settings.value("num_time_features")
    known = known if isinstance(known, int) else 0
    wide = settings.integer("num_input_channels", "input_size", default=1) or 1
    lengths = [_SHORT, past] if past > 8 * _SHORT else [past]
    widths: list[tuple[int, ...]] = [(), (wide,)] if "past_time_features" in names else [(wide,), ()]
    forms = []
    for past, more in itertools.product(lengths, widths):
        parts: dict[str, Part] = {name: Draw((1, past, *more))}
        if "past_time_features" in names:
            parts["past_time_features"] = Draw((1, past, known))
            parts["past_observed_mask"] = Ones((1, past, *more), torch.float32)
            parts["future_values"] = Draw((1, ahead, *more))
            parts["future_time_features"] = Draw((1, ahead, known))
        forms.append(parts)
    yield from forms
    if "past_time_features" in names:
        yield from ({key: part for key, part in form.items() if not key.startswith("future")} for form in forms)


def _patches(
    name: str, names: Collection[str], vision: Settings, channels: int, word: str = "image"
) -> Iterator[dict[str, Part]]:
    """Images that were cut into patches beforehand, with their grid or the places of the patches."""
    patch = vision.side("patch_size") or 14
    depth = vision.side("temporal_patch_size", "patch_temporal") or 1
    merge = vision.side("spatial_merge_size", "merge_size", "pooling_kernel_size") or 2
    other = "video" if word == "image" else "image"
    for side in dict.fromkeys((4 * merge, 12)):
        count, area = side * side, patch * patch
        more: dict[str, Part] = {}
        for grid in names:
            if _GRID.search(grid) and other not in grid:
                size = [1, side, side] if grid.endswith("thw") else [side, side]
                more[grid] = Fixed(torch.tensor([size]))
            elif _PLACES.search(grid):
                at = torch.arange(count)
                more[grid] = Fixed(torch.stack([at % side, at // side], -1)[None])
        if "spatial_shapes" in names:
            more["spatial_shapes"] = Fixed(torch.tensor([[side, side]]))
        if "pixel_attention_mask" in names:
            more["pixel_attention_mask"] = Ones((1, count))
        flat, square = (count, channels * area), (count, channels, patch, patch)
        shapes: list[tuple[int, ...]] = [(count, channels * depth * area)] if depth > 1 else []
        shapes += [flat, square, (count, channels, depth, patch, patch), (1, *flat), (1, *square)]
        if "spatial_shapes" in names:
            shapes = [*shapes[-2:], *shapes[:-2]]
        shapes += [(1, count, channels * depth * area)] if depth > 1 else []
        shapes += [(count, depth, length, length, channels) for length in (patch, merge * patch)]
        if name == "flattened_patches":
            flat_width = vision.integer("patch_embed_hidden_size") or channels * area
            yield {name: Numbered((1, count, 2 + flat_width), side), **more}
            continue
        for shape in shapes:
            yield {name: Draw(shape), **more}


def _sized(parts: dict[str, Part], names: Collection[str], height: int, width: int, patch: int) -> dict[str, Part]:
    """Add the size of an image: in pixels, or in patches."""
    if "image_sizes" in names:
        return {**parts, "image_sizes": Fixed(torch.tensor([[height, width]]))}
    if "target_sizes" in names:
        return {**parts, "target_sizes": Fixed(torch.tensor([[height // patch, width // patch]]))}
    return parts


def _sizes(vision: Settings) -> list[tuple[int, int]]:
    size = vision.value("image_size", "img_size")
    if isinstance(size, dict):
        size = (size.get("height", 224), size.get("width", 224))
    if isinstance(size, (list, tuple)):
        size = tuple(size)[-2:] * (2 if len(size) == 1 else 1)
        return [(int(size[0]), int(size[1]))]
    return [(size, size)] if isinstance(size, int) else []
