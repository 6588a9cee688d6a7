"""Recognition and swap on tiny models of the transformers architectures: the genuine classes are the oracle."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import normswap
from normswap import modules
from normswap.plan import make_plan

pytestmark = [pytest.mark.zoo, pytest.mark.core]

LIB = Path(__file__).resolve().parent.parent / "benchmarks" / "lib"
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

# Norms of rows that are refused all the same, by the reason that is given.
REFUSED = ("not enough values to unpack (expected 4",)


@pytest.fixture(scope="module")
def lib() -> Iterator[SimpleNamespace]:
    """What the coverage is measured with."""
    names = ("coverage_figures", "coverage_model", "coverage_zoo")
    sys.path.insert(0, str(LIB))
    try:
        yield SimpleNamespace(**{name.removeprefix("coverage_"): __import__(name) for name in names})
    finally:
        sys.path.remove(str(LIB))
        for name in [name for name in sys.modules if name.startswith("coverage_")]:
            del sys.modules[name]


@pytest.fixture(scope="module")
def walk(lib: SimpleNamespace, zoo: Path) -> Any:
    os.environ.setdefault("TINY_NO_EXTRAS", "1")
    return lib.model.Walk(zoo)


@pytest.mark.parametrize("model_type", [*NAMED, *MORE])
def test_every_norm_of_rows_is_swapped_within_the_unit_bound(lib: SimpleNamespace, walk: Any, model_type: str) -> None:
    """Each beside its own original in float32, float16 and bfloat16, and the whole model where it runs."""
    found = walk.measure(model_type)
    if "error" in found:
        pytest.skip(f"{model_type} is not built by this transformers: {found['error']}")
    figures = lib.figures.summarise([found], liger=False)
    assert figures.crashed == {} and figures.outside == {} and figures.amiss == {}
    missed = [entry for entry in figures.refused if not entry.kind]
    assert [entry for entry in missed if not any(words in entry.reason for words in REFUSED)] == []
    assert figures.swapped == figures.norms - sum(entry.count for entry in missed) > 0
    # The original's code runs in no dtype that it has a formula for, and in float32 it always has one.
    assert figures.own_code["float32"] == {} and figures.reached[1] == 0


@pytest.mark.parametrize("model_type", NAMED)
def test_whole_models_are_patched_and_call_no_original(
    lib: SimpleNamespace, walk: Any, model_type: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        model = lib.zoo.build(walk.tiny, model_type)
    except Exception as error:
        pytest.skip(f"{model_type} is not built by this transformers: {error}")
    plain = {name for name, module in model.named_modules() if type(module) is nn.LayerNorm}
    assert plain <= {decision.name for decision in make_plan(model).swaps}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        inputs = walk.tiny.tiny_inputs(model)
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
