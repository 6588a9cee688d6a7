"""Selecting norms by name: every name of a shared norm counts."""

from __future__ import annotations

import pytest
from torch import nn

from normswap.errors import UsageError
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
