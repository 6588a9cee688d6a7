"""RMSNorm and the quantization of each row in one Triton kernel, and its launcher."""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .formula import QUANTIZED_MAXIMUM, Formula
from .launch import INTERPRETER, Device, Launch, choose_tile, device_of, find_alignment
from .launching import run
from .tiles import both, finish, load, load_parameter, round_to, row_offsets, row_total, scale_of, triton_dtype, widen


@triton.jit
def _row_maximum(y, in_row):  # type: ignore[no-untyped-def]
    """Return the bits of the largest magnitude of each row: NaN if there is one, as no comparison drops it there."""
    bits = y.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    if in_row is not None:
        # A lane past the row is 0 times the scale, and a row of zeros without eps has an infinite one.
        bits = tl.where(in_row, bits, 0)
    return tl.max(bits, axis=1)[:, None]


@triton.jit
def _to_e4m3(q):  # type: ignore[no-untyped-def]
    """Round float32 within +-448 to the bits of float8_e4m3fn, to nearest even."""
    bits = q.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Below 2**-6 all are multiples of 2**-9; beside 2**14 the last bit of a float32 is that unit.
    small = (magnitude.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    # 20 bits of the mantissa go, and the exponent is counted from -7 in place of -127.
    large = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1) - (120 << 23)) >> 20
    return (tl.where(magnitude < (121 << 23), small, large) | ((bits >> 24) & 0x80)).to(tl.int8)


@triton.jit
def _quantized(  # type: ignore[no-untyped-def]
    y, scale, MAXIMUM: tl.constexpr, NATIVE: tl.constexpr
):
    """Divide a float32 tile by the scale of its row and round it; the result is the bytes of the values."""
    q = tl.div_rn(y, scale)
    # 0 / 0 and what has no finite scale stand for no number.
    q = tl.where(tl.abs(q) < float("inf"), q, 0.0)
    # A scale that is denormal is coarse.
    q = tl.where(q > MAXIMUM, MAXIMUM, tl.where(q < -MAXIMUM, -MAXIMUM, q))
    if MAXIMUM == 127:
        # Beside 1.5 * 2**23 the last bit of a float32 is 1, so the sum is rounded, and its low byte is the integer.
        return (q + 12582912.0).to(tl.int32, bitcast=True).to(tl.int8)
    elif NATIVE:
        return q.to(tl.float8e4nv).to(tl.int8, bitcast=True)
    else:
        return _to_e4m3(q)


@triton.jit(do_not_specialize=["n_rows"])
def _norm_quant_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    b_ptr,
    q_ptr,
    scale_ptr,
    strides,
    n_rows,
    eps: tl.float32,
    N: tl.constexpr,
    COUNTED: tl.constexpr,
    SUM: tl.constexpr,
    EPS_POSITION: tl.constexpr,
    OFFSET: tl.constexpr,
    MIDDLE: tl.constexpr,
    PRODUCT: tl.constexpr,
    OUT: tl.constexpr,
    MAXIMUM: tl.constexpr,
    NATIVE: tl.constexpr,
    ALIGN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Normalise and quantize ROWS rows; ``strides`` are (row, column) of x, or None where it lies densely."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    there = None if ROWS == 1 else row < n_rows
    block = tl.arange(0, BLOCK_N)[None, :]
    q_rows = q_ptr + row * N
    COUNT: tl.constexpr = 1 if SUM else COUNTED
    if strides is None:
        x_rows, x_step = x_ptr + row * N, 1
    else:
        x_rows, x_step = x_ptr + row_offsets(row, 0, strides[0], 0, ALIGN), strides[1]

    if BLOCK_N >= N:
        in_row = None if N == BLOCK_N else block < N
        mask = both(in_row, there)
        v = widen(load(x_rows + block.to(tl.int64) * x_step, mask, ""), EMULATE)
        w = load_parameter(w_ptr, block, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
        b = load_parameter(b_ptr, block, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
        counted = v if COUNTED == N else tl.where(block < COUNTED, v, 0.0)
        rstd = scale_of(row_total(counted * counted), eps, COUNT, EPS_POSITION)
        y = finish(v * rstd, w, b, None, OFFSET, MIDDLE, PRODUCT, "", EMULATE)
        y = widen(round_to(y, OUT, EMULATE), EMULATE)
        scale = tl.div_rn(_row_maximum(y, in_row).to(tl.float32, bitcast=True), MAXIMUM)
        tl.store(q_rows + block, _quantized(y, scale, MAXIMUM, NATIVE), mask=mask)
    else:
        tl.static_assert(ROWS == 1)
        squares = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in range(0, COUNTED, BLOCK_N):
            cols = start + block
            in_row = None if N % BLOCK_N == 0 else cols < N
            v = widen(load(x_rows + cols.to(tl.int64) * x_step, in_row, "evict_last"), EMULATE)
            if COUNTED != N:
                v = tl.where(cols < COUNTED, v, 0.0)
            squares += v * v
        rstd = scale_of(row_total(squares), eps, COUNT, EPS_POSITION)
        largest = tl.zeros((ROWS, 1), dtype=tl.int32)
        for start in range(0, N, BLOCK_N):
            cols = start + block
            in_row = None if N % BLOCK_N == 0 else cols < N
            v = widen(load(x_rows + cols.to(tl.int64) * x_step, in_row, "evict_last"), EMULATE)
            w = load_parameter(w_ptr, cols, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
            b = load_parameter(b_ptr, cols, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
            y = finish(v * rstd, w, b, None, OFFSET, MIDDLE, PRODUCT, "", EMULATE)
            y = widen(round_to(y, OUT, EMULATE), EMULATE)
            largest = tl.maximum(largest, _row_maximum(y, in_row))
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), MAXIMUM)
        # The same arithmetic again, as there is no room for the row: the third read is from L2 too.
        for start in range(0, N, BLOCK_N):
            cols = start + block
            in_row = None if N % BLOCK_N == 0 else cols < N
            v = widen(load(x_rows + cols.to(tl.int64) * x_step, in_row, "evict_first"), EMULATE)
            w = load_parameter(w_ptr, cols, in_row, ROWS, BLOCK_N) if w_ptr is not None else None
            b = load_parameter(b_ptr, cols, in_row, ROWS, BLOCK_N) if b_ptr is not None else None
            y = finish(v * rstd, w, b, None, OFFSET, MIDDLE, PRODUCT, "", EMULATE)
            y = widen(round_to(y, OUT, EMULATE), EMULATE)
            tl.store(q_rows + cols, _quantized(y, scale, MAXIMUM, NATIVE), mask=in_row)
    tl.store(scale_ptr + row, scale, mask=there)


@functools.lru_cache(maxsize=4096)
def _options(
    formula: Formula, dtype: torch.dtype, width: int, align: int, device: Device
) -> tuple[int, dict[str, Any]]:
    """Return the rows of a program and the compile-time arguments."""
    tile = choose_tile(width)
    return tile.rows, {
        "N": width,
        "COUNTED": formula.partial or width,
        "SUM": formula.reduction == "sum",
        "EPS_POSITION": formula.eps_position,
        "OFFSET": float(formula.offset),
        "MIDDLE": triton_dtype(formula.round_dtype),
        "PRODUCT": triton_dtype(formula.product_dtype),
        "OUT": triton_dtype(formula.out_dtype),
        "MAXIMUM": QUANTIZED_MAXIMUM[dtype],
        "NATIVE": device.native_fp8,
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
    weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor,
    scales: Tensor,
    device: Device,
    shape: tuple[int, int, int] | None = None,
) -> Launch:
    """Put the launch of `quantize` together, for a device that need not be here."""
    n_rows, _, width = x.shape if shape is None else shape
    strides, align = None, 16
    if not x.is_contiguous():
        strides = (x.stride(0), x.stride(2))
        align = find_alignment(x.stride(0))
    rows, options = _options(formula, values.dtype, width, align, device)
    # Bytes for both dtypes: not every target has a name for float8.
    as_bytes = values if values.dtype == torch.int8 else values.view(torch.int8)
    arguments = (x, weight, bias, as_bytes, scales, strides, n_rows, formula.eps)
    return Launch(_norm_quant_kernel, (-(-n_rows // rows),), arguments, options)


def quantize(
    formula: Formula,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    values: Tensor,
    scales: Tensor,
    *,
    shape: tuple[int, int, int] | None = None,
    interpret: bool = False,
) -> None:
    """Write the RMSNorm of each row, rounded to ``formula.out_dtype`` and then quantized, to ``values``.

    ``scale = max|y| / maximum`` and ``values = y / scale``, with the maximum 127 of int8 and 448 of float8_e4m3fn,
    rounded to nearest even; as ``reference.quantized`` does it.

    Args:
        formula: what to compute; an RMSNorm without groups, gate or residual.
        x: ``(R, 1, D)`` of any strides, float32, float16 or bfloat16.
        weight: ``(1, D)``, contiguous, of any of the three dtypes; or None.
        bias: likewise.
        values: ``(R, 1, D)``, contiguous, int8 or float8_e4m3fn; written.
        scales: ``(R, 1)``, contiguous, float32; written.
        shape: ``(R, 1, D)`` where what is contiguous is not viewed so; None where all is.
        interpret: whether Triton interprets in this process.
    """
    if x.numel():
        device = INTERPRETER if interpret else device_of(x.device)
        run(prepare(formula, x, weight, bias, values, scales, device, shape), x, interpret)
