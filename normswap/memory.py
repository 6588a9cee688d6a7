"""How much memory this process may still take, and how it is given back."""

from __future__ import annotations

import ctypes
import gc
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["free_memory", "give_back", "share_arena", "young_collections"]

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")
# Of glibc's mallopt.
_M_ARENA_MAX = -8


def free_memory() -> int | None:
    """Return the bytes that are free, within the limit of the control group; None where the system does not say."""
    with suppress(OSError, ValueError):
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
        if found:
            return min(int(found[1]) * 1024, _left_in_group())
    return None


def _left_in_group() -> int:
    with suppress(OSError, ValueError):
        # A group without a limit says "max".
        return int((_GROUP / "memory.max").read_text()) - int((_GROUP / "memory.current").read_text())
    return 1 << 62


def share_arena() -> None:
    """Have new threads take memory where the others do, as far as the C library can be told.

    Else each keeps what it has freed to itself, and many threads that run one after the other keep it many times.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(_M_ARENA_MAX, 1)


def give_back() -> None:
    """Return memory that was freed to the system, as far as the C library can be told."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


@contextmanager
def young_collections() -> Iterator[None]:
    """Keep the garbage collector off all that was there before: one collection of it takes as long as a forward."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
