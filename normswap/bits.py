"""What the bits of stored floating-point numbers tell, much faster than arithmetic in half precision."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["FLOATS", "as_bits", "count_bad", "zeros"]

FLOATS = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "C128": torch.float64,
    "C64": torch.float32,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
}
"""The dtypes of safetensors that hold floating-point numbers; complex ones by their parts."""

# Bits of the smallest positive pattern that is no number: everything from it up to the sign bit is NaN or infinite.
_FIRST_BAD = {
    torch.float64: 0x7FF0 << 48,
    torch.float32: 0x7F80 << 16,
    torch.float16: 0x7C00,
    torch.bfloat16: 0x7F80,
    torch.float8_e5m2: 0x7C,
    torch.float8_e4m3fn: 0x7F,
}


def as_bits(values: torch.Tensor) -> Any:
    """Return the bytes of a tensor as a NumPy array of uint8, which shares its memory where that is plain memory."""
    return values.detach().cpu().reshape(-1).view(torch.uint8).numpy()


def count_bad(piece: Any, dtype: torch.dtype, *, allow_negative: bool = False) -> int:
    """Count the values of a piece of raw bytes that are NaN or infinite, or with `allow_negative` all but -inf.

    Args:
        piece: uint8 ``(bytes,)``, not empty.
        dtype: what the bytes stand for.
        allow_negative: whether -inf is sound.
    """
    first = _FIRST_BAD.get(dtype)
    if first is not None:
        width = dtype.itemsize
        # Sound weights are told by two passes over integers, ten times faster than by arithmetic on bf16.
        positive = int(piece.view(f"i{width}").max()) < first
        if positive and int(piece.view(f"u{width}").max()) < first | 1 << (8 * width - 1):
            return 0
    values = torch.from_numpy(piece.copy()).view(dtype)
    values = values.float() if dtype.itemsize == 1 else values
    bad = ~torch.isfinite(values)
    return int((bad & ~torch.isneginf(values) if allow_negative else bad).sum())


def zeros(piece: Any, width: int) -> Any:
    """Return the positions of the zeros of either sign in a piece of raw bytes.

    Args:
        piece: uint8 ``(bytes,)``, not empty.
        width: bytes of one value.
    """
    plain = piece.view(f"u{width}")
    if plain.min() and int(piece.view(f"i{width}").min()) != -(1 << (8 * width - 1)):
        return np.empty(0, np.intp)
    return np.flatnonzero(np.left_shift(plain, 1) == 0)
