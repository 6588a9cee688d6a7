"""Stateless layers for the Hugging Face ``kernels`` loader.

The loader puts a layer's ``forward`` in the place of the forward of a module that exists already, so a layer here
has no state of its own: it reads the attributes that the class it replaces has set.
"""

from __future__ import annotations

import torch
from torch import nn

from .ops import layer_norm, rms_norm


class RMSNorm(nn.Module):
    """Llama's RMSNorm: the row is rounded to the input's dtype and then multiplied by the weight.

    Reads ``weight`` ``(N,)`` and ``variance_epsilon``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden_states`` ``(..., N)``; the result has the promoted dtype of input and weight."""
        weight, dtype = self.weight, hidden_states.dtype
        out = dtype if weight.dtype == dtype else torch.promote_types(dtype, weight.dtype)
        return rms_norm(hidden_states, weight, eps=self.variance_epsilon, round_dtype=dtype, out_dtype=out)


class LayerNorm(nn.Module):
    """``torch.nn.LayerNorm`` over the last dimension: one rounding, at the end.

    Reads ``weight`` ``(N,)`` or None, ``bias`` ``(N,)`` or None, and ``eps``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise ``input`` ``(..., N)``; the result has its dtype."""
        return layer_norm(input, self.weight, self.bias, eps=self.eps)
