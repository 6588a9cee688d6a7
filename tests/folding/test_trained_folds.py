"""Gains of real trained checkpoints folded, end to end."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

import normswap
from normswap.converting import Conversion
from normswap.folding import Tied


def hold_to_the_gates(done: Conversion, folded: int) -> None:
    """Gates A and C in bfloat16, with controls that could have failed."""
    report, folds = done.report, done.folds
    assert report is not None and folds is not None
    assert len(folds.folds) == folded
    assert report.passed, report.failures
    assert report.dtype == "bfloat16" and report.exact.error <= 1e-5
    assert report.exact.control is not None and report.exact.control.detected
    assert report.logits.control is not None and report.logits.control.detected
    assert report.logits.ratio is not None and report.logits.ratio <= 1.25
    assert max((done.algebra or {"": 1.0}).values()) <= 1e-12


@torch.no_grad()
def continued(folder: Path, prompt: str) -> list[int]:
    ids = AutoTokenizer.from_pretrained(folder)(prompt, return_tensors="pt").input_ids
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    return model.generate(ids, do_sample=False, max_new_tokens=20, min_new_tokens=20)[0].tolist()


def test_stories260k(stories260k: Path, tmp_path: Path) -> None:
    done = normswap.convert(stories260k, tmp_path / "out", dtype="bfloat16", fold=True, tied="untie")
    hold_to_the_gates(done, 11)
    assert continued(tmp_path / "out", "Once upon a time") == continued(stories260k, "Once upon a time")


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize(("tied", "folded"), [("skip", 60), ("untie", 61)])
def test_smollm2(smollm2: Path, tmp_path: Path, tied: Tied, folded: int) -> None:
    """Sixty gains with the head tied, all of them with a head of its own, and the same twenty tokens."""
    out = tmp_path / "out"
    done = normswap.convert(smollm2, out, dtype="bfloat16", fold=True, tied=tied)
    hold_to_the_gates(done, folded)
    with safe_open(out / "model.safetensors", "pt") as stored:
        keys = set(stored.keys())
        assert torch.equal(stored.get_tensor("model.layers.7.input_layernorm.weight"), torch.ones(576).bfloat16())
    assert ("lm_head.weight" in keys) == (tied == "untie")
    prompt = "The three states of matter are"
    assert continued(out, prompt) == continued(smollm2, prompt)
    report = normswap.verify(out)
    assert report.passed, report.failures
