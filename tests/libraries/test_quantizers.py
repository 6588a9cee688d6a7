"""A folded checkpoint goes into quantizing libraries as any other, and generates when they are done with it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from aside import bring, bring_llmcompressor
from tiny_checkpoints import saved, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer

import normswap

Quantize = Callable[[nn.Module], object]
PROMPT = torch.tensor([[1, 7, 3, 9, 4, 2]])


def torchao_int8(model: nn.Module) -> None:
    """Weights of linear layers in int8 per channel, activations as they are."""
    torchao = bring("torchao.quantization")
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())


def llmcompressor_rtn(scheme: str) -> Quantize:
    """Round to nearest by llm-compressor's own recipe, which needs no data."""

    def quantize(model: nn.Module) -> None:
        library = bring_llmcompressor()
        recipe = library.modifiers.quantization.QuantizationModifier(
            targets="Linear", scheme=scheme, ignore=["lm_head"]
        )
        with warnings.catch_warnings():
            # What the library says of the machine that it runs on.
            warnings.simplefilter("ignore")
            library.oneshot(model=model, recipe=recipe)

    return quantize


QUANTIZERS = {"torchao": torchao_int8, "W8A8": llmcompressor_rtn("W8A8"), "W4A16": llmcompressor_rtn("W4A16")}


@torch.no_grad()
def continued(model: nn.Module, ids: torch.Tensor, count: int) -> list[int]:
    """Return the tokens of a greedy continuation."""
    made = model.generate(ids, do_sample=False, max_new_tokens=count, min_new_tokens=count, pad_token_id=0)
    return made[0, ids.shape[1] :].tolist()


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=PROMPT).logits.float()


def distance(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folded Llama whose widths are multiples of the groups that are quantized together."""
    place = tmp_path_factory.mktemp("quantizers")
    model = tiny_llama(hidden_size=128, intermediate_size=256, num_attention_heads=4)
    saved(model.to(torch.bfloat16), place / "in")
    normswap.convert(place / "in", place / "out", fold=True, verify=False)
    return place


@pytest.mark.parametrize("name", QUANTIZERS)
def test_a_folded_checkpoint_is_quantized_and_generates(name: str, tiny: Path) -> None:
    original, folded = (AutoModelForCausalLM.from_pretrained(tiny / where).eval() for where in ("in", "out"))
    expected = logits(original)
    assert distance(logits(folded), expected) < 0.02
    QUANTIZERS[name](folded)
    after = logits(folded)
    # Something was quantized, and nothing came to grief.
    assert 0.0 < distance(after, expected) < 0.5
    assert len(continued(folded, PROMPT, 8)) == 8


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
# W4A16 has groups of 128 columns, which SmolLM2's 576 are no multiple of.
@pytest.mark.parametrize("name", ["torchao", "W8A8"])
def test_a_folded_smollm2_is_quantized_and_still_writes(name: str, smollm2: Path, folded_smollm2: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    ids = tokenizer("The three states of matter are", return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folded_smollm2).eval()
    QUANTIZERS[name](model)
    words = tokenizer.decode(continued(model, ids, 12))
    assert all(word in words for word in ("solid", "liquid", "gas")), words


@pytest.fixture(scope="module")
def folded_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2, 60 of its 61 norms folded; the last one feeds the tied head."""
    out = tmp_path_factory.mktemp("folded") / "out"
    normswap.convert(smollm2, out, fold=True, verify=False)
    return out
