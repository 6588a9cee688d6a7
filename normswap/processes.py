"""One measurement on several processes, as ``torchrun`` starts them: each holds a share of every model."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from normswap.distributed import involved
from normswap.errors import ModelError
from normswap.inputs import Output
from normswap.loading import load_model
from normswap.source import Source

__all__ = [
    "everywhere",
    "gathered",
    "how_many",
    "is_first",
    "launched",
    "leave",
    "load_parallel",
    "local_device",
    "same_everywhere",
    "together",
]


def launched() -> bool:
    """Return whether this process is one of several that were started together, as ``torchrun`` does."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1


def how_many() -> int:
    """Return how many processes work together; 1 where there is one only."""
    return torch.distributed.get_world_size() if launched() else 1


def is_first() -> bool:
    """Return whether this is the process that speaks for all; true where there is one only."""
    return not launched() or int(os.environ["RANK"]) == 0


def local_device(device: torch.device) -> torch.device:
    """Return the device of this process: of several GPUs, its own.

    Args:
        device: what was asked for; one that has a number is kept.
    """
    if launched() and device.type == "cuda" and device.index is None:
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return device


@contextlib.contextmanager
def together(device: torch.device | str | None = None) -> Iterator[None]:
    """Join the other processes for as long as the context lasts; nothing happens where there are none.

    What the processes but the first print goes nowhere. One that fails tells the reason on its own stderr; the others
    lose their connection to it, and end too.

    Args:
        device: where the models run, which settles what the processes talk by; a GPU by default, where there is one.

    Raises:
        ModelError: this build of torch cannot, or the others do not answer.
    """
    if not launched():
        yield
        return
    if not torch.distributed.is_available():
        raise ModelError("several processes were started, and this build of torch lacks torch.distributed; start one")
    default = "cuda" if torch.cuda.is_available() else "cpu"
    here = local_device(torch.device(default if device is None else device))
    mine = not torch.distributed.is_initialized()
    try:
        if here.type == "cuda":
            torch.cuda.set_device(here)
        if mine:
            torch.distributed.init_process_group("nccl" if here.type == "cuda" else "gloo")
    except (RuntimeError, ValueError) as error:
        raise ModelError(f"cannot reach the other processes: {str(error).splitlines()[0]}") from error
    try:
        with _silent():
            yield
    finally:
        # Without waiting for the others: after an error they may be in the middle of a forward.
        if mine:
            torch.distributed.destroy_process_group()


@contextlib.contextmanager
def _silent() -> Iterator[None]:
    if is_first():
        yield
        return
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):  # noqa: PTH123
        yield


def load_parallel(source: Source, *, dtype: torch.dtype, device: torch.device | str = "cpu") -> nn.Module:
    """Load this process's share of a model, as transformers divides it with ``tp_plan="auto"``, in eval mode.

    Args:
        source: what `normswap.loading.resolve` found; the same on every process.
        dtype: as for `normswap.loading.load_model`.
        device: where the models run.

    Raises:
        CheckpointError: as for `normswap.loading.load_model`.
        ModelError: transformers has no plan for this class, or cannot divide it among so many processes.
    """
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        raise ModelError("expected several processes that know of each other; start them with torchrun")
    count = torch.distributed.get_world_size()
    _require_whole_heads(source, count)
    hint = "verify it on one process, where it is read layer by layer if it does not fit"
    try:
        model = load_model(source, dtype=dtype, device=local_device(torch.device(device)), tp_plan="auto")
    except ModelError as error:
        raise ModelError(f"{error} (on {count} processes, with tp_plan='auto'); {hint}") from error
    if not any(involved(parameter) for parameter in model.parameters()):
        raise ModelError(
            f"transformers has no tp_plan for {type(model).__name__}, so every one of {count} processes holds all of "
            f"it; {hint}"
        )
    return model


def _require_whole_heads(source: Source, count: int) -> None:
    config = source.config.get_text_config()
    for setting in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(config, setting, None)
        if isinstance(heads, int) and heads % count:
            raise ModelError(
                f"{source.name} has {heads} {setting}, which cannot be divided among {count} processes; start a number "
                "that divides them"
            )


def gathered(output: Output) -> Output:
    """Return an output with every tensor whole on every process; all of them have to call this."""
    if not any(involved(tensor) for tensor in output.tensors.values()):
        return output
    return Output(output.name, {name: _whole(tensor) for name, tensor in output.tensors.items()})


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if involved(tensor) else tensor
    return whole


def everywhere(failures: Sequence[str]) -> list[str]:
    """Collect the failures of all processes on every one of them.

    Returns:
        Those of this process, then what only others found, with their number; each once.
    """
    if not launched():
        return list(failures)
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, list(failures))
    known = dict.fromkeys(failures)
    for rank, theirs in enumerate(found):
        for failure in theirs:
            if failure not in failures:
                known.setdefault(f"{failure} (on process {rank})")
    return list(known)


def leave(code: int) -> NoReturn:
    """End this process.

    One of several ends at once, without what Python does on its way out: the threads by which it talked to the others
    abort it there now and then, though all is done.
    """
    if not launched():
        sys.exit(code)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def same_everywhere(code: int) -> int:
    """Return the largest exit code of all processes, on every one of them."""
    if not launched():
        return code
    device = "cuda" if torch.distributed.get_backend() == "nccl" else "cpu"
    largest = torch.tensor(code, device=device)
    torch.distributed.all_reduce(largest, torch.distributed.ReduceOp.MAX)
    return int(largest)
