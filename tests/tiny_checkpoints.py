"""Tiny checkpoints made on the spot, with gains away from 1 so that a lost gain shows."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel


def disturb_norms(model: PreTrainedModel) -> PreTrainedModel:
    """Move every gain and bias of a norm away from 1 and 0."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                parameter.add_(0.3 * torch.randn(parameter.shape))
    return model.eval()


def tiny_llama(**changes: object) -> LlamaForCausalLM:
    """Two layers, five RMSNorms."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
    }
    return disturb_norms(LlamaForCausalLM(LlamaConfig(**{**settings, **changes})))


def tiny_bert() -> BertForMaskedLM:
    """Two layers, six LayerNorms."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    return disturb_norms(BertForMaskedLM(config))


def saved(model: PreTrainedModel, folder: Path, **options: object) -> Path:
    """Save a model and return its folder."""
    model.save_pretrained(folder, **options)
    return folder
