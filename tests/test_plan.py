"""Selecting norms by name: every name of a shared norm counts."""

from __future__ import annotations

import handwritten as hw
import pytest
import torch
from torch import nn

from normswap.errors import NothingToPatchError, UsageError
from normswap.plan import make_plan

pytestmark = pytest.mark.core


def shared() -> nn.ModuleDict:
    norm = nn.LayerNorm(8)
    return nn.ModuleDict({"a": norm, "b": norm, "c": nn.LayerNorm(8)})


def test_any_name_of_a_shared_norm_includes_it() -> None:
    for name in ("a", "b"):
        assert [decision.name for decision in make_plan(shared(), include=name).swaps] == ["a"]


def test_any_name_of_a_shared_norm_excludes_it_without_a_warning() -> None:
    for name in ("a", "b"):
        assert [decision.name for decision in make_plan(shared(), exclude=name).swaps] == ["c"]


def test_a_name_that_no_norm_has_is_told() -> None:
    with pytest.raises(UsageError, match=r"include pattern 'd' matches no norm; their names are like a, c"):
        make_plan(shared(), include="d")
    with pytest.warns(UserWarning, match=r"exclude pattern 'd' matches no norm"):
        make_plan(shared(), exclude="d")


class FrozenBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(name, torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.running_mean) / self.running_var.sqrt() * self.weight + self.bias


class PerHeadNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([norm(row) for norm, row in zip(self.norms, x.unbind(-2), strict=True)], -2)


class OddNorm(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x


def test_what_is_no_norm_of_rows_itself_is_kept_apart() -> None:
    model = nn.ModuleDict(
        {"batch": nn.BatchNorm1d(8), "frozen": FrozenBatchNorm(), "heads": PerHeadNorm(), "odd": OddNorm()}
    )
    plan = make_plan(model)
    assert {decision.name: decision.of_rows for decision in plan.refusals} == {
        "batch": False,
        "frozen": False,
        "heads": False,
        "odd": True,
    }
    assert [decision.name for decision in plan.swaps] == ["heads.norms.0", "heads.norms.1"]
    excluded = make_plan(model, exclude="heads.*").decisions
    assert {decision.name for decision in excluded if decision.of_rows} == {"odd", "heads.norms.0", "heads.norms.1"}


def test_of_a_model_without_norms_of_rows_nothing_is_counted() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), hw.NoNorm())
    plan = make_plan(model)
    assert len(plan.refusals) == 2 and not any(decision.of_rows for decision in plan.refusals)
    with pytest.raises(
        NothingToPatchError,
        match=r"found none \(2 modules are no norms of rows: 1 \(BatchNorm2d\): .*; nothing was changed",
    ):
        plan.require_swaps()
