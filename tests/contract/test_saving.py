"""Copies, pickles, checkpoints and initialisation of patched models are those of unpatched ones."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_cases import FAMILIES, assert_same, logits, model_class, patched, tiny
from torch import nn

import normswap
from normswap import modules

pytestmark = pytest.mark.core


def through(model: Any, how: str) -> Any:
    """A copy of a module, made in one of the ways that people make them."""
    if how == "deepcopy":
        return copy.deepcopy(model)
    if how == "pickle":
        return pickle.loads(pickle.dumps(model))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    return torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*.safetensors*"))}


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba2"])
def test_copies_are_swapped_and_compute_the_same(family: str, how: str) -> None:
    model = patched(family)
    copied = through(model, how)
    norms = [(name, type(norm), spec) for name, norm, spec in modules.fused_norms(model)]
    assert [(name, type(norm), spec) for name, norm, spec in modules.fused_norms(copied)] == norms
    own = {id(tensor) for tensor in model.state_dict().values()}
    assert not any(id(parameter) in own for parameter in copied.parameters())
    assert torch.equal(logits(copied), logits(model))
    normswap.unpatch(copied)
    assert [type(module) for module in copied.modules()] == [type(module) for module in tiny(family).modules()]
    assert len(list(modules.fused_norms(model))) == len(norms)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_one_norm_alone_is_copied(how: str) -> None:
    norm = nn.LayerNorm(8)
    nn.init.normal_(norm.weight)
    normswap.patch(nn.Sequential(norm))
    x = torch.randn(3, 8)
    copied = through(norm, how)
    assert isinstance(copied, modules.FusedNorm)
    assert torch.equal(copied(x), norm(x))
    nn.init.zeros_(copied.weight)
    assert float(copied(x).detach().abs().max()) == 0.0
    assert float(norm(x).detach().abs().max()) > 0.1
    assert modules.unswap(copied)
    assert type(copied) is nn.LayerNorm


@pytest.mark.parametrize("family", FAMILIES)
def test_a_checkpoint_of_a_patched_model_is_byte_identical_and_loads_unchanged(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path / "before")
    expected = logits(model)
    normswap.patch(model).save_pretrained(tmp_path / "after")
    assert files(tmp_path / "before")
    assert files(tmp_path / "after") == files(tmp_path / "before")
    again, report = model_class(family).from_pretrained(tmp_path / "after", output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    saved, loaded = model.state_dict(), again.state_dict()
    assert loaded.keys() == saved.keys()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in saved.items())
    assert_same(logits(again), expected, family)
    normswap.patch(again).save_pretrained(tmp_path / "again")
    assert files(tmp_path / "again") == files(tmp_path / "before")


def initialised(model: Any) -> dict[str, torch.Tensor]:
    """Have transformers initialise every module anew, as if none of its weights had been loaded."""
    for thing in (*model.modules(), *model.parameters(), *model.buffers()):
        thing._is_hf_initialized = False
    torch.manual_seed(1)
    model.init_weights()
    one_by_one = copy.deepcopy(model.state_dict())
    torch.manual_seed(2)
    with torch.no_grad():
        for module in model.modules():
            if module is not model:
                model._init_weights(module)
    return {f"all {name}": tensor for name, tensor in one_by_one.items()} | model.state_dict()


@pytest.mark.parametrize("family", FAMILIES)
def test_initialises_as_an_unpatched_model_does(family: str) -> None:
    expected = initialised(tiny(family))
    model = patched(family)
    gains = {f"{name}.{spec.gain_name}": spec for name, _, spec in modules.fused_norms(model)}
    before = {name: model.state_dict()[name].clone() for name in gains}
    got = initialised(model)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
    for name, spec in gains.items():
        # A gain of 1: stored as 0 where the class adds 1 to it.
        assert torch.equal(got[name], torch.full_like(got[name], 1.0 - spec.offset))
        assert not torch.equal(got[name], before[name])


@pytest.mark.parametrize("way", ["assign", "to_empty"])
@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "qwen3_next"])
def test_a_model_patched_on_the_meta_device_serves_once_it_has_weights(family: str, way: str) -> None:
    model = tiny(family)
    with torch.device("meta"):
        empty = model_class(family)(model.config).eval()
    normswap.patch(empty)
    assert all(parameter.is_meta for parameter in empty.parameters())
    if way == "assign":
        empty.load_state_dict(model.state_dict(), assign=True)
    else:
        empty.to_empty(device="cpu").load_state_dict(model.state_dict())
    empty.tie_weights()
    # Tables of positions are in no state dict.
    for name, buffer in model.named_buffers():
        owner, _, last = name.rpartition(".")
        empty.get_submodule(owner)._buffers[last] = buffer.clone()
    for name, module in model.named_modules():
        if name.endswith("rotary_emb"):
            vars(empty.get_submodule(name)).update(original_inv_freq=module.original_inv_freq)
    assert_same(logits(empty), logits(model), family)
