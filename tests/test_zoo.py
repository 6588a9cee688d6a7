"""Recognition and swap on tiny models of the transformers architectures: the genuine classes are the oracle."""

from __future__ import annotations

import importlib
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import transformers
from torch import nn

import normswap
from normswap import modules
from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter
from normswap.plan import Plan, make_plan

pytestmark = [pytest.mark.zoo, pytest.mark.core]

NAMED = """
    llama mistral mixtral qwen2 qwen3 gemma gemma2 gemma3_text phi phi3 gpt2 gpt_neox opt bloom falcon bert
    roberta t5 bart whisper vit clip deepseek_v3 olmo olmo2 cohere gpt_oss mamba
""".split()  # noqa: SIM905
MORE = """
    albert apertus arcee bamba biogpt blip-2 cohere2 convnext deberta deberta-v2 deepseek_v2 deit dinov2
    distilbert electra ernie4_5 exaone4 falcon_mamba gemma3n_text glm glm4 glm4_moe granite granitemoe hubert
    jamba lfm2 llama4_text longcat_flash mamba2 minimax modernbert mpt mt5 olmoe pegasus persimmon phimoe
    pixtral qwen2_moe qwen2_vl qwen3_moe qwen3_next recurrent_gemma siglip smollm3 stablelm starcoder2 swin
    wav2vec2 xglm xlstm zamba2
""".split()  # noqa: SIM905
# What is no plain RMSNorm or LayerNorm over the last dimension, by the reason that is given.
NOT_PLAIN = (
    "its forward takes (hidden_states, gate)",
    "normalises over channels",
    "normalises over the batch",
    "channels of a channels-first image",
    "not enough values to unpack (expected 4",
)


@pytest.fixture(scope="module")
def tiny(zoo: Path) -> ModuleType:
    os.environ.setdefault("TINY_NO_EXTRAS", "1")
    sys.path.insert(0, str(zoo))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("tiny")
    except ImportError as error:
        pytest.skip(f"the zoo needs a later transformers than {transformers.__version__}: {error}")
    finally:
        sys.path.remove(str(zoo))


@pytest.fixture
def build(tiny: ModuleType) -> Callable[[str], nn.Module]:
    def build(model_type: str) -> nn.Module:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                model = tiny.tiny_model(model_type)
            except (tiny.TinyError, KeyError) as error:
                pytest.skip(f"{model_type} is not built by this transformers: {error}")
            tiny.perturb_norms_(model)
        return model

    return build


def check_every_norm(model: nn.Module, plan: Plan) -> None:
    """Each swapped norm against its original, on fresh rows, in float32 and bfloat16, with its own parameters."""
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype)
        for decision in plan.swaps:
            module, spec = model.get_submodule(decision.name), decision.spec
            assert spec is not None
            width = spec.width or 64
            x = torch.randn(max(4, 120_000 // width), width).to(dtype)
            meter = NormMeter(spec)
            gain, bias = (getattr(module, name) if name else None for name in (spec.gain_name, spec.bias_name))
            meter.add(x, gain, bias, modules.original_forward(module, x), module(x))
            _, failures = judge_norm(decision.name, meter, Criterion())
            assert not failures


@pytest.mark.parametrize("model_type", [*NAMED, *MORE])
@torch.no_grad()
def test_every_plain_norm_is_swapped_within_the_unit_bound(build: Callable[[str], nn.Module], model_type: str) -> None:
    model = build(model_type)
    plan = make_plan(model)
    plain = {name for name, module in model.named_modules() if type(module) is nn.LayerNorm}
    assert plain <= {decision.name for decision in plan.swaps}
    for decision in plan.refusals:
        assert any(words in decision.reason for words in NOT_PLAIN), f"{decision.name}: {decision.reason}"
    assert plan.swaps
    normswap.patch(model, verify=False)
    assert len(list(modules.fused_norms(model))) == len(plan.swaps)
    check_every_norm(model, plan)


@pytest.mark.parametrize("model_type", NAMED)
def test_whole_models_compute_the_same_and_call_no_original(
    build: Callable[[str], nn.Module], tiny: ModuleType, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(model_type)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        inputs = tiny.tiny_inputs(model)
        expected = model(**inputs)[0]
        normswap.patch(model)
        calls = []
        for _, module, _ in list(modules.fused_norms(model)):
            original = type(module)._normswap_original
            forward = original.forward
            monkeypatch.setattr(original, "forward", lambda self, *a, f=forward: calls.append(self) or f(self, *a))
        got = model(**inputs)[0]
    assert calls == []
    assert float((got - expected).norm()) <= 1e-5 * float(expected.norm())
