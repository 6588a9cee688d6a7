"""Parametrizations, pruning and weight norm on a norm's gain, put on before the patch or after it."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
from contract_cases import count_calls
from torch import nn
from torch.nn.utils import parametrize, prune
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules

pytestmark = pytest.mark.core
CLASSES = [LlamaRMSNorm, nn.LayerNorm]


class Doubled(nn.Module):
    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return 2.0 * stored

    def right_inverse(self, wanted: torch.Tensor) -> torch.Tensor:
        return 0.5 * wanted


class Tripled(nn.Module):
    def forward(self, stored: torch.Tensor) -> torch.Tensor:
        return 3.0 * stored


def norm_of(cls: type[nn.Module]) -> nn.Module:
    norm = cls(16)
    nn.init.normal_(norm.weight)
    return norm


X = torch.linspace(-2.0, 3.0, 64).reshape(4, 16)


@pytest.mark.parametrize("first", ["patched first", "parametrized first"])
@pytest.mark.parametrize("last", ["unpatched last", "parametrization removed last"])
@pytest.mark.parametrize("cls", CLASSES)
def test_a_parametrized_gain_is_the_one_that_is_used(
    cls: type[nn.Module], first: str, last: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = count_calls(monkeypatch, [cls])
    norm = norm_of(cls)
    plain = norm(X)
    steps: list[Callable[[], object]] = [
        lambda: normswap.patch(nn.Sequential(norm)),
        lambda: parametrize.register_parametrization(norm, "weight", Tripled()),
    ]
    for step in steps if first == "patched first" else reversed(steps):
        step()
    tripled = norm(X)
    assert isinstance(norm, cls)
    assert parametrize.is_parametrized(norm, "weight")
    assert parametrize.type_before_parametrizations(norm).__name__ == cls.__name__
    assert type(norm).__name__ == f"Parametrized{cls.__name__}"
    calls.clear()
    assert torch.equal(norm(X), tripled)
    assert calls == []
    assert torch.equal(tripled, modules.original_forward(norm, X))
    assert not torch.allclose(tripled, plain)
    norm(X).sum().backward()
    assert float(norm.parametrizations.weight.original.grad.abs().max()) > 0.1
    undone: list[Callable[[], object]] = [
        lambda: parametrize.remove_parametrizations(norm, "weight"),
        lambda: modules.unswap(norm),
    ]
    for step in undone if last == "unpatched last" else reversed(undone):
        step()
        torch.testing.assert_close(norm(X), tripled)
    assert type(norm) is cls
    assert isinstance(norm.weight, nn.Parameter)
    assert not hasattr(norm, "_normswap")


def test_unpatch_gives_back_the_very_class_that_was_there() -> None:
    norm = parametrize.register_parametrization(nn.LayerNorm(16), "weight", Doubled())
    before, members = type(norm), set(vars(type(norm)))
    model = normswap.patch(nn.Sequential(norm))
    assert type(norm) is not before
    assert isinstance(norm, modules.FusedNorm)
    normswap.unpatch(model)
    assert type(norm) is before
    assert set(vars(before)) - members == {"_normswap_twin"}


def test_what_is_parametrized_or_freed_between_patch_and_unpatch_stays_so() -> None:
    norm = parametrize.register_parametrization(norm_of(nn.LayerNorm), "weight", Doubled())
    model = normswap.patch(nn.Sequential(norm))
    parametrize.register_parametrization(norm, "bias", Doubled())
    parametrize.remove_parametrizations(norm, "weight")
    nn.init.normal_(norm.parametrizations.bias.original)
    expected = norm(X)
    normswap.unpatch(model)
    assert parametrize.is_parametrized(norm, "bias")
    assert not parametrize.is_parametrized(norm, "weight")
    assert isinstance(norm.weight, nn.Parameter)
    torch.testing.assert_close(norm(X), expected)
    parametrize.remove_parametrizations(norm, "bias")
    assert type(norm) is nn.LayerNorm


def test_a_parametrized_norm_is_set_copied_cached_and_told_apart() -> None:
    model = nn.Sequential(norm_of(nn.LayerNorm), norm_of(nn.LayerNorm))
    parametrize.register_parametrization(model[0], "weight", Doubled())
    normswap.patch(model)
    assert [spec.gain_name for _, _, spec in modules.fused_norms(model)] == ["weight", "weight"]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(X), model(X))
    with parametrize.cached():
        assert model[0].weight is model[0].weight
        assert torch.equal(copied(X), model(X))
    model[0].weight = torch.full((16,), 4.0)
    assert torch.equal(model[0].parametrizations.weight.original, torch.full((16,), 2.0))
    assert not torch.allclose(copied(X), model(X))
    normswap.unpatch(copied)
    assert isinstance(model[0], modules.FusedNorm)


def test_looking_at_a_model_does_not_run_its_parametrizations() -> None:
    linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))
    norm = norm_of(nn.LayerNorm)
    model = nn.Sequential(linear, norm).train()
    before = copy.deepcopy(model.state_dict())
    normswap.inspect(model)
    normswap.patch(model)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("first", ["patched first", "weight norm first"])
def test_weight_norm_of_a_gain(first: str) -> None:
    norm = norm_of(LlamaRMSNorm)
    if first == "patched first":
        normswap.patch(nn.Sequential(norm))
    nn.utils.parametrizations.weight_norm(norm, "weight", dim=None)
    if first == "weight norm first":
        normswap.patch(nn.Sequential(norm))
    assert isinstance(norm, modules.FusedNorm)
    with torch.no_grad():
        norm.parametrizations.weight.original0.mul_(3.0)
    assert torch.equal(norm(X), modules.original_forward(norm, X))
    norm(X).square().sum().backward()
    assert norm.parametrizations.weight.original0.grad is not None


@pytest.mark.parametrize("how", ["prune", "weight norm of old"])
@pytest.mark.parametrize("first", ["patched first", "patched last"])
def test_a_gain_that_a_hook_computes_before_each_call(first: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = count_calls(monkeypatch, [LlamaRMSNorm])
    norm = norm_of(LlamaRMSNorm)
    if first == "patched first":
        normswap.patch(nn.Sequential(norm))
    if how == "prune":
        prune.l1_unstructured(norm, "weight", amount=0.5)
        stored = norm.weight_orig
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.weight_norm(norm, "weight", dim=None)
        stored = norm.weight_g
    if first == "patched last":
        normswap.patch(nn.Sequential(norm))
    with torch.no_grad():
        stored.mul_(3.0)
    calls.clear()
    got = norm(X)
    assert calls == []
    assert torch.equal(got, modules.original_forward(norm, X))
    assert (int((got == 0).sum()) == 32) is (how == "prune")
    got.sum().backward()
    assert float(stored.grad.abs().max()) > 0.1
    if how == "prune":
        prune.remove(norm, "weight")
    else:
        nn.utils.remove_weight_norm(norm, "weight")
    assert torch.equal(norm(X), got)
    assert modules.unswap(norm)
    assert type(norm) is LlamaRMSNorm
    assert torch.equal(norm(X), got)
