"""A reader that a fold missed: every gate says so, and what rounding adds is not asked to explain it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import normswap
from normswap.gatetable import gate_table

MISSED = "model.layers.1.mlp.up_proj.weight"
READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64,
        intermediate_size=96,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_hidden_layers=3,
        vocab_size=257,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.endswith("norm.weight"):
                value.uniform_(0.3, 3)
    folder = tmp_path_factory.mktemp("llama")
    model.to(torch.bfloat16).save_pretrained(folder)
    return folder


def folded(original: Path, target: Path, *missed: str) -> Path:
    tensors = load_file(original / "model.safetensors")
    for layer in range(3):
        for norm, readers in READERS.items():
            gain = tensors[f"model.layers.{layer}.{norm}.weight"]
            for name in (f"model.layers.{layer}.{reader}.weight" for reader in readers):
                if name not in missed:
                    tensors[name] = tensors[name] * gain
            tensors[f"model.layers.{layer}.{norm}.weight"] = torch.ones_like(gain)
    target.mkdir()
    (target / "config.json").write_bytes((original / "config.json").read_bytes())
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def test_a_missed_reader_is_not_taken_for_rounding(original: Path, tmp_path: Path) -> None:
    report = normswap.verify(folded(original, tmp_path / "folded", MISSED), against=original, tokens=256)
    assert report.verdict == "fail"
    assert report.logits.ratio > 2 and report.logits.ratio_explained is None
    assert any(failure.startswith("served: error, converted / original, ") for failure in report.failures), (
        report.failures
    )
    assert report.departs == "model.layers.1"
    states = {row[0]: row[1] for row in gate_table(report).rows if row[0]}
    assert [states[gate] for gate in ("tensors", "folds", "served", "layers")] == ["FAIL"] * 4


def test_a_float64_reference_leaves_the_lost_gain_what_it_was(original: Path, tmp_path: Path) -> None:
    target = folded(original, tmp_path / "folded")
    in_float32, in_float64 = (
        normswap.verify(target, against=original, tokens=256, reference=name) for name in ("float32", "float64")
    )
    assert in_float64.verdict == "pass", in_float64.failures
    assert in_float32.logits.control is not None and in_float64.logits.control is not None
    assert in_float64.logits.control.ratio == pytest.approx(in_float32.logits.control.ratio, rel=0.01)


def test_what_nothing_explains_of_a_folded_checkpoint_is_run_as_it_is_stored(original: Path, tmp_path: Path) -> None:
    """A tensor that no fold touches, spoiled beside right folds, is seen by gate exact, and its layer is named."""
    out = normswap.convert(original, tmp_path / "out", fold=True, verify=False).out
    file = out / "model.safetensors"
    weights = load_file(file)
    weights["model.layers.1.self_attn.o_proj.weight"][3, 4] += 1.0
    save_file(weights, file, {"format": "pt"})
    report = normswap.verify(out, device="cpu", tokens=256)
    assert report.departs == "model.layers.1"
    assert {failure.split(":")[0] for failure in report.failures} >= {"tensors", "exact"}
