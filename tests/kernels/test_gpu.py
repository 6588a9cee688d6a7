"""The Triton kernels on a GPU: what the interpreter cannot show."""

from __future__ import annotations

import pytest
import torch
from norm_cases import BF16, FP16, FP32, Case, check, covering_cases
from normswap_kernels import layer_norm, rms_norm
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

pytestmark = pytest.mark.gpu

OPERATIONS = {"rms": rms_norm, "layer": layer_norm}


@pytest.mark.parametrize("case", [c for kind in OPERATIONS for c in covering_cases(kind, 20_000_000)], ids=str)
def test_agrees_with_the_oracle(case: Case) -> None:
    x, gain, bias = (None if t is None else t.cuda() for t in case.inputs())
    if case.layout == "transposed":
        # A copy to the device straightens it.
        x = x.t().contiguous().t()
    result = OPERATIONS[case.kind](
        x, gain, bias, eps=1e-6, offset=case.offset, round_dtype=case.middle, out_dtype=case.out, backend="triton"
    )
    check(case, result.cpu())


@pytest.mark.parametrize("width", (3, 128, 1000, 4096, 16384, 20000))
@pytest.mark.parametrize("kind", OPERATIONS)
def test_a_row_does_not_see_its_neighbours(kind: str, width: int) -> None:
    x = torch.randn(71, width, device="cuda")
    batch = OPERATIONS[kind](x, eps=1e-6)
    assert torch.equal(torch.cat([OPERATIONS[kind](row, eps=1e-6) for row in x.split(1)]), batch)
    x[1] = torch.nan
    beside = OPERATIONS[kind](x, eps=1e-6)
    assert torch.equal(beside[2:], batch[2:]) and torch.equal(beside[:1], batch[:1])


@pytest.mark.parametrize("dtype", (FP32, FP16, BF16), ids=str)
@torch.no_grad()
def test_is_within_a_unit_of_the_eager_class(dtype: torch.dtype) -> None:
    norm = LlamaRMSNorm(4096).to("cuda", dtype)
    nn.init.normal_(norm.weight)
    x = torch.randn(512, 4096, device="cuda").to(dtype)
    ours, theirs = rms_norm(x, norm.weight, eps=norm.variance_epsilon, round_dtype=dtype), norm(x)
    if dtype == FP32:
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)
    else:
        assert (ours != theirs).float().mean() < (1e-4 if dtype == BF16 else 1e-3)


def test_offsets_past_two_billion_elements() -> None:
    rows, width = 2**19 + 3, 4096
    x = torch.zeros(rows, width, device="cuda", dtype=BF16)
    x[-1] = torch.arange(width, device="cuda")
    assert torch.equal(rms_norm(x, eps=1e-6)[-1], rms_norm(x[-1:].clone(), eps=1e-6)[0])


def test_runs_on_a_device_that_is_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x = torch.randn(4, 64, device="cuda:1")
    assert rms_norm(x, eps=1e-6).device == x.device


def test_compiles_with_inductor() -> None:
    weight = torch.randn(1024, device="cuda", dtype=BF16)

    def model(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, weight, eps=1e-6, round_dtype=BF16) * 2

    x = torch.randn(16, 1024, device="cuda", dtype=BF16)
    assert torch.equal(torch.compile(model, fullgraph=True)(x), model(x))
