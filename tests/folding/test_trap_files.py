"""Files that lead a folder of folded weights astray: stale, missing, square, left over, quantized."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny_checkpoints import disturb_norms, saved, tiny_llama
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from trap_checkpoints import TRAPS

import normswap
from normswap.errors import CheckpointError, ModelError, OutputError

pytestmark = pytest.mark.core

INDEX = "model.safetensors.index.json"
IDS = torch.arange(3, 35).reshape(2, 16)


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(IDS).logits.double()


def loaded(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def moved(got: nn.Module, expected: nn.Module) -> float:
    before = logits(expected)
    return float((logits(got) - before).norm() / before.norm())


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def fold(source: Path, out: Path, **options: Any) -> Any:
    return normswap.convert(source, out, fold=True, verify=False, **options)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return saved(tiny_llama(), tmp_path / "sharded", max_shard_size="20KB")


def test_weights_that_lay_in_the_target_are_gone(sharded: Path, tmp_path: Path) -> None:
    """Plain transformers prefers one whole file to an index, and would load the old weights."""
    out = tmp_path / "out"
    fold(saved(tiny_llama(), tmp_path / "whole"), out)
    assert (out / "model.safetensors").is_file()
    with pytest.raises(OutputError, match="exists"):
        fold(sharded, out)
    fold(sharded, out, overwrite=True)
    assert not (out / "model.safetensors").exists() and (out / INDEX).is_file()
    assert moved(loaded(out), loaded(sharded)) <= 1e-5


def test_a_shard_that_is_missing_ends_it(sharded: Path, tmp_path: Path) -> None:
    next(sharded.glob("model-00002-*")).unlink()
    with pytest.raises(CheckpointError, match="model-00002"):
        fold(sharded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


UP = "model.layers.1.mlp.up_proj.weight"


def without_up(folder: Path, *, listed: bool) -> None:
    """Take a tensor out of its shard, and where it is not to be listed, out of the index."""
    index = json.loads((folder / INDEX).read_text())
    file = folder / index["weight_map"][UP]
    save_file({key: value for key, value in load_file(file).items() if key != UP}, file, metadata={"format": "pt"})
    if not listed:
        del index["weight_map"][UP]
        (folder / INDEX).write_text(json.dumps(index))


def test_a_tensor_that_the_index_names_and_no_shard_holds_ends_it(sharded: Path, tmp_path: Path) -> None:
    without_up(sharded, listed=True)
    with pytest.raises(CheckpointError, match="up_proj"):
        fold(sharded, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_norm_whose_reader_is_stored_nowhere_is_left(sharded: Path, tmp_path: Path) -> None:
    without_up(sharded, listed=False)
    with pytest.raises(CheckpointError, match="up_proj"):
        normswap.convert(sharded, tmp_path / "out", fold=True)
    done = fold(sharded, tmp_path / "out")
    left = done.folds.by_name()["model.layers.1.post_attention_layernorm"]
    assert left.action == "refuse" and UP in left.reason and "not stored" in left.reason
    before, after = tensors_of(sharded), tensors_of(tmp_path / "out")
    for name in ("post_attention_layernorm.weight", "mlp.gate_proj.weight"):
        assert torch.equal(before[f"model.layers.1.{name}"], after[f"model.layers.1.{name}"])
        assert not torch.equal(before[f"model.layers.0.{name}"], after[f"model.layers.0.{name}"])


SQUARE = {
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "vocab_size": 64,
    "max_position_embeddings": 64,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Mixtral", {"intermediate_size": 32}),
        ("Mixtral", {"intermediate_size": 16}),
        ("GptOss", {"intermediate_size": 16, "head_dim": 16, "layer_types": ["full_attention"]}),
    ],
)
def test_experts_of_square_shape_are_folded_along_the_right_side(
    name: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**SQUARE, **settings)
    model = disturb_norms(getattr(transformers, f"{name}ForCausalLM")(config))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0 if parameter.dim() > 1 else 1.0)
    folder, out = saved(model, tmp_path / "in"), tmp_path / "out"
    fold(folder, out)
    before, after = tensors_of(folder), tensors_of(out)
    assert {key: value.shape for key, value in before.items()} == {key: value.shape for key, value in after.items()}
    experts = [key for key in before if "experts" in key and not torch.equal(before[key], after[key])]
    # Under the names that they have on disk, whatever they are in memory.
    assert len(experts) == (6 if name == "Mixtral" else 1)
    assert moved(loaded(out), loaded(folder)) <= 1e-5


def test_layers_that_the_class_does_not_load_are_carried_over(tmp_path: Path) -> None:
    try:
        model = TRAPS["qwen3_next"].build()
    except AttributeError as error:
        pytest.skip(f"not in this transformers: {error}")
    folder, out = saved(model, tmp_path / "in"), tmp_path / "out"
    more = {"mtp.norm.weight": torch.randn(32), "mtp.layers.0.mlp.gate.weight": torch.randn(4, 32)}
    save_file({**load_file(folder / "model.safetensors"), **more}, folder / "model.safetensors", {"format": "pt"})
    done = fold(folder, out, tied="untie")
    after = tensors_of(out)
    assert all(torch.equal(after[key], value) for key, value in more.items())
    # The heads that are not loaded may read the last norm too.
    assert torch.equal(after["model.norm.weight"], load_file(folder / "model.safetensors")["model.norm.weight"])
    assert "mtp." in done.folds.by_name()["model.norm"].reason
    assert not after["model.layers.0.input_layernorm.weight"].any()
    assert moved(loaded(out), loaded(folder)) <= 1e-5


QUANTIZED: dict[str, tuple[dict[str, Any], str]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [16, 16]}, "weight_scale_inv"),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": 32}, "scales"),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, "scales"),
    "bitsandbytes": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "SCB"),
    "bitnet": ({"quant_method": "bitnet"}, "weight_scale"),
}


def quantized(folder: Path, method: str) -> Path:
    """Give a tiny checkpoint the configuration of a quantizer, and its linear layers integers with scales."""
    settings, scales = QUANTIZED[method]
    saved(tiny_llama(), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    tensors = load_file(folder / "model.safetensors")
    for key in [key for key in tensors if key.endswith("proj.weight")]:
        whole = tensors.pop(key)
        stem = key.removesuffix("weight")
        packed = "qweight" if method in ("gptq", "awq") else "weight"
        dtype = {"fp8": torch.float8_e4m3fn, "gptq": torch.int32, "awq": torch.int32}.get(method, torch.int8)
        tensors[stem + packed] = (whole * 50).to(dtype)
        tensors[stem + scales] = torch.ones(whole.shape[0] // 16, whole.shape[1] // 16)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("method", QUANTIZED)
def test_quantized_weights_are_not_folded_into_and_norms_are_swapped_all_the_same(method: str, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "in", method)
    with pytest.raises(ModelError, match=f"quantized \\({method}\\)"):
        fold(folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        done = normswap.convert(folder, tmp_path / "out", verify=False)
    assert len(done.plan.swaps) == 5
    before, after = (load_file(where / "model.safetensors") for where in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key].view(torch.uint8), after[key].view(torch.uint8)) for key in before)
