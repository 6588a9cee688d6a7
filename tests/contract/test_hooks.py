"""Hooks on norms, as interpretability tools put them there, fire with the tensors of the unpatched run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from contract_cases import IDS, count_calls, logits, tiny
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap

pytestmark = pytest.mark.core
ORDERS = ["hooks first", "patched first"]


def watch(model: nn.Module) -> list[tuple[str, Any]]:
    """Put every kind of hook on the last norm; what they see comes into the list that is returned."""
    seen: list[tuple[str, Any]] = []
    norm = model.model.norm
    norm.register_forward_pre_hook(lambda m, args: seen.append(("before", args[0])))
    norm.register_forward_pre_hook(lambda m, args, kwargs: seen.append(("given", args[0])), with_kwargs=True)
    norm.register_forward_hook(lambda m, args, out: seen.append(("after", out)))
    norm.register_forward_hook(lambda m, args, kwargs, out: seen.append(("last", out)), with_kwargs=True)
    norm.register_full_backward_pre_hook(lambda m, grad: seen.append(("backward", grad[0])))
    norm.register_full_backward_hook(lambda m, inner, outer: seen.append(("input", inner[0])))
    norm.weight.register_hook(lambda grad: seen.append(("gain", grad)))
    return seen


@pytest.mark.parametrize("order", ORDERS)
def test_hooks_fire_in_order_with_the_same_tensors(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model = tiny("llama"), tiny("llama")
    calls = count_calls(monkeypatch, [LlamaRMSNorm])
    if order == "patched first":
        normswap.patch(model)
    wanted, seen = watch(plain), watch(model)
    if order == "hooks first":
        normswap.patch(model)
    plain(input_ids=IDS, labels=IDS).loss.backward()
    calls.clear()
    model(input_ids=IDS, labels=IDS).loss.backward()
    assert calls == []
    assert sorted(name for name, _ in wanted) == sorted(
        ["before", "given", "after", "last", "backward", "input", "gain"]
    )
    assert [name for name, _ in seen[:5]] == [name for name, _ in wanted[:5]]
    for name, tensor in seen:
        expected = dict(wanted)[name]
        if name in ("input", "gain"):
            torch.testing.assert_close(tensor, expected, rtol=1e-5, atol=1e-7)
        else:
            assert torch.equal(tensor, expected), name


@pytest.mark.parametrize("order", ORDERS)
def test_a_hook_that_replaces_the_output_or_the_input_has_its_way(order: str) -> None:
    def hook(model: nn.Module) -> None:
        model.model.norm.register_forward_hook(lambda m, args, out: 0.5 * out)
        model.model.layers[0].input_layernorm.register_forward_pre_hook(lambda m, args: (args[0].flip(-1),))

    plain, model = tiny("llama"), tiny("llama")
    before = logits(plain)
    hook(plain)
    if order == "patched first":
        normswap.patch(model)
    hook(model)
    if order == "hooks first":
        normswap.patch(model)
    assert torch.equal(logits(model), logits(plain))
    assert not torch.allclose(logits(model), before)


@pytest.mark.parametrize("order", ORDERS)
def test_a_hook_that_is_always_called_is_called_when_the_norm_fails(order: str) -> None:
    norm = LlamaRMSNorm(8)
    seen: list[Any] = []
    if order == "patched first":
        normswap.patch(nn.Sequential(norm))
    handle = norm.register_forward_hook(lambda m, args, out: seen.append(out), always_call=True)
    if order == "hooks first":
        normswap.patch(nn.Sequential(norm))
    with pytest.raises(TypeError):
        norm(torch.ones(2, 8), "nonsense")
    assert seen == [None]
    norm(torch.ones(2, 8))
    assert len(seen) == 2
    handle.remove()
    norm(torch.ones(2, 8))
    assert len(seen) == 2


def test_a_handle_taken_before_the_patch_removes_its_hook_after_unpatch() -> None:
    model = tiny("llama")
    seen: list[int] = []
    handle = model.model.norm.register_forward_hook(lambda *args: seen.append(1))
    normswap.unpatch(normswap.patch(model))
    logits(model)
    handle.remove()
    logits(model)
    assert seen == [1]


def test_hooks_for_all_modules_see_swapped_norms_by_their_name() -> None:
    model = normswap.patch(tiny("llama"))
    names: list[str] = []
    with nn.modules.module.register_module_forward_hook(lambda m, args, out: names.append(type(m).__name__)):
        logits(model)
    assert names.count("LlamaRMSNorm") == 5
