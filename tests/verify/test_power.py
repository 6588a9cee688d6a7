"""Where no gate could have seen a fault there is no pass, and the report says what to change."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_families import FAMILIES
from torch import nn
from transformers import LlamaForCausalLM

import normswap
from normswap import ParityReport

HELP = ("--text", "--tokens", "--dtype", "--reference", "float32", "float64")


def hold_doubted(report: ParityReport) -> None:
    """Expect no verdict, for reasons that say what to change."""
    assert report.verdict == "inconclusive", (report.failures, report.power)
    assert not report.passed
    assert report.doubts
    assert any(word in doubt for doubt in report.doubts for word in HELP), report.doubts


@torch.no_grad()
def llama() -> LlamaForCausalLM:
    model: LlamaForCausalLM = FAMILIES["llama"].build().bfloat16()
    return model


def test_faults_are_seen_in_a_sound_model_and_the_smallest_is_named() -> None:
    report = normswap.verify(llama())
    assert report.passed, (report.failures, report.doubts)
    kinds = {fault.kind: fault for fault in report.power.faults}
    for kind in ("gain dropped", "eps x 10", "1+w flipped", "cast order swapped"):
        assert kinds[kind].detected, kinds[kind]
        assert kinds[kind].norm in {norm.name for norm in report.norms}
        assert kinds[kind].gate in ("exact", "norms")
    assert report.power.smallest is not None
    assert 0 < report.power.smallest < 0.02
    assert report.power.norm is not None


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_faults_are_seen_in_other_norms(family: str) -> None:
    report = normswap.verify(FAMILIES[family].build().bfloat16())
    assert report.passed, (report.failures, report.doubts)
    assert all(fault.detected for fault in report.power.faults)


@torch.no_grad()
def test_a_gain_that_is_1_cannot_be_dropped_and_that_is_no_doubt() -> None:
    model = llama()
    for decision in normswap.inspect(model).plan.swaps:
        model.get_submodule(decision.name).weight.fill_(1.0)
    report = normswap.verify(model)
    (dropped,) = [fault for fault in report.power.faults if fault.kind == "gain dropped"]
    assert (dropped.detected, dropped.norm) == (None, None)
    assert dropped.detail
    assert report.passed, (report.failures, report.doubts)


@torch.no_grad()
def test_a_head_of_zeros_shows_no_fault() -> None:
    model = llama()
    model.lm_head.weight.zero_()
    hold_doubted(normswap.verify(model))


@torch.no_grad()
def test_two_checkpoints_with_heads_of_zeros_are_not_passed(tmp_path: Path) -> None:
    model = llama()
    model.lm_head.weight.zero_()
    model.save_pretrained(tmp_path / "sound")
    model.model.layers[1].input_layernorm.weight.mul_(1.5)
    model.save_pretrained(tmp_path / "faulty")
    assert normswap.verify(tmp_path / "faulty", against=tmp_path / "sound").verdict == "fail"
    hold_doubted(normswap.verify(tmp_path / "sound", against=tmp_path / "sound"))


class Idle(nn.Module):
    """Calls its norm, and does nothing with what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.norm = nn.LayerNorm(32)
        self.head = nn.Linear(32, 64)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Return logits ``(batch, length, 64)``."""
        x = self.embed(input_ids)
        self.norm(x)
        return self.head(x)


def test_a_norm_whose_result_reaches_nothing_shows_no_fault() -> None:
    hold_doubted(normswap.verify(Idle().bfloat16()))


@torch.no_grad()
def test_faults_that_hide_behind_weights_of_zero_are_looked_for_elsewhere() -> None:
    """The first norms reach nothing, the last one does: its faults are seen, and theirs by their rows."""
    model = llama()
    for layer in model.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    report = normswap.verify(model)
    assert report.verdict != "fail", report.failures
    assert {fault.norm for fault in report.power.faults if fault.gate == "exact"} <= {"model.norm"}
