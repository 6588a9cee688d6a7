"""A model of any size has a small one of its class that shows each of its kinds of layers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_checkpoints import tiny_llama
from torch import nn

from normswap.errors import ModelError
from normswap.reducing import Indivisible, Recipe, layer_counts, reduce
from normswap.shrinking import build_twin, small_twin, structure

pytestmark = pytest.mark.core

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}
PUBLISHED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-3-70b": (
        "Llama",
        {
            "vocab_size": 128256,
            "hidden_size": 8192,
            "intermediate_size": 28672,
            "num_hidden_layers": 80,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131072,
            "bos_token_id": 128000,
            "eos_token_id": [128001, 128008, 128009],
            "rope_parameters": LLAMA3,
            "rms_norm_eps": 1e-5,
        },
    ),
    "qwen3-235b-a22b": (
        "Qwen3Moe",
        {
            "vocab_size": 151936,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "max_position_embeddings": 40960,
            "norm_topk_prob": True,
        },
    ),
    "deepseek-v3": (
        "DeepseekV3",
        {
            "vocab_size": 129280,
            "hidden_size": 7168,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "num_hidden_layers": 61,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "first_k_dense_replace": 3,
        },
    ),
    "gemma-3-27b": (
        "Gemma3Text",
        {
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "query_pre_attn_scalar": 168,
            "sliding_window": 1024,
        },
    ),
    "mixtral-8x22b": (
        "Mixtral",
        {
            "vocab_size": 32768,
            "hidden_size": 6144,
            "intermediate_size": 16384,
            "num_hidden_layers": 56,
            "num_attention_heads": 48,
            "num_key_value_heads": 8,
            "max_position_embeddings": 65536,
            "rope_theta": 1e6,
        },
    ),
    "gpt-oss-120b": (
        "GptOss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 36,
            "head_dim": 64,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
        },
    ),
}


def on_meta(name: str, settings: dict[str, Any]) -> nn.Module:
    config = getattr(transformers, f"{name}Config")(**settings)
    cls = getattr(transformers, f"{name.removesuffix('Text')}ForCausalLM")
    with torch.device("meta"):
        return cls(config).eval()


# transformers 4 makes modules of every expert, tens of thousands, and takes a minute over them.
SMALLER = [
    name for name in PUBLISHED if transformers.__version__ >= "5" or name not in ("qwen3-235b-a22b", "deepseek-v3")
]


@pytest.mark.parametrize("name", SMALLER)
def test_a_published_model_has_a_small_twin(name: str) -> None:
    cls, settings = PUBLISHED[name]
    model = on_meta(cls, settings)
    twin = small_twin(model)
    assert type(twin.model) is type(model)
    assert structure(twin.model) == structure(model)
    # transformers 4 stores experts in a way that leaves more of them.
    most = 4_000_000 if transformers.__version__ >= "5" else 8_000_000
    assert sum(parameter.numel() for parameter in twin.model.parameters()) < most
    assert {decision.pattern for decision in twin.plan.decisions} == {
        ".".join("*" if part.isdigit() else part for part in name.split("."))
        for name, module in model.named_modules()
        if type(module).__name__.endswith("RMSNorm")
    }
    for parameter in twin.model.parameters():
        assert parameter.isfinite().all() and parameter.abs().max() > 0.01
        assert parameter.device.type == "cpu"


def test_the_same_seed_gives_the_same_twin_and_another_seed_another() -> None:
    model = on_meta(*PUBLISHED["gpt-oss-120b"])
    first, again, other = (small_twin(model, seed=seed).model.state_dict() for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_activations_neither_vanish_nor_explode() -> None:
    twin = small_twin(on_meta(*PUBLISHED["deepseek-v3" if "deepseek-v3" in SMALLER else "gpt-oss-120b"]))
    with torch.no_grad():
        logits = twin.model(**twin.batches[0]).logits
    assert 0.1 < logits.std() < 10
    assert logits.dtype == twin.dtype


def test_every_kind_of_layer_is_kept() -> None:
    if transformers.__version__ < "5":
        pytest.skip("Jamba's default configuration runs on a GPU only in transformers 4")
    config = transformers.JambaConfig()
    with torch.device("meta"):
        model = transformers.JambaForCausalLM(config).eval()
    twin = small_twin(model)
    assert twin.recipe is not None and twin.recipe.layers == 5
    kinds = {type(layer).__name__ for layer in twin.model.model.layers}
    assert kinds == {type(layer).__name__ for layer in model.model.layers}
    assert len(kinds) == 2
    fewer = build_twin(type(model), config, Recipe(64, layers=4))
    assert structure(fewer.model) != structure(model)


def test_a_small_model_is_its_own_twin() -> None:
    model = tiny_llama()
    twin = small_twin(model)
    assert twin.recipe is None
    assert {n: p.shape for n, p in twin.model.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert not torch.equal(twin.model.lm_head.weight.float(), model.lm_head.weight)


def test_a_model_without_a_configuration_has_no_twin() -> None:
    with pytest.raises(ModelError, match="expected a model with a configuration"):
        small_twin(nn.Linear(2, 2))


def test_a_model_that_does_not_run_says_what_was_tried() -> None:
    class Broken(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, **kwargs: Any) -> Any:
            raise RuntimeError("not today")

    with torch.device("meta"):
        model = Broken(transformers.LlamaConfig(num_hidden_layers=2))
    with pytest.raises(ModelError, match=r"no small model of Broken .*not today"):
        small_twin(model)


def test_widths_heads_layers_and_tables_shrink_together() -> None:
    config = transformers.Qwen2VLConfig(
        text_config={
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "num_hidden_layers": 80,
            "bos_token_id": 151643,
            "eos_token_id": 151645,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
        },
        vision_config={"embed_dim": 1280, "hidden_size": 8192, "num_heads": 16, "depth": 32},
        image_token_id=151655,
    )
    small = reduce(config, Recipe(128, layers=2))
    text, vision = small.text_config, small.vision_config
    assert (text.hidden_size, text.intermediate_size, text.vocab_size) == (128, 462, 512)
    assert text.hidden_size % (text.num_attention_heads * 2) == 0
    assert text.num_attention_heads == 8 * text.num_key_value_heads
    width = text.hidden_size // text.num_attention_heads
    table = getattr(text, "rope_parameters", None) or text.rope_scaling
    assert sum(table["mrope_section"]) == width // 2
    assert vision.hidden_size == text.hidden_size and vision.embed_dim == 20 and vision.depth == 2
    assert len({text.bos_token_id, text.eos_token_id, small.image_token_id}) == 3
    assert max(text.bos_token_id, text.eos_token_id, small.image_token_id) < 512
    assert config.text_config.hidden_size == 8192


def test_lists_of_layers_are_cut() -> None:
    config = transformers.Gemma3TextConfig(num_hidden_layers=12)
    config.deepstack_visual_indexes = [1, 5, 11]
    small = reduce(config, Recipe(64, layers=3))
    assert small.layer_types == config.layer_types[:3]
    assert small.deepstack_visual_indexes == [1]
    assert layer_counts(config)[-1] == 12


def test_numbers_that_do_not_divide_are_refused() -> None:
    with pytest.raises(Indivisible, match="do not divide"):
        reduce(transformers.LlamaConfig(hidden_size=1000, num_attention_heads=25, head_dim=40), Recipe(64))
    with pytest.raises(Indivisible, match="is not twice 64"):
        reduce(transformers.LlamaConfig(hidden_size=96, num_attention_heads=4), Recipe(64))
