"""How much memory this process may still take."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

__all__ = ["free_memory"]

_MEMINFO = Path("/proc/meminfo")
_GROUP = Path("/sys/fs/cgroup")


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
