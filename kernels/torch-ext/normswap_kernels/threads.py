"""Share the rows of a matrix among a few threads that each run torch's operations serially.

Torch's own parallelism ends every operation with a barrier. For blocks that stay in the cache that is a hundred
barriers a call, and on a machine that has other work to do each of them waits for a thread that is not running
(measured with two busy cores: 40 times slower). Here threads meet once, at the end.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

# Torch runs an operation on fewer elements than this (at::internal::GRAIN_SIZE) in the calling thread.
SERIAL = 2**15

# Elements that make waking a thread worth its while.
_SHARE = 2**18

# More threads would wait for Python's lock, which is held for about a fifth of the time.
_MOST_WORKERS = 8

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def share_rows(work: Callable[[int, int], None], rows: int, width: int, step: int) -> None:
    """Call ``work(start, stop)`` for consecutive ranges that together are ``rows``, some in other threads.

    Args:
        work: computes a range of rows; its torch operations take fewer than `SERIAL` elements each.
        rows: number of rows.
        width: elements of a row.
        step: rows of one block; ranges are multiples of it.
    """
    workers = min(torch.get_num_threads(), _MOST_WORKERS, rows * width // _SHARE)
    if workers < 2:
        work(0, rows)
        return
    # Several ranges a worker, so that one that is held up leaves the rest to the others.
    blocks = -(-rows // step)
    length = step * -(-blocks // (4 * workers))
    ranges = deque((start, min(start + length, rows)) for start in range(0, rows, length))

    def drain() -> None:
        while True:
            try:
                start, stop = ranges.popleft()
            except IndexError:
                return
            work(start, stop)

    # These modes belong to a thread, and a result born in inference mode can be written to only there.
    inference = torch.is_inference_mode_enabled()

    def drain_elsewhere() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            drain()

    pool = _get_pool()
    helpers = [pool.submit(drain_elsewhere) for _ in range(workers - 1)]
    try:
        drain()
    finally:
        # A helper that has not begun has nothing left to do; one that has is finishing its range.
        for helper in helpers:
            if not helper.cancel():
                helper.result()


def _get_pool() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(_MOST_WORKERS, thread_name_prefix="normswap")
        return _pool


def _forget_pool() -> None:
    # Threads do not survive a fork, nor does a lock that another thread held.
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
