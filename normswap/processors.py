"""Images and sounds through the checkpoint's own processor, beside text in the form that it asks for."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from normswap.candidates import Candidate, beside
from normswap.quiet import first_line, quiet
from normswap.source import Source

__all__ = ["Processor", "load_processor", "picture", "processed", "sound"]

_FILES = ("preprocessor_config.json", "processor_config.json", "image_processor_config.json")
# Pixels; small, since processors that do not resize make as many tokens as there are patches.
_HEIGHT, _WIDTH = 192, 256
_SECONDS = 2.0
# Tokens of text where a model compares it with an image: such models take few.
_CAPTION = 32


@dataclass
class Processor:
    """A checkpoint's processor.

    Attributes:
        tool: what transformers loaded; None where it did not.
        fault: why it is not used, one line; empty while it is.
    """

    tool: Any
    fault: str = ""

    @property
    def tokenizer(self) -> Any:
        """The tokenizer that it holds; None without."""
        return getattr(self.tool, "tokenizer", None)

    @property
    def name(self) -> str:
        """Of its class."""
        return type(self.tool).__name__ if self.tool is not None else "processor"


def load_processor(source: Source) -> Processor | None:
    """Load the processor of a checkpoint.

    Returns:
        It, or why it cannot be loaded; None where the folder carries none.
    """
    if not any((source.path / name).is_file() for name in _FILES):
        return None
    fault = ""
    # A part alone is what remains where the tokenizer lacks, as where sounds are only encoded.
    for auto in (transformers.AutoProcessor, transformers.AutoFeatureExtractor, transformers.AutoImageProcessor):
        try:
            with quiet():
                tool = auto.from_pretrained(
                    str(source.path), local_files_only=True, trust_remote_code=source.trust_remote_code
                )
        # Whatever a library's or a checkpoint's own code raises.
        except Exception as error:
            fault = fault or first_line(error)
            continue
        return Processor(tool)
    return Processor(None, fault)


def processed(
    processor: Processor, model: nn.Module, config: Any, rows: Sequence[Sequence[int]], sequences: int, seed: int
) -> Iterator[Candidate]:
    """Yield inputs that a processor makes of seeded images or sounds, the most telling first.

    Args:
        processor: the checkpoint's; its `fault` is set where it makes nothing.
        model: that is to run on them.
        config: its configuration.
        rows: token ids of text for each sequence; empty without text.
        sequences: how many to make.
        seed: of everything that is drawn.
    """
    if processor.tool is None:
        return
    names = list(inspect.signature(model.forward).parameters)
    rest = beside(model, config, names, sequences, seed)
    texts = [processor.tokenizer.decode(row, skip_special_tokens=True) for row in rows] if processor.tokenizer else []
    captions = [processor.tokenizer.decode(row[:_CAPTION], skip_special_tokens=True) for row in rows] if texts else []
    made = 0
    for kind, calls in _calls(processor.tool):
        media = [
            picture(seed + n) if kind == "image" else sound(seed + n, _rate(processor.tool)) for n in range(sequences)
        ]
        for call in calls:
            batches = []
            words = captions if call.caption else texts
            if call.text and not words:
                continue
            try:
                with quiet():
                    for n in range(min(sequences, len(words)) if call.text else sequences):
                        found = call(processor.tool, words[n] if call.text else "", media[n])
                        batch = {key: found[key] for key in found if key in names and torch.is_tensor(found[key])}
                        batches.append({**batch, **rest[n]})
            # A processor says in many ways that it was not made for such a call.
            except Exception as error:
                processor.fault = processor.fault or first_line(error)
                continue
            if not batches[0].keys() - rest[0].keys():
                continue
            made += 1
            yield _candidate(f"text+{kind}" if call.text else kind, batches, processor.name)
    if not made and not processor.fault:
        processor.fault = "it makes nothing that the model reads"


@dataclass(frozen=True)
class _Call:
    """One way of calling a processor."""

    kind: str
    form: str
    nested: bool = False

    @property
    def text(self) -> bool:
        return self.form != "alone"

    @property
    def caption(self) -> bool:
        return self.form == "plain"

    def __call__(self, tool: Any, text: str, medium: np.ndarray) -> Any:
        given: dict[str, Any] = {"return_tensors": "pt"}
        part = _part(tool, self.kind)
        if self.kind == "audio":
            given["sampling_rate"] = _rate(tool)
        if self.form == "alone":
            return part(medium, **given) if self.kind == "audio" else part(images=[medium], **given)
        given["images" if self.kind == "image" else "audio"] = [[medium]] if self.nested else [medium]
        return tool(text=[self._words(tool, text)], **given)

    def _words(self, tool: Any, text: str) -> str:
        if self.form == "chat":
            said = [{"type": self.kind}, {"type": "text", "text": text}]
            return tool.apply_chat_template([{"role": "user", "content": said}], add_generation_prompt=True)
        return f"{getattr(tool, f'{self.kind}_token')}{text}" if self.form == "token" else text


def _calls(tool: Any) -> Iterator[tuple[str, list[_Call]]]:
    for kind in ("image", "audio"):
        if _part(tool, kind) is None:
            continue
        forms = []
        if getattr(tool, "tokenizer", None) is not None:
            if getattr(tool, "chat_template", None):
                forms.append("chat")
            if isinstance(getattr(tool, f"{kind}_token", None), str):
                forms.append("token")
            forms.append("plain")
        calls = [_Call(kind, form, nested) for form in forms for nested in (False, True)]
        yield kind, [*calls, _Call(kind, "alone")]


def _part(tool: Any, kind: str) -> Any:
    """What of a processor reads images or sounds; None without."""
    name = "image_processor" if kind == "image" else "feature_extractor"
    part = getattr(tool, name, None)
    if part is not None:
        return part
    if isinstance(tool, transformers.ProcessorMixin):
        return None
    if kind == "audio":
        return tool if isinstance(getattr(tool, "sampling_rate", None), int) else None
    makes = getattr(tool, "model_input_names", [])
    return tool if any(word in name for name in makes for word in ("pixel", "image", "patches")) else None


def _rate(tool: Any) -> int:
    return int(_part(tool, "audio").sampling_rate)


def picture(seed: int) -> np.ndarray:
    """Draw an image: soft colours, noise, and some shapes with sharp edges.

    Args:
        seed: of what is drawn.

    Returns:
        (192, 256, 3) uint8.
    """
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(1, 3, 5, 7, generator=generator)
    image = F.interpolate(coarse, (_HEIGHT, _WIDTH), mode="bicubic", align_corners=True)[0]
    down, right = torch.meshgrid(torch.arange(_HEIGHT), torch.arange(_WIDTH), indexing="ij")
    for number in range(6):
        y, x, size, *colour = torch.rand(6, generator=generator).tolist()
        away_y, away_x, reach = (down - y * _HEIGHT).abs(), (right - x * _WIDTH).abs(), 8 + 40 * size
        round_one = number % 2 == 0
        inside = away_y**2 + away_x**2 < reach**2 if round_one else torch.maximum(away_y, away_x) < reach
        image = torch.where(inside, torch.tensor(colour)[:, None, None], image)
    image = image + 0.03 * torch.randn(image.shape, generator=generator)
    return (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()


def sound(seed: int, rate: int) -> np.ndarray:
    """Draw two seconds of tones that swell and fade, with noise.

    Args:
        seed: of what is drawn.
        rate: samples a second.

    Returns:
        (2 x rate,) float32 within -1 and 1.
    """
    generator = torch.Generator().manual_seed(seed)
    time = torch.arange(int(_SECONDS * rate)) / rate
    wave = 0.02 * torch.randn(len(time), generator=generator)
    for _ in range(5):
        pitch, begin, length, loud = torch.rand(4, generator=generator).tolist()
        swell = torch.exp(-(((time - _SECONDS * begin) / (0.1 + 0.5 * length)) ** 2))
        wave = wave + (0.05 + 0.1 * loud) * swell * torch.sin(2 * torch.pi * (80 + 3000 * pitch**2) * time)
    return wave.clamp(-1, 1).numpy()


def _candidate(kind: str, batches: list[dict[str, Any]], name: str) -> Candidate:
    first = batches[0].get("input_ids", next(value for value in batches[0].values() if torch.is_tensor(value)))
    return Candidate(kind, first.shape[-1], " x ".join(map(str, first.shape)), batches, by=name)
