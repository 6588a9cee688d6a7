"""What both kernels do with a normalised tile: round, apply gain and bias, round.

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
    return v.to(DTYPE)


@triton.jit
def widen(v, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Turn a tile into float32."""
    if EMULATE and v.dtype == tl.bfloat16:
        return (v.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return v.to(tl.float32)


@triton.jit
def gain_bias_round(  # type: ignore[no-untyped-def]
    n,
    w_ptr,
    b_ptr,
    cols,
    mask,
    HAS_GAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    OUT: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Finish a tile ``n`` ``(ROWS, BLOCK_N)`` of float32; ``cols`` and ``mask`` are ``(1, BLOCK_N)``."""
    if MIDDLE is not None:
        n = widen(round_to(n, MIDDLE, EMULATE), EMULATE)
    if HAS_GAIN:
        w = widen(tl.load(w_ptr + cols, mask=mask, other=0.0), EMULATE)
        if OFFSET != 0.0:
            w = w + OFFSET
        n = n * w
        if MIDDLE is not None and HAS_BIAS:
            n = widen(round_to(n, OUT, EMULATE), EMULATE)
    if HAS_BIAS:
        n = n + widen(tl.load(b_ptr + cols, mask=mask, other=0.0), EMULATE)
    return round_to(n, OUT, EMULATE)
