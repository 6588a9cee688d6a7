"""What holds for every row, on any backend: ``python properties.py BACKEND EXAMPLES`` checks it in its own process.

Each property is a function of a backend and of drawn values, decorated by hypothesis where it is run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from normswap_kernels import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm, rms_norm_quant
from torch import Tensor

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32

Call = Callable[..., Any]

# Each takes rows, companions of the same shape, and options; results are one tensor or a tuple.
CALLS: dict[str, Call] = {
    "rms": lambda x, other, **k: rms_norm(x, **k),
    "rms partial": lambda x, other, **k: rms_norm(x, partial=(x.size(-1) + 1) // 2, **k),
    "l2": lambda x, other, **k: rms_norm(x, eps_position="clamp", reduction="sum", **k),
    "layer": lambda x, other, **k: layer_norm(x, round_dtype=x.dtype, **k),
    "torch's layer": lambda x, other, **k: layer_norm(x, **k),
    "add rms": lambda x, other, **k: add_rms_norm(x, other, **k),
    "add layer": lambda x, other, **k: add_layer_norm(x, other, **k),
    "gate before": lambda x, other, **k: gated_rms_norm(x, other, gate_position="before", **k),
    "gate after": lambda x, other, **k: gated_rms_norm(x, other, activation="sigmoid", **k),
    "int8": lambda x, other, **k: rms_norm_quant(x, **k),
    "fp8": lambda x, other, **k: rms_norm_quant(x, dtype=torch.float8_e4m3fn, **k),
}

EXTREMES = (
    0.0,
    -0.0,
    1e-45,
    -3e-39,
    1e-20,
    0.5,
    -1.0,
    3.0,
    1e4,
    -1e19,
    3e38,
    float("inf"),
    float("-inf"),
    float("nan"),
)

seeds = st.integers(0, 2**31)
names = st.sampled_from(sorted(CALLS))
widths = st.one_of(st.integers(1, 40), st.sampled_from([64, 127, 128, 300, 1024, 1500]))
dtypes = st.sampled_from([FP32, FP16, BF16])


def drawn(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def listed(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def same(a: Tensor, b: Tensor) -> bool:
    """Whether all numbers are the same and NaNs stand in the same places."""
    a, b = a.float(), b.float()
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def batch_invariance(backend: str, seed: int, name: str, width: int, dtype: torch.dtype, rows: int) -> None:
    """A row's result is bit-identical whatever rows stand beside it, however many, in any order; also beside NaN."""
    x, other = drawn(seed, rows, width).to(dtype), drawn(seed + 1, rows, width).to(dtype)
    options = {"eps": 1e-6, "backend": backend}
    whole = listed(CALLS[name](x, other, **options))
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    some = order[: max(1, rows // 2)]
    for a, b in zip(whole, listed(CALLS[name](x[some], other[some], **options)), strict=True):
        assert same(a[some], b), f"{name}: rows {some.tolist()} of {rows}"
    for a, b in zip(whole, listed(CALLS[name](x[:1], other[:1], **options)), strict=True):
        assert same(a[:1], b), f"{name}: a row alone"
    spoilt = x.clone()
    spoilt[order[0]] = torch.nan
    rest = order[1:]
    for a, b in zip(whole, listed(CALLS[name](spoilt, other, **options)), strict=True):
        assert same(a[rest], b[rest]), f"{name}: a NaN reaches another row"


def scale_invariance(backend: str, seed: int, width: int, power: int) -> None:
    """Without eps a row times a power of two gives the same bits."""
    x = drawn(seed, 3, width)
    for name in ("rms", "rms partial", "l2", "layer", "int8"):
        plain = listed(CALLS[name](x, None, eps=0.0, backend=backend))
        scaled = listed(CALLS[name](x * 2.0**power, None, eps=0.0, backend=backend))
        for a, b in zip(plain, scaled, strict=True):
            assert same(a, b), f"{name}: scaled by 2**{power}"


def shift_invariance(backend: str, seed: int, width: int, shift: int) -> None:
    """LayerNorm of a shifted row is that of the row, up to what float32 resolves of the shifted one."""
    x = (drawn(seed, 3, width) * 256).round() / 256
    for name in ("layer", "torch's layer"):
        plain = CALLS[name](x, None, eps=1e-3, backend=backend)
        shifted = CALLS[name](x + shift, None, eps=1e-3, backend=backend)
        deviation = (x.var(-1, unbiased=False, keepdim=True) + 1e-3).sqrt()
        resolved = torch.finfo(FP32).eps * (abs(shift) + x.abs().amax(-1, keepdim=True) + 1)
        bound = 8 * resolved / deviation * (1 + plain.abs().amax(-1, keepdim=True))
        assert ((plain - shifted).abs() <= bound).all(), f"{name}: shifted by {shift}"


def zero_rows(backend: str, name: str, width: int, dtype: torch.dtype) -> None:
    """A row of zeros gives zeros, and NaN without eps, as the eager formula does."""
    zeros = torch.zeros(2, width, dtype=dtype)
    for result in listed(CALLS[name](zeros, zeros, eps=1e-6, backend=backend)):
        assert not result.float().any()
    result = listed(CALLS[name](zeros, zeros, eps=0.0, backend=backend))[0]
    if name not in ("int8", "fp8"):
        assert result.isnan().all(), name


def one_column(backend: str, seed: int) -> None:
    """A row of one element is its sign times nearly one, or zero once centred."""
    x = drawn(seed, 5, 1)
    rms = rms_norm(x, eps=1e-6, backend=backend)
    torch.testing.assert_close(rms, x / (x * x + 1e-6).sqrt(), rtol=1e-6, atol=0)
    assert not layer_norm(x, eps=1e-6, round_dtype=FP32, backend=backend).any()
    assert not layer_norm(x, eps=1e-6, backend=backend).any()


def extremes(backend: str, values: list[list[float]], dtype: torch.dtype) -> None:
    """Huge, tiny, infinite and missing numbers give what the eager formula gives, each in its own row alone."""
    x = torch.tensor(values).to(dtype)
    wide = x.float()
    eager = {
        "rms": (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(dtype),
        "layer": _eager_layer_norm(wide).to(dtype),
    }
    for name, expected in eager.items():
        got = CALLS[name](x, None, eps=1e-6, backend=backend)
        assert torch.equal(got.isnan(), expected.isnan()), f"{name}: NaN elsewhere than in the eager formula"
        assert torch.equal(got.isinf(), expected.isinf()), f"{name}: infinity elsewhere than in the eager formula"
        finite = expected.isfinite()
        rtol = {FP32: 1e-5, FP16: 2e-3, BF16: 1.6e-2}[dtype]
        torch.testing.assert_close(got[finite], expected[finite], rtol=rtol, atol=1e-5)


def _eager_layer_norm(x: Tensor) -> Tensor:
    """LayerNorm as Cohere's and DeBERTa's classes write it."""
    centred = x - x.mean(-1, keepdim=True)
    return centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + 1e-6)


def table_of(values: st.SearchStrategy[float]) -> st.SearchStrategy[list[list[float]]]:
    return st.integers(1, 9).flatmap(
        lambda width: st.lists(st.lists(values, min_size=width, max_size=width), min_size=1, max_size=4)
    )


PROPERTIES: dict[str, tuple[Callable[..., None], dict[str, st.SearchStrategy[Any]]]] = {
    "batch invariance": (
        batch_invariance,
        {"seed": seeds, "name": names, "width": widths, "dtype": dtypes, "rows": st.integers(1, 40)},
    ),
    "scale invariance": (scale_invariance, {"seed": seeds, "width": widths, "power": st.integers(-40, 40)}),
    "shift invariance": (shift_invariance, {"seed": seeds, "width": widths, "shift": st.integers(-2000, 2000)}),
    "zero rows": (zero_rows, {"name": names, "width": widths, "dtype": dtypes}),
    "one column": (one_column, {"seed": seeds}),
    "extremes": (extremes, {"values": table_of(st.sampled_from(EXTREMES)), "dtype": dtypes}),
}


def check(name: str, backend: str, examples: int) -> None:
    """Check one property on drawn examples, the same in every run."""
    function, strategies = PROPERTIES[name]

    @settings(
        max_examples=examples,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(**strategies)
    def run(**values: Any) -> None:
        function(backend, **values)

    run()


if __name__ == "__main__":
    for property_name in PROPERTIES:
        check(property_name, sys.argv[1], int(sys.argv[2]))
        print(property_name)
