"""What the kernels do with a tile of rows: load it, take its statistics, round it, apply gain, bias and gate.

A tile is ``(ROWS, BLOCK_N)``; statistics are ``(ROWS, 1)``. A mask, a pointer or a tile of None is one that is not
there, and what would be done with it is compiled away.

The interpreter turns float32 into bfloat16 by cutting off the low half of the word, and denormals into others.
`EMULATE`, on only there, rounds to nearest even in integer arithmetic instead. So the interpreter checks the
formulas, the masks, the strides and the places of the roundings. What remains for a GPU: its own conversions, its
order of summation, the layouts that the compiler chooses, and races, of which the interpreter has none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def triton_dtype(dtype: torch.dtype | None) -> tl.dtype | None:
    """Return Triton's name of a dtype; None for None."""
    return None if dtype is None else _TRITON_DTYPES[dtype]


@triton.jit
def round_to(v, DTYPE: tl.constexpr, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round a float32 tile to ``DTYPE``, to nearest even."""
    if EMULATE and DTYPE == tl.bfloat16:  # noqa: SIM300
        bits = v.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        # Rounding up could carry a NaN's payload over into the sign; a set quiet bit keeps it a NaN when cut.
        bits = tl.where(v != v, bits | 0x00400000, nearest) >> 16
        return bits.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return v.to(DTYPE)


@triton.jit
def widen(v, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn a tile into float32."""
    if EMULATE and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return v.to(tl.float32)


@triton.jit
def rounded(v, DTYPE: tl.constexpr, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Round a float32 tile to ``DTYPE`` and go on in float32; None rounds nothing."""
    if DTYPE is None:
        return v
    else:
        return widen(round_to(v, DTYPE, EMULATE), EMULATE)


@triton.jit
def load(pointers, mask, EVICT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile in its own dtype; lanes outside the mask are 0. ``EVICT`` is Triton's eviction policy, or ``""``."""
    if mask is None:
        return tl.load(pointers, eviction_policy=EVICT)
    else:
        return tl.load(pointers, mask=mask, other=0.0, eviction_policy=EVICT)


@triton.jit
def load_parameter(  # type: ignore[no-untyped-def]
    ptr, cols, in_row, ROWS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Load a gain or a bias beside each row, in its own dtype; ``cols`` and ``in_row`` are ``(1, BLOCK_N)``.

    The tile repeats the parameter for each row. As ``(1, BLOCK_N)`` it would get a layout of its own, one or two
    elements a thread where rows are short, and take a way through shared memory to the layout of the rows.
    """
    return load(tl.broadcast_to(ptr + cols, (ROWS, BLOCK_N)), in_row, "evict_last")


@triton.jit
def row_offsets(  # type: ignore[no-untyped-def]
    row, group, row_stride, group_stride, ALIGN: tl.constexpr
):
    """Return where rows begin, ``(ROWS, 1)``: ``row`` and ``group`` are int64, as a row times a stride passes 2**31.

    ``ALIGN`` divides both strides, which Triton sees by itself only of constants and of multiples of 16. (It also
    has hints for this, tl.multiple_of, which crash its compiler where a tile of one row becomes a scalar.)
    """
    return (row * (row_stride // ALIGN) + group * (group_stride // ALIGN)) * ALIGN


@triton.jit
def both(a, b):  # type: ignore[no-untyped-def]
    """Combine two masks, either of which may be None."""
    if a is None:
        return b
    elif b is None:
        return a
    else:
        return a & b


@triton.jit
def sigmoid(v):  # type: ignore[no-untyped-def]
    """Return ``1 / (1 + exp(-v))``.

    The quotient is mended by one step of Newton's: as good as tl.div_rn, whose branch for denormals, once for each
    element, nearly doubles the registers of a kernel.
    """
    below = 1.0 + tl.exp(-v)
    quotient = 1.0 / below
    mended = tl.fma(quotient, tl.fma(-below, quotient, 1.0), quotient)
    # Infinity times 0 is NaN.
    return tl.where(below < float("inf"), mended, quotient)


@triton.jit
def activation(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Activate a float32 gate: ``"silu"`` or ``"sigmoid"``."""
    s = sigmoid(gate)
    if ACTIVATION == "silu":
        return gate * s
    else:
        return s


@triton.jit
def row_total(v):  # type: ignore[no-untyped-def]
    """Add up each row."""
    return tl.sum(v, axis=1)[:, None]


@triton.jit
def scale_of(  # type: ignore[no-untyped-def]
    total, eps, COUNT: tl.constexpr, EPS_POSITION: tl.constexpr
):
    """Turn the sum of the squares into the scale of a row; ``COUNT`` is what the moment divides by."""
    moment = total
    if COUNT != 1:
        moment = tl.div_rn(total, COUNT * 1.0)
    if EPS_POSITION == "inside":
        below = tl.sqrt_rn(moment + eps)
    elif EPS_POSITION == "outside":
        below = tl.sqrt_rn(moment) + eps
    else:
        root = tl.sqrt_rn(moment)
        # Not tl.maximum, which would drop a NaN.
        below = tl.where(root < eps, eps, root)
    return tl.div_rn(1.0, below)


@triton.jit
def finish(  # type: ignore[no-untyped-def]
    n,
    w,
    b,
    gate,
    OFFSET: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRODUCT: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Apply gain, bias and the gate after the norm to a normalised float32 tile, with the roundings on the way.

    ``w``, ``b`` and ``gate`` are tiles in their own dtypes, or None. Returns float32: the last rounding is left.
    """
    n = rounded(n, MIDDLE, EMULATE)
    if w is not None:
        gain = widen(w, EMULATE)
        if OFFSET != 0.0:
            gain = gain + OFFSET
        n = rounded(n * gain, PRODUCT, EMULATE)
    if b is not None:
        n = n + widen(b, EMULATE)
    if gate is not None:
        n = n * activation(widen(gate, EMULATE), ACTIVATION)
    return n
