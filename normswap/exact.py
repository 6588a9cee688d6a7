"""Tell when float32 holds the products of stored weights and factors exactly, which float64 takes twice as long for."""

from __future__ import annotations

import numpy as np
import torch

from normswap.bits import as_bits

__all__ = ["Fit", "significant_bits"]

_TOTAL = 24
# Values at a time, few enough for what lies between two steps to need no fresh memory.
_BLOCK = 1 << 15
_BITS = {torch.float16: 11, torch.bfloat16: 8, torch.float8_e4m3fn: 4, torch.float8_e5m2: 3}
# Factors within these powers of two cannot take a product with any float16 out of float32's range.
_SMALLEST, _LARGEST = 2.0**-100, 2.0**100
_LEAST_NORMAL = 2.0**-126


class Fit:
    """Whether float32 holds the products with some factors.

    Args:
        factors: float64, finite.
        dtype: of the weights.
    """

    def __init__(self, factors: torch.Tensor, dtype: torch.dtype) -> None:
        sizes = factors[factors != 0].abs()
        self._least = float(sizes.min()) if len(sizes) else 1.0
        self._bfloat = dtype == torch.bfloat16
        self._possible = (
            dtype in _BITS
            and _BITS[dtype] + significant_bits(sizes) <= _TOTAL
            and (not len(sizes) or (self._least >= _SMALLEST and float(sizes.max()) <= _LARGEST))
        )

    def holds(self, weights: torch.Tensor) -> bool:
        """Return whether all products with these weights are exact; those that overflow become infinite."""
        if not self._possible or not self._bfloat or self._least >= 0.5:
            return self._possible
        # bfloat16 reaches down as far as float32 does, and a product may fall below both.
        return _least_magnitude(weights) * self._least >= _LEAST_NORMAL


def significant_bits(values: torch.Tensor) -> int:
    """Return how many bits from the first to the last that is set the values have, at most; 0 without values.

    Args:
        values: float64, finite and not zero.
    """
    if not len(values):
        return 0
    mantissa = values.view(torch.int64) & ((1 << 52) - 1) | (1 << 52)
    lowest = mantissa & -mantissa
    return 53 - int(lowest.min().double().log2())


def _least_magnitude(weights: torch.Tensor) -> float:
    """Return the smallest magnitude of bfloat16 values that is not zero; infinity where all are."""
    bits = as_bits(weights).view(np.uint16)
    blocks = (bits[start : start + _BLOCK] for start in range(0, len(bits), _BLOCK))
    # Without the sign, zero becomes the largest of all.
    least = min((int(((block << 1) - np.uint16(2)).min()) for block in blocks), default=0xFFFE)
    if least == 0xFFFE:
        return float("inf")
    return float(np.array([(least + 2) // 2 << 16], np.uint32).view(np.float32)[0])
