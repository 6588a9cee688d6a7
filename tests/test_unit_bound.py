"""A million random and adversarial rows through each kind of norm: the swapped one beside its original."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import handwritten as hw
import handwritten_kinds as hk
import pytest
import torch
from torch import nn

from normswap import modules
from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter
from normswap.probe import probe
from normswap.spec import NormSpec

pytestmark = [pytest.mark.slow, pytest.mark.core]

ROWS = 1_000_000
CHUNK = 100_000
KINDS: dict[str, Callable[[], nn.Module]] = {
    "Llama's": lambda: hw.Scale(16),
    "LayerNorm": lambda: nn.LayerNorm(16),
    "LayerNorm written out": lambda: hw.RMSNorm(16),
    "RMSNorm": lambda: nn.RMSNorm(16, eps=1e-6),
    "1 + w": lambda: hw.LlamaRMSNorm(16),
    "1 + w in the weight's dtype": lambda: hk.NarrowOffsetNorm(16),
    "no gain, no eps": hw.BareNorm,
    "L2": hk.L2Norm,
    "eps outside": lambda: hw.OutsideEpsNorm(16),
    "eps as a clamp": lambda: hw.NormalizeNorm(16),
    "grouped": lambda: hw.GroupedNorm(16),
    "partial": lambda: hw.PartialNorm(16),
    "per head": lambda: hw.PerHeadNorm(4, 16),
    "one number for a gain": hk.ScalarNorm,
    "a gain before": lambda: hk.ScaledBeforeNorm(16),
    "a gate before": lambda: hk.GateBeforeNorm(16),
    "a gate after": lambda: hk.GateFirstNorm(16),
    "statistics in the input's dtype": lambda: hw.NarrowNorm(16),
    "a scale rounded to the input's dtype": hw.ScaleRoundedNorm,
    "channels of a sequence": lambda: hk.SequenceChannelNorm(16),
}


def adversarial(count: int, width: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Rows of every size, a tenth of them as no model makes them."""
    limits = torch.finfo(dtype)
    x = torch.randn(count, width, generator=generator)
    x *= 10 ** torch.empty(count, 1).uniform_(-6, 4 if dtype == torch.float16 else 8, generator=generator)
    x[0::100] = limits.max / 2
    x[1::100] = limits.tiny
    x[2::100] *= limits.smallest_normal / 16
    x[3::100] = torch.randn(len(x[3::100]), 1, generator=generator)
    x[4::100] = 0.0
    x[4::100, 3] = 1.0
    x[5::100] = 0.0
    x[6::100, 5] = torch.nan
    x[7::100, -1] = torch.inf
    x[8::100, 0] = -torch.inf
    x[9::100] = 1e-3 * x[9::100] + 100.0
    return x.to(dtype)


def calls(spec: NormSpec, dtype: torch.dtype) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the rows as the norm takes them, with a gate where it takes one."""
    generator = torch.Generator().manual_seed(0)
    width = spec.width or 16
    for _ in range(ROWS // CHUNK):
        x = adversarial(CHUNK, width, dtype, generator)
        if spec.heads > 1:
            x = x.unflatten(0, (-1, spec.heads))
        if spec.axis == "channels":
            x = x.unflatten(0, (-1, 100)).movedim(-1, 1).contiguous()
        gate = torch.randn(x.shape, generator=generator).to(dtype)
        yield {spec.input_name: x} | ({str(spec.gate_name): gate} if spec.gate else {})


def failures_of(module: nn.Module, spec: NormSpec, dtype: torch.dtype, swapped: NormSpec | None = None) -> list[str]:
    """Run both on all rows and judge; what is equal bit for bit is only counted, the meter looks at the rest."""
    modules.swap(module, swapped or spec, "auto")
    gain, bias = (None if name is None else getattr(module, name) for name in (spec.gain_name, spec.bias_name))
    meter, equal, failures = NormMeter(replace(spec, axis="last")), 0, []
    for arguments in calls(spec, dtype):
        expected, got = modules.original_forward(module, **arguments), module(**arguments)
        if not (torch.equal(expected.isnan(), got.isnan()) and torch.equal(expected.isinf(), got.isinf())):
            failures.append("NaN or inf elsewhere")
        tensors = arguments[spec.input_name], expected, got, arguments.get(spec.gate_name or "")
        x, expected, got, gate = (None if t is None else flat(spec, t) for t in tensors)
        same = (expected == got) | expected.isnan()
        differs = ~same.flatten(1).all(1)
        equal += int(same[~differs].sum())
        if differs.any():
            gate = None if gate is None else gate[differs]
            meter.add(x[differs], gain, bias, expected[differs], got[differs], gate)
    assert equal + meter.elements > 0.9 * ROWS
    if meter.elements:
        for name in ("elements", "identical", "agreeing", "sum_cancellation"):
            setattr(meter, name, getattr(meter, name) + equal)
        failures += judge_norm("it", meter, Criterion())[1]
    return failures


def flat(spec: NormSpec, x: torch.Tensor) -> torch.Tensor:
    """View as a matrix of rows, ``(N, width)`` or ``(N, heads, width)``."""
    rows = spec.rows(x)
    return rows.reshape(-1, *rows.shape[-2 if spec.heads > 1 else -1 :])


def built(kind: str, dtype: torch.dtype) -> tuple[nn.Module, NormSpec]:
    module = KINDS[kind]().to(dtype)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.normal_(1.0, 0.5)
    spec = probe(module)
    assert isinstance(spec, NormSpec), spec
    return module, spec


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_million_rows_stay_within_the_unit_bound(kind: str, dtype: torch.dtype) -> None:
    module, spec = built(kind, dtype)
    assert failures_of(module, spec, dtype) == []


@torch.no_grad()
def test_a_slightly_different_formula_does_not() -> None:
    module, spec = built("Llama's", torch.bfloat16)
    assert failures_of(module, spec, torch.bfloat16, swapped=replace(spec, cast="after_gain"))
    module, spec = built("a scale rounded to the input's dtype", torch.bfloat16)
    assert failures_of(module, spec, torch.bfloat16, swapped=replace(spec, scale_cast="none"))
    module, spec = built("eps as a clamp", torch.float32)
    assert failures_of(module, spec, torch.float32, swapped=replace(spec, eps_position="inside"))
