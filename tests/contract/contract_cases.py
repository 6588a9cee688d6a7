"""Tiny models of genuine classes with gains away from 1, and how to run and watch them."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import transformers
from tiny_checkpoints import tiny_llama
from torch import nn

import normswap
from normswap import modules
from normswap.wrapping import original_class

IDS = torch.arange(20).reshape(2, 10)
COMMON = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
ATTENTION = {"intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
SETTINGS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("GemmaConfig", "GemmaForCausalLM", {**COMMON, **ATTENTION}),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "vocab_size": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        },
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "vocab_size": 64,
            "d_model": 32,
            "d_kv": 16,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 2,
            "decoder_start_token_id": 0,
            "dropout_rate": 0.0,
        },
    ),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {**COMMON, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1, "chunk_size": 8},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            **COMMON,
            **ATTENTION,
            "layer_types": ["linear_attention", "full_attention"],
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "shared_expert_intermediate_size": 16,
        },
    ),
    "gpt_oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {**COMMON, **ATTENTION, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}
FAMILIES = ("llama", "gemma", "gpt2", "t5", "mamba2", "qwen3_next")
GATED = ("mamba2", "qwen3_next")
"""Those with gated norms, which the fused implementation sums in another order than their classes."""


def config_of(family: str) -> Any:
    """The configuration of a family; a skip where this transformers has no such class."""
    config_name, _, settings = SETTINGS[family]
    if not hasattr(transformers, config_name):
        pytest.skip(f"this transformers has no {config_name}")
    return getattr(transformers, config_name)(**settings)


def model_class(family: str) -> Any:
    """The model class of a family."""
    return transformers.LlamaForCausalLM if family == "llama" else getattr(transformers, SETTINGS[family][1])


def tiny(family: str) -> Any:
    """A seeded tiny model of a family, evaluating, its norms disturbed."""
    if family == "llama":
        return tiny_llama()
    torch.manual_seed(0)
    model = model_class(family)(config_of(family))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if re.search(r"norm|\bln_", name):
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def inputs(model: nn.Module, **more: Any) -> dict[str, Any]:
    """What the model's forward takes: two sequences of ten ids."""
    given: dict[str, Any] = {"input_ids": IDS, "use_cache": False, **more}
    if getattr(model.config, "is_encoder_decoder", False) and "labels" not in more:
        given["decoder_input_ids"] = IDS
    return given


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    """The model's logits for `inputs`."""
    return model(**inputs(model)).logits


def assert_same(got: torch.Tensor, expected: torch.Tensor, family: str) -> None:
    """Hold logits to those of the unpatched run: bit for bit, or to one rounding where a gated norm is among them."""
    assert got.dtype == expected.dtype
    if family not in GATED:
        assert torch.equal(got, expected)
        return
    error = (got - expected).double().norm() / expected.double().norm()
    unit = max(torch.finfo(got.dtype).eps, 16 * torch.finfo(torch.float32).eps)
    assert float(error) <= unit


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """The gradient of every parameter for one step of training on `inputs`."""
    model.zero_grad()
    model(**inputs(model, labels=IDS)).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def count_originals(monkeypatch: pytest.MonkeyPatch, model: nn.Module) -> list[str]:
    """Count the calls of the original forwards of a patched model's norms, in the list that is returned."""
    return count_calls(monkeypatch, {original_class(norm) for _, norm, _ in modules.fused_norms(model)})


def count_calls(monkeypatch: pytest.MonkeyPatch, classes: Iterable[type[nn.Module]]) -> list[str]:
    """Count the calls of the forwards of these classes, in the list that is returned."""
    calls: list[str] = []
    for cls in classes:
        monkeypatch.setattr(cls, "forward", _counted(cls.forward, calls))
    return calls


def _counted(forward: Callable[..., Any], calls: list[str]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        calls.append(type(self).__name__)
        return forward(self, *args, **kwargs)

    return counted


def patched(family: str) -> Any:
    """A tiny model of a family with its norms swapped."""
    return copy.deepcopy(_patched_once(family))


@functools.cache
def _patched_once(family: str) -> Any:
    return normswap.patch(tiny(family))
