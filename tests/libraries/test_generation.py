"""Generation with every kind of cache: the same tokens out of the same scores, bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers.cache_utils
import transformers.generation.utils
from aside import bring
from tiny_checkpoints import disturb_norms, tiny_llama
from torch import nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap

pytestmark = pytest.mark.core

PROMPT = torch.tensor([[5, 9, 2, 33, 41, 7], [11, 3, 60, 22, 8, 19]])
SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
}


def lively(model: PreTrainedModel) -> PreTrainedModel:
    """Enlarge the weights so that the next token is not the same one for ever."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(8)
    return model


def llama() -> PreTrainedModel:
    return lively(tiny_llama())


def mistral() -> PreTrainedModel:
    """Every layer sees four tokens back."""
    torch.manual_seed(0)
    return lively(disturb_norms(MistralForCausalLM(MistralConfig(**SIZES, sliding_window=4))))


def gemma2() -> PreTrainedModel:
    """Layers that see four tokens back take turns with layers that see all."""
    torch.manual_seed(0)
    return lively(disturb_norms(Gemma2ForCausalLM(Gemma2Config(**SIZES, sliding_window=4))))


@torch.no_grad()
def generated(model: PreTrainedModel, prompt: torch.Tensor = PROMPT, **how: Any) -> tuple[torch.Tensor, ...]:
    """Return the tokens, and the scores of each step."""
    how = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, **how}
    if "assistant_model" in how:
        # An older transformers does not take the two together.
        del how["min_new_tokens"]
    torch.manual_seed(3)
    out = model.generate(prompt, return_dict_in_generate=True, output_scores=True, pad_token_id=0, **how)
    return out.sequences, torch.stack(out.scores)


def check(model: PreTrainedModel, patched: PreTrainedModel, prompt: torch.Tensor = PROMPT, **how: Any) -> torch.Tensor:
    expected, expected_scores = generated(model, prompt, **how)
    got, scores = generated(patched, prompt, **how)
    assert torch.equal(got, expected)
    assert torch.equal(scores, expected_scores)
    assert not torch.equal(scores[0], scores[-1])
    return expected


def pair(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    return model, normswap.patch(copy.deepcopy(model))


MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "without_cache": {"use_cache": False},
    "beams": {"num_beams": 3},
    "sampled": {"do_sample": True, "temperature": 1.5, "top_k": 8},
    "static": {"cache_implementation": "static"},
    "static_beams": {"cache_implementation": "static", "num_beams": 2},
}


@pytest.mark.parametrize("build", [llama, mistral, gemma2])
@pytest.mark.parametrize("mode", MODES)
def test_generates_the_same(build: Any, mode: str) -> None:
    check(*pair(build()), **MODES[mode])


def test_no_original_norm_runs_while_generating(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[nn.Module] = []
    model, patched = pair(llama())
    forward = LlamaRMSNorm.forward
    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: calls.append(self) or forward(self, x))
    generated(patched, cache_implementation="static")
    assert calls == []
    generated(model, cache_implementation="static")
    assert len(calls) == 12 * 5


@pytest.mark.parametrize("lookup", [False, True], ids=["assistant", "prompt_lookup"])
def test_assisted_generation(lookup: bool) -> None:
    model, patched = pair(llama())
    prompt = PROMPT[:1].repeat(1, 3)
    if lookup:
        check(model, patched, prompt, prompt_lookup_num_tokens=3)
        return
    torch.manual_seed(5)
    assistant = copy.deepcopy(model)
    with torch.no_grad():
        # Close enough to be right now and then.
        for parameter in assistant.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    for helper in pair(assistant):
        tokens = check(model, patched, prompt, assistant_model=helper)
        assert torch.equal(tokens, generated(model, prompt, min_new_tokens=0)[0])


def test_a_cache_of_eight_bit_floats() -> None:
    if not hasattr(transformers.cache_utils, "Fp8QuantizedLayer"):
        pytest.skip(f"transformers {transformers.__version__} has no cache of eight bit floats")
    check_quantized({"backend": "fp8"})


def check_quantized(config: dict[str, Any]) -> None:
    model, patched = pair(llama())
    how = {"cache_implementation": "quantized", "cache_config": config}
    check(model, patched, **how)
    assert not torch.equal(generated(model, **how)[1], generated(model)[1])


def test_a_cache_quantized_by_hqq(monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = bring("hqq.core.quantize")
    for module in (transformers.cache_utils, transformers.generation.utils):
        monkeypatch.setattr(module, "is_hqq_available", lambda: True, raising=False)
    monkeypatch.setattr(transformers.cache_utils, "HQQQuantizer", quantize.Quantizer, raising=False)
    settings = {"nbits": 4, "axis_key": 1, "axis_value": 1, "q_group_size": 16, "residual_length": 4}
    check_quantized({"backend": "hqq", **settings})


@pytest.mark.parametrize("beams", [1, 3])
def test_an_encoder_and_a_decoder(beams: int) -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2, decoder_start_token_id=0)
    check(*pair(lively(disturb_norms(T5ForConditionalGeneration(config)))), num_beams=beams)
