"""Buffers that are filled in turn while threads hash and write those filled before.

Hashing, copying and system calls release the interpreter's lock, so that a file moves at the speed of the slowest step
and not of their sum. All memory is taken once: fresh memory for each piece costs more than the work on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

__all__ = ["Ring", "Slot", "Stage", "one_thread", "read_into", "write_all"]


class Slot:
    """A buffer, and the work that is still going on with it.

    Attributes:
        memory: uint8 ``(size,)``.
    """

    def __init__(self, size: int) -> None:
        self.memory = np.empty(size, np.uint8)
        self._pending: list[Future[Any]] = []

    def until(self, work: Future[Any]) -> None:
        """Keep the buffer as it is until a piece of work is done."""
        self._pending.append(work)

    def wait(self) -> None:
        """Wait until all work with it is done; raises what that raised."""
        pending, self._pending = self._pending, []
        for work in pending:
            work.result()


class Ring:
    """A fixed number of buffers, handed out in turn.

    Args:
        count: of buffers.
        size: of each, in bytes.
    """

    def __init__(self, count: int, size: int) -> None:
        self._slots = [Slot(size) for _ in range(count)]
        self._next = 0

    def take(self) -> Slot:
        """Return the buffer that was handed out longest ago, once all work with it is done."""
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        slot.wait()
        return slot

    def drain(self) -> None:
        """Wait until no work with any buffer is left; raises what that raised."""
        for slot in self._slots:
            slot.wait()


class Stage:
    """A thread that does one thing after another, in the order in which they are given."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"normswap-{name}")

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        # What waits is little, and lets files that are complete be finished before an error goes on.
        self._pool.shutdown()

    def do(self, work: Callable[..., Any], *arguments: Any) -> Future[Any]:
        """Queue a call."""
        return self._pool.submit(work, *arguments)


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Keep torch to one thread: its others spin while they wait, and take the cores from the threads that work."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def read_into(stream: Any, memory: Any, offset: int) -> bool:
    """Fill memory from an unbuffered binary file, from an offset on.

    Returns:
        False where the file ends before.
    """
    view = memoryview(memory)
    stream.seek(offset)
    while view:
        count = stream.readinto(view)
        if not count:
            return False
        view = view[count:]
    return True


def write_all(stream: Any, memory: Any) -> None:
    """Write memory to the end of an unbuffered binary file."""
    view = memoryview(memory)
    while view:
        view = view[stream.write(view) :]
