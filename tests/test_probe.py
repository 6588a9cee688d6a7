"""Recognition by behaviour: what a norm is called does not matter, what it computes does."""

from __future__ import annotations

import warnings
from dataclasses import replace

import handwritten as hw
import handwritten_kinds as hk
import pytest
import torch
from torch import nn

import normswap
from normswap import modules
from normswap.plan import make_plan
from normswap.probe import Refusal, probe, settings_key
from normswap.replica import Replica
from normswap.spec import NormSpec

pytestmark = pytest.mark.core


def rms(**changes: object) -> NormSpec:
    return replace(NormSpec("rms", 64, 1e-6), **changes)  # type: ignore[arg-type]


RIGHT = {
    "misnamed RMSNorm": (
        hw.Scale(64),
        rms(cast="before_gain", out="promote", gain_name="gamma"),
    ),
    "LayerNorm called RMSNorm": (
        hw.RMSNorm(64),
        NormSpec("layer", 64, 3e-5, bias=True, bias_name="shift"),
    ),
    "1 + w called LlamaRMSNorm": (hw.LlamaRMSNorm(64), NormSpec("rms", 64, 1e-5, gain="1+w")),
    "no gain, eps 0": (hw.BareNorm(), NormSpec("rms", None, 0.0, gain="none", gain_name=None)),
    "gain in a buffer": (hw.BufferNorm(64), rms(gain_name="gain")),
    "nn.LayerNorm": (nn.LayerNorm(48, eps=1e-12), NormSpec("layer", 48, 1e-12, bias=True, bias_name="bias")),
    "nn.LayerNorm without bias": (nn.LayerNorm(48, bias=False), NormSpec("layer", 48, 1e-5)),
    "nn.LayerNorm without parameters": (
        nn.LayerNorm(48, elementwise_affine=False),
        NormSpec("layer", 48, 1e-5, gain="none", gain_name=None),
    ),
    "nn.RMSNorm": (nn.RMSNorm(48, eps=1e-6), NormSpec("rms", 48, 1e-6)),
    "nn.RMSNorm with the dtype's eps": (nn.RMSNorm(48), NormSpec("rms", 48, torch.finfo(torch.float32).eps)),
    "a large eps": (nn.LayerNorm(48, eps=0.5), NormSpec("layer", 48, 0.5, bias=True, bias_name="bias")),
    "a short row": (nn.LayerNorm(4), NormSpec("layer", 4, 1e-5, bias=True, bias_name="bias")),
    "statistics in the input's dtype": (hw.NarrowNorm(), rms(own_code=("bfloat16", "float16"))),
    "a scale rounded to the input's dtype": (
        hw.ScaleRoundedNorm(),
        NormSpec("rms", None, 1e-6, gain="none", gain_name=None, scale_cast="input"),
    ),
    "eps outside the root": (hw.OutsideEpsNorm(), rms(eps=1e-3, eps_position="outside")),
    "eps as a clamp": (hw.NormalizeNorm(), rms(eps=1e-12 / 8, eps_position="clamp")),
    "an eps that only zeros see": (hw.TinyEpsNorm(), rms(eps=1e-30)),
    "grouped": (hw.GroupedNorm(), rms(groups=4)),
    "partial": (hw.PartialNorm(), rms(partial=32)),
    "per head": (hw.PerHeadNorm(), rms(width=16, heads=4)),
    "an optional gate, narrow": (
        hw.GatedNorm(),
        rms(gate="silu", gate_position="after", gate_name="gate", gate_optional=True, own_code=("bfloat16", "float16")),
    ),
    "a gate before groups": (
        hk.GateBeforeNorm(),
        rms(gate="silu", gate_position="before", gate_name="z", groups=4, cast="before_gain", out="promote"),
    ),
    "the gate first": (hk.GateFirstNorm(), rms(gate="sigmoid", gate_position="after", gate_name="gate")),
    "a gate that has a default": (hk.HiddenGateNorm(), rms(gate="sigmoid", gate_position="after", gate_name="gate")),
    "dropout and activation after it": (hk.ActingNorm(), rms(then=("drop", "act"))),
    "a gain that is not used": (hk.UnusedGainNorm(), rms(width=None, gain="none", gain_name=None)),
    "L2": (hk.L2Norm(), NormSpec("rms", None, 1e-6, gain="none", gain_name=None, reduction="sum")),
    "one number for a gain": (hk.ScalarNorm(), NormSpec("rms", None, 1e-6, gain_name="temperature")),
    "1 + w in the weight's dtype": (hk.NarrowOffsetNorm(), rms(gain="1+w", offset_dtype="weight")),
    "a gain before the norm": (hk.ScaledBeforeNorm(), rms(gain_position="before")),
    "channels of an image": (
        hk.ImageNorm(),
        NormSpec("layer", 64, 1e-6, bias=True, bias_name="bias", axis="channels", ranks=(4,), dense=False),
    ),
    "channels of a sequence": (hk.SequenceChannelNorm(), rms(axis="channels", ranks=(3,), gain_name="g")),
    "heads that it joins": (
        hk.JoiningNorm(),
        rms(kind="layer", groups=4, joins=4, ranks=(4,), cast="before_gain", out="promote"),
    ),
    "one thing for sequences, another for images": (hk.RankNorm(), rms(ranks=(1, 2, 3))),
    "channels of anything": (hk.ChannelsOfAnyNorm(), rms(axis="channels", ranks=(3, 4, 5))),
    "channels of pixels": (
        hk.PixelNorm(),
        NormSpec("rms", None, 1e-8, gain="none", gain_name=None, axis="channels", ranks=(3, 4, 5)),
    ),
    "channels of a volume": (
        hk.VolumeNorm(),
        NormSpec("layer", 64, 1e-6, axis="channels", ranks=(5,), dense=False),
    ),
    "a cast after the activation": (
        hk.ActingBeforeTheCastNorm(),
        rms(then=("act",), own_code=("bfloat16", "float16")),
    ),
    "three roundings": (hk.NarrowScaleNorm(), rms(cast="before_gain", out="promote", scale_cast="input")),
    "rows in two dimensions only": (hk.FlatNorm(), rms(ranks=(2,))),
}

REFUSED = {
    hw.TupleNorm: "it returns a tuple, not one tensor",
    hw.MutatingNorm: "it changes its input in place",
    hw.DropoutNorm: "it computes something else in training mode",
    hw.SequenceNorm: "its rows are not independent",
    hw.NoNorm: "it does not normalise",
    hw.ExpNorm: "its gain is neither w nor 1 + w",
    hw.ClippingNorm: "the formula found for it is not proved",
    hw.ForgivingNorm: "it treats zeros, infinities or NaN in its input in a way of its own",
    hw.ClampedGainNorm: "the formula found for it is not proved",
    hw.LoneRowNorm: "it computes something else on an input of shape [1,",
    hw.DetachedNorm: "its gradients are not those of its formula",
    hw.FrozenGainNorm: "its gradients are not those of its formula",
    hw.CountingNorm: "it changes its own attributes or buffers",
    hk.ActingFirstNorm: "its norm does not simply stand before its other modules (act)",
    hk.ClampedRowNorm: "the formula found for it is not proved",
    hk.FixedGroupsNorm: "what it computes depends on the length of the row",
    hk.ScaledEpsNorm: "what it computes depends on the length of the row",
    hk.SometimesActingNorm: "its norm does not simply stand before its other modules (act)",
    hk.RememberingNorm: "it changes its own attributes or buffers when it runs",
    hk.RecordingNorm: "it changes its own attributes or buffers when it runs",
    hk.UnbiasedNorm: "it divides by the unbiased standard deviation",
    hk.ContiguousNorm: "it computes something else on an input of shape",
    hk.DroppingFirstNorm: "its norm does not simply stand before its other modules (drop)",
    hk.MaximumNorm: "it is neither RMSNorm nor LayerNorm over the last dimension",
    hk.SummingNorm: "it normalises a mixture of its two inputs",
    hk.GatedLayerNorm: "it is no norm with a gate by silu or sigmoid",
    hk.DeviationNorm: "it divides by the standard deviation of a row that it does not centre",
    hk.RootNorm: "it returns the shape [2, 4, 1] for [2, 4, 96]",
    hk.ManyArgumentsNorm: "its forward takes (x, shift, scale), not a row, or a row and its gate",
    hk.GeluGatedNorm: "it is no norm with a gate by silu or sigmoid",
}


@pytest.mark.parametrize("name", RIGHT)
def test_finds_the_spec(name: str) -> None:
    module, expected = RIGHT[name]
    found = probe(module)
    assert isinstance(found, NormSpec), found
    assert replace(found, input_name="x") == expected


@pytest.mark.parametrize("cls", REFUSED, ids=lambda cls: cls.__name__)
def test_refuses_with_the_reason(cls: type[nn.Module]) -> None:
    result = probe(cls())
    assert isinstance(result, Refusal)
    assert REFUSED[cls] in result.reason


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (nn.GroupNorm(4, 64), "GroupNorm normalises over channels"),
        (nn.BatchNorm1d(64), "BatchNorm1d normalises over the batch"),
        (nn.InstanceNorm2d(64), "InstanceNorm2d normalises over the batch or over positions"),
        (nn.LayerNorm((4, 16)), "it normalises over 2 dimensions"),
        (nn.LayerNorm((4, 16), elementwise_affine=False), "it normalises over 2 dimensions"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_refuses_torch_norms_over_other_axes_by_name(module: nn.Module, reason: str) -> None:
    result = probe(module)
    assert isinstance(result, Refusal)
    assert reason in result.reason


@pytest.mark.parametrize(
    "module",
    [hw.Act(), nn.Linear(8, 8), nn.GELU(), nn.Dropout(), nn.Embedding(8, 8), nn.Sequential(nn.LayerNorm(8))],
)
def test_says_nothing_of_what_is_no_norm(module: nn.Module) -> None:
    assert probe(module) is None


def test_probes_on_meta_tensors_and_leaves_the_module_alone() -> None:
    with torch.device("meta"):
        module = hw.Scale(64)
    before = dict(vars(module))
    assert probe(module) == replace(RIGHT["misnamed RMSNorm"][1], input_name="h")
    assert vars(module) == before
    assert module.gamma.is_meta


def test_keeps_the_random_state_and_the_parameters() -> None:
    module = nn.LayerNorm(32)
    weight = module.weight.clone()
    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    probe(module)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(module.weight, weight)


def test_does_not_call_hooks() -> None:
    module = nn.LayerNorm(32)
    module.register_forward_hook(lambda *_: pytest.fail("a hook of the user's was called"))
    assert isinstance(probe(module), NormSpec)


def test_a_forward_replaced_on_the_instance_is_refused() -> None:
    module = nn.LayerNorm(32)
    module.forward = lambda x: x
    assert probe(module) == Refusal("its forward was replaced on the instance")


def test_settings_key_tells_settings_and_shapes_apart() -> None:
    assert settings_key(nn.LayerNorm(8)) == settings_key(nn.LayerNorm(8))
    assert settings_key(nn.LayerNorm(8)) != settings_key(nn.LayerNorm(16))
    assert settings_key(nn.LayerNorm(8)) != settings_key(nn.LayerNorm(8, eps=1e-6))
    assert settings_key(nn.LayerNorm(8)) != settings_key(nn.LayerNorm(8, bias=False))
    assert settings_key(hw.Scale(8)) != settings_key(hw.LlamaRMSNorm(8))


def test_the_spec_survives_plain_data() -> None:
    spec = RIGHT["LayerNorm called RMSNorm"][1]
    assert NormSpec.from_dict(spec.to_dict()) == spec
    with pytest.raises(ValueError, match=r"expected spec keys among .* got also \['colour'\]"):
        NormSpec.from_dict({**spec.to_dict(), "colour": 1})


def test_probing_costs_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """No clock is asserted (`benchmarks/planning.py` has it): wide rows take long to run, and they are few."""
    numbers: list[int] = []
    run = Replica.run
    monkeypatch.setattr(Replica, "run", lambda self, x, *a, **k: numbers.append(x.numel()) or run(self, x, *a, **k))
    with torch.device("meta"):
        model = nn.ModuleList(nn.Sequential(hw.Scale(8192), nn.LayerNorm(8192)) for _ in range(80))
    assert len(make_plan(model).swaps) == 160
    # For each of the two distinct norms about sixty runs of a sixteenth of a million numbers.
    assert 50 < len(numbers) < 200 and sum(numbers) < 25e6


def test_autocast_around_it_changes_nothing() -> None:
    norm = hk.NarrowingNorm()
    with torch.autocast("cpu", torch.bfloat16):
        assert probe(norm) == probe(hk.NarrowingNorm()) == replace(rms(), input_name="x")
        normswap.patch(norm)
    assert isinstance(norm, modules.FusedNorm)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_the_default_dtype_changes_nothing(dtype: torch.dtype) -> None:
    expected = probe(nn.LayerNorm(48)), probe(hw.Scale(64))
    torch.set_default_dtype(dtype)
    try:
        assert (probe(nn.LayerNorm(48)), probe(hw.Scale(64))) == expected
        normswap.patch(nn.Sequential(nn.LayerNorm(48)))
    finally:
        torch.set_default_dtype(torch.float32)


def test_the_default_device_changes_nothing() -> None:
    expected = probe(nn.LayerNorm(48))
    with torch.device("meta"):
        norm = nn.LayerNorm(48)
        assert probe(norm) == expected
        assert isinstance(normswap.patch(nn.Sequential(norm))[0], modules.FusedNorm)


def test_modules_without_shapes_and_those_of_torch_jit_are_passed_by() -> None:
    class LazyNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.UninitializedParameter()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), torch.randn(2, 4))
    model = nn.Sequential(nn.LayerNorm(4), nn.LazyLinear(3), nn.LazyBatchNorm1d(), LazyNorm(), traced)
    plan = make_plan(model)
    assert [decision.name for decision in plan.swaps] == ["0"]
    assert {decision.name: decision.reason for decision in plan.refusals if decision.of_rows} == {
        "3": "its parameters have no shapes yet: run the model once before",
        "4.1": "it was compiled by torch.jit, and has no forward of Python's any more",
    }


def test_a_norm_that_is_compiled_in_place_is_swapped() -> None:
    norm = nn.LayerNorm(8)
    norm.compile(backend="eager")
    normswap.patch(nn.Sequential(norm))
    x = torch.randn(3, 8)
    torch.testing.assert_close(norm(x), modules.original_forward(norm, x))


def test_a_class_is_not_told_of_the_swapped_one() -> None:
    norm = hk.RegisteringNorm()
    assert isinstance(normswap.patch(nn.Sequential(norm))[0], modules.FusedNorm)
    assert hk.RegisteringNorm.known == []


def test_a_forward_that_ends_the_process_or_a_list_in_itself_ends_nothing() -> None:
    class EndingNorm(hw.RowNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise SystemExit(3)

    norm = EndingNorm()
    norm.around = [norm.weight]  # type: ignore[assignment]
    norm.around.append(norm.around)
    result = probe(norm)
    assert isinstance(result, Refusal) and "does not run" in result.reason
    assert settings_key(norm) == settings_key(norm)
