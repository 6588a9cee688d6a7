"""Properties of every row, on drawn examples: on the CPU in this process, in the interpreter in one of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import properties
import pytest

HERE = Path(__file__).parent


@pytest.mark.parametrize("name", properties.PROPERTIES)
def test_holds_on_the_cpu(name: str) -> None:
    properties.check(name, "cpu", 150)


def interpreted(examples: int) -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(HERE / "properties.py"), "interpret", str(examples)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == list(properties.PROPERTIES)


def test_holds_in_the_interpreter() -> None:
    interpreted(12)


@pytest.mark.slow
def test_holds_in_the_interpreter_on_many_examples() -> None:
    interpreted(100)
