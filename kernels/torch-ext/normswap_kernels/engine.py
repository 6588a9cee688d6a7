"""One call, on the backend that is asked for: allocate the results, view everything as rows, run.

Nothing here is validated and nothing recorded for autograd; `ops` does the one and `registration` the other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu
from .backends import check_backend, kernels
from .formula import Formula
from .gradients import Gradients
from .rows import Rows, empty_rows, empty_statistics, find_rows, row_order

Results = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]


def forward(
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    save: bool,
    backend: str,
) -> Results:
    """Compute a norm.

    Args:
        formula: what to compute.
        x: ``(..., N)``.
        residual: ``(..., N)`` or None.
        gate: ``(..., N)`` or None.
        weight: ``(N,)`` or ``(H, D)``, or None.
        bias: of the shape of a weight, or None.
        save: whether the statistics are wanted for a backward.
        backend: one of ``BACKENDS``.

    Returns:
        The result, the sum with the residual or None, and scale and mean of each row (``(..., groups)``) or None.

    Raises:
        BackendUnavailable: the backend cannot run here.
        TypeError: float64 in a Triton kernel.
    """
    resolved = _resolve(backend, x)
    if resolved == "cpu":
        return cpu.forward(formula, x, residual, gate, weight, bias, save)
    _refuse_float64(x.dtype, formula.round_dtype, formula.product_dtype, formula.out_dtype, formula.sum_dtype)
    y, summed, scale, mean = allocate(formula, x, residual, weight, save)
    rows = view_rows(formula, x, weight)
    if not (
        rows.order is None
        and x.is_contiguous()
        and (residual is None or residual.is_contiguous())
        and (gate is None or gate.is_contiguous())
    ):
        x = rows.view(x)
        residual = None if residual is None else rows.view(residual)
        gate = None if gate is None else rows.view(gate)
    # What lies densely needs no view, which takes a tenth of the time of a launch.
    kernels("norm_forward").forward(
        formula,
        x,
        residual,
        gate,
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        y,
        summed,
        scale,
        mean,
        shape=rows.shape,
        interpret=resolved == "interpret",
    )
    return y, summed, scale, mean


def backward(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    scale: Tensor,
    mean: Tensor | None,
    weight_grad: bool,
    backend: str,
) -> Gradients:
    """Differentiate a norm.

    Args:
        formula: what the forward computed.
        grad: ``(..., N)``, gradient of the result.
        grad_sum: ``(..., N)``, gradient of the sum, or None.
        row: ``(..., N)``: ``x``, or the sum with the residual.
        gate: ``(..., N)`` or None.
        weight: ``(N,)`` or ``(H, D)``, or None.
        bias_dtype: dtype of a bias whose gradient is wanted, or None.
        scale: ``(..., groups)`` from the forward.
        mean: ``(..., groups)`` from the forward (``layer``), or None.
        weight_grad: whether the gradient of the weight is wanted.
        backend: one of ``BACKENDS``.

    Returns:
        The gradients.
    """
    resolved = _resolve(backend, row)
    if resolved == "cpu":
        return cpu.backward(formula, grad, grad_sum, row, gate, weight, bias_dtype, scale, mean, weight_grad)
    found = allocate_gradients(formula, row, gate, weight, bias_dtype, weight_grad)
    rows = view_rows(formula, row, weight)
    view = rows.view
    kernels("norm_backward").backward(
        formula,
        view(grad),
        None if grad_sum is None else view(grad_sum),
        view(row),
        None if gate is None else view(gate),
        _parameter(weight, rows),
        rows.view_statistics(scale),
        None if mean is None else rows.view_statistics(mean),
        view(found.row),
        None if found.gate is None else view(found.gate),
        _parameter(found.weight, rows),
        _parameter(found.bias, rows),
        interpret=resolved == "interpret",
    )
    return found


def quantize(
    formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Compute a norm and quantize each of its rows.

    Args:
        formula: the norm.
        x: ``(..., N)``.
        weight: ``(N,)`` or None.
        bias: ``(N,)`` or None.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        backend: one of ``BACKENDS``.

    Returns:
        Values ``(..., N)`` of ``dtype`` and scales ``(..., 1)`` in float32.
    """
    resolved = _resolve(backend, x)
    if resolved == "cpu":
        return cpu.quantize(formula, x, weight, bias, dtype)
    _refuse_float64(x.dtype, formula.round_dtype, formula.product_dtype, formula.out_dtype)
    values, scales = allocate_quantized(x, dtype)
    rows = find_rows(x, 1, False)
    kernels("norm_quant").quantize(
        formula,
        x if x.is_contiguous() else rows.view(x),
        None if weight is None else weight.contiguous(),
        None if bias is None else bias.contiguous(),
        values,
        scales,
        shape=rows.shape,
        interpret=resolved == "interpret",
    )
    return values, scales


def allocate(formula: Formula, x: Tensor, residual: Tensor | None, weight: Tensor | None, save: bool) -> Results:
    """Allocate the results of `forward`; the arguments are its own."""
    order = results_order(formula, x, weight)
    y = empty_rows(x, formula.out_dtype, order)
    summed = None if residual is None or formula.sum_dtype is None else empty_rows(x, formula.sum_dtype, order)
    if not save:
        return y, summed, None, None
    scale = empty_statistics(x, formula.groups, order)
    return y, summed, scale, empty_statistics(x, formula.groups, order) if formula.kind == "layer" else None


def allocate_gradients(
    formula: Formula,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias_dtype: torch.dtype | None,
    weight_grad: bool,
) -> Gradients:
    """Allocate the results of `backward`; the arguments are its own."""
    order = results_order(formula, row, weight)
    shape = row.shape[-1:] if weight is None else weight.shape

    def parameter(dtype: torch.dtype | None) -> Tensor | None:
        return None if dtype is None else torch.empty(shape, dtype=dtype, device=row.device)

    return Gradients(
        empty_rows(row, row.dtype, order),
        None if gate is None else empty_rows(row, gate.dtype, order),
        parameter(weight.dtype if weight is not None and weight_grad else None),
        parameter(bias_dtype),
    )


def allocate_quantized(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Allocate the results of `quantize`: both contiguous."""
    values = torch.empty_like(x, dtype=dtype, memory_format=torch.contiguous_format)
    return values, torch.empty((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)


def results_order(formula: Formula, x: Tensor, parameter: Tensor | None) -> list[int] | None:
    """Return the memory order of the results: that of ``x`` for RMSNorm, contiguous for LayerNorm, as in torch."""
    if formula.kind == "layer":
        return None
    return row_order(x, 2 if parameter is not None and parameter.dim() == 2 else 1)


def view_rows(formula: Formula, x: Tensor, weight: Tensor | None) -> Rows:
    """Say how the tensors of a call are viewed as rows."""
    per_head = weight is not None and weight.dim() == 2
    return find_rows(x, formula.groups, per_head, results_order(formula, x, weight))


def _resolve(backend: str, x: Tensor) -> str:
    # A shortcut: asking for the device and its kind takes longer than the sum of a row.
    return "cpu" if backend == "auto" and x.is_cpu else check_backend(backend, x.device)


def _parameter(parameter: Tensor | None, rows: Rows) -> Tensor | None:
    return None if parameter is None else parameter.contiguous().view(rows.shape[1:])


def _refuse_float64(*dtypes: torch.dtype | None) -> None:
    if torch.float64 in dtypes:
        raise TypeError(
            "expected float32, float16 or bfloat16 in a Triton kernel, got torch.float64: "
            "convert x, or choose backend 'cpu'"
        )
