"""Faults in a trained checkpoint, SmolLM2-135M in bfloat16: 61 RMSNorms, a tied head."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import broken_checkpoints as broken
import cast_orders
import pytest
import torch
import transformers
from broken_checkpoints import Broken
from test_catches import hold_caught, named
from tiny_families import Family
from transformers import AutoModelForCausalLM

import normswap

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("all_cores")]

# More show the same, and take minutes each where a core does not multiply bfloat16.
TOKENS = 128
SMOLLM2 = Family(
    "LlamaForCausalLM",
    "LlamaConfig",
    {},
    gain="model.layers.17.input_layernorm.weight",
    twin="model.layers.16.input_layernorm.weight",
    final="model.norm.weight",
    embedding="model.embed_tokens.weight",
    head="lm_head.weight",
    eps="rms_norm_eps",
    layer="model.layers.17",
)


def sharded(source: Path, target: Path, change: Callable[[torch.nn.Module], None] | None = None) -> Path:
    """Save in several files, after a change."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    if change is not None:
        change(model)
    model.save_pretrained(target, max_shard_size="80MB")
    return target


@torch.no_grad()
def trained_further(model: torch.nn.Module) -> None:
    """Move every weight by a tenth of its spread, as some more training would."""
    for parameter in model.parameters():
        parameter.add_(0.1 * parameter.float().std() * torch.randn(parameter.shape))


def of_another_training(family: Family, sound: Path, faulty: Path) -> Broken:
    """Take a shard from a checkpoint that was trained further."""
    ours, theirs = faulty.with_name("ours"), faulty.with_name("theirs")
    return broken.foreign_shard(family, sharded(sound, ours), sharded(sound, theirs, trained_further), faulty)


@pytest.mark.parametrize(
    "fault",
    [
        broken.one_channel,
        broken.eps_smaller,
        broken.norms_exchanged,
        broken.head_left_tied,
        broken.embeddings_centred,
        of_another_training,
    ],
)
def test_a_fault_is_caught(fault: Callable[[Family, Path, Path], Broken], smollm2: Path, tmp_path: Path) -> None:
    report = hold_caught(fault(SMOLLM2, smollm2, tmp_path / "faulty"), tokens=TOKENS)
    assert report.dtype == "bfloat16"


def test_the_layer_where_a_gain_is_off_is_the_first_that_departs(smollm2: Path, tmp_path: Path) -> None:
    pair = broken.one_channel(SMOLLM2, smollm2, tmp_path / "faulty")
    report = normswap.verify(pair.faulty, against=pair.sound, tokens=TOKENS)
    assert report.departs == SMOLLM2.layer
    assert [layer.departs for layer in report.layers[:18]] == [False] * 17 + [True]


def test_the_other_cast_order_is_caught(smollm2: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16).eval()
    other, norms = cast_orders.recast(model)
    report = normswap.verify(other, against=model, tokens=TOKENS)
    assert report.verdict == "fail", (report.doubts, report.notes)
    assert set(norms) & named(report)


def test_a_copy_is_the_same_to_the_last_bit(smollm2: Path, tmp_path: Path) -> None:
    report = normswap.verify(broken.copied(smollm2, tmp_path / "copy"), against=smollm2, tokens=TOKENS)
    assert report.verdict == "pass", (report.failures, report.doubts)
    assert (report.logits.ratio, report.exact.error) == (1.0, 0.0)
    assert {norm.max_ulp for norm in report.norms} == {0.0}
    assert report.tensors is not None
    assert report.tensors.summary == "identical"
    assert {fault.kind for fault in report.power.faults if fault.detected} >= {"gain dropped", "eps x 10"}


def test_a_fold_passes_with_and_without_its_record(smollm2: Path, tmp_path: Path) -> None:
    out = normswap.convert(smollm2, tmp_path / "out", fold=True, tied="untie", verify=False).out
    for recorded in (True, False):
        if not recorded:
            (out / "normswap.json").unlink()
        report = normswap.verify(out, against=smollm2, tokens=TOKENS)
        assert report.verdict == "pass", (report.failures, report.doubts)
        assert report.tensors is not None
        assert "61 gains folded into 151 linears" in report.tensors.summary
    assert transformers.AutoModelForCausalLM.from_pretrained(out).lm_head.weight.shape == (49152, 576)
