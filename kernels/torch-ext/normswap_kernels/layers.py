"""Stateless layers for the Hugging Face ``kernels`` loader.

The loader puts a layer's ``forward`` in the place of the forward of a module that exists already, so a layer here
has no state of its own: it reads the attributes that the class it replaces has set. A layer stands for one formula,
and a class that computes another must be given the layer for it: transformers tags 145 classes ``"RMSNorm"``, of which
131 round before the gain (`RMSNorm`) and 14, those of OLMo 2, GPT-OSS and DeepSeek-V4 among them, after it
(`RMSNormGainFirst`).
"""

from __future__ import annotations

import torch
from torch import nn

from .formula import Activation
from .fused import gated_rms_norm
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


class RMSNormGainFirst(nn.Module):
    """OLMo's RMSNorm: the row is multiplied by the weight and then rounded, once.

    Reads ``weight`` ``(N,)`` and ``variance_epsilon``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    variance_epsilon: float

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden_states`` ``(..., N)``; the result has its dtype."""
        return rms_norm(hidden_states, self.weight, eps=self.variance_epsilon)


class RMSNormZeroCentered(nn.Module):
    """Qwen 3.5's RMSNorm: the gain is ``1 + weight``, and the product is rounded, once.

    Reads ``weight`` ``(N,)`` and ``eps``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    eps: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise ``x`` ``(..., N)``; the result has its dtype."""
        return rms_norm(x, self.weight, eps=self.eps, offset=1.0)


class RMSNormGated(nn.Module):
    """Qwen3-Next's gated RMSNorm: row, product with the weight and product with the activated gate are each rounded.

    Reads ``weight`` ``(N,)``, ``variance_epsilon`` and ``activation``, ``"silu"`` or ``"sigmoid"``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    variance_epsilon: float
    activation: Activation

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden_states`` ``(..., N)`` and multiply by the activation of ``gate``, of its shape."""
        weight, dtype = self.weight, hidden_states.dtype
        return gated_rms_norm(
            hidden_states,
            gate,
            weight,
            eps=self.variance_epsilon,
            gate_position="after",
            activation=self.activation,
            round_dtype=dtype,
            product_dtype=dtype if weight.dtype == dtype else torch.promote_types(dtype, weight.dtype),
        )


class RMSNormGatedGainFirst(nn.Module):
    """Kimi-Linear's gated RMSNorm: as `RMSNormGated`, but rounded once, at the end.

    Reads ``weight`` ``(N,)``, ``variance_epsilon`` and ``activation``, ``"silu"`` or ``"sigmoid"``.
    """

    can_torch_compile = True
    has_backward = True

    weight: torch.Tensor
    variance_epsilon: float
    activation: Activation

    def forward(self, hidden_states: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Normalise ``hidden_states`` ``(..., N)`` and multiply by the activation of ``gate``, of its shape."""
        return gated_rms_norm(
            hidden_states,
            gate,
            self.weight,
            eps=self.variance_epsilon,
            gate_position="after",
            activation=self.activation,
        )


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
        """Normalise ``input`` ``(..., N)``; the result has its dtype, or float32 under autocast on a GPU."""
        return layer_norm(input, self.weight, self.bias, eps=self.eps)
