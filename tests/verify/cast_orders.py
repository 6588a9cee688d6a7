"""Norms with the other cast order: the same numbers in float32, other roundings in half precision."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

import normswap
from normswap.spec import NormSpec

CONFIGURATION = """
from transformers import PretrainedConfig


class OrderedConfig(PretrainedConfig):
    model_type = "cast_order_of_the_tests"

    def __init__(self, hidden_size=32, num_hidden_layers=3, vocab_size=96, **kwargs):
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        self.vocab_size = vocab_size
        super().__init__(**kwargs)
"""
MODELING = """
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_ordered import OrderedConfig


class OrderedRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return RESULT


class OrderedLayer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = OrderedRMSNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class OrderedForCausalLM(PreTrainedModel):
    config_class = OrderedConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([OrderedLayer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.norm = OrderedRMSNorm(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(self.norm(x)))
"""
RESULTS = {"before_gain": "self.weight * wide.to(x.dtype)", "after_gain": "(self.weight.float() * wide).to(x.dtype)"}


class RecastNorm(nn.Module):
    """A norm of a model, with its gain applied on the other side of the cast."""

    def __init__(self, original: nn.Module, spec: NormSpec) -> None:
        super().__init__()
        assert spec.gain_name is not None
        self.weight = getattr(original, spec.gain_name)
        self.bias = getattr(original, spec.bias_name) if spec.bias_name else None
        self.eps = spec.eps
        self.offset = spec.offset
        self.centre = spec.kind == "layer"
        self.late = spec.cast == "before_gain"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise the rows of `x` ``(..., width)``."""
        wide = x.float()
        if self.centre:
            wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.late:
            wide = wide * (self.weight.float() + self.offset)
            return (wide if self.bias is None else wide + self.bias.float()).to(x.dtype)
        gain = self.weight + self.offset if self.offset else self.weight
        result = wide.to(x.dtype) * gain
        return result if self.bias is None else result + self.bias


def recast(model: PreTrainedModel) -> tuple[PreTrainedModel, list[str]]:
    """Return a copy with every norm of the other cast order, and the norms' names."""
    other = copy.deepcopy(model)
    names = []
    for decision in normswap.inspect(model).plan.swaps:
        parent, _, leaf = decision.name.rpartition(".")
        assert decision.spec is not None
        setattr(other.get_submodule(parent), leaf, RecastNorm(other.get_submodule(decision.name), decision.spec))
        names.append(decision.name)
    return other, names


def remote(folder: Path, cast: str) -> Path:
    """Write a checkpoint's configuration and code, with norms of one cast order; returns the folder."""
    folder.mkdir()
    (folder / "configuration_ordered.py").write_text(CONFIGURATION)
    (folder / "modeling_ordered.py").write_text(MODELING.replace("RESULT", RESULTS[cast]))
    (folder / "config.json").write_text(
        '{"model_type": "cast_order_of_the_tests", "architectures": ["OrderedForCausalLM"], "dtype": "bfloat16", '
        '"auto_map": {"AutoConfig": "configuration_ordered.OrderedConfig", '
        '"AutoModelForCausalLM": "modeling_ordered.OrderedForCausalLM"}}'
    )
    return folder
