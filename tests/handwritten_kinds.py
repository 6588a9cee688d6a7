"""Norms of the rarer kinds as people write them: gated, over channels, with another gain, or with something after."""

from __future__ import annotations

import torch
from handwritten import RowNorm
from torch import nn


class GateBeforeNorm(RowNorm):
    """A SiLU gate, then groups, then a second rounding, as in Mamba-2."""

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        wide = (x.float() * nn.functional.silu(z.float())).unflatten(-1, (4, -1))
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.flatten(-2).to(x.dtype)


class GateFirstNorm(RowNorm):
    """Takes its gate before its row."""

    def forward(self, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float() * gate.float().sigmoid()).to(x.dtype)


class GatedLayerNorm(RowNorm):
    """A LayerNorm with a gate, which no kernel computes."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight) * nn.functional.silu(gate)


class GeluGatedNorm(RowNorm):
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


class NarrowOffsetNorm(RowNorm):
    """``1 + w``, summed before it is widened."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight).float()).to(x.dtype)


class ScaledBeforeNorm(RowNorm):
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


class DenseImageNorm(ImageNorm):
    """The same written out where the channels lie, with eps outside the root."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide - wide.mean(1, keepdim=True)
        wide = wide / (wide.pow(2).mean(1, keepdim=True).sqrt() + 1e-3)
        return (self.weight[:, None, None].float() * wide + self.bias[:, None, None].float()).to(x.dtype)


class SequenceChannelNorm(nn.Module):
    """RMSNorm over the channels of a sequence, its gain stored as a column; the result is contiguous."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.ones(dim, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6)
        return (wide * self.g.float()).to(x.dtype)


class FlatNorm(RowNorm):
    """Takes a matrix and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens, width = x.shape
        return self.normed(x.view(tokens, width))


class DeviationNorm(RowNorm):
    """Divides by the standard deviation without subtracting the mean."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.var(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


class RootNorm(nn.Module):
    """Returns what a row would be multiplied by."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)


class ManyArgumentsNorm(RowNorm):
    """An adaptive norm."""

    def forward(self, x: torch.Tensor, shift: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * (1 + scale) + shift


class _Shift(nn.Module):
    """Adds a tenth."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1


class ActingNorm(RowNorm):
    """A norm, a dropout and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.drop = nn.GELU(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.drop(self.normed(x)))


class ActingFirstNorm(RowNorm):
    """An activation before the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.act = _Shift()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(self.act(x))


class HiddenGateNorm(RowNorm):
    """Its gate has a default that does not work."""

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * self.weight.float() * gate.float().sigmoid()).to(x.dtype)


class WideningNorm(RowNorm):
    """Gives float32 under autocast, as ``F.layer_norm`` does on a GPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()
        return wide if torch.is_autocast_enabled("cpu") else wide.to(x.dtype)


class NarrowingNorm(RowNorm):
    """Casts what it is given under autocast, the gain too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.weight
        if torch.is_autocast_enabled("cpu"):
            x, weight = (t.to(torch.get_autocast_dtype("cpu")) for t in (x, weight))
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * weight.float()).to(x.dtype)


class UnusedGainNorm(RowNorm):
    """Holds a gain that it does not use, of another length than its rows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class MaximumNorm(nn.Module):
    """Forgets the scale of a row by its largest element."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x / x.abs().amax(-1, keepdim=True)


class SummingNorm(RowNorm):
    """Adds a residual before it normalises."""

    def forward(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self.normed(x + residual)


class JoiningNorm(RowNorm):
    """Takes heads apart and gives them joined, as xLSTM's does."""

    def __init__(self, heads: int = 4, size: int = 16) -> None:
        super().__init__(heads * size)
        self.heads, self.size = heads, size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, heads, size = x.shape
        assert (heads, size) == (self.heads, self.size)
        wide = x.float()
        wide = wide - wide.mean(-1, keepdim=True)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return wide.to(x.dtype).reshape(batch, length, -1) * self.weight


class ClampedRowNorm(RowNorm):
    """Clamps its row where only a trained model's outliers are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide.clamp(-6, 6) * self.weight.float()).to(x.dtype)


class FixedGroupsNorm(nn.Module):
    """Groups of 32, however long the row, and no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float().unflatten(-1, (-1, 32))
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).flatten(-2).to(x.dtype)


class ScaledEpsNorm(nn.Module):
    """An eps beside the norm of the row, so that what it is beside the mean depends on the length."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.normalize(x.float(), eps=1e-2, dim=-1).mul(x.shape[-1] ** 0.5).to(x.dtype)


class RankNorm(RowNorm):
    """The last dimension of a sequence, the channels of an image."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.dim() != 4:
            return self.normed(x)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().view(1, -1, 1, 1)).to(x.dtype)


class ChannelsOfAnyNorm(RowNorm):
    """Channels, whatever stands behind them."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-6)
        return (wide * self.weight.float().view(1, -1, *[1] * (x.dim() - 2))).to(x.dtype)


class SometimesActingNorm(RowNorm):
    """An activation only where there is a gate."""

    def __init__(self) -> None:
        super().__init__(64)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.float()
        if gate is None:
            return wide.to(x.dtype)
        return self.act((wide * nn.functional.silu(gate.float())).to(x.dtype))


class ActingBeforeTheCastNorm(RowNorm):
    """An activation in float32, and the cast after it."""

    def __init__(self) -> None:
        super().__init__(64)
        self.act = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.act(wide * self.weight.float()).to(x.dtype)


class RememberingNorm(RowNorm):
    """Keeps its last result."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.normed(x)
        self.last = y.detach()
        return y


class RecordingNorm(RowNorm):
    """Keeps a list of the lengths that it saw."""

    def __init__(self) -> None:
        super().__init__(64)
        self.seen: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        return self.normed(x)


class RegisteringNorm(RowNorm):
    """Asks its subclasses for a name, and keeps a list of them."""

    known: list[str] = []  # noqa: RUF012

    def __init_subclass__(cls, *, tag: str) -> None:
        RegisteringNorm.known.append(tag)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x)


class UnbiasedNorm(RowNorm):
    """A LayerNorm by ``std``, which divides by n - 1, and an eps beside it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-6)


class ContiguousNorm(RowNorm):
    """Computes something else on rows that do not lie densely."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(x) * (1.01 if x.stride(-1) != 1 else 1.0)


class NarrowScaleNorm(RowNorm):
    """Rounds the scale, then the row, then the product with the gain."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype) * self.weight


class PixelNorm(nn.Module):
    """StyleGAN's: over channels, without parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(1, keepdim=True) + 1e-8)).to(x.dtype)


class VolumeNorm(nn.Module):
    """LayerNorm over the channels of a volume."""

    def __init__(self, dim: int = 64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x.permute(0, 2, 3, 4, 1), self.weight.shape, self.weight, None, 1e-6)
        return y.permute(0, 4, 1, 2, 3)


class DroppingFirstNorm(RowNorm):
    """A dropout that is off, before the norm."""

    def __init__(self) -> None:
        super().__init__(64)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.normed(self.drop(x))
