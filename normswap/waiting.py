"""Parameters that are on disk until something reads them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

__all__ = ["Waiting", "empty_out", "fill"]

# What can be said of a parameter without its values.
_KNOWN = {
    torch.Tensor.size,
    torch.Tensor.dim,
    torch.Tensor.ndimension,
    torch.Tensor.numel,
    torch.Tensor.nelement,
    torch.Tensor.element_size,
    torch.Tensor.is_floating_point,
    torch.is_floating_point,
    torch.Tensor.is_complex,
    torch.is_complex,
    torch.Tensor.requires_grad_,
    torch.Tensor.get_device,
    torch.Tensor.__len__,
    *(
        getattr(torch.Tensor, name).__get__
        for name in (
            *("shape", "ndim", "dtype", "device", "layout", "itemsize", "requires_grad", "grad", "is_leaf"),
            *("is_meta", "is_cuda", "is_cpu", "is_sparse", "is_quantized", "is_nested", "grad_fn", "_backward_hooks"),
        )
    ),
    torch.Tensor.requires_grad.__set__,  # type: ignore[attr-defined]
}


class Waiting(nn.Parameter):
    """A parameter of the right shape, dtype and device without its values.

    Reading them anywhere loads them, and makes it an ordinary parameter: the same object, of another class.
    """

    _normswap_load: Callable[[nn.Parameter], None]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Load what is read, then go on as if it had been there."""
        kwargs = kwargs or {}
        if func not in _KNOWN:
            for value in _flat((*args, *kwargs.values())):
                if isinstance(value, Waiting):
                    value._normswap_load(value)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self._normswap_load(self)
        return nn.Parameter.__deepcopy__(self, memo)


def _flat(values: Any) -> Any:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def empty_out(parameter: nn.Parameter, load: Callable[[nn.Parameter], None]) -> None:
    """Let go of a parameter's values.

    Args:
        parameter: on any device but meta; it stays the same object.
        load: brings them back when they are read; called with the parameter.
    """
    with torch._C.DisableTorchFunctionSubclass():
        # One number stands for all of them; what slips through without loading becomes NaN.
        filler = float("nan") if parameter.is_floating_point() else 0
        one = torch.full((), filler, dtype=parameter.dtype, device=parameter.device)
        parameter.data = one.expand(parameter.shape)
    parameter.__class__ = Waiting
    parameter._normswap_load = load  # type: ignore[attr-defined]


def fill(parameter: nn.Parameter, values: torch.Tensor) -> None:
    """Give a parameter that was emptied its values."""
    parameter.__class__ = nn.Parameter
    # A copy of the parameter takes its attributes along, and is not read from anywhere.
    vars(parameter).pop("_normswap_load", None)
    parameter.data = values
