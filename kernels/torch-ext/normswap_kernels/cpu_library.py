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

_lock = threading.Lock()
_library: Library | None = None
_looked_for = False


def library() -> Library | None:
    """Return the library, building and loading it in the first call; None where there is none for this process.

    There is none outside Linux, without a C++ compiler, with ``NORMSWAP_CPU_COMPILE=0``, and where the build fails or
    the library gives other bits than torch.
    """
    global _library, _looked_for
    if _looked_for:
        return _library
    with _lock:
        reason = ""
        if not _looked_for:
            # What fails here would fail at each call.
            _looked_for = True
            _library, reason = _open()
    if reason:
        warnings.warn(reason, RuntimeWarning, stacklevel=2)
    return _library


def _open() -> tuple[Library | None, str]:
    if sys.platform != "linux" or os.environ.get("NORMSWAP_CPU_COMPILE") == "0":
        return None, ""
    from .cpu_build import BuildError, find_compiler, open_library

    compiler = find_compiler()
    if compiler is None:
        return None, ""
    try:
        torch_library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
        # Found among what torch itself depends on: another copy would bring threads of its own.
        parallel, team = (_address(torch_library, name) for name in ("GOMP_parallel", "omp_get_num_threads"))
    except (OSError, AttributeError):
        return None, ""
    try:
        loaded, unkept = open_library(compiler)
    except BuildError as error:
        return None, f"norms run on torch's operations, since compiling them failed: {error}"
    for function in (loaded.normswap_forward, loaded.normswap_backward):
        function.argtypes, function.restype = [ctypes.c_char_p], None
    from .cpu_check import prove

    found = prove(Library(loaded.normswap_forward, loaded.normswap_backward, True, True, parallel, team, 0))
    if unkept:
        unkept = f"the compiled norms are built anew by each process, since they cannot be kept: {unkept}"
    return found, unkept


def _address(loaded: ctypes.CDLL, name: str) -> int:
    return ctypes.cast(getattr(loaded, name), ctypes.c_void_p).value or 0


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
