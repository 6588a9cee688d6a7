"""The closed formula of the gradients against the oracle: by autograd, by finite differences, and once more."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from normswap_kernels.formula import Formula
from normswap_kernels.gradients import closed_form
from normswap_kernels.reference import exact
from torch import Tensor

EPS = 0.3
FORMULAS = {
    f"{kind}-{position}-{reduction}-{partial}-{groups}-{gate}-{activation}-{offset:g}": Formula(
        kind, EPS, offset, None, None, torch.float64, groups, partial, position, reduction, gate, activation
    )
    for kind, position, (reduction, partial, groups, gate, activation, offset) in itertools.product(
        ("rms", "layer"),
        ("inside", "outside", "clamp"),
        (
            ("mean", 0, 1, "none", "silu", 0.0),
            ("sum", 0, 2, "before", "silu", 1.0),
            ("mean", 2, 2, "after", "sigmoid", 1.0),
            ("sum", 2, 1, "after", "silu", 0.0),
            ("mean", 0, 2, "before", "sigmoid", 0.0),
        ),
    )
    if kind == "rms" or (reduction == "mean" and not partial)
}


class Norm(torch.autograd.Function):
    """The oracle, with the closed formula as its gradient."""

    @staticmethod
    def forward(
        ctx: Any, formula: Formula, x: Tensor, gate: Tensor | None, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, gate, weight)
        ctx.formula, ctx.bias_dtype = formula, None if bias is None else bias.dtype
        return exact(formula, x, weight, bias, gate=gate)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        return None, *closed_form(ctx.formula, grad, None, x, gate, weight, ctx.bias_dtype)


def _inputs(formula: Formula, heads: bool = False) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*shape, dtype=torch.float64, generator=generator) * scale).requires_grad_()

    inner = (2, 4) if heads else (6,)
    # Of small rows a clamp lets some through and holds some.
    x = draw(3, *inner, scale=0.4)
    gate = None if formula.gate_position == "none" else draw(3, *inner)
    bias = None if formula.gate_position == "after" else draw(*inner)
    return x, gate, draw(*inner), bias


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_closed_form_is_autograds(formula: Formula) -> None:
    x, gate, weight, bias = _inputs(formula)
    grad = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    given = [t for t in (x, gate, weight, bias) if t is not None]
    expected = torch.autograd.grad(exact(formula, x, weight, bias, gate=gate)[0], given, grad)
    found = closed_form(formula, grad, None, x, gate, weight, None if bias is None else bias.dtype)
    torch.testing.assert_close([t for t in found if t is not None], list(expected), rtol=1e-12, atol=1e-12)


def _check_twice(formula: Formula, inputs: tuple[Tensor | None, ...]) -> None:
    # Behind a function, since a Formula among the arguments would be taken for a tuple of them.
    def norm(*tensors: Tensor | None) -> Tensor:
        result: Tensor = Norm.apply(formula, *tensors)
        return result

    assert torch.autograd.gradcheck(norm, inputs)
    assert torch.autograd.gradgradcheck(norm, inputs)


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS.keys())
def test_closed_form_by_finite_differences_twice(formula: Formula) -> None:
    _check_twice(formula, _inputs(formula))


@pytest.mark.parametrize("position", ("inside", "outside", "clamp"))
@pytest.mark.parametrize("scale_dtype", (torch.float16, torch.bfloat16), ids=str)
def test_a_rounded_scale_multiplies_the_gradient_and_is_differentiated_as_it_was(
    position: Any, scale_dtype: torch.dtype
) -> None:
    options = {"groups": 2, "partial": 2, "eps_position": position, "scale_dtype": scale_dtype}
    formula = Formula("rms", EPS, 1.0, None, None, torch.float64, **options)
    x, _, weight, bias = _inputs(formula)
    v = x.unflatten(-1, (2, 3))
    moment = v[..., :2].square().mean(-1, keepdim=True)
    root = moment.sqrt()
    scale = {"inside": (moment + EPS).rsqrt(), "outside": 1 / (root + EPS), "clamp": 1 / root.clamp_min(EPS)}[position]
    straight = scale + (scale.to(scale_dtype).double() - scale).detach()
    result = (v * straight).flatten(-2) * (weight + 1.0) + bias
    grad = torch.randn(x.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad(result, (x, weight, bias), grad, create_graph=True)
    found = closed_form(formula, grad, None, x, None, weight, torch.float64)
    found_again, again = (
        torch.autograd.grad(sum(t.square().sum() for t in ts if t is not None), (x, weight)) for ts in (found, expected)
    )
    torch.testing.assert_close([t for t in found if t is not None], list(expected), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found_again, again, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ("rms", "layer"))
def test_gain_of_each_head(kind: Any) -> None:
    formula = Formula(kind, EPS, 1.0, None, None, torch.float64)
    _check_twice(formula, _inputs(formula, heads=True))


def test_gradient_of_the_sum_is_added_before_the_one_rounding() -> None:
    formula = Formula("rms", EPS, 0.0, None, None, torch.bfloat16)
    row, grad, grad_sum = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    apart = closed_form(formula, grad.float(), None, row.float(), None, None, None).row
    found = closed_form(formula, grad, grad_sum, row, None, None, None).row
    assert torch.equal(found, (apart + grad_sum.float()).to(torch.bfloat16))


def test_without_gain_there_is_no_gradient_of_it() -> None:
    formula = Formula("layer", EPS, 0.0, None, None, torch.float32)
    grad, row = torch.randn(2, 4, 64, generator=torch.Generator().manual_seed(0))
    found = closed_form(formula, grad, None, row, None, None, torch.bfloat16)
    assert found.weight is None and found.gate is None
    assert found.bias is not None and torch.equal(found.bias, grad.sum(0).to(torch.bfloat16))


@pytest.mark.parametrize("position", ("outside", "clamp"))
def test_a_row_of_zeros_has_a_finite_gradient(position: Any) -> None:
    formula = Formula("rms", EPS, 0.0, None, None, torch.float64, eps_position=position)
    row, grad = torch.zeros(2, 8, dtype=torch.float64), torch.ones(2, 8, dtype=torch.float64)
    assert torch.equal(closed_form(formula, grad, None, row, None, None, None).row, grad / EPS)
