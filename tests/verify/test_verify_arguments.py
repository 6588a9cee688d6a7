"""Arguments of `normswap.verify` that cannot be used: each is told by its name, before anything runs."""

from __future__ import annotations

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

import normswap
from normswap.errors import UsageError

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"checkpoint": 3}, "expected checkpoint to be a module, a folder or a Hub id, got 3"),
        ({"against": 3}, "expected against to be a module, a folder or a Hub id, got 3"),
        ({"criterion": {"ratio_max": 2}}, "expected criterion to be a normswap.Criterion, got {'ratio_max': 2}"),
        ({"generate": -1}, "expected generate to be 0 or more, got -1"),
        ({"reference": "bf16"}, "expected the reference in float32 or float64, got 'bf16'"),
    ],
)
def test_an_argument_that_cannot_be_used_is_named(options: dict[str, object], told: str) -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    with pytest.raises(UsageError) as caught:
        normswap.verify(**{"checkpoint": model, **options})  # type: ignore[arg-type]
    assert str(caught.value) == told
