"""A comparison that needs no measuring says what measuring says, and one of few numbers tells wrong from right."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from normswap import proof
from normswap.meter import NormMeter, units_from_exact
from normswap.roundings import DTYPE_PAIRS
from normswap.spec import NormSpec

WIDTH, ROWS = 64, 512
RMS, LAYER = NormSpec("rms", WIDTH, 1e-6), NormSpec("layer", WIDTH, 1e-5, bias=True, bias_name="bias")
SPECS = {
    "rms": RMS,
    "rms, rounded before its gain": replace(RMS, cast="before_gain", out="promote"),
    "layer": LAYER,
    "layer, rounded before its gain": replace(LAYER, cast="before_gain", out="promote"),
    "gated": replace(RMS, gate="silu", gate_position="after", gate_name="gate"),
}
PAIRS = ((torch.float32, torch.float32), *DTYPE_PAIRS)


def moved(y: torch.Tensor, units: int, every: int) -> torch.Tensor:
    """Move one in so many numbers by some units in the last place."""
    integer = torch.int32 if y.dtype == torch.float32 else torch.int16
    off = y.clone()
    off.view(integer).view(-1)[::every] += units
    return off


CHANGES: dict[str, Any] = {
    "none": lambda y: y,
    "a neighbour, one in 2000": lambda y: moved(y, 1, 2000),
    "a neighbour, one in 500": lambda y: moved(y, 1, 500),
    "two units, one in 2000": lambda y: moved(y, 2, 2000),
    "three units, one number": lambda y: moved(y, 3, y.numel()),
    "a thousand units, one number": lambda y: moved(y, 1000, y.numel()),
    "not a number": lambda y: torch.where(torch.arange(WIDTH) == 3, torch.nan, y),
    "infinite": lambda y: torch.where(torch.arange(WIDTH) == 3, torch.inf, y),
    "all of it": lambda y: 1.01 * y,
    "another dtype": lambda y: y.double(),
}


def drawn(spec: NormSpec, x_dtype: torch.dtype, gain_dtype: torch.dtype) -> Any:
    x = torch.randn(2, ROWS // 2, WIDTH).to(x_dtype)
    tensors = {"weight": (1 + torch.rand(WIDTH)).to(gain_dtype), "bias": torch.randn(WIDTH).to(gain_dtype)}
    gate = None if spec.gate is None else torch.randn(x.shape).to(x_dtype)
    y = spec.compute(x, tensors["weight"], tensors["bias"] if spec.bias else None, gate)
    return SimpleNamespace(x=x, tensors=tensors, gate=gate, y=y)


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", SPECS)
def test_what_needs_no_measuring_is_what_measuring_passes(
    name: str, change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = SPECS[name]
    said = []
    for measured in (False, True):
        torch.manual_seed(0)
        if measured:
            monkeypatch.setattr(proof, "_agree", lambda *_, **__: False)
            monkeypatch.setattr(proof, "units_from_exact", lambda *_, **__: None)
        runs = [drawn(spec, *pair) for pair in PAIRS]
        said.append([proof.disagreement(spec, r.x, r.gate, r.tensors, CHANGES[change](r.y)) for r in runs])
    assert said[0] == said[1]
    if change in ("none", "a neighbour, one in 2000"):
        assert said[0] == [None] * len(PAIRS)
    if change in ("all of it", "another dtype"):
        assert None not in said[0]
    # Beside a bias, a thousand units of a small sum are less than one of what it is the sum of.
    if change == "a thousand units, one number" and not spec.bias:
        assert said[0][0] is not None


def test_most_results_need_no_measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "NormMeter", None)
    for spec in SPECS.values():
        for pair in PAIRS:
            run = drawn(spec, *pair)
            assert proof.disagreement(spec, run.x, run.gate, run.tensors, run.y) is None
    run = drawn(RMS, torch.bfloat16, torch.bfloat16)
    assert proof.disagreement(RMS, run.x, None, run.tensors, moved(run.y, 1, 2000)) is None


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("units", [0, 1, 5])
def test_the_distance_from_float64_is_the_meters(name: str, units: int) -> None:
    spec = SPECS[name]
    for pair in PAIRS:
        run = drawn(spec, *pair)
        gain, bias = run.tensors["weight"], run.tensors["bias"] if spec.bias else None
        y = moved(run.y, units, 100)
        meter = NormMeter(spec)
        meter.add(run.x, gain, bias, y, run.y, run.gate)
        assert units_from_exact(spec, run.x, gain, bias, y, run.gate) == meter.exact_ulp_original > 0
        assert units_from_exact(spec, run.x, gain, bias, y * torch.inf, run.gate) is None


@pytest.mark.parametrize(
    ("shape", "count"),
    [((16,), 2048), ((4, 64), 128), ((1024,), 32), ((4096,), 32), ((8192,), 16), ((32, 512), 8), ((65536,), 8)],
)
def test_short_rows_are_many_and_long_ones_some(shape: tuple[int, ...], count: int) -> None:
    assert proof.row_count(SimpleNamespace(shape=shape)) == count  # type: ignore[arg-type]
