"""How long does a verification take beside one forward of the model, and in how much memory?

A copy of a bfloat16 checkpoint is verified against it: the reference, both models
in float32, both as served, the faults put in on purpose, and the tensors of both. Beside it, in the same process and in
turn, one bfloat16 forward of the same tokens. Of each the least of some rounds counts, by the clock; the seconds of the
processor stand beside, which a busy machine counts little. The memory is the most that the process has had above what
its imports took, in the first verification. The steps are those of the fastest one.

    python benchmarks/verify.py [--model FOLDER] [--tokens N] [--rounds N] [--threads N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any, NamedTuple

# Else kernels.py, which lies beside this file, is taken for the package of that name.
sys.path.remove(str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parent / "lib"))

import torch
from bench_arguments import count
from bench_report import machine
from transformers import AutoModelForCausalLM, PreTrainedModel

import normswap
from normswap import ParityReport

MODEL = Path(__file__).resolve().parent.parent / ".cache" / "checkpoints" / "smollm2-135m-instruct"
BAR = 6.0


class Steps:
    """Seconds of each step of a verification, by what it says of its progress."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._name = "opening"
        self._since = time.perf_counter()

    def __call__(self, name: str, done: int, total: int) -> None:
        """Close the step before, and begin one."""
        now = time.perf_counter()
        self.seconds[self._name] = self.seconds.get(self._name, 0.0) + now - self._since
        self._name, self._since = name, now


class Seconds(NamedTuple):
    """What something took, by the clock and of the processor."""

    clock: float
    cpu: float


def since(begin: Seconds) -> Seconds:
    """Return what has passed."""
    return Seconds(time.perf_counter() - begin.clock, time.process_time() - begin.cpu)


def now() -> Seconds:
    """Begin to count."""
    return Seconds(time.perf_counter(), time.process_time())


def verify(checkpoint: Path, against: Path, tokens: int) -> tuple[Seconds, dict[str, float], ParityReport]:
    """Verify once; returns the seconds, those of each step by the clock, and the report."""
    begin, steps = now(), Steps()
    report = normswap.verify(checkpoint, against=against, dtype="bfloat16", tokens=tokens, progress=steps)
    steps("", 0, 0)
    return since(begin), steps.seconds, report


@torch.no_grad()
def forward(model: PreTrainedModel, sequences: int, length: int) -> Seconds:
    """Run one forward of seeded tokens ``(sequences, length)``; returns the seconds."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(10, model.config.vocab_size, (sequences, length), generator=generator)
    begin = now()
    model(input_ids=ids, use_cache=False)
    return since(begin)


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def measure(source: Path, copy: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Verify a copy of a checkpoint and run its forward, in turn."""
    before = peak()
    runs = [verify(copy, source, tokens)]
    memory = peak() - before
    report = runs[0][2]
    shape = int(report.inputs["sequences"]), int(report.inputs["length"])
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval()
    forward(model, *shape)
    forwards, whole = [], []
    for number in range(rounds):
        forwards.append(forward(model, *shape))
        whole.append(forward(model, 1, shape[0] * shape[1]))
        if number:
            runs.append(verify(copy, source, tokens))
    seconds, steps, _ = min(runs, key=lambda run: run[0].clock)
    cpu, forward_cpu = min(run[0].cpu for run in runs), min(one.cpu for one in forwards)
    least = min(one.clock for one in forwards)
    return {
        "verdict": report.verdict,
        "tokens": shape[0] * shape[1],
        "sequences": shape[0],
        "seconds": seconds.clock,
        "seconds_in_each_round": [run[0].clock for run in runs],
        "cpu": cpu,
        "forward": least,
        "forward_in_each_round": [one.clock for one in forwards],
        "forward_cpu": forward_cpu,
        "forward_of_one_row": min(one.clock for one in whole),
        "of_forward": seconds.clock / least,
        "of_forward_cpu": cpu / forward_cpu,
        "steps": steps,
        "peak": memory,
        "weights": sum(file.stat().st_size for file in source.glob("*.safetensors")),
        "faults": len(report.power.faults),
    }


def show(found: dict[str, Any]) -> None:
    """Print a table."""
    print(f"{'step':40}{'seconds':>9}{'of a forward':>14}")
    for name, seconds in found["steps"].items():
        print(f"{name:40}{seconds:9.2f}{seconds / found['forward']:14.2f}")
    print(f"{'verification':40}{found['seconds']:9.2f}{found['of_forward']:14.2f}")
    print(f"{'forward, as many sequences':40}{found['forward']:9.2f}{1:14.2f}")
    print(f"{'processor: verification':40}{found['cpu']:9.2f}{found['of_forward_cpu']:14.2f}")
    print(f"{'processor: forward':40}{found['forward_cpu']:9.2f}{1:14.2f}")
    one = found["forward_of_one_row"]
    print(f"{'forward, all tokens in one':40}{one:9.2f}{one / found['forward']:14.2f}")
    print(
        f"{found['tokens']} tokens in {found['sequences']} sequences, verdict {found['verdict']}, {found['faults']} "
        f"kinds of faults tried; peak {found['peak'] / 1e6:.0f} MB, weights {found['weights'] / 1e6:.0f} MB"
    )


def main() -> int:
    """Run the command line; returns 1 where the bar is not met or the copy does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=MODEL, help="folder of a causal model; SmolLM2-135M by default")
    parser.add_argument("--tokens", type=count, default=512)
    parser.add_argument("--rounds", type=count, default=3)
    parser.add_argument("--threads", type=count, default=os.cpu_count() or 1)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        copy = Path(shutil.copytree(options.model, Path(place) / "copy"))
        found = measure(options.model, copy, options.tokens, options.rounds)
    show(found)
    met = found["of_forward"] <= BAR
    print(f"at most {BAR:g} times a forward is wanted: {found['of_forward']:.2f}, {'met' if met else 'NOT met'}")
    print(f"load at the end {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {torch.get_num_threads()} threads")
    if options.json:
        data = {"bar": BAR, "machine": machine(torch.device("cpu")), **found}
        Path(options.json).write_text(json.dumps(data, indent=2) + "\n")
    return int(not met or found["verdict"] != "pass")


if __name__ == "__main__":
    sys.exit(main())
