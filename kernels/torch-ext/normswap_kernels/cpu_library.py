"""Open the compiled CPU path: built and loaded by the first call that can use it, never at import."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import warnings
from pathlib import Path

import torch

from .cpu_compiled import Library

_OFF = ("0", "false", "no", "off")

# Files whose lines are not the user's.
_WITHIN = tuple(f"{Path(file).parent}{os.sep}" for file in (__file__, torch.__file__))

_lock = threading.Lock()
_library: Library | None = None
_looked_for = False


def library() -> Library | None:
    """Return the library, building and loading it in the first call; None where there is none for this process.

    There is none outside Linux, without a C++ compiler, with ``NORMSWAP_CPU_COMPILE=0`` (or false, no, off), and where
    the build fails or the library gives other bits than torch.
    """
    global _library, _looked_for
    if _looked_for:
        return _library
    with _lock:
        reason = ""
        if not _looked_for:
            _library, reason = _open()
            # What failed would fail at each call; what was interrupted is tried again.
            _looked_for = True
    if reason:
        warnings.warn(reason, RuntimeWarning, stacklevel=_levels_to_caller())
    return _library


def _open() -> tuple[Library | None, str]:
    if sys.platform != "linux" or os.environ.get("NORMSWAP_CPU_COMPILE", "").strip().lower() in _OFF:
        return None, ""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # Found among what torch itself depends on: another copy would bring threads of its own.
        parallel, team = (_address(torch_library, name) for name in ("GOMP_parallel", "omp_get_num_threads"))
    except (OSError, AttributeError):
        return None, ""
    try:
        return _build(parallel, team)
    except Exception as error:
        # Whatever it is: the norms can be computed without.
        return None, f"norms run on torch's operations, since compiling them failed: {error or type(error).__name__}"


def _build(parallel: int, team: int) -> tuple[Library | None, str]:
    from .cpu_build import find_compiler, open_library
    from .cpu_check import prove

    compiler = find_compiler()
    if compiler is None:
        return None, ""
    loaded, unkept = open_library(compiler)
    found = prove(Library(loaded.normswap_forward, loaded.normswap_backward, True, True, parallel, team, 0))
    if unkept:
        unkept = f"the compiled norms are built anew by each process, since they cannot be kept: {unkept}"
    return found, unkept


def _levels_to_caller() -> int:
    """Count the levels of the stack from the caller of this to the first that is not of this package or of torch."""
    frame, level = sys._getframe(1), 1
    while frame.f_code.co_filename.startswith(_WITHIN) and frame.f_back is not None:
        frame, level = frame.f_back, level + 1
    return level


def _address(loaded: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
