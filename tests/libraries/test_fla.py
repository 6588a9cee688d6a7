"""The norms of flash-linear-attention. Their forward is a Triton kernel, which only a GPU runs."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from aside import bring
from torch import nn

import normswap
from normswap import modules

WIDTH = 64
ROWS = ("RMSNorm", "LayerNorm", "L2Norm")
GATED = ("FusedRMSNormGated", "FusedLayerNormGated")


@pytest.fixture(scope="module")
def fla() -> ModuleType:
    return bring("fla.modules")


def build(fla: ModuleType, name: str) -> nn.Module:
    norm = {"GroupNorm": lambda: fla.GroupNorm(4, WIDTH), "L2Norm": lambda: fla.L2Norm()}.get(
        name, lambda: getattr(fla, name)(WIDTH)
    )()
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return norm


@pytest.mark.parametrize("name", [*ROWS, "GroupNorm", *GATED])
def test_on_a_cpu_what_cannot_run_is_refused_and_left_as_it_is(fla: ModuleType, name: str) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU, on which they run")
    model = nn.Sequential(build(fla, name), nn.LayerNorm(WIDTH))
    normswap.patch(model)
    (refusal,) = normswap.inspect(model).plan.refusals
    assert (refusal.name, refusal.cls) == ("0", name)
    assert refusal.spec is None
    assert type(model[0]) is getattr(fla, name)
    assert [where for where, _, _ in modules.fused_norms(model)] == ["1"]
    x = torch.randn(2, WIDTH)
    with pytest.raises(RuntimeError, match="0 active drivers"):
        model[0](x, *[x] * (name in GATED))
    # The reason is what a call says.
    assert "0 active drivers" in refusal.reason


def test_what_is_told_of_a_model_of_them_is_one_line_a_kind(fla: ModuleType) -> None:
    layers = nn.ModuleList(
        nn.ModuleDict({"norm": build(fla, "RMSNorm"), "out": build(fla, "FusedRMSNormGated")}) for _ in range(3)
    )
    rows = normswap.inspect(layers).plan.rows()
    assert {(row["pattern"], row["count"], row["action"]) for row in rows} == {
        ("*.norm", 3, "refuse"),
        ("*.out", 3, "refuse"),
    }
