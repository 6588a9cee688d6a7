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


class _Base(nn.Module):
    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def normed(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class TupleNorm(_Base):
    """Returns the input beside the result."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.normed(x), x


class MutatingNorm(_Base):
    """Writes into its input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x)
        x.mul_(0.5)
        return y


class DropoutNorm(_Base):
    """Drops elements in training mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.normed(x), 0.1, self.training)


class NarrowNorm(_Base):
    """Statistics in the dtype of the input."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class OutsideEpsNorm(_Base):
    """eps outside the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide / (wide.pow(2).mean(-1, keepdim=True).sqrt() + 1e-3) * self.weight.float()).to(x.dtype)


class GroupedNorm(_Base):
    """Four groups a row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().unflatten(-1, (4, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide.flatten(-2) * self.weight.float()).to(x.dtype)


class PartialNorm(_Base):
    """Statistics from the first half of the columns."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        part = wide[..., : x.shape[-1] // 2]
        wide = wide * torch.rsqrt(part.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float()).to(x.dtype)


class GatedNorm(_Base):
    """Takes a gate."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        y = self.normed(x)
        return y if gate is None else y * nn.functional.silu(gate)


class SequenceNorm(_Base):
    """Subtracts the mean over the sequence, so that rows are not independent."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x - x.mean(-2, keepdim=True))


class NoNorm(_Base):
    """Scales, and normalises nothing."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight


class ExpNorm(_Base):
    """Its gain is the exponential of its parameter."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().exp()).to(x.dtype)


class ClippingNorm(_Base):
    """Clips its input far above what is usual."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x.clamp(-1e5, 1e5))


class ForgivingNorm(_Base):
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


class NormalizeNorm(_Base):
    """RMSNorm by ``F.normalize``, whose eps is a clamp of 1e-12: rows of zeros stay zeros."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = nn.functional.normalize(x.float(), dim=-1) * x.shape[-1] ** 0.5
        return (wide * self.weight.float()).to(x.dtype)


class TinyEpsNorm(_Base):
    """eps so small that only rows of zeros see it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-30)
        return (wide * self.weight.float()).to(x.dtype)


class ClampedGainNorm(_Base):
    """Clamps its gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().clamp(-100, 100)).to(x.dtype)


class LoneRowNorm(_Base):
    """Computes something else for a batch of one."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * (1.01 if x.shape[0] == 1 else 1.0)


class DetachedNorm(_Base):
    """No gradient through the statistics."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6).detach()
        return (wide * self.weight.float()).to(x.dtype)


class FrozenGainNorm(_Base):
    """No gradient to the gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().detach()).to(x.dtype)


class CountingNorm(_Base):
    """Counts its calls."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.normed(x)


class GateBeforeNorm(_Base):
    """A SiLU gate, then groups, then a second rounding, as in Mamba-2."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        wide = (x.float() * nn.functional.silu(z.float())).unflatten(-1, (4, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.flatten(-2).to(x.dtype)


class GateFirstNorm(_Base):
    """Takes its gate before its row."""

    def forward(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float() * gate.float().sigmoid()).to(x.dtype)


class GatedLayerNorm(_Base):
    """A LayerNorm with a gate, which no kernel computes."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight) * nn.functional.silu(gate)


class GeluGatedNorm(_Base):
    """A gate by another activation."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * nn.functional.gelu(gate)


class L2Norm(nn.Module):
    """The root of the sum in the place of the mean, and no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ScalarNorm(nn.Module):
    """One number for the whole row."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.temperature.float()).to(x.dtype)


class NarrowOffsetNorm(_Base):
    """``1 + w``, summed before it is widened."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight).float()).to(x.dtype)


class ScaledBeforeNorm(_Base):
    """The gain, a rounding, then the norm."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = (x.float() * self.weight.float()).to(x.dtype).float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class ImageNorm(nn.Module):
    """LayerNorm over the channels of an image, through permuted views."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.zeros(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.permute(0, 2, 3, 1), self.weight.shape, self.weight, self.bias, 1e-6)
        return y.permute(0, 3, 1, 2)


class SequenceChannelNorm(nn.Module):
    """RMSNorm over the channels of a sequence, its gain stored as a column; the result is contiguous."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6)
        return (wide * self.g.float()).to(x.dtype)


class FlatNorm(_Base):
    """Takes a matrix and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        return self.normed(x.view(tokens, width))


class DeviationNorm(_Base):
    """Divides by the standard deviation without subtracting the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.var(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


class RootNorm(nn.Module):
    """Returns what a row would be multiplied by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class ManyArgumentsNorm(_Base):
    """An adaptive norm."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * (1 + scale) + shift


class _Shift(nn.Module):
    """Adds a tenth."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1


class ActingNorm(_Base):
    """A norm, a dropout and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.drop = nn.GELU(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(self.normed(x)))


class ActingFirstNorm(_Base):
    """An activation before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.act = _Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(self.act(x))


class HiddenGateNorm(_Base):
    """Its gate has a default that does not work."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float() * gate.float().sigmoid()).to(x.dtype)


class WideningNorm(_Base):
    """Gives float32 under autocast, as ``F.layer_norm`` does on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()
        return wide if torch.is_autocast_enabled("cpu") else wide.to(x.dtype)


class NarrowingNorm(_Base):
    """Casts what it is given under autocast, the gain too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if torch.is_autocast_enabled("cpu"):
            x, weight = (t.to(torch.get_autocast_dtype("cpu")) for t in (x, weight))
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * weight.float()).to(x.dtype)
