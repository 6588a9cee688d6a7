"""Every operation on the device at hand, by its fastest backend: the CPU's own, or the Triton kernels on a GPU.

The grid runs whole on a GPU alone; the CPU has a thorough grid of its own in ``test_cpu.py``.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_cases import BF16, CHOICES, FP16, FP32, SCALED, Case, check, check_statistics, covering_cases
from normswap_kernels import engine, layer_norm, layers, rms_norm, rms_norm_quant
from normswap_kernels.formula import QUANTIZED_MAXIMUM
from normswap_kernels.gradients import Gradients, closed_form
from normswap_kernels.reference import quantized
from operation_cases import CALLS, listed, tensors_of
from torch import Tensor, nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextRMSNormGated

# Rows of one element have gradients that cancel to nothing; the interpreter's tests have bounds for those.
_FEWER = {**CHOICES, "width": (3, 128, 1000, 4096, 16384, 20000), "rows": (0, 7, 300), "eps": (1e-6,)}
_SMALL = 10_000


def grid() -> list[Any]:
    """Cases of every option; those that take long on a CPU are for a GPU alone."""
    cases = [*covering_cases(5_000_000, _FEWER), *covering_cases(5_000_000, {**_FEWER, **SCALED})]
    cases += [Case("rms", 65537, 7, gain=BF16), Case("layer", 65537, 7, bias=FP32)]
    small = [case.rows * case.width <= _SMALL for case in cases]
    return [
        pytest.param(case, id=str(case), marks=[] if few else [pytest.mark.gpu])
        for case, few in zip(cases, small, strict=True)
    ]


def moved(case: Case, device: torch.device) -> list[Tensor | None]:
    """The inputs of a case on the device, their strides kept."""
    found: list[Tensor | None] = []
    for t in case.inputs():
        if t is None or t.device == device:
            found.append(t)
            continue
        there = torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device)
        if 0 in t.stride():
            there = t[:1].to(device).expand(t.shape) if t.size(0) else there
        else:
            there.copy_(t)
        found.append(there)
    return found


@pytest.mark.parametrize("case", grid())
def test_forward_agrees_with_the_oracle(case: Case, device: torch.device) -> None:
    x, residual, gate, weight, bias = moved(case, device)
    assert x is not None
    y, summed, scale, mean = engine.forward(
        case.formula(), x, residual, gate, weight, bias, case.save and x.dtype != torch.float64, "auto"
    )
    check(case, y.cpu(), None if summed is None else summed.cpu())
    if case.save and case.rows:
        assert scale is not None
        groups = (case.rows, -1)
        check_statistics(case, scale.cpu().reshape(groups), None if mean is None else mean.cpu().reshape(groups))


@pytest.mark.parametrize("case", grid())
def test_backward_agrees_with_float64(case: Case, device: torch.device) -> None:
    formula = case.formula()
    x, residual, gate, weight, bias = moved(case, device)
    assert x is not None
    _, summed, scale, mean = engine.forward(formula, x, residual, gate, weight, bias, True, "auto")
    row = x if summed is None else summed
    grad = torch.randn(x.shape).to(device, formula.out_dtype)
    grad_sum = None if summed is None else torch.randn(x.shape).to(device, summed.dtype)
    bias_dtype = None if bias is None else bias.dtype
    assert scale is not None

    def run() -> Gradients:
        return engine.backward(
            formula, grad, grad_sum, row, gate, weight, bias_dtype, scale, mean, weight is not None, "auto"
        )

    found, again = run(), run()
    wide = [None if t is None else t.double() for t in (grad, grad_sum, row, gate, weight)]
    assert wide[0] is not None and wide[2] is not None
    truth = closed_form(formula, wide[0], wide[1], wide[2], wide[3], wide[4], None if bias is None else torch.float64)
    plain = closed_form(formula, grad, grad_sum, row, gate, weight, bias_dtype)
    for name, ours, second, right, theirs in zip(Gradients._fields, found, again, truth, plain, strict=True):
        assert (ours is None) == (right is None), name
        if ours is None or right is None or theirs is None or not ours.numel():
            continue
        assert torch.equal(ours, second), f"{name} differs from run to run"
        # The budget of the forward: what the same formula in torch is off by, and a rounding, twice. The terms that
        # are summed in another order cancel where a row is short.
        own = (theirs.double() - right).abs().amax(-1, keepdim=True)
        terms = _terms(case, x, gate, weight, grad, scale) if name in ("row", "gate") else right.abs().amax() * 20
        order = 8 * torch.finfo(FP32).eps * terms
        budget = 2 * (own + torch.finfo(ours.dtype).eps / 2 * right.abs() + order)
        excess = ((ours.double() - right).abs() - budget).max().item()
        assert excess <= 0, f"{name}: the error passes its budget by {excess:.3g}"


def _terms(case: Case, x: Tensor, gate: Tensor | None, weight: Tensor | None, grad: Tensor, scale: Tensor) -> Tensor:
    """Bound the terms of a row's gradient: gradient times gain, activation and scale."""
    rows = [case.rows] + [1] * (x.dim() - 1)
    terms = grad.double().abs().reshape(case.rows, -1).amax(-1) * scale.double().reshape(case.rows, -1).amax(-1)
    if weight is not None:
        terms = terms * (weight.double() + case.offset).abs().amax()
    if gate is not None:
        largest = gate.double().abs().reshape(case.rows, -1).amax(-1).clamp_min(1.0)
        terms = terms * largest * x.double().abs().reshape(case.rows, -1).amax(-1).clamp_min(1.0)
    return terms.reshape(rows)


@pytest.mark.parametrize("width", (3, 128, 1000, 4096, 20000))
@pytest.mark.parametrize("name", CALLS)
def test_a_row_does_not_see_its_neighbours(name: str, width: int, device: torch.device) -> None:
    width = width // 4 * 4 if width > 3 else 12
    x, other, weight, bias = (t.to(device) for t in tensors_of(name, (37, width), FP32))
    _, call, _ = CALLS[name]
    batch = listed(call(x, other, weight, bias))
    lone = [listed(call(x[i : i + 1], other[i : i + 1], weight, bias)) for i in range(0, 37, 9)]
    for k, whole in enumerate(batch):
        assert torch.equal(torch.cat([results[k] for results in lone]), whole[::9])
    x[1], x[5] = torch.nan, torch.inf
    for k, beside in enumerate(listed(call(x, other, weight, bias))):
        others = [i for i in range(37) if i not in (1, 5)]
        assert torch.equal(beside[others], batch[k][others]) and not torch.isfinite(beside[[1, 5]]).all()


@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_the_same_from_run_to_run(name: str, device: torch.device) -> None:
    tensors = [t.to(device, BF16).requires_grad_() for t in tensors_of(name, (513, 768), FP32)]
    _, call, _ = CALLS[name]

    def gradients() -> list[Tensor]:
        results = listed(call(*tensors))
        used = [t for t in tensors if t is not tensors[3] or "gate" not in name]
        used = [t for t in used if t is not tensors[1] or "gate" in name or "add" in name]
        return list(torch.autograd.grad([r.float().square().sum() for r in results], used))

    first = gradients()
    for _ in range(3):
        assert all(torch.equal(a, b) for a, b in zip(first, gradients(), strict=True))


@pytest.mark.parametrize("dtype", (FP32, FP16, BF16), ids=str)
@torch.no_grad()
def test_is_within_a_unit_of_the_eager_classes(dtype: torch.dtype, device: torch.device) -> None:
    x, gate = (torch.randn(256, 1024).to(device, dtype) for _ in range(2))
    for cls, layer in (
        (LlamaRMSNorm, layers.RMSNorm),
        (Gemma3RMSNorm, layers.RMSNormZeroCentered),
        (Qwen3NextRMSNormGated, layers.RMSNormGated),
        (nn.LayerNorm, layers.LayerNorm),
    ):
        norm = cls(1024).to(device, dtype)
        nn.init.normal_(norm.weight)
        inputs = (x, gate) if cls is Qwen3NextRMSNormGated else (x,)
        ours, theirs = layer.forward(norm, *inputs), norm(*inputs)
        assert ours.dtype == theirs.dtype
        if dtype == FP32:
            torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        else:
            most = 1e-4 if dtype == BF16 else 1e-3
            assert (ours != theirs).float().mean() < most * (10 if cls is nn.LayerNorm else 1), cls


@pytest.mark.parametrize("name", ("expanded", "transposed", "sliced", "gapped"))
def test_layouts_give_what_contiguous_rows_give(name: str, device: torch.device) -> None:
    x = torch.randn(6, 5, 64, device=device).to(BF16)
    layouts = {
        "expanded": x[:1].expand(6, 5, 64),
        "transposed": x.transpose(0, 1),
        "sliced": x[..., 3:51],
        "gapped": x[::2, :, ::2],
    }
    t = layouts[name]
    for operation in (rms_norm, layer_norm):
        weight = torch.randn(t.size(-1), device=device)
        assert torch.equal(operation(t, weight, eps=1e-6), operation(t.contiguous(), weight, eps=1e-6))
        values, scales = rms_norm_quant(t, weight, eps=1e-6)
        expected, expected_scales = rms_norm_quant(t.contiguous(), weight, eps=1e-6)
        assert torch.equal(values, expected) and torch.equal(scales, expected_scales)


@pytest.mark.parametrize("dtype", (torch.int8, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize("width", (16, 1000, 4096, 20000))
def test_quantizes_as_torch_converts(width: int, dtype: torch.dtype, device: torch.device) -> None:
    # Magnitudes over many binades: fp8 has denormals below 2**-6 of a row that reaches 448.
    x = torch.randn(64, width) * torch.logspace(0, -5, width).flip(0)
    x[3], x[4, 1:] = 0, 0
    x = x.to(device, BF16)
    weight = torch.randn(width, device=device)
    values, scales = rms_norm_quant(x, weight, eps=1e-6, round_dtype=BF16, dtype=dtype)
    normed = rms_norm(x, weight, eps=1e-6, round_dtype=BF16, out_dtype=BF16)
    expected, expected_scales = quantized(normed, dtype)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(values.float(), expected.float())


@pytest.mark.parametrize("dtype", QUANTIZED_MAXIMUM, ids=str)
@pytest.mark.parametrize("width", (512, 16384, 40000))
def test_converts_every_number_as_torch_does(width: int, dtype: torch.dtype, device: torch.device) -> None:
    largest = QUANTIZED_MAXIMUM[dtype]
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(BF16)
    numbers = numbers[numbers.abs() <= largest]
    # Rows of ones have the scale 1, so that the norm is the gain; with the largest number beside them all rows stay.
    x = torch.ones(1, width, device=device, dtype=BF16)
    for part in numbers.split(width - 1):
        gain = torch.cat([part, torch.full((width - part.numel(),), largest, dtype=BF16)]).to(device)
        values, scales = rms_norm_quant(x, gain, eps=0.0, dtype=dtype)
        assert scales.item() == 1.0
        wide = gain.float()
        expected = wide.round().to(dtype) if dtype == torch.int8 else wide.to(dtype)
        assert torch.equal(values[0].float(), expected.float())


@pytest.mark.parametrize("dtype", (FP16, BF16), ids=str)
def test_autocast_changes_what_it_changes_in_the_originals(dtype: torch.dtype, device: torch.device) -> None:
    if device.type == "cpu" and dtype == FP16:
        pytest.skip("autocast to float16 is for GPUs")
    linear, norm = nn.Linear(64, 64, device=device), nn.LayerNorm(64, device=device)
    llama = LlamaRMSNorm(64).to(device)
    nn.init.normal_(norm.weight)
    nn.init.normal_(llama.weight)
    x = torch.randn(9, 64, device=device)
    with torch.autocast(device.type, dtype=dtype):
        narrow = linear(x)
        assert narrow.dtype == dtype
        pairs = [
            (layers.LayerNorm.forward(norm, narrow), norm(narrow)),
            (layers.RMSNorm.forward(llama, narrow), llama(narrow)),
            (layer_norm(narrow, eps=1e-5), F.layer_norm(narrow, (64,))),
        ]
    for ours, theirs in pairs:
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs)
    sum(ours.float().sum() for ours, _ in pairs).backward()  # type: ignore[union-attr]
    assert linear.weight.grad is not None and torch.isfinite(linear.weight.grad).all()
