"""A module folded in memory, held against what it was folded from."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_families import FAMILIES

import normswap

pytestmark = pytest.mark.core
FEW: dict[str, Any] = {"tokens": 256, "device": "cpu"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("patched", [False, True], ids=["as it is", "patched"])
def test_a_right_fold_passes(dtype: torch.dtype, patched: bool) -> None:
    original = FAMILIES["llama"].build().to(dtype)
    model = normswap.fold(copy.deepcopy(original))
    before = {name: value.clone() for name, value in original.state_dict().items()}
    report = normswap.verify(normswap.patch(model) if patched else model, original, **FEW)
    assert report.passed, (report.failures, report.doubts)
    assert report.tensors is not None and report.tensors.summary == "5 gains folded into 11 linears"
    assert not report.tensors.unexplained
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("fault", ["reader", "gain"])
def test_a_wrong_fold_fails(dtype: torch.dtype, fault: str) -> None:
    original = FAMILIES["llama"].build().to(dtype)
    model = normswap.fold(copy.deepcopy(original))
    layer, theirs = model.model.layers[1], original.model.layers[1]
    if fault == "reader":
        layer.self_attn.k_proj.weight.data.copy_(theirs.self_attn.k_proj.weight)
    else:
        layer.input_layernorm.weight.data.copy_(theirs.input_layernorm.weight)
    report = normswap.verify(model, original, **FEW)
    assert report.verdict == "fail"
    assert any(failure.startswith("exact: ") for failure in report.failures)
