"""Inputs that come by every norm that inputs can come by."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normswap import folding
from normswap.attempts import Attempts
from normswap.candidates import Candidate, propose

TYPES = """
    qwen2_vl qwen3_vl idefics3 llava_next paddleocr_vl lighton_ocr florence2 qwen2_audio bros blip_2_qformer
    qwen3_asr_encoder glm4v_vision siglip2_vision_model time_series_transformer musicgen_decoder
""".split()  # noqa: SIM905


def proposed(model: nn.Module, config: Any, sequences: int = 1) -> list[Candidate]:
    names = list(inspect.signature(model.forward).parameters)
    return list(propose(model, config, names, [], sequences, 8, 0))


# The zoo leaves files open.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.zoo
@pytest.mark.parametrize("model_type", TYPES)
def test_every_norm_that_the_zoo_reaches_is_reached_without_values(zoo: Path, model_type: str) -> None:
    os.environ.setdefault("TINY_NO_EXTRAS", "1")
    sys.path.insert(0, str(zoo))
    try:
        tiny = importlib.import_module("tiny")
    finally:
        sys.path.remove(str(zoo))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.tiny_model(model_type)
        inputs = tiny.tiny_inputs(model)
        norms = [name for name, module in model.named_modules() if re.search("norm|LN$", type(module).__name__, re.I)]
        oracle = Attempts(model, [model.get_submodule(name) for name in norms])
        wanted = oracle.forward(inputs).reached
    assert wanted
    subject = folding._without_values(model)
    attempts = Attempts(subject, [subject.get_submodule(name) for name in norms])
    reached: set[int] = set()
    for candidate in proposed(subject, model.config):
        attempt = attempts.forward(candidate.batches[0])
        reached |= attempt.reached if attempt.error is None else set()
    assert {norms[place] for place in wanted - reached} == set()


class Reader(nn.Module):
    """Takes images cut into patches with their grid, and as many marks in the text as they have features."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 16)
        self.tower = nn.Linear(24, 16)
        self.head = nn.Linear(16, 50)

    def forward(
        self,
        input_ids: torch.Tensor,
        boxes: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_thw: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Read.

        Args:
            boxes (`torch.LongTensor` of shape `(batch_size, sequence_length, 4)`):
                Where each token stands.
        """
        if boxes is None:
            raise ValueError("You have to specify boxes")
        rows = self.table(input_ids) + self.table(boxes).sum(2)
        if pixel_values is not None:
            found = self.tower(pixel_values)[:: 2 * int(image_grid_thw[0, 0])]
            at = input_ids == 49
            if int(at.sum()) != len(found):
                raise ValueError(f"Image features and image tokens do not match: {int(at.sum())}, {len(found)}")
            rows = rows.masked_scatter(at[..., None], found)
        return self.head(rows)


class Said:
    """A configuration."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


@pytest.mark.core
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_what_the_code_says_is_lacking_is_given(device: str) -> None:
    config = Said(image_token_id=49, hidden_size=16, vocab_size=49, patch_size=5)
    first, *rest = proposed(Reader().to(device), config, sequences=2)
    assert first.kind == "ids+image" and not rest
    batch, other = first.batches
    assert sorted(batch) == ["boxes", "image_grid_thw", "input_ids", "pixel_values"]
    features = (len(batch["pixel_values"]) + 1) // 2
    assert int((batch["input_ids"] == 49).sum()) == features and batch["pixel_values"].shape[1] == 24
    assert batch["boxes"].shape == (1, 8 + features, 4)
    assert not torch.equal(batch["pixel_values"], other["pixel_values"])


@pytest.mark.core
def test_text_alone_is_yielded_as_it_is() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.runs = nn.Embedding(50, 16), 0

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            self.runs += 1
            return self.table(input_ids)

    model = Words()
    found = next(propose(model, Said(vocab_size=50), ["input_ids"], [], 1, 8, 0))
    assert found.kind == "ids" and model.runs == 0
