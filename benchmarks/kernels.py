"""How fast is every operation, beside the device's own copy and beside its peers?

Each case is measured in one run: ours, a copy that moves as many bytes as the operation has to, and every peer that is
installed take turns; figures are medians. Each contender is held to the oracle before it is timed. On a GPU the L2 is
emptied before each sample, and events give the device's time.

    python benchmarks/kernels.py [--device cpu|cuda] [--operation NAME ...] [--direction forward|backward]
        [--dtype bfloat16 ...] [--shape ROWSxWIDTH ...] [--peer NAME ...] [--budget SECONDS] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Else this file is taken for the package kernels by whoever imports that.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels" / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

from bench_arguments import count, shape
from bench_cases import HEAD, OPERATIONS, Case, Inputs, draw, ours
from bench_check import Oracle
from bench_peers import PEERS, Contender, NoPeer
from bench_report import Peer, Result, bars, machine, plot, table
from bench_timing import Clock, copying

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
SHAPES = {
    "cuda": "4096x4096 1x4096 4096x8192 8x4096 64x4096 4096x16384 4096x1024 1048576x128",
    "cpu": "2048x4096 1x4096 512x576 65536x128",
}
# The first operations come first, for a run that ends with its budget.
CORE = 3


def select(options: argparse.Namespace) -> list[Case]:
    """List the cases that are asked for, those that matter most first."""
    found = []
    for d, dtype in enumerate(options.dtype):
        for o, operation in enumerate(op for op in OPERATIONS if op.name in options.operation):
            for s, (rows, width) in enumerate(options.shape):
                for direction in operation.directions:
                    if direction in options.direction and not (operation.per_head and width % HEAD):
                        case = Case(operation, direction, DTYPES[dtype], rows, width)
                        rank = (d > 0) + (OPERATIONS.index(operation) >= CORE), s, d, o
                        found.append((rank, case))
    return [case for _, case in sorted(found, key=lambda entry: entry[0])]


def prepare(contender: Callable[[Inputs], Any], case: Case, inputs: Inputs, gradients: Sequence[Tensor]) -> Any:
    """Return a call without arguments that gives what is timed, as a tuple of tensors."""
    if case.direction == "forward":
        return lambda: _tuple(contender(inputs))
    results = [y for y in _tuple(contender(inputs)) if y.requires_grad]
    return partial(torch.autograd.grad, results, inputs.differentiable(), list(gradients), retain_graph=True)


def _tuple(results: Any) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def measure(case: Case, peers: list[str], clock: Clock, device: torch.device) -> Result:
    """Check and time ours and every peer on one case.

    Raises:
        Exception: whatever ours raises; an error of a peer is recorded.
    """
    inputs, gradients = draw(case, device)
    oracle = Oracle(case, inputs, gradients)
    recorded: dict[str, Peer] = {}
    with torch.set_grad_enabled(case.direction == "backward"):
        calls = [prepare(ours(case), case, inputs, gradients), copying(case.least_bytes, device)]
        verdict = oracle.judge(calls[0]())
        timed = []
        for name in peers:
            try:
                call = prepare(_contender(name, case, inputs), case, inputs, gradients)
                recorded[name] = Peer(verdict=oracle.judge(call()))
            except NoPeer as reason:
                recorded[name] = Peer(reason=str(reason))
            except Exception as error:
                recorded[name] = Peer(
                    reason=f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                )
            else:
                calls.append(call)
                timed.append(recorded[name])
        ours_s, copy_s, *theirs = clock.measure(calls)
    for peer, seconds in zip(timed, theirs, strict=True):
        peer.us, peer.ratio = seconds * 1e6, seconds / ours_s
    dtype = str(case.dtype).removeprefix("torch.")
    speed = case.least_bytes / ours_s / 1e9
    where = case.operation.name, case.direction, dtype, case.rows, case.width, case.least_bytes
    return Result(*where, ours_s * 1e6, speed, copy_s * 1e6, copy_s / ours_s, verdict, recorded)


def _contender(name: str, case: Case, inputs: Inputs) -> Contender:
    return PEERS[name](case, inputs)


def run(options: argparse.Namespace, device: torch.device) -> tuple[list[Result], dict[str, str]]:
    """Measure the cases until they or the budget end; returns the results, and why the others have none."""
    clock = Clock(device, options.samples, options.seconds)
    results: list[Result] = []
    missing: dict[str, str] = {}
    begin = time.perf_counter()
    for case in select(options):
        if time.perf_counter() - begin > options.budget:
            missing[str(case)] = "the budget was spent"
            continue
        try:
            results.append(measure(case, options.peer, clock, device))
        except Exception as error:
            missing[str(case)] = f"{type(error).__name__}: {error}"
        else:
            print(table(results[-1:])[1], file=sys.stderr, flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return results, missing


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line and fill in what the device calls for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [op.name for op in OPERATIONS]
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--operation", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--direction", nargs="+", choices=("forward", "backward"), default=["forward", "backward"])
    parser.add_argument("--dtype", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--shape", nargs="+", type=shape, metavar="ROWSxWIDTH")
    parser.add_argument("--peer", nargs="*", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--budget", type=float, default=600.0, help="seconds after which no further case is begun")
    parser.add_argument("--samples", type=count, default=31, help="most samples of each contender")
    parser.add_argument("--seconds", type=float, default=2.0, help="most seconds of sampling for a case")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    options = parser.parse_args(arguments)
    options.shape = options.shape or [shape(text) for text in SHAPES[options.device].split()]
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no GPU here; --device cpu measures the cpu backend")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns 1 where ours failed or was wrong, 2 where nothing was measured."""
    options = parse(arguments)
    device = torch.device(options.device)
    warnings.filterwarnings("ignore", module="torch._inductor")
    where = machine(device)
    print(", ".join(f"{key} {value}" for key, value in where.items() if value is not None))
    results, missing = run(options, device)
    failed = {case: reason for case, reason in missing.items() if reason != "the budget was spent"}
    for case, reason in failed.items():
        print(f"FAILED {case}: {reason}")
    if not results:
        print("nothing was measured, so nothing is written")
        return 2
    said = bars(results, device)
    for demand, verdict in said:
        print(f"{demand}: {verdict}")
    print("\n".join(table(results)))
    if len(missing) > len(failed):
        print(f"not measured, since the budget was spent: {len(missing) - len(failed)} cases")
    if options.json:
        data = {
            "machine": where,
            "bar": [{"demand": demand, "verdict": verdict} for demand, verdict in said],
            "results": [asdict(result) for result in results],
            "not_measured": missing,
        }
        options.json.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
    if options.plot:
        reason = plot(results, str(where.get("gpu") or where["cpu"]), options.plot)
        if reason:
            print(reason)
    return int(bool(failed) or any(result.verdict == "wrong" for result in results))


if __name__ == "__main__":
    sys.exit(main())
