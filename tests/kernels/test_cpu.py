"""The CPU implementation: bit for bit what transformers and torch compute, and within the bounds elsewhere."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from norm_cases import BF16, FP16, FP32, Case, check, check_statistics, covering_cases, public_cases
from normswap_kernels import (
    add_layer_norm,
    add_rms_norm,
    cpu,
    cpu_blocks,
    gated_rms_norm,
    layer_norm,
    reference,
    rms_norm,
)
from normswap_kernels.formula import Formula
from torch import nn
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.t5.modeling_t5 import T5LayerNorm

OPERATIONS = {"rms": rms_norm, "layer": layer_norm}
DTYPES = (FP32, FP16, BF16)

pytestmark = pytest.mark.usefixtures("way")
WIDTHS = (1, 2, 3, 64, 127, 576, 1000, 4096, 8192, 16384, 65537)


def _llama(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    out = torch.promote_types(x.dtype, norm.weight.dtype)
    return rms_norm(x, norm.weight, eps=norm.variance_epsilon, round_dtype=x.dtype, out_dtype=out)


def _gemma(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight, eps=norm.eps, offset=1.0)


def _olmo2(norm: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return rms_norm(x, norm.weight, eps=norm.variance_epsilon)


CLASSES = {
    "llama": (LlamaRMSNorm, _llama),
    "t5": (T5LayerNorm, _llama),
    "gemma3": (Gemma3RMSNorm, _gemma),
    "olmo2": (Olmo2RMSNorm, _olmo2),
}


@pytest.mark.parametrize("case", [*covering_cases(), *public_cases()], ids=str)
def test_agrees_with_the_oracle(case: Case) -> None:
    result, summed, scale, mean = cpu.forward(case.formula(), *case.inputs(), case.save)
    check(case, result, summed)
    assert (scale is not None) == case.save
    if scale is not None and case.rows:
        check_statistics(case, *(None if t is None else t.reshape(case.rows, -1) for t in (scale, mean)))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CLASSES)
@torch.no_grad()
def test_is_bit_identical_with_transformers(name: str, dtype: torch.dtype, width: int) -> None:
    original, ours = CLASSES[name]
    torch.manual_seed(0)
    norm = original(width).to(dtype)
    nn.init.normal_(norm.weight)
    for rows in (0, 2, 7, 80):
        x = (3 * torch.randn(rows, width)).to(dtype)
        assert torch.equal(ours(norm, x), norm(x)), f"{rows} rows"


@pytest.mark.parametrize("dtype", (FP16, BF16), ids=str)
@torch.no_grad()
def test_is_bit_identical_with_a_float32_gain(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(576)
    nn.init.normal_(norm.weight)
    x = torch.randn(300, 576).to(dtype)
    assert norm(x).dtype == FP32
    assert torch.equal(_llama(norm, x), norm(x))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.no_grad()
def test_the_sum_with_a_residual_is_bit_identical_with_transformers(dtype: torch.dtype, width: int) -> None:
    norm = LlamaRMSNorm(width).to(dtype)
    nn.init.normal_(norm.weight)
    weight, bias = torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    for rows in (1, 5, 80):
        x, residual = (3 * torch.randn(rows, width)).to(dtype), torch.randn(rows, width).to(dtype)
        summed = x + residual
        found = add_rms_norm(x, residual, norm.weight, eps=norm.variance_epsilon, round_dtype=dtype)
        assert torch.equal(found[0], norm(summed)) and torch.equal(found[1], summed)
        found = add_layer_norm(x, residual, weight, bias, eps=1e-5)
        assert torch.equal(found[0], F.layer_norm(summed, (width,), weight, bias, 1e-5))
        assert torch.equal(found[1], summed)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layer_norm_is_bit_identical_with_torch(dtype: torch.dtype, width: int) -> None:
    x, weight, bias = torch.randn(9, width).to(dtype), torch.randn(width).to(dtype), torch.randn(width).to(dtype)
    assert torch.equal(layer_norm(x, weight, bias, eps=1e-5), F.layer_norm(x, (width,), weight, bias, 1e-5))
    assert torch.equal(layer_norm(x, eps=1e-5), F.layer_norm(x, (width,), eps=1e-5))
    if dtype != FP32:
        wide = F.layer_norm(x, (width,), weight.float(), bias.float(), 1e-5)
        assert torch.equal(layer_norm(x, weight.float(), bias.float(), eps=1e-5), wide)


@pytest.mark.parametrize("width", (1, 3, 8, 127, 4096, 16384, 32767, 32768, 40000, 65537))
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_row_does_not_see_its_neighbours(kind: str, dtype: torch.dtype, width: int) -> None:
    operation = OPERATIONS[kind]
    x = torch.randn(71, width).to(dtype)
    batch = operation(x, eps=1e-6, round_dtype=dtype)
    for rows in (slice(0, 1), slice(70, 71), slice(3, 5), slice(0, 64)):
        assert torch.equal(operation(x[rows], eps=1e-6, round_dtype=dtype), batch[rows]), rows
    x[1], x[69] = torch.nan, torch.inf
    beside = operation(x, eps=1e-6, round_dtype=dtype)
    keep = [row for row in range(71) if row not in (1, 69)]
    assert torch.equal(beside[keep], batch[keep])
    assert beside[1].isnan().all()
    assert beside[69].isnan().any()


@pytest.mark.parametrize("width", (1, 3, 17, 127, 4096, 40_000))
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("position", ("before", "after"))
def test_a_gated_row_does_not_see_its_neighbours(position: str, dtype: torch.dtype, width: int) -> None:
    x, gate = torch.randn(9, width).to(dtype), 3 * torch.randn(9, width).to(dtype)
    for activation in ("silu", "sigmoid"):
        options = {"eps": 1e-6, "gate_position": position, "activation": activation}
        batch = gated_rms_norm(x, gate, **options)
        for rows in (slice(0, 1), slice(8, 9), slice(3, 5)):
            assert torch.equal(gated_rms_norm(x[rows], gate[rows], **options), batch[rows]), rows
        # Nor its place in a row.
        places = torch.randperm(width)
        if position == "after":
            moved = gated_rms_norm(torch.ones_like(x), gate[:, places], **options)
            assert torch.equal(moved, gated_rms_norm(torch.ones_like(x), gate, **options)[:, places])


def test_an_input_of_several_blocks_is_what_its_parts_are() -> None:
    x = torch.randn(3000, 1024).to(BF16)
    weight = torch.randn(1024).to(BF16)
    assert x.numel() > cpu_blocks.BLOCK
    parts = torch.cat([rms_norm(rows, weight, eps=1e-6, round_dtype=BF16) for rows in x.split(50)])
    for threads in (1, 2, 3):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            assert torch.equal(rms_norm(x, weight, eps=1e-6, round_dtype=BF16), parts)
            with torch.inference_mode():
                assert torch.equal(rms_norm(x, weight, eps=1e-6, round_dtype=BF16), parts)
        finally:
            torch.set_num_threads(before)


def test_callers_in_several_threads_do_not_share_scratch_space() -> None:
    inputs = [torch.randn(200, 300).to(BF16) for _ in range(8)]
    expected = [rms_norm(x, eps=1e-6) for x in inputs]
    wrong = []

    def call(i: int) -> None:
        for _ in range(20):
            if not torch.equal(rms_norm(inputs[i], eps=1e-6), expected[i]):
                wrong.append(i)

    callers = [threading.Thread(target=call, args=(i,)) for i in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


def test_inference_mode_leaves_usable_scratch_space() -> None:
    x = torch.randn(3, 77)
    with torch.inference_mode():
        first = rms_norm(x, eps=1e-6)
    assert torch.equal(rms_norm(x, eps=1e-6), first)


@pytest.mark.parametrize("shape", ((2, 5, 3, 16), (2, 300, 4, 64)))
@torch.no_grad()
def test_memory_order_is_that_of_the_eager_class(shape: tuple[int, ...]) -> None:
    norm = LlamaRMSNorm(shape[-1])
    x = torch.randn(shape)
    for permuted in (x, x.transpose(1, 2), x.transpose(0, 2), x.permute(2, 0, 1, 3)):
        result, original = _llama(norm, permuted), norm(permuted)
        assert result.stride() == original.stride()
        assert torch.equal(result, original)
        assert layer_norm(permuted, eps=1e-6).is_contiguous()


def test_input_is_left_alone() -> None:
    for rows in (3, 3000):
        x = torch.randn(rows, 512)
        before = x.clone()
        for round_dtype in (None, FP32, BF16):
            rms_norm(x, torch.ones(512), torch.ones(512), eps=1e-6, round_dtype=round_dtype)
            layer_norm(x, torch.ones(512), torch.ones(512), eps=1e-6, round_dtype=round_dtype)
        assert torch.equal(x, before)


def test_rows_far_from_zero_keep_their_variance() -> None:
    x = 1e4 + torch.randn(5, 4096, dtype=torch.float64)
    expected = F.layer_norm(x.float().double(), (4096,), eps=1e-6)
    for backend_rounding in (None, FP32):
        result = layer_norm(x.float(), eps=1e-6, round_dtype=backend_rounding)
        assert (result - expected).abs().max() < 1e-2


@pytest.mark.parametrize("quantized", (torch.int8, torch.float8_e4m3fn), ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", (1, 15, 16, 17, 1000, 4096))
def test_quantizes_as_the_oracle_does(width: int, dtype: torch.dtype, quantized: torch.dtype) -> None:
    x = (torch.randn(9, width) * torch.logspace(-3, 3, 9).unsqueeze(1)).to(dtype)
    x[1], x[2, 0], x[3, -1] = 0, torch.inf, torch.nan
    for formula in (
        Formula("rms", 1e-6, 1.0, None, None, dtype),
        Formula("rms", 1e-6, 0.0, dtype, dtype, dtype),
        Formula("layer", 1e-6, 0.0, None, None, dtype),
    ):
        weight, bias = torch.randn(width).to(dtype), torch.randn(width)
        for tensors in ((weight, bias), (weight, None), (None, None)):
            y = cpu.forward(formula, x, None, None, *tensors, False)[0]
            values, scales = cpu.quantize(formula, x, *tensors, quantized)
            expected = reference.quantized(y, quantized)
            assert torch.equal(values.float(), expected[0].float())
            assert torch.equal(scales.nan_to_num(-1.0), expected[1].nan_to_num(-1.0))


def test_quantizes_more_than_a_block_of_any_strides() -> None:
    x = torch.randn(1200, 2000).t()
    formula = Formula("rms", 1e-6, 0.0, None, None, FP32)
    values, scales = cpu.quantize(formula, x, None, None, torch.int8)
    expected = reference.quantized(cpu.forward(formula, x.contiguous(), None, None, None, None, False)[0], torch.int8)
    assert x.numel() > cpu_blocks.BLOCK
    assert torch.equal(values, expected[0]) and torch.equal(scales, expected[1])


def test_eps_of_zero_is_a_value() -> None:
    assert torch.equal(rms_norm(torch.full((1, 4), 2.0), eps=0), torch.ones(1, 4))
    assert rms_norm(torch.zeros(1, 4), eps=0).isnan().all()


def test_float64_is_computed_in_float64() -> None:
    x = torch.randn(3, 50, dtype=torch.float64)
    expected = x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert (rms_norm(x, eps=1e-6) - expected).abs().max() < 1e-14
    assert (layer_norm(x, eps=1e-6) - F.layer_norm(x, (50,), eps=1e-6)).abs().max() < 1e-14
