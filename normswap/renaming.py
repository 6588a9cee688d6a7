"""Two renames that Python's standard library lacks: onto nothing, and in exchange."""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from pathlib import Path

__all__ = ["exchange", "rename_new"]

_AT_FDCWD = -100
_NOREPLACE = 1
_EXCHANGE = 2
_UNSUPPORTED = {errno.EINVAL, errno.ENOSYS, errno.ENOTSUP}


def exchange(first: Path, second: Path) -> bool:
    """Let two existing paths change places in one step.

    Returns:
        False where the system or the file system cannot; nothing was changed then.

    Raises:
        OSError: it can, and refused.
    """
    return _renameat2(first, second, _EXCHANGE)


def rename_new(source: Path, target: Path) -> None:
    """Rename a folder to a name that nothing has.

    Raises:
        FileExistsError: something has that name.
        OSError: the rename was refused for another reason.
    """
    if _renameat2(source, target, _NOREPLACE):
        return
    # Not atomic, the best that is left; a folder with content is never replaced by this either.
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    source.rename(target)


def _renameat2(source: Path, target: Path, flags: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    # Declared types make ctypes refuse a NUL inside a name, which C would take for its end.
    call.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_char_p, ctypes.c_uint]
    if call(_AT_FDCWD, os.fsencode(source), _AT_FDCWD, os.fsencode(target), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), str(target))
