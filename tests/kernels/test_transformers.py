"""The operations against the classes of transformers that they stand for, on the CPU and in the interpreter."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import transformers_cases as cases
from normswap_kernels import rms_norm

HERE = Path(__file__).parent


@pytest.mark.core
@pytest.mark.parametrize("dtype", cases.DTYPES, ids=str)
@pytest.mark.parametrize("name", cases.CASES)
def test_is_within_the_unit_bound_of_the_class(name: str, dtype: torch.dtype) -> None:
    if not cases.exists(name):
        pytest.skip(f"this transformers has no {name}")
    cases.check(name, dtype, "cpu")


@pytest.mark.skipif(int(transformers.__version__.split(".")[0]) < 5, reason="an older transformers has fewer classes")
def test_every_class_is_there() -> None:
    assert [name for name in cases.CASES if not cases.exists(name)] == []


@pytest.mark.parametrize("name", cases.CASES)
def test_autocast_changes_nothing_that_it_does_not_change_in_the_class(name: str) -> None:
    linear = torch.nn.Linear(8, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        dtype = linear(torch.ones(2, 8)).dtype
        assert dtype == torch.bfloat16
        # Beside gains of bfloat16 and of float32, which is what a trained model has here.
        cases.check(name, dtype, "cpu")


def test_the_kernels_are_within_the_unit_bound_of_every_class() -> None:
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, str(HERE / "transformers_cases.py"), "interpret"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines() == [f"{name} {dtype}" for name in cases.CASES for dtype in cases.DTYPES]


def test_a_scale_that_is_not_rounded_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "DeepseekV4UnweightedRMSNorm"
    wrong = cases.CASES[name]._replace(call=lambda n, x, _, **k: rms_norm(x, eps=n.eps, **k))
    monkeypatch.setitem(cases.CASES, name, wrong)
    cases.check(name, torch.float32, "cpu")
    for dtype in (torch.float16, torch.bfloat16):
        with pytest.raises(AssertionError, match="elements differ"):
            cases.check(name, dtype, "cpu")


@pytest.mark.parametrize("name", ("MambaRMSNormGated", "Qwen3NextRMSNormGated"))
def test_a_wrong_gate_or_rounding_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cases.CASES[name]

    def wrong(**change: Any) -> Callable[..., torch.Tensor]:
        def call(norm: Any, x: torch.Tensor, other: torch.Tensor, **options: Any) -> torch.Tensor:
            module = importlib.import_module("normswap_kernels")
            gated = module.gated_rms_norm
            monkeypatch.setattr(cases, "gated_rms_norm", lambda *a, **k: gated(*a, **{**k, **change}))
            try:
                return right.call(norm, x, other, **options)
            finally:
                monkeypatch.setattr(cases, "gated_rms_norm", gated)

        return call

    for change in ({"activation": "sigmoid"}, {"round_dtype": None, "product_dtype": None}, {"eps": 0.1}):
        monkeypatch.setitem(cases.CASES, name, right._replace(call=wrong(**change)))
        with pytest.raises(AssertionError):
            cases.check(name, torch.bfloat16, "cpu")
