"""Models whose linears a library has quantized: norms are swapped before or after, weights are not touched."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from aside import bring
from quantized_tensors import IntegerLinear, IntegerParameter, NotingTensor, PackedTensor, with_integer_linears
from tiny_checkpoints import tiny_bert, tiny_llama
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules

pytestmark = pytest.mark.core

IDS = torch.arange(20).reshape(2, 10)
ORDERS = ("quantize_then_patch", "patch_then_quantize")
Quantize = Callable[[nn.Module], object]


@torch.no_grad()
def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


def check(build: Callable[[], nn.Module], quantize: Quantize, order: str, norms: int) -> nn.Module:
    """Quantized and patched in this order, a model computes what it computes quantized alone."""
    plain, model = build(), build()
    quantize(plain)
    for step in order.split("_then_"):
        normswap.patch(model) if step == "patch" else quantize(model)
    plan = normswap.inspect(model).plan
    assert (len(list(modules.fused_norms(model))), len(plan.decisions)) == (norms, norms)
    expected = logits(plain)
    assert torch.equal(logits(model), expected)
    assert not torch.equal(expected, logits(build()))
    linears = [type(getattr(module, "weight", None)) for module in model.modules()]
    assert linears == [type(getattr(module, "weight", None)) for module in plain.modules()]
    normswap.unpatch(model)
    assert [type(module) for module in model.modules()] == [type(module) for module in plain.modules()]
    assert torch.equal(logits(model), expected)
    return model


@pytest.fixture(scope="module")
def torchao() -> ModuleType:
    return bring("torchao.quantization")


def llama() -> nn.Module:
    return tiny_llama(hidden_size=64, intermediate_size=64)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    "config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"]
)
def test_torchao(torchao: ModuleType, config: str, order: str) -> None:
    def quantize(model: nn.Module) -> None:
        torchao.quantize_(model, getattr(torchao, config)())

    model = check(llama, quantize, order, 5)
    assert type(model.model.layers[0].mlp.up_proj.weight).__module__.startswith("torchao")


@pytest.mark.parametrize("order", ORDERS)
def test_torchao_in_bfloat16_with_layer_norms(torchao: ModuleType, order: str) -> None:
    check(
        lambda: tiny_bert().bfloat16(),
        lambda model: torchao.quantize_(model, torchao.Int8WeightOnlyConfig()),
        order,
        6,
    )


def test_a_copy_of_a_quantized_patched_model_is_one_too(torchao: ModuleType) -> None:
    model = llama()
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    expected = logits(normswap.patch(model))
    again = copy.deepcopy(model)
    assert len(list(modules.fused_norms(again))) == 5
    assert torch.equal(logits(again), expected)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("build", [tiny_llama, tiny_bert])
def test_linears_of_another_base_class_with_integers_for_weights(build: Callable[[], nn.Module], order: str) -> None:
    model = check(build, with_integer_linears, order, 5 if build is tiny_llama else 6)
    assert any(isinstance(module, IntegerLinear) for module in model.modules())
    assert any(isinstance(parameter, IntegerParameter) for parameter in model.parameters())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("bits", ["eight", "four"])
def test_bitsandbytes(bits: str, order: str) -> None:
    layers = bring("bitsandbytes.nn")

    def quantized(linear: nn.Linear) -> nn.Module:
        sizes, bias = (linear.in_features, linear.out_features), linear.bias is not None
        if bits == "four":
            new = layers.Linear4bit(*sizes, bias, compute_dtype=torch.float32, quant_type="nf4")
        else:
            new = layers.Linear8bitLt(*sizes, bias, has_fp16_weights=False)
        new.load_state_dict(linear.state_dict())
        # Moving them to their device is what quantizes the weights.
        return new.to("cpu")

    def quantize(model: nn.Module) -> None:
        for module in list(model.modules()):
            for name, child in list(module.named_children()):
                if type(child) is nn.Linear and name != "lm_head":
                    setattr(module, name, quantized(child))

    check(llama, quantize, order, 5)


def norm_with(kind: type[nn.Module], wrap: Callable[[torch.Tensor], torch.Tensor] | None, frozen: bool) -> nn.Module:
    torch.manual_seed(0)
    norm = kind(16)
    with torch.no_grad():
        norm.weight.add_(torch.randn(16))
    if wrap is not None:
        norm.weight = nn.Parameter(wrap(norm.weight.detach()), requires_grad=not frozen)
    return norm


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("wrap", [PackedTensor.pack, lambda w: w.as_subclass(NotingTensor)], ids=["packed", "noting"])
@pytest.mark.parametrize("kind", [nn.LayerNorm, LlamaRMSNorm])
@pytest.mark.parametrize("first", [False, True], ids=["before", "after"])
def test_gains_of_a_subclass_of_tensor(
    kind: type[nn.Module], wrap: Callable[[torch.Tensor], torch.Tensor], frozen: bool, first: bool
) -> None:
    """One has no memory that a kernel could read, the other is told of every call; put there before or after."""
    original, other = norm_with(kind, wrap, frozen), norm_with(kind, wrap, frozen)
    model = nn.Sequential(norm_with(kind, None, frozen) if first else other)
    normswap.patch(model)
    model[0].weight = other.weight
    assert len(list(modules.fused_norms(model))) == 1
    results = []
    for norm in (original, model):
        x = torch.linspace(-3, 4, 80).reshape(5, 16).requires_grad_()
        y = norm(x)
        y.pow(2).sum().backward()
        results.append((y, x.grad, original.weight.grad if norm is original else other.weight.grad))
    (expected, *gradients), (got, *others) = results
    assert type(got) is type(expected)
    assert torch.equal(got, expected)
    for gradient, wanted in zip(others, gradients, strict=True):
        assert (gradient is None) == (wanted is None)
        if gradient is not None and wanted is not None:
            torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-5)
    assert (others[1] is None) == frozen


@pytest.mark.parametrize("kind", [nn.LayerNorm, LlamaRMSNorm])
def test_a_gain_of_integers_is_refused(kind: type[nn.Module]) -> None:
    """Llama's class computes with it all the same; no fused norm has been proved to."""
    model = nn.Sequential(nn.LayerNorm(8), kind(16))
    model[1].weight = nn.Parameter(torch.full((16,), 3, dtype=torch.int8), requires_grad=False)
    normswap.patch(model)
    (refusal,) = normswap.inspect(model).plan.refusals
    assert refusal.name == "1"
    assert "int8" in refusal.reason
