"""How much Python stands between a call and the launch of its kernel?

Each operation is timed beside a bare Triton launch of the very same kernel with the very same arguments, in turns and
for a single row, so that nothing but the way to the launch counts. A bare launch writes to memory that somebody has
allocated, so the ratio is taken to the launch with its allocations; the ratio to the launch alone is given too.

On a GPU the kernels run. Without one they are compiled for sm_90 and a driver that does nothing takes the place of
Triton's: all of Triton's Python runs, no kernel does. A launch costs nothing there, so that ratios come out too large.

    python benchmarks/launch.py [--samples N] [--profile] [--json FILE]
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import json
import platform
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

# Else kernels.py, which lies beside this file, is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "kernels" / "torch-ext"))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import normswap_kernels
from bench_arguments import count
from normswap_kernels import backends, norm_forward, norm_quant
from normswap_kernels.launch import Device, Launch
from normswap_kernels.launching import launch_here

Call = Callable[[], Any]

BOUND = 1.5
CALLS = 50
ARCHITECTURE = 90


@dataclass(frozen=True)
class Result:
    """Median microseconds of one call, and ratios.

    Attributes:
        operation: what was called, and on what.
        bare_us: a bare launch of its kernel.
        allocated_us: the same, with the allocation of what it writes.
        ours_us: the operation.
        ratio: ours to the launch with allocation; `BOUND` holds for it.
        ratio_to_bare: ours to the launch alone.
    """

    operation: str
    bare_us: float
    allocated_us: float
    ours_us: float
    ratio: float
    ratio_to_bare: float


class StubDriver:
    """A Triton driver for a GPU that is not there: compiles for it, loads nothing and launches nothing."""

    def __init__(self) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", ARCHITECTURE, 32)
        self.utils = SimpleNamespace(
            load_binary=lambda *_: (object(), 0, 32, 0, 1024),
            unload_module=lambda _: None,
            get_device_properties=lambda _: {"max_shared_mem": 232448},
        )

    def get_current_target(self) -> Any:
        """Return what kernels are compiled for."""
        return self._target

    def get_current_device(self) -> int:
        """Return the index of the device."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the stream that would be launched on."""
        return 0

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        """Return what a launch calls at last."""
        return lambda *_: None


@contextmanager
def launching() -> Iterator[torch.device]:
    """Make the Triton backend run here, on a GPU or on the stub, and yield the device to put tensors on."""
    if torch.cuda.is_available():
        yield torch.device("cuda", torch.cuda.current_device())
        return
    from triton.runtime import driver

    there = Device(warp_size=32, native_fp8=True, processors=132, interpreted=False)
    replaced: list[tuple[Any, str, Any]] = [(backends, "_resolve", lambda backend, kind: "triton")]
    for module in (norm_forward, norm_quant):
        replaced += [(module, "device_of", functools.cache(lambda device: there)), (module, "run", _run_on_cpu)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in replaced]
    driver.set_active(StubDriver())  # type: ignore[arg-type]
    for owner, name, value in replaced:
        setattr(owner, name, value)
    try:
        yield torch.device("cpu")
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)
        driver._active = None


def _run_on_cpu(launch: Launch, x: torch.Tensor, interpret: bool) -> None:
    """Do what `normswap_kernels.launching.run` does for a tensor of the current GPU, for one of the CPU."""
    if x.is_cpu and _current_device() == x.get_device() + 1:
        launch_here(launch, 0)


def _current_device() -> int:
    return 0


def operations(device: torch.device) -> dict[str, Call]:
    """Give the calls that are measured, by name; one row of 4096 elements, bf16."""

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(torch.bfloat16)

    x, residual, gate = draw(1, 4096), draw(1, 4096), draw(1, 4096)
    weight, bias = draw(4096), draw(4096)
    heads, wide = draw(1, 32, 128), draw(2, 8192)
    sliced = wide[:, :4096]
    options: dict[str, Any] = {"eps": 1e-6, "backend": "triton"}
    k = normswap_kernels
    return {
        "rms_norm": lambda: k.rms_norm(x, weight, **options),
        "rms_norm, rounded twice": lambda: k.rms_norm(x, weight, round_dtype=torch.bfloat16, **options),
        "rms_norm of heads": lambda: k.rms_norm(heads, weight[:128], **options),
        "rms_norm of a slice": lambda: k.rms_norm(sliced, weight, **options),
        "layer_norm": lambda: k.layer_norm(x, weight, bias, **options),
        "add_rms_norm": lambda: k.add_rms_norm(x, residual, weight, **options),
        "add_layer_norm": lambda: k.add_layer_norm(x, residual, weight, bias, **options),
        "gated_rms_norm": lambda: k.gated_rms_norm(x, gate, weight, **options),
        "rms_norm_quant to int8": lambda: k.rms_norm_quant(x, weight, **options),
    }


def capture(call: Call) -> Call:
    """Run an operation for the first time and return the launch that Triton was asked for."""
    from triton.runtime.jit import JITFunction

    found: list[Call] = []
    before = JITFunction.run

    def keep(kernel: Any, *arguments: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        found.append(lambda: kernel[grid](*arguments, **options))
        return before(kernel, *arguments, grid=grid, warmup=warmup, **options)

    JITFunction.run = keep  # type: ignore[method-assign]
    try:
        call()
    finally:
        JITFunction.run = before  # type: ignore[method-assign]
    (launch,) = found
    return launch


def contenders(call: Call) -> list[Call]:
    """Return the bare launch, the launch with its allocations, and the call itself."""
    bare = capture(call)
    results = call()
    shapes = [(tuple(t.shape), t.dtype, t.device) for t in (results if isinstance(results, tuple) else (results,))]

    def allocated() -> None:
        for shape, dtype, device in shapes:
            torch.empty(shape, dtype=dtype, device=device)
        bare()

    return [bare, allocated, call]


def measure(calls: list[Call], samples: int) -> list[float]:
    """Return the median seconds of each call; they take turns, and no queue of a GPU fills up."""
    found: list[list[float]] = [[] for _ in calls]
    gc.collect()
    gc.disable()
    try:
        for _ in range(samples + 1):
            for call, seconds in zip(calls, found, strict=True):
                # The thread's own time: on a busy machine a long sample is interrupted more often than a short one.
                begin = time.thread_time()
                for _ in range(CALLS):
                    call()
                seconds.append((time.thread_time() - begin) / CALLS)
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
    finally:
        gc.enable()
    # The first sample compiles.
    return [statistics.median(seconds[1:]) for seconds in found]


def count_calls(call: Call) -> int:
    """Return how many Python functions one call runs, itself included, once it has run before."""
    entered: list[str] = []
    call(), call()
    sys.setprofile(lambda frame, event, _: entered.append(event))
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered.count("call")


def run(samples: int) -> list[Result]:
    """Measure every operation."""
    results = []
    with torch.no_grad(), launching() as device:
        for name, call in operations(device).items():
            bare, allocated, ours = measure(contenders(call), samples)
            results.append(Result(name, bare * 1e6, allocated * 1e6, ours * 1e6, ours / allocated, ours / bare))
    return results


def profile() -> None:
    """Print where the time of the first operation goes."""
    with torch.no_grad(), launching() as device:
        call = operations(device)["rms_norm"]
        call()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(20_000):
            call()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def main() -> int:
    """Run the command line; returns 1 where an operation passes the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=count, default=101)
    parser.add_argument("--profile", action="store_true", help="print where the time of rms_norm goes")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    if options.profile:
        profile()
        return 0
    results = run(options.samples)
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else f"no GPU, stub for sm_{ARCHITECTURE}"
    print(f"{where}, {platform.machine()}, python {platform.python_version()}, torch {torch.__version__}")
    print(f"{'operation':26}{'bare us':>9}{'+ alloc us':>12}{'ours us':>9}{'ratio':>7}{'to bare':>9}")
    for r in results:
        print(
            f"{r.operation:26}{r.bare_us:9.1f}{r.allocated_us:12.1f}{r.ours_us:9.1f}{r.ratio:7.2f}{r.ratio_to_bare:9.2f}"
        )
    worst = max(results, key=lambda r: r.ratio)
    print(f"at most {BOUND} is wanted: {worst.ratio:.2f} at worst ({worst.operation})")
    if options.json:
        data = {"where": where, "bound": BOUND, "results": [asdict(result) for result in results]}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n")
    return int(worst.ratio > BOUND)


if __name__ == "__main__":
    sys.exit(main())
