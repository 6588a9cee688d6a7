"""transformers' pipelines around a patched model: from text and images to the same answers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from tiny_checkpoints import disturb_norms, tiny_bert, tiny_llama
from torch import nn
from transformers import PreTrainedModel, ViTConfig, ViTForImageClassification, ViTImageProcessor, pipeline
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from words import word_tokenizer

import normswap
from normswap import modules

Image = pytest.importorskip("PIL.Image", reason="needs pillow, which is not installed")

pytestmark = pytest.mark.core

SENTENCES = ["the cat and the dog sleep", "how far is the sea"]


def answers(task: str, model: PreTrainedModel, inputs: Any, how: dict[str, Any], **parts: Any) -> Any:
    torch.manual_seed(2)
    return pipeline(task, model=model, device="cpu", **parts)(inputs, **how)


def check(
    monkeypatch: pytest.MonkeyPatch,
    task: str,
    model: PreTrainedModel,
    inputs: Any,
    norms: int,
    how: dict[str, Any] | None = None,
    **parts: Any,
) -> Any:
    """The plain model's answers, after the patched one has given the same without running an original norm."""
    expected = answers(task, model, inputs, how or {}, **parts)
    patched = normswap.patch(copy.deepcopy(model))
    assert len(list(modules.fused_norms(patched))) == norms
    calls: list[nn.Module] = []
    with monkeypatch.context() as patch:
        for cls in (nn.LayerNorm, LlamaRMSNorm):
            patch.setattr(cls, "forward", lambda self, x: calls.append(self))
        assert answers(task, patched, inputs, how or {}, **parts) == expected
    assert calls == []
    return expected


@pytest.mark.parametrize(
    "how", [{}, {"do_sample": True, "top_k": 9}, {"num_beams": 2}], ids=["greedy", "sampled", "beams"]
)
def test_text_generation(monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]) -> None:
    how = {"do_sample": False, "max_new_tokens": 8, "min_new_tokens": 8, "pad_token_id": 0, **how}
    tokenizer = word_tokenizer(bert=False)
    (first,), _ = check(monkeypatch, "text-generation", tiny_llama(), SENTENCES, 5, how, tokenizer=tokenizer)
    assert first["generated_text"].startswith(SENTENCES[0])
    assert len(first["generated_text"]) > len(SENTENCES[0])


def test_fill_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["the cat and the [MASK] sleep", "how [MASK] is the sea"]
    first, second = check(monkeypatch, "fill-mask", tiny_bert(), texts, 6, tokenizer=word_tokenizer())
    assert [guess["score"] for guess in first] != [guess["score"] for guess in second]


def test_feature_extraction(monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = check(monkeypatch, "feature-extraction", tiny_bert().bert, SENTENCES, 5, tokenizer=word_tokenizer())
    assert np.shape(first) == (1, 8, 32)


def test_image_classification(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=32,
        patch_size=8,
        num_labels=6,
    )
    model = disturb_norms(ViTForImageClassification(config))
    draw = np.random.default_rng(0)
    images = [Image.fromarray(draw.integers(0, 256, (40, 50, 3), dtype=np.uint8)) for _ in range(2)]
    processor = ViTImageProcessor(size={"height": 32, "width": 32})
    first, second = check(monkeypatch, "image-classification", model, images, 5, image_processor=processor)
    assert len(first) == 5
    assert first != second
