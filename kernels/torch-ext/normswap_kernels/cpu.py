"""The CPU implementation: which way a call is computed.

LayerNorm with one rounding is torch's own kernel, which reads and writes each row once. What `cpu_compiled` covers is
compiled, where there is a compiler. The rest goes through `cpu_blocks`. Both ways give the same results bit for bit,
but for gates, where they differ in float32's last digits: each has an exponential of its own. Tensors have the shapes
of the public operations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from . import cpu_blocks as blocks
from . import cpu_blocks_backward as blocks_backward
from . import cpu_compiled as compiled
from .cpu_busy import is_busy
from .cpu_library import library
from .cpu_memory import SMALLEST, in_large_pages
from .formula import Formula
from .gradients import Gradients
from .rows import empty_rows, empty_statistics, find_rows, row_order

# A backward needs more buffers at a time than a forward. Its sums depend on it, so that it is the same on any machine.
_BACKWARD_BLOCK = blocks.BLOCK // 4

# Below this the system is not asked how busy it is: the answer takes some microseconds.
_LARGE = 8 * blocks.SERIAL

Forward = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def forward(
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    save: bool,
) -> Forward:
    """Compute a norm on the CPU.

    Args:
        formula: what to compute.
        x: ``(..., N)``, float32, float16, bfloat16 or float64, of any strides.
        residual: of the shape of ``x``, or None.
        gate: of the shape of ``x``, or None.
        weight: ``(N,)`` or ``(H, D)`` of any floating dtype, or None.
        bias: of the shape of a weight, or None.
        save: whether the backward will need the statistics.

    Returns:
        The result in ``formula.out_dtype``, the sum with the residual or None, and with ``save`` the scale of each
        row and, for LayerNorm, its mean, ``(..., groups)`` in float32 (float64 for float64). RMSNorm keeps the memory
        order of ``x`` where its rows lie densely; LayerNorm's results are contiguous, as torch's are.
    """
    if formula.kind == "layer" and _is_native(formula, x, weight, bias):
        return _native_layer_norm(formula, x, residual, weight, bias, save)
    plan = None
    if (loaded := library()) is not None and compiled.takes(weight, bias, gate) and (gate is None or loaded.gates):
        width = x.size(-1) // formula.groups
        plan = compiled.plan_forward(formula, x.dtype, None if residual is None else residual.dtype, width)
    compute = blocks.compute_dtype(x)
    layer, numel = formula.kind == "layer", x.numel()
    block = blocks.BLOCK if plan is not None else _forward_block(numel)
    if (
        0 < numel <= block
        and formula.groups == 1
        and x.is_contiguous()
        and (residual is None or residual.is_contiguous())
        and (gate is None or gate.is_contiguous())
    ):
        y = torch.empty_like(x, dtype=formula.out_dtype)
        rstd = torch.empty((*x.shape[:-1], 1), dtype=compute, device="cpu") if save else None
        mean = torch.empty_like(rstd) if rstd is not None and layer else None
        summed = None
        if residual is not None:
            if plan is None and numel < SMALLEST and x.dtype == residual.dtype == formula.sum_dtype:
                # One operation that allocates is faster than two.
                x = summed = x + residual
                residual = None
            else:
                summed = torch.empty_like(x, dtype=formula.sum_dtype)
        if numel >= SMALLEST:
            in_large_pages(y, summed)
        if loaded is not None and plan is not None:
            heads, width = x.size(-2) if _is_per_head(weight, bias) else 1, x.size(-1)
            shape = numel // (heads * width), heads, width
            compiled.forward(loaded, plan, shape, x, residual, gate, weight, bias, y, summed, rstd)
        else:
            applied = blocks.parameters(formula, weight, bias, compute)
            blocks.forward(formula, x, residual, gate, applied, y, summed, rstd, mean)
        return y, summed, rstd, mean

    per_head = _is_per_head(weight, bias)
    order = None if layer else row_order(x, 1 + per_head)
    y = empty_rows(x, formula.out_dtype, order)
    summed = None if residual is None else empty_rows(x, formula.sum_dtype or x.dtype, order)
    in_large_pages(y, summed)
    rstd = empty_statistics(x, formula.groups, order) if save else None
    mean = empty_statistics(x, formula.groups, order) if save and layer else None
    if not numel:
        return y, summed, rstd, mean
    rows = find_rows(x, formula.groups, per_head, order)
    added = None if residual is None else rows.view(residual)
    if loaded is not None and plan is not None:
        # The results lie densely in the order of these views.
        gating = None if gate is None else rows.view(gate)
        compiled.forward(loaded, plan, rows.shape, rows.view(x), added, gating, weight, bias, y, summed, rstd)
        return y, summed, rstd, mean
    applied = blocks.parameters(formula, weight, bias, compute)
    gain, shift = (None if p is None else p.reshape(rows.shape[1:]) for p in applied[:2])
    applied = blocks.Parameters(gain, shift, applied.narrow)
    tensors = [rows.view(x), added, *(None if t is None else rows.view(t) for t in (gate, y, summed))]
    statistics = [None if t is None else rows.view_statistics(t).unsqueeze(-1) for t in (rstd, mean)]
    for a, b, c, result, total, scale, centre in _parts([*tensors, *statistics], rows.shape, block):
        assert a is not None and result is not None
        blocks.forward(formula, a, b, c, applied, result, total, scale, centre)
    return y, summed, rstd, mean


def backward(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    rstd: Tensor,
    mean: Tensor | None,
    weight_grad: bool = True,
) -> Gradients:
    """Differentiate a norm on the CPU.

    The gradients of gain and bias are sums over blocks of a fixed size in a fixed order, the same for any number of
    threads.

    Args:
        formula: what the forward computed.
        grad: ``(..., N)``, gradient of the result.
        grad_sum: ``(..., N)``, gradient of the sum with the residual, or None.
        row: ``(..., N)``, ``x`` or the sum with the residual.
        gate: ``(..., N)`` or None.
        weight: ``(N,)`` or ``(H, D)``, or None.
        bias_dtype: dtype of the bias; None where there is none.
        rstd: ``(..., groups)``, as `forward` saved it.
        mean: ``(..., groups)``, as `forward` saved it; None for RMSNorm.
        weight_grad: whether the gradient of the weight is wanted.

    Returns:
        The gradients.
    """
    wanted = weight is not None and weight_grad, bias_dtype is not None
    tensors = grad, grad_sum, row, gate
    per_head = _is_per_head(weight, None)
    if row.dim() == 2 and formula.groups == 1 and not per_head and row.numel() and _are_contiguous(tensors):
        # Rows as they are: a view of each tensor takes as long as an operation on one row.
        drow = torch.empty_like(row)
        dgate = None if gate is None else torch.empty_like(gate)
        in_large_pages(drow, dgate)
        shape = row.size(0), 1, row.size(1)
        sums = _run_backward(formula, shape, (*tensors, drow, dgate), (rstd, mean), weight, wanted)
    else:
        order = None if formula.kind == "layer" else row_order(row, 1 + per_head)
        rows = find_rows(row, formula.groups, per_head, order)
        drow = empty_rows(row, row.dtype, order)
        dgate = None if gate is None else empty_rows(row, gate.dtype, order)
        in_large_pages(drow, dgate)
        if row.numel():
            views = [None if t is None else rows.view(t) for t in (*tensors, drow, dgate)]
            statistics = [None if t is None else rows.view_statistics(t).unsqueeze(-1) for t in (rstd, mean)]
            sums = _run_backward(formula, rows.shape, views, statistics, weight, wanted)
        else:
            sums = [torch.zeros(rows.shape[1:], device="cpu") if asked else None for asked in wanted]
    parameter = row.shape[-1:] if weight is None else weight.shape
    dtypes = None if weight is None else weight.dtype, bias_dtype
    dweight, dbias = (None if t is None else t.to(d).view(parameter) for t, d in zip(sums, dtypes, strict=True))
    return Gradients(drow, dgate, dweight, dbias)


def _run_backward(
    formula: Formula,
    shape: tuple[int, int, int],
    tensors: Sequence[Tensor | None],
    statistics: Sequence[Tensor | None],
    weight: Tensor | None,
    wanted: tuple[bool, bool],
) -> Sequence[Tensor | None]:
    """Write the gradients of row and gate; return those of gain and bias, of ``G * D`` numbers, where wanted."""
    grad, grad_sum, row, gate, drow, dgate = tensors
    rstd, mean = statistics
    assert grad is not None and row is not None and drow is not None and rstd is not None
    compute = blocks_backward.arithmetic(row, rstd)
    if compiled.covers_backward(formula, grad, grad_sum, row, rstd, mean) and compiled.takes(weight, gate):
        loaded = library()
        if loaded is not None and loaded.backward is not None and (gate is None or loaded.gates):
            size = shape[1] * shape[2]
            found = [torch.empty(size, dtype=torch.float32, device="cpu") if asked else None for asked in wanted]
            compiled.backward(
                loaded, formula, shape, grad, grad_sum, row, gate, weight, rstd, mean, drow, dgate, *found
            )
            return found
    gain = None if weight is None else weight.to(compute)
    if gain is not None and formula.offset:
        gain = gain + formula.offset
    if gain is not None and row.dim() == 3:
        gain = gain.view(shape[1:])
    kept = None
    if row.numel() >= _LARGE and is_busy():
        size = max(_BACKWARD_BLOCK, row[0].numel())
        kept = [torch.empty(size, dtype=compute, device="cpu") if asked else None for asked in wanted]
    sums: Sequence[Tensor | None] = (None, None)
    for a, b, c, d, e, f, scale, centre in _parts([*tensors, *statistics], shape, _BACKWARD_BLOCK):
        assert a is not None and c is not None and e is not None and scale is not None
        part = blocks_backward.backward(formula, a, b, c, d, gain, scale, centre, e, f, wanted, kept)
        sums = [new if old is None or new is None else old.add_(new) for old, new in zip(sums, part, strict=True)]
    return sums


def quantize(
    formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Compute a norm on the CPU and quantize each row of its result.

    Args:
        formula: the norm; its result is rounded to ``out_dtype`` before it is quantized.
        x: ``(..., N)``, of any strides.
        weight: ``(N,)`` or None.
        bias: ``(N,)`` or None.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.

    Returns:
        Values ``(..., N)`` of ``dtype`` and scales ``(..., 1)`` in float32, as `reference.quantized` has them.
    """
    values = torch.empty(x.shape, dtype=dtype, device="cpu")
    in_large_pages(values)
    scales = torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device="cpu")
    if not values.numel():
        return values, scales.zero_()
    rows = find_rows(x, 1, False)
    rows_of_x = rows.view(x)
    plan = compiled.plan_forward(formula, x.dtype, None, x.size(-1), dtype)
    if plan is not None and compiled.takes(weight, bias):
        loaded = library()
        if loaded is not None and loaded.quantizes:
            given = rows_of_x, None, None, weight, bias
            compiled.forward(loaded, plan, rows.shape, *given, None, None, None, values, scales)
            return values, scales
    views = [rows_of_x, rows.view(values), rows.view_statistics(scales).unsqueeze(-1)]
    for a, b, c in _parts(views, rows.shape, _forward_block(x.numel())):
        assert a is not None and b is not None and c is not None
        y = forward(formula, a.squeeze(1), None, None, weight, bias, False)[0]
        blocks.quantize(y.float() if y.dtype != torch.float32 else y, b.squeeze(1), c.squeeze(1))
    return values, scales


def _is_native(formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether torch's layer norm rounds as the formula does."""
    row = formula.sum_dtype or x.dtype
    return (
        formula.round_dtype is None
        and formula.out_dtype == row
        # Torch's arithmetic goes by the row, and ours by x.
        and (x.dtype == torch.float64) == (row == torch.float64)
        and (formula.product_dtype is None or weight is None)
        and formula.eps_position == "inside"
        and formula.groups == 1
        and formula.gate_position == "none"
        and not _is_per_head(weight, bias)
    )


def _native_layer_norm(
    formula: Formula, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, save: bool
) -> Forward:
    """Compute LayerNorm by torch's own kernel, which gives statistics in float32 beside parameters in float32."""
    summed = None
    if residual is not None:
        summed = torch.empty(x.shape, dtype=formula.sum_dtype, device="cpu")
        in_large_pages(summed)
        if x.dtype == residual.dtype == summed.dtype:
            torch.add(x, residual, out=summed)
        else:
            compute = blocks.compute_dtype(x)
            summed.copy_(x.to(compute) + residual.to(compute))
        x = summed
    shape, dtype = x.shape[-1:], x.dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    if (
        formula.offset
        or (save and dtype != wide)
        or (weight is not None and weight.dtype != dtype)
        or (bias is not None and bias.dtype != dtype)
    ):
        # torch takes parameters of the dtype of x, or both in float32, and looks at the gain alone to see which.
        weight = torch.ones(shape, dtype=wide, device="cpu") if weight is None else weight.to(wide) + formula.offset
        bias = torch.zeros(shape, dtype=wide, device="cpu") if bias is None else bias.to(wide)
    if not save:
        return torch.layer_norm(x, shape, weight, bias, formula.eps), summed, None, None
    y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, formula.eps)
    return y, summed, rstd, mean


def _forward_block(numel: int) -> int:
    """Give the elements of a block of a forward, whose results are the same with any."""
    return blocks.SERIAL - 1 if numel >= _LARGE and is_busy() else blocks.BLOCK


def _are_contiguous(tensors: Sequence[Tensor | None]) -> bool:
    return all(t is None or t.is_contiguous() for t in tensors)


def _is_per_head(weight: Tensor | None, bias: Tensor | None) -> bool:
    return (weight is not None and weight.dim() == 2) or (bias is not None and bias.dim() == 2)


def _parts(
    tensors: Sequence[Tensor | None], shape: tuple[int, int, int], block: int
) -> Iterator[tuple[Tensor | None, ...]]:
    """Cut views of ``(R, G, D)`` into blocks of rows."""
    count, heads, width = shape
    length = max(1, block // (heads * width))
    if length >= count:
        yield tuple(tensors)
        return
    for start in range(0, count, length):
        yield tuple(None if t is None else t[start : start + length] for t in tensors)
