"""Names and locks of temporary folders, so that a killed run's can be told from a live one's and removed.

The name carries the machine, its boot (with the process namespace) and the process; a live run holds an advisory lock
on the folder itself, which the system releases however the process ends.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import socket
import time
from pathlib import Path

try:
    import fcntl
except ImportError:  # Windows has no advisory locks: nothing is taken for stale there.
    fcntl = None  # type: ignore[assignment]

__all__ = ["claim", "lock", "new_name", "remove_stale"]

_NAME = re.compile(r"\.normswap-(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-(?P<pid>\d+)-[0-9a-f]{8}\.tmp")
# Between making a folder and locking it a run is unprotected; no run needs longer than this for it.
_GRACE_SECONDS = 600


def new_name() -> str:
    """Return a fresh name for this process's temporary folder."""
    return f".normswap-{_host()}-{_boot()}-{os.getpid()}-{secrets.token_hex(4)}.tmp"


def claim(folder: Path) -> int | None:
    """Mark a folder as in use by this run alone.

    Returns:
        A handle that holds the mark until it is closed or the process ends; None where the system or its file system
        has no such marks.

    Raises:
        BlockingIOError: another run holds it.
        OSError: the folder cannot be opened.
    """
    if fcntl is None:
        return None
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(handle)
        if isinstance(error, BlockingIOError):
            raise
        return None
    return handle


def lock(folder: Path) -> int | None:
    """Mark a temporary folder as in use, as `claim` does; None also where another run holds it."""
    try:
        return claim(folder)
    except BlockingIOError:
        return None


def remove_stale(base: Path) -> None:
    """Remove the temporary folders in ``base`` that killed runs of this machine left behind."""
    with contextlib.suppress(OSError):
        for folder in base.iterdir():
            found = _NAME.fullmatch(folder.name)
            if found and found["host"] == _host() and not folder.is_symlink():
                _remove_if_stale(folder, found["boot"], int(found["pid"]))


def _remove_if_stale(folder: Path, boot: str, pid: int) -> None:
    with contextlib.suppress(OSError):
        if boot == _boot() and not _alive(pid):
            shutil.rmtree(folder, ignore_errors=True)
            return
        if boot == _boot() and time.time() - folder.stat().st_mtime < _GRACE_SECONDS:
            return
        handle = lock(folder)
        if handle is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(handle)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _host() -> str:
    return _short(socket.gethostname())


def _boot() -> str:
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    with contextlib.suppress(OSError):
        parts.append(str(Path("/proc/self/ns/pid").readlink()))
    return _short("".join(parts))


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
