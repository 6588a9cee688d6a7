"""A right cast, served in a wider dtype than it is stored in: its norms have rounded gains, and that is no fault."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES
from two_checkpoints import Tensors, fold_llama, remade

import normswap

pytestmark = pytest.mark.core
FEW: dict[str, Any] = {"tokens": 256, "device": "cpu"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"].save(tmp_path_factory.mktemp("llama") / "llama")


def _cast(tensors: Tensors) -> None:
    tensors.update({key: value.bfloat16() for key, value in tensors.items()})


def _rounded(tensors: Tensors) -> None:
    tensors.update({key: value.bfloat16().float() for key, value in tensors.items()})


def _folded(tensors: Tensors) -> None:
    fold_llama(tensors, 2)
    _cast(tensors)


@pytest.mark.parametrize(
    "change, kind", [(_cast, "cast"), (_rounded, "cast"), (_folded, "folded+cast")], ids=["cast", "rounded", "folded"]
)
def test_it_passes(llama: Path, tmp_path: Path, change: Any, kind: str) -> None:
    report = normswap.verify(remade(llama, tmp_path / "cast", change), llama, **FEW, dtype=torch.float32)
    assert report.tensors is not None and report.tensors.kind == kind
    assert report.passed, (report.failures, report.doubts)


def test_a_gain_that_was_not_only_rounded_fails(llama: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        _cast(tensors)
        tensors["model.layers.1.input_layernorm.weight"][3] *= 1.02

    report = normswap.verify(remade(llama, tmp_path / "wrong", change), llama, **FEW, dtype=torch.float32)
    assert report.verdict == "fail"
    assert any("model.layers.1.input_layernorm" in failure for failure in report.failures)
