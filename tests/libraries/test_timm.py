"""timm's models from random weights, and its norm layers one by one."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from aside import bring_timm
from torch import nn

import normswap
from normswap import modules
from normswap.plan import make_plan

SMALL_VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3}
SMALL_SWIN = {"img_size": 32, "window_size": 4, "embed_dim": 24, "depths": (1, 1), "num_heads": (2, 2)}
SMALL_CONVNEXT = {"depths": (1, 1, 1, 1), "dims": (16,) * 4}
MODELS = {
    "vit": ("vit_tiny_patch16_224", SMALL_VIT, {"LayerNorm": 5}),
    "vit_qk_rms": ("vit_tiny_patch16_224", {**SMALL_VIT, "norm_layer": "rmsnorm", "qk_norm": True}, {"RmsNorm": 9}),
    "convnext": ("convnext_tiny", SMALL_CONVNEXT, {"LayerNorm": 4, "LayerNorm2d": 5}),
    "convnext_conv_mlp": ("convnext_atto", SMALL_CONVNEXT, {"LayerNorm2d": 9}),
    "convnext_rms": ("convnext_atto_rms", SMALL_CONVNEXT, {"RmsNorm2d": 9}),
    "swin": ("swin_tiny_patch4_window7_224", SMALL_SWIN, {"LayerNorm": 7}),
    "swinv2": ("swinv2_tiny_window8_256", SMALL_SWIN, {"LayerNorm": 7}),
}
IMAGES = (2, 3, 32, 32)


@pytest.fixture(scope="module")
def timm() -> ModuleType:
    return bring_timm()


def disturb(module: nn.Module) -> None:
    """Move gains, biases and layer scales away from what they start as; a scale of 1e-6 would hide a whole block."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.3 * torch.randn(parameter.shape)).clamp_(min=-2.0)


def build(timm: ModuleType, which: str) -> nn.Module:
    name, settings, _ = MODELS[which]
    model = timm.create_model(name, pretrained=False, num_classes=10, **settings)
    disturb(model)
    return model.eval()


@pytest.mark.parametrize("which", MODELS)
def test_a_model_keeps_its_output_with_every_norm_swapped(timm: ModuleType, which: str) -> None:
    model = build(timm, which)
    images = torch.randn(IMAGES)
    with torch.no_grad():
        expected = model(images)
        normswap.patch(model)
        got = model(images)
    assert Counter(type(module).__name__ for _, module, _ in modules.fused_norms(model)) == MODELS[which][2]
    assert float((got - expected).norm()) <= 1e-5 * float(expected.norm())
    normswap.unpatch(model)
    with torch.no_grad():
        assert torch.equal(model(images), expected)


@pytest.mark.parametrize("which", ["vit", "convnext", "swin"])
def test_a_model_trains_to_the_same_gradients(timm: ModuleType, which: str) -> None:
    model = build(timm, which)
    swapped = normswap.patch(copy.deepcopy(model))
    images = torch.randn(IMAGES)
    for one in (model, swapped):
        one(images).pow(2).sum().backward()
    for (name, parameter), other in zip(model.named_parameters(), swapped.parameters(), strict=True):
        assert parameter.grad is not None and other.grad is not None, name
        assert float((other.grad - parameter.grad).norm()) <= 1e-4 * float(parameter.grad.norm()) + 1e-7, name


ROW, IMAGE = (16,), (16, 5, 6)
LAYERS = {
    **dict.fromkeys(["LayerNorm", "LayerNormFp32", "RmsNorm", "RmsNormFp32"], ROW),
    **dict.fromkeys(["LayerNorm2d", "LayerNorm2dFp32", "RmsNorm2d", "RmsNorm2dFp32"], IMAGE),
    **dict.fromkeys(["LayerNormAct", "LayerNormActFp32", "RmsNormAct", "RmsNormActFp32"], ROW),
    **dict.fromkeys(["LayerNormAct2d", "LayerNormAct2dFp32", "RmsNormAct2d", "RmsNormAct2dFp32"], IMAGE),
}


def differing_units(got: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Return the greatest distance in units in the last place (of terms of the row's size), and the part equal."""
    unit = torch.finfo(expected.dtype).eps * expected.float().abs().clamp(min=0.1)
    distance = (got.float() - expected.float()).abs() / unit
    return float(distance.max()), float((got == expected).double().mean())


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_is_swapped_and_computes_what_it_did(timm: ModuleType, name: str) -> None:
    layer = getattr(timm.layers, name)(16)
    disturb(layer)
    model = nn.Sequential(layer)
    plan = make_plan(model)
    assert [(decision.action, decision.reason) for decision in plan.decisions] == [("swap", "")]
    swapped = normswap.patch(copy.deepcopy(model))
    assert len(list(modules.fused_norms(swapped))) == 1
    for dtype, bound, part in ((torch.float32, 8, 0.5), (torch.bfloat16, 2, 0.999)):
        x = (3 * torch.randn(64, *LAYERS[name])).to(dtype)
        expected, got = model.to(dtype)(x), swapped.to(dtype)(x)
        assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
        worst, equal = differing_units(got, expected)
        assert worst <= bound and equal >= part


CHANNELS, BATCH = "normalises over channels", "normalises over the batch"
REFUSED = {
    "GroupNorm": CHANNELS,
    "GroupNorm1": CHANNELS,
    "GroupNormAct": CHANNELS,
    "BatchNormAct2d": BATCH,
    "SplitBatchNorm2d": BATCH,
    "FilterResponseNormAct2d": "rows are not independent of each other",
    "EvoNorm2dS0": "not a gain and a bias of one row",
    "FrozenBatchNormAct2d": "it applies stored statistics",
    "SimpleNorm": "standard deviation of a row that it does not centre",
    "SimpleNorm2d": "standard deviation of a row that it does not centre",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_norm_of_rows_alone_is_refused_with_its_reason(timm: ModuleType, name: str) -> None:
    layer = getattr(timm.layers, name)(16, *[4] * (name in ("GroupNorm", "GroupNormAct")))
    decision = make_plan(nn.Sequential(layer)).decisions[0]
    assert (decision.name, decision.cls, decision.action) == ("0", name, "refuse")
    assert REFUSED[name] in decision.reason


def test_a_dropout_and_an_activation_behind_a_norm_run_as_before(timm: ModuleType) -> None:
    layer = timm.layers.LayerNormAct2d(16, act_layer=nn.GELU, drop_layer=nn.Dropout, inplace=False)
    disturb(layer)
    model = nn.Sequential(layer).train()
    x = torch.randn(2, *IMAGE)

    def run() -> torch.Tensor:
        torch.manual_seed(1)
        return model(x)

    expected = run()
    normswap.patch(model)
    assert len(list(modules.fused_norms(model))) == 1
    torch.testing.assert_close(run(), expected)
    assert 0.3 < float((expected == 0).float().mean()) < 0.7


def test_an_activation_behind_a_norm_is_not_lost_to_a_twin_without(timm: ModuleType) -> None:
    """Two modules alike in class, settings and shapes, of which one ends in an activation."""
    bare, active = timm.layers.LayerNormAct(16, apply_act=False), timm.layers.LayerNormAct(16)
    x = torch.randn(64, 16)
    for model in (nn.Sequential(bare, nn.Linear(16, 16), active), nn.Sequential(active, nn.Linear(16, 16), bare)):
        disturb(model)
        expected = model(x)
        normswap.patch(nn.ModuleList([model, nn.LayerNorm(4)]))
        torch.testing.assert_close(model(x), expected)


@pytest.fixture
def fast_norm(timm: ModuleType) -> Iterator[None]:
    before = timm.layers.is_fast_norm()
    timm.layers.set_fast_norm(True)
    yield
    timm.layers.set_fast_norm(before)


@pytest.mark.parametrize("autocast", [False, True], ids=["plain", "autocast"])
@pytest.mark.usefixtures("fast_norm")
@torch.no_grad()
def test_fast_norms_keep_the_dtype_that_they_give(timm: ModuleType, autocast: bool) -> None:
    """A fast norm runs in autocast's narrow dtype, where torch's own LayerNorm goes back to float32."""
    model = build(timm, "vit")
    images = torch.randn(IMAGES)
    norm, x = model.norm, torch.randn(4, 7, 48)

    def run() -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model(images), norm(x)

    expected, expected_norm = run()
    with torch.no_grad():
        exact = copy.deepcopy(norm).double()(x.double())
    normswap.patch(model)
    got, got_norm = run()
    assert got_norm.dtype == expected_norm.dtype == (torch.bfloat16 if autocast else torch.float32)
    # Its own rounds the input and the gain beforehand, which a fused norm has no reason to.
    own, ours = (float((y.double() - exact).norm()) for y in (expected_norm, got_norm))
    assert ours <= 1.01 * own
    assert float((got - expected).norm()) <= (1e-2 if autocast else 1e-5) * float(expected.norm())
