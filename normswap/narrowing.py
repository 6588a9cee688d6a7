"""Round values to the dtype that they are stored in: once, and never out of its range in silence."""

from __future__ import annotations

import torch

from normswap.bits import as_bits, count_bad, zeros

__all__ = ["lost_range", "narrow", "round_once"]

# Values at a time, so that what lies between two steps stays in the processor's cache.
_BLOCK = 1 << 16
# Halfway between the largest number, 448, and where the next would be; and the bits of NaN.
_E4M3_END = 464.0
_E4M3_NAN = 0x7F


def narrow(values: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Round values to the nearest of a narrower dtype, ties to even, in one rounding.

    A plain copy of float64 to a dtype of 16 or 8 bits rounds twice, by way of float32. Here what lies between is
    rounded to odd, which keeps the second rounding right. What is too large becomes infinite, or NaN in a dtype without
    infinity.

    Args:
        values: float64 or float32.
        out: contiguous, of the same shape and any floating-point dtype; written.

    Returns:
        ``out``.

    Example:
        >>> narrow(torch.tensor([1 + 2**-8 + 2**-40], dtype=torch.float64), torch.zeros(1, dtype=torch.bfloat16))
        tensor([1.0078], dtype=torch.bfloat16)
    """
    if values.dtype != torch.float64 or out.dtype.itemsize >= 4:
        out.copy_(values)
    else:
        wide, flat = values.reshape(-1), out.view(-1)
        for start in range(0, len(wide), _BLOCK):
            flat[start : start + _BLOCK].copy_(_round_to_odd(wide[start : start + _BLOCK]))
    if out.dtype == torch.float8_e4m3fn:
        # torch puts the largest number in the place of one that is too large.
        out.view(torch.uint8).masked_fill_(values.abs() > _E4M3_END, _E4M3_NAN)
    return out


def round_once(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return values rounded by `narrow`, on their device.

    Args:
        values: float64 or float32.
        dtype: any floating-point dtype.
    """
    return narrow(values, torch.empty(values.shape, dtype=dtype, device=values.device))


def lost_range(rounded: torch.Tensor, before: torch.Tensor) -> str | None:
    """Say which values left the range of the dtype that they were rounded to.

    Args:
        rounded: after the rounding, of any shape.
        before: before it, or whether it was not zero.

    Returns:
        How many overflow, or else how many that are not zero became zero, and the dtype; None where all are in range.
    """
    if not rounded.numel():
        return None
    name = str(rounded.dtype).removeprefix("torch.")
    bits = as_bits(rounded)
    if bad := count_bad(bits, rounded.dtype):
        return f"{bad} values overflow in {name}"
    at = torch.from_numpy(zeros(bits, rounded.dtype.itemsize)).to(before.device)
    if len(at) and (lost := int((before.reshape(-1)[at] != 0).sum())):
        return f"{lost} values that are not zero become zero in {name}"
    return None


def _round_to_odd(wide: torch.Tensor) -> torch.Tensor:
    """Return float64 as float32, cut off, with the last bit set where something was cut off."""
    near = wide.float()
    back = near.double()
    inexact = back != wide
    if not inexact.any():
        return near
    bits = near.view(torch.int32)
    bits -= (back.abs() > wide.abs()).int()
    bits |= inexact.int()
    return near
