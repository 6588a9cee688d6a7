"""The CPU implementation: torch's own primitives over blocks of rows that stay in the cache.

What is slow in an eager norm on a CPU is its temporaries, each as large as the input. Here the same primitives run
in the same order on a few rows at a time, in buffers that are reused, so that results are those of the eager class
bit for bit. Arithmetic is float32, or float64 for a float64 input.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import as_matrix, empty_rows
from .threads import SERIAL, share_rows

# Below this size whole temporaries fit in the cache and the fewest calls win.
_SMALL = 2**17

# Rows that are too long for a serial operation go through torch's own threads, in blocks of this many elements for
# each of them: 1 MB of float32.
_BLOCK_PER_THREAD = 2**18
_BLOCK_LIMIT = 2**22

_local = threading.local()


def rms_norm_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute RMSNorm of each row, with the arguments of the public operation.

    Bit-identical with the eager classes of transformers, but for one lone row of 32,768 elements or more: there
    torch splits the sum over its threads, and here the row gets the sum that it gets among other rows.
    """
    compute = _compute_dtype(x)
    gain, shift = _parameters(weight, bias, offset, round_dtype, out_dtype, compute)
    width = x.size(-1)
    numel = x.numel()
    if width < SERIAL and 0 < numel <= _SMALL and x.is_contiguous():
        wide = x if x.dtype == compute else x.to(compute)
        scale = _rsqrt_mean_(wide.mul(wide).sum(-1, True), width, eps)
        rows = wide.mul(scale) if wide is x else wide.mul_(scale)
        return _finish(rows, None, gain, shift, round_dtype, out_dtype)

    out = empty_rows(x, out_dtype)
    if not numel:
        return out
    x_rows, out_rows = as_matrix(x, out)
    block = _block_rows(width)

    def work(start: int, stop: int) -> None:
        square = _buffer(0, block, width, compute)
        value = None if x.dtype == compute else _buffer(1, block, width, compute)
        total = _buffer(2, block, 1, compute)
        for rows, result in zip(x_rows[start:stop].split(block), out_rows[start:stop].split(block), strict=True):
            count = rows.size(0)
            if count < block:
                square, total = square[:count], total[:count]
                value = None if value is None else value[:count]
            if value is not None:
                rows = value.copy_(rows)
            torch.mul(rows, rows, out=square)
            if count == 1 and width >= SERIAL:
                # Twice the same row: a sum with two results is not split, and so is the same as among other rows.
                scale = square.expand(2, width).sum(-1, True)[:1]
            else:
                scale = torch.sum(square, -1, True, out=total)
            _rsqrt_mean_(scale, width, eps)
            # The squares are spent; a row of x itself must not be written to.
            normal = torch.mul(rows, scale, out=square if value is None else value)
            _finish(normal, result, gain, shift, round_dtype, out_dtype)

    _run(work, x_rows.size(0), width, block)
    return out


def layer_norm_cpu(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Compute LayerNorm of each row, with the arguments of the public operation; the result is contiguous.

    With one rounding this is torch's own kernel, which reads and writes each row once.
    """
    width = x.size(-1)
    if round_dtype is None and out_dtype == x.dtype:
        weight, bias = _native_parameters(x, weight, bias, offset)
        if x.is_contiguous() or x.numel() <= _SMALL:
            return F.layer_norm(x, (width,), weight, bias, eps)
        out = torch.empty(x.shape, dtype=out_dtype)
        x_rows, out_rows = as_matrix(x, out)
        block = _block_rows(width)

        def copy_native(start: int, stop: int) -> None:
            for rows, result in zip(x_rows[start:stop].split(block), out_rows[start:stop].split(block), strict=True):
                result.copy_(F.layer_norm(rows, (width,), weight, bias, eps))

        _run(copy_native, x_rows.size(0), width, block)
        return out

    compute = _compute_dtype(x)
    gain, shift = _parameters(weight, bias, offset, round_dtype, out_dtype, compute)
    out = torch.empty(x.shape, dtype=out_dtype)
    if not out.numel():
        return out
    x_rows, out_rows = as_matrix(x, out)
    block = _block_rows(width)

    def work(start: int, stop: int) -> None:
        for rows, result in zip(x_rows[start:stop].split(block), out_rows[start:stop].split(block), strict=True):
            normal = F.layer_norm(rows.to(compute), (width,), None, None, eps)
            _finish(normal, result, gain, shift, round_dtype, out_dtype)

    _run(work, x_rows.size(0), width, block)
    return out


def _rsqrt_mean_(total: Tensor, width: int, eps: float) -> Tensor:
    """Turn sums of squares into ``1 / sqrt(sum / width + eps)``, in place, as ``mean``, ``+`` and ``rsqrt`` would."""
    return total.div_(_scalar(width, total.dtype)).add_(_scalar(eps, total.dtype)).rsqrt_()


@functools.lru_cache(maxsize=256)
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Give a number as a tensor: torch makes one of each number anew, which takes longer than the sum of a row."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def _finish(
    rows: Tensor,
    out: Tensor | None,
    gain: Tensor | None,
    shift: Tensor | None,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Round, apply gain and bias, round. ``rows`` is overwritten; ``out`` None allocates the result."""
    middle = rows.dtype if round_dtype is None else round_dtype
    if middle == out_dtype and all(p is None or p.dtype == out_dtype for p in (gain, shift)):
        if rows.dtype != out_dtype:
            rows = rows.to(out_dtype) if out is None else out.copy_(rows)
        elif out is not None:
            if gain is None:
                rows = out.copy_(rows)
            else:
                rows, gain = torch.mul(rows, gain, out=out), None
        if gain is not None:
            rows.mul_(gain)
        return rows if shift is None else rows.add_(shift)

    rounds = round_dtype is not None
    if rounds:
        _round(rows, middle)
    if gain is not None:
        rows.mul_(gain)
        if rounds and shift is not None:
            _round(rows, out_dtype)
    if shift is not None:
        rows.add_(shift)
    return rows.to(out_dtype) if out is None else out.copy_(rows)


def _round(rows: Tensor, dtype: torch.dtype) -> None:
    if rows.dtype != dtype:
        rows.copy_(rows.to(dtype))


def _parameters(
    weight: Tensor | None,
    bias: Tensor | None,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    compute: torch.dtype,
) -> tuple[Tensor | None, Tensor | None]:
    """Bring gain and bias to the dtype that they are applied in.

    A product of two narrow numbers that is rounded once is the same in torch's narrow multiplication and in
    float32, so parameters of the middle and output dtype stay as they are and save two conversions of each row.
    """
    narrow = round_dtype == out_dtype and (weight is None or (weight.dtype == out_dtype and not offset))
    narrow = narrow and (bias is None or bias.dtype == out_dtype)
    if not narrow:
        weight = None if weight is None else weight.to(compute)
        bias = None if bias is None else bias.to(compute)
    if weight is not None and offset:
        weight = weight + offset
    return weight, bias


def _native_parameters(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float
) -> tuple[Tensor | None, Tensor | None]:
    """Bring gain and bias to dtypes that torch's layer norm takes beside ``x``: both of its dtype, or both float32."""
    if not offset and all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return weight, bias
    compute = _compute_dtype(x)
    if weight is not None:
        weight = weight.to(compute)
        weight = weight + offset if offset else weight
    if bias is not None:
        bias = bias.to(compute)
        # torch looks at the gain alone to see which dtype the parameters have.
        weight = torch.ones_like(bias) if weight is None else weight
    elif weight is not None and x.dtype != compute:
        bias = torch.zeros_like(weight)
    return weight, bias


def _compute_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _block_rows(width: int) -> int:
    """Choose rows for a block: few enough that torch's operations stay in one thread, where a row allows that."""
    if width < SERIAL:
        return (SERIAL - 1) // max(width, 1)
    return max(1, min(_BLOCK_PER_THREAD * torch.get_num_threads(), _BLOCK_LIMIT) // width)


def _run(work: Callable[[int, int], None], rows: int, width: int, block: int) -> None:
    if width < SERIAL:
        share_rows(work, rows, width, block)
    else:
        work(0, rows)


def _buffer(slot: int, rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Give a scratch matrix of this thread; what it holds is undefined."""
    size = rows * width
    buffers: dict[tuple[int, torch.dtype], Tensor] | None = getattr(_local, "buffers", None)
    if buffers is None:
        buffers = _local.buffers = {}
    buffer = buffers.get((slot, dtype))
    if buffer is None or buffer.numel() < size:
        # A buffer born in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            buffer = torch.empty(size, dtype=dtype)
        if size <= _BLOCK_LIMIT:
            buffers[slot, dtype] = buffer
    return buffer[:size].view(rows, width)
