"""A swapped norm reads its parameters when it runs: replaced, retyped, tied or frozen, they are those of the module."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from contract_cases import IDS, assert_same, count_calls, gradients, logits, patched, tiny
from torch import nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules

pytestmark = pytest.mark.core
DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
X = torch.linspace(-2.0, 3.0, 64).reshape(4, 16)


def swapped(cls: type[nn.Module] = LlamaRMSNorm) -> nn.Module:
    norm = cls(16)
    nn.init.normal_(norm.weight)
    normswap.patch(nn.Sequential(norm))
    return norm


def same_as_original(norm: nn.Module, x: torch.Tensor) -> bool:
    got, expected = norm(x), modules.original_forward(norm, x)
    return got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, nn.LayerNorm])
def test_a_gain_given_by_hand_is_the_one_that_is_used(cls: type[nn.Module]) -> None:
    norm = swapped(cls)
    before = norm(X)
    norm.weight = nn.Parameter(torch.linspace(1.0, 2.0, 16))
    assert not torch.allclose(norm(X), before)
    assert same_as_original(norm, X)
    norm(X).sum().backward()
    assert norm.weight.grad is not None
    norm.weight.data = torch.linspace(3.0, 5.0, 16)
    assert same_as_original(norm, X)


@pytest.mark.parametrize("cls", [LlamaRMSNorm, GemmaRMSNorm])
def test_a_gain_of_another_dtype_gives_what_the_class_gives(cls: type[nn.Module]) -> None:
    norm = swapped(cls)
    gain = norm.weight.data
    for gain_dtype in DTYPES:
        norm.weight.data = gain.to(gain_dtype)
        for x_dtype in DTYPES:
            assert same_as_original(norm, X.to(x_dtype)), (gain_dtype, x_dtype)


def test_a_gain_that_is_gone_goes_the_way_of_the_original() -> None:
    norm = swapped(nn.LayerNorm)
    norm.weight = None
    assert same_as_original(norm, X)
    norm.bias = None
    assert same_as_original(norm, X)


@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_used(assign: bool) -> None:
    model, other = patched("llama"), tiny("llama")
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.25)
    before, old = logits(model), model.model.norm.weight
    state = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    result = model.load_state_dict(state, assign=assign)
    assert not result.missing_keys
    assert not result.unexpected_keys
    assert (model.model.norm.weight is old) is not assign
    assert torch.equal(logits(model), logits(other))
    assert not torch.allclose(logits(model), before)


def test_state_dict_hooks_see_the_norm() -> None:
    norm = swapped()
    seen: list[str] = []
    norm.register_state_dict_post_hook(lambda module, state, prefix, local: seen.append(prefix + "saved"))
    norm.register_load_state_dict_pre_hook(lambda module, state, *rest: seen.append("loaded"))
    norm.register_load_state_dict_post_hook(lambda module, keys: seen.append("done"))
    norm.load_state_dict(norm.state_dict(prefix=""))
    assert seen == ["saved", "loaded", "done"]
    assert [name for name, _ in norm.named_parameters()] == list(norm.state_dict()) == ["weight"]


def test_one_norm_in_two_places_stays_one_through_copies_and_back() -> None:
    norm = nn.LayerNorm(16)
    model = nn.ModuleDict({"a": norm, "linear": nn.Linear(16, 16), "b": norm})
    keys = list(model.state_dict())
    normswap.patch(model)
    assert model["a"] is model["b"] is norm
    copied = copy.deepcopy(model)
    assert copied["a"] is copied["b"] is not norm
    assert isinstance(copied["a"], modules.FusedNorm)
    assert list(copied.state_dict()) == keys
    normswap.unpatch(copied)
    assert type(copied["a"]) is nn.LayerNorm
    assert copied["a"] is copied["b"]


def test_a_parameter_of_two_norms_stays_one_through_everything(tmp_path: Any) -> None:
    model = nn.ModuleDict({"a": LlamaRMSNorm(16), "b": LlamaRMSNorm(16)})
    model["b"].weight = model["a"].weight
    nn.init.normal_(model["a"].weight)
    normswap.patch(model)
    torch.save(model, tmp_path / "model.pt")
    for one in (model, copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert len(list(modules.fused_norms(one))) == 2
        assert one["a"].weight is one["b"].weight
        assert len(list(one.parameters())) == 1
        (one["a"](X) + one["b"](X.flip(0))).sum().backward()
        alone = [torch.autograd.grad(one["a"](x).sum(), one["a"].weight)[0] for x in (X, X.flip(0))]
        torch.testing.assert_close(one["a"].weight.grad, alone[0] + alone[1])
        with torch.no_grad():
            one["a"].weight.fill_(2.0)
        assert torch.equal(one["a"](X), one["b"](X))
        normswap.unpatch(one)
        assert one["a"].weight is one["b"].weight


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "mamba2"])
@pytest.mark.parametrize("how", ["half", "bfloat16", "double", "to", "to_empty"])
def test_a_model_that_is_converted_is_as_the_unpatched_one_is(family: str, how: str) -> None:
    plain, model = tiny(family), patched(family)
    state = copy.deepcopy(plain.state_dict())
    for one in (plain, model):
        if how == "to":
            one.to("cpu", torch.bfloat16, non_blocking=True)
        elif how == "to_empty":
            one.to("meta")
            assert all(parameter.is_meta for parameter in one.parameters())
            buffers = dict(tiny(family).named_buffers())
            one.to_empty(device="cpu")
            one.load_state_dict(state)
            for name, buffer in one.named_buffers():
                buffer.copy_(buffers[name])
        else:
            getattr(one, how)()
    dtypes = [parameter.dtype for parameter in plain.parameters()]
    assert [parameter.dtype for parameter in model.parameters()] == dtypes
    assert_same(logits(model), logits(plain), family)


def test_modes_and_frozen_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, [LlamaRMSNorm])
    model = patched("llama")
    calls.clear()
    with torch.inference_mode():
        out = model(input_ids=IDS).logits
    assert out.is_inference()
    assert torch.equal(out, logits(model))
    assert model.train().model.norm.training
    assert not model.eval().model.norm.training
    assert gradients(model)["model.norm.weight"].abs().max() > 0
    model.zero_grad(set_to_none=False)
    assert float(model.model.norm.weight.grad.abs().max()) == 0.0
    model.requires_grad_(False)
    assert not model(input_ids=IDS).logits.requires_grad
    model.model.norm.requires_grad_(True)
    assert list(gradients(model)) == ["model.norm.weight"]
    assert calls == []


@pytest.mark.parametrize("family", ["llama", "gpt2", "mamba2"])
def test_shapes_are_followed_on_the_meta_device(family: str) -> None:
    model = patched(family).to("meta")
    ids = IDS.to("meta")
    mask = torch.zeros(2, 1, 10, 10, device="meta") if family != "mamba2" else None
    try:
        copy.deepcopy(tiny(family)).to("meta")(input_ids=ids, attention_mask=mask, use_cache=False)
    except RuntimeError as error:
        pytest.skip(f"the unpatched model does not run there: {error}")
    got = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert got.is_meta
    assert got.shape == logits(tiny(family)).shape


def test_the_classes_and_other_models_are_untouched() -> None:
    forwards = {cls: cls.forward for cls in (LlamaRMSNorm, nn.LayerNorm, nn.RMSNorm, nn.Module)}
    members = {cls: set(vars(cls)) for cls in forwards}
    other = tiny("llama")
    normswap.patch(nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4)))
    model = patched("llama")
    assert all(cls.forward is forward for cls, forward in forwards.items())
    assert all(set(vars(cls)) == names for cls, names in members.items())
    later = [nn.LayerNorm(4), nn.RMSNorm(4), LlamaRMSNorm(4), other.model.norm, tiny("llama").model.norm]
    assert [type(norm) for norm in later] == [nn.LayerNorm, nn.RMSNorm, LlamaRMSNorm, LlamaRMSNorm, LlamaRMSNorm]
    assert not any(isinstance(norm, modules.FusedNorm) for norm in later)
    assert torch.equal(logits(other), logits(model))
    assert list(modules.fused_norms(other)) == []
