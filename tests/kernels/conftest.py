"""Fixtures for the kernels: fresh scratch space and the interpreter's process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from normswap_kernels import cpu_blocks, cpu_library

HERE = Path(__file__).parent


@pytest.fixture(autouse=True)
def fresh_scratch_space() -> None:
    """Forget the scratch space that an earlier test has written to, so that it too begins poisoned."""
    cpu_blocks._local.__dict__.clear()


@pytest.fixture(params=("blocks", "compiled"))
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of the CPU: torch's operations on blocks, and what is compiled where there is a compiler."""
    if request.param == "blocks":
        monkeypatch.setattr(cpu_library, "_looked_for", True)
        monkeypatch.setattr(cpu_library, "_library", None)
    elif cpu_library.library() is None:
        pytest.skip("needs a C++ compiler, and finds none")
    return str(request.param)


def _run_interpreter(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "results.pt"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(HERE / "interpreter_process.py"), str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.fixture(scope="session")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the interpreter by name of the case."""
    return _run_interpreter(tmp_path_factory.mktemp("interpreter"))


@pytest.fixture(scope="session")
def interpreted_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the interpreter for the largest cases."""
    return _run_interpreter(tmp_path_factory.mktemp("interpreter"), "slow")
