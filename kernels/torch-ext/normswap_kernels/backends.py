"""Which implementation runs where, and why one cannot run here."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from types import ModuleType
from typing import Literal

import torch

BACKENDS = ("auto", "triton", "cpu", "interpret")

Operation = Literal["norm_forward", "norm_backward", "norm_quant"]

# ROCm devices call themselves "cuda" in torch.
_GPUS = ("cuda", "xpu")


class BackendUnavailable(RuntimeError):
    """A backend was asked for that cannot run here; the message says why and what to do."""


def check_backend(backend: str, device: torch.device | str) -> str:
    """Resolve a backend's name for tensors of a device, or say why it cannot run.

    Nothing runs on meta tensors, so for them any backend is taken at its word.

    Args:
        backend: one of `BACKENDS`. ``"auto"`` is ``"triton"`` on CUDA, ROCm and XPU devices, ``"cpu"`` on the CPU.
        device: where the input lies.

    Returns:
        ``"triton"``, ``"cpu"`` or ``"interpret"``.

    Raises:
        ValueError: the name is none of `BACKENDS`.
        BackendUnavailable: the backend cannot run on this device, in this process or on this machine.

    Example:
        >>> check_backend("auto", "cpu")
        'cpu'
    """
    if backend not in BACKENDS:
        raise ValueError(f"expected a backend among {', '.join(BACKENDS)}, got {backend!r}: pass one of them")
    return _resolve(backend, device.type if isinstance(device, torch.device) else torch.device(device).type)


@functools.cache
def kernels(operation: Operation) -> ModuleType:
    """Import the module of Triton kernels for one operation; for a backend that `check_backend` has let pass."""
    return importlib.import_module(f".{operation}", __package__)


# What raised is asked again; what can run once can run for as long as the process lives.
@functools.cache
def _resolve(backend: str, kind: str) -> str:
    if kind == "meta":
        return "cpu" if backend == "auto" else backend
    if backend == "auto":
        if kind == "cpu":
            return "cpu"
        if kind not in _GPUS:
            raise BackendUnavailable(
                f"no implementation for device {kind!r}: move the tensors to a CUDA, ROCm or XPU device or to the CPU"
            )
        backend = "triton"
    if backend == "triton":
        _check_triton(kind)
    elif kind != "cpu":
        raise BackendUnavailable(
            f"backend {backend!r} takes CPU tensors, got device {kind!r}: "
            "move the tensors to the CPU, or choose backend 'triton'"
        )
    elif backend == "interpret":
        _check_interpreter()
    return backend


def _check_triton(kind: str) -> None:
    if kind not in _GPUS:
        raise BackendUnavailable(
            f"backend 'triton' needs a CUDA, ROCm or XPU device, got device {kind!r}: move the tensors to a GPU, "
            "or choose backend 'cpu' (fast) or 'interpret' (Triton's interpreter, for checking)"
        )
    if not torch.get_device_module(kind).is_available():
        raise BackendUnavailable(
            f"backend 'triton' needs a GPU, and torch {torch.__version__} sees no {kind!r} device: "
            "check the driver and the torch build, or choose backend 'cpu'"
        )
    _check_installed("triton")
    if _interpreting():
        raise BackendUnavailable(
            "backend 'triton' cannot run in a process where Triton interprets (TRITON_INTERPRET=1): "
            "start a new process without it"
        )


def _check_interpreter() -> None:
    _check_installed("interpret")
    if "triton" not in sys.modules:
        # Triton decides when it is imported whether its own functions are interpreted, and never again.
        os.environ["TRITON_INTERPRET"] = "1"
    if not _interpreting():
        raise BackendUnavailable(
            "backend 'interpret' needs TRITON_INTERPRET=1 before Triton is first imported, and this process has "
            "imported it without: start a new process with TRITON_INTERPRET=1"
        )


def _check_installed(backend: str) -> None:
    if "triton" not in sys.modules and importlib.util.find_spec("triton") is None:
        raise BackendUnavailable(
            f"backend {backend!r} needs the package triton, which is not installed: "
            "pip install triton (Linux), or choose backend 'cpu'"
        )


def _interpreting() -> bool:
    import triton.language as tl
    from triton.runtime.jit import JITFunction

    return not isinstance(tl.sum, JITFunction)
