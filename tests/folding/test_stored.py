"""Every parameter is found on disk under the name, the axes and the positions that transformers loads it from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from stored_oracle import mapped, scrambled, wrong
from tiny_checkpoints import saved, tiny_bert, tiny_llama
from transformers import (
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    JambaConfig,
    JambaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    T5Config,
    T5ForConditionalGeneration,
)

from normswap import labels
from normswap.loading import build_meta
from normswap.shards import check_source
from normswap.source import resolve
from normswap.stored import StoredMap, map_stored

pytestmark = pytest.mark.core

CONVERTS = int(transformers.__version__.split(".")[0]) >= 5
Tensors = dict[str, torch.Tensor]


def rewritten(folder: Path, change: Callable[[Tensors], Tensors]) -> Path:
    """Change the stored tensors of a checkpoint that is one file."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({key: value.clone().contiguous() for key, value in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def agrees(folder: Path, cls: type[PreTrainedModel]) -> StoredMap:
    """Map a checkpoint, and hold every parameter of the map against what transformers loads."""
    stored = mapped(folder)
    assert not wrong(stored, folder, cls.from_pretrained(folder, dtype=torch.float32))
    assert not stored.opaque
    return stored


def mixtral(**changes: object) -> MixtralForCausalLM:
    """Twelve experts, so that their numbers sort otherwise as text, of square shape."""
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_local_experts": 12}
    return MixtralForCausalLM(MixtralConfig(**{**sizes, **heads, **changes}))


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=40, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def t5(**changes: object) -> T5ForConditionalGeneration:
    sizes = {"vocab_size": 40, "d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 1, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**{**sizes, **changes}))


def test_plain_names_are_whole_tensors(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama()), tmp_path)
    stored = agrees(folder, transformers.LlamaForCausalLM)
    assert not stored.missing and not stored.unread and not stored.tied
    (piece,) = stored.by_parameter["model.layers.1.mlp.down_proj.weight"]
    assert piece.key == "model.layers.1.mlp.down_proj.weight"
    assert piece.axes == (0, 1)
    assert piece.positions == piece.held == (range(32), range(48))
    assert stored.by_key[piece.key] == (piece,)


def test_experts_stay_in_numeric_order_and_are_not_turned(tmp_path: Path) -> None:
    folder = saved(scrambled(mixtral()), tmp_path)
    stored = agrees(folder, MixtralForCausalLM)
    (piece,) = stored.by_key["model.layers.1.block_sparse_moe.experts.10.w3.weight"]
    if CONVERTS:
        assert piece.parameter == "model.layers.1.mlp.experts.gate_up_proj"
        assert piece.axes == (None, 0, 1)
        assert piece.positions == (range(10, 11), range(16, 32), range(16))
        gains = torch.arange(16.0)
        assert torch.equal(piece.take(gains, 2), gains)
        assert torch.equal(piece.take(torch.arange(12.0), 0), torch.tensor([10.0]))
    else:
        assert piece.parameter == piece.key


def test_shards_are_mapped_together(tmp_path: Path) -> None:
    folder = saved(scrambled(mixtral()), tmp_path, max_shard_size="20KB")
    assert len(check_source(folder).files) > 2
    agrees(folder, MixtralForCausalLM)


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 keeps experts apart")
def test_experts_that_are_stored_as_one_are_taken_as_they_are(tmp_path: Path) -> None:
    model = scrambled(mixtral())
    folder = saved(model, tmp_path)
    rewritten(folder, lambda tensors: dict(model.state_dict()))
    stored = agrees(folder, MixtralForCausalLM)
    assert len(stored.by_parameter["model.layers.0.mlp.experts.gate_up_proj"]) == 1


@pytest.mark.parametrize(
    ("build", "cls"),
    [
        (
            lambda: JambaForCausalLM(
                JambaConfig(
                    vocab_size=40, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                    num_key_value_heads=1, num_experts=3, attn_layer_period=2, attn_layer_offset=1,
                    expert_layer_period=2, expert_layer_offset=1, mamba_d_state=4, mamba_dt_rank=4,
                    use_mamba_kernels=False,
                )
            ),
            JambaForCausalLM,
        ),
        (
            lambda: Qwen2VLForConditionalGeneration(
                Qwen2VLConfig(
                    text_config={
                        "vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
                        "num_attention_heads": 2, "num_key_value_heads": 1,
                    },
                    vision_config={"depth": 1, "embed_dim": 16, "hidden_size": 16, "num_heads": 2, "mlp_ratio": 2},
                )
            ),
            Qwen2VLForConditionalGeneration,
        ),
    ],
    ids=["jamba", "qwen2_vl"],
)  # fmt: skip
def test_renames_of_the_class_are_followed(
    build: Callable[[], PreTrainedModel], cls: type[PreTrainedModel], tmp_path: Path
) -> None:
    stored = agrees(saved(scrambled(build()), tmp_path), cls)
    assert not stored.missing and not stored.unread


def test_old_names_and_a_prefix_that_was_left_out(tmp_path: Path) -> None:
    def old(tensors: Tensors) -> Tensors:
        names = {key: key.removeprefix("bert.") for key in tensors if key.startswith("bert.")}
        names = {
            key: name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
            for key, name in names.items()
        }
        return {name: tensors[key] for key, name in names.items()}

    folder = rewritten(saved(scrambled(tiny_bert()), tmp_path), old)
    stored = agrees(folder, transformers.BertForMaskedLM)
    (piece,) = stored.by_parameter["bert.encoder.layer.0.output.LayerNorm.weight"]
    assert piece.key == "encoder.layer.0.output.LayerNorm.gamma"
    assert "cls.predictions.transform.dense.weight" in stored.missing
    assert "cls.predictions.decoder.weight" not in stored.missing
    assert stored.tied["cls.predictions.decoder.weight"] == "bert.embeddings.word_embeddings.weight"


def test_a_base_class_reads_a_checkpoint_with_a_head(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_bert()), tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "architectures": ["BertModel"]}))
    stored = agrees(folder, BertModel)
    assert stored.by_parameter["encoder.layer.0.output.dense.weight"][0].key.startswith("bert.encoder")
    assert set(stored.missing) == {"pooler.dense.weight", "pooler.dense.bias"}
    assert "cls.predictions.transform.dense.weight" in stored.unread


def test_stale_buffers_and_other_heads_are_unread(tmp_path: Path) -> None:
    def old(tensors: Tensors) -> Tensors:
        plain = {key.removeprefix("transformer."): value for key, value in tensors.items()}
        return {**plain, "h.0.attn.masked_bias": torch.zeros(1), "mtp.layers.0.norm.weight": torch.ones(16)}

    stored = agrees(rewritten(saved(scrambled(gpt2()), tmp_path), old), GPT2LMHeadModel)
    assert set(stored.unread) == {"h.0.attn.masked_bias", "mtp.layers.0.norm.weight"}
    assert stored.by_parameter["transformer.h.0.attn.c_attn.weight"][0].axes == (0, 1)
    assert stored.tied == {"lm_head.weight": "transformer.wte.weight"}


def test_tied_names_share_what_is_stored(tmp_path: Path) -> None:
    stored = agrees(saved(scrambled(t5()), tmp_path), T5ForConditionalGeneration)
    others = {"encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight"}
    assert stored.tied == dict.fromkeys(others, "shared.weight")
    assert not stored.twice and not stored.missing
    assert stored.by_key["shared.weight"] == stored.by_parameter["lm_head.weight"]


def test_a_tie_that_is_stored_under_all_its_names(tmp_path: Path) -> None:
    others = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
    folder = saved(scrambled(t5()), tmp_path)
    rewritten(folder, lambda tensors: {**tensors, **dict.fromkeys(others, tensors["shared.weight"])})
    stored = agrees(folder, T5ForConditionalGeneration)
    assert stored.twice == dict.fromkeys(others, "shared.weight")
    assert not stored.tied and not stored.unread
    assert [piece.key for piece in stored.by_parameter["lm_head.weight"]] == ["lm_head.weight"]


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 takes the embedding's values for the head")
def test_a_tie_whose_tensors_differ_is_read_as_two(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama(tie_word_embeddings=True)), tmp_path)
    rewritten(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    stored = agrees(folder, transformers.LlamaForCausalLM)
    assert stored.twice == {"lm_head.weight": "model.embed_tokens.weight"}


@pytest.mark.skipif(CONVERTS, reason="transformers 5 reads them as two")
def test_a_tie_whose_tensors_differ_takes_the_embedding(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama(tie_word_embeddings=True)), tmp_path)
    rewritten(folder, lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"] + 1})
    stored = mapped(folder)
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert stored.twice == {"lm_head.weight": "model.embed_tokens.weight"}
    assert wrong(stored, folder, loaded) == ["lm_head.weight"]
    assert torch.equal(loaded.lm_head.weight, loaded.model.embed_tokens.weight)


def test_a_tie_of_which_only_the_follower_is_stored(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama(tie_word_embeddings=True)), tmp_path)
    rewritten(
        folder, lambda tensors: {key.replace("model.embed_tokens", "lm_head"): value for key, value in tensors.items()}
    )
    stored = mapped(folder)
    assert stored.tied == {"model.embed_tokens.weight": "lm_head.weight"}
    assert not stored.missing
    if CONVERTS:
        agrees(folder, transformers.LlamaForCausalLM)


def test_what_no_tensor_holds_is_missing(tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama()), tmp_path)
    rewritten(folder, lambda tensors: {key: value for key, value in tensors.items() if "layers.1" not in key})
    stored = mapped(folder)
    assert all(name.startswith("model.layers.1.") for name in stored.missing)
    assert len(stored.missing) == 9


def test_a_shape_that_does_not_fit_is_opaque(tmp_path: Path) -> None:
    key = "model.layers.0.mlp.up_proj.weight"
    folder = rewritten(saved(scrambled(tiny_llama()), tmp_path), lambda tensors: {**tensors, key: torch.zeros(48, 31)})
    stored = mapped(folder)
    assert stored.opaque == {key: "stored as [48, 31], the class expects [48, 32]"}
    assert key not in stored.by_parameter and key not in stored.by_key
    assert key not in stored.unread and key not in stored.missing


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_packed_values_are_opaque(dtype: torch.dtype, tmp_path: Path) -> None:
    key = "model.layers.0.mlp.up_proj.weight"
    folder = rewritten(
        saved(scrambled(tiny_llama()), tmp_path),
        lambda tensors: {**tensors, key: tensors[key].to(dtype), f"{key}_scale_inv": torch.ones(1)},
    )
    stored = mapped(folder)
    assert list(stored.opaque) == [key]
    assert "quantized or packed" in stored.opaque[key]
    assert stored.unread == (f"{key}_scale_inv",)


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 keeps experts apart")
def test_a_stack_that_lacks_an_expert_is_opaque(tmp_path: Path) -> None:
    folder = saved(scrambled(mixtral()), tmp_path)
    lost = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    rewritten(folder, lambda tensors: {key: value for key, value in tensors.items() if key != lost})
    stored = mapped(folder)
    assert stored.opaque == {
        "model.layers.0.mlp.experts.down_proj": "stored as [11, 16, 16], the class expects [12, 16, 16]"
    }
    assert not stored.missing and not stored.unread


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 keeps experts apart")
def test_an_expert_of_another_shape_is_opaque(tmp_path: Path) -> None:
    folder = saved(scrambled(mixtral()), tmp_path)
    odd = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
    rewritten(folder, lambda tensors: {**tensors, odd: torch.zeros(16, 15)})
    (reason,) = mapped(folder).opaque.values()
    assert reason.startswith("its conversion cannot be tried: RuntimeError")


def test_no_tensor_data_is_read(tmp_path: Path) -> None:
    folder = saved(scrambled(mixtral()), tmp_path)
    source = resolve(str(folder))
    model, checkpoint = build_meta(source), check_source(folder)
    (folder / "model.safetensors").unlink()
    assert not map_stored(model, checkpoint).missing


@pytest.fixture
def converting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[torch.Tensor], list[torch.Tensor]]], None]:
    """Let transformers make the two halves of an MLP from one tensor, by a conversion of the test."""

    def install(split: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
        from transformers import conversion_mapping
        from transformers.core_model_loading import ConversionOps, WeightConverter

        class Splitting(ConversionOps):
            def convert(
                self, input_dict: dict[str, list[torch.Tensor]], source_patterns: list[str], target_patterns: list[str],
                **kwargs: object,
            ) -> Tensors:  # fmt: skip
                return dict(zip(target_patterns, split(input_dict["both.weight"][0]), strict=True))

        converters = [WeightConverter("both.weight", ["gate_proj.weight", "up_proj.weight"], [Splitting()])]
        monkeypatch.setattr(
            conversion_mapping, "get_model_conversion_mapping", lambda model, *args, **kwargs: list(converters)
        )
        monkeypatch.setattr(
            transformers.modeling_utils, "get_model_conversion_mapping", lambda model, *args, **kwargs: list(converters)
        )

    return install


def joined(tensors: Tensors) -> Tensors:
    kept = {key: value for key, value in tensors.items() if "gate_proj" not in key and "up_proj" not in key}
    for layer in (0, 1):
        mlp = f"model.layers.{layer}.mlp"
        both = [tensors[f"{mlp}.gate_proj.weight"], tensors[f"{mlp}.up_proj.weight"]]
        kept[f"{mlp}.both.weight"] = torch.cat(both)
    return kept


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 does not convert")
def test_a_tensor_that_is_split_over_parameters(converting: Callable[..., None], tmp_path: Path) -> None:
    folder = saved(scrambled(tiny_llama()), tmp_path)
    converting(lambda both: list(both.chunk(2)))
    stored = agrees(rewritten(folder, joined), transformers.LlamaForCausalLM)
    gate, up = stored.by_key["model.layers.1.mlp.both.weight"]
    assert (gate.parameter, up.parameter) == (
        "model.layers.1.mlp.gate_proj.weight",
        "model.layers.1.mlp.up_proj.weight",
    )
    assert (gate.held[0], up.held[0]) == (range(48), range(48, 96))


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 does not convert")
def test_a_conversion_that_asks_for_shapes_is_followed_at_any_size(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from transformers import conversion_mapping
    from transformers.core_model_loading import Transpose, WeightConverter

    folder = saved(scrambled(tiny_llama()), tmp_path)
    converter = WeightConverter("down_proj.weight", "down_proj.weight", [Transpose(0, 1, check_dims=True)])
    monkeypatch.setattr(conversion_mapping, "get_model_conversion_mapping", lambda model: [converter])
    # A label tensor of 48 is within reach, the weight of 32 x 48 is not.
    monkeypatch.setattr(labels, "_LARGEST", 256)
    name = "model.layers.{}.mlp.down_proj.weight"
    turned = name.format(1)
    stored = mapped(rewritten(folder, lambda tensors: {**tensors, turned: tensors[turned].t()}))
    assert not stored.opaque
    assert stored.by_parameter[name.format(0)][0].axes == (0, 1)
    assert stored.by_parameter[turned][0].axes == (1, 0)


@pytest.mark.skipif(not CONVERTS, reason="transformers 4 does not convert")
@pytest.mark.parametrize(
    ("split", "reason"),
    [
        (lambda both: [both[:48], both[:48]], "takes the same values of model.layers.0.mlp.both.weight as"),
        (lambda both: [both[:48], both[:48] + both[48:]], "changes values"),
        (lambda both: [both[:48], both[48:].double().mul(1.5)], "changes"),
    ],
)
def test_values_that_two_parameters_share_and_arithmetic_are_opaque(
    converting: Callable[..., None], split: Callable[..., list[torch.Tensor]], reason: str, tmp_path: Path
) -> None:
    folder = saved(scrambled(tiny_llama()), tmp_path)
    converting(split)
    stored = mapped(rewritten(folder, joined))
    assert set(stored.opaque) == {
        f"model.layers.{layer}.mlp.{name}.weight" for layer in (0, 1) for name in ("gate_proj", "up_proj")
    }
    assert reason in stored.opaque["model.layers.0.mlp.up_proj.weight"]
    assert not stored.missing and not stored.unread


def test_of_two_tensors_for_one_parameter_the_one_that_is_loaded_counts(tmp_path: Path) -> None:
    name = "bert.encoder.layer.0.output.LayerNorm"
    folder = saved(scrambled(tiny_bert()), tmp_path)
    rewritten(folder, lambda tensors: {**tensors, f"{name}.gamma": tensors[f"{name}.weight"] + 1})
    stored = agrees(folder, transformers.BertForMaskedLM)
    (piece,) = stored.by_parameter[f"{name}.weight"]
    assert stored.unread == tuple({f"{name}.gamma", f"{name}.weight"} - {piece.key})
