"""Norms whose names lie: only what they compute tells them apart."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_misleading import MisleadingConfig


class RMSNorm(nn.Module):
    """A LayerNorm."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + 3e-5)
        return (wide * self.weight.float() + self.shift.float()).to(x.dtype)


class Scale(nn.Module):
    """An RMSNorm in Llama's cast order."""

    def __init__(self, dim, tiny=1e-6):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.tiny = tiny

    def forward(self, h):
        wide = h.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.gamma * wide.to(h.dtype)


class LlamaRMSNorm(nn.Module):
    """An RMSNorm with gain 1 + w."""

    def __init__(self, dim, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.variance_epsilon = eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).to(hidden_states.dtype)


class Calibrated(nn.Module):
    """An RMSNorm whose gain is a buffer."""

    def __init__(self, dim):
        super().__init__()
        self.register_buffer("gain", torch.ones(dim))

    def forward(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.gain.float()).to(x.dtype)


class NoNorm(nn.Module):
    """A gain alone; nothing is normalised."""

    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * self.weight


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.before = RMSNorm(dim)
        self.mix = nn.Linear(dim, dim)
        self.between = Scale(dim)
        self.up = nn.Linear(dim, dim)
        self.after = LlamaRMSNorm(dim)
        self.norm = NoNorm(dim)

    def forward(self, x):
        x = x + torch.tanh(self.mix(self.before(x)))
        return self.norm(x + self.after(self.up(self.between(x))))


class MisleadingForCausalLM(PreTrainedModel):
    config_class = MisleadingConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.final = Calibrated(config.hidden_size)
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(self.final(x)))
