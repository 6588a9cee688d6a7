"""Ten families of tiny checkpoints: every gain away from 1, every matrix of a size at which it counts, eps felt."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

TEXT = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}


@dataclass(frozen=True)
class Family:
    """One family, and where a fault is put into it; names are those of the stored tensors.

    Attributes:
        model: name of its class in transformers.
        config: name of its configuration's class.
        settings: arguments of the configuration.
        gain: of a norm in layer 1.
        twin: of the same norm in layer 0.
        final: of the norm before the head; the ``.bias`` beside it, if there is one, belongs to it.
        embedding: of the tokens.
        head: of the output; stored where the head is not tied.
        eps: name of the setting.
        layer: module that `gain` stands in.
        readers: pattern of the experts' tensors and of the router's that read `gain`; None without experts.
        offset: what is added to a stored gain.
        centred: whether its norms subtract the mean, so that a centred embedding is no fault.
    """

    model: str
    config: str
    settings: dict[str, Any]
    gain: str
    twin: str
    final: str
    embedding: str
    head: str
    eps: str
    layer: str
    readers: str | None = None
    offset: float = 0.0
    centred: bool = False

    def build(self, seed: int = 0, **changes: Any) -> PreTrainedModel:
        """Return the model in float32, with random weights."""
        torch.manual_seed(seed)
        config = getattr(transformers, self.config)(**{**self.settings, **changes})
        return sensible(getattr(transformers, self.model)(config)).eval()

    def save(
        self, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, shard: str = "1GB", **changes: Any
    ) -> Path:
        """Build the model and save it; returns the folder."""
        self.build(seed, **changes).to(dtype).save_pretrained(folder, max_shard_size=shard)
        return folder


@torch.no_grad()
def sensible(model: PreTrainedModel) -> PreTrainedModel:
    """Draw weights as training leaves them: matrices keep a row's size, gains stray from 1, embeddings are small."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    for name, parameter in model.named_parameters():
        owner = type(model.get_submodule(name.rpartition(".")[0])).__name__.lower()
        if "norm" in owner:
            parameter.add_(0.3 * torch.randn(parameter.shape))
        elif id(parameter) in embeddings:
            parameter.copy_(0.05 * torch.randn(parameter.shape))
        elif parameter.dim() >= 2 and not name.endswith("bias"):
            parameter.copy_(torch.randn(parameter.shape) / 32**0.5)
        else:
            parameter.copy_(0.1 * torch.randn(parameter.shape))
    return model


def _decoder(model: str, config: str, norm: str, settings: dict[str, Any], **options: Any) -> Family:
    """A family whose names are Llama's."""
    return Family(
        model,
        config,
        settings,
        gain=f"model.layers.1.{norm}.weight",
        twin=f"model.layers.0.{norm}.weight",
        final="model.norm.weight",
        embedding="model.embed_tokens.weight",
        head="lm_head.weight",
        eps="rms_norm_eps",
        layer="model.layers.1",
        **options,
    )


FAMILIES = {
    "llama": _decoder("LlamaForCausalLM", "LlamaConfig", "input_layernorm", GROUPED),
    "gemma2": _decoder(
        "Gemma2ForCausalLM",
        "Gemma2Config",
        "pre_feedforward_layernorm",
        {**GROUPED, "query_pre_attn_scalar": 8, "sliding_window": 32, "tie_word_embeddings": True},
        offset=1.0,
    ),
    "qwen3": _decoder("Qwen3ForCausalLM", "Qwen3Config", "self_attn.q_norm", GROUPED),
    "mixtral": _decoder(
        "MixtralForCausalLM",
        "MixtralConfig",
        "post_attention_layernorm",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2},
        readers=r"model\.layers\.1\.block_sparse_moe\.(gate|experts\.\d\.w[13])\.weight",
    ),
    "olmo2": _decoder("Olmo2ForCausalLM", "Olmo2Config", "post_feedforward_layernorm", GROUPED),
    "gpt_oss": _decoder(
        "GptOssForCausalLM",
        "GptOssConfig",
        "post_attention_layernorm",
        {**GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
        readers=r"model\.layers\.1\.mlp\.(router\.weight|experts\.gate_up_proj)",
    ),
    "gpt2": Family(
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 96,
            "n_positions": 64,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        gain="transformer.h.1.ln_2.weight",
        twin="transformer.h.0.ln_2.weight",
        final="transformer.ln_f.weight",
        embedding="transformer.wte.weight",
        head="lm_head.weight",
        eps="layer_norm_epsilon",
        layer="transformer.h.1",
        centred=True,
    ),
    "bloom": Family(
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": 96, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2},
        gain="transformer.h.1.input_layernorm.weight",
        twin="transformer.h.0.input_layernorm.weight",
        final="transformer.ln_f.weight",
        embedding="transformer.word_embeddings.weight",
        head="lm_head.weight",
        eps="layer_norm_epsilon",
        layer="transformer.h.1",
        centred=True,
    ),
    "bert": Family(
        "BertForMaskedLM",
        "BertConfig",
        {**TEXT, "layer_norm_eps": 1e-5},
        gain="bert.encoder.layer.1.output.LayerNorm.weight",
        twin="bert.encoder.layer.0.output.LayerNorm.weight",
        final="cls.predictions.transform.LayerNorm.weight",
        embedding="bert.embeddings.word_embeddings.weight",
        head="cls.predictions.decoder.weight",
        eps="layer_norm_eps",
        layer="bert.encoder.layer.1",
        centred=True,
    ),
    "t5": Family(
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": 96,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
            "layer_norm_epsilon": 1e-5,
        },
        gain="decoder.block.1.layer.1.layer_norm.weight",
        twin="decoder.block.0.layer.1.layer_norm.weight",
        final="decoder.final_layer_norm.weight",
        embedding="shared.weight",
        head="lm_head.weight",
        eps="layer_norm_epsilon",
        layer="decoder.block.1",
    ),
}
