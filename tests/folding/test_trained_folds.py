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


# On a core that has no bfloat16 arithmetic, 2048 tokens take one model a minute and a half.
TOKENS = 256
PROMPTS = (
    "The three states of matter are",
    "Once upon a time",
    "Water boils at a temperature of",
    "A triangle has three",
    "To make a cup of tea, first",
    "The capital of France is",
)


@torch.no_grad()
def first_differences(original: Path, folded: Path) -> list[tuple[str, float, float]]:
    """Let both write twenty tokens after each prompt.

    Returns:
        Where they part: the prompt, how far the two tokens' logits lie apart in float32, and what bfloat16 adds to the
        four logits that decide it, of the original and of the folded model.
    """
    tokenizer = AutoTokenizer.from_pretrained(original)
    exact = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32).eval()
    models = [AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval() for path in (original, folded)]
    found = []
    for prompt in PROMPTS:
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        one, other = (m.generate(ids, do_sample=False, max_new_tokens=20, min_new_tokens=20)[0] for m in models)
        if torch.equal(one, other):
            continue
        at = int((one != other).nonzero()[0])
        tokens = [int(one[at]), int(other[at])]
        true = exact(one[None, :at]).logits[0, -1, tokens]
        rounding = sum((m(one[None, :at]).logits[0, -1, tokens].float() - true).abs().sum() for m in models)
        found.append((prompt, float((true[0] - true[1]).abs()), float(rounding)))
    return found


def hold_to_the_texts(original: Path, folded: Path) -> None:
    """Greedy texts are the same, or part at two tokens that bfloat16 cannot tell apart."""
    parted = first_differences(original, folded)
    assert len(parted) <= len(PROMPTS) // 2, parted
    assert all(margin <= rounding for _, margin, rounding in parted), parted


def test_stories260k(stories260k: Path, tmp_path: Path) -> None:
    done = normswap.convert(stories260k, tmp_path / "out", dtype="bfloat16", fold=True, tied="untie")
    hold_to_the_gates(done, 11)
    hold_to_the_texts(stories260k, tmp_path / "out")


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
@pytest.mark.parametrize(("tied", "folded"), [("skip", 60), ("untie", 61)])
def test_smollm2(smollm2: Path, tmp_path: Path, tied: Tied, folded: int) -> None:
    """Sixty gains with the head tied, all of them with a head of its own."""
    out = tmp_path / "out"
    done = normswap.convert(smollm2, out, dtype="bfloat16", fold=True, tied=tied, tokens=TOKENS)
    hold_to_the_gates(done, folded)
    with safe_open(out / "model.safetensors", "pt") as stored:
        keys = set(stored.keys())
        assert torch.equal(stored.get_tensor("model.layers.7.input_layernorm.weight"), torch.ones(576).bfloat16())
    assert ("lm_head.weight" in keys) == (tied == "untie")
    hold_to_the_texts(smollm2, out)
    report = normswap.verify(out, tokens=TOKENS)
    assert report.passed, report.failures
