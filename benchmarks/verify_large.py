"""In how much memory is a checkpoint verified whose weights do not fit, and how much longer does it take?

A sharded bf16 Llama of random weights is made in a temporary folder and its gains are folded; then the folded
checkpoint is verified against it, in a process of its own, within a budget of a fifth of its size: 20 GB in 4 GB, in
proportion. Its layers and its vocabulary keep that proportion too. With ``--whole`` it is verified once more with every
model loaded whole. The memory is the most that the process takes above what its imports took.

    python benchmarks/verify_large.py [--gigabytes N] [--tokens N] [--budget N] [--whole] [--folder DIR] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# Else kernels.py, which lies beside this file, is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import transformers
from bench_arguments import count
from convert_checkpoint import make_checkpoint

RUNS = Path(__file__).resolve().parent / "lib" / "large_runs.py"
SHARE = 5
# Of the model that is meant: 20 GB in bf16, 40 layers of width 5120, a vocabulary of 128 thousand.
MEANT = {"gigabytes": 20.0, "hidden": 5120, "intermediate": 13824, "vocabulary": 128_000}


def config_of(gigabytes: float) -> transformers.LlamaConfig:
    """Return the config of a Llama whose layers and head take the same share of it as those of the model meant."""
    scale = gigabytes / MEANT["gigabytes"]
    hidden = max(1, round(MEANT["hidden"] * math.sqrt(scale) / 128)) * 128
    intermediate = round(MEANT["intermediate"] * hidden / MEANT["hidden"] / 64) * 64
    vocabulary = round(MEANT["vocabulary"] * scale * MEANT["hidden"] / hidden / 64) * 64
    layer = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=max(1, round((gigabytes * 5e8 - 2 * vocabulary * hidden) / layer)),
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def run(way: str, converted: Path, original: Path, budget: int, tokens: int) -> dict[str, Any]:
    """Verify once and return what was measured."""
    command = [sys.executable, "-W", "ignore", RUNS, way, converted, original, str(budget), str(tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a table."""
    print(f"{'':10}{'seconds':>9}{'CPU, s':>8}{'peak, MB':>10}{'read, GB':>10}{'exact':>10}{'ratio':>8}  verdict")
    for way, r in results.items():
        print(
            f"{way:10}{r['seconds']:9.0f}{r['cpu']:8.0f}{r['peak'] / 1e6:10.0f}{r['read'] / 1e9:10.1f}"
            f"{r['exact']:10.1e}{r['ratio']:8.4f}  {'pass' if r['passed'] else r['failures']}"
        )


def main() -> int:
    """Run the command line; returns 1 where the budget is passed, or the verdict is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=3.0, help="size of the checkpoint")
    parser.add_argument("--tokens", type=count, default=2048, help="to measure on")
    parser.add_argument("--budget", type=float, help="gigabytes; a fifth of the checkpoint by default")
    parser.add_argument("--whole", action="store_true", help="verify it loaded whole, too")
    parser.add_argument("--folder", type=Path, help="where there is room for twice the checkpoint")
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    config = config_of(options.gigabytes)
    with tempfile.TemporaryDirectory(dir=options.folder) as place:
        original, converted = Path(place) / "original", Path(place) / "folded"
        original.mkdir()
        size = make_checkpoint(original, options.gigabytes, config)
        budget = int(size / SHARE if options.budget is None else options.budget * 1e9)
        command = [sys.executable, "-W", "ignore", "-m", "normswap", "patch", original, "-o", converted]
        subprocess.run([*command, "--fold", "--no-verify"], check=True, stdout=subprocess.DEVNULL)
        ways = ("streamed", "whole") if options.whole else ("streamed",)
        results = {way: run(way, converted, original, budget, options.tokens) for way in ways}
    print(
        f"{size / 1e9:.2f} GB in bf16, {config.num_hidden_layers} layers of width {config.hidden_size}, vocabulary "
        f"{config.vocab_size}; load at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
    )
    show(results)
    streamed = results["streamed"]
    met = streamed["peak"] <= budget and streamed["passed"] and streamed["streamed"]
    print(f"at most {budget / 1e6:.0f} MB are wanted: {streamed['peak'] / 1e6:.0f} MB, {'met' if met else 'NOT met'}")
    if options.json:
        settings = {key: config.to_dict()[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
        data = {"bytes": size, "budget": budget, "tokens": options.tokens, "model": settings, "results": results}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n")
    return int(not met)


if __name__ == "__main__":
    sys.exit(main())
