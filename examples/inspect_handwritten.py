"""See what normswap makes of norms that nobody told it about.

    python examples/inspect_handwritten.py

The model is written by hand. Its norms have names and attributes of their own, two of them share a formula but not the
order of rounding, one adds 1 to its gain, and one is no row-wise norm at all. normswap runs them and reports what each
computes; what it cannot prove it leaves alone, with the reason.
"""

import torch
from torch import Tensor, nn

import normswap


class ScaleThenCast(nn.Module):
    """RMS norm that multiplies by its gain in float32 and rounds once, at the end."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * self.g.float()).to(x.dtype)


class CastThenScale(nn.Module):
    """The same formula, rounded before the gain and after it, as Llama does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 3e-5)
        return self.scale * y.to(x.dtype)


class OnePlusGain(nn.Module):
    """RMS norm whose stored gain is the distance from 1, as Gemma does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
        return (y * (1.0 + self.weight.float())).to(x.dtype)


class BatchScaleNorm(nn.Module):
    """Not a norm of rows: its statistics run over all rows of the batch."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x / (x.square().mean() + 1e-6).sqrt()


class Block(nn.Module):
    """One residual step: norm, linear map."""

    def __init__(self, norm: nn.Module, width: int) -> None:
        super().__init__()
        self.norm = norm
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.proj(self.norm(x))


def main() -> None:
    """Inspect, patch all but the last norm, and compare."""
    torch.manual_seed(0)
    width = 48
    norms = [ScaleThenCast(width), CastThenScale(width), OnePlusGain(width), BatchScaleNorm(width), nn.LayerNorm(width)]
    model = nn.Sequential(*(Block(norm, width) for norm in norms)).to(torch.bfloat16).eval()

    for decision in normswap.inspect(model).plan.decisions:
        found = decision.to_dict()
        spec = found["spec"]
        print(f"{found['name']:<8} {found['class']:<15} {found['action']}")
        if spec is None:
            print(f"    {found['reason']}")
        else:
            print(f"    kind {spec['kind']}, eps {spec['eps']:.3g}, gain {spec['gain']}, cast {spec['cast']}")

    x = torch.randn(64, width, dtype=torch.bfloat16)
    with torch.no_grad():
        before = model(x)
        after = normswap.patch(model, exclude="4.*")(x)
    print(f"patched: {sum('normswap' in repr(block.norm) for block in model)} of {len(norms)} norms")
    print(f"bit-identical outputs, in bfloat16: {(before == after).float().mean().item():.2%}")


if __name__ == "__main__":
    main()
