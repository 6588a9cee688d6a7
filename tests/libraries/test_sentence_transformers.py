"""A SentenceTransformer as a whole, tiny and trained: tokens in, sentence embeddings out."""

from __future__ import annotations

import copy
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tiny_checkpoints import disturb_norms, tiny_bert
from torch import nn
from transformers import BertConfig, BertForSequenceClassification
from words import word_tokenizer

import normswap
from normswap import modules

pytest.importorskip("sentence_transformers", reason="needs sentence-transformers, which is not installed")

from sentence_transformers import CrossEncoder, SentenceTransformer

pytestmark = pytest.mark.core

SENTENCES = [
    "the cat and the dog sleep",
    "how far is the sea",
    "birds sing",
    "one small red fish is not like an old tree",
]


def parts() -> ModuleType:
    """The modules that a SentenceTransformer is put together from, under the version's name."""
    try:
        return importlib.import_module("sentence_transformers.sentence_transformer.modules")
    except ModuleNotFoundError:
        return importlib.import_module("sentence_transformers.models")


@pytest.fixture
def tiny(tmp_path: Path) -> SentenceTransformer:
    """BERT, mean pooling, normalisation: five LayerNorms."""
    tiny_bert().bert.save_pretrained(tmp_path / "bert")
    word_tokenizer().save_pretrained(tmp_path / "bert")
    transformer = parts().Transformer(str(tmp_path / "bert"))
    return SentenceTransformer(modules=[transformer, parts().Pooling(32), parts().Normalize()], device="cpu").eval()


def swapped(model: nn.Module) -> int:
    return len(list(modules.fused_norms(model)))


def test_embeds_the_same(tiny: SentenceTransformer) -> None:
    expected = tiny.encode(SENTENCES)
    assert np.allclose(np.linalg.norm(expected, axis=1), 1)
    assert normswap.patch(tiny) is tiny
    assert swapped(tiny) == 5
    assert np.array_equal(tiny.encode(SENTENCES), expected)
    assert not np.array_equal(tiny.encode(SENTENCES)[0], expected[1])
    normswap.unpatch(tiny)
    assert swapped(tiny) == 0
    assert np.array_equal(tiny.encode(SENTENCES), expected)


def test_its_own_normalize_is_left_alone(tiny: SentenceTransformer) -> None:
    """It takes a dictionary and returns one; that is said, and nothing else of its modules is."""
    plan = normswap.inspect(tiny).plan
    assert [(decision.cls, decision.reason) for decision in plan.refusals] == [
        ("Normalize", "its forward takes a dictionary (features), not a tensor")
    ]
    assert {decision.cls for decision in plan.swaps} == {"LayerNorm"}
    normswap.patch(tiny)
    assert type(tiny[-1]) is parts().Normalize


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_embeds_the_same_in_half_precision(tiny: SentenceTransformer, dtype: torch.dtype) -> None:
    tiny.to(dtype)
    expected = tiny.encode(SENTENCES, convert_to_tensor=True)
    assert torch.equal(normswap.patch(tiny).encode(SENTENCES, convert_to_tensor=True), expected)


def test_trains_to_the_same_gradients(tiny: SentenceTransformer) -> None:
    gradients = []
    for model in (tiny, normswap.patch(copy.deepcopy(tiny))):
        features = dict(tiny[0].tokenizer(SENTENCES, padding=True, return_tensors="pt"))
        embedded = model(features)["sentence_embedding"]
        (embedded @ embedded.T).pow(2).sum().backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected, got = gradients
    assert got.keys() == expected.keys()
    assert sum("LayerNorm" in name for name in got) == 10
    for name, gradient in got.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)


def test_a_patched_one_is_saved_as_it_was(tiny: SentenceTransformer, tmp_path: Path) -> None:
    expected = tiny.encode(SENTENCES)
    tiny.save_pretrained(str(tmp_path / "plain"), create_model_card=False)
    normswap.patch(tiny).save_pretrained(str(tmp_path / "patched"), create_model_card=False)
    for path in (tmp_path / "plain").rglob("*"):
        if path.is_file():
            assert (tmp_path / "patched" / path.relative_to(tmp_path / "plain")).read_bytes() == path.read_bytes()
    again = SentenceTransformer(str(tmp_path / "patched"), device="cpu")
    assert swapped(again) == 0
    assert np.array_equal(again.encode(SENTENCES), expected)


def test_a_cross_encoder_scores_the_same(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_labels=1
    )
    disturb_norms(BertForSequenceClassification(config)).save_pretrained(tmp_path)
    word_tokenizer().save_pretrained(tmp_path)
    model = CrossEncoder(str(tmp_path), device="cpu")
    pairs = [(SENTENCES[0], SENTENCES[1]), (SENTENCES[2], SENTENCES[3])]
    expected = model.predict(pairs)
    assert expected[0] != expected[1]
    normswap.patch(model if isinstance(model, nn.Module) else model.model)
    assert np.array_equal(model.predict(pairs), expected)


@pytest.fixture(scope="module")
def trained(minilm: Path) -> Iterator[SentenceTransformer]:
    yield SentenceTransformer(str(minilm), device="cpu")


def test_minilm_with_its_trained_weights(trained: SentenceTransformer) -> None:
    sentences = [
        "A cat sleeps on the warm roof.",
        "The kitten is napping in the sun on top of the house.",
        "Interest rates were raised by half a point.",
        "",
        "word " * 200,
    ]
    expected = trained.encode(sentences)
    normswap.patch(trained)
    assert swapped(trained) == 13
    got = trained.encode(sentences)
    normswap.unpatch(trained)
    assert np.array_equal(got, expected)
    likeness = got @ got.T
    assert likeness[0, 1] > 0.5 > 0.2 > likeness[0, 2]
