"""Tiny checkpoints whose norms are easily folded wrong, and what has to become of each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel
from trap_settings import SETTINGS


@dataclass(frozen=True)
class Trap:
    """One tiny checkpoint.

    Attributes:
        model: name of its class in transformers.
        config: name of its configuration's class.
        settings: arguments of the configuration.
        folds: for names of norms (a star stands for any number), the ends of their consumers' names, with every head
            untied; a norm that stands in several kinds of layers has one set for each.
        refuses: for names of norms, words of the operation that stands in the way.
        keeps_bias: patterns of folded norms that keep a bias, divided by the gain, for want of a home.
        tied: what the conversion does with the head.
    """

    model: str
    config: str
    settings: Mapping[str, Any]
    folds: Mapping[str, tuple[set[str], ...]]
    refuses: Mapping[str, str] = field(default_factory=dict)
    keeps_bias: tuple[str, ...] = ()
    tied: str = "untie"

    def build(self) -> PreTrainedModel:
        """Return the model in float32, every norm and bias away from 1 and 0.

        Raises:
            AttributeError: this transformers does not have it.
        """
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**self.settings)
        return disturbed(getattr(transformers, self.model)(config)).eval()


@torch.no_grad()
def disturbed(model: PreTrainedModel) -> PreTrainedModel:
    """Move gains and biases away from 1 and 0, and weights to a size at which every part of the model counts."""
    for name, parameter in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        if "norm" in owner or name.endswith("bias"):
            parameter.add_(0.3 * torch.randn(parameter.shape))
        elif parameter.dim() >= 2:
            parameter.mul_(4.0)
    return model


def batch(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Return inputs for a model's forward: ``(2, 16)`` tokens, and what else its forward needs."""
    ids = torch.randint(5, 60, (2, 16), generator=torch.Generator().manual_seed(3))
    if model.config.model_type == "whisper":
        features = torch.randn(2, 16, 64, generator=torch.Generator().manual_seed(4))
        return {"input_features": features.to(model.dtype), "decoder_input_ids": ids}
    if model.config.model_type == "qwen2_vl":
        ids = ids[:1]
        ids[0, 2:6] = model.config.image_token_id
        pixels = torch.randn(16, 3 * 2 * 14 * 14, generator=torch.Generator().manual_seed(4))
        grid = torch.tensor([[1, 4, 4]])
        kinds = (ids == model.config.image_token_id).int()
        return {
            "input_ids": ids,
            "pixel_values": pixels.to(model.dtype),
            "image_grid_thw": grid,
            "mm_token_type_ids": kinds,
        }
    return {"input_ids": ids}


@torch.no_grad()
def outputs(model: nn.Module) -> torch.Tensor:
    """Return the logits on `batch`, in float64."""
    return model(**batch(model)).logits.double()


QKV = {"q_proj.weight", "k_proj.weight", "v_proj.weight"}
GATED = {"gate_proj.weight", "up_proj.weight"}
HEAD = ({"lm_head.weight"},)

TRAPS = {
    "minimax": Trap(
        "MiniMaxForCausalLM",
        "MiniMaxConfig",
        SETTINGS["minimax"],
        folds={"model.layers.*.self_attn.norm": ({"out_proj.weight"},), "model.norm": HEAD},
        refuses={
            "model.layers.*.input_layernorm": "add in model.layers",
            "model.layers.*.post_attention_layernorm": "add in model.layers",
        },
    ),
    "gemma3n": Trap(
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        SETTINGS["gemma3n"],
        folds={
            "model.layers.*.pre_feedforward_layernorm": (GATED,),
            "model.layers.*.altup.router_norm": ({"modality_router.weight"},),
            "model.norm": HEAD,
        },
        refuses={
            "model.layers.*.input_layernorm": "laurel",
            "model.layers.*.post_attention_layernorm": "add in model.layers",
            "model.layers.*.laurel.post_laurel_norm": "laurel",
            "model.layers.*.self_attn.v_norm": "no gain",
            "model.per_layer_projection_norm": "add in model",
        },
    ),
    "olmo_hybrid": Trap(
        "OlmoHybridForCausalLM",
        "OlmoHybridConfig",
        SETTINGS["olmo_hybrid"],
        # The norm of one name stands before the block in one kind of layer, and behind it in the other.
        folds={"model.layers.0.post_attention_layernorm": (GATED,), "model.norm": HEAD},
        refuses={
            "model.layers.1.post_attention_layernorm": "add in model.layers.1",
            "model.layers.1.post_feedforward_layernorm": "add in model.layers.1",
        },
    ),
    "longcat": Trap(
        "LongcatFlashForCausalLM",
        "LongcatFlashConfig",
        SETTINGS["longcat"],
        folds={
            "model.layers.0.post_attention_layernorm.1": (GATED,),
            "model.layers.*.input_layernorm.*": ({"q_a_proj.weight", "kv_a_proj_with_mqa.weight"},),
            "model.norm": HEAD,
        },
        # Identity experts hand the normed rows on as they are.
        refuses={"model.layers.0.post_attention_layernorm.0": "model.layers.0.mlp.experts"},
    ),
    "axk2": Trap(
        "AXK2ForCausalLM",
        "AXK2Config",
        SETTINGS["axk2"],
        folds={
            "model.layers.*.self_attn.q_a_layernorm": ({"q_gate_proj.weight", "wq_b.weight"},),
            "model.layers.*.self_attn.kv_a_layernorm": ({"kv_b_proj.weight"},),
            "model.norm": HEAD,
        },
        refuses={"model.layers.*.self_attn.indexer.k_norm": "indexer"},
    ),
    "deepseek_v32": Trap(
        "DeepseekV32ForCausalLM",
        "DeepseekV32Config",
        SETTINGS["deepseek_v32"],
        folds={
            "model.layers.*.input_layernorm": (
                {"weights_proj.weight", "wk.weight", "kv_a_proj_with_mqa.weight", "q_a_proj.weight"},
            ),
            "model.layers.*.self_attn.q_a_layernorm": ({"q_b_proj.weight", "wq_b.weight"},),
            "model.norm": HEAD,
        },
        refuses={"model.layers.*.self_attn.indexer.k_norm": "indexer"},
    ),
    "qwen3_next": Trap(
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        SETTINGS["qwen3_next"],
        folds={
            "model.layers.*.input_layernorm": ({"in_proj_ba.weight", "in_proj_qkvz.weight"}, QKV),
            "model.layers.*.post_attention_layernorm": (
                {"experts.gate_up_proj", "gate.weight", "shared_expert_gate.weight", *GATED},
            ),
            "model.layers.*.linear_attn.norm": ({"out_proj.weight"},),
            "model.norm": HEAD,
        },
        refuses={"model.layers.*.self_attn.q_norm": "self_attn", "model.layers.*.self_attn.k_norm": "self_attn"},
    ),
    "zamba2": Trap(
        "Zamba2ForCausalLM",
        "Zamba2Config",
        SETTINGS["zamba2"],
        folds={
            "model.layers.*.shared_transformer.input_layernorm": (QKV,),
            "model.layers.*.shared_transformer.pre_ff_layernorm": (
                {
                    "gate_up_proj.weight",
                    "gate_up_proj_adapter_list.0.0.weight",
                    "gate_up_proj_adapter_list.1.0.weight",
                },
            ),
            "model.layers.*.mamba_decoder.input_layernorm": ({"in_proj.weight"},),
            "model.layers.*.mamba.norm": ({"out_proj.weight"},),
            "model.final_layernorm": HEAD,
        },
        # The switch that unties its head unties the blocks that share their weights as well.
        tied="skip",
    ),
    "gemma4": Trap(
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        SETTINGS["gemma4"],
        folds={
            "model.layers.*.pre_feedforward_layernorm": (GATED,),
            "model.layers.*.pre_feedforward_layernorm_2": ({"experts.gate_up_proj"},),
            "model.norm": HEAD,
        },
        refuses={
            "model.layers.*.post_feedforward_layernorm_1": "add in model.layers",
            "model.layers.*.post_feedforward_layernorm_2": "add in model.layers",
            "model.layers.*.post_attention_layernorm": "add in model.layers",
            "model.layers.*.router.norm": "no gain",
        },
    ),
    "nemotron_h": Trap(
        "NemotronHForCausalLM",
        "NemotronHConfig",
        SETTINGS["nemotron_h"],
        folds={
            "model.layers.*.norm": (
                {"in_proj.weight"},
                {"experts.up_proj", "gate.weight", "shared_experts.up_proj.weight"},
                QKV,
            ),
            "model.layers.*.mixer.norm": ({"out_proj.weight"},),
            "model.norm_f": HEAD,
        },
    ),
    "falcon": Trap(
        "FalconForCausalLM",
        "FalconConfig",
        SETTINGS["falcon"],
        folds={
            "transformer.h.*.input_layernorm": ({"dense_h_to_4h.weight", "query_key_value.weight"},),
            "transformer.ln_f": HEAD,
        },
        keeps_bias=("transformer.h.*.input_layernorm", "transformer.ln_f"),
    ),
    "gpt2": Trap(
        "GPT2LMHeadModel",
        "GPT2Config",
        SETTINGS["gpt2"],
        folds={
            "transformer.h.*.ln_1": ({"c_attn.weight"},),
            "transformer.h.*.ln_2": ({"c_fc.weight"},),
            "transformer.ln_f": HEAD,
        },
        keeps_bias=("transformer.ln_f",),
    ),
    "bloom": Trap(
        "BloomForCausalLM",
        "BloomConfig",
        SETTINGS["bloom"],
        folds={"transformer.ln_f": HEAD},
        refuses={
            "transformer.h.*.input_layernorm": "add in transformer.h",
            "transformer.h.*.post_attention_layernorm": "add in transformer.h",
            "transformer.word_embeddings_layernorm": "another norm, transformer.h.0.input_layernorm",
        },
        keeps_bias=("transformer.ln_f",),
    ),
    "whisper": Trap(
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        SETTINGS["whisper"],
        folds={
            "model.decoder.layers.*.encoder_attn_layer_norm": ({"q_proj.weight"},),
            "model.decoder.layers.*.self_attn_layer_norm": (QKV,),
            "model.encoder.layers.*.final_layer_norm": ({"fc1.weight"},),
            "model.decoder.layer_norm": ({"proj_out.weight"},),
        },
        # The model returns the encoder's last state beside its logits.
        refuses={"model.encoder.layer_norm": "the model returns it"},
        keeps_bias=("model.decoder.layers.*.self_attn_layer_norm", "model.decoder.layer_norm"),
    ),
    "qwen2_vl": Trap(
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        SETTINGS["qwen2_vl"],
        folds={
            "model.visual.blocks.*.norm1": ({"qkv.weight"},),
            "model.visual.blocks.*.norm2": ({"fc1.weight"},),
            # Four rows side by side make one row of the merger.
            "model.visual.merger.ln_q": ({"mlp.0.weight"},),
            "model.language_model.layers.*.input_layernorm": (QKV,),
            "model.language_model.norm": HEAD,
        },
    ),
}
