"""The norms in Triton, forward: one kernel for every formula, and its launcher."""

from __future__ import annotations

import functools
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from .formula import Formula
from .launch import INTERPRETER, Device, Launch, choose_tile, device_of, find_alignment
from .launching import run
from .tiles import (
    activation,
    both,
    finish,
    load,
    load_parameter,
    round_to,
    rounded,
    row_offsets,
    row_total,
    scale_of,
    triton_dtype,
    widen,
)


@triton.jit(do_not_specialize=["n_rows"])
def _norm_fwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    gate_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    sum_ptr,
    rstd_ptr,
    mean_ptr,
    strides,
    n_rows,
    eps: tl.float32,
    KIND: tl.constexpr,
    N: tl.constexpr,
    GROUPS: tl.constexpr,
    COUNTED: tl.constexpr,
    SUM: tl.constexpr,
    EPS_POSITION: tl.constexpr,
    GATE: tl.constexpr,
    ACTIVATION: tl.constexpr,
    OFFSET: tl.constexpr,
    SCALE: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRODUCT: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Normalise ROWS rows of one group; neighbouring programs work on neighbouring groups.

    ``strides`` are (row, group, column) of x, residual and gate, or None where all lie densely. ``COUNTED`` is the
    number of leading columns in the moment; ``SUM`` says that it is their sum, not their mean. The scale that is stored
    is not rounded to ``SCALE``: its own gradient is taken there.
    """
    program = tl.program_id(0)
    group = (program % GROUPS).to(tl.int64)
    row = (program // GROUPS).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    # A lone row is always there, and a mask along the columns only keeps the loads wide.
    there = None if ROWS == 1 else row < n_rows
    block = tl.arange(0, BLOCK_N)[None, :]
    dense = (row * GROUPS + group) * N
    y_rows = y_ptr + dense
    COUNT: tl.constexpr = 1 if SUM else COUNTED
    # What is needed last is loaded before the statistics, so that no load waits for them, unless registers are short.
    EARLY: tl.constexpr = BLOCK_N <= 8192
    OUT: tl.constexpr = y_ptr.dtype.element_ty
    w_row = w_ptr + group * N if w_ptr is not None else None
    b_row = b_ptr + group * N if b_ptr is not None else None
    sum_rows = sum_ptr + dense if sum_ptr is not None else None
    if strides is None:
        x_rows = x_ptr + dense
        residual_rows = residual_ptr + dense if residual_ptr is not None else None
        gate_rows = gate_ptr + dense if gate_ptr is not None else None
        x_step, residual_step, gate_step = 1, 1, 1
    else:
        x_rows = x_ptr + row_offsets(row, group, strides[0], strides[1], ALIGN)
        x_step = strides[2]
        residual_rows, residual_step = None, 1
        if residual_ptr is not None:
            residual_rows = residual_ptr + row_offsets(row, group, strides[3], strides[4], ALIGN)
            residual_step = strides[5]
        gate_rows, gate_step = None, 1
        if gate_ptr is not None:
            gate_rows = gate_ptr + row_offsets(row, group, strides[6], strides[7], ALIGN)
            gate_step = strides[8]

    if BLOCK_N >= N:
        in_row = None if N == BLOCK_N else block < N
        mask = both(in_row, there)
        cols = block.to(tl.int64)
        v = widen(load(x_rows + cols * x_step, mask, ""), EMULATE)
        if residual_ptr is not None:
            v = v + widen(load(residual_rows + cols * residual_step, mask, ""), EMULATE)
            total = round_to(v, sum_ptr.dtype.element_ty, EMULATE)
            tl.store(sum_rows + block, total, mask=mask)
            v = widen(total, EMULATE)
        if EARLY or GATE == "before":
            gate = load(gate_rows + cols * gate_step, mask, "") if gate_ptr is not None else None
        if EARLY:
            w = load_parameter(w_row, block, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
            b = load_parameter(b_row, block, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
        if GATE == "before":
            v = v * activation(widen(gate, EMULATE), ACTIVATION)
        if KIND == "layer":
            mean = tl.div_rn(row_total(v), N * 1.0)
            v = v - mean
            if in_row is not None:
                # The lanes past the row hold -mean now and would count in the variance.
                v = tl.where(in_row, v, 0.0)
            if mean_ptr is not None:
                tl.store(mean_ptr + row * GROUPS + group, mean, mask=there)
        counted = v if COUNTED == N else tl.where(block < COUNTED, v, 0.0)
        scale = scale_of(row_total(counted * counted), eps, COUNT, EPS_POSITION)
        applied = rounded(scale, SCALE, EMULATE)
        if not (EARLY or GATE == "before"):
            gate = load(gate_rows + cols * gate_step, mask, "") if gate_ptr is not None else None
        if not EARLY:
            w = load_parameter(w_row, block, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
            b = load_parameter(b_row, block, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
        after = gate if GATE == "after" else None
        y = finish(v * applied, w, b, after, OFFSET, MIDDLE, PRODUCT, ACTIVATION, EMULATE)
        tl.store(y_rows + block, round_to(y, OUT, EMULATE), mask=mask)
    else:
        tl.static_assert(ROWS == 1)
        first = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        second = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        # The sum is written for the whole row, the moment needs its counted part.
        for start in range(0, COUNTED if residual_ptr is None else N, BLOCK_N):
            cols = start + block
            in_row = None if N % BLOCK_N == 0 else cols < N
            at = cols.to(tl.int64)
            v = widen(load(x_rows + at * x_step, in_row, "evict_last"), EMULATE)
            if residual_ptr is not None:
                v = v + widen(load(residual_rows + at * residual_step, in_row, "evict_first"), EMULATE)
                total = round_to(v, sum_ptr.dtype.element_ty, EMULATE)
                tl.store(sum_rows + cols, total, mask=in_row)
                v = widen(total, EMULATE)
            if GATE == "before":
                v = v * activation(widen(load(gate_rows + at * gate_step, in_row, "evict_last"), EMULATE), ACTIVATION)
            if KIND == "layer":
                # Welford's update in each lane: its mean, and its squares about it.
                off = v - first
                step = off * tl.div_rn(1.0, (start // BLOCK_N + 1) * 1.0)
                if in_row is not None:
                    step = tl.where(in_row, step, 0.0)
                    off = tl.where(in_row, off, 0.0)
                    v = tl.where(in_row, v, first + step)
                first += step
                second += off * (v - first)
            else:
                if COUNTED != N:
                    v = tl.where(cols < COUNTED, v, 0.0)
                second += v * v
        if KIND == "layer":
            # The lanes are merged after Chan, Golub and LeVeque: a lane's squares about the mean of all.
            n_blocks = ((N - 1 - block) // BLOCK_N + 1).to(tl.float32)
            mean = tl.div_rn(row_total(first * n_blocks), N * 1.0)
            second += n_blocks * (first - mean) * (first - mean)
            if mean_ptr is not None:
                tl.store(mean_ptr + row * GROUPS + group, mean)
        scale = scale_of(row_total(second), eps, COUNT, EPS_POSITION)
        applied = rounded(scale, SCALE, EMULATE)
        if residual_ptr is not None:
            # Other threads of this program may have written what is now read back.
            tl.debug_barrier()
        for start in range(0, N, BLOCK_N):
            cols = start + block
            in_row = None if N % BLOCK_N == 0 else cols < N
            at = cols.to(tl.int64)
            if residual_ptr is not None:
                v = widen(load(sum_rows + cols, in_row, "evict_first"), EMULATE)
            else:
                v = widen(load(x_rows + at * x_step, in_row, "evict_first"), EMULATE)
            gate = load(gate_rows + at * gate_step, in_row, "evict_first") if gate_ptr is not None else None
            w = load_parameter(w_row, cols, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
            b = load_parameter(b_row, cols, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
            if GATE == "before":
                v = v * activation(widen(gate, EMULATE), ACTIVATION)
            if KIND == "layer":
                v = v - mean
            after = gate if GATE == "after" else None
            y = finish(v * applied, w, b, after, OFFSET, MIDDLE, PRODUCT, ACTIVATION, EMULATE)
            tl.store(y_rows + cols, round_to(y, OUT, EMULATE), mask=in_row)
    if rstd_ptr is not None:
        tl.store(rstd_ptr + row * GROUPS + group, scale, mask=there)


@functools.lru_cache(maxsize=4096)
def _options(formula: Formula, groups: int, width: int, align: int, device: Device) -> tuple[int, dict[str, Any]]:
    """Return the rows of a program and the compile-time arguments."""
    tile = choose_tile(width)
    return tile.rows, {
        "KIND": formula.kind,
        "N": width,
        "GROUPS": groups,
        "COUNTED": formula.partial or width,
        "SUM": formula.reduction == "sum",
        "EPS_POSITION": formula.eps_position,
        "GATE": formula.gate_position,
        "ACTIVATION": formula.activation,
        "OFFSET": float(formula.offset),
        "SCALE": triton_dtype(formula.scale_dtype),
        "MIDDLE": triton_dtype(formula.round_dtype),
        "PRODUCT": triton_dtype(formula.product_dtype),
        "ALIGN": align,
        "ROWS": tile.rows,
        "BLOCK_N": tile.block_n,
        "EMULATE": device.interpreted,
        "num_warps": tile.num_warps(device.warp_size),
        # As torch rounds: the product, and then the sum. The kernels wait for memory, so it costs nothing.
        "enable_fp_fusion": False,
    }


def prepare(
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    device: Device,
    shape: tuple[int, int, int] | None = None,
) -> Launch:
    """Put the launch of `forward` together, for a device that need not be here."""
    n_rows, groups, width = x.shape if shape is None else shape
    strides, align = None, 16
    if not (
        x.is_contiguous() and (residual is None or residual.is_contiguous()) and (gate is None or gate.is_contiguous())
    ):
        none = (0, 0, 0)
        of_residual = none if residual is None else residual.stride()
        of_gate = none if gate is None else gate.stride()
        strides = (*x.stride(), *of_residual, *of_gate)
        align = find_alignment(*x.stride()[:2], *of_residual[:2], *of_gate[:2])
    rows, options = _options(formula, groups, width, align, device)
    arguments = (x, residual, gate, weight, bias, y, summed, rstd, mean, strides, n_rows, formula.eps)
    return Launch(_norm_fwd_kernel, (-(-n_rows // rows) * groups,), arguments, options)


def forward(
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    y: Tensor,
    summed: Tensor | None,
    rstd: Tensor | None,
    mean: Tensor | None,
    *,
    shape: tuple[int, int, int] | None = None,
    interpret: bool = False,
) -> None:
    """Write the norm of each row to ``y``, as ``formula`` says.

    Args:
        formula: what to compute.
        x: ``(R, G, D)`` of any strides, float32, float16 or bfloat16.
        residual: likewise, added to ``x``; or None.
        gate: likewise, or None.
        weight: ``(G, D)``, contiguous, of any of the three dtypes; or None.
        bias: likewise.
        y: ``(R, G, D)``, contiguous, in ``formula.out_dtype``; written.
        summed: ``(R, G, D)``, contiguous, in ``formula.sum_dtype``; written. None without ``residual``.
        rstd: ``(R, G)``, contiguous, float32: the scale of each row is written to it; or None.
        mean: ``(R, G)``, contiguous, float32: the mean of each row (``"layer"``) is written to it; or None.
        shape: ``(R, G, D)`` where what is contiguous is not viewed so; None where all is.
        interpret: whether Triton interprets in this process.
    """
    if x.numel():
        device = INTERPRETER if interpret else device_of(x.device)
        run(prepare(formula, x, residual, gate, weight, bias, y, summed, rstd, mean, device, shape), x, interpret)
