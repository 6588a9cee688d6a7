import json
import math
import tempfile
from pathlib import Path

import pytest
import torch
from parity_models import Pair, Swapped

from normswap import parity
from normswap.errors import ModelError
from normswap.figures import Control, Criterion
from normswap.gates import judge_exact
from normswap.inputs import Inputs
from normswap.stats import Gap

pytestmark = pytest.mark.core


def gates(report):
    return {failure.split(":")[0] for failure in report.failures}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_right_conversion_passes(dtype):
    pair = Pair()
    report = pair.measure(dtype)
    assert report.failures == [] and report.passed and report.verdict == "pass"
    assert report.exact.error <= 1e-6
    assert report.exact.control.detected and report.exact.control.error > 1e-3
    low, high = report.logits.ratio_interval
    assert 0.9 < low <= report.logits.ratio <= high < 1.05
    assert report.reference_dtype == ("float64" if dtype == torch.float32 else "float32")
    assert [norm.passed for norm in report.norms] == [True] * 5
    assert all(norm.calls == 8 for norm in report.norms)
    # The first norm reads embeddings: as many distinct rows as distinct tokens.
    tokens = len(torch.cat([batch["input_ids"].flatten() for batch in pair.inputs().batches]).unique())
    assert [norm.elements for norm in report.norms] == [tokens * 64] + [8 * 256 * 64] * 4
    assert report.logits.tokens == 8 * 256
    assert report.logits.top1_agreement >= 0.95


def test_one_model_is_loaded_a_time_in_a_fixed_order():
    pair = Pair()
    pair.measure(torch.bfloat16)
    assert pair.loaded == [
        ("original", torch.float32),
        ("converted", torch.float32),
        ("original", torch.bfloat16),
        ("converted", torch.bfloat16),
    ]
    pair = Pair()
    pair.measure(torch.float32)
    assert pair.loaded == [
        ("original", torch.float64),
        ("original", torch.float32),
        ("converted", torch.float32),
    ]


def test_eps_ten_times_too_large_is_caught():
    def fault(norms):
        for norm in norms:
            norm.eps *= 10

    report = Pair(fault).measure()
    assert "exact" in gates(report)
    assert any(f.startswith("exact: error") and f.endswith("above 1e-05") for f in report.failures)


def test_an_offset_gain_read_as_a_plain_one_is_caught_by_every_gate():
    def fault(norms):
        for norm in norms:
            norm.offset = 1.0

    report = Pair(fault).measure()
    assert gates(report) == {"exact", "norms", "served"}
    assert any("served: error, converted / original, " in failure for failure in report.failures)


def test_the_wrong_cast_order_is_caught_by_the_gate_of_norms_alone():
    def fault(norms):
        for norm in norms:
            norm.gain_first = True

    report = Pair(fault).measure()
    assert gates(report) == {"norms"}
    assert any("model.norm: share of bit-identical elements" in failure for failure in report.failures)


def test_two_percent_on_one_norm_is_caught_by_the_exact_gate():
    def fault(norms):
        norms[1].scale = 1.02

    report = Pair(fault).measure()
    assert "exact" in gates(report)
    wrong = [norm.name for norm in report.norms if norm.passed is False]
    assert wrong == ["model.layers.0.post_attention_layernorm"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_nan_or_infinity_passes(value, dtype):
    def fault(norms):
        norms[-1].spoil = value

    report = Pair(fault).measure(dtype)
    assert gates(report) == {"exact", "norms", "served"}
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert data["verdict"] == "fail"
    assert data["logits"]["error_converted"] is None
    assert data["exact"]["error"] is None


def test_an_original_that_gives_nan_fails_by_name():
    pair = Pair()
    with torch.no_grad():
        pair.model.model.norm.weight[0] = math.nan
    report = pair.measure()
    assert not report.passed
    assert any("the original itself gives" in failure for failure in report.failures)


def test_a_model_without_any_difference_has_ratio_one():
    pair = Pair()
    report = parity.measure(
        pair.original,
        lambda dtype: exact_copy(pair, dtype),
        Pair.norms,
        pair.inputs(),
        dtype=torch.bfloat16,
        device="cpu",
        backend="cpu",
    )
    assert report.passed
    assert report.logits.ratio == 1.0 and report.logits.ratio_interval == (1.0, 1.0)
    assert all(norm.max_ulp == 0 and norm.bit_identical_fraction == 1 for norm in report.norms)


def exact_copy(pair, dtype):
    model = pair.converted(dtype)
    for module in model.modules():
        if isinstance(module, Swapped):
            module.forward = module.original.forward
    return model


def test_no_norm_reached_fails_and_some_missed_are_listed():
    class Idle(torch.nn.Module):
        def __init__(self, inner, idle):
            super().__init__()
            self.inner, self.idle = inner, idle

        def forward(self, **batch):
            return self.inner(**batch)

    pair = Pair()

    def converted(dtype, live):
        model = Idle(pair.original(dtype) if not live else pair.converted(dtype), torch.nn.Module())
        model.idle.norm = Swapped(pair.original(dtype).model.norm)
        return model

    def measured(live):
        return parity.measure(
            pair.original,
            lambda dtype: converted(dtype, live),
            Pair.norms,
            pair.inputs(length=32),
            dtype=torch.bfloat16,
            device="cpu",
            backend="cpu",
        )

    report = measured(live=False)
    assert report.failures == ["norms: none of the 1 swapped norms was reached by the inputs"]
    assert report.exact.control is None
    report = measured(live=True)
    assert report.passed
    assert report.notes == ["1 norms not reached by the inputs: idle.norm"]
    assert report.to_dict()["norms"][-1]["calls"] == 0


def test_a_model_that_cannot_run_in_float64_has_no_served_figures_but_a_verdict():
    pair = Pair()

    def original(dtype):
        if dtype == torch.float64:
            raise ModelError("no float64 here")
        return pair.original(dtype)

    report = parity.measure(
        original,
        pair.converted,
        Pair.norms,
        pair.inputs(length=32),
        dtype=torch.float32,
        device="cpu",
        backend="cpu",
    )
    assert report.passed
    assert "no float64 here" in report.notes[0]
    assert report.logits.ratio is None
    json.dumps(report.to_dict(), allow_nan=False)


def test_too_few_sequences_are_noted():
    report = Pair().measure(inputs=Pair().inputs(sequences=2, length=64))
    assert "expected at least 8 sequences" in report.notes[0]


def test_hooks_and_the_spool_are_gone_even_after_an_exception(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    pair = Pair()
    pair.measure(inputs=pair.inputs(sequences=1, length=16))
    assert list(tmp_path.iterdir()) == []
    assert hooks_of(pair.last) == 0

    calls = []

    def broken(norms):
        calls.append(norms)
        if len(calls) == 2:
            norms[-1].forward = lambda x: x[:, :, :3]

    pair = Pair(broken)
    with pytest.raises(ModelError, match="does not run"):
        pair.measure(inputs=pair.inputs(sequences=1, length=16))
    assert list(tmp_path.iterdir()) == []
    assert hooks_of(pair.last) == 0


def hooks_of(model):
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_blind_control_leaves_the_verdict_open():
    report = Pair().measure(criterion=Criterion(control_scale=1.0))
    assert report.failures == [] and report.verdict == "inconclusive" and not report.passed
    assert [doubt for doubt in report.doubts if "the gate is blind here" in doubt and "--reference float64" in doubt]


def test_a_weak_control_tightens_the_bound():
    right, wrong = [{"x": Gap(0.0, 1.0, 0.0, 0)}], [{"x": Gap(1e-14, 1.0, 1e-7, 0)}]
    weak = Control("n", 1.02, error=4e-7, detected=False)
    exact, failures, doubts = judge_exact(right, "x", weak, Criterion())
    assert failures == doubts == [] and exact.bound == pytest.approx(4e-8) and exact.control.detected
    exact, failures, doubts = judge_exact(wrong, "x", weak, Criterion())
    assert not exact.control.detected and failures == []
    assert doubts[0].startswith("exact: the gate is blind here: error 1e-07, while 1.02 times")
    none = Control("n", 1.02, error=0.0, detected=False)
    assert judge_exact(right, "x", none, Criterion())[2]


def test_the_json_has_the_documented_keys():
    data = json.loads(json.dumps(Pair().measure().to_dict(), allow_nan=False))
    for key in ("verdict", "device", "backend", "dtype", "reference_dtype", "inputs", "criterion", "exact"):
        assert key in data
    assert set(data["exact"]) >= {"error", "bound"}
    assert set(data["logits"]) >= {
        "error_original", "error_converted", "ratio", "ratio_interval", "kl_original", "kl_converted",
        "top1_agreement", "max_abs",
    }  # fmt: skip
    assert len(data["logits"]["ratio_interval"]) == 2
    assert set(data["norms"][0]) >= {
        "name", "max_ulp", "mean_ulp", "bit_identical_fraction", "error_original", "error_swapped",
    }  # fmt: skip
    assert data["dtype"] == "bfloat16" and data["criterion"]["exact_bound"] == 1e-5
    assert "1e-05" in data["criterion"]["text"]


def test_progress_is_told_before_each_step():
    pair, seen = Pair(), []
    parity.measure(
        pair.original,
        pair.converted,
        Pair.norms,
        pair.inputs(sequences=2, length=16),
        dtype=torch.bfloat16,
        device="cpu",
        backend="cpu",
        progress=lambda *step: seen.append(step),
    )
    assert seen[0] == ("original in float32", 0, 2) and seen[-1] == ("converted in bfloat16", 1, 2)
    assert len(seen) == 8


def test_a_text_that_the_models_cannot_read_is_one_error():
    inputs = Inputs("one", [{"input_ids": torch.tensor([[10**6]])}])
    with pytest.raises(ModelError, match="LlamaForCausalLM does not run on input_ids"):
        Pair().measure(inputs=inputs)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("seed", range(10))
def test_no_false_alarm(seed, dtype):
    assert Pair(seed=seed).measure(dtype).failures == []


def test_the_package_carries_its_prompts():
    assert Path(parity.__file__).with_name("prompts.txt").is_file()
