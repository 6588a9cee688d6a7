"""The ways of copying or folding a checkpoint that `convert.py` compares, each run in a process of its own.

    python convert_runs.py WAY SOURCE TARGET

prints its seconds, those of the processor, and its peak memory above what the imports take, as JSON.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import transformers

from normswap.edits import make_edits
from normswap.folding import make_fold_plan
from normswap.loading import build_meta, resolve
from normswap.plan import make_plan
from normswap.rows import row_reader
from normswap.shards import check_source
from normswap.stored import map_stored
from normswap.streaming import write_checkpoint


def peak() -> int:
    """Return the most memory that this process has had, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def synced(folder: Path) -> None:
    """Bring every file of a folder to the disk."""
    for file in folder.iterdir():
        handle = os.open(file, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def cp(source: Path, target: Path) -> Iterator[None]:
    """Copy with the system's own command, and bring the files to the disk."""
    yield
    subprocess.run(["cp", "-r", source, target], check=True)
    synced(target)


def copying(source: Path, target: Path) -> Iterator[None]:
    """Copy, hash and look for NaN."""
    target.mkdir()
    yield
    write_checkpoint(check_source(source), target)
    synced(target)


def folding(source: Path, target: Path) -> Iterator[None]:
    """Do all of this and fold every gain."""
    target.mkdir()
    checkpoint = check_source(source)
    model = build_meta(resolve(str(source)))
    plan = make_fold_plan(model, make_plan(model))
    edits = make_edits(model, plan, map_stored(model, checkpoint), row_reader(checkpoint))
    yield
    write_checkpoint(checkpoint, target, edits=edits.edits, added=edits.added)
    synced(target)


def in_memory(source: Path, target: Path) -> Iterator[None]:
    """Load the model, fold its gains and save it."""
    yield
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype="auto")
    with torch.no_grad():
        for layer in model.model.layers:
            attention, mlp = layer.self_attn, layer.mlp
            _fold(layer.input_layernorm, [attention.q_proj, attention.k_proj, attention.v_proj])
            _fold(layer.post_attention_layernorm, [mlp.gate_proj, mlp.up_proj])
        _fold(model.model.norm, [model.lm_head])
    model.save_pretrained(target)
    synced(target)


def _fold(norm: torch.nn.Module, linears: list[torch.nn.Linear]) -> None:
    gain = norm.weight.double()
    for linear in linears:
        linear.weight.copy_(linear.weight.double() * gain)
    norm.weight.fill_(1)


# Each plans up to its yield, and then writes.
WAYS: dict[str, Callable[[Path, Path], Iterator[None]]] = {
    "cp": cp,
    "copying": copying,
    "folding": folding,
    "in memory": in_memory,
}


def cpu() -> float:
    """Return the processor's seconds of this process and of those it waited for."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Run one way."""
    way, source, target = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    before, begin = peak(), time.perf_counter()
    steps = WAYS[way](source, target)
    next(steps)
    planned, worked = time.perf_counter(), cpu()
    next(steps, None)
    seconds = time.perf_counter() - planned
    figures = {"planning": planned - begin, "seconds": seconds, "cpu": cpu() - worked, "peak": peak() - before}
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
