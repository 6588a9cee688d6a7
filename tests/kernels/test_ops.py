"""The operations: results and gradients as the oracle has them, and what each option does."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import normswap_kernels
import pytest
import torch
from normswap_kernels import add_layer_norm, add_rms_norm, layer_norm, layers, rms_norm, rms_norm_quant
from normswap_kernels.reference import exact, quantized, rounded
from operation_cases import CALLS, EPS, formula_of, listed, oracle, tensors_of
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


@pytest.fixture(params=CALLS)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_import_loads_no_triton_and_builds_nothing() -> None:
    code = "import sys, normswap_kernels; sys.exit('triton' in sys.modules or 'ctypes.util' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)


def test_public_names_exist() -> None:
    assert all(hasattr(normswap_kernels, name) for name in normswap_kernels.__all__)
    assert normswap_kernels.BACKENDS == ("auto", "triton", "cpu", "interpret")


@pytest.mark.parametrize("name", ("ops", "fused", "backends", "launch"))
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"normswap_kernels.{name}")
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("shape", ((8,), (3, 8), (2, 3, 12)))
def test_results_and_gradients_are_those_of_the_oracle(case: str, shape: tuple[int, ...]) -> None:
    _, call, _ = CALLS[case]
    ours = [t.requires_grad_() for t in tensors_of(case, shape, FP64)]
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    results, expected = listed(call(*ours)), listed(oracle(case, formula_of(case, FP64), *theirs))
    grads = [torch.randn_like(result) for result in results]
    torch.autograd.backward(results, grads)
    torch.autograd.backward(expected, grads)
    for a, b in zip(results, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    for mine, its in zip(ours, theirs, strict=True):
        assert (mine.grad is None) == (its.grad is None)
        if mine.grad is not None:
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-9, atol=1e-9)


def test_first_and_second_derivatives_are_those_of_finite_differences(case: str) -> None:
    _, call, _ = CALLS[case]
    x, other, weight, bias = (t.requires_grad_() for t in tensors_of(case, (3, 8), FP64))

    def function(*arguments: Tensor) -> Any:
        return call(*arguments) if "gate" not in case else call(*arguments, bias)

    given = {True: (x, other, weight), False: (x, other, weight, bias)}["gate" in case]
    if "gate" not in case and "add" not in case:
        given = (x, weight, bias)
        assert torch.autograd.gradcheck(lambda a, w, b: call(a, other, w, b), given)
        assert torch.autograd.gradgradcheck(lambda a, w, b: call(a, other, w, b), given)
        return
    assert torch.autograd.gradcheck(function, given)
    assert torch.autograd.gradgradcheck(function, given)


def test_the_sum_alone_may_be_used() -> None:
    for call in (add_rms_norm, add_layer_norm):
        x, residual = torch.randn(2, 4, requires_grad=True), torch.randn(2, 4, requires_grad=True)
        _, summed = call(x, residual, eps=EPS)
        (3 * summed).sum().backward()
        assert torch.equal(x.grad, torch.full((2, 4), 3.0)) and torch.equal(residual.grad, x.grad)
        x.grad.zero_()
        assert residual.grad.count_nonzero() == 8


def test_gradients_in_mixed_dtypes_have_the_dtype_of_their_own_tensor(case: str) -> None:
    name, call, _ = CALLS[case]
    x = torch.randn(4, 8, dtype=BF16, requires_grad=True)
    other = torch.randn(4, 8, requires_grad=True)
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, dtype=BF16, requires_grad=True)
    sum(result.float().sum() for result in listed(call(x, other, weight, bias))).backward()
    assert x.grad is not None and x.grad.dtype == BF16 and weight.grad is not None and weight.grad.dtype == FP32
    if name == "rms_norm":
        assert other.grad is None and bias.grad is not None and bias.grad.dtype == BF16


def test_frozen_parameters_get_no_gradient(case: str) -> None:
    _, call, _ = CALLS[case]
    x, other, weight, bias = tensors_of(case, (4, 8), FP32)
    x.requires_grad_()
    sum(result.sum() for result in listed(call(x, other, weight, bias))).backward()
    assert x.grad is not None and weight.grad is None and bias.grad is None


def test_gradients_in_bf16_are_near_the_eager_classs() -> None:
    norm = LlamaRMSNorm(64).to(BF16)
    x = torch.randn(50, 64).to(BF16).requires_grad_()
    grad = torch.randn(50, 64).to(BF16)
    truth = x.detach().double().requires_grad_()
    exact(formula_of("rms", FP64, eps=1e-6), truth, norm.weight.detach())[0].backward(grad.double())
    norm(x).backward(grad)
    theirs = (x.grad.double() - truth.grad).abs().max()
    x.grad = None
    rms_norm(x, norm.weight, eps=1e-6, round_dtype=BF16).backward(grad)
    assert (x.grad.double() - truth.grad).abs().max() <= 2 * theirs


@pytest.mark.parametrize("dtype", (FP32, FP16, BF16), ids=str)
def test_gradients_of_a_rounded_scale_are_the_eager_classs(dtype: torch.dtype) -> None:
    module = pytest.importorskip("transformers.models.deepseek_v4.modeling_deepseek_v4", reason="it is newer")
    x, grad = (torch.randn(400, 96).to(dtype) for _ in range(2))
    x = (3 * x).requires_grad_()
    (theirs,) = torch.autograd.grad(module.DeepseekV4UnweightedRMSNorm()(x), x, grad)
    (ours,) = torch.autograd.grad(rms_norm(x, eps=1e-6, scale_dtype=dtype), x, grad)
    wide = x.detach().double().requires_grad_()
    scale = (wide.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    straight = scale + (x.detach().float().square().mean(-1, keepdim=True).add(1e-6).rsqrt().to(dtype) - scale).detach()
    (truth,) = torch.autograd.grad(wide * straight, wide, grad.double())
    budget = 2 * ((theirs - truth).abs().amax(-1, keepdim=True) + torch.finfo(dtype).eps / 2 * truth.abs())
    assert ((ours - truth).abs() <= budget).all()
    if dtype != FP32:
        # One rounding, where the class rounds each step; one more, of a scale that the forward did not have, is 0.3.
        assert (ours - truth).norm() <= 0.25 * torch.finfo(dtype).eps * truth.norm()


@pytest.mark.parametrize("shape", ((0, 8), (3, 0), (0,), (2, 0, 8)))
def test_empty_inputs(case: str, shape: tuple[int, ...]) -> None:
    _, call, _ = CALLS[case]
    if case == "rms partial" and not shape[-1]:
        pytest.skip("a part of nothing is refused")
    tensors = [t.requires_grad_() for t in tensors_of(case, shape, FP32)]
    results = listed(call(*tensors))
    assert all(result.shape == shape for result in results)
    sum(result.sum() for result in results).backward()
    assert tensors[0].grad.shape == shape and tensors[2].grad.count_nonzero() == 0


def test_a_gain_for_each_head_is_a_gain_for_each_group() -> None:
    x, weight = torch.randn(5, 4, 8), torch.randn(4, 8)
    for call in (rms_norm, layer_norm):
        per_head = call(x, weight, weight, eps=EPS)
        grouped = call(x.flatten(1), weight.flatten(), weight.flatten(), eps=EPS, groups=4)
        torch.testing.assert_close(per_head.flatten(1), grouped, rtol=1e-6, atol=1e-6)


def test_the_sum_is_rounded_before_the_statistics_or_kept() -> None:
    x, residual = torch.randn(64, 32, dtype=BF16), 40 * torch.randn(64, 32, dtype=BF16)
    y, summed = add_rms_norm(x, residual, eps=EPS)
    assert torch.equal(summed, x + residual) and torch.equal(y, rms_norm(x + residual, eps=EPS))
    y, summed = add_rms_norm(x, residual, eps=EPS, sum_dtype=FP32, out_dtype=BF16)
    assert summed.dtype == FP32 and torch.equal(summed, x.float() + residual.float())
    assert torch.equal(y, rms_norm(summed, eps=EPS, out_dtype=BF16))
    y, summed = add_layer_norm(x, residual.float(), eps=EPS)
    assert y.dtype == summed.dtype == FP32


def test_l2_is_torchs() -> None:
    x = torch.cat([torch.randn(6, 16), torch.zeros(1, 16)])
    ours = rms_norm(x, eps=1e-12, eps_position="clamp", reduction="sum")
    torch.testing.assert_close(ours, nn.functional.normalize(x, dim=-1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn), ids=str)
def test_quantizing_is_the_norm_and_then_the_oracles_quantization(dtype: torch.dtype) -> None:
    x, weight = 3 * torch.randn(40, 64, dtype=BF16), torch.randn(64, dtype=BF16)
    x[3] = 0
    values, scales = rms_norm_quant(x, weight, eps=EPS, dtype=dtype, round_dtype=BF16)
    expected, its_scales = quantized(rms_norm(x, weight, eps=EPS, round_dtype=BF16), dtype)
    assert torch.equal(values.float(), expected.float()) and torch.equal(scales, its_scales)
    assert values.dtype == dtype and scales.dtype == FP32
    x[5, 7], x[6, 2] = torch.nan, torch.inf
    values, scales = rms_norm_quant(x, weight, eps=EPS, dtype=dtype)
    assert not (values.float() * scales)[5:7].isfinite().any() and scales[4].isfinite()


def test_quantizing_is_not_recorded() -> None:
    values, scales = rms_norm_quant(torch.randn(2, 8, requires_grad=True), eps=EPS)
    assert not values.requires_grad and not scales.requires_grad


def test_results_do_not_depend_on_gradients_being_wanted(case: str) -> None:
    _, call, _ = CALLS[case]
    tensors = tensors_of(case, (6, 48), BF16)
    without = listed(call(*tensors))
    recorded = listed(call(*(t.requires_grad_() for t in tensors)))
    for a, b in zip(without, recorded, strict=True):
        assert torch.equal(a, b) and b.requires_grad


def test_rounded_oracle_is_near_the_operation(case: str) -> None:
    _, call, _ = CALLS[case]
    tensors = tensors_of(case, (16, 48), FP16)
    for a, b in zip(
        listed(call(*tensors)), listed(oracle(case, formula_of(case, FP16), *tensors, rounded)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=2**-10, atol=1e-6)


@pytest.mark.parametrize("case", ("layer", "add layer"))
def test_gradients_of_a_narrow_layer_norm_are_those_of_its_wide_statistics(case: str) -> None:
    _, call, _ = CALLS[case]
    ours = [t.requires_grad_() for t in tensors_of(case, (300, 64), BF16)]
    truth = [t.detach().double().requires_grad_() for t in ours]
    expected, grad = listed(oracle(case, formula_of(case, FP64), *truth))[0], torch.randn(300, 64, dtype=BF16)
    listed(call(*ours))[0].backward(grad)
    expected.backward(grad.double())
    for mine, its in zip(ours, truth, strict=True):
        if its.grad is not None:
            assert (mine.grad.double() - its.grad).norm() <= 0.004 * its.grad.norm()


def test_a_narrow_sum_of_float64_is_differentiated_in_float64() -> None:
    x, residual = (torch.randn(3, 8, dtype=FP64, requires_grad=True) for _ in range(2))
    y, _ = add_rms_norm(x, residual, eps=EPS, sum_dtype=FP32, out_dtype=FP64)
    grad = torch.randn(3, 8, dtype=FP64)
    (first,) = torch.autograd.grad(y, x, grad, create_graph=True)
    formula = formula_of("add rms", FP64)._replace(sum_dtype=FP32)
    its = x.detach().clone().requires_grad_()
    exact(formula, its, residual=residual.detach())[0].backward(grad)
    # The gradient passes through the sum's own float32.
    torch.testing.assert_close(first, its.grad, rtol=1e-6, atol=1e-7)
    first.sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all() and x.grad.abs().max() < 100


def test_layers_are_stateless_and_do_what_they_replace() -> None:
    for layer in (layers.RMSNorm, layers.LayerNorm):
        assert layer.__init__ is nn.Module.__init__
        own = {name for name in dir(layer) if name not in dir(nn.Module)}
        assert own <= {"can_torch_compile", "has_backward"}
    x = torch.randn(5, 48).to(BF16)
    norm = LlamaRMSNorm(48).to(BF16)
    assert torch.equal(layers.RMSNorm.forward(norm, x), norm(x))
    layer_norm_module = nn.LayerNorm(48)
    assert torch.equal(layers.LayerNorm.forward(layer_norm_module, x.float()), layer_norm_module(x.float()))
