"""Every mix of dtypes that a public call can bring, on the CPU; and another default device."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from norm_cases import BF16, FP16, FP32
from normswap_kernels import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm, rms_norm_quant
from normswap_kernels.formula import Formula
from normswap_kernels.gradients import closed_form
from torch import Tensor

FP64 = torch.float64
DTYPES = (FP64, FP32, FP16, BF16)
SUMS: dict[str, Any] = {"rms": add_rms_norm, "layer": add_layer_norm}

pytestmark = pytest.mark.usefixtures("way")


def near(found: Tensor, truth: Tensor, *dtypes: torch.dtype | None) -> None:
    """Hold a result to the coarsest of the dtypes that it was rounded to."""
    units = max(torch.finfo(d).eps for d in dtypes if d is not None)
    assert found.isfinite().all()
    assert (found.double() - truth.double()).abs().max() <= 4 * units * (1 + truth.double().abs().max())


def others(x_dtype: torch.dtype) -> tuple[torch.dtype, ...]:
    """The dtypes of tensors beside ``x``."""
    return (FP64,) if x_dtype == FP64 else (FP32, FP16, BF16)


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sum_of_any_dtype(kind: Any, dtype: torch.dtype) -> None:
    for residual, total, middle, weighted, out in itertools.product(
        others(dtype), DTYPES, (None, BF16), (None, FP32, dtype), (None, FP32)
    ):
        x, added, grad_y, grad_sum = (torch.randn(3, 40) for _ in range(4))
        x, added = (t.to(d).requires_grad_() for t, d in ((x, dtype), (added, residual)))
        weight = None if weighted is None else torch.randn(40).to(weighted).requires_grad_()
        y, summed = SUMS[kind](x, added, weight, eps=1e-6, sum_dtype=total, round_dtype=middle, out_dtype=out)
        assert (y.dtype, summed.dtype) == (out or total, total)
        near(summed, x.detach().double() + added.detach().double(), FP64 if dtype == FP64 else FP32, total)
        # The sum as it was rounded is what is normalised.
        row, grads = summed.detach().double(), (grad_y.to(y.dtype), grad_sum.to(total))
        centred = row - row.mean(-1, keepdim=True) if kind == "layer" else row
        truth = centred * (centred.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
        truth = truth if weight is None else truth * weight.detach().double()
        wide = FP64 if dtype == FP64 else FP32
        near(y.detach(), truth, wide, middle, y.dtype)
        torch.autograd.backward((y, summed), grads)
        wide_weight = None if weight is None else weight.detach().double()
        exact = closed_form(
            Formula(kind, 1e-6, 0.0, None, None, FP64),
            grads[0].double(),
            grads[1].double(),
            row,
            None,
            wide_weight,
            None,
        )
        for leaf in (x, added):
            assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
            near(leaf.grad, exact.row, wide, total, leaf.dtype)
        if weight is not None:
            assert weight.grad is not None and exact.weight is not None
            near(weight.grad, exact.weight, wide, weight.dtype)


def test_a_narrow_sum_of_float64_is_differentiated() -> None:
    x = torch.ones(1, 4, dtype=FP64).cumsum(-1).requires_grad_()
    y, _ = add_rms_norm(x, torch.zeros(1, 4, dtype=FP64), eps=1e-6, sum_dtype=FP32)
    y.pow(3).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, torch.tensor([[-0.341, -0.389, -0.146, 0.389]], dtype=FP64), atol=1e-3, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("position", ("before", "after"))
def test_a_gate_of_any_dtype(position: Any, dtype: torch.dtype) -> None:
    for gating, weighted, out in itertools.product(others(dtype), (None, FP32, dtype), (None, FP64, FP32, BF16)):
        x, gate = (torch.randn(3, 40).to(d).requires_grad_() for d in (dtype, gating))
        weight = None if weighted is None else torch.randn(40).to(weighted).requires_grad_()
        y = gated_rms_norm(x, gate, weight, eps=1e-6, gate_position=position, out_dtype=out)
        grad = torch.randn(3, 40).to(y.dtype)
        y.backward(grad)
        formula = Formula("rms", 1e-6, 0.0, None, None, FP64, gate_position=position)
        wide = [None if t is None else t.detach().double() for t in (x, gate, weight)]
        assert wide[0] is not None
        exact = closed_form(formula, grad.double(), None, wide[0], wide[1], wide[2], None)
        arithmetic = FP64 if dtype == FP64 else FP32
        for leaf, truth in ((x, exact.row), (gate, exact.gate), (weight, exact.weight)):
            if leaf is not None and truth is not None:
                assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
                near(leaf.grad, truth, arithmetic, leaf.dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("norm", (rms_norm, layer_norm))
def test_parameters_of_any_dtype(norm: Any, dtype: torch.dtype) -> None:
    for weighted, biased, out in itertools.product((None, FP32, BF16, dtype), (None, FP32, BF16), (None, *DTYPES)):
        x = torch.randn(3, 40).to(dtype).requires_grad_()
        weight, bias = (None if d is None else torch.randn(40).to(d).requires_grad_() for d in (weighted, biased))
        y = norm(x, weight, bias, eps=1e-6, out_dtype=out)
        grad = torch.randn(3, 40).to(y.dtype)
        y.backward(grad)
        kind: Any = "rms" if norm is rms_norm else "layer"
        gain = None if weight is None else weight.detach().double()
        formula = Formula(kind, 1e-6, 0.0, None, None, FP64)
        exact = closed_form(formula, grad.double(), None, x.detach().double(), None, gain, biased)
        arithmetic = FP64 if dtype == FP64 else FP32
        for leaf, truth in ((x, exact.row), (weight, exact.weight), (bias, exact.bias)):
            if leaf is not None and truth is not None:
                assert leaf.grad is not None and leaf.grad.dtype == leaf.dtype
                near(leaf.grad, truth, arithmetic, leaf.dtype)


def test_another_default_device_changes_nothing() -> None:
    def results(dtype: torch.dtype) -> list[Tensor]:
        found = []
        with torch.device("cpu"):
            torch.manual_seed(0)
            x, added = (torch.randn(3, 40).to(dtype).requires_grad_() for _ in range(2))
            gains = [torch.randn(40), torch.randn(40).to(dtype), None]
        for gain, bias in itertools.product(gains, gains):
            options: dict[str, Any] = {"eps": 1e-6, "round_dtype": None}
            outs: list[Any] = [
                rms_norm(x, gain, bias, **options),
                layer_norm(x, gain, bias, **options),
                layer_norm(x, gain, bias, eps=1e-6, round_dtype=dtype, offset=1.0),
                layer_norm(x.detach(), gain, bias, eps=1e-6, offset=1.0),
                layer_norm(x[:0], gain, bias, **options),
                layer_norm(x, gain, bias, eps=1e-3, eps_position="outside"),
                *add_layer_norm(x, added, gain, bias, **options),
                *add_rms_norm(x, added, gain, bias, **options),
                gated_rms_norm(x, added, gain, **options),
                *(t.float() for t in rms_norm_quant(x, gain, bias, eps=1e-6)),
            ]
            grads = torch.autograd.grad([y.sum() for y in outs if y.requires_grad], (x, added))
            found += [*outs, *grads]
        return found

    for dtype in (FP32, BF16):
        expected = results(dtype)
        with torch.device("meta"):
            found = results(dtype)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.device.type == "cpu" and torch.equal(ours, theirs)
