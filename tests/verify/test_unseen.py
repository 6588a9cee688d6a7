"""Differences that no input reaches: they leave the verdict open, and are named."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES
from torch import nn
from two_checkpoints import Tensors, compared, remade

import normswap

pytestmark = pytest.mark.core
FEW: dict[str, Any] = {"tokens": 128, "device": "cpu"}


class Spare(nn.Module):
    """A norm between two tables, and a linear that nothing calls."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(50, 32), nn.LayerNorm(32), nn.Linear(32, 50)
        self.spare = nn.Linear(32, 32)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.norm(self.table(input_ids)))
        return result


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FAMILIES["llama"].save(tmp_path_factory.mktemp("llama") / "llama")


@pytest.mark.parametrize(
    "settings, name",
    [
        ({"max_position_embeddings": 128}, "max_position_embeddings"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_"),
    ],
)
def test_a_setting_that_longer_inputs_would_show_leaves_it_open(
    llama: Path, tmp_path: Path, settings: dict[str, Any], name: str
) -> None:
    report = normswap.verify(remade(llama, tmp_path / "other", **settings), llama, **FEW)
    assert report.verdict == "inconclusive" and not report.failures
    assert any(doubt.startswith("settings: ") and name in doubt for doubt in report.doubts)


def test_what_only_training_reads_leaves_nothing_open(llama: Path, tmp_path: Path) -> None:
    report = normswap.verify(remade(llama, tmp_path / "other", initializer_range=0.5), llama, **FEW)
    assert report.passed


def _spare(model: nn.Module) -> None:
    model.spare.weight.data += 1  # type: ignore[union-attr, operator]


def _last_position(model: nn.Module) -> None:
    model.transformer.wpe.weight.data[60] += 0.5  # type: ignore[union-attr, index]


@pytest.mark.parametrize(
    "build, change, name",
    [(Spare, _spare, "spare.weight"), (FAMILIES["gpt2"].build, _last_position, "transformer.wpe.weight")],
)
def test_a_value_of_a_module_that_nothing_reads_leaves_it_open(
    build: Callable[[], nn.Module], change: Callable[[nn.Module], None], name: str
) -> None:
    original = build()
    assert normswap.verify(copy.deepcopy(original), original, **FEW).passed
    other = copy.deepcopy(original)
    change(other)
    report = normswap.verify(other, original, **FEW)
    assert report.verdict == "inconclusive" and report.exact.error == 0
    assert any(doubt.startswith("tensors: ") and name in doubt for doubt in report.doubts)
    assert report.tensors is not None and report.tensors.summary == "1 tensor differs"


def test_the_number_of_tensors_that_differ_is_told_in_good_words() -> None:
    original = Spare()
    report = normswap.verify(copy.deepcopy(original).to(torch.bfloat16), original, **FEW)
    assert report.tensors is not None and len(report.tensors.changes) == 7
    many = FAMILIES["llama"].build()
    report = normswap.verify(copy.deepcopy(many).to(torch.bfloat16), many, **FEW)
    assert report.tensors is not None and report.tensors.summary == "21 tensors differ"


@pytest.mark.parametrize("value", [1.0, float("nan")])
def test_a_tensor_that_the_class_does_not_load_is_told_of(llama: Path, tmp_path: Path, value: float) -> None:
    def add(tensors: Tensors) -> None:
        tensors["model.mtp.0.weight"] = torch.ones(4, 4)

    def change(tensors: Tensors) -> None:
        tensors["model.mtp.0.weight"][2, 2] += value

    before = remade(llama, tmp_path / "before", add)
    found = compared(before, remade(before, tmp_path / "after", change))
    assert not found.failures
    assert (found.figures.kind, found.figures.summary) == (
        "rearranged",
        "1 tensor that the class does not load differs",
    )
    assert any("model.mtp.0.weight" in note and "does not load" in note for note in found.notes)
