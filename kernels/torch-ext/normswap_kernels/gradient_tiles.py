"""What the backward kernels do with a tile of rows: load it, normalise it again, differentiate it.

A tile is ``(ROWS, BLOCK_N)`` of float32; statistics are ``(ROWS, 1)``. A tile of None is one that is not there. The
mathematics is that of `gradients.closed_form`, with what it takes from the forward: scale and mean of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .tiles import load, rounded, row_offsets, widen


@triton.jit
def rows_of(tile, ROWS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Number the rows of a tile, ``(ROWS, 1)``, as int64: a row times a stride passes 2**31.

    ``tile`` counts a loop, which the interpreter does in Python's integers.
    """
    return tl.full((1, 1), ROWS, tl.int64) * tile + tl.arange(0, ROWS)[:, None]


@triton.jit
def elements_of(  # type: ignore[no-untyped-def]
    ptr,
    row,
    group,
    cols,
    strides,
    TENSOR: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """Point at a tile of the tensor that has the place TENSOR in ``strides``; strides of None are dense ones."""
    # The row first: the columns are then constants beside one address a thread.
    if strides is None:
        pointers = ptr + (row * GROUPS + group) * N + cols
    else:
        pointers = ptr + row_offsets(row, group, strides[3 * TENSOR], strides[3 * TENSOR + 1], ALIGN)
        pointers += cols.to(tl.int64) * strides[3 * TENSOR + 2]
    return pointers


@triton.jit
def activation_and_slope(gate, ACTIVATION: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the activation of a gate, and its derivative."""
    s = 1.0 / (1.0 + tl.exp(-gate))
    if ACTIVATION == "silu":
        return gate * s, s * (1.0 + gate * (1.0 - s))
    return s, s * (1.0 - s)


@triton.jit
def read_tile(  # type: ignore[no-untyped-def]
    dy_ptr,
    x_ptr,
    gate_ptr,
    scale,
    mean,
    row,
    group,
    cols,
    mask,
    strides,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALIGN: tl.constexpr,
    EVICT: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Return the gradient of the result, the row, the normalised row, and the gate's activation and its derivative."""
    x = load(elements_of(x_ptr, row, group, cols, strides, 0, N, GROUPS, ALIGN), mask, EVICT)
    dy = load(elements_of(dy_ptr, row, group, cols, strides, 1, N, GROUPS, ALIGN), mask, EVICT)
    x, dy = widen(x, EMULATE), widen(dy, EMULATE)
    factor, slope = None, None
    if gate_ptr is not None:
        gate = load(elements_of(gate_ptr, row, group, cols, strides, 3, N, GROUPS, ALIGN), mask, EVICT)
        factor, slope = activation_and_slope(widen(gate, EMULATE), ACTIVATION)
    v = x
    if GATE == "before":
        v = v * factor
    if mean is not None:
        v = v - mean
    return dy, x, v * scale, factor, slope


@triton.jit
def gain_of(w, OFFSET: tl.constexpr, EMULATE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return what a normalised row is multiplied by."""
    gain = widen(w, EMULATE)
    if OFFSET != 0.0:
        gain = gain + OFFSET
    return gain


@triton.jit
def along_moment(  # type: ignore[no-untyped-def]
    total, saved, eps, COUNT: tl.constexpr, EPS_POSITION: tl.constexpr, SCALE: tl.constexpr, EMULATE: tl.constexpr
):
    """Turn the sum of ``d * n`` into what each ``n`` of the moment is weighed with.

    Outside the root and clamped, the scale alone tells how much of the moment passes through. Where that cancels, the
    root is small beside eps, and so is ``n``: the error stays one rounding of ``d``. ``saved`` is the scale before its
    own rounding to ``SCALE``.
    """
    along = total
    if COUNT != 1:
        along = tl.div_rn(total, COUNT * 1.0)
    if SCALE is not None:
        applied = rounded(saved, SCALE, EMULATE)
        passed = tl.where(applied > 0.0, tl.div_rn(saved, applied), 0.0)
        along = along * (passed * passed * passed)
    if EPS_POSITION == "outside":
        passing = 1.0 - saved * eps
        return tl.where(passing > 0.0, tl.div_rn(along, passing), 0.0)
    if EPS_POSITION == "clamp":
        return tl.where(saved < tl.div_rn(1.0, eps), along, 0.0)
    return along


@triton.jit
def row_gradient(  # type: ignore[no-untyped-def]
    d, n, scale, along, centre, cols, COUNTED: tl.constexpr, N: tl.constexpr
):
    """Return the gradient of what is normalised; ``centre`` is the mean of ``d`` in a LayerNorm."""
    if COUNTED != N:
        along = tl.where(cols < COUNTED, along, 0.0)
    if centre is not None:
        d = d - centre
    return scale * (d - n * along)
