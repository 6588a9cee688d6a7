"""How fast are the norms on a CPU, alone and beside a second process that does the same on the same cores?

For each way in which OpenMP's threads may wait (spinning, the default, and sleeping), for each operation: the eager
formula, ours without a compiler and ours compiled take turns in one process on two cores; in the loaded case a second
process on the same cores runs the same contender at the same time. Figures are medians, ratios are to the eager
formula in the same run. A sample is shorter than a slice of a core's time, so that a median tells little of small
inputs beside a second process.

Found on two cores of an AMD EPYC with torch 2.13, among other processes: at 2048 x 4096 ours without a compiler is 3.2
to 7.2 times as fast as the eager formula, compiled 5.7 to 21 times, alone and beside the second process under both ways
of waiting; at 1 x 4096 0.75 to 1.0 and 1.3 to 1.6 times. LayerNorm is torch's own, and takes a microsecond more a call.

    python benchmarks/cpu_load.py [--operation NAME ...] [--shape ROWSxWIDTH ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import torch

# Else this file is taken for the package kernels by whoever imports that.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels" / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import torch.nn.functional as F
from bench_arguments import Shape, count, shape
from normswap_kernels import add_rms_norm, cpu_library, layer_norm, rms_norm
from torch import Tensor

EPS = 1e-6
CONTENDERS = ("eager", "blocks", "compiled")
POLICIES = ("default", "passive")
SHAPES = (Shape(2048, 4096), Shape(1, 4096))
SAMPLES = 5
# A sample lasts at least this long, so that the clock does not count.
SAMPLE_SECONDS = 0.0005

Call = Callable[[], object]


@dataclass(frozen=True)
class Result:
    """One operation in one situation: median seconds of each contender, and ratios to the eager formula."""

    policy: str
    loaded: bool
    operation: str
    rows: int
    width: int
    eager_us: float
    blocks_us: float
    compiled_us: float | None
    blocks_ratio: float
    compiled_ratio: float | None


def llama(x: Tensor, weight: Tensor) -> Tensor:
    """Normalise as the class of Llama does in transformers."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + EPS)
    return weight * wide.to(x.dtype)


def operations(rows: int, width: int) -> dict[str, tuple[Call, Call]]:
    """Return the eager formula and ours for each operation, in bfloat16."""
    x, residual, grad = (torch.randn(rows, width).bfloat16() for _ in range(3))
    weight, bias = (torch.randn(width).bfloat16() for _ in range(2))
    leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
    options = {"eps": EPS, "round_dtype": torch.bfloat16}

    def eager_add() -> tuple[Tensor, Tensor]:
        summed = x + residual
        return llama(summed, weight), summed

    def backward(result: Tensor) -> Call:
        return lambda: torch.autograd.grad(result, leaves, grad, retain_graph=True)

    return {
        "rms_norm": (lambda: llama(x, weight), lambda: rms_norm(x, weight, **options)),
        "add_rms_norm": (eager_add, lambda: add_rms_norm(x, residual, weight, **options)),
        "rms_norm backward": (backward(llama(*leaves)), backward(rms_norm(*leaves, **options))),
        "layer_norm": (
            lambda: F.layer_norm(x, (width,), weight, bias, EPS),
            lambda: layer_norm(x, weight, bias, eps=EPS),
        ),
    }


@contextlib.contextmanager
def contending(contender: str) -> Iterator[None]:
    """Run ours with or without its compiled path."""
    if contender != "blocks":
        yield
        return
    with mock.patch.multiple(cpu_library, _library=None, _looked_for=True):
        yield


def calls(operation: str, rows: int, width: int) -> dict[str, Call]:
    """Return what each contender calls; the compiled one only where there is a compiler."""
    eager, ours = operations(rows, width)[operation]
    found = {"eager": eager, "blocks": ours}
    if cpu_library.library() is not None:
        found["compiled"] = ours
    return found


def neighbour(operation: str, rows: int, width: int) -> None:
    """Run the contender that the standard input names, until it names another; end when it ends."""
    os.set_blocking(0, False)
    contenders, waiting, current = calls(operation, rows, width), b"", ""
    print("ready", flush=True)
    while True:
        with contextlib.suppress(BlockingIOError):
            read = os.read(0, 4096)
            if not read:
                return
            waiting += read
        *lines, waiting = waiting.split(b"\n")
        current = lines[-1].decode() if lines else current
        if current:
            with contending(current):
                contenders[current]()
        else:
            time.sleep(0.01)


def sample(call: Call, count: int) -> float:
    """Return the seconds of one call, the mean of some."""
    begin = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - begin) / count


def measure(contenders: dict[str, Call], rounds: int, announce: Callable[[str], None]) -> dict[str, float]:
    """Return the median seconds of each contender, measured in turns."""
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, call in contenders.items():
            announce(name)
            with contending(name), torch.enable_grad():
                count = max(1, int(SAMPLE_SECONDS / max(min(sample(call, 1) for _ in range(3)), 1e-7)))
                samples[name] += [sample(call, count) for _ in range(SAMPLES)]
    return {name: statistics.median(found) for name, found in samples.items()}


def work(options: argparse.Namespace) -> Iterator[Result]:
    """Measure everything under this process's way of waiting."""
    for size in options.shape:
        rows, width = size
        for operation in options.operation:
            contenders = calls(operation, rows, width)
            for loaded in (False, True):
                with beside(operation, size) if loaded else contextlib.nullcontext(lambda _: None) as announce:
                    seconds = measure(contenders, options.rounds, announce)
                us = [seconds[name] * 1e6 if name in seconds else None for name in CONTENDERS]
                ratios = [us[0] / t if t and us[0] else None for t in us[1:]]
                yield Result(options.worker, loaded, operation, rows, width, *us, *ratios)  # type: ignore[arg-type]


@contextlib.contextmanager
def beside(operation: str, size: Shape) -> Iterator[Callable[[str], None]]:
    """Keep a second process at work, which is told what to run."""
    command = [sys.executable, __file__, "--neighbour", "--operation", operation, "--shape", str(size)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdout.readline()

        def announce(name: str) -> None:
            process.stdin.write(f"{name}\n")
            process.stdin.flush()

        yield announce
        process.stdin.close()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = list(operations(1, 1))
    parser.add_argument("--operation", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--shape", nargs="+", type=shape, default=[*SHAPES], metavar="ROWSxWIDTH")
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--neighbour", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[:2]
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    if options.neighbour:
        neighbour(options.operation[0], *options.shape[0])
        return
    if options.worker:
        for result in work(options):
            print(json.dumps(asdict(result)), flush=True)
        return

    print(f"torch {torch.__version__}, {len(cores)} cores, load average {os.getloadavg()[0]:.1f} at the start")
    print(
        f"{'waiting':9}{'beside':8}{'operation':19}{'shape':11}"
        f"{'eager us':>11}{'blocks us':>11}{'compiled us':>13}{'blocks':>9}{'compiled':>10}"
    )
    results = []
    for policy in POLICIES:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
        if policy != "default":
            environment["OMP_WAIT_POLICY"] = policy
        command = [sys.executable, __file__, "--worker", policy, "--rounds", str(options.rounds)]
        command += ["--operation", *options.operation, "--shape", *map(str, options.shape)]
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as worker:
            assert worker.stdout is not None
            for line in worker.stdout:
                r = Result(**json.loads(line))
                results.append(r)
                compiled = f"{r.compiled_us:13.1f}" if r.compiled_us else f"{'-':>13}"
                ratio = f"{r.compiled_ratio:9.2f}x" if r.compiled_ratio else f"{'-':>10}"
                print(
                    f"{r.policy:9}{'itself' if r.loaded else '-':8}{r.operation:19}{f'{r.rows}x{r.width}':11}"
                    f"{r.eager_us:11.1f}{r.blocks_us:11.1f}{compiled}{r.blocks_ratio:8.2f}x{ratio}"
                )
        if worker.returncode:
            raise SystemExit(worker.returncode)
    if options.json:
        data = {"torch": torch.__version__, "cores": len(cores), "results": [asdict(r) for r in results]}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
