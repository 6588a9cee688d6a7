"""Norms fused with what stands beside them: a residual sum, a gate, quantization."""

from __future__ import annotations

import torch
from torch import Tensor

from .formula import Activation, Formula, GatePosition, Kind, product_rounding
from .registration import outside_of_eager, recorded, run, run_quantize
from .validation import (
    LARGEST,
    check_companion,
    check_input,
    check_norm,
    check_options,
    check_quantized,
    check_rounding,
)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a residual and take the RMSNorm of the sum.

    ``h = x + residual`` is rounded to ``sum_dtype``, and the row of `rms_norm` is taken from the rounded ``h``, as two
    separate operations would take it.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        residual: of the shape of ``x``, float32, float16 or bfloat16.
        weight: ``(N,)`` of any of float32, float16, bfloat16; ``(H, D)`` beside ``x`` of shape ``(..., H, D)``, a gain
            of its own for each head; None for no gain.
        bias: of the shape of the weight, ``(N,)`` without one, of any of the three dtypes; or None.
        eps: added under the root; may be 0.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``h``.
        sum_dtype: dtype of ``h``; None for the promoted dtype of ``x`` and ``residual``, as torch adds. float32 keeps
            the sum unrounded.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        The normalised rows ``(..., N)`` in ``out_dtype``, and the new residual ``h`` ``(..., N)`` in ``sum_dtype``.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> y, h = add_rms_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[2.0, 3.0]]), eps=0.0)
        >>> h
        tensor([[3., 4.]])
    """
    return _add(
        "add_rms_norm", "rms", x, residual, weight, bias, eps, offset, round_dtype, out_dtype, sum_dtype, backend
    )


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    sum_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Add a residual and take the LayerNorm of the sum.

    ``h = x + residual`` is rounded to ``sum_dtype``, and the row of `layer_norm` is taken from the rounded ``h``, as
    two separate operations would take it.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        residual: of the shape of ``x``, float32, float16 or bfloat16.
        weight: ``(N,)`` of any of float32, float16, bfloat16; ``(H, D)`` beside ``x`` of shape ``(..., H, D)``, a gain
            of its own for each head; None for no gain.
        bias: of the shape of the weight, ``(N,)`` without one, of any of the three dtypes; or None.
        eps: added to the variance; may be 0.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``h``.
        sum_dtype: dtype of ``h``; None for the promoted dtype of ``x`` and ``residual``, as torch adds. float32 keeps
            the sum unrounded.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        The normalised rows ``(..., N)`` in ``out_dtype``, and the new residual ``h`` ``(..., N)`` in ``sum_dtype``;
        both contiguous.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> y, h = add_layer_norm(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, 2.0]]), eps=0.0)
        >>> y
        tensor([[-1.,  1.]])
    """
    return _add(
        "add_layer_norm", "layer", x, residual, weight, bias, eps, offset, round_dtype, out_dtype, sum_dtype, backend
    )


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    *,
    eps: float,
    gate_position: GatePosition = "after",
    activation: Activation = "silu",
    groups: int = 1,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    product_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Take the RMSNorm of each row, gated by the activation of a second tensor.

    With ``a = activation(gate)`` in float32 and ``norm`` as in `rms_norm`: ``norm(x * a)`` for a gate before the norm
    (Mamba-2, Dao and Gu 2024, arXiv:2405.21060), ``norm(x) * a`` for one after it (Gated DeltaNet, Yang et al. 2024,
    arXiv:2412.06464). Everything is float32 but for the roundings that are asked for and the last one.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        gate: of the shape of ``x``, float32, float16 or bfloat16.
        weight: ``(N,)`` of any of float32, float16, bfloat16; ``(H, D)`` beside ``x`` of shape ``(..., H, D)``, a gain
            of its own for each head; None for no gain.
        eps: added under the root; may be 0.
        gate_position: ``"before"`` or ``"after"`` the norm.
        activation: ``"silu"`` (``gate * sigmoid(gate)``) or ``"sigmoid"``.
        groups: number of parts that each row is split into, each normalised by itself; it divides ``N``.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that the normalised row is rounded to before the gain; None for no rounding there.
        product_dtype: dtype that the product with the gain is rounded to before a gate after the norm; None for no
            rounding there.
        out_dtype: dtype of the result; None for that of ``x``.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        ``(..., N)`` in ``out_dtype``; in the memory order of ``x`` where its rows lie densely, else contiguous.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> x, gate = torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2)
        >>> gated_rms_norm(x, gate, eps=0.0, activation="sigmoid") * 2 * 12.5**0.5
        tensor([[3., 4.]])
    """
    check_input(x)
    formula = Formula(
        "rms",
        eps,
        offset,
        round_dtype,
        product_dtype,
        x.dtype if out_dtype is None else out_dtype,
        groups,
        gate_position=gate_position,
        activation=activation,
    )
    check_companion("gate", gate, x)
    check_norm(formula, x, weight, None)
    check_options(formula, x, weight, None)
    if gate_position == "none":
        raise ValueError("expected gate_position among 'before', 'after', got 'none': use rms_norm without a gate")
    return run("gated_rms_norm", formula, x, None, gate, weight, None, backend)[0]


def rms_norm_quant(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    dtype: torch.dtype = torch.int8,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Take the RMSNorm of each row and quantize it, with a scale of its own for each row.

    ``y`` of `rms_norm` is rounded to ``out_dtype``, as it would be between the two operations. Then
    ``scale = max|y| / m`` with ``m`` 127 (int8) or 448 (float8 e4m3), and the values are ``y / scale``, rounded to
    nearest even and clamped to ``m``. Where ``y`` is all zeros the scale is 0. A row of ``y`` that is not finite has a
    scale that is not finite, and values 0. Not differentiable.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides.
        weight: ``(N,)`` of any of float32, float16, bfloat16; None for no gain.
        bias: ``(N,)`` likewise, or None.
        eps: added under the root; may be 0.
        dtype: ``torch.int8`` or ``torch.float8_e4m3fn``.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype that the norm is rounded to before it is quantized; None for that of ``x``.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        Values ``(..., N)`` of ``dtype`` and scales ``(..., 1)`` in float32, both contiguous;
        ``values.float() * scales`` is the norm.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> values, scale = rms_norm_quant(torch.tensor([[-1.0, 0.5]]), eps=0.0)
        >>> values
        tensor([[-127,   64]], dtype=torch.int8)
    """
    check_input(x)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    product_dtype = product_rounding(round_dtype, out_dtype, weight, bias)
    formula = Formula("rms", eps, offset, round_dtype, product_dtype, out_dtype)
    check_norm(formula, x, weight, bias)
    check_quantized(dtype)
    for name, parameter in (("weight", weight), ("bias", bias)):
        if parameter is not None and parameter.dim() != 1:
            raise ValueError(
                f"expected {name} of shape ({x.size(-1)},), got {tuple(parameter.shape)}: a row is quantized as a whole"
            )
    if x.dtype == torch.float64:
        raise TypeError(
            "expected x of dtype float32, float16 or bfloat16, got torch.float64: convert it with x.to(...)"
        )
    return run_quantize(formula, x, weight, bias, dtype, backend)


def _add(
    name: str,
    kind: Kind,
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    backend: str,
) -> tuple[Tensor, Tensor]:
    if kind == "layer" and _is_torchs(x, residual, eps, offset, round_dtype, out_dtype, sum_dtype, backend):
        try:
            # Beside narrow parameters torch keeps narrow statistics: gradients that are off by percents.
            if x.dtype is torch.float32 or not recorded((x, residual, weight, bias)):
                summed = x + residual
                return torch.layer_norm(summed, (x.size(-1),), weight, bias, eps, False), summed.contiguous()
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # In words below, or by an implementation that takes more dtypes.
            pass
    check_input(x)
    check_companion("residual", residual, x)
    check_rounding("sum_dtype", sum_dtype)
    total = sum_dtype
    if total is None:
        total = x.dtype if residual.dtype is x.dtype else torch.promote_types(x.dtype, residual.dtype)
    out_dtype = total if out_dtype is None else out_dtype
    product_dtype = product_rounding(round_dtype, out_dtype, weight, bias)
    formula = Formula(kind, eps, offset, round_dtype, product_dtype, out_dtype, sum_dtype=total)
    check_norm(formula, x, weight, bias)
    y, new_residual = run(name, formula, x, residual, None, weight, bias, backend)
    assert new_residual is not None
    return y, new_residual


def _is_torchs(
    x: Tensor,
    residual: Tensor,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    sum_dtype: torch.dtype | None,
    backend: str,
) -> bool:
    """Whether the sum and the LayerNorm are torch's own operations, which validate faster than Python can."""
    return (
        round_dtype is None
        and out_dtype is None
        and sum_dtype is None
        and type(offset) is type(eps) is float
        and offset == 0.0
        and 0.0 <= eps <= LARGEST
        and backend == "auto"
        and type(x) is type(residual) is Tensor
        and x.is_cpu
        and not (x.is_nested or residual.is_nested)
        and x.dtype is residual.dtype
        and x.shape == residual.shape
        and residual.layout is torch.strided
        and x.is_floating_point()
        and not outside_of_eager()
    )
