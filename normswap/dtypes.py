"""Dtypes as users name them."""

from __future__ import annotations

import torch

from normswap.errors import UsageError

__all__ = ["named_dtype", "reference_dtype"]


def named_dtype(given: str | torch.dtype) -> torch.dtype:
    """Return a dtype that models are served in, by name or as it is.

    Raises:
        UsageError: it is none of float32, float16 and bfloat16.
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise UsageError(f"expected dtype float32, float16 or bfloat16, got {given!r}")
    return dtype


def reference_dtype(given: str | torch.dtype | None) -> torch.dtype | None:
    """Return a dtype of the reference's arithmetic, by name or as it is; None for the usual one.

    Raises:
        UsageError: it is neither float32 nor float64.
    """
    dtype = getattr(torch, given, None) if isinstance(given, str) else given
    if given is not None and dtype not in (torch.float32, torch.float64):
        raise UsageError(f"expected the reference in float32 or float64, got {given!r}")
    return dtype
