"""RMSNorm in Triton: the kernel and its launcher."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .epilogue import gain_bias_round, triton_dtype, widen
from .launch import choose_tile, launching, warp_size


@triton.jit(do_not_specialize=["n_rows"])
def _rms_norm_fwd_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    w_ptr,
    b_ptr,
    y_ptr,
    x_row_stride,
    x_col_stride,
    n_rows,
    n_cols,
    width,
    eps,
    HAS_GAIN: tl.constexpr,
    OFFSET: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    MIDDLE: tl.constexpr,
    DENSE: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ONE_BLOCK: tl.constexpr,
    EMULATE: tl.constexpr,
):
    """Normalise ROWS rows; ``width`` is ``n_cols`` as float32, DENSE says that ``x_col_stride`` is 1."""
    # A row index times a stride passes 2**31 on large inputs.
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    x_rows = x_ptr + row * x_row_stride
    y_rows = y_ptr + row * n_cols
    block = tl.arange(0, BLOCK_N)[None, :]

    if ONE_BLOCK:
        in_row = block < n_cols
        # A lone row is always there, and a mask along the columns only keeps the loads wide.
        mask = in_row if ROWS == 1 else in_row & (row < n_rows)
        at = block if DENSE else block.to(tl.int64) * x_col_stride
        x = widen(tl.load(x_rows + at, mask=mask, other=0.0), EMULATE)
        mean = tl.div_rn(tl.sum(x * x, axis=1)[:, None], width)
        n = x * tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        y = gain_bias_round(
            n, w_ptr, b_ptr, block, in_row, HAS_GAIN, OFFSET, HAS_BIAS, MIDDLE, y_ptr.dtype.element_ty, EMULATE
        )
        tl.store(y_rows + block, y, mask=mask)
    else:
        total = tl.zeros((ROWS, BLOCK_N), dtype=tl.float32)
        for start in range(0, n_cols, BLOCK_N):
            cols = start + block
            at = cols if DENSE else cols.to(tl.int64) * x_col_stride
            x = widen(tl.load(x_rows + at, mask=cols < n_cols, other=0.0), EMULATE)
            total += x * x
        mean = tl.div_rn(tl.sum(total, axis=1)[:, None], width)
        scale = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        for start in range(0, n_cols, BLOCK_N):
            cols = start + block
            in_row = cols < n_cols
            at = cols if DENSE else cols.to(tl.int64) * x_col_stride
            n = widen(tl.load(x_rows + at, mask=in_row, other=0.0), EMULATE) * scale
            y = gain_bias_round(
                n, w_ptr, b_ptr, cols, in_row, HAS_GAIN, OFFSET, HAS_BIAS, MIDDLE, y_ptr.dtype.element_ty, EMULATE
            )
            tl.store(y_rows + cols, y, mask=in_row)


def forward(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    *,
    interpret: bool = False,
) -> None:
    """Write the RMSNorm of each row of ``x`` to ``out``.

    Args:
        x: ``(R, N)`` of any strides, float32, float16 or bfloat16.
        weight: ``(N,)`` or None.
        bias: ``(N,)`` or None.
        out: ``(R, N)``, contiguous.
        eps: added to the mean square.
        offset: added to the weight.
        round_dtype: dtype that the normalised row is rounded to before the gain, or None.
        interpret: whether Triton interprets in this process.
    """
    n_rows, n_cols = x.shape
    if not n_rows or not n_cols:
        return
    tile = choose_tile(n_cols)
    with launching(x, interpret):
        _rms_norm_fwd_kernel[(triton.cdiv(n_rows, tile.rows),)](
            x,
            None if weight is None else weight.contiguous(),
            None if bias is None else bias.contiguous(),
            out,
            x.stride(0),
            x.stride(1),
            n_rows,
            n_cols,
            float(n_cols),
            float(eps),
            HAS_GAIN=weight is not None,
            OFFSET=float(offset),
            HAS_BIAS=bias is not None,
            MIDDLE=triton_dtype(round_dtype),
            DENSE=x.stride(1) == 1,
            ROWS=tile.rows,
            BLOCK_N=tile.block_n,
            ONE_BLOCK=tile.one_block,
            EMULATE=interpret,
            num_warps=tile.num_warps(warp_size()),
            # As torch rounds: the product, and then the sum. The kernels wait for memory, so it costs nothing.
            enable_fp_fusion=False,
        )
