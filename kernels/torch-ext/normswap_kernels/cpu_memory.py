"""Large results in large pages.

The allocator gives large memory back to the system and fetches it anew for each result. Its pages then come one by
one, at their first touch, which can take several times longer than computing what is written there (measured in a
virtual machine: 2 us for a page of 4 KB).
"""

from __future__ import annotations

import ctypes
import functools
import sys
from typing import Any

from torch import Tensor

# Where large pages are not the rule, a program may ask for them.
_MADV_HUGEPAGE = 14
_LARGE_PAGE = 2**21

SMALLEST = _LARGE_PAGE // 4
"""A tensor of fewer elements fills no large page."""


def in_large_pages(*tensors: Tensor | None) -> None:
    """Ask the system to back tensors by large pages where they fill some; what they hold stays what it was."""
    for t in tensors:
        if t is not None and t.nbytes >= 2 * _LARGE_PAGE and (advise := _advise()) is not None:
            begin = t.data_ptr()
            first, end = -(-begin // _LARGE_PAGE) * _LARGE_PAGE, (begin + t.nbytes) // _LARGE_PAGE * _LARGE_PAGE
            # What the system answers does not matter: without large pages all is as before.
            advise(first, end - first, _MADV_HUGEPAGE)


@functools.cache
def _advise() -> Any:
    if sys.platform != "linux":
        return None
    try:
        advise = ctypes.CDLL(None).madvise
    except (OSError, AttributeError):
        return None
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return advise
