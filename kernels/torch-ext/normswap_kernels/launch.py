"""How the kernels are launched: the shape of a program, chosen by the width of a row alone.

The number of rows has no say. Another tile would add the elements of a row in another order, and a row's result
must be the same whatever rows stand beside it.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Tile:
    """What one program works on.

    Attributes:
        rows: number of rows.
        block_n: columns that are held at once; a power of two.
        threads: number of threads.
        one_block: whether a row fits in one block, so that it is read once.
        reason: why this shape.
    """

    rows: int
    block_n: int
    threads: int
    one_block: bool
    reason: str

    def num_warps(self, warp_size: int) -> int:
        """Return the number of warps (wavefronts) on a device whose warps have this size."""
        return max(1, self.threads // warp_size)


@dataclass(frozen=True)
class Rule:
    """A rule for rows up to a width.

    Attributes:
        max_width: the widest row that it is for.
        elements: what a program should hold, at least, in elements: several short rows, or one long one.
        per_thread: elements a thread.
        max_threads: most threads of a program.
        reason: why.
    """

    max_width: int
    elements: int
    per_thread: int
    max_threads: int
    reason: str


RULES = (
    Rule(
        max_width=1024,
        elements=2048,
        per_thread=16,
        max_threads=128,
        reason="a short row does not fill a program: several rows share one, with 16 elements a thread",
    ),
    Rule(
        max_width=16384,
        elements=1,
        per_thread=16,
        max_threads=512,
        reason="one row a program, read once and kept in registers; 16 elements a thread are two 16-byte loads of "
        "a 2-byte dtype, and up to 32 at 512 threads leave the registers unspilled",
    ),
)

# Half of the widest one-block row: the accumulator and the block in flight share the registers.
LOOP = Tile(
    rows=1,
    block_n=8192,
    threads=512,
    one_block=False,
    reason="the row does not fit in registers: one pass for each statistic and one to write, the later ones from L2",
)


def choose_tile(width: int) -> Tile:
    """Choose the tile for rows of ``width`` elements.

    Example:
        >>> choose_tile(128).rows, choose_tile(4096).block_n, choose_tile(65537).one_block
        (16, 4096, False)
    """
    block_n = max(16, 1 << (width - 1).bit_length())
    for rule in RULES:
        if width <= rule.max_width:
            rows = max(1, rule.elements // block_n)
            threads = min(rule.max_threads, rows * block_n // rule.per_thread)
            return Tile(rows, block_n, threads, True, rule.reason)
    return LOOP


def warp_size() -> int:
    """Return the number of threads in a warp: 64 on AMD's data-centre GPUs, for which the ROCm build is, else 32."""
    return 64 if torch.version.hip else 32


@contextlib.contextmanager
def launching(x: Tensor, interpret: bool) -> Iterator[None]:
    """Launch under the device of ``x``, which need not be the current one.

    Under the interpreter NumPy's warnings are silenced: an infinity is a result here, not a mishap.
    """
    if interpret:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            yield
        return
    module = torch.get_device_module(x.device)
    if module.current_device() == x.device.index:
        yield
        return
    with module.device(x.device):
        yield
