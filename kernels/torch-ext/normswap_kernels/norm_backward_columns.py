"""The Triton kernels that go along columns: the gradients of gain and bias, part by part and all parts together."""

from __future__ import annotations

import triton
import triton.language as tl

from .gradient_tiles import read_tile, rows_of
from .tiles import both, load, round_to, rounded


@triton.jit(do_not_specialize=["n_rows", "n_parts"])
def parameter_bwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    dy_ptr,
    gate_ptr,
    scale_ptr,
    mean_ptr,
    dw_ptr,
    db_ptr,
    strides,
    n_rows,
    n_parts,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Add up the gradients of the parameters in a block of columns, over every ``n_parts``-th tile of rows."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    cols = (program % BLOCKS) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = None if N % BLOCK_N == 0 else cols < N
    group = (program // BLOCKS % GROUPS).to(tl.int64)
    part = program // (BLOCKS * GROUPS)
    if dw_ptr is not None:
        dw = tl.zeros((ROWS, BLOCK_N), tl.float32)
    if db_ptr is not None:
        db = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for tile in tl.range(part, tl.cdiv(n_rows, ROWS), n_parts, num_stages=STAGES):
        row = rows_of(tile, ROWS)
        there = row < n_rows
        scale = rounded(load(scale_ptr + row * GROUPS + group, there, ""), SCALE, EMULATE)
        mean = load(mean_ptr + row * GROUPS + group, there, "") if mean_ptr is not None else None
        dy, _, n, factor, _ = read_tile(
            dy_ptr,
            x_ptr,
            gate_ptr,
            scale,
            mean,
            row,
            group,
            cols,
            both(there, in_row),
            strides,
            N,
            GROUPS,
            GATE,
            ACTIVATION,
            ALIGN,
            "evict_first",
            EMULATE,
        )
        if GATE == "after":
            dy = dy * factor
        if dw_ptr is not None:
            dw += dy * n
        if db_ptr is not None:
            db += dy
    at = (part * GROUPS + group) * N + cols
    if dw_ptr is not None:
        tl.store(dw_ptr + at, tl.sum(dw, axis=0)[None, :], mask=in_row)
    if db_ptr is not None:
        tl.store(db_ptr + at, tl.sum(db, axis=0)[None, :], mask=in_row)


@triton.jit(do_not_specialize=["n_parts"])
def sum_parts_kernel(  # type: ignore[no-untyped-def]
    parts_ptr,
    first_ptr,
    second_ptr,
    n_parts,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Add up ``(n_parts, N)``, always in the same order, to ``first``; and what lies behind it to ``second``."""
    BLOCKS: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    program = tl.program_id(0)
    which = program // BLOCKS
    cols = program % BLOCKS * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    in_row = None if N % BLOCK_N == 0 else cols < N
    total = tl.zeros((ROWS, BLOCK_N), tl.float32)
    for start in tl.range(0, n_parts, ROWS, num_stages=STAGES):
        part = start + tl.arange(0, ROWS)[:, None]
        there = part < n_parts if in_row is None else (part < n_parts) & in_row
        total += tl.load(parts_ptr + (which * n_parts + part).to(tl.int64) * N + cols, mask=there, other=0.0)
    y = tl.sum(total, axis=0)[None, :]
    if which == 0:
        tl.store(first_ptr + cols, round_to(y, first_ptr.dtype.element_ty, EMULATE), mask=in_row)
    elif second_ptr is not None:
        tl.store(second_ptr + cols, round_to(y, second_ptr.dtype.element_ty, EMULATE), mask=in_row)
