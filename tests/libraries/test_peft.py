"""PEFT wraps norms and copies them: patched before and after, the adapted model computes and learns the same."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_checkpoints import tiny_llama
from torch import nn

import normswap
from normswap import modules

peft = pytest.importorskip("peft", reason="needs peft, which is not installed")

pytestmark = pytest.mark.core

IDS = torch.arange(20).reshape(2, 10)
Configure = Callable[[], "peft.PeftConfig"]


def lora() -> peft.PeftConfig:
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], modules_to_save=["norm"], init_lora_weights=False)


def norm_tuning() -> peft.PeftConfig:
    return peft.LNTuningConfig(target_modules=["input_layernorm", "post_attention_layernorm"], task_type="CAUSAL_LM")


# How many norms are copied, and trained, by each.
ADAPTERS = {"lora": (lora, 5), "ln_tuning": (norm_tuning, 4)}
ORDERS = ("plain", "patch_then_wrap", "wrap_then_patch")


@contextmanager
def peft_is_late() -> Iterator[None]:
    """It reads an attribute that transformers has renamed, and knows no norm but ``nn.LayerNorm``."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Unsupported layer type .*Norm", UserWarning)
        warnings.filterwarnings("ignore", ".*is_gradient_checkpointing. is deprecated", FutureWarning)
        yield


def adapted(configure: Configure, order: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    base = tiny_llama().to(dtype)
    if order == "patch_then_wrap":
        normswap.patch(base)
    torch.manual_seed(1)
    with peft_is_late():
        model = peft.get_peft_model(base, configure())
    with torch.no_grad():
        # Away from the originals that they were copied from, else the wrong one of the two would do.
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and "norm" in name:
                parameter.mul_(1.5).add_(0.1)
    return normswap.patch(model) if order == "wrap_then_patch" else model


def swapped(model: nn.Module) -> int:
    return len(list(modules.fused_norms(model)))


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.fixture(params=ADAPTERS)
def adapter(request: pytest.FixtureRequest) -> tuple[Configure, int]:
    return ADAPTERS[request.param]


@pytest.fixture(params=ORDERS[1:])
def order(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_the_output_is_the_same(adapter: tuple[Configure, int], order: str, dtype: torch.dtype) -> None:
    configure, copies = adapter
    plain, patched = (adapted(configure, which, dtype) for which in ("plain", order))
    assert swapped(patched) == 5 + copies
    expected = logits(plain)
    assert torch.equal(logits(patched), expected)
    with plain.disable_adapter(), patched.disable_adapter():
        without = logits(plain)
        assert torch.equal(logits(patched), without)
    assert not torch.equal(without, expected)


def test_the_copies_are_trained_and_the_originals_are_not(adapter: tuple[Configure, int], order: str) -> None:
    configure, copies = adapter
    gradients = []
    for which in ("plain", order):
        model = adapted(configure, which).train()
        model(input_ids=IDS, labels=IDS).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    expected, got = gradients
    assert got.keys() == expected.keys()
    assert sum("norm" in name for name in got) == copies
    for name, gradient in got.items():
        assert float(gradient.abs().max()) > 0, name
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-7)


def test_ten_steps_of_training_end_in_the_same_place(adapter: tuple[Configure, int], order: str) -> None:
    configure, _ = adapter
    losses = []
    for which in ("plain", order):
        model = adapted(configure, which).train()
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
        steps = []
        for _ in range(10):
            optimizer.zero_grad()
            loss = model(input_ids=IDS, labels=IDS).loss
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        losses.append(steps)
    expected, got = losses
    assert expected[-1] < expected[0]
    assert got == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("end", ["merge_and_unload", "unload"])
def test_the_base_comes_back_with_its_norms_swapped(adapter: tuple[Configure, int], order: str, end: str) -> None:
    configure, _ = adapter
    plain, patched = (getattr(adapted(configure, which), end)() for which in ("plain", order))
    assert swapped(patched) == 5
    expected = logits(plain)
    assert torch.equal(logits(patched), expected)
    normswap.unpatch(patched)
    assert swapped(patched) == 0
    assert [type(module) for module in patched.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(logits(patched), expected)


def test_unpatching_undoes_it_whatever_came_first(adapter: tuple[Configure, int], order: str) -> None:
    configure, _ = adapter
    plain, patched = (adapted(configure, which) for which in ("plain", order))
    normswap.unpatch(patched)
    assert [type(module) for module in patched.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(logits(patched), logits(plain))


def test_a_saved_adapter_is_the_same_file_and_loads_on_either(
    adapter: tuple[Configure, int], order: str, tmp_path: Path
) -> None:
    configure, _ = adapter
    plain, patched = (adapted(configure, which) for which in ("plain", order))
    expected = logits(plain)
    plain.save_pretrained(tmp_path / "plain")
    patched.save_pretrained(tmp_path / "patched")
    saved, wanted = (load_file(tmp_path / which / "adapter_model.safetensors") for which in ("patched", "plain"))
    assert saved.keys() == wanted.keys()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in saved.items())
    for base in (tiny_llama(), normswap.patch(tiny_llama())):
        with peft_is_late():
            again = peft.PeftModel.from_pretrained(base, tmp_path / "patched")
        assert torch.equal(logits(again), expected)
        assert torch.equal(logits(normswap.patch(again)), expected)


def test_a_second_adapter_copies_a_swapped_norm_and_switches(order: str) -> None:
    plain, patched = (adapted(lora, which) for which in ("plain", order))
    for model in (plain, patched):
        torch.manual_seed(2)
        model.add_adapter("other", lora())
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if "modules_to_save.other" in name:
                    parameter.mul_(0.5)
    assert swapped(patched) == 15
    outputs = {}
    for name in ("default", "other"):
        plain.set_adapter(name)
        patched.set_adapter(name)
        outputs[name] = logits(plain)
        assert torch.equal(logits(patched), outputs[name])
    assert not torch.equal(*outputs.values())
