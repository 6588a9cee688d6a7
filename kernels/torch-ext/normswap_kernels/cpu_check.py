"""Compare the compiled CPU path with torch's operations before it is used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from . import cpu_blocks as blocks
from . import cpu_compiled as compiled
from .cpu_blocks_backward import backward
from .formula import Activation, Formula, GatePosition, Kind

# Lanes of the vectors that torch may sum with: AVX-512, AVX2, 128 bits.
_LANES = (16, 8, 4)

# Widths below, at and past the vectors, their blocks of four and the levels of a sum of them.
_WIDTHS = (1, 7, 16, 127, 1024, 2111, 4096, 20011)

# Gradients are summed in another order than torch's.
_TOLERANCE = 1e-4

# Units of float32 between two gated results: both exponentials may be off by one, and there are other roundings.
_UNITS = 8

Pair = tuple[Tensor, Tensor]

# What is differentiated, and whether its scale is rounded.
_KINDS: tuple[tuple[Kind, bool], ...] = (("rms", False), ("rms", True), ("layer", False))
_GATES: tuple[GatePosition, ...] = ("before", "after")
_ACTIVATIONS: tuple[Activation, ...] = ("silu", "sigmoid")


def prove(library: compiled.Library) -> compiled.Library | None:
    """Find the order of summation that gives torch's bits here: results must not depend on there being a compiler.

    Those with a gate may, in the last digits of float32, since torch's exponential has its own.

    Args:
        library: the library as it was loaded.

    Returns:
        The library with what agrees with torch; None where no order gives torch's bits.
    """
    with torch.inference_mode():
        for lanes in _LANES:
            candidate = library._replace(lanes=lanes)
            if all(torch.equal(*pair) for pair in _forwards(candidate)):
                return candidate._replace(
                    backward=candidate.backward if all(_agree(*pair) for pair in _backwards(candidate)) else None,
                    gates=_gates_agree(candidate),
                    quantizes=all(torch.equal(*pair) for pair in _quantized(candidate)),
                )
    return None


def _draw(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32).to(dtype)


def _forwards(library: compiled.Library) -> Iterator[Pair]:
    """Yield results of the library and of torch."""
    for width in _WIDTHS:
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            x, weight = _draw(2, 1, width, seed=1, dtype=dtype), _draw(1, width, seed=2, dtype=dtype)
            formula = Formula("rms", 1e-6, 0.0, dtype, None, dtype)
            residual = None
            if width == 127:
                residual = _draw(2, 1, width, seed=3, dtype=dtype)
                formula = formula._replace(sum_dtype=dtype, round_dtype=None, offset=1.0)
            if width == 16:
                formula = formula._replace(round_dtype=None, scale_dtype=dtype)
            ours, theirs = torch.empty_like(x), torch.empty_like(x)
            sums = (None, None) if residual is None else (torch.empty_like(x), torch.empty_like(x))
            plan = compiled.plan_forward(formula, dtype, formula.sum_dtype, width)
            assert plan is not None
            compiled.forward(library, plan, (2, 1, width), x, residual, None, weight, None, ours, sums[0], None)
            applied = blocks.parameters(formula, weight, None, torch.float32)
            blocks.forward(formula, x, residual, None, applied, theirs, sums[1], None, None)
            yield ours, theirs
            if sums[0] is not None and sums[1] is not None:
                yield sums[0], sums[1]


def _backwards(library: compiled.Library) -> Iterator[Pair]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for kind, rounded in _KINDS:
            width = 143
            formula = Formula(kind, 1e-6, 1.0, dtype, None, dtype, scale_dtype=dtype if rounded else None)
            row, grad, grad_sum = (_draw(5, 1, width, seed=seed, dtype=dtype) for seed in (1, 2, 3))
            weight = _draw(1, width, seed=4, dtype=dtype)
            mean = row.float().mean(-1, keepdim=True) if kind == "layer" else None
            rstd = (row.float().square().mean(-1, keepdim=True) + 1e-6).rsqrt()
            drow = torch.empty_like(row), torch.empty_like(row)
            sums = [torch.empty((1, width), dtype=torch.float32, device="cpu") for _ in range(2)]
            shape = 5, 1, width
            compiled.backward(
                library, formula, shape, grad, grad_sum, row, None, weight, rstd, mean, drow[0], None, *sums
            )
            gain = weight.float() + 1.0
            theirs = backward(formula, grad, grad_sum, row, None, gain, rstd, mean, drow[1], None, (True, True))
            yield drow[0].float(), drow[1].float()
            for ours, other in zip(sums, theirs, strict=True):
                assert other is not None
                yield ours, other


def _gates_agree(library: compiled.Library) -> bool:
    """Compare norms with a gate: results within some units of float32, gradients as those of the others.

    The exponentials reach from 0 to infinity.
    """
    width, shape = 143, (5, 1, 143)
    dtypes = torch.bfloat16, torch.float16, torch.float32
    for position, activation, dtype in itertools.product(_GATES, _ACTIVATIONS, dtypes):
        formula = Formula("rms", 1e-6, 1.0, None, None, torch.float32, gate_position=position, activation=activation)
        x, gate, grad = (_draw(*shape, seed=seed, dtype=dtype) for seed in (1, 2, 3))
        gate[0] *= 60
        weight = _draw(1, width, seed=4, dtype=dtype)
        applied = blocks.parameters(formula, weight, None, torch.float32)
        plan = compiled.plan_forward(formula, dtype, None, width)
        assert plan is not None
        y, scale = (torch.empty((2, *rows), dtype=torch.float32, device="cpu") for rows in (shape, (5, 1, 1)))
        compiled.forward(library, plan, shape, x, None, gate, weight, None, y[0], None, scale[0])
        blocks.forward(formula, x, None, gate, applied, y[1], None, scale[1], None)
        if not (_nearly_equal(*y) and _nearly_equal(*scale)):
            return False
        if library.backward is None:
            continue
        drow, dgate = (torch.empty((2, *shape), dtype=dtype, device="cpu") for _ in range(2))
        dgain = torch.empty((1, width), dtype=torch.float32, device="cpu")
        written = drow[0], dgate[0], dgain, None
        compiled.backward(library, formula, shape, grad, None, x, gate, weight, scale[1], None, *written)
        given = grad, None, x, gate, applied.gain, scale[1], None
        theirs = backward(formula, *given, drow[1], dgate[1], (True, False))[0]
        if theirs is None or not (_agree(*drow) and _agree(*dgate) and _agree(dgain, theirs)):
            return False
    return True


def _nearly_equal(ours: Tensor, theirs: Tensor) -> bool:
    limits = torch.finfo(torch.float32)
    return bool(((ours - theirs).abs() <= _UNITS * (limits.eps * theirs.abs() + limits.smallest_normal)).all().item())


def _agree(ours: Tensor, theirs: Tensor) -> bool:
    # Where the digits differ a rounding to bfloat16 may go the other way.
    ours, theirs = ours.float(), theirs.float()
    return bool(((ours - theirs).abs().mean() <= _TOLERANCE * theirs.abs().mean()).item())


def _quantized(library: compiled.Library) -> Iterator[Pair]:
    for dtype in (torch.int8, torch.float8_e4m3fn):
        width = 1003
        x = _draw(4, 1, width, seed=1, dtype=torch.bfloat16)
        x[1] *= torch.logspace(-6, 2, width, device="cpu").to(x.dtype)
        x[2], x[3, 0, 5] = 0, float("inf")
        formula = Formula("rms", 1e-6, 0.0, None, None, torch.bfloat16)
        plan = compiled.plan_forward(formula, x.dtype, None, width, dtype)
        assert plan is not None
        values, scales = (torch.empty((4, 1, width), dtype=dtype, device="cpu") for _ in range(2))
        found = torch.empty((2, 4, 1, 1), dtype=torch.float32, device="cpu")
        given = x, None, None, None, None, None, None, None
        compiled.forward(library, plan, (4, 1, width), *given, values, found[0])
        y = torch.empty_like(x)
        blocks.forward(formula, x, None, None, blocks.parameters(formula, None, None, torch.float32), y, *[None] * 3)
        blocks.quantize(y.float(), scales, found[1])
        yield values.view(torch.int8), scales.view(torch.int8)
        yield found[0][:3], found[1][:3]
