"""A norm over the channels of an image, with the channels first."""

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from .configuration_picture import PictureConfig


class Contrast(nn.Module):
    """A LayerNorm of each pixel."""

    def __init__(self, channels):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))

    def forward(self, x):
        mean = x.float().mean(1, keepdim=True)
        variance = (x.float() - mean).pow(2).mean(1, keepdim=True)
        y = (x.float() - mean) / torch.sqrt(variance + 1e-6)
        return (y * self.weight.float()[:, None, None] + self.bias.float()[:, None, None]).to(x.dtype)


class PictureModel(PreTrainedModel):
    config_class = PictureConfig
    main_input_name = "pixel_values"

    def __init__(self, config):
        super().__init__(config)
        dim = config.hidden_size
        self.patches = nn.Conv2d(config.num_channels, dim, 4, 4)
        self.contrast = Contrast(dim)
        self.mix = nn.Conv2d(dim, dim, 1)
        self.statistics = nn.BatchNorm2d(dim)
        self.norm = nn.LayerNorm(dim)
        self.post_init()

    def _init_weights(self, module):
        pass

    def forward(self, pixel_values):
        x = self.contrast(self.patches(pixel_values))
        x = self.statistics(x + torch.tanh(self.mix(x)))
        return BaseModelOutput(last_hidden_state=self.norm(x.flatten(2).transpose(1, 2)))
