"""The plain norms: say in a formula what is wanted, validate, and take the shortest way to the engine."""

from __future__ import annotations

import torch
from torch import Tensor

from .formula import EpsPosition, Formula, Kind, Reduction, product_rounding
from .registration import outside_of_eager, recorded, run
from .validation import LARGEST, check_input, check_norm, check_options, check_partial, check_scale


def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    groups: int = 1,
    partial: int | None = None,
    eps_position: EpsPosition = "inside",
    reduction: Reduction = "mean",
    scale_dtype: torch.dtype | None = None,
    backend: str = "auto",
) -> Tensor:
    """Divide each row by its root mean square, times a gain.

    ``n = x / sqrt(mean(x**2) + eps)`` (Zhang and Sennrich 2019, arXiv:1910.07467). Without ``round_dtype`` the
    result is ``n * (weight + offset) + bias`` in float32, rounded once. With it, ``n`` is rounded to ``round_dtype``,
    the product with ``weight + offset`` (summed in float32) to ``out_dtype``, and the sum with ``bias`` again.
    ``reduction="sum"`` with ``eps_position="clamp"`` and no gain is ``torch.nn.functional.normalize``.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        weight: ``(N,)`` of any of float32, float16, bfloat16; ``(H, D)`` beside ``x`` of shape ``(..., H, D)``, a gain
            of its own for each head; None for no gain.
        bias: of the shape of the weight, ``(N,)`` without one, of any of the three dtypes; or None.
        eps: in the place that ``eps_position`` names; may be 0.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``x``.
        groups: number of parts that each row is split into, each normalised by itself; it divides ``N``.
        partial: leading elements of a row (of a group) that the mean is taken over, as in partial RMSNorm (the same
            paper); None for all.
        eps_position: ``"inside"`` the root; ``"outside"``: ``1 / (sqrt(m) + eps)``; ``"clamp"``:
            ``1 / max(sqrt(m), eps)``.
        reduction: ``"mean"`` of the squares, or their ``"sum"`` for L2 normalisation.
        scale_dtype: dtype (float32, float16 or bfloat16) that ``1 / sqrt(m + eps)`` is rounded to before ``x`` is
            multiplied by it; None for no rounding there. The gradient passes straight through.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        ``(..., N)`` in ``out_dtype``; in the memory order of ``x`` where its rows lie densely, else contiguous.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> rms_norm(torch.tensor([[3.0, 4.0]]), eps=0.0) * 12.5**0.5
        tensor([[3., 4.]])
    """
    check_input(x)
    if partial is not None:
        check_partial(partial, x, groups)
    formula = _formula(
        "rms", x, weight, bias, eps, offset, round_dtype, out_dtype, groups, partial, eps_position, reduction
    )
    if scale_dtype is not None:
        check_scale(scale_dtype)
        formula = formula._replace(scale_dtype=scale_dtype)
    check_norm(formula, x, weight, bias)
    if type(groups) is not int or groups != 1 or eps_position != "inside" or reduction != "mean":
        check_options(formula, x, weight, bias)
    return run("rms_norm", formula, x, None, None, weight, bias, backend)[0]


def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    eps: float,
    offset: float = 0.0,
    round_dtype: torch.dtype | None = None,
    out_dtype: torch.dtype | None = None,
    groups: int = 1,
    eps_position: EpsPosition = "inside",
    backend: str = "auto",
) -> Tensor:
    """Centre each row and divide it by its standard deviation, times a gain, plus a bias.

    ``n = (x - mean(x)) / sqrt(var(x) + eps)`` with the biased variance (Ba et al. 2016, arXiv:1607.06450); gain,
    bias and roundings as in `rms_norm`.

    Args:
        x: ``(..., N)``, float32, float16 or bfloat16, of any strides; float64 on the CPU, computed in float64.
        weight: ``(N,)`` of any of float32, float16, bfloat16; ``(H, D)`` beside ``x`` of shape ``(..., H, D)``, a gain
            of its own for each head; None for no gain.
        bias: of the shape of the weight, ``(N,)`` without one, of any of the three dtypes; or None.
        eps: in the place that ``eps_position`` names; may be 0.
        offset: added to the weight, in float32: 1.0 for the gain ``1 + w``.
        round_dtype: dtype that ``n`` is rounded to before the gain; None for one rounding at the end.
        out_dtype: dtype of the result; None for that of ``x``, or for float32 under autocast
            on a GPU, as ``torch.nn.functional.layer_norm`` gives it.
        groups: number of parts that each row is split into, each normalised by itself; it divides ``N``.
        eps_position: ``"inside"`` the root; ``"outside"``: ``1 / (sqrt(m) + eps)``; ``"clamp"``:
            ``1 / max(sqrt(m), eps)``.
        backend: ``"auto"``, ``"triton"``, ``"cpu"`` or ``"interpret"``; see `check_backend`.

    Returns:
        ``(..., N)`` in ``out_dtype``, contiguous, as ``torch.nn.functional.layer_norm`` gives it.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
        BackendUnavailable: the backend cannot run here.

    Example:
        >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
        tensor([[-1.,  1.]])
    """
    # On the CPU this is torch's own operation, which validates faster than Python can: at one row that counts.
    if (
        round_dtype is None
        and out_dtype is None
        and type(groups) is int
        and groups == 1
        and type(offset) is type(eps) is float
        and offset == 0.0
        and 0.0 <= eps <= LARGEST
        and eps_position == "inside"
        and backend == "auto"
        and type(x) is Tensor
        and x.is_cpu
        and not outside_of_eager()
    ):
        try:
            # Beside narrow parameters torch keeps narrow statistics: gradients that are off by percents.
            if not torch.is_grad_enabled() or x.dtype is torch.float32 or not recorded((x, weight, bias)):
                return torch.layer_norm(x, (x.size(-1),), weight, bias, eps, False)
        except (AttributeError, IndexError, RuntimeError, TypeError, ValueError):
            # In words below, or by an implementation that takes more dtypes.
            pass
    check_input(x)
    formula = _formula("layer", x, weight, bias, eps, offset, round_dtype, out_dtype, groups, None, eps_position)
    check_norm(formula, x, weight, bias)
    if type(groups) is not int or groups != 1 or eps_position != "inside":
        check_options(formula, x, weight, bias)
    return run("layer_norm", formula, x, None, None, weight, bias, backend)[0]


def _formula(
    kind: Kind,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    offset: float,
    round_dtype: torch.dtype | None,
    out_dtype: torch.dtype | None,
    groups: int,
    partial: int | None,
    eps_position: EpsPosition,
    reduction: Reduction = "mean",
) -> Formula:
    if out_dtype is None:
        out_dtype = x.dtype
        if kind == "layer" and not x.is_cpu and _autocast_to_float32(x.device.type):
            out_dtype = torch.float32
    product_dtype = product_rounding(round_dtype, out_dtype, weight, bias)
    partial = 0 if partial is None else partial
    return Formula(kind, eps, offset, round_dtype, product_dtype, out_dtype, groups, partial, eps_position, reduction)


def _autocast_to_float32(device_type: str) -> bool:
    """Whether autocast is on for a kind of device where torch runs layer_norm in float32 under it."""
    return device_type in ("cuda", "xpu") and torch.is_autocast_enabled(device_type)
