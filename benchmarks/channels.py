"""Does it pay to swap norms over the channels of images on this CPU?

Each module of transformers runs beside its swapped self, in turns, in one thread; so does an RMSNorm over channels as
it is written for images. The ratio is the original's time to ours.

    python benchmarks/channels.py [--samples N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Else kernels.py, which lies beside this file, is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import torch
from bench_arguments import count
from torch import nn
from transformers.models.convnext.modeling_convnext import ConvNextLayerNorm
from transformers.models.vitdet.modeling_vitdet import VitDetLayerNorm

import normswap
from normswap import modules


class ImageRMSNorm(nn.Module):
    """RMSNorm over dimension 1, its statistics in the input's dtype."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``(N, C, H, W)``."""
        x = x * torch.rsqrt(x.pow(2).mean(1, keepdim=True) + 1e-6)
        return x * self.weight.reshape(1, -1, 1, 1)


NORMS: dict[str, Callable[[int], nn.Module]] = {
    "ConvNextLayerNorm": lambda c: ConvNextLayerNorm(c, data_format="channels_first"),
    "VitDetLayerNorm": VitDetLayerNorm,
    "RMSNorm over channels": ImageRMSNorm,
}
SHAPES = ((4, 96, 56, 56), (4, 384, 14, 14), (4, 768, 7, 7))


@torch.no_grad()
def measure(norm: nn.Module, shape: tuple[int, ...], dtype: torch.dtype, samples: int) -> dict[str, Any]:
    """Swap a norm and time both on one image batch."""
    norm, x = norm.to(dtype), torch.randn(shape).to(dtype)
    normswap.patch(nn.Sequential(norm))
    found: list[list[float]] = [[], []]
    for _ in range(samples + 1):
        for call, times in zip((lambda: modules.original_forward(norm, x), lambda: norm(x)), found, strict=True):
            begin = time.thread_time()
            call()
            times.append(time.thread_time() - begin)
    # The first call of each is left out.
    original, ours = (statistics.median(times[1:]) for times in found)
    own = str(dtype).removeprefix("torch.") in modules.execution_of(norm).spec.own_code
    return {"original_ms": original * 1e3, "ours_ms": ours * 1e3, "ratio": original / ours, "own_code": own}


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=count, default=31)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    print(f"{'norm':24}{'dtype':10}{'shape':>18}{'original ms':>13}{'ours ms':>9}{'ratio':>7}")
    for name, build in NORMS.items():
        for dtype in (torch.float32, torch.bfloat16):
            for shape in SHAPES:
                r = measure(build(shape[1]), shape, dtype, options.samples)
                size, short = "x".join(map(str, shape)), str(dtype).removeprefix("torch.")
                note = "  its own code" if r["own_code"] else ""
                print(
                    f"{name:24}{short:10}{size:>18}{r['original_ms']:13.2f}{r['ours_ms']:9.2f}{r['ratio']:7.2f}{note}"
                )
                results.append({"norm": name, "dtype": short, "shape": list(shape), **r})
    if options.json:
        Path(options.json).write_text(json.dumps(results, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
