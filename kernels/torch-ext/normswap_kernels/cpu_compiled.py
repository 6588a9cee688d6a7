"""The compiled CPU path: what it covers, and how it is called.

It runs on torch's own threads, by way of the OpenMP library that torch has loaded; a short input stays in the thread
that calls, and so does a large one where the cores are taken.
"""

from __future__ import annotations

import functools
import os
import struct
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from . import cpu_blocks as blocks
from .cpu_busy import is_busy
from .formula import Formula

_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_NONE = -1
_QUANTIZED = {torch.int8: 1, torch.float8_e4m3fn: 2}
_GATED = {"none": 0, "before": 1, "after": 2}
_ACTIVATIONS = {"silu": 0, "sigmoid": 1}

# The structs Forward and Backward of cpu_kernels.cpp.
_FORWARD = struct.Struct("38q3d3q")
_BACKWARD = struct.Struct("34q2d3q")

# Elements that a thread takes at a time in a forward, and at least in a backward.
_CHUNK = 2**14

# Below this the system is not asked how busy it is: the answer takes some microseconds.
_LARGE = 2**19

# Parts that a backward is cut into at most; a constant, since it decides in what order a gain's gradient is summed.
_CHUNKS = 64

_forked = False


class Library(NamedTuple):
    """The loaded library.

    Attributes:
        forward: takes a packed ``Forward``.
        backward: takes a packed ``Backward``; None where it does not agree with torch.
        quantizes: whether ``forward`` quantizes as torch does.
        gates: whether both take a gate, with results within a few units of float32 of torch's.
        parallel: address of OpenMP's function that runs a region.
        team: address of OpenMP's function that counts a region's threads.
        lanes: lanes of the vectors that torch sums with in this process.
    """

    forward: Any
    backward: Any
    quantizes: bool
    gates: bool
    parallel: int
    team: int
    lanes: int


def _after_fork() -> None:
    global _forked
    # The threads of OpenMP have stayed with the parent; whoever waits for them waits for ever.
    _forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _threads(elements: int, chunks: int) -> int:
    if elements < 2 * blocks.SERIAL or _forked or (elements >= _LARGE and is_busy()):
        return 1
    return min(torch.get_num_threads(), elements // blocks.SERIAL, chunks)


@functools.lru_cache(maxsize=512)
def plan_forward(
    formula: Formula, dtype: torch.dtype, added: torch.dtype | None, width: int, quantized: torch.dtype | None = None
) -> tuple[int | float, ...] | None:
    """Give the fields of ``Forward`` that say what to compute; None for what the library does not cover.

    Args:
        formula: what to compute.
        dtype: of ``x``.
        added: dtype of the residual, or None.
        width: length of a row.
        quantized: dtype of the quantized values, or None.
    """
    row, out = dtype if added is None else formula.sum_dtype, formula.out_dtype
    roundings = (formula.round_dtype, formula.product_dtype, formula.scale_dtype)
    known = {*_TYPES, None}
    if (
        formula.kind != "rms"
        # Torch's square root is not the nearest number everywhere; its reciprocal square root is.
        or formula.eps_position != "inside"
        or not {dtype, row, out} <= _TYPES.keys()
        or not {added, *roundings} <= known
        or (out != row and torch.float32 not in (out, row))
    ):
        return None
    counted = formula.partial or width
    rounded = (_TYPES.get(t, _NONE) for t in roundings)  # type: ignore[arg-type]
    codes = (_TYPES[row], _TYPES[out], *rounded, _QUANTIZED.get(quantized, 0))  # type: ignore[arg-type,index]
    gate = _GATED[formula.gate_position], _ACTIVATIONS[formula.activation]
    divisor = float(counted) if formula.reduction == "mean" else 1.0
    return (*codes, *gate, counted, int(formula.offset != 0), divisor, formula.eps, formula.offset)


def forward(
    loaded: Library,
    plan: tuple[int | float, ...],
    shape: tuple[int, int, int],
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor | None,
    summed: Tensor | None,
    rstd: Tensor | None,
    values: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Compute RMSNorm, and quantize its result where ``values`` are given.

    Args:
        loaded: the library.
        plan: from `plan_forward`.
        shape: ``(R, G, D)``.
        x: ``(R, G, D)`` of any strides, or dense in any shape.
        residual: likewise, or None.
        gate: likewise, where the plan has one, or None.
        weight: ``G * D`` numbers of a dtype that the library `takes`, or None.
        bias: likewise, or None.
        y: ``R * G * D`` numbers, dense, for the result; None where it is quantized.
        summed: likewise, for the sum with the residual, or None.
        rstd: ``R * G`` numbers, dense, for the scale of each row, or None.
        values: likewise, for the quantized values, or None.
        scales: ``R * G`` numbers, dense, for the scales of the values, or None.
    """
    count, heads, width = shape
    length = heads * width
    per_chunk = max(1, _CHUNK // length)
    threads = _threads(count * length, -(-count // per_chunk))
    x, residual, gate, weight, bias = _dense(x), _dense(residual), _dense(gate), _whole(weight), _whole(bias)
    packed = _FORWARD.pack(
        *(loaded.parallel, loaded.team, threads, count, heads, width),
        *(*_rows(x, shape), *_rows(residual, shape), *_rows(gate, shape), *_parameter(weight), *_parameter(bias)),
        *(0 if t is None else t.data_ptr() for t in (y, summed, values, scales, rstd)),
        *(*plan[:9], loaded.lanes, *plan[9:]),
        *(per_chunk, 0, 0),
    )
    loaded.forward(packed)


def backward(
    loaded: Library,
    formula: Formula,
    shape: tuple[int, int, int],
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    drow: Tensor,
    dgate: Tensor | None,
    dgain: Tensor | None,
    dshift: Tensor | None,
) -> None:
    """Differentiate RMSNorm or LayerNorm.

    Args:
        loaded: the library.
        formula: one that `covers_backward`.
        shape: ``(R, G, D)``.
        grad: ``(R, G, D)`` of any strides, gradient of the result.
        grad_sum: likewise, gradient of the sum with the residual, or None.
        row: likewise, what was normalised, before a gate.
        gate: likewise, or None.
        weight: ``G * D`` numbers of a dtype that the library `takes`, or None.
        rstd: ``(R, G)`` float32.
        mean: ``(R, G)`` float32; None for RMSNorm.
        drow: ``R * G * D`` numbers, dense, for the gradient of ``row``.
        dgate: likewise, for the gradient of the gate, or None.
        dgain: ``G * D`` numbers, dense float32, for the gradient of the gain, or None.
        dshift: likewise, for the gradient of the bias, or None.
    """
    count, heads, width = shape
    chunks = min(count, _CHUNKS, max(1, count * heads * width // _CHUNK))
    per_chunk = -(-count // chunks)
    share = 1.0 if formula.reduction == "sum" else 1.0 / width
    grad, grad_sum, row, gate = _dense(grad), _dense(grad_sum), _dense(row), _dense(gate)
    weight, rstd, mean = _whole(weight), _whole(rstd), _whole(mean)
    packed = _BACKWARD.pack(
        *(loaded.parallel, loaded.team, _threads(count * heads * width, chunks), count, heads, width),
        *(*_rows(grad, shape), *_rows(grad_sum, shape), *_rows(row, shape), *_rows(gate, shape), *_parameter(weight)),
        *(0 if t is None else t.data_ptr() for t in (drow, dgate, rstd, mean, dgain, dshift)),
        *(
            _GATED[formula.gate_position],
            _ACTIVATIONS[formula.activation],
            int(formula.offset != 0),
            _NONE if formula.scale_dtype is None else _TYPES[formula.scale_dtype],
            formula.offset,
            share,
            per_chunk,
            0,
            0,
        ),
    )
    loaded.backward(packed)


def covers_backward(
    formula: Formula, grad: Tensor, grad_sum: Tensor | None, row: Tensor, rstd: Tensor, mean: Tensor | None
) -> bool:
    """Whether the library differentiates this."""
    return (
        formula.eps_position == "inside"
        and not formula.partial
        and (formula.gate_position == "none" or formula.kind == "rms")
        and row.dtype in _TYPES
        and grad.dtype in _TYPES
        and (grad.dtype == row.dtype or torch.float32 in (grad.dtype, row.dtype))
        and (grad_sum is None or grad_sum.dtype in _TYPES)
        # Float64 for a float64 input, whose sum may be narrower.
        and rstd.dtype == torch.float32
        and (mean is None or mean.dtype == torch.float32)
    )


def takes(*tensors: Tensor | None) -> bool:
    """Whether the library takes gains, biases and gates of these dtypes."""
    return all(t is None or t.dtype in _TYPES for t in tensors)


_T = TypeVar("_T", Tensor, "Tensor | None")


def _dense(t: _T) -> _T:
    """Give a tensor whose last dimension is dense; the caller must hold it while its address is used."""
    return t if t is None or t.is_contiguous() or t.stride(-1) == 1 else t.contiguous()


def _whole(t: _T) -> _T:
    return t if t is None or t.is_contiguous() else t.contiguous()


def _rows(t: Tensor | None, shape: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Give the fields of a ``Tensor`` of cpu_vectors.h."""
    if t is None:
        return 0, 0, 0, 0
    if t.is_contiguous():
        return t.data_ptr(), _TYPES[t.dtype], shape[1] * shape[2], shape[2]
    return t.data_ptr(), _TYPES[t.dtype], t.stride(0), t.stride(1)


def _parameter(t: Tensor | None) -> tuple[int, int]:
    return (0, 0) if t is None else (t.data_ptr(), _TYPES[t.dtype])
