"""How fast is a checkpoint converted, and in how much memory, beside ``cp`` and beside loading, folding and saving it?

A sharded bf16 checkpoint of random weights is made in a temporary folder. Each way runs in a process of its own, in
turn, some rounds over; before each the disk is left to finish, and the source is in memory, or dropped from it, for all
alike. Every way counts until its files are on the disk: ``cp`` is followed by an fsync of each file. The memory is the
most that a process takes above what its imports took. Deciding what is folded takes no longer for more weights, and is
told apart from the writing.

    python benchmarks/convert.py [--gigabytes N] [--small N] [--rounds N] [--cold] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# Else kernels.py, which lies beside this file, is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from bench_arguments import count
from convert_checkpoint import make_checkpoint

RUNS = Path(__file__).resolve().parent / "lib" / "convert_runs.py"
LEAST = {"copying": 0.9, "folding": 0.5}
LEAST_MEMORY = 1 << 30


def run(way: str, source: Path, target: Path, cold: bool) -> dict[str, Any]:
    """Run one way once and return what it measured of itself."""
    shutil.rmtree(target, ignore_errors=True)
    os.sync()
    for file in source.iterdir():
        handle = os.open(file, os.O_RDONLY)
        if cold:
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        else:
            while os.read(handle, 1 << 22):
                pass
        os.close(handle)
    command = [sys.executable, "-W", "ignore", RUNS, way, source, target]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(target)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def measure(ways: Iterable[str], place: Path, gigabytes: float, rounds: int, cold: bool) -> dict[str, dict[str, Any]]:
    """Make a checkpoint and run every way on it, in turn."""
    source = place / "source"
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir()
    size = make_checkpoint(source, gigabytes)
    shard = max(file.stat().st_size for file in source.iterdir())
    found: dict[str, list[dict[str, Any]]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, runs in found.items():
            runs.append(run(way, source, place / "target", cold))
    results = {}
    for way, runs in found.items():
        middle = {key: statistics.median(entry[key] for entry in runs) for key in runs[0]}
        ratios = [one["seconds"] / other["seconds"] for one, other in zip(found["cp"], runs, strict=True)]
        results[way] = {
            **middle,
            "gigabytes": size / 1e9,
            "gigabytes_per_second": size / 1e9 / middle["seconds"],
            "of_cp": statistics.median(ratios),
            "of_cp_in_each_round": ratios,
            "largest_shard": shard,
        }
    return results


def show(title: str, results: dict[str, dict[str, Any]]) -> None:
    """Print a table."""
    print(f"{title:22}{'planning, s':>12}{'seconds':>9}{'GB/s':>7}{'of cp':>7}{'CPU, s':>8}{'peak, MB':>10}")
    for way, r in results.items():
        print(
            f"{way:22}{r['planning']:12.1f}{r['seconds']:9.2f}{r['gigabytes_per_second']:7.2f}{r['of_cp']:7.2f}"
            f"{r['cpu']:8.1f}{r['peak'] / 1e6:10.0f}"
        )


def judge(results: dict[str, dict[str, Any]]) -> bool:
    """Say of each bar whether it is met."""
    met = True
    for way, least in LEAST.items():
        r = results[way]
        bound = max(1.5 * r["largest_shard"], LEAST_MEMORY)
        fast, small = r["of_cp"] >= least, r["peak"] <= bound
        print(f"{way}: at least {least} of cp's speed is wanted: {r['of_cp']:.2f}, {'met' if fast else 'NOT met'}")
        print(f"{way}: at most {bound / 1e6:.0f} MB: {r['peak'] / 1e6:.0f} MB, {'met' if small else 'NOT met'}")
        met = met and fast and small
    return met


def main() -> int:
    """Run the command line; returns 1 where a bar is not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=6.0, help="size of the checkpoint")
    parser.add_argument("--small", type=float, default=1.0, help="size of the one that is also folded in memory")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--cold", action="store_true", help="drop the source from memory before each run")
    parser.add_argument("--folder", type=Path, help="where there is room for twice the checkpoint")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        large = measure(("cp", "copying", "folding"), Path(place), options.gigabytes, options.rounds, options.cold)
        small = measure(("cp", "folding", "in memory"), Path(place), options.small, options.rounds, options.cold)
    load = os.getloadavg()[0]
    show(f"{large['cp']['gigabytes']:.1f} GB in shards", large)
    show(f"{small['cp']['gigabytes']:.1f} GB in shards", small)
    state = "dropped from memory" if options.cold else "in memory"
    print(f"the source was {state}; load at the end {load:.1f} on {os.cpu_count()} cores")
    met = judge(large)
    if options.json:
        data = {"cold": options.cold, "load": load, "least_of_cp": LEAST, "large": large, "small": small}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
