"""The Triton kernels' gradients against the oracle's, in the interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from backward_cases import CASES, SLOW_CASES, BackwardCase, check
from normswap_kernels.gradients import Gradients

HERE = Path(__file__).parent


def _run_interpreter(folder: Path, *arguments: str) -> dict[str, Any]:
    path = folder / "results.pt"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, str(HERE / "backward_process.py"), str(path), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the interpreter by name of the case."""
    return _run_interpreter(tmp_path_factory.mktemp("backward"))


@pytest.fixture(scope="module")
def interpreted_slow(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of the interpreter for the largest cases."""
    return _run_interpreter(tmp_path_factory.mktemp("backward"), "slow")


def _check(case: BackwardCase, results: dict[str, Any]) -> None:
    found = results[str(case)]
    assert isinstance(found, tuple), found
    check(case, Gradients(*found))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_gradients_agree_with_the_oracles(case: BackwardCase, interpreted: dict[str, Any]) -> None:
    _check(case, interpreted)


@pytest.mark.slow
@pytest.mark.parametrize("case", SLOW_CASES, ids=str)
def test_largest_gradients_agree_with_the_oracles(case: BackwardCase, interpreted_slow: dict[str, Any]) -> None:
    _check(case, interpreted_slow)


@pytest.mark.parametrize("what", ("again", "alone", "beside", "spread"))
def test_gradients_repeat_and_rows_do_not_see_their_neighbours(what: str, interpreted: dict[str, Any]) -> None:
    found = interpreted["invariance"]
    assert isinstance(found, dict), found
    assert found
    assert [name for name, same in found.items() if not same[what]] == []


def test_no_rows_have_gradients_of_zero(interpreted: dict[str, Any]) -> None:
    found = interpreted["without rows"]
    assert isinstance(found, tuple), found
    _, _, weight, bias = found
    assert torch.equal(weight, torch.zeros(1, 8)) and torch.equal(bias, torch.zeros(1, 8))
