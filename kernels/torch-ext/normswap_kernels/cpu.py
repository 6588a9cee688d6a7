"""The CPU implementation: torch's own primitives over blocks of rows that stay in the cache.

What is slow in an eager norm on a CPU is its temporaries, each as large as the input. Here the same primitives run
in the same order on a block of rows at a time, in buffers that are reused, so that results are those of the eager
class bit for bit. Arithmetic is float32, or float64 for a float64 input.

The operations run on torch's own threads. Threads of ours would share the cores with torch's, which go on spinning for
a while after each operation (measured beside a model's linear layers on two cores: three times slower). Each
operation ends with a barrier, which is dear on a busy machine, so blocks are as large as the cache allows.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .rows import as_matrix, empty_rows

# Torch runs an operation on fewer elements than this (at::internal::GRAIN_SIZE) in the calling thread.
SERIAL = 2**15

# Elements of a block: 8 MB of float32. Fewer mean more barriers, which a busy machine pays for; more leave the cache.
_BLOCK = 2**21

# Views of the scratch space that are kept: a model has few shapes of a decoding step.
_KEPT_VIEWS = 64

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
    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    if weight is not None or bias is not None:
        weight, bias = _parameters(weight, bias, offset, round_dtype, out_dtype, compute)
    numel = x.numel()
    if 0 < numel <= _BLOCK and x.is_contiguous():
        out = torch.empty_like(x, dtype=out_dtype)
        _rms_norm_block(x, out, _scratch(x.shape, compute), weight, bias, eps, round_dtype)
        return out

    out = empty_rows(x, out_dtype)
    if not numel:
        return out
    for rows, result in _blocks(x, out):
        _rms_norm_block(rows, result, _scratch(rows.shape, compute), weight, bias, eps, round_dtype)
    return out


def _rms_norm_block(
    x: Tensor,
    out: Tensor,
    scratch: tuple[Tensor, Tensor, Tensor],
    gain: Tensor | None,
    shift: Tensor | None,
    eps: float,
    round_dtype: torch.dtype | None,
) -> None:
    square, value, total = scratch
    if x.dtype != value.dtype:
        x = value.copy_(x)
    torch.mul(x, x, out=square)
    width = x.size(-1)
    if width >= SERIAL and total.numel() == 1:
        # Twice the same row: a sum with two results is not split, and so is the same as among other rows.
        total.copy_(square.expand(2, width).sum(-1, True)[:1])
    else:
        torch.sum(square, -1, True, out=total)
    # eps + sum / width in one call, with the roundings of mean and +.
    torch.addcdiv(_scalar(eps, total.dtype), total, _scalar(width, total.dtype), out=total)
    _finish(torch.mul(x, total.rsqrt_(), out=value), out, gain, shift, round_dtype)


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
        if x.is_contiguous() or x.numel() < SERIAL:
            return F.layer_norm(x, (width,), weight, bias, eps)
        out = torch.empty(x.shape, dtype=out_dtype)
        for rows, result in _blocks(x, out):
            result.copy_(F.layer_norm(rows, (width,), weight, bias, eps))
        return out

    compute = torch.float64 if x.dtype == torch.float64 else torch.float32
    gain, shift = _parameters(weight, bias, offset, round_dtype, out_dtype, compute)
    out = torch.empty(x.shape, dtype=out_dtype)
    if not out.numel():
        return out
    for rows, result in _blocks(x, out):
        normal = F.layer_norm(rows.to(compute), (width,), None, None, eps)
        _finish(normal, result, gain, shift, round_dtype)
    return out


def _finish(
    rows: Tensor, out: Tensor, gain: Tensor | None, shift: Tensor | None, round_dtype: torch.dtype | None
) -> None:
    """Round, apply gain and bias, round: from ``rows``, which is overwritten, to ``out``."""
    dtype, wide = out.dtype, rows.dtype
    middle = wide if round_dtype is None else round_dtype
    if middle == dtype and (gain is None or gain.dtype == dtype) and (shift is None or shift.dtype == dtype):
        if dtype == wide and gain is not None:
            torch.mul(rows, gain, out=out)
        else:
            out.copy_(rows)
            if gain is not None:
                out.mul_(gain)
        if shift is not None:
            out.add_(shift)
        return

    if middle != wide:
        rows.copy_(rows.to(middle))
    if gain is not None:
        rows.mul_(gain)
    if shift is not None:
        if gain is not None and round_dtype is not None and dtype != wide:
            rows.copy_(rows.to(dtype))
        rows.add_(shift)
    out.copy_(rows)


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
    narrow = (
        round_dtype == out_dtype
        and (weight is None or (weight.dtype == out_dtype and not offset))
        and (bias is None or bias.dtype == out_dtype)
    )
    if not narrow:
        if weight is not None and weight.dtype != compute:
            weight = weight.to(compute)
        if bias is not None and bias.dtype != compute:
            bias = bias.to(compute)
    if weight is not None and offset:
        weight = weight + _scalar(offset, compute)
    return weight, bias


def _native_parameters(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, offset: float
) -> tuple[Tensor | None, Tensor | None]:
    """Bring gain and bias to dtypes that torch's layer norm takes beside ``x``: both of its dtype, or both float32."""
    dtype = x.dtype
    if not offset and (weight is None or weight.dtype == dtype) and (bias is None or bias.dtype == dtype):
        return weight, bias
    compute = torch.float64 if dtype == torch.float64 else torch.float32
    if weight is not None:
        weight = weight.to(compute)
        weight = weight + offset if offset else weight
    if bias is not None:
        bias = bias.to(compute)
        # torch looks at the gain alone to see which dtype the parameters have.
        weight = torch.ones_like(bias) if weight is None else weight
    elif weight is not None and dtype != compute:
        bias = torch.zeros_like(weight)
    return weight, bias


def _blocks(x: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x_rows, out_rows = as_matrix(x, out)
    length = max(1, _BLOCK // max(x.size(-1), 1))
    return zip(x_rows.split(length), out_rows.split(length), strict=True)


@functools.lru_cache(maxsize=256)
def _scalar(value: float, dtype: torch.dtype) -> Tensor:
    """Give a number as a tensor: torch makes one of each number anew, which takes longer than the sum of a row."""
    with torch.inference_mode(False):
        return torch.tensor(value, dtype=dtype)


def _scratch(shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Give this thread's scratch space: two tensors of a shape and one of a number for each row, undefined."""
    views: dict[object, tuple[Tensor, Tensor, Tensor]] | None = getattr(_local, "views", None)
    if views is None:
        views = _local.views = {}
        _local.space = {}
    found = views.get((shape, dtype))
    if found is not None:
        return found
    size = shape.numel()
    space = _local.space.get(dtype)
    if space is None or space.size(1) < size:
        # Space born in inference mode could not be written to outside it.
        with torch.inference_mode(False):
            space = torch.empty((3, max(size, SERIAL)), dtype=dtype)
        if size <= _BLOCK:
            _local.space[dtype] = space
            views.clear()
    with torch.inference_mode(False):
        totals = space[2, : size // shape[-1]].view(*shape[:-1], 1)
        found = space[0, :size].view(shape), space[1, :size].view(shape), totals
    if size <= _BLOCK:
        if len(views) >= _KEPT_VIEWS:
            views.clear()
        views[shape, dtype] = found
    return found
