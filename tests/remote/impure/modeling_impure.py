"""Norms that do something else besides: none of them may be swapped, and none may pass in silence."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_impure import ImpureConfig


class Gain(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def normed(self, x):
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class RMSNorm(Gain):
    """Returns its input too."""

    def forward(self, x):
        return self.normed(x), x


class Twin(Gain):
    """The same under a name that tells nothing."""

    def forward(self, x):
        return self.normed(x), x


class InPlaceNorm(Gain):
    """Halves its input."""

    def forward(self, x):
        y = self.normed(x)
        x.mul_(0.5)
        return y


class Halving(InPlaceNorm):
    """The same under a name that tells nothing."""


class NoisyNorm(Gain):
    """Drops some of what it normalised when it is trained."""

    def forward(self, x):
        return nn.functional.dropout(self.normed(x), 0.1, self.training)


class Fuse(Gain):
    """Takes what else there is to add, and by how much."""

    def forward(self, x, residual, weight_of_residual):
        return self.normed(x + weight_of_residual * residual)


class Counter(Gain):
    """Counts how often it is called."""

    def __init__(self, dim):
        super().__init__(dim)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        return self.normed(x)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.pair = RMSNorm(dim)
        self.twin = Twin(dim)
        self.in_place = InPlaceNorm(dim)
        self.halving = Halving(dim)
        self.noisy = NoisyNorm(dim)
        self.fuse = Fuse(dim)
        self.counter = Counter(dim)
        self.plain = nn.LayerNorm(dim)
        self.mix = nn.Linear(dim, dim)

    def forward(self, x):
        y, x = self.pair(x)
        y, _ = self.twin(self.mix(y))
        y = self.halving(self.in_place(y + x))
        y = self.fuse(self.noisy(y), x, 0.5)
        return x + self.plain(self.mix(self.counter(y)))


class ImpureForCausalLM(PreTrainedModel):
    config_class = ImpureConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Block(config.hidden_size) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, input_ids, attention_mask=None):
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x)
        return CausalLMOutput(logits=self.head(x))
