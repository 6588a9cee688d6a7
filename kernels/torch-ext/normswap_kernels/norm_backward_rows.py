"""The Triton kernels that go along rows: their gradients, and the sums of the parameters' on the way."""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_tiles import along_moment, elements_of, gain_of, read_tile, row_gradient, rows_of
from .tiles import both, load, load_parameter, round_to, rounded, row_total, widen


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def norm_bwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    dy_ptr,
    ds_ptr,
    gate_ptr,
    w_ptr,
    scale_ptr,
    mean_ptr,
    dx_ptr,
    dgate_ptr,
    dw_ptr,
    db_ptr,
    strides,
    n_rows,
    n_parts,
    eps: tl.float32,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNTED: tl.constexpr,
    SUM: tl.constexpr,
    EPS_POSITION: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    KEEP_GAIN: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Differentiate rows of one group, each in one block; neighbouring programs work on neighbouring groups.

    ``strides`` are (row, group, column) of x, dy, ds and gate, or None where all lie densely. ``dw`` and ``db`` are
    the sums of each program, ``(n_parts, GROUPS, N)``. ``KEEP_GAIN`` keeps the gain in registers from tile to tile.
    """
    program = tl.program_id(0)
    group = (program % GROUPS).to(tl.int64)
    part = program // GROUPS
    COUNT: tl.constexpr = 1 if SUM else COUNTED
    cols = tl.arange(0, BLOCK_N)[None, :]
    in_row = None if N == BLOCK_N else cols < N
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if KEEP_GAIN:
        kept = load_parameter(w_ptr + group * N, cols, in_row, ROWS, BLOCK_N)

    for tile in tl.range(part, tl.cdiv(n_rows, ROWS), n_parts, num_stages=STAGES):
        row = rows_of(tile, ROWS)
        # A lone row is always there, and a mask along the columns only keeps the loads wide.
        there = None if ROWS == 1 else row < n_rows
        mask = both(there, in_row)
        out = (row * GROUPS + group) * N
        saved = load(scale_ptr + row * GROUPS + group, there, "")
        scale = rounded(saved, SCALE, EMULATE)
        mean = load(mean_ptr + row * GROUPS + group, there, "") if mean_ptr is not None else None
        dy, x, n, factor, slope = read_tile(
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
            N,
            GROUPS,
            GATE,
            ACTIVATION,
            ALIGN,
            "",
            EMULATE,
        )
        if w_ptr is not None:
            w = kept if KEEP_GAIN else load_parameter(w_ptr + group * N, cols, in_row, ROWS, BLOCK_N)
            gain = gain_of(w, OFFSET, EMULATE)
        if GATE == "after":
            dgate = dy * (n * gain if w_ptr is not None else n) * slope
            tl.store(dgate_ptr + out + cols, round_to(dgate, dgate_ptr.dtype.element_ty, EMULATE), mask=mask)
            dy = dy * factor
        if dw_ptr is not None:
            dw += dy * n
        if db_ptr is not None:
            db += dy
        d = dy * gain if w_ptr is not None else dy
        along = along_moment(row_total(d * n), saved, eps, COUNT, EPS_POSITION, SCALE, EMULATE)
        centre = tl.div_rn(row_total(d), N * 1.0) if mean_ptr is not None else None
        dx = row_gradient(d, n, scale, along, centre, cols, COUNTED, N)
        if GATE == "before":
            tl.store(dgate_ptr + out + cols, round_to(dx * x * slope, dgate_ptr.dtype.element_ty, EMULATE), mask=mask)
            dx = dx * factor
        if ds_ptr is not None:
            ds = load(elements_of(ds_ptr, row, group, cols, strides, 2, N, GROUPS, ALIGN), mask, "")
            dx += widen(ds, EMULATE)
        tl.store(dx_ptr + out + cols, round_to(dx, dx_ptr.dtype.element_ty, EMULATE), mask=mask)

    at = (part * GROUPS + group) * N + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0)[None, :], mask=in_row)
    if db_ptr is not None:
        tl.store(db_ptr + at, tl.sum(db, axis=0)[None, :], mask=in_row)


@triton.jit(do_not_specialize=["n_cols"])
def norm_bwd_loop_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    dy_ptr,
    ds_ptr,
    gate_ptr,
    w_ptr,
    scale_ptr,
    mean_ptr,
    dx_ptr,
    dgate_ptr,
    strides,
    n_cols,
    eps: tl.float32,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNTED: tl.constexpr,
    SUM: tl.constexpr,
    EPS_POSITION: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Differentiate one row that takes several blocks: a pass for its two sums, and one to write, from L2.

    ``n_cols`` is N. A compiler that knew how often the loops run would unroll them, and run out of registers.
    """
    program = tl.program_id(0)
    group = (program % GROUPS).to(tl.int64)
    # A tile of one row, as in the other kernels.
    row = (program // GROUPS).to(tl.int64) + tl.arange(0, 1)[:, None]
    COUNT: tl.constexpr = 1 if SUM else COUNTED
    block = tl.arange(0, BLOCK_N)[None, :]
    saved = tl.load(scale_ptr + row * GROUPS + group)
    scale = rounded(saved, SCALE, EMULATE)
    mean = tl.load(mean_ptr + row * GROUPS + group) if mean_ptr is not None else None

    products = tl.zeros((1, BLOCK_N), tl.float32)
    total = tl.zeros((1, BLOCK_N), tl.float32)
    for start in range(0, n_cols, BLOCK_N):
        cols = start + block
        in_row = None if N % BLOCK_N == 0 else cols < N
        dy, x, n, factor, slope = read_tile(
            dy_ptr,
            x_ptr,
            gate_ptr,
            scale,
            mean,
            row,
            group,
            cols,
            in_row,
            strides,
            N,
            GROUPS,
            GATE,
            ACTIVATION,
            ALIGN,
            "evict_last",
            EMULATE,
        )
        d = dy * factor if GATE == "after" else dy
        if w_ptr is not None:
            w = load_parameter(w_ptr + group * N, cols, in_row, 1, BLOCK_N)
            d = d * gain_of(w, OFFSET, EMULATE)
        products += d * n
        if mean_ptr is not None:
            total += d
    along = along_moment(row_total(products), saved, eps, COUNT, EPS_POSITION, SCALE, EMULATE)
    centre = tl.div_rn(row_total(total), N * 1.0) if mean_ptr is not None else None

    for start in range(0, n_cols, BLOCK_N):
        cols = start + block
        in_row = None if N % BLOCK_N == 0 else cols < N
        out = (row * GROUPS + group) * N
        dy, x, n, factor, slope = read_tile(
            dy_ptr,
            x_ptr,
            gate_ptr,
            scale,
            mean,
            row,
            group,
            cols,
            in_row,
            strides,
            N,
            GROUPS,
            GATE,
            ACTIVATION,
            ALIGN,
            "evict_first",
            EMULATE,
        )
        if w_ptr is not None:
            w = load_parameter(w_ptr + group * N, cols, in_row, 1, BLOCK_N)
            gain = gain_of(w, OFFSET, EMULATE)
        if GATE == "after":
            dgate = dy * (n * gain if w_ptr is not None else n) * slope
            tl.store(dgate_ptr + out + cols, round_to(dgate, dgate_ptr.dtype.element_ty, EMULATE), mask=in_row)
            dy = dy * factor
        d = dy * gain if w_ptr is not None else dy
        dx = row_gradient(d, n, scale, along, centre, cols, COUNTED, N)
        if GATE == "before":
            tl.store(dgate_ptr + out + cols, round_to(dx * x * slope, dgate_ptr.dtype.element_ty, EMULATE), mask=in_row)
            dx = dx * factor
        if ds_ptr is not None:
            ds = load(elements_of(ds_ptr, row, group, cols, strides, 2, N, GROUPS, ALIGN), in_row, "evict_first")
            dx += widen(ds, EMULATE)
        tl.store(dx_ptr + out + cols, round_to(dx, dx_ptr.dtype.element_ty, EMULATE), mask=in_row)
