"""How far a run is, in words that fit one line."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["SAVING", "ProgressLine"]

# The step whose progress is counted in bytes.
SAVING = "saving"


class ProgressLine:
    """Words for the progress of one step after another; for bytes also how many, and the time that is left.

    Args:
        clock: gives seconds.

    Example:
        >>> ProgressLine().text("verifying", 1, 4)
        'verifying: 25%'
        >>> line = ProgressLine(iter([0.0, 10.0]).__next__)
        >>> line.text(SAVING, 0, 4_000_000_000)
        'saving: 0%, 0.00 of 4.00 GB'
        >>> line.text(SAVING, 1_000_000_000, 4_000_000_000)
        'saving: 25%, 1.00 of 4.00 GB, 30 s left'
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._step = ""
        self._began = (0.0, 0)

    def text(self, step: str, done: int, total: int) -> str:
        """Return the words for a step of which ``done`` of ``total`` are done."""
        words = f"{step}: {100 * done // max(total, 1)}%"
        if step != SAVING:
            self._step = step
            return words
        now = self._clock()
        if self._step != step:
            self._step, self._began = step, (now, done)
        words += f", {done / 1e9:.2f} of {total / 1e9:.2f} GB"
        seconds, count = now - self._began[0], done - self._began[1]
        return f"{words}, {seconds / count * (total - done):.0f} s left" if count and seconds else words
