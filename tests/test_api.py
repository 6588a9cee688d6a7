"""The whole path on checkpoints: inspect, convert, load, verify."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import saved, tiny_bert, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import execution, loading, modules
from normswap.errors import BackendError, CheckpointError, NothingToPatchError, OutputError, UsageError

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_llama(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def converted(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return normswap.convert(llama, tmp_path_factory.mktemp("parent") / "out", dtype="bfloat16").out


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=torch.arange(12)[None]).logits


def test_inspect_has_one_entry_for_each_norm(llama: Path) -> None:
    found = normswap.inspect(llama)
    data = found.to_dict()
    assert data["model"] == str(llama)
    assert data["model_type"] == "llama"
    assert [norm["name"] for norm in data["norms"]] == [
        "model.layers.0.input_layernorm",
        "model.layers.0.post_attention_layernorm",
        "model.layers.1.input_layernorm",
        "model.layers.1.post_attention_layernorm",
        "model.norm",
    ]
    assert data["norms"][0] == {
        "name": "model.layers.0.input_layernorm",
        "class": "LlamaRMSNorm",
        "action": "swap",
        "reason": "",
        "spec": {
            "kind": "rms",
            "width": 32,
            "eps": 1e-6,
            "gain": "w",
            "bias": False,
            "cast": "before_gain",
            "out": "promote",
            "gain_name": "weight",
            "bias_name": None,
            "eps_position": "inside",
            "groups": 1,
            "partial": None,
            "gate": None,
            "gate_position": None,
            "heads": 1,
            "reduction": "mean",
            "gain_position": "after",
            "offset_dtype": "float32",
            "product_cast": "none",
            "scale_cast": "none",
            "gate_optional": False,
            "input_name": "hidden_states",
            "gate_name": None,
            "axis": "last",
            "ranks": [],
            "dense": True,
            "joins": 1,
            "then": [],
            "own_code": [],
        },
    }
    assert str(found).endswith("5 norms: 5 to swap")
    assert json.loads(json.dumps(data)) == data
    assert [(row["pattern"], row["count"]) for row in found.plan.rows()] == [
        ("model.layers.*.input_layernorm", 2),
        ("model.layers.*.post_attention_layernorm", 2),
        ("model.norm", 1),
    ]


def test_inspect_reads_no_weights(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((llama / "config.json").read_bytes())
    assert len(normswap.inspect(tmp_path).plan.swaps) == 5


def test_inspect_takes_a_module_too() -> None:
    found = normswap.inspect(tiny_bert())
    assert (found.model, found.model_type, len(found.plan.swaps)) == ("BertForMaskedLM", "bert", 6)


def test_the_conversion_is_byte_identical_and_plain_transformers_loads_it(llama: Path, converted: Path) -> None:
    assert (converted / "model.safetensors").read_bytes() == (llama / "model.safetensors").read_bytes()
    assert (converted / "config.json").read_bytes() == (llama / "config.json").read_bytes()
    plain = AutoModelForCausalLM.from_pretrained(converted)
    assert type(plain.model.norm) is LlamaRMSNorm
    assert torch.equal(logits(plain), logits(AutoModelForCausalLM.from_pretrained(llama)))


def test_shards_keep_their_names_and_bytes(tmp_path: Path) -> None:
    source = saved(tiny_llama(), tmp_path / "source", max_shard_size="20KB")
    shards = sorted(source.glob("*.safetensors"))
    assert len(shards) > 1
    normswap.convert(source, tmp_path / "out", dtype="bfloat16")
    for shard in (*shards, source / "model.safetensors.index.json"):
        assert (tmp_path / "out" / shard.name).read_bytes() == shard.read_bytes()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        [*(path.name for path in source.iterdir()), "normswap.json"]
    )


def test_the_manifest_records_what_was_done(llama: Path, converted: Path) -> None:
    manifest = json.loads((converted / "normswap.json").read_text())
    assert manifest["normswap"] == normswap.__version__
    assert manifest["source"]["name"] == str(llama)
    assert set(manifest["source"]["files"]) == {"model.safetensors"}
    assert [norm["name"] for norm in manifest["norms"]] == [
        norm["name"] for norm in normswap.inspect(llama).to_dict()["norms"]
    ]
    assert manifest["folds"] == []
    assert manifest["backend"] == "cpu"
    assert manifest["parity"]["verdict"] == "pass"


def test_load_gives_the_right_class_with_no_original_norm_running(
    llama: Path, converted: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = logits(AutoModelForCausalLM.from_pretrained(llama, dtype=torch.bfloat16))
    model = normswap.load(converted, dtype=torch.bfloat16)
    assert type(model) is LlamaForCausalLM
    assert len(list(modules.fused_norms(model))) == 5
    forward, calls = LlamaRMSNorm.forward, []

    @functools.wraps(forward)
    def counted(self: nn.Module, *args: object, **kwargs: object) -> torch.Tensor:
        calls.append(self)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(LlamaRMSNorm, "forward", counted)
    assert torch.equal(logits(model), expected)
    assert calls == []
    logits(normswap.unpatch(model))
    assert len(calls) == 5


def test_load_keeps_to_the_selection_of_the_conversion(llama: Path, tmp_path: Path) -> None:
    normswap.convert(llama, tmp_path / "out", include="*input_layernorm", verify=False)
    names = [name for name, _, _ in modules.fused_norms(normswap.load(tmp_path / "out"))]
    assert names == ["model.layers.0.input_layernorm", "model.layers.1.input_layernorm"]


def test_load_refuses_a_folder_that_was_not_converted(llama: Path) -> None:
    with pytest.raises(CheckpointError, match=r"expected a folder with normswap\.json"):
        normswap.load(llama)


def test_load_refuses_norms_that_are_not_those_of_the_manifest(llama: Path, tmp_path: Path) -> None:
    out = normswap.convert(llama, tmp_path / "out", verify=False).out
    config = json.loads((out / "config.json").read_text())
    config["rms_norm_eps"] = 1e-3
    (out / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"expected the norm model\.layers\.0\.\S+ to compute .*1e-06"):
        normswap.load(out)


def test_an_encoder_is_judged_on_its_logits_or_its_hidden_state(tmp_path: Path) -> None:
    source = saved(tiny_bert(), tmp_path / "bert")
    done = normswap.convert(source, tmp_path / "out", dtype="bfloat16")
    assert done.report is not None
    assert done.report.output["name"] == "logits"
    assert len(done.plan.swaps) == 6
    assert isinstance(normswap.load(tmp_path / "out"), type(AutoModelForMaskedLM.from_pretrained(source)))
    body = saved(tiny_bert().bert, tmp_path / "body")
    with pytest.warns(UserWarning, match="no weights for its pooler"):
        report = normswap.verify(body, dtype="bfloat16")
    assert report.passed
    assert report.output["name"] == "last_hidden_state"
    assert report.to_dict()["logits"]["kl_converted"] is None


def test_verify_finds_the_source_by_the_manifest(llama: Path, converted: Path) -> None:
    report = normswap.verify(converted, dtype="bfloat16")
    assert report.passed
    assert report.to_dict()["exact"]["error"] <= 1e-5


def test_verify_tells_of_a_source_that_is_gone(llama: Path, converted: Path, tmp_path: Path) -> None:
    out = normswap.convert(converted, tmp_path / "again", verify=False).out
    manifest = json.loads((out / "normswap.json").read_text())
    manifest["source"]["name"] = str(tmp_path / "gone")
    (out / "normswap.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match=r"the source that normswap\.json names cannot be read.*--against"):
        normswap.verify(out)
    assert normswap.verify(out, llama).passed


def test_verify_against_another_model_fails_and_names_the_gate(llama: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    normswap.convert(llama, other, verify=False)
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] *= 1.02
    save_file(weights, other / "model.safetensors", {"format": "pt"})
    report = normswap.verify(other, llama, dtype="bfloat16")
    assert report.verdict == "fail"
    assert any(failure.startswith("exact: error") for failure in report.failures)


def test_verify_takes_modules_and_leaves_them_alone() -> None:
    model = tiny_llama()
    report = normswap.verify(model, dtype=torch.bfloat16)
    assert report.passed
    assert report.dtype == "bfloat16"
    assert type(model.model.norm) is LlamaRMSNorm
    assert model.dtype == torch.float32
    assert normswap.verify(normswap.patch(model)).passed
    assert isinstance(model.model.norm, modules.FusedNorm)
    with pytest.raises(UsageError, match="two modules or two checkpoints"):
        normswap.verify(model, "folder")


def test_nothing_is_saved_when_parity_fails(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = execution._OPERATIONS["rms"]
    monkeypatch.setitem(execution._OPERATIONS, "rms", lambda *a, eps, **k: right(*a, eps=eps + 0.1, **k))
    with pytest.raises(normswap.ParityError, match="parity failed, so nothing was saved: exact: error") as caught:
        normswap.convert(llama, tmp_path / "out")
    assert caught.value.report is not None
    assert not caught.value.report.passed
    assert list(tmp_path.iterdir()) == []


def test_damaged_weights_are_refused_before_anything_is_written(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    normswap.convert(llama, source, verify=False)
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][3, 4] = float("nan")
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        normswap.convert(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_source_is_not_written(llama: Path, tmp_path: Path) -> None:
    def state() -> dict[str, tuple[int, int]]:
        return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in [llama, *llama.iterdir()]}

    before = state()
    normswap.convert(llama, tmp_path / "out", dtype="bfloat16")
    assert state() == before


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"backend": "triton"}, BackendError, "triton"),
        ({"dtype": "int8"}, UsageError, "expected dtype float32, float16 or bfloat16, got 'int8'"),
        ({"device": "toaster"}, UsageError, "expected a device that torch can use here, got 'toaster'"),
        ({"device": "cpu:3"}, UsageError, "torch can use here, got 'cpu:3': there is one cpu, number 0$"),
        ({"device": "hpu"}, UsageError, "torch can use here, got 'hpu': "),
        ({"device": "mps"}, UsageError, r"got 'mps': Could not run 'aten::\S+' with arguments from the 'MPS' backend$"),
        ({"device": "xla"}, UsageError, "got 'xla': "),
        ({"device": "meta"}, UsageError, "got 'meta': "),
        ({"include": "nothing"}, UsageError, "include pattern 'nothing' matches no norm"),
        ({"exclude": "*"}, NothingToPatchError, "none of the 5 norms can be swapped"),
        ({"text": "absent.txt"}, UsageError, "absent.txt"),
    ],
)
def test_bad_arguments_are_one_clear_error(
    llama: Path, tmp_path: Path, arguments: dict[str, str], error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words) as caught:
        normswap.convert(llama, tmp_path / "out", **arguments)
    assert len(str(caught.value)) < 400 and "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_an_existing_output_is_kept_unless_told(llama: Path, converted: Path) -> None:
    before = (converted / "normswap.json").read_bytes()
    with pytest.raises(OutputError, match="exists"):
        normswap.convert(llama, converted)
    assert (converted / "normswap.json").read_bytes() == before
    normswap.convert(llama, converted, overwrite=True, dtype="bfloat16")


def test_load_takes_the_older_name_of_dtype_too(converted: Path) -> None:
    assert normswap.load(converted, torch_dtype=torch.float16).dtype == torch.float16
    assert normswap.load(converted, torch_dtype=torch.float16, dtype=torch.bfloat16).dtype == torch.bfloat16


def test_load_and_verify_tell_of_a_damaged_manifest(llama: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(llama, tmp_path / "copy"))
    (folder / "normswap.json").write_text('{"schema": 1}')
    for use in (normswap.load, normswap.verify):
        with pytest.raises(CheckpointError, match=r"normswap\.json in .* is damaged: expected an object under source"):
            use(folder)


def test_verify_refuses_two_architectures_before_it_loads(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bert = saved(tiny_bert(), tmp_path / "bert")
    monkeypatch.setattr(loading, "load_model", lambda *_, **__: pytest.fail("loaded"))
    words = "expected two checkpoints of one architecture, got LlamaForCausalLM and BertForMaskedLM"
    with pytest.raises(UsageError, match=words):
        normswap.verify(llama, bert)


def test_only_modules_are_patched(llama: Path) -> None:
    for use in (normswap.patch, normswap.unpatch):
        with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module, got str; .*normswap\.convert"):
            use(str(llama))  # type: ignore[type-var]


def test_verify_says_when_weights_differ_by_their_bytes(llama: Path, tmp_path: Path) -> None:
    out = normswap.convert(llama, tmp_path / "out", verify=False).out
    assert not [note for note in normswap.verify(out).notes if "weights" in note]
    weights = load_file(out / "model.safetensors")
    save_file({**weights, "never.read": torch.ones(1)}, out / "model.safetensors", {"format": "pt"})
    for report in (normswap.verify(out), normswap.verify(out, llama)):
        assert "the weights were changed since the conversion (model.safetensors)" in report.notes
        assert report.tensors.altered == ["model.safetensors"] and report.passed


def test_a_second_set_of_weights_is_told(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    (source / "model.safetensors.index.json").write_text("{}")
    with pytest.warns(UserWarning, match=r"are both there: transformers loads model\.safetensors"):
        normswap.convert(source, tmp_path / "out", verify=False)
    with pytest.warns(UserWarning, match=r"are both there: transformers loads model\.safetensors"):
        normswap.verify(source)


def test_a_mask_with_minus_infinity_converts_and_integers_for_weights_do_not(llama: Path, tmp_path: Path) -> None:
    source = Path(shutil.copytree(llama, tmp_path / "source"))
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.self_attn.mask"] = torch.full((2, 2), -torch.inf)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    normswap.convert(source, tmp_path / "out", verify=False)
    weights["model.layers.0.mlp.up_proj.weight"] = weights["model.layers.0.mlp.up_proj.weight"].to(torch.int8)
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight in model\.safetensors, got dtype I8"):
        normswap.convert(source, tmp_path / "other", verify=False)


def test_an_empty_name_is_no_folder(tmp_path: Path) -> None:
    for use in (
        normswap.inspect,
        normswap.load,
        normswap.verify,
        lambda name: normswap.convert(name, tmp_path / "out"),
    ):
        with pytest.raises(CheckpointError, match=r"expected a model folder or a Hub id, got '': no such folder"):
            use("")


def test_a_missing_pooler_is_filled_alike_at_each_load_and_leaves_the_random_state(tmp_path: Path) -> None:
    body = saved(tiny_bert().bert, tmp_path / "body")
    out = normswap.convert(body, tmp_path / "out", verify=False).out
    before, filled = torch.get_rng_state(), []
    for _ in range(2):
        with pytest.warns(UserWarning, match="no weights for its pooler"):
            filled.append(normswap.load(out).pooler.dense.weight)
    assert torch.equal(*filled)
    assert torch.equal(torch.get_rng_state(), before)
