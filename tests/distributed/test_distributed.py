"""Swapped norms under FSDP2, DDP and tensor parallelism, on two processes with gloo."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

if not torch.distributed.is_available():
    pytest.skip("needs torch.distributed, which this build of torch lacks", allow_module_level=True)

import run_cases

RANKS = 2
HERE = Path(__file__).resolve().parent
Results = dict[str, str]

pytestmark = pytest.mark.core


def why_not() -> str | None:
    """Say what two processes on this machine lack to talk to each other."""
    if not torch.distributed.is_gloo_available():
        return "needs gloo, which this build of torch lacks"
    try:
        with socket.socket() as listener:
            listener.bind(("localhost", 0))
    except OSError as error:
        return f"needs sockets between processes, which this machine refuses: {error}"
    return None


def launch(script: str, folder: Path) -> list[Results]:
    """Run a script on two processes; give what each of them wrote."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(RANKS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, HERE / script, folder], capture_output=True, text=True, env=environment, timeout=600
    )
    written = [folder / f"rank{rank}.json" for rank in range(RANKS)]
    assert all(file.is_file() for file in written), done.stderr[-4000:]
    return [json.loads(file.read_text()) for file in written]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Results]:
    if reason := why_not():
        pytest.skip(reason)
    return launch("run_cases.py", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("case", run_cases.CASES)
def test_on_two_ranks(results: list[Results], case: str) -> None:
    for rank, result in enumerate(results):
        assert case in result, f"rank {rank} stopped after {list(result)[-1:]}: {list(result.values())[-1:]}"
        assert not result[case], f"rank {rank}: {result[case]}"
