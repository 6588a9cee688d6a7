"""Norms (and things that only look like norms) as people write them, with names that mislead."""

from __future__ import annotations

import torch
from torch import nn


class Scale(nn.Module):
    """An RMSNorm in Llama's cast order under an unlikely name, its gain called gamma."""

    def __init__(self, dim: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(dim))
        self.tiny = eps

    def forward(self, h: torch.Tensor) -> torch.Tensor:
        wide = h.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.tiny)
        return self.gamma * wide.to(h.dtype)


class RMSNorm(nn.Module):
    """A LayerNorm under the name of the other kind, with two-pass statistics and eps written in the code."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.shift = nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        centred = wide - wide.mean(-1, keepdim=True)
        wide = centred / torch.sqrt(centred.pow(2).mean(-1, keepdim=True) + 3e-5)
        return (wide * self.weight.float() + self.shift.float()).to(x.dtype)


class LlamaRMSNorm(nn.Module):
    """``1 + w`` under Llama's name."""

    def __init__(self, dim: int, variance_epsilon: float = 1e-5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(dim))
        self.variance_epsilon = variance_epsilon

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (wide * (1.0 + self.weight.float())).to(hidden_states.dtype)


class BareNorm(nn.Module):
    """RMSNorm with eps = 0 and no gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(x.dtype)


class BufferNorm(nn.Module):
    """RMSNorm whose gain is a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.gain.float()).to(x.dtype)


class RowNorm(nn.Module):
    """What the norms below start from."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class TupleNorm(RowNorm):
    """Returns the input beside the result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.normed(x), x


class MutatingNorm(RowNorm):
    """Writes into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x)
        x.mul_(0.5)
        return y


class DropoutNorm(RowNorm):
    """Drops elements in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.normed(x), 0.1, self.training)


class NarrowNorm(RowNorm):
    """Statistics in the dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class ScaleRoundedNorm(nn.Module):
    """Rounds what it multiplies a row by, as DeepSeek-V4's norm without gain does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class OutsideEpsNorm(RowNorm):
    """eps outside the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * self.weight.float()).to(x.dtype)


class GroupedNorm(RowNorm):
    """Four groups a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().unflatten(-1, (4, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide.flatten(-2) * self.weight.float()).to(x.dtype)


class PartialNorm(RowNorm):
    """Statistics from the first half of the columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        part = wide[..., : x.shape[-1] // 2]
        wide = wide * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class GatedNorm(RowNorm):
    """Takes a gate."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = self.normed(x)
        return y if gate is None else y * nn.functional.silu(gate)


class SequenceNorm(RowNorm):
    """Subtracts the mean over the sequence, so that rows are not independent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x - x.mean(-2, keepdim=True))


class NoNorm(RowNorm):
    """Scales, and normalises nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ExpNorm(RowNorm):
    """Its gain is the exponential of its parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().exp()).to(x.dtype)


class ClippingNorm(RowNorm):
    """Clips its input far above what is usual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x.clamp(-1e5, 1e5))


class ForgivingNorm(RowNorm):
    """Takes NaN for zero."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x.nan_to_num())


class PerHeadNorm(nn.Module):
    """A gain for each head."""

    def __init__(self, heads: int = 4, dim: int = 16) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(heads, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class Act(nn.Module):
    """No norm at all."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x)


class NormalizeNorm(RowNorm):
    """RMSNorm by ``F.normalize``, whose eps is a clamp of 1e-12: rows of zeros stay zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.normalize(x.float(), dim=-1) * x.shape[-1] ** 0.5
        return (wide * self.weight.float()).to(x.dtype)


class TinyEpsNorm(RowNorm):
    """eps so small that only rows of zeros see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-30)
        return (wide * self.weight.float()).to(x.dtype)


class ClampedGainNorm(RowNorm):
    """Clamps its gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().clamp(-100, 100)).to(x.dtype)


class LoneRowNorm(RowNorm):
    """Computes something else for a batch of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * (1.01 if x.shape[0] == 1 else 1.0)


class DetachedNorm(RowNorm):
    """No gradient through the statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6).detach()
        return (wide * self.weight.float()).to(x.dtype)


class FrozenGainNorm(RowNorm):
    """No gradient to the gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().detach()).to(x.dtype)


class CountingNorm(RowNorm):
    """Counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.normed(x)
