"""From a checkpoint to a folded one: what is written, what plain transformers makes of it, what is refused."""

from __future__ import annotations

import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import disturb_norms, saved, tiny_bert, tiny_llama
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

import normswap
from normswap.errors import CheckpointError, ModelError, NothingToPatchError, ParityError, UsageError

pytestmark = pytest.mark.core


def logits(model: PreTrainedModel | Path) -> torch.Tensor:
    if isinstance(model, Path):
        model = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        return model(input_ids=ids).logits.double()


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=0, eos_token_id=0)
    return disturb_norms(GPT2LMHeadModel(config))


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return saved(tiny_llama(), tmp_path / "llama")


def test_every_gain_goes_into_what_reads_it(llama: Path, tmp_path: Path) -> None:
    done = normswap.convert(llama, tmp_path / "out", fold=True)
    assert done.folds is not None and done.report is not None and done.report.passed
    assert len(done.folds.folds) == 5 and done.folds.refusals == ()
    before, after = (load_file(path / "model.safetensors") for path in (llama, tmp_path / "out"))
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        if "norm" in name:
            assert torch.equal(after[name], torch.ones_like(tensor)), name
        elif any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")):
            assert not torch.equal(after[name], tensor), name
        else:
            assert torch.equal(after[name], tensor), name
    gain = before["model.layers.1.post_attention_layernorm.weight"].double()
    weight = before["model.layers.1.mlp.up_proj.weight"].double()
    assert torch.equal(after["model.layers.1.mlp.up_proj.weight"], (weight * gain).float())
    assert distance(logits(llama), logits(tmp_path / "out")) < 1e-6


def test_a_lost_gain_would_show(llama: Path, tmp_path: Path) -> None:
    normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    name = "model.layers.0.mlp.up_proj.weight"
    file = tmp_path / "out" / "model.safetensors"
    save_file({**load_file(file), name: load_file(llama / file.name)[name]}, file, metadata={"format": "pt"})
    assert distance(logits(llama), logits(tmp_path / "out")) > 1e-2
    report = normswap.verify(tmp_path / "out")
    assert not report.passed
    assert any(name in failure and failure.startswith("folds: ") for failure in report.failures), report.failures


def test_the_manifest_says_what_was_folded_and_verify_checks_it(llama: Path, tmp_path: Path) -> None:
    normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    manifest = json.loads((tmp_path / "out" / "normswap.json").read_text())
    fold = next(entry for entry in manifest["folds"] if entry["name"] == "model.norm")
    assert fold["consumers"] == [{"parameter": "lm_head.weight", "axis": 1, "bias": None, "pieces": [[0, 32, 0, 1]]}]
    assert fold["algebra_error"] < 1e-12
    assert manifest["files"] != manifest["source"]["files"]
    report = normswap.verify(tmp_path / "out")
    assert report.passed and report.notes == []
    assert isinstance(normswap.load(tmp_path / "out"), PreTrainedModel)


def test_a_tied_head_is_left_or_untied(tmp_path: Path) -> None:
    source = saved(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    skipped = normswap.convert(source, tmp_path / "skipped", fold=True, verify=False)
    assert skipped.folds is not None and len(skipped.folds.folds) == 4
    assert "lm_head.weight" not in load_file(tmp_path / "skipped" / "model.safetensors")
    assert [fold.name for fold in skipped.folds.refusals] == ["model.norm"] and skipped.folds.refusals[0].untie
    untied = normswap.convert(source, tmp_path / "untied", fold=True, tied="untie", verify=False)
    assert untied.folds is not None and len(untied.folds.folds) == 5
    tensors = load_file(tmp_path / "untied" / "model.safetensors")
    table = "model.embed_tokens.weight"
    assert torch.equal(tensors[table], load_file(source / "model.safetensors")[table])
    assert not torch.equal(tensors["lm_head.weight"], tensors[table])
    assert json.loads((tmp_path / "untied" / "config.json").read_text())["tie_word_embeddings"] is False
    for folder in ("skipped", "untied"):
        assert distance(logits(source), logits(tmp_path / folder)) < 1e-6
    assert normswap.verify(tmp_path / "untied").passed


def test_biases_of_a_layer_norm_move_where_they_have_a_home(tmp_path: Path) -> None:
    source = saved(tiny_gpt2(), tmp_path / "source")
    done = normswap.convert(source, tmp_path / "out", fold=True)
    assert done.folds is not None and done.report is not None and done.report.passed
    assert [fold.bias for fold in done.folds.folds] == ["move"] * 4
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert not tensors["transformer.h.0.ln_1.bias"].any()
    assert distance(logits(source), logits(tmp_path / "out")) < 1e-6


def test_a_norm_after_the_sum_folds_only_where_the_stream_ends(tmp_path: Path) -> None:
    source = saved(tiny_bert(), tmp_path / "bert")
    last = "bert.encoder.layer.1.output.LayerNorm"
    done = normswap.convert(source, tmp_path / "out", fold=True)
    assert done.folds is not None and done.report is not None and done.report.passed
    assert {fold.name: fold.parameters for fold in done.folds.folds} == {
        last: ("cls.predictions.transform.dense.weight",)
    }
    with pytest.raises(NothingToPatchError, match=r"no gain of .* can be folded.*it is added to something else"):
        normswap.convert(source, tmp_path / "none", fold=True, exclude=last)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bert", "out"]


def test_a_model_in_memory_folds_in_place(llama: Path) -> None:
    model = tiny_llama()
    expected = logits(model)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert normswap.fold(model) is model
    assert model.model.layers[0].mlp.up_proj.weight is weight
    assert all(bool((norm.weight == 1).all()) for norm in (model.model.norm, model.model.layers[0].input_layernorm))
    assert distance(expected, logits(model)) < 1e-6
    swapped = normswap.patch(tiny_llama())
    normswap.fold(swapped)
    assert distance(expected, logits(swapped)) < 1e-6
    assert torch.equal(swapped.lm_head.weight, model.lm_head.weight)


def test_quantized_weights_are_refused_with_the_reason(llama: Path, tmp_path: Path) -> None:
    config = json.loads((llama / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (llama / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"is quantized \(fp8\).* folded into quantized weights"):
        normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    found = normswap.inspect(llama, fold=True)
    assert found.folds is not None and found.folds.folds == ()
    assert all("quantized (fp8)" in fold.reason for fold in found.folds.refusals)


def test_layers_that_the_class_does_not_load_leave_the_final_norm_alone(llama: Path, tmp_path: Path) -> None:
    file = llama / "model.safetensors"
    extra = {"model.layers.2.mtp.eh_proj.weight": torch.randn(32, 64)}
    save_file({**load_file(file), **extra}, file, metadata={"format": "pt"})
    done = normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    assert done.folds is not None
    left = {fold.name: fold.reason for fold in done.folds.refusals}
    assert list(left) == ["model.norm"] and "mtp.eh_proj" in left["model.norm"]
    kept = load_file(tmp_path / "out" / "model.safetensors")["model.layers.2.mtp.eh_proj.weight"]
    assert torch.equal(kept, extra["model.layers.2.mtp.eh_proj.weight"])
    asked = normswap.convert(llama, tmp_path / "asked", fold=True, include=["*norm*", "model.norm"], verify=False)
    assert asked.folds is not None and asked.folds.refusals == ()


def test_a_gain_that_leaves_the_range_of_half_precision_is_left_alone(tmp_path: Path) -> None:
    model = tiny_llama()
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.fill_(60000.0)
        model.model.layers[0].self_attn.q_proj.weight.fill_(2.0)
    source = saved(model.half(), tmp_path / "source")
    done = normswap.convert(source, tmp_path / "out", fold=True, verify=False)
    assert done.folds is not None
    left = {fold.name: fold.reason for fold in done.folds.refusals}
    assert list(left) == ["model.layers.0.input_layernorm"] and "range" in left["model.layers.0.input_layernorm"]
    before, after = (load_file(path / "model.safetensors") for path in (source, tmp_path / "out"))
    for name in ("input_layernorm", "self_attn.q_proj", "self_attn.k_proj"):
        assert torch.equal(before[f"model.layers.0.{name}.weight"], after[f"model.layers.0.{name}.weight"])


def test_a_fault_in_what_was_written_saves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from normswap import converting

    write = converting.write_checkpoint

    def spoil(checkpoint: object, folder: Path, **options: object) -> object:
        written = write(checkpoint, folder, **options)  # type: ignore[arg-type]
        tensors = load_file(folder / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"][:, 3] *= 3
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        return written

    monkeypatch.setattr(converting, "write_checkpoint", spoil)
    with pytest.raises(ParityError, match=r"written is not what folding gives: model.layers.0.mlp.up_proj.weight"):
        normswap.convert(llama, tmp_path / "out", fold=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]


def test_options_of_folding_need_it(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="add --fold"):
        normswap.convert(llama, tmp_path / "out", tied="untie")
    with pytest.raises(UsageError, match="add --fold"):
        normswap.convert(llama, tmp_path / "out", quant_report=True)


def test_the_quantization_report_comes_along(llama: Path, tmp_path: Path) -> None:
    done = normswap.convert(llama, tmp_path / "out", fold=True, quant_report=True, verify=False)
    assert done.quantization is not None
    data = done.quantization.to_dict()
    assert set(data["consumers"]) == {name for fold in done.folds.folds for name in fold.parameters}  # type: ignore[union-attr]
    assert all(data["total"][kind]["after"] > 0 for kind in ("int8", "int4", "fp8"))


def test_inspect_says_from_the_config_alone_what_would_be_folded(llama: Path, tmp_path: Path) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(llama / "config.json", alone)
    found = normswap.inspect(alone, fold=True)
    entries = {norm["name"]: norm["fold"] for norm in found.to_dict()["norms"]}
    assert entries["model.norm"] == {
        "action": "fold", "reason": "", "consumers": ["lm_head.weight"], "untie": False, "bias": "none",
    }  # fmt: skip
    assert "5 of 5 gains to fold into 11 weights" in repr(found)
    with pytest.raises(CheckpointError):
        normswap.inspect(tmp_path / "nowhere", fold=True)


class Ternary(torch.nn.Linear):
    """A linear map whose weight is rounded where it is used."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, (3 * self.weight).round() / 3)


def test_modules_that_were_put_in_later_are_seen() -> None:
    model = tiny_llama()
    linear = Ternary(32, 48, bias=False)
    model.model.layers[0].mlp.gate_proj = linear
    before, expected = linear.weight.detach().clone(), logits(model)
    normswap.fold(model)
    assert torch.equal(linear.weight, before)
    assert not bool((model.model.layers[0].post_attention_layernorm.weight == 1).all())
    assert bool((model.model.layers[1].post_attention_layernorm.weight == 1).all())
    assert distance(expected, logits(model)) < 1e-6


def test_a_model_of_no_library_folds_by_a_proof_on_its_copy() -> None:
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.norm = torch.nn.Embedding(16, 8), torch.nn.LayerNorm(8)
            self.head = torch.nn.Linear(8, 16)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.norm(self.table(input_ids)))

    model = Plain().eval()
    with torch.no_grad():
        model.norm.weight.uniform_(0.5, 2)
        model.norm.bias.uniform_(-1, 1)
        expected = model(torch.arange(16)[None])
        normswap.fold(model)
        assert bool((model.norm.weight == 1).all()) and not model.norm.bias.any()
        assert distance(expected.double(), model(torch.arange(16)[None]).double()) < 1e-6


def test_a_head_that_is_tied_again_is_told(tmp_path: Path) -> None:
    source = saved(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    normswap.convert(source, tmp_path / "out", fold=True, tied="untie", verify=False)
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    report = normswap.verify(tmp_path / "out")
    assert any("which config.json ties it to" in failure for failure in report.failures), report.failures


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda fold: fold["consumers"][0].update(pieces=[]), "the manifest is damaged: expected a fold"),
        (lambda fold: fold.pop("bias"), "the manifest is damaged: expected a fold"),
        (lambda fold: fold.update(name="model.nowhere"), "names folds of model.nowhere, the model has no such norm"),
    ],
)
def test_a_damaged_record_of_folds_is_told(
    llama: Path, tmp_path: Path, change: Callable[[dict[str, Any]], object], words: str
) -> None:
    normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    file = tmp_path / "out" / "normswap.json"
    manifest = json.loads(file.read_text())
    change(manifest["folds"][0])
    file.write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=words):
        normswap.verify(tmp_path / "out")


def test_the_index_of_a_folded_checkpoint_is_counted_anew(tmp_path: Path) -> None:
    source = saved(tiny_llama(tie_word_embeddings=True), tmp_path / "source", max_shard_size="20KB")
    file = source / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    right = index["metadata"]["total_size"]
    index["metadata"]["total_size"] = 5
    file.write_text(json.dumps(index))
    normswap.convert(source, tmp_path / "out", fold=True, tied="untie", verify=False)
    written = json.loads((tmp_path / "out" / file.name).read_text())
    assert written["metadata"]["total_size"] == right + 64 * 32 * 4
    shard = index["weight_map"]["model.embed_tokens.weight"]
    assert written["weight_map"] == {**index["weight_map"], "lm_head.weight": shard}
    assert distance(logits(source), logits(tmp_path / "out")) < 1e-6


def test_the_last_rows_stay_where_sentence_transformers_pools_them(llama: Path, tmp_path: Path) -> None:
    (llama / "modules.json").write_text("[]")
    done = normswap.convert(llama, tmp_path / "out", fold=True, verify=False)
    assert done.folds is not None
    assert [(fold.name, "modules.json" in fold.reason) for fold in done.folds.refusals] == [("model.norm", True)]


def test_the_table_says_which_layers_of_one_name_fold() -> None:
    shown = repr(normswap.inspect(tiny_bert(), fold=True))
    assert "  bert.encoder.layer.1.output.LayerNorm  (1)\n      into cls" in shown
    assert "  bert.encoder.layer.0.output.LayerNorm  (1)\n      add in" in shown
    assert "1 of 6 gains to fold into 1 weight" in shown


def test_adapters_have_to_be_merged_first() -> None:
    peft = pytest.importorskip("peft")
    with warnings.catch_warnings():
        # Each calls something that the other has deprecated.
        warnings.simplefilter("ignore", FutureWarning)
        model = peft.get_peft_model(tiny_llama(), peft.LoraConfig(r=2, target_modules=["gate_proj"]))
    for given in (model, model.get_base_model()):
        with pytest.raises(ModelError, match=r"is a layer of PEFT .*merge the adapters"):
            normswap.fold(given)


def test_planning_draws_nothing_from_the_users_generator(llama: Path) -> None:
    before = torch.random.get_rng_state()
    normswap.inspect(llama, fold=True)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_head_that_the_class_ties_for_good_costs_its_own_gain_only() -> None:
    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    found = normswap.inspect(disturb_norms(T5ForConditionalGeneration(config)), fold=True, tied="untie")
    assert found.folds is not None
    left = {fold.name: fold.reason for fold in found.folds.refusals}
    assert set(left) == {"encoder.final_layer_norm", "decoder.final_layer_norm"}, left
    assert left["encoder.final_layer_norm"] == "the model returns it"
    assert len(found.folds.folds) == 10


def test_what_was_asked_for_and_not_folded_says_why(tmp_path: Path) -> None:
    source = saved(tiny_llama(tie_word_embeddings=True), tmp_path / "tied")
    with pytest.raises(NothingToPatchError, match=r"written: model\.norm: lm_head\.weight is tied .{30,60}$"):
        normswap.convert(source, tmp_path / "out", fold=True, include="model.norm")
