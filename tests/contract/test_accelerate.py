"""Offloading by accelerate: its hooks go on before the patch or after it, and come off in either order."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_cases import count_calls, count_originals, logits, tiny
from torch import nn
from transformers import LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules

accelerate = pytest.importorskip("accelerate")
pytestmark = pytest.mark.core

DEVICE_MAP = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.layers.1": "disk",
    "model.norm": "disk",
    "lm_head": "cpu",
}
PLACES = ("cpu", "disk", "device map")


def offload(model: nn.Module, place: str, folder: Path) -> None:
    if place == "cpu":
        accelerate.cpu_offload(model, execution_device="cpu")
    elif place == "disk":
        accelerate.disk_offload(model, str(folder), execution_device="cpu")
    else:
        accelerate.dispatch_model(
            model, device_map=DEVICE_MAP, main_device="cpu", offload_dir=str(folder), force_hooks=True
        )


def onload(model: nn.Module) -> None:
    accelerate.hooks.remove_hook_from_module(model, recurse=True)


def shape_of(model: nn.Module) -> list[tuple[type, list[str]]]:
    return [(type(module), sorted(vars(module))) for module in model.modules()]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("last", ["hooks come off last", "unpatched last"])
@pytest.mark.parametrize("first", ["patched first", "hooks first"])
def test_offloaded_models_compute_the_same_and_come_back_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, first: str, last: str
) -> None:
    calls = count_calls(monkeypatch, [LlamaRMSNorm])
    model, plain = tiny("llama"), tiny("llama")
    expected = logits(model)
    if first == "patched first":
        normswap.patch(model)
    offload(model, place, tmp_path / "model")
    if first == "hooks first":
        normswap.patch(model)
    assert len(list(modules.fused_norms(model))) == 5
    assert model.model.norm.weight.is_meta
    calls.clear()
    assert torch.equal(logits(model), expected)
    assert calls == []
    for undo in (normswap.unpatch, onload) if last == "hooks come off last" else (onload, normswap.unpatch):
        undo(model)
        assert torch.equal(logits(model), expected)
    assert len(calls) == (10 if last == "hooks come off last" else 5)
    offload(plain, place, tmp_path / "plain")
    onload(plain)
    assert shape_of(model) == shape_of(plain)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert len(list(modules.fused_norms(normswap.patch(model)))) == 5


def test_a_model_whose_hooks_came_off_is_patched_though_they_leave_a_forward_behind() -> None:
    model = tiny("llama")
    expected = logits(model)
    offload(model, "cpu", Path())
    onload(model)
    before = dict(vars(model.model.norm))
    assert "forward" in before
    normswap.patch(model)
    assert len(list(modules.fused_norms(model))) == 5
    assert torch.equal(logits(model), expected)
    normswap.unpatch(model)
    assert vars(model.model.norm) == before


def test_a_forward_of_somebody_elses_on_the_norm_is_left_alone() -> None:
    model = tiny("llama")
    model.model.norm.forward = lambda hidden_states: 2 * hidden_states
    expected = logits(model)
    normswap.patch(model)
    assert type(model.model.norm) is LlamaRMSNorm
    assert torch.equal(logits(model), expected)
    (refused,) = normswap.inspect(model).plan.refusals
    assert "its forward was replaced on the instance" in refused.reason


def test_a_checkpoint_loaded_with_a_device_map_is_patched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")
    expected = logits(model)
    model.save_pretrained(tmp_path / "saved")
    loaded = LlamaForCausalLM.from_pretrained(
        tmp_path / "saved", device_map=DEVICE_MAP, offload_folder=tmp_path / "off", dtype=torch.float32
    )
    assert loaded.model.norm.weight.is_meta
    normswap.patch(loaded)
    calls = count_originals(monkeypatch, loaded)
    assert torch.equal(logits(loaded), expected)
    assert calls == []


def test_a_copy_of_an_offloaded_patched_model_runs_its_own_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    model = normswap.patch(tiny("llama"))
    expected = logits(model)
    offload(model, "cpu", Path())
    copied = copy.deepcopy(model)
    seen: list[Any] = []
    copied.model.norm.register_forward_pre_hook(lambda module, args: seen.append(module))
    calls = count_originals(monkeypatch, copied)
    assert torch.equal(logits(copied), expected)
    assert calls == []
    assert seen == [copied.model.norm]
    normswap.unpatch(copied)
    assert torch.equal(logits(copied), expected)
    assert len(calls) == 5
    assert len(list(modules.fused_norms(model))) == 5
