"""What the public operations take, and the errors for what they do not: expected, got, what to do."""

from __future__ import annotations

import torch
from torch import Tensor

from .formula import ACTIVATIONS, EPS_POSITIONS, GATE_POSITIONS, QUANTIZED_MAXIMUM, REDUCTIONS, Formula

PARAMETER_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INPUT_DTYPES = (*PARAMETER_DTYPES, torch.float64)

LARGEST = torch.finfo(torch.float32).max


def check_input(x: object) -> None:
    """Refuse what is no tensor of rows.

    Raises:
        TypeError: no tensor, or no floating dtype that is computed in.
        ValueError: no dimension.
    """
    if not isinstance(x, Tensor):
        raise TypeError(f"expected x to be a tensor, got {type(x).__name__}: pass a torch.Tensor")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(
            f"expected x of dtype float32, float16, bfloat16 (or float64 on the CPU), got {x.dtype}: "
            "convert it with x.to(...)"
        )
    _check_layout("x", x)
    if not x.dim():
        raise ValueError("expected x of shape (..., N), got a tensor without dimensions: pass at least one row")


def check_companion(name: str, tensor: object, x: Tensor) -> None:
    """Refuse a residual or a gate that does not fit ``x``.

    Raises:
        TypeError: no tensor, or another dtype than float32, float16, bfloat16 and that of ``x``.
        ValueError: another shape or device than those of ``x``.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"expected {name} to be a tensor, got {type(tensor).__name__}: pass a torch.Tensor")
    if tensor.dtype != x.dtype and (tensor.dtype not in PARAMETER_DTYPES or x.dtype == torch.float64):
        raise TypeError(f"expected {name} of dtype float32, float16 or bfloat16, got {tensor.dtype}: convert it")
    _check_layout(name, tensor)
    if tensor.shape != x.shape:
        raise ValueError(
            f"expected {name} of the shape of x, {tuple(x.shape)}, got {tuple(tensor.shape)}: expand or reshape it"
        )
    _check_device(name, tensor, x)


def check_norm(formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Refuse parameters and options that do not fit ``x``, which has passed `check_input`.

    Raises:
        TypeError: an argument of the wrong type or dtype.
        ValueError: a wrong shape, device or value.
    """
    if weight is not None:
        _check_parameter("weight", weight, x)
    if bias is not None:
        _check_parameter("bias", bias, x)
        if bias.dim() == 2 if weight is None else bias.shape != weight.shape:
            expected = x.shape[-1:] if weight is None else weight.shape
            raise ValueError(f"expected bias of shape {tuple(expected)}, got {tuple(bias.shape)}: reshape it")
    eps, offset = formula.eps, formula.offset
    if not (_is_number(eps) and _is_number(offset)):
        kinds = f"{type(eps).__name__} and {type(offset).__name__}"
        raise TypeError(f"expected eps and offset to be numbers, got {kinds}: pass floats")
    # What float32 holds: the arithmetic's own dtype.
    if not 0 <= eps <= LARGEST:
        raise ValueError(f"expected a finite eps of 0 or more, got {eps}: pass the norm's own eps")
    if not -LARGEST <= offset <= LARGEST:
        raise ValueError(f"expected a finite offset, got {offset}: pass 1.0 for the gain 1 + w, else 0.0")
    middle, out = formula.round_dtype, formula.out_dtype
    if not (out in INPUT_DTYPES and (middle is None or middle in INPUT_DTYPES)):
        raise TypeError(
            f"expected round_dtype and out_dtype to be floating dtypes of torch, got {middle} and {out}: "
            "pass float32 or a narrower one"
        )


def check_options(formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> None:
    """Refuse the rarer options where they do not fit; called only where one of them is not at its default.

    Raises:
        TypeError: an option of the wrong type.
        ValueError: a value that is not among those offered, or that does not fit the width.
    """
    width = x.size(-1)
    groups = formula.groups
    if type(groups) is not int:
        raise TypeError(f"expected groups to be a whole number, got {type(groups).__name__}: pass an int")
    if groups < 1 or width % groups:
        raise ValueError(f"expected groups of 1 or more that divide rows of {width}, got {groups}: pass their number")
    if groups > 1 and any(p is not None and p.dim() == 2 for p in (weight, bias)):
        raise ValueError(
            f"expected a weight of shape ({width},) beside groups, got one of two dimensions: flatten it, or pass "
            "x of shape (..., H, D) without groups"
        )
    for name, value, offered in (
        ("eps_position", formula.eps_position, EPS_POSITIONS),
        ("reduction", formula.reduction, REDUCTIONS),
        ("gate_position", formula.gate_position, ("none", *GATE_POSITIONS)),
        ("activation", formula.activation, ACTIVATIONS),
    ):
        if value not in offered:
            shown = ", ".join(repr(each) for each in offered if each != "none")
            raise ValueError(f"expected {name} among {shown}, got {value!r}: pass one of them")
    check_rounding("product_dtype", formula.product_dtype)


def check_partial(partial: object, x: Tensor, groups: object) -> None:
    """Refuse a number of leading elements that a row does not have.

    Raises:
        TypeError: no whole number.
        ValueError: less than 1, or more than a row has.
    """
    if type(partial) is not int:
        raise TypeError(f"expected partial to be a whole number or None, got {type(partial).__name__}: pass an int")
    width = x.size(-1) // groups if type(groups) is int and groups > 0 else x.size(-1)
    if not 0 < partial <= width:
        raise ValueError(f"expected partial between 1 and the row's {width}, got {partial}: pass None for all")


def check_rounding(name: str, dtype: object) -> None:
    """Refuse a dtype that nothing is rounded to.

    Raises:
        TypeError: neither None nor a floating dtype that is computed in.
    """
    if dtype is not None and dtype not in INPUT_DTYPES:
        raise TypeError(f"expected {name} to be a floating dtype of torch, got {dtype}: pass float32 or a narrower one")


def check_scale(dtype: object) -> None:
    """Refuse a dtype that no scale of a row is rounded to.

    Raises:
        TypeError: another than float32, float16 and bfloat16.
    """
    if dtype not in PARAMETER_DTYPES:
        raise TypeError(
            f"expected scale_dtype to be float32, float16, bfloat16 or None, got {dtype}: pass the dtype that the norm "
            "rounds its scale to"
        )


def check_quantized(dtype: object) -> None:
    """Refuse a dtype that is not quantized to.

    Raises:
        TypeError: another than int8 and float8_e4m3fn.
    """
    if dtype not in tuple(QUANTIZED_MAXIMUM):
        raise TypeError(f"expected dtype to be torch.int8 or torch.float8_e4m3fn, got {dtype}: pass one of them")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _check_parameter(name: str, parameter: object, x: Tensor) -> None:
    if not isinstance(parameter, Tensor):
        raise TypeError(f"expected {name} to be a tensor or None, got {type(parameter).__name__}: pass a torch.Tensor")
    if parameter.dtype != x.dtype and parameter.dtype not in PARAMETER_DTYPES:
        raise TypeError(f"expected {name} of dtype float32, float16 or bfloat16, got {parameter.dtype}: convert it")
    _check_layout(name, parameter)
    width = x.size(-1)
    fits = (
        parameter.size(0) == width if parameter.dim() == 1 else parameter.dim() == 2 and parameter.shape == x.shape[-2:]
    )
    if not fits:
        shape = x.shape
        raise ValueError(
            f"expected {name} of shape ({width},) for rows of {width}, or {tuple(shape[-2:])} for a gain of each head, "
            f"got {tuple(parameter.shape)}: pass the parameter of a norm of this width"
        )
    _check_device(name, parameter, x)


def _check_layout(name: str, tensor: Tensor) -> None:
    if tensor.layout is not torch.strided or tensor.is_nested:
        kind = "a nested tensor" if tensor.is_nested else f"layout {tensor.layout}"
        raise TypeError(
            f"expected {name} to be a dense tensor, got {kind}: convert it with to_dense() or to_padded_tensor()"
        )


def _check_device(name: str, tensor: Tensor, x: Tensor) -> None:
    if tensor.device != x.device:
        raise ValueError(f"expected {name} on the device of x, {x.device}, got {tensor.device}: move one to the other")
