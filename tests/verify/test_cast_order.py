"""A norm with the other cast order is the same in float32 and no worse on the whole: its own roundings tell it."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import cast_orders
import pytest
import torch
import transformers
from safetensors.torch import save_file
from test_catches import families, named
from tiny_families import FAMILIES
from transformers import AutoConfig, AutoModelForCausalLM

import normswap

EACH = families(quick=("llama", "gemma2"))


@pytest.mark.parametrize("family", EACH)
def test_a_module_whose_norms_have_the_other_order_is_caught(family: str) -> None:
    model = FAMILIES[family].build().bfloat16()
    other, norms = cast_orders.recast(model)
    report = normswap.verify(other, against=model)
    assert report.verdict == "fail", (report.doubts, report.notes)
    assert "norms" in {failure.partition(":")[0] for failure in report.failures}
    assert report.exact.error < 1e-5
    assert named(report) & set(norms)


@pytest.mark.parametrize("family", EACH)
def test_a_module_whose_norms_have_the_same_order_passes(family: str) -> None:
    model = FAMILIES[family].build().bfloat16()
    twice, norms = cast_orders.recast(cast_orders.recast(model)[0])
    report = normswap.verify(twice, against=model)
    assert report.passed, (report.failures, report.doubts)
    assert {norm.name for norm in report.norms} == set(norms)


@pytest.fixture
def remote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Path]]:
    """Checkpoints of one set of weights with code of their own, for either order."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    folders = {cast: cast_orders.remote(tmp_path / cast, cast) for cast in cast_orders.RESULTS}
    first, second = folders.values()
    config = AutoConfig.from_pretrained(first, trust_remote_code=True)
    model = AutoModelForCausalLM.from_config(config, trust_remote_code=True)
    tensors = {name: (value + 0.2 * torch.randn(value.shape)).bfloat16() for name, value in model.state_dict().items()}
    save_file(tensors, first / "model.safetensors", metadata={"format": "pt"})
    shutil.copyfile(first / "model.safetensors", second / "model.safetensors")
    yield folders


@pytest.mark.parametrize("cast", cast_orders.RESULTS)
def test_code_of_a_checkpoint_with_the_other_order_is_caught(cast: str, remote: dict[str, Path]) -> None:
    (other,) = set(cast_orders.RESULTS) - {cast}
    report = normswap.verify(remote[other], against=remote[cast], trust_remote_code=True)
    assert report.verdict == "fail", (report.doubts, report.notes)
    assert named(report) & {"norm", "layers.0.norm"}
    assert normswap.verify(remote[cast], against=remote[cast], trust_remote_code=True).passed
