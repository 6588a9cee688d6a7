"""A gate that comes first, a gain for each head, and a norm that is a function."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_mixing import MixingConfig


def unit(x, eps=1e-6):
    return x * torch.rsqrt((x * x).sum(dim=-1, keepdim=True) + eps)


class Blend(nn.Module):
    """A gated RMSNorm that takes its gate before its row."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, gate, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float() * nn.functional.silu(gate.float())).to(x.dtype)


class PerHead(nn.Module):
    """An RMSNorm of each head with a gain of its own."""

    def __init__(self, heads, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class Mixer(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.inner = nn.Linear(dim, 3 * dim)
        self.heads = PerHead(4, dim // 4)
        self.blend = Blend(dim)
        self.outer = nn.Linear(dim, dim)

    def forward(self, x):
        query, key, gate = self.inner(x).chunk(3, -1)
        query = self.heads(query.unflatten(-1, (4, -1))).flatten(-2)
        state = torch.cumsum(unit(query) * unit(key), -2) / 8.0
        return x + self.outer(self.blend(gate, state + x))


class MixingForCausalLM(PreTrainedModel):
    config_class = MixingConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Mixer(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))
