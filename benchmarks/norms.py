"""How fast are the norms beside those that they replace?

Each case is measured in one run, the contenders taking turns, so that whatever else the machine does falls on all of
them; figures are medians and the ratio of medians.

    python benchmarks/norms.py [--device cpu|cuda] [--shape ROWSxWIDTH ...] [--repeats N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
import types
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "kernels" / "torch-ext"))

from normswap_kernels import check_backend, layer_norm, layers, rms_norm

EPS = 1e-6

# A sample lasts at least this long, so that the clock does not count; and at most so, so that few are interrupted.
SAMPLE_SECONDS = 0.0002


@dataclass(frozen=True)
class Result:
    """One case: median seconds a call of both contenders, and how many times faster ours is."""

    case: str
    original: str
    dtype: str
    rows: int
    width: int
    original_us: float
    ours_us: float
    speedup: float
    gigabytes_per_second: float


def cases(dtype: torch.dtype, width: int, device: str) -> Iterator[tuple[str, str, Callable, Callable]]:
    """Yield name, name of the original, original, and ours; all take ``x`` ``(rows, width)``."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def llama() -> nn.Module:
        norm = LlamaRMSNorm(width, eps=EPS)
        nn.init.normal_(norm.weight)
        return norm.to(device, dtype).requires_grad_(False)

    def swap(norm: nn.Module, forward: Callable) -> nn.Module:
        norm.forward = types.MethodType(forward, norm)
        return norm

    original, ours = llama(), llama()
    yield "rms before_gain", "LlamaRMSNorm", original, swap(ours, layers.RMSNorm.forward)

    def after_gain(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.variance_epsilon)

    yield "rms after_gain", "LlamaRMSNorm", original, swap(llama(), after_gain)

    def gemma() -> nn.Module:
        norm = Gemma3RMSNorm(width, eps=EPS)
        nn.init.normal_(norm.weight)
        return norm.to(device, dtype).requires_grad_(False)

    def one_plus_weight(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0)

    yield "rms 1+w", "Gemma3RMSNorm", gemma(), swap(gemma(), one_plus_weight)

    def layer() -> nn.Module:
        return nn.LayerNorm(width, eps=EPS, device=device, dtype=dtype).requires_grad_(False)

    def swapped_layer(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer_norm(x, self.weight, self.bias, eps=self.eps)

    yield "layer", "nn.LayerNorm", layer(), swap(layer(), swapped_layer)


def measure(contenders: list[Callable], x: torch.Tensor, repeats: int) -> list[float]:
    """Return the median seconds of one call of each contender, measured in turns."""
    calls = []
    for contender in contenders:
        seconds = min(_sample(contender, x, 1) for _ in range(5))
        calls.append(max(1, int(SAMPLE_SECONDS / max(seconds, 1e-7))))
    samples: list[list[float]] = [[] for _ in contenders]
    # Short calls are disturbed the most and cost the least.
    for _ in range(repeats if min(calls) == 1 else 20 * repeats):
        for contender, count, found in zip(contenders, calls, samples, strict=True):
            found.append(_sample(contender, x, count) / count)
    return [statistics.median(found) for found in samples]


def _sample(contender: Callable, x: torch.Tensor, count: int) -> float:
    if x.is_cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(count):
            contender(x)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3
    begin = time.perf_counter()
    for _ in range(count):
        contender(x)
    return time.perf_counter() - begin


def run(device: str, shapes: list[tuple[int, int]], repeats: int) -> list[Result]:
    """Measure every case for every shape in bf16 and float32."""
    results = []
    for dtype in (torch.bfloat16, torch.float32):
        for rows, width in shapes:
            x = torch.randn(rows, width, device=device).to(dtype)
            for case, name, original, ours in cases(dtype, width, device):
                theirs_s, ours_s = measure([original, ours], x, repeats)
                traffic = 2 * x.numel() * x.element_size() / ours_s / 1e9
                label = str(dtype).removeprefix("torch.")
                results.append(
                    Result(case, name, label, rows, width, theirs_s * 1e6, ours_s * 1e6, theirs_s / ours_s, traffic)
                )
    return results


def machine(device: str) -> dict[str, object]:
    """Say what the figures were measured on."""
    import transformers

    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "backend": check_backend("auto", device),
    }


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--shape", action="append", metavar="ROWSxWIDTH", help="default: 2048x4096 and 1x4096")
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    shapes = [
        (int(rows), int(width)) for rows, width in (s.split("x") for s in options.shape or ["2048x4096", "1x4096"])
    ]
    with torch.inference_mode():
        results = run(options.device, shapes, options.repeats)
    where = machine(options.device)
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    print(
        f"{'case':17}{'original':14}{'dtype':10}{'rows':>6}{'width':>7}"
        f"{'original us':>13}{'ours us':>11}{'speedup':>9}{'GB/s':>8}"
    )
    for r in results:
        print(
            f"{r.case:17}{r.original:14}{r.dtype:10}{r.rows:6}{r.width:7}"
            f"{r.original_us:13.1f}{r.ours_us:11.1f}{r.speedup:9.2f}{r.gigabytes_per_second:8.1f}"
        )
    if options.json:
        data = {"machine": where, "results": [asdict(result) for result in results]}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n")


if __name__ == "__main__":
    main()
