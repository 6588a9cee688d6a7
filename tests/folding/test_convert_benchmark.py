"""The benchmark of the conversion runs and tells what it says it tells; its figures are not judged here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

SCRIPT = Path(__file__).resolve().parent.parent.parent / "benchmarks" / "convert.py"


@pytest.mark.parametrize("cold", [False, True])
def test_the_benchmark_measures_every_way(tmp_path: Path, cold: bool) -> None:
    file = tmp_path / "convert.json"
    command = [sys.executable, SCRIPT, "--gigabytes", "0.03", "--small", "0.03", "--rounds", "1", "--json", file]
    command += ["--folder", tmp_path, *(["--cold"] if cold else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    # A machine that is busy with other tests meets no bar.
    assert done.returncode in (0, 1), done.stderr
    data = json.loads(file.read_text())
    assert list(data["large"]) == ["cp", "copying", "folding"] and list(data["small"]) == ["cp", "folding", "in memory"]
    assert data["cold"] is cold
    for results in (data["large"], data["small"]):
        for way, r in results.items():
            assert r["seconds"] > 0 and r["of_cp"] > 0 and r["cpu"] > 0, way
            assert r["peak"] < 10**8 or way == "in memory"
    assert "at least 0.5 of cp's speed is wanted" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["convert.json"]
