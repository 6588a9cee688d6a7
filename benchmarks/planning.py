"""How long does it take to decide what would be done with every norm of a model that is too big to be here?

Models of the real sizes are built on the meta device, and planned some times: the first takes in what a process does
once. The seconds are the process's own, so that a busy machine counts little, with those of the clock beside them.

    python benchmarks/planning.py [--samples N] [--json FILE]
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
import transformers
from bench_arguments import count
from torch import nn

from normswap.plan import make_plan

BOUND = 1.5


def llama_70b() -> nn.Module:
    """Llama 3 70B: 80 layers, 161 norms, 8,192 wide."""
    config = transformers.LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    return transformers.LlamaForCausalLM(config)


def qwen3_moe_235b() -> nn.Module:
    """Qwen 3 235B-A22B: 94 layers with 128 experts and norms of the heads, 377 norms, 4,096 and 128 wide."""
    config = transformers.Qwen3MoeConfig(
        hidden_size=4096,
        intermediate_size=12288,
        moe_intermediate_size=1536,
        num_hidden_layers=94,
        num_attention_heads=64,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=128,
        num_experts_per_tok=8,
        vocab_size=151936,
    )
    return transformers.Qwen3MoeForCausalLM(config)


MODELS: dict[str, Callable[[], nn.Module]] = {"Llama 70B": llama_70b, "Qwen3-MoE 235B": qwen3_moe_235b}


def measure(build: Callable[[], nn.Module], samples: int) -> dict[str, Any]:
    """Build a model on the meta device and plan it."""
    with torch.device("meta"):
        model = build()
    own, clock, norms = [], [], 0
    for _ in range(samples):
        begin, process = time.perf_counter(), time.process_time()
        norms = len(make_plan(model).swaps)
        own.append(time.process_time() - process)
        clock.append(time.perf_counter() - begin)
    return {"norms": norms, "first_s": own[0], "median_s": statistics.median(own), "clock_s": statistics.median(clock)}


def main() -> int:
    """Run the command line; returns 1 where the first plan of the 80-layer model passes the bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=count, default=5)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = {name: measure(build, options.samples) for name, build in MODELS.items()}
    print(f"{'model, on meta tensors':26}{'norms':>7}{'first, s':>10}{'median, s':>11}{'by the clock':>14}")
    for name, r in results.items():
        print(f"{name:26}{r['norms']:7}{r['first_s']:10.2f}{r['median_s']:11.2f}{r['clock_s']:14.2f}")
    print(f"at most {BOUND} s is wanted for the 80 layers of Llama 70B: {results['Llama 70B']['first_s']:.2f} s")
    if options.json:
        Path(options.json).write_text(json.dumps({"bound": BOUND, "results": results}, indent=2) + "\n")
    return int(results["Llama 70B"]["first_s"] > BOUND)


if __name__ == "__main__":
    sys.exit(main())
