"""The public operations: validate, choose the implementation, and register with ``torch.library``."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import torch
from torch import Tensor

from .backends import check_backend, kernels
from .cpu import layer_norm_cpu, rms_norm_cpu
from .gradients import layer_norm_gradients, rms_norm_gradients
from .rows import as_matrix, empty_rows

_PARAMETER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_INPUT_DTYPES = (*_PARAMETER_DTYPES, torch.float64)


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Divide each row by its root mean square, times a gain.

    ``n = x / sqrt(mean(x**2) + eps)`` (Zhang and Sennrich 2019, arXiv:1910.07467). Without ``round_dtype`` the
    result is ``n * (weight + offset) + bias`` in float32, rounded once. With it, ``n`` is rounded to ``round_dtype``,
    the product with ``weight + offset`` (summed in float32) to ``out_dtype``, and the sum with ``bias`` again.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        weight: ``(N,)`` of any of float32, float16, bfloat16; None for no gain.
        bias: ``(N,)`` likewise, or None.
        eps: added under the root; may be 0.
        offset: added to the weight: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``x``.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        ``(..., N)`` in ``out_dtype``; in the memory order of ``x`` where its rows lie densely, else contiguous.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, eps or backend name.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0) * 12.5**0.5
        tensor([[3., 4.]])
    """
    if out_dtype is None:
        out_dtype = x.dtype if isinstance(x, Tensor) else torch.float32
    _validate(x, weight, bias, eps, offset, round_dtype, out_dtype)
    if _direct(x, weight, bias):
        if backend == "auto" and x.is_cpu:
            return rms_norm_cpu(x, weight, bias, eps, offset, round_dtype, out_dtype)
        return _rms_norm(x, weight, bias, eps, offset, round_dtype, out_dtype, backend)
    return _rms_norm_op(x, weight, bias, float(eps), float(offset), round_dtype, out_dtype, backend)


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Centre each row and divide it by its standard deviation, times a gain, plus a bias.

    ``n = (x - mean(x)) / sqrt(var(x) + eps)`` with the biased variance (Ba et al. 2016, arXiv:1607.06450); gain,
    bias and roundings as in `rms_norm`.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        weight: ``(N,)`` of any of float32, float16, bfloat16; None for no gain.
        bias: ``(N,)`` likewise, or None.
        eps: added to the variance; may be 0.
        offset: added to the weight: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``x``.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        ``(..., N)`` in ``out_dtype``, contiguous, as ``torch.nn.functional.layer_norm`` gives it.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device, eps or backend name.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    if out_dtype is None:
        out_dtype = x.dtype if isinstance(x, Tensor) else torch.float32
    _validate(x, weight, bias, eps, offset, round_dtype, out_dtype)
    if _direct(x, weight, bias):
        if backend == "auto" and x.is_cpu:
            return layer_norm_cpu(x, weight, bias, eps, offset, round_dtype, out_dtype)
        return _layer_norm(x, weight, bias, eps, offset, round_dtype, out_dtype, backend)
    return _layer_norm_op(x, weight, bias, float(eps), float(offset), round_dtype, out_dtype, backend)


def _validate(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"expected x to be a tensor, got {type(x).__name__}: pass a torch.Tensor")
    if x.dtype not in _INPUT_DTYPES:
        raise TypeError(
            f"expected x of dtype float32, float16, bfloat16 (or float64 on the CPU), got {x.dtype}: "
            "convert it with x.to(...)"
        )
    if not x.dim():
        raise ValueError("expected x of shape (..., N), got a tensor without dimensions: pass at least one row")
    shape = x.shape[-1:]
    if weight is not None:
        _validate_parameter("weight", weight, x, shape)
    if bias is not None:
        _validate_parameter("bias", bias, x, shape)
    if not (isinstance(eps, (int, float)) and isinstance(offset, (int, float))):
        kinds = f"{type(eps).__name__} and {type(offset).__name__}"
        raise TypeError(f"expected eps and offset to be numbers, got {kinds}: pass floats")
    if not 0 <= eps < math.inf:
        raise ValueError(f"expected a finite eps of 0 or more, got {eps}: pass the norm's own eps")
    if not (out_dtype in _INPUT_DTYPES and (round_dtype is None or round_dtype in _INPUT_DTYPES)):
        raise TypeError(
            f"expected round_dtype and out_dtype to be floating dtypes of torch, got {round_dtype} and {out_dtype}"
        )


def _validate_parameter(name: str, parameter: Tensor, x: Tensor, shape: torch.Size) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"expected {name} to be a tensor or None, got {type(parameter).__name__}: pass a torch.Tensor")
    if parameter.dtype != x.dtype and parameter.dtype not in _PARAMETER_DTYPES:
        raise TypeError(f"expected {name} of dtype float32, float16 or bfloat16, got {parameter.dtype}: convert it")
    if parameter.shape != shape:
        raise ValueError(
            f"expected {name} of shape {tuple(shape)} for rows of {shape[0]}, got {tuple(parameter.shape)}: "
            "pass the parameter of a norm of this width"
        )
    if parameter.device != x.device:
        raise ValueError(
            f"expected {name} on the device of x, {x.device}, got {parameter.device}: move one to the other"
        )


def _direct(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Whether the implementation may be called past torch's dispatcher, which costs more than a short row."""
    if torch.compiler.is_compiling() or type(x) is not Tensor or x.is_meta:
        return False
    for parameter in (weight, bias):
        if parameter is not None and type(parameter) not in (Tensor, torch.nn.Parameter):
            return False
    if torch.is_grad_enabled() and (
        x.requires_grad or (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    ):
        return False
    # vmap and friends hide behind plain tensors; dispatch modes (fake tensors, counters) must see one operation.
    return not (torch._C._are_functorch_transforms_active() or torch._C._len_torch_dispatch_stack())


def _rms_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    resolved = check_backend(backend, x.device)
    if resolved == "cpu":
        return rms_norm_cpu(x, weight, bias, eps, offset, round_dtype, out_dtype)
    out = empty_rows(x, out_dtype)
    _check_kernel_dtypes(x, round_dtype, out_dtype)
    x_rows, out_rows = as_matrix(x, out)
    kernels("rmsnorm").forward(
        x_rows, weight, bias, out_rows, eps, offset, round_dtype, interpret=resolved == "interpret"
    )
    return out


def _layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype,
    backend: str,
) -> Tensor:
    resolved = check_backend(backend, x.device)
    if resolved == "cpu":
        return layer_norm_cpu(x, weight, bias, eps, offset, round_dtype, out_dtype)
    out = torch.empty(x.shape, dtype=out_dtype, device=x.device)
    _check_kernel_dtypes(x, round_dtype, out_dtype)
    x_rows, out_rows = as_matrix(x, out)
    kernels("layernorm").forward(
        x_rows, weight, bias, out_rows, eps, offset, round_dtype, interpret=resolved == "interpret"
    )
    return out


def _check_kernel_dtypes(x: Tensor, round_dtype: torch.dtype | None, out_dtype: torch.dtype) -> None:
    if torch.float64 in (x.dtype, round_dtype, out_dtype):
        raise TypeError(
            "expected float32, float16 or bfloat16 in a Triton kernel, got torch.float64: "
            "convert x, or choose backend 'cpu'"
        )


_SCHEMA = (
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, float offset, "
    "ScalarType? round_dtype, ScalarType out_dtype, str backend) -> Tensor"
)


def _namespaced(name: str) -> str:
    """Give the operation's full name; builds for the Hub bring a namespace of their own in a module ``_ops``."""
    if __package__ and importlib.util.find_spec("._ops", __package__):
        built = importlib.import_module("._ops", __package__)
        return str(built.add_op_namespace_prefix(name))
    return f"normswap::{name}"


def _register(name: str, run: Any, gradients: Any, allocate: Any) -> Any:
    """Register one operation with its fake, its gradient and its rule for vmap."""
    op = torch.library.custom_op(_namespaced(name), run, mutates_args=(), schema=_SCHEMA)

    def fake(x: Tensor, weight: Any, bias: Any, eps: Any, offset: Any, middle: Any, out: Any, backend: Any) -> Tensor:
        result: Tensor = allocate(x, out)
        return result

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, bias, ctx.eps, ctx.offset, *_ = inputs
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype

    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight = ctx.saved_tensors
        found = gradients(grad, x, weight, ctx.bias_dtype, ctx.eps, ctx.offset)
        return (*found, None, None, None, None, None)

    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, weight: Any, bias: Any, *rest: Any) -> tuple[Tensor, int]:
        tensors = [t if d is None else t.movedim(d, 0) for t, d in zip((x, weight, bias), in_dims, strict=False)]
        if in_dims[1] is None and in_dims[2] is None:
            return op(*tensors, *rest), 0
        rows = [
            op(*(t if d is None else t[i] for t, d in zip(tensors, in_dims, strict=False)), *rest)
            for i in range(info.batch_size)
        ]
        return torch.stack(rows), 0

    op.register_fake(fake)
    op.register_autograd(backward, setup_context=setup_context)
    op.register_vmap(vmap)
    return op


def _allocate_contiguous(x: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty(x.shape, dtype=dtype, device=x.device)


_rms_norm_op = _register("rms_norm", _rms_norm, rms_norm_gradients, empty_rows)
_layer_norm_op = _register("layer_norm", _layer_norm, layer_norm_gradients, _allocate_contiguous)
