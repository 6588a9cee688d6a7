"""The gradients on the CPU: within the budget of float64, the same for any number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from backward_cases import BACKWARD_CHOICES, CASES, SLOW_CASES, BackwardCase, check
from norm_cases import BF16, FP16, FP32, covering_cases
from normswap_kernels import add_rms_norm, cpu, rms_norm
from normswap_kernels.formula import Formula
from normswap_kernels.gradients import Gradients, closed_form
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytestmark = pytest.mark.usefixtures("way")

RMS = Formula("rms", 1e-6, 0.0, None, None, FP32)


@pytest.fixture(params=(1, 2, 3))
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """A number of threads for torch."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def differentiate(
    formula: Formula,
    grad: Tensor,
    row: Tensor,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None = None,
    gate: Tensor | None = None,
) -> Gradients:
    """Run forward and backward."""
    bias = None if bias_dtype is None else torch.zeros(row.shape[-1], dtype=bias_dtype)
    _, _, scale, mean = cpu.forward(formula, row, None, gate, weight, bias, True)
    assert scale is not None
    return cpu.backward(formula, grad, None, row, gate, weight, bias_dtype, scale, mean)


# What is compiled, in more combinations than it has among all.
COVERED = covering_cases(
    300_000,
    {**BACKWARD_CHOICES, "eps_position": ("inside",), "partial": (False,)},
    BackwardCase,
)


@pytest.mark.parametrize("case", [*CASES, *COVERED], ids=str)
def test_gradients_are_within_the_budget(case: BackwardCase) -> None:
    check(case, _run(case))


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_gradients_of_the_largest_cases_are_within_the_budget(case: BackwardCase) -> None:
    check(case, _run(case))


def _run(case: BackwardCase) -> Gradients:
    formula, inputs, row = case.formula(), case.inputs(), case.row()
    _, _, scale, mean = cpu.forward(formula, *inputs, True)
    assert scale is not None
    bias_dtype = None if inputs.bias is None or case.frozen else inputs.bias.dtype
    return cpu.backward(
        formula, *case.gradients(), row, inputs.gate, inputs.weight, bias_dtype, scale, mean, not case.frozen
    )


@pytest.mark.parametrize("kind", ("rms", "layer"))
@pytest.mark.parametrize("shape", ((3000, 512), (100_000, 8), (70_000, 1), (5, 70_000), (1, 40_000)), ids=str)
def test_gradients_do_not_depend_on_the_threads(kind: str, shape: tuple[int, int], threads: int) -> None:
    formula = RMS._replace(kind=kind)  # type: ignore[arg-type]
    row, grad, weight = torch.randn(shape), torch.randn(shape), torch.randn(shape[1])
    found = differentiate(formula, grad, row, weight, FP32)
    again = differentiate(formula, grad, row, weight, FP32)
    torch.set_num_threads(1)
    alone = differentiate(formula, grad, row, weight, FP32)
    for name, ours, second, expected in zip(found._fields, found, again, alone, strict=True):
        if ours is not None and second is not None and expected is not None:
            assert torch.equal(ours, expected), f"{name} is another with {threads} threads"
            assert torch.equal(ours, second), f"{name} is another in another run"


@pytest.mark.parametrize("position", ("before", "after"))
def test_gradients_of_a_gate_do_not_depend_on_the_threads(position: str, threads: int) -> None:
    formula = RMS._replace(gate_position=position)  # type: ignore[arg-type]
    row, grad, gate, weight = (torch.randn(n, 512) for n in (3000, 3000, 3000, 1))
    found = differentiate(formula, grad, row, weight[0], gate=gate)
    torch.set_num_threads(1)
    alone = differentiate(formula, grad, row, weight[0], gate=gate)
    for ours, expected in zip(found[:3], alone[:3], strict=True):
        assert ours is not None and expected is not None and torch.equal(ours, expected)


@pytest.mark.parametrize("position", ("before", "after"))
@pytest.mark.parametrize("activation", ("silu", "sigmoid"))
def test_gradients_of_a_gate_do_not_see_their_neighbours(position: str, activation: str) -> None:
    formula = RMS._replace(gate_position=position, activation=activation)  # type: ignore[arg-type]
    for width in (1, 3, 127, 1024):
        row, grad, gate, weight = (torch.randn(n, width) for n in (130, 130, 130, 1))
        found = differentiate(formula, grad, row, weight[0], gate=gate)
        for part in (slice(0, 1), slice(129, 130), slice(3, 5)):
            alone = differentiate(formula, grad[part], row[part], weight[0], gate=gate[part])
            assert found.gate is not None and alone.gate is not None
            assert torch.equal(alone.row, found.row[part]) and torch.equal(alone.gate, found.gate[part])


@pytest.mark.parametrize("kind", ("rms", "layer"))
@pytest.mark.parametrize("width", (1, 127, 4096, 40_000))
def test_a_rows_gradient_does_not_see_its_neighbours(kind: str, width: int) -> None:
    formula = RMS._replace(kind=kind)  # type: ignore[arg-type]
    row, grad, weight = torch.randn(71, width), torch.randn(71, width), torch.randn(width)
    batch = differentiate(formula, grad, row, weight).row
    for rows in (slice(0, 1), slice(70, 71), slice(3, 5), slice(0, 64)):
        assert torch.equal(differentiate(formula, grad[rows], row[rows], weight).row, batch[rows]), rows
    row[1], grad[69] = torch.nan, torch.inf
    keep = [i for i in range(71) if i not in (1, 69)]
    assert torch.equal(differentiate(formula, grad, row, weight).row[keep], batch[keep])


def test_a_gain_of_many_rows_is_summed_exactly_enough() -> None:
    row, weight = torch.randn(300_000, 16) + 0.3, torch.randn(16)
    # The same number again and again is rounded the same way again and again.
    grad = torch.full((300_000, 16), 0.1)
    found = differentiate(RMS, grad, row, weight, FP32)
    truth = closed_form(RMS, grad.double(), None, row.double(), None, weight.double(), torch.float64)
    for ours, exact in ((found.weight, truth.weight), (found.bias, truth.bias)):
        assert ours is not None and exact is not None
        # One after the other, 5,000 numbers would be off by 4e-5.
        assert ((ours.double() - exact).abs() / exact.abs()).max() < 5e-6


@pytest.mark.parametrize("dtype", (FP32, FP16, BF16), ids=str)
def test_gradients_are_as_near_as_those_of_transformers(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(576).to(dtype)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(64, 576).to(dtype).requires_grad_()
    residual = torch.randn(64, 576).to(dtype).requires_grad_()
    grads = torch.randn(64, 576).to(dtype), torch.randn(64, 576).to(dtype)
    leaves = x, residual, norm.weight

    summed = x + residual
    eager = torch.autograd.grad((norm(summed), summed), leaves, grads)
    outputs = add_rms_norm(x, residual, norm.weight, eps=norm.variance_epsilon, round_dtype=dtype)
    ours = torch.autograd.grad(outputs, leaves, grads)

    row = summed.detach().double()
    exact = closed_form(RMS, grads[0].double(), grads[1].double(), row, None, norm.weight.double(), None)
    for found, theirs, truth in zip(ours, eager, (exact.row, exact.row, exact.weight), strict=True):
        assert truth is not None
        own = (theirs.double() - truth).abs().max()
        rounding = torch.finfo(dtype).eps * truth.abs().max() / 2
        assert (found.double() - truth).abs().max() <= 2 * (own + rounding)


def test_training_through_the_public_operation() -> None:
    x = torch.randn(4, 5, 33, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda *leaves: rms_norm(*leaves, eps=1e-6), (x, weight))


def test_no_rows_give_zeros() -> None:
    found = differentiate(RMS, torch.empty(0, 7), torch.empty(0, 7), torch.randn(7), FP32)
    assert found.row.shape == (0, 7)
    assert found.weight is not None and torch.equal(found.weight, torch.zeros(7))
    assert found.bias is not None and torch.equal(found.bias, torch.zeros(7))


def test_tensors_are_left_alone() -> None:
    row, grad, grad_sum, weight = torch.randn(300, 64), torch.randn(300, 64), torch.randn(300, 64), torch.randn(64)
    before = [t.clone() for t in (row, grad, grad_sum, weight)]
    _, _, scale, mean = cpu.forward(RMS, row, None, None, weight, None, True)
    assert scale is not None
    cpu.backward(RMS, grad, grad_sum, row, None, weight, FP32, scale, mean)
    assert all(torch.equal(t, old) for t, old in zip((row, grad, grad_sum, weight), before, strict=True))
