"""Time: contenders take turns, so that whatever else the machine does falls on all of them; medians."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Call = Callable[[], Any]

# Written between two samples on a GPU. It empties the L2, and while it lasts (a quarter of a millisecond on an H200)
# Python puts the whole call in the queue behind it, so that events see the device's time alone.
FLUSH_BYTES = 1 << 30

# On the CPU a sample lasts at least this long, so that the clock does not count.
SAMPLE_SECONDS = 0.0002


class Clock:
    """Measures calls on one device."""

    def __init__(self, device: torch.device, samples: int, seconds: float) -> None:
        """Prepare.

        Args:
            device: where the calls compute.
            samples: most samples of each contender.
            seconds: most seconds for all contenders of a case, but for the first three samples of each.
        """
        self._device, self._samples, self._seconds = device, samples, seconds
        self._flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device) if device.type == "cuda" else None

    def measure(self, calls: Sequence[Call]) -> list[float]:
        """Return the median seconds of one call of each contender."""
        for call in calls:
            call()
        sample = self._sample_gpu if self._flush is not None else self._cpu_sampler(calls)
        found: list[list[float]] = [[] for _ in calls]
        begin = time.perf_counter()
        gc.collect()
        gc.disable()
        try:
            for turn in range(self._samples):
                if turn >= 3 and time.perf_counter() - begin > self._seconds:
                    break
                for k, call in enumerate(calls):
                    found[k].append(sample(call))
        finally:
            gc.enable()
        return [statistics.median(seconds) for seconds in found]

    def _sample_gpu(self, call: Call) -> float:
        assert self._flush is not None
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def _cpu_sampler(self, calls: Sequence[Call]) -> Callable[[Call], float]:
        counts = {id(call): max(1, int(SAMPLE_SECONDS / max(_seconds(call, 1), 1e-7))) for call in calls}
        return lambda call: _seconds(call, counts[id(call)])


def _seconds(call: Call, count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def copying(n_bytes: int, device: torch.device) -> Call:
    """Return a copy that reads and writes so many bytes in all: the yardstick of the device."""
    source = torch.zeros(max(1, n_bytes // 2), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)
