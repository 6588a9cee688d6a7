"""Untying: what becomes a parameter of its own, what the checkpoint and its configuration become, what is refused."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from normswap.configtext import set_in_json
from normswap.edits import make_edits, unstorable
from normswap.errors import CheckpointError, ModelError
from normswap.folding import make_fold_plan
from normswap.gains import fold_
from normswap.loading import build_meta, resolve
from normswap.plan import make_plan
from normswap.rows import row_reader
from normswap.shards import check_source
from normswap.stored import map_stored
from normswap.streaming import write_checkpoint
from normswap.untying import (
    changes_when_untied,
    is_tied,
    plan_untying,
    require_untied,
    separated,
    tying_readers,
    untie_,
    untie_config_text,
)

pytestmark = pytest.mark.core

SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 61,
}
IDS = torch.arange(24).reshape(2, 12)


def llama(**more: Any) -> nn.Module:
    config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True, **more)
    return spread(transformers.LlamaForCausalLM(config))


def bert() -> nn.Module:
    return spread(transformers.BertForMaskedLM(transformers.BertConfig(**SMALL)))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=61, n_positions=32)
    return spread(transformers.GPT2LMHeadModel(config))


def t5() -> nn.Module:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, vocab_size=61)
    return spread(transformers.T5ForConditionalGeneration(config))


def llava() -> nn.Module:
    text = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=16, patch_size=8
    )
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_token_index=60, tie_word_embeddings=True
    )
    return spread(transformers.LlavaForConditionalGeneration(config))


def spread(model: nn.Module) -> nn.Module:
    """Move gains and biases away from one and zero."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("build", [llama, bert, gpt2, llava])
def test_an_untied_model_is_saved_and_loaded_as_one(build: Any, tmp_path: Path) -> None:
    model = build()
    expected = logits(model)
    assert is_tied(model)
    found = untie_(model)
    head = next(name for name in found if name.endswith(("lm_head.weight", "decoder.weight")))
    assert not is_tied(model) and torch.equal(logits(model), expected)
    assert model.get_parameter(head) is not model.get_parameter(found[head])
    with torch.no_grad():
        model.get_parameter(head).mul_(2.0)
    doubled = logits(model)
    model.save_pretrained(tmp_path)
    loaded, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not is_tied(loaded) and not info["missing_keys"]
    assert torch.equal(logits(loaded.eval()), doubled) and not torch.equal(doubled, expected)
    assert loaded.config.tie_word_embeddings is False
    assert loaded.config.get_text_config().tie_word_embeddings is False


def test_only_what_becomes_its_own_is_named() -> None:
    assert separated(llama()) == {"lm_head.weight": "model.embed_tokens.weight"}
    with pytest.raises(ModelError, match="ties its head whatever"):
        separated(llama().model)


@pytest.mark.parametrize("build", [llama, bert, gpt2])
def test_a_class_that_computes_the_same_untied_may_be_untied(build: Any) -> None:
    assert changes_when_untied(build()) == ""


def test_a_class_that_scales_a_tied_head_alone_is_refused() -> None:
    """T5 scales what goes into a tied head: by its flag in transformers 4; version 5 sets the flag again itself."""
    try:
        reason = changes_when_untied(t5())
    except ModelError as error:
        reason = str(error)
    assert "computes something else when its configuration says untied" in reason or "ties its head whatever" in reason


class ScaledConfig(transformers.LlamaConfig):
    model_type = "normswap_test_scaled"


class ScaledForCausalLM(transformers.LlamaForCausalLM):
    """A head that is scaled while it is tied, as the class decides when it is built."""

    config_class = ScaledConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.factor = 0.5 if config.tie_word_embeddings else 1.0

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        output = super().forward(input_ids, attention_mask, **kwargs)
        output.logits = output.logits * self.factor
        return output


def test_a_flag_that_is_read_when_the_model_is_built_is_noticed() -> None:
    model = ScaledForCausalLM(ScaledConfig(**SMALL, tie_word_embeddings=True))
    assert "ScaledForCausalLM computes something else" in changes_when_untied(model)


def test_untying_what_is_no_model_of_transformers_is_an_error() -> None:
    with pytest.raises(ModelError, match="expected a model of transformers to untie, got a Linear"):
        untie_(nn.Linear(2, 2))


def converted(model: nn.Module, source: Path, target: Path, rename: Any = None) -> tuple[Any, Any]:
    """Fold and untie a checkpoint on disk."""
    model.save_pretrained(source)
    if rename is not None:
        file = source / "model.safetensors"
        save_file({rename(key): value for key, value in load_file(file).items()}, file, metadata={"format": "pt"})
    checkpoint, meta = check_source(source), build_meta(resolve(str(source)))
    plan = make_fold_plan(meta, make_plan(meta), tied="untie")
    assert plan.unties
    stored = map_stored(meta, checkpoint)
    untying = plan_untying(meta, checkpoint, stored)
    assert unstorable(meta, plan, stored, row_reader(checkpoint), heads=untying.keys)
    text = untie_config_text((source / "config.json").read_text(), meta)
    untie_(meta)
    # What the head reads has other names once it is its own.
    plan = make_fold_plan(meta, make_plan(meta))
    edits = make_edits(meta, plan, stored, row_reader(checkpoint), heads=untying.keys)
    target.mkdir()
    write_checkpoint(checkpoint, target, edits=edits.edits, added=edits.added)
    (target / "config.json").write_text(text)
    require_untied(resolve(str(target)), check_source(target))
    assert all(figure.passed for figure in edits.algebra.figures.values())
    assert {key: new.source for key, new in edits.added.items()} == untying.sources
    return plan, untying


@pytest.mark.parametrize("build", [llama, bert, gpt2, llava])
def test_a_checkpoint_is_untied_as_a_model_in_memory_is(build: Any, tmp_path: Path) -> None:
    if transformers.__version__ < "5" and build in (bert, llava):
        pytest.skip("transformers 4 ties a bias beside the weight, or finds no text alone: that fold is refused there")
    model = build()
    expected = logits(model)
    plan, untying = converted(model, tmp_path / "in", tmp_path / "out")
    assert set(untying.keys) == set(separated(model))
    loaded, info = type(model).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    untie_(model)
    fold_(model, plan)
    for (name, value), got in zip(model.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(got, value), name
    torch.testing.assert_close(logits(loaded.eval()), expected, rtol=1e-4, atol=1e-4)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("in", "out"))
    embedding = next(key for key in before if "embed_tokens" in key or "word_embeddings" in key or "wte" in key)
    assert torch.equal(before[embedding], after[embedding])


def test_an_added_tensor_is_named_as_the_others_are(tmp_path: Path) -> None:
    """Llava's checkpoints from before its classes were renamed."""
    if transformers.__version__ < "5":
        pytest.skip("no inputs of text alone are found for Llava there, so that nothing folds")

    def old(key: str) -> str:
        key = key.replace("model.language_model.", "language_model.model.")
        return key.replace("model.vision_tower.", "vision_tower.").replace("model.multi_modal", "multi_modal")

    model = llava()
    model.save_pretrained(tmp_path / "probe")
    if "model.language_model.norm.weight" not in load_file(tmp_path / "probe" / "model.safetensors"):

        def old(key: str) -> str:
            return key

    _, untying = converted(model, tmp_path / "in", tmp_path / "out", old)
    assert untying.keys == {"lm_head.weight": "language_model.lm_head.weight"}


def test_a_bias_that_is_untied_under_another_name_is_refused(tmp_path: Path) -> None:
    """While BERT's bias is tied, its plan cannot tell which of its two names the head goes on reading."""
    model = bert()
    model.save_pretrained(tmp_path)
    checkpoint, meta = check_source(tmp_path), build_meta(resolve(str(tmp_path)))
    plan, stored = make_fold_plan(meta, make_plan(meta), tied="untie"), map_stored(meta, checkpoint)
    keys = plan_untying(meta, checkpoint, stored).keys
    if "cls.predictions.decoder.bias" not in keys:
        pytest.skip("this transformers keeps the bias tied")
    untie_(meta)
    found = unstorable(meta, plan, stored, row_reader(checkpoint), heads=keys)
    assert "make the plan from the untied model" in found["cls.predictions.transform.LayerNorm"]


def test_a_head_that_is_stored_beside_its_embedding_is_folded_where_it_is(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    checkpoint, meta = check_source(tmp_path), build_meta(resolve(str(tmp_path)))
    plan, stored = make_fold_plan(meta, make_plan(meta), tied="untie"), map_stored(meta, checkpoint)
    untying = plan_untying(meta, checkpoint, stored)
    heads = untying.keys
    assert heads == {"lm_head.weight": "lm_head.weight"} and not untying.sources
    untie_(meta)
    edits = make_edits(meta, plan, stored, row_reader(checkpoint), heads=heads)
    assert not edits.added and "lm_head.weight" in edits.edits and "model.embed_tokens.weight" not in edits.edits
    tensors["lm_head.weight"][0, 0] += 1.0
    save_file(tensors, file, metadata={"format": "pt"})
    found = unstorable(meta, plan, stored, row_reader(check_source(tmp_path)), heads=heads)
    assert "tied to, with other values" in found["model.norm"]


def test_a_checkpoint_that_is_tied_still_is_found_out(tmp_path: Path) -> None:
    model = llama()
    model.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"expected lm_head\.weight untied"):
        require_untied(resolve(str(tmp_path)), check_source(tmp_path))
    file = tmp_path / "config.json"
    file.write_text(set_in_json(file.read_text(), (), "tie_word_embeddings", False))
    with pytest.raises(CheckpointError, match=r"expected a tensor for lm_head\.weight"):
        require_untied(resolve(str(tmp_path)), check_source(tmp_path))


def test_the_configuration_changes_in_one_place_only() -> None:
    model = llava()
    config = json.loads(model.config.to_json_string(use_diff=False))
    config["unknown"] = {"tie_word_embeddings": True, "zeta": 1}
    text = json.dumps(config, indent=4, ensure_ascii=True).replace('"unknown"', '"unkn\\u006fwn"') + "\n\n"
    changed = untie_config_text(text, model)
    config["tie_word_embeddings"] = config["text_config"]["tie_word_embeddings"] = False
    assert json.loads(changed) == config and list(json.loads(changed)) == list(config)
    lines = [(a, b) for a, b in zip(text.split("\n"), changed.split("\n"), strict=True) if a != b]
    assert len(lines) <= 2 and all(b == a.replace("true", "false") for a, b in lines)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ('{"a": 1}', (), '{"t": false,"a": 1}'),
        ('{\n  "a": 1\n}', (), '{\n  "t": false,\n  "a": 1\n}'),
        ("{}", (), '{"t": false}'),
        ('{ "t" : [1, {"t": 2}] , "b": 1e-5}', (), '{ "t" : false , "b": 1e-5}'),
        ('{"b": {"t": true}, "t": true}', ("b",), '{"b": {"t": false}, "t": true}'),
        ('{"\\u0062": {"x": "}\\""}}', ("b",), '{"\\u0062": {"t": false,"x": "}\\""}}'),
    ],
)
def test_json_is_changed_in_place(text: str, path: tuple[str, ...], expected: str) -> None:
    assert set_in_json(text, path, "t", False) == expected


@pytest.mark.parametrize("text", ["[1]", '{"a": 1}', '{"b": [', "", '{"b" 1}', '{"b": 1 "c": 2}', "{b: 1}"])
def test_json_that_is_none_is_an_error(text: str) -> None:
    with pytest.raises(CheckpointError, match=r"expected an? "):
        set_in_json(text, ("b",), "t", False)


@pytest.mark.parametrize(
    ("family", "told"), [("gemma", True), ("gemma2", True), ("cohere2", True), ("mpt", True), ("gemma3_text", False)]
)
def test_families_that_another_program_wants_tied_are_told(family: str, told: bool) -> None:
    config = transformers.AutoConfig.for_model(family)
    assert (family in tying_readers(config)) == told
    assert tying_readers(transformers.LlamaConfig()) == ""


def test_a_copy_of_the_model_is_left_tied() -> None:
    model = llama()
    untie_(copy.deepcopy(model))
    assert is_tied(model) and model.config.tie_word_embeddings
