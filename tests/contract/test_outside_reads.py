"""What other code reads from a norm, or misses on it: attributes, names of classes, tensors that are not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import handwritten as hw
import pytest
import torch
import transformers
from contract_cases import FAMILIES, assert_same, logits, patched, tiny
from torch import nn

import normswap
from normswap import modules
from normswap.wrapping import original_class

pytestmark = pytest.mark.core


def attributes(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name != "_normswap"}


@pytest.mark.parametrize("family", FAMILIES)
def test_everything_that_was_readable_is_readable(family: str) -> None:
    model = tiny(family)
    before = {name: (type(module), attributes(module), dir(module)) for name, module in model.named_modules()}
    normswap.patch(model)
    for name, module in model.named_modules():
        cls, values, names = before[name]
        assert isinstance(module, cls)
        assert (type(module).__name__, type(module).__module__) == (cls.__name__, cls.__module__)
        assert type(module).__qualname__ == cls.__qualname__
        assert attributes(module) == values
        assert set(names) <= set(dir(module))
        assert type(module).__doc__ == cls.__doc__
    assert sum(isinstance(module, modules.FusedNorm) for module in model.modules()) >= 2


def test_a_fused_path_that_reads_gain_and_eps_past_the_norm_sees_them() -> None:
    model = patched("mamba2")
    for layer, plain in zip(model.backbone.layers, tiny("mamba2").backbone.layers, strict=True):
        norm, other = layer.mixer.norm, plain.mixer.norm
        assert norm.variance_epsilon == other.variance_epsilon > 0
        assert isinstance(norm.weight, nn.Parameter)
        assert torch.equal(norm.weight, other.weight)
        # The block casts the residual stream to this.
        assert layer.norm.weight.dtype is torch.float32
        hidden = torch.randn(2, 5, 32)
        assert torch.equal(layer.norm(hidden.to(dtype=layer.norm.weight.dtype)), plain.norm(hidden))


def test_a_norm_without_gain_has_none_afterwards() -> None:
    norm = nn.LayerNorm(8, elementwise_affine=False)
    normswap.patch(nn.Sequential(norm))
    assert isinstance(norm, modules.FusedNorm)
    assert norm.weight is None
    assert norm.bias is None
    x = torch.randn(3, 8)
    assert torch.equal(norm(x), modules.original_forward(norm, x))


def class_of(path: str) -> Any:
    """A class of transformers by its module below models and its name; a skip where it is absent."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(__import__(f"transformers.models.{module}", fromlist=[name]), name)
    except (ImportError, AttributeError):
        pytest.skip(f"transformers {transformers.__version__} has no {path}")


def test_a_norm_without_a_weight_attribute_gets_none() -> None:
    norm = class_of("gemma3n.modeling_gemma3n.Gemma3nRMSNorm")(16, with_scale=False)
    missing = hasattr(norm, "weight")
    names = set(vars(norm))
    normswap.patch(nn.Sequential(norm))
    assert isinstance(norm, modules.FusedNorm)
    assert hasattr(norm, "weight") is missing
    assert set(vars(norm)) - names == {"_normswap"}
    x = torch.randn(3, 16)
    torch.testing.assert_close(norm(x), modules.original_forward(norm, x), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("make", [lambda: hw.Scale(16), lambda: hw.BufferNorm(16)], ids=["gamma", "buffer"])
def test_a_gain_by_another_name_keeps_it(make: Callable[[], nn.Module]) -> None:
    norm = make()
    ((name, gain),) = norm.state_dict().items()
    nn.init.normal_(gain)
    x = torch.randn(3, 16)
    expected = norm(x)
    normswap.patch(nn.Sequential(norm))
    assert isinstance(norm, modules.FusedNorm)
    assert list(norm.state_dict()) == [name]
    assert torch.equal(norm(x), expected)
    gain.mul_(2.0)
    assert torch.equal(norm(x), modules.original_forward(norm, x))
    assert not torch.allclose(norm(x), expected)


def test_a_gamma_beside_an_inner_norm_stays_where_it_is() -> None:
    norm = class_of("moonshine_streaming.modeling_moonshine_streaming.MoonshineStreamingLayerNorm")(16)
    nn.init.normal_(norm.gamma)
    x = torch.randn(3, 16)
    expected = norm(x)
    normswap.patch(nn.Sequential(norm))
    assert list(modules.fused_norms(norm))
    assert list(norm.state_dict()) == ["gamma"]
    assert torch.equal(norm(x), expected)


def test_two_kinds_of_gain_in_one_model_each_keep_their_own() -> None:
    model = patched("qwen3_next")
    gains = {original_class(norm).__name__: spec.gain for _, norm, spec in modules.fused_norms(model)}
    assert gains["Qwen3NextRMSNorm"] == "1+w"
    assert gains["Qwen3NextRMSNormGated"] == "w"
    assert_same(logits(model), logits(tiny("qwen3_next")), "qwen3_next")


def test_tied_gains_of_a_shared_block_stay_tied(tmp_path: Path) -> None:
    if int(transformers.__version__.partition(".")[0]) < 5:
        pytest.skip("transformers 4 names the layers of Zamba otherwise")
    torch.manual_seed(0)
    config = transformers.ZambaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=2,
        n_mamba_heads=2,
        layers_block_type=["linear_attention", "hybrid", "linear_attention", "hybrid"],
        use_mamba_kernels=False,
    )
    model = transformers.ZambaForCausalLM(config).eval()

    def ties() -> list[list[str]]:
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if "norm" in name:
                names.setdefault(id(parameter), []).append(name)
        return sorted(names.values())

    before = ties()
    assert max(map(len, before)) > 1
    model.save_pretrained(tmp_path / "before")
    normswap.patch(model)
    assert ties() == before
    model.save_pretrained(tmp_path / "after")
    saved, wanted = (tmp_path / name / "model.safetensors" for name in ("after", "before"))
    assert saved.read_bytes() == wanted.read_bytes()
    model.load_state_dict(model.state_dict())
    assert ties() == before
    normswap.unpatch(model)
    assert ties() == before
