"""What training and mixed precision do with norms: checkpointing, autocast, weight decay, gains kept in float32."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from contract_cases import FAMILIES, assert_same, count_originals, gradients, logits, patched, tiny
from torch import nn
from transformers import Trainer
from transformers.trainer_pt_utils import get_parameter_names

import normswap
from normswap import modules

pytestmark = pytest.mark.core


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "t5"])
def test_gradient_checkpointing_gives_equal_gradients(
    family: str, reentrant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, model = tiny(family), patched(family)
    calls = count_originals(monkeypatch, model)
    for one in (plain, model):
        expected = gradients(one)
        one.train()
        with warnings.catch_warnings():
            # Its name changes in a later transformers.
            warnings.simplefilter("ignore", FutureWarning)
            one.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
        one.enable_input_require_grads()
        seen: list[int] = []
        norm = next(module for module in one.modules() if "Norm" in type(module).__name__)
        norm.register_forward_pre_hook(lambda module, args, seen=seen: seen.append(1))
        if one is model:
            calls.clear()
        got = gradients(one)
        assert len(seen) == 2
        assert got.keys() == expected.keys()
        for name, gradient in got.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-6)
    assert calls == []
    wanted = gradients(plain)
    for name, gradient in gradients(model).items():
        torch.testing.assert_close(gradient, wanted[name], rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_autocast_gives_what_the_unpatched_model_gives(family: str) -> None:
    plain, model = tiny(family), patched(family)
    exact = logits(plain)
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = logits(plain), logits(model)
        wanted, found = gradients(plain), gradients(model)
    assert not torch.equal(expected.float(), exact)
    assert_same(got, expected, family)
    assert found.keys() == wanted.keys()
    for name, gradient in found.items():
        distance = (gradient - wanted[name]).norm() / wanted[name].norm().clamp(min=1e-8)
        assert float(distance) < 0.02, name


def test_a_norm_alone_under_autocast_gives_the_dtype_of_the_original() -> None:
    xs = [torch.randn(4, 32).to(dtype) for dtype in (torch.float32, torch.bfloat16)]
    norms = {type(norm): norm for family in FAMILIES for _, norm, _ in modules.fused_norms(patched(family))}
    checked = 0
    for norm in norms.values():
        if tuple(norm.weight.shape) != (32,):
            continue
        with torch.autocast("cpu", torch.bfloat16):
            for x in xs:
                expected = modules.original_forward(norm, x)
                for _ in range(2):
                    got = norm(x)
                    assert got.dtype == expected.dtype
                    assert torch.equal(got, expected)
        checked += 1
    assert checked >= 4


def decayed(model: Any) -> list[list[str]]:
    return [
        Trainer.get_decay_parameter_names(None, model),  # type: ignore[arg-type]
        get_parameter_names(model, [nn.LayerNorm]),
        get_parameter_names(model, [nn.LayerNorm], ["bias"]),
        get_parameter_names(model, sorted({type(m) for m in model.modules() if "Norm" in type(m).__name__}, key=str)),
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_weight_decay_is_for_the_same_parameters(family: str) -> None:
    plain, model = tiny(family), patched(family)
    expected = decayed(plain)
    assert 0 < len(expected[0]) < len(list(plain.parameters()))
    if family == "gpt2":
        # Nothing but its class exempts ln_1: the test is about isinstance, not about names.
        assert "transformer.h.0.ln_1.weight" not in expected[0]
    assert decayed(model) == expected
    assert decayed(normswap.unpatch(model)) == expected


def kept(model: Any, folder: Path, dtype: torch.dtype) -> tuple[torch.dtype, set[torch.dtype]]:
    """Save, load in half precision, patch; hold to the unpatched run; return the dtypes of linears and of gains."""
    model.save_pretrained(folder)
    plain, loaded = (type(model).from_pretrained(folder, dtype=dtype).eval() for _ in range(2))
    normswap.patch(loaded)
    gains = {
        getattr(norm, spec.gain_name).dtype
        for _, norm, spec in modules.fused_norms(loaded)
        if spec.gain_name is not None
    }
    expected = logits(plain)
    assert torch.equal(logits(loaded), expected)
    assert {name: p.dtype for name, p in loaded.named_parameters()} == {n: p.dtype for n, p in plain.named_parameters()}
    loaded.save_pretrained(folder / "again")
    again = type(model).from_pretrained(folder / "again", dtype=dtype)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in again.state_dict().items())
    return loaded.get_input_embeddings().weight.dtype, gains


def test_gains_that_transformers_keeps_in_float32_stay_there(tmp_path: Path) -> None:
    model = tiny("gpt_oss")
    assert "input_layernorm" in model._keep_in_fp32_modules
    assert kept(model, tmp_path, torch.float16) == (torch.float16, {torch.float32})


@pytest.mark.zoo
def test_gains_that_are_strictly_kept_in_float32_stay_there(tmp_path: Path, zoo: Path) -> None:
    os.environ.setdefault("TINY_NO_EXTRAS", "1")
    sys.path.insert(0, str(zoo))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import tiny as builder

            if "deepseek_v4" not in builder.CONFIG_MAPPING_NAMES:
                pytest.skip("this transformers has no deepseek_v4")
            model = builder.tiny_model("deepseek_v4")
            builder.perturb_norms_(model)
    except ImportError as error:
        pytest.skip(f"the zoo needs a later transformers: {error}")
    finally:
        sys.path.remove(str(zoo))
    dtype, gains = kept(model, tmp_path, torch.bfloat16)
    assert dtype == torch.bfloat16
    assert torch.float32 in gains
