"""The benchmark of the verification runs and tells what it says it tells; its figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "verify.py"


def test_the_benchmark_measures_a_verification_beside_a_forward(tmp_path: Path) -> None:
    model = FAMILIES["llama"].save(tmp_path / "model", torch.bfloat16)
    file = tmp_path / "verify.json"
    command = [sys.executable, SCRIPT, "--model", model, "--tokens", "256", "--rounds", "2", "--json", file]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    # A tiny model's verification is many times its forward.
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(file.read_text())
    assert data["verdict"] == "pass"
    assert data["tokens"] == 256
    assert data["of_forward"] == data["seconds"] / data["forward"] > 1
    assert len(data["seconds_in_each_round"]) == len(data["forward_in_each_round"]) == 2
    assert min(data["seconds_in_each_round"]) == data["seconds"]
    assert 0 < sum(data["steps"].values()) <= data["seconds"]
    assert data["peak"] > 0
    assert data["faults"] > 0
    assert "at most 6 times a forward is wanted" in done.stdout
