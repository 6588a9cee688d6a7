"""The call of a kernel, by a way that is shorter than Triton's own: Python takes longer than a short row does."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor

from .launch import Launch

MOST_COMPILED = 4096
"""Most launches that are remembered; strides that vary would fill the memory."""


def run(launch: Launch, x: Tensor, interpret: bool) -> None:
    """Launch under the device of ``x``, which need not be the current one.

    Under the interpreter NumPy's warnings are silenced: an infinity is a result here, not a mishap.
    """
    if interpret:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            launch.kernel[launch.grid](*launch.arguments, **launch.options)
    elif x.is_cuda and torch.cuda.current_device() == x.get_device():
        launch_here(launch, x.get_device())
    else:
        with torch.get_device_module(x.device).device(x.device):
            launch_here(launch, x.get_device())


# What Triton compiled for a launch: looking that up itself takes four fifths of the time of its launches.
_COMPILED: dict[tuple[Any, ...], tuple[dict[str, Any], tuple[Any, ...], Any]] = {}


def launch_here(launch: Launch, device: int) -> None:
    """Launch on the current device, which has this index."""
    kernel, grid, arguments, options = launch
    # All that Triton compiles anew for. The options are held by the entry, so that no others have their address.
    key = (id(options), device, *[_kind(argument) for argument in arguments])
    found = _COMPILED.get(key)
    if found is not None:
        _, constants, compiled = found
        compiled[(grid[0], 1, 1)](*arguments, *constants)
        return
    if len(_COMPILED) >= MOST_COMPILED:
        _COMPILED.clear()
    # What kernel[grid](...) comes to, without the closure that it makes.
    compiled = kernel.run(*arguments, grid=grid, warmup=False, **options)
    # Nothing comes back where a hook of Triton's has taken the compilation over.
    if compiled is not None:
        _COMPILED[key] = options, tuple(options[name] for name in kernel.arg_names[len(arguments) :]), compiled


def _kind(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        # On AMD's GPUs Triton compiles small tensors for 32-bit offsets.
        small = torch.version.hip is None or argument.untyped_storage().nbytes() < 2**31
        return argument.dtype, argument.data_ptr() % 16 == 0, small
    if isinstance(argument, int):
        return argument == 1, argument % 16 == 0, argument >= 2**31
    return argument if argument is None or isinstance(argument, tuple) else float
