"""Compile the kernels ahead of time, for GPUs that need not be here, and hold what the compiler made of them to bounds.

``python -m normswap_kernels.aot [--json FILE|-] [--target T] [--operation O] [--jobs N]`` compiles each case for
NVIDIA sm_80, sm_90 and sm_100 and for AMD gfx942, and prints for each the widest load and store, the registers, the
spills, the shared memory, and the bytes of rows that it moves against the least possible: each input read once and
each output written once.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from .aot_cases import OPERATIONS, Case, default_cases
from .aot_compile import TARGETS, Figures, device_for, read_figures, row_tensors
from .backends import BackendUnavailable
from .launch import BACKWARD_LOOP, choose_backward_tile, choose_tile

KNOWN_TARGETS = (
    *(f"sm_{n}" for n in (80, 86, 87, 89, 90, 100, 103, 110, 120, 121)),
    *("gfx908", "gfx90a", "gfx942", "gfx950"),
)
"""What the command line takes: the compiler ends the process, with no word to the user, at a GPU that it lacks."""

MOST_LOOPED = {"rms_norm_quant": 7 / 3}
"""Bytes of rows past one block against the least: quantizing reads a row three times, and writes a byte."""
MOST_LOOPED_OTHERWISE = 5 / 3
"""Two reads of the row and of a gate before the norm, and one write."""
MOST_LOOPED_BACKWARD = 7 / 3
"""Two reads of row and gradient along the rows, one write, and one more read along the columns for the parameters."""
MOST_SPLIT_BACKWARD = 5 / 3
"""One read along the rows, one write, and one more read along the columns for the parameters that do not fit."""


@dataclass(frozen=True)
class Compiled:
    """What the compiler made of a case.

    Attributes:
        operation: as in the case.
        width: as in the case.
        dtype: as in the case, by name.
        gain: as in the case, by name.
        target: what it was compiled for.
        kernels: number of launches; of the figures below the worst counts, or the sum.
        load_bytes: as in `Figures`.
        store_bytes: as in `Figures`.
        narrowest_bytes: as in `Figures`.
        registers: as in `Figures`.
        spills: as in `Figures`.
        shared_bytes: as in `Figures`.
        ratio: bytes of rows that are asked for, against the least possible.
        broken: the bounds that are broken, in words.
    """

    operation: str
    width: int
    dtype: str
    gain: str
    target: str
    kernels: int
    load_bytes: int
    store_bytes: int
    narrowest_bytes: int
    registers: int
    spills: int
    shared_bytes: int
    ratio: float
    broken: tuple[str, ...]


def compile_case(case: Case, target: str) -> Compiled:
    """Compile one case for one target.

    Args:
        case: what to compile.
        target: one of `TARGETS`, or another name of that form.

    Returns:
        The compiler's figures.

    Raises:
        ValueError: the target's name is of another form.
        BackendUnavailable: Triton is missing, or interprets in this process and so does not compile.
    """
    device = device_for(target)
    try:
        launches = case.launches(device)
    except ImportError as error:
        raise BackendUnavailable(
            "compiling needs the package triton, which is not installed: pip install triton"
        ) from error
    figures = [read_figures(launch, target) for launch in launches]
    # A tensor that several launches read is still read once at least.
    tensors = {id(t): t for launch in launches for t in row_tensors(launch).values()}
    least = sum(t.shape[1] * t.shape[2] * t.element_size() for t in tensors.values())
    ratio = sum(f.moved for f in figures) / least
    # Sums of parts are a few numbers, and how wide they are moved is no matter.
    along_rows = [f for f, launch in zip(figures, launches, strict=True) if row_tensors(launch)]
    return Compiled(
        case.operation,
        case.width,
        _name(case.dtype),
        _name(case.gain),
        target,
        len(launches),
        min(f.load_bytes for f in along_rows),
        min(f.store_bytes for f in along_rows),
        min(f.narrowest_bytes for f in along_rows),
        max(f.registers for f in figures),
        sum(f.spills for f in figures),
        max(f.shared_bytes for f in figures),
        round(ratio, 4),
        tuple(_broken(case, figures, min(f.narrowest_bytes for f in along_rows), ratio)),
    )


def most_moved(case: Case) -> float:
    """Return the bytes of rows that a case may ask for, against the least possible."""
    name, gated = case.operation, case.operation.startswith("gated")
    if not name.endswith("backward"):
        return (
            1.0 if choose_tile(case.width).one_block else MOST_LOOPED.get(name.partition(" ")[0], MOST_LOOPED_OTHERWISE)
        )
    tile = choose_backward_tile(case.width, gated, case.gain.itemsize > 2, case.dtype.itemsize > 2)
    sums = 0 if name.startswith("l2") else 2 if "layer" in name else 1
    if tile is BACKWARD_LOOP:
        return MOST_LOOPED_BACKWARD
    return 1.0 if sums <= tile.sums else MOST_SPLIT_BACKWARD


def _broken(case: Case, figures: Sequence[Figures], narrowest: int, ratio: float) -> list[str]:
    broken = []
    if spills := sum(f.spills for f in figures):
        broken.append(f"{spills} spilled, 0 allowed")
    if narrowest < 16:
        broken.append(f"an access of {narrowest} bytes where 16 are possible")
    most = most_moved(case)
    if ratio > most + 1e-3:
        broken.append(f"{ratio:.2f} of the least bytes, {most:.2f} allowed")
    return broken


def compile_all(cases: Sequence[Case], targets: Sequence[str], jobs: int) -> list[Compiled]:
    """Compile cases for targets in several processes; the results are in the order of the cases."""
    pairs = [(case, target) for case in cases for target in targets]
    if jobs == 1:
        return [compile_case(*pair) for pair in pairs]
    # Not forked: a child of a process with threads may inherit a lock that nobody will open.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(jobs, mp_context=context) as pool:
        return list(pool.map(compile_case, *zip(*pairs, strict=True), chunksize=4))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(r: Compiled) -> str:
    """Give the line of the table."""
    kind = f"{_short(r.dtype)}/{_short(r.gain)}"
    return (
        f"{r.operation:31}{r.width:6}  {kind:10}{r.target:8}{r.load_bytes:7}{r.store_bytes:8}{r.narrowest_bytes:8}"
        f"{r.registers:6}{r.spills:7}{r.shared_bytes:8}{r.ratio:7.2f}" + "".join(f"  {text}" for text in r.broken)
    )


@functools.cache
def _short(dtype: str) -> str:
    return {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}[dtype]


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code: 1 where a bound is broken."""
    parser = argparse.ArgumentParser(prog="python -m normswap_kernels.aot", description=__doc__)
    parser.add_argument("--json", metavar="FILE", help="write the figures as JSON; - for standard output")
    parser.add_argument(
        "--target",
        action="append",
        choices=KNOWN_TARGETS,
        metavar="T",
        help=f"one of {' '.join(KNOWN_TARGETS)}; default: {' '.join(TARGETS)}",
    )
    parser.add_argument("--operation", action="append", choices=OPERATIONS, help="default: all")
    parser.add_argument("--jobs", type=_count, default=os.cpu_count() or 1, help="processes; default: one a core")
    options = parser.parse_args(arguments)
    cases = [case for case in default_cases() if options.operation is None or case.operation in options.operation]
    results = compile_all(cases, options.target or TARGETS, options.jobs)
    if options.json != "-":
        print(
            f"{'operation':31}{'width':>6}  {'rows/gain':10}{'target':8}{'load B':>7}{'store B':>8}{'least B':>8}"
            f"{'regs':>6}{'spills':>7}{'shared':>8}{'moved':>7}"
        )
        for result in results:
            print(describe(result))
    if options.json:
        text = json.dumps([asdict(result) for result in results], indent=2)
        if options.json == "-":
            print(text)
        else:
            Path(options.json).write_text(text + "\n")
    return int(any(result.broken for result in results))


if __name__ == "__main__":
    sys.exit(main())
