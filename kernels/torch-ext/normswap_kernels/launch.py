"""How the kernels are launched: the shape of a program, chosen by the width of a row alone.

The number of rows has no say. Another tile would add the elements of a row in another order, and a row's result
must be the same whatever rows stand beside it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch


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

    def tile(self, width: int) -> Tile:
        """Return the tile for rows of ``width`` elements, in one block."""
        block_n = max(16, 1 << (width - 1).bit_length())
        rows = max(1, self.elements // block_n)
        threads = min(self.max_threads, rows * block_n // self.per_thread)
        return Tile(rows, block_n, threads, True, self.reason)


FORWARD_RULES = (
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

# Half of the widest one-block row: the accumulators and the block in flight share the registers.
FORWARD_LOOP = Tile(
    rows=1,
    block_n=8192,
    threads=512,
    one_block=False,
    reason="the row does not fit in registers: one pass for the statistics and one to write, the second from L2",
)


@functools.cache
def choose_tile(width: int) -> Tile:
    """Choose the tile of a forward kernel for rows of ``width`` elements.

    Example:
        >>> choose_tile(128).rows, choose_tile(4096).block_n, choose_tile(65537).one_block
        (16, 4096, False)
    """
    for rule in FORWARD_RULES:
        if width <= rule.max_width:
            return rule.tile(width)
    return FORWARD_LOOP


@dataclass(frozen=True)
class BackwardTile:
    """What one program of the backward works on, again and again.

    Attributes:
        rows: number of rows.
        block_n: columns that are held at once; a power of two.
        threads: number of threads.
        programs: programs a multiprocessor.
        sums: gradients of parameters that are added up in registers, of those that are wanted.
        keep_gain: whether the gain stays in registers from tile to tile.
        most_stages: most stages of the loop over tiles; 1 loads nothing ahead.
        reason: why.
    """

    rows: int
    block_n: int
    threads: int
    programs: int
    sums: int
    keep_gain: bool
    most_stages: int
    reason: str

    def num_warps(self, warp_size: int) -> int:
        """Return the number of warps (wavefronts) on a device whose warps have this size."""
        return max(1, self.threads // warp_size)

    def stages(self, column_bytes: int, shared_bytes: int) -> int:
        """Return the stages of a loop over tiles, all but one of which lie in shared memory.

        Args:
            column_bytes: bytes of a column of all tensors together.
            shared_bytes: shared memory that the programs of a multiprocessor have together.
        """
        room = (shared_bytes - REDUCTION_BYTES) // self.programs
        return max(1, min(self.most_stages, 1 + room // (self.rows * self.block_n * column_bytes)))


@dataclass(frozen=True)
class BackwardRule:
    """A rule for rows up to a width, each in one block.

    Attributes:
        max_width: the widest row that it is for.
        gated: whether it is for rows with a gate.
        elements: what a program should hold, at least, in elements.
        per_thread: elements a thread.
        sums: gradients of parameters that are added up in registers, where all is of 2-byte dtypes.
        wide_gain_sums: likewise, where the gain is of a 4-byte dtype.
        wide_sums: likewise, where a row or a gradient of one is.
        keep_gain: whether the gain stays in registers from tile to tile.
        most_stages: most stages of the loop over tiles.
        reason: why.
    """

    max_width: int
    gated: bool
    elements: int
    per_thread: int
    sums: int
    wide_gain_sums: int
    wide_sums: int
    keep_gain: bool
    most_stages: int
    reason: str


# A gradient's program stays, so that few sums are left over: two tiles on their way hide the memory's latency.
BACKWARD_RULES = (
    BackwardRule(
        max_width=8192,
        gated=False,
        elements=2048,
        per_thread=16,
        sums=2,
        wide_gain_sums=2,
        wide_sums=2,
        keep_gain=True,
        most_stages=3,
        reason="two gradients of parameters, a gain and 16 elements of each tensor take up to 128 registers a thread",
    ),
    BackwardRule(
        max_width=16384,
        gated=False,
        elements=1,
        per_thread=32,
        sums=1,
        wide_gain_sums=1,
        wide_sums=0,
        keep_gain=False,
        most_stages=2,
        reason="32 elements a thread leave registers for one sum beside 2-byte rows and for none beside 4-byte rows",
    ),
    BackwardRule(
        max_width=4096,
        gated=True,
        elements=2048,
        per_thread=8,
        sums=1,
        wide_gain_sums=1,
        wide_sums=1,
        keep_gain=True,
        most_stages=3,
        reason="activation and slope take as many registers again as the rows: 8 elements a thread",
    ),
    BackwardRule(
        max_width=8192,
        gated=True,
        elements=1,
        per_thread=16,
        sums=1,
        wide_gain_sums=0,
        wide_sums=0,
        keep_gain=False,
        most_stages=1,
        reason="16 elements a thread fill 128 registers: addresses of tiles on their way would spill, as would a sum "
        "beside a 4-byte dtype",
    ),
)

REDUCTION_BYTES = 2048
"""What a program may need of the shared memory beside the tiles on their way: sums across warps, and the driver's."""

BACKWARD_THREADS = 512
"""Threads a multiprocessor: each has 128 registers, which the backward needs."""

BACKWARD_LOOP = BackwardTile(
    rows=1,
    block_n=4096,
    threads=512,
    programs=1,
    sums=0,
    keep_gain=False,
    most_stages=1,
    reason="8 elements a thread spill nowhere, and few wide rows are at work, so that the second pass finds them in L2",
)

COLUMNS = BackwardTile(
    rows=4,
    block_n=1024,
    threads=256,
    programs=2,
    sums=2,
    keep_gain=False,
    most_stages=3,
    reason="2 KB of a row are whole lines, and blocks of columns times parts of the rows fill the GPU",
)

PARTS = BackwardTile(
    rows=64,
    block_n=32,
    threads=128,
    programs=4,
    sums=0,
    keep_gain=False,
    most_stages=3,
    reason="many narrow programs: the sums lie in L2 and their latency is all there is",
)

WIDE_PARTS = BackwardTile(
    rows=16,
    block_n=256,
    threads=256,
    programs=2,
    sums=0,
    keep_gain=False,
    most_stages=3,
    reason="wide rows have few sums, and blocks of columns enough to fill the GPU",
)


@functools.cache
def choose_backward_tile(width: int, gated: bool, wide_gain: bool, wide: bool) -> BackwardTile:
    """Choose the tile of the backward for rows of ``width`` elements.

    Args:
        width: length of a row.
        gated: whether there is a gate.
        wide_gain: whether the gain is of a 4-byte dtype.
        wide: whether a row or a gradient of one is.

    Example:
        >>> choose_backward_tile(4096, False, False, False).threads
        256
        >>> choose_backward_tile(16384, False, True, True).sums
        0
    """
    for rule in BACKWARD_RULES:
        if width <= rule.max_width and gated == rule.gated:
            block_n = max(16, 1 << (width - 1).bit_length())
            rows = max(1, rule.elements // block_n)
            threads = rows * block_n // rule.per_thread
            sums = rule.wide_sums if wide else rule.wide_gain_sums if wide_gain else rule.sums
            programs = BACKWARD_THREADS // threads
            return BackwardTile(rows, block_n, threads, programs, sums, rule.keep_gain, rule.most_stages, rule.reason)
    return BACKWARD_LOOP


LEAST_SHARED_BYTES = 99 * 1024
"""Shared memory that a program may have on every NVIDIA GPU since Ampere."""


class Device(NamedTuple):
    """What a launch must know of the device that it is for.

    Attributes:
        warp_size: threads in a warp: 64 on AMD's data-centre GPUs, for which the ROCm build is, else 32.
        native_fp8: whether its instructions convert float32 to ``float8_e4m3fn``.
        processors: number of multiprocessors.
        interpreted: whether it is Triton's interpreter.
        shared_bytes: shared memory that a program may have; by default what every NVIDIA GPU since Ampere gives.
    """

    warp_size: int
    native_fp8: bool
    processors: int
    interpreted: bool
    shared_bytes: int = LEAST_SHARED_BYTES


INTERPRETER = Device(warp_size=32, native_fp8=False, processors=4, interpreted=True)


class Launch(NamedTuple):
    """One launch of a kernel, ready to be run, or to be compiled ahead of time.

    Attributes:
        kernel: the jitted function.
        grid: number of programs.
        arguments: its positional arguments.
        options: its compile-time arguments and the compiler's options.
    """

    kernel: Any
    grid: tuple[int]
    arguments: tuple[Any, ...]
    options: dict[str, Any]


@functools.cache
def device_of(device: torch.device) -> Device:
    """Describe a GPU."""
    properties: Any = torch.get_device_module(device).get_device_properties(device)
    if device.type == "xpu":
        return Device(32, False, properties.max_compute_units, False)
    if torch.version.hip:
        return Device(64, False, properties.multi_processor_count, False, 64 * 1024)
    native = (properties.major, properties.minor) >= (8, 9)
    shared = getattr(properties, "shared_memory_per_block_optin", LEAST_SHARED_BYTES)
    return Device(32, native, properties.multi_processor_count, False, shared)


def find_alignment(*strides: int) -> int:
    """Return the largest power of two, up to 16, that divides all strides (given in elements)."""
    common = 16
    for stride in strides:
        common |= stride
    return common & -common
