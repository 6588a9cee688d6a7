"""Each swapped norm beside its own original, row by row, in every dtype that models are served in."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normswap import modules
from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter
from normswap.replica import Replica
from normswap.spec import NormSpec
from normswap.stats import FLOAT32_NOISE

__all__ = ["DTYPES", "Units", "counting_originals", "measure_units"]

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_ELEMENTS = 120_000
# Two right float32 results, each within the noise of the truth.
_FLOAT32_UNITS = 2 * FLOAT32_NOISE


_Arrange = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Units:
    """How far one norm is from its original in one dtype.

    Attributes:
        worst: units in the last place; of float32, at the largest term behind a result.
        identical: fraction of bit-identical elements.
        failures: what is out of the unit bound, in words; empty where all is within.
        originals: calls that went back to the original's own code.
        calls: calls in all; 0 where the original itself does not run in this dtype.
    """

    worst: float
    identical: float
    failures: tuple[str, ...]
    originals: int
    calls: int


@contextmanager
def counting_originals(norms: list[nn.Module]) -> Iterator[list[nn.Module]]:
    """Collect the swapped norms whose original's forward is called inside the ``with`` block, one entry a call."""
    called: list[nn.Module] = []
    own = {cls: cls.forward for norm in norms for cls in [modules.original_class(norm)]}

    def counting(forward: Any) -> Any:
        def count(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, modules.FusedNorm):
                called.append(self)
            return forward(self, *args, **kwargs)

        return count

    inherited = {cls for cls in own if "forward" not in vars(cls)}
    try:
        for cls, forward in own.items():
            cls.forward = counting(forward)  # type: ignore[method-assign]
        yield called
    finally:
        for cls, forward in own.items():
            if cls in inherited:
                del cls.forward
            else:
                cls.forward = forward  # type: ignore[method-assign]


@torch.no_grad()
def measure_units(module: nn.Module, spec: NormSpec) -> dict[str, Units]:
    """Measure one norm in each of `DTYPES`: with its own parameters, and with random ones of trained models' sizes.

    Args:
        module: the norm, not swapped; it is copied.
        spec: what it computes.

    Returns:
        The figures by dtype name.
    """
    found = {}
    generator = torch.Generator().manual_seed(0)
    row = Replica(module).shape
    arrange = _arrangement(copy.deepcopy(module).float().eval(), spec, row)
    for name, dtype in DTYPES.items():
        meter, originals, calls = NormMeter(spec), 0, 0
        for own in (True, False):
            norm = copy.deepcopy(module).to(dtype).eval()
            if not own:
                _randomise(norm, generator)
            tensors = [None if n is None else getattr(norm, n) for n in (spec.gain_name, spec.bias_name)]
            for x, gate in _inputs(spec, row, arrange, dtype, generator):
                arguments = _arguments(spec, x, gate)
                if (expected := _try(norm, arguments)) is None:
                    continue
                modules.swap(norm, spec, "auto")
                with counting_originals([norm]) as called:
                    got = norm(**arguments)
                modules.unswap(norm)
                originals, calls = originals + len(called), calls + 1
                meter.add(x, *tensors, expected, got, gate)
        figures, failures = judge_norm(name, meter, Criterion())
        # The gate holds float32 results to the truth of the spec, which could itself be wrong.
        if dtype == torch.float32 and not meter.max_ulp <= _FLOAT32_UNITS:
            failures.append(f"{meter.max_ulp:.3g} units of float32 from the original, above {_FLOAT32_UNITS}")
        found[name] = Units(meter.max_ulp, figures.bit_identical_fraction, tuple(failures), originals, calls)
    return found


def _randomise(norm: nn.Module, generator: torch.Generator) -> None:
    for tensor in (*norm.parameters(), *norm.buffers()):
        if tensor.is_floating_point():
            magnitude = 10 ** (5 * torch.rand(tensor.shape, generator=generator) - 2)
            magnitude[torch.rand(tensor.shape, generator=generator) < 0.02] = 0.0
            sign = torch.where(torch.rand(tensor.shape, generator=generator) < 0.3, -1.0, 1.0)
            tensor.copy_(magnitude * sign)


def _arguments(spec: NormSpec, x: Tensor, gate: Tensor | None) -> dict[str, Tensor]:
    arguments = {spec.input_name: x}
    return arguments if gate is None or spec.gate_name is None else arguments | {spec.gate_name: gate}


def _inputs(
    spec: NormSpec, row: tuple[int, ...], arrange: _Arrange, dtype: torch.dtype, generator: torch.Generator
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield inputs and gates: many rows, few rows, rows far above and far below the ordinary, and odd ones."""
    many = max(4, _ELEMENTS // math.prod(row))
    small = max(spec.eps, 1e-12) ** 0.5
    gates: list[float | None] = [None] if spec.gate is None or spec.gate_optional else []
    gates += [2.0] if spec.gate is not None else []
    drawn = [
        scale * torch.randn(count, *row, generator=generator)
        for count, scale in ((many, 1.0), (1, 1.0), (2, 1.0), (7, 1.0), (67, 1e3), (67, small))
    ]
    for x in (*drawn, _odd_rows(row)):
        for scale in gates:
            gate = None if scale is None else arrange((scale * torch.randn(x.shape, generator=generator)).to(dtype))
            yield arrange(x.to(dtype)), gate


def _odd_rows(row: tuple[int, ...]) -> Tensor:
    """Rows that are zero, constant, one number among zeros, huge, NaN and infinite in one place."""
    odd = torch.zeros(7, *row)
    odd[1], odd[2] = 3.0, -0.001
    odd[3, ..., 0] = 5.0
    odd[4] = 3e4 * torch.linspace(-1, 1, row[-1])
    odd[5:] = torch.linspace(-1, 1, row[-1])
    odd[5, ..., 1], odd[6, ..., 1] = float("nan"), float("inf")
    return odd


def _arrangement(norm: nn.Module, spec: NormSpec, row: tuple[int, ...]) -> _Arrange:
    """Return how rows ``(count, *row)`` are handed over: the first way in which the original takes them."""
    ways: tuple[_Arrange, ...] = (lambda x: x[None], lambda x: x)
    if spec.axis == "channels":
        ways = (
            lambda x: x.movedim(0, -1)[None].unsqueeze(-1).contiguous(),
            lambda x: x.movedim(0, -1)[None].contiguous(),
        )
    if spec.joins > 1:
        ways = (lambda x: x.unflatten(-1, (spec.joins, -1))[None],)
    for way in ways:
        x = way(torch.ones(4, *row))
        y = _try(norm, _arguments(spec, x, x if spec.gate is not None else None))
        if y is not None and y.shape == (x.flatten(-2) if spec.joins > 1 else x).shape:
            return way
    raise ValueError(f"{type(norm).__name__} runs on no arrangement of rows {row}")


def _try(norm: nn.Module, arguments: dict[str, Tensor]) -> Tensor | None:
    try:
        return modules.original_forward(norm, **arguments)
    except Exception:
        return None
