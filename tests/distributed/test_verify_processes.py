"""``normswap verify`` under torchrun: two processes hold a share of each model, and one speaks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_distributed import RANKS, why_not
from tiny_checkpoints import saved, tiny_bert, tiny_llama

import normswap

pytestmark = pytest.mark.core


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if reason := why_not():
        pytest.skip(reason)
    model = tiny_llama(num_key_value_heads=2).to(torch.bfloat16)
    return saved(model, tmp_path_factory.mktemp("original"))


@pytest.fixture(scope="module")
def folded(original: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted") / "folded"
    normswap.convert(original, folder, fold=True, verify=False)
    return folder


def verify(*arguments: object, processes: int = RANKS) -> subprocess.CompletedProcess[str]:
    """Run the command on so many processes; torchrun itself ends with 1 where any of them does not end with 0."""
    start = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m", "normswap"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", *start, "verify", *map(str, arguments), "--device", "cpu", "--tokens", "256"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)


def test_a_fold_passes_and_is_told_once(original: Path, folded: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    done = verify(folded, "--against", original, "--json", file)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("PASS") == 1
    report: dict[str, Any] = json.loads(file.read_text())
    assert report["verdict"] == "pass" and report["processes"] == RANKS
    assert len(report["norms"]) == 5 and all(norm["passed"] for norm in report["norms"])
    alone = normswap.verify(folded, original, device="cpu", tokens=256).to_dict()
    assert 0 < report["exact"]["error"] < 1e-5
    # Sums over two halves are other sums, and no more than that.
    assert report["exact"]["control"]["error"] == pytest.approx(alone["exact"]["control"]["error"], rel=0.01)


def test_a_fault_ends_every_process_with_the_code_of_a_failed_verdict(original: Path, folded: Path) -> None:
    broken = folded.parent / "broken"
    broken.mkdir()
    for file in folded.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][:, 0] *= 1.5
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    done = verify(broken, "--against", original)
    assert done.returncode == 1
    assert "model.layers.1.mlp.up_proj.weight is not what folding gives" in done.stdout
    # torchrun tells of each process how it ended: by itself, or because another had.
    assert "exitcode  : 1 " in done.stderr and "exitcode  : 2 " not in done.stderr


def test_a_class_that_cannot_be_divided_is_told(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = verify(saved(tiny_bert(), tmp_path))
    assert done.returncode == 1
    assert "tp_plan" in done.stderr and "verify it on one process" in done.stderr
    # But for torchrun's own, at the end.
    assert "normswap.errors" not in done.stderr


def test_heads_that_cannot_be_divided_are_told(tmp_path: Path) -> None:
    if reason := why_not():
        pytest.skip(reason)
    done = verify(saved(tiny_llama(num_key_value_heads=1), tmp_path))
    assert "has 1 num_key_value_heads, which cannot be divided among 2 processes" in done.stderr
