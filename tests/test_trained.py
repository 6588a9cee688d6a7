"""Real trained checkpoints, end to end: what random weights hide."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaRMSNorm

import normswap
from normswap import modules
from normswap.parity import ParityReport


def hold_to_the_bounds(report: ParityReport, norms: int) -> None:
    """What the project promises of a correct swap of a trained model in bfloat16."""
    assert report.passed, report.failures
    assert report.dtype == "bfloat16"
    assert len(report.norms) == norms
    assert all(norm.passed and norm.calls for norm in report.norms)
    assert report.exact.error <= 1e-5
    assert report.exact.control is not None
    assert report.exact.control.detected
    assert report.logits.ratio_interval is not None
    assert report.logits.ratio_interval[0] <= 1.02
    data = report.to_dict()
    for norm in data["norms"]:
        assert norm["max_ulp"] <= norm["bound_ulp"]
        assert norm["bit_identical_fraction"] >= 0.9999


def count_calls(monkeypatch: pytest.MonkeyPatch) -> list[nn.Module]:
    calls: list[nn.Module] = []
    forward = LlamaRMSNorm.forward

    @functools.wraps(forward)
    def counted(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
        calls.append(self)
        return forward(self, hidden_states)

    monkeypatch.setattr(LlamaRMSNorm, "forward", counted)
    return calls


def check_generation(source: Path, out: Path, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Greedy generation agrees, and no original norm runs in the reloaded conversion."""
    tokenizer = AutoTokenizer.from_pretrained(source)
    ids = tokenizer(prompt, return_tensors="pt").input_ids

    @torch.no_grad()
    def continued(model: nn.Module) -> list[int]:
        return model.generate(ids, do_sample=False, max_new_tokens=20, min_new_tokens=20)[0].tolist()

    expected = continued(AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16).eval())
    converted = normswap.load(out, dtype=torch.bfloat16)
    calls = count_calls(monkeypatch)
    assert continued(converted) == expected
    assert calls == []


def test_stories260k(stories260k: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = normswap.convert(stories260k, tmp_path / "out", dtype="bfloat16")
    assert done.report is not None
    hold_to_the_bounds(done.report, 11)
    assert done.report.inputs["kind"] == "text"
    assert (done.report.inputs["sequences"], done.report.inputs["length"]) == (8, 256)
    for path in stories260k.iterdir():
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    check_generation(stories260k, tmp_path / "out", "Once upon a time", monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
def test_smollm2(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The demo takes 2048, which on a core without bfloat16 arithmetic are minutes.
    done = normswap.convert(smollm2, tmp_path / "out", dtype="bfloat16", tokens=256)
    assert (len(done.plan.swaps), len(done.plan.decisions)) == (61, 61)
    assert done.report is not None
    hold_to_the_bounds(done.report, 61)
    check_generation(smollm2, tmp_path / "out", "The three states of matter are", monkeypatch)


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
def test_minilm_on_its_hidden_state(minilm: Path, tmp_path: Path) -> None:
    done = normswap.convert(minilm, tmp_path / "out", dtype="bfloat16")
    assert len(done.plan.swaps) == 13
    assert done.report is not None
    hold_to_the_bounds(done.report, 13)
    assert done.report.output["name"] == "last_hidden_state"
    model = normswap.load(tmp_path / "out")
    assert len(list(modules.fused_norms(model))) == 13


@pytest.mark.slow
@pytest.mark.usefixtures("all_cores")
def test_rxnmapper_whose_layer_is_shared_twelve_times(rxnmapper: Path, tmp_path: Path) -> None:
    done = normswap.convert(rxnmapper, tmp_path / "out", dtype="bfloat16")
    assert done.report is not None
    hold_to_the_bounds(done.report, 4)
    body = AutoModel.from_pretrained(rxnmapper)
    report = normswap.verify(body, dtype="bfloat16")
    hold_to_the_bounds(report, 3)
    assert report.output["name"] == "last_hidden_state"
    # All sequences are rows of one forward.
    assert {norm.calls for norm in report.norms} == {1, 12}
