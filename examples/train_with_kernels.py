"""Write a model with the fused operations in it, and train it compiled, on a CPU or a GPU.

    python examples/train_with_kernels.py

Each block begins with `add_rms_norm`, which adds the residual and normalises the sum in one pass, and gates its rows
with `gated_rms_norm` as Mamba-2 does. On a GPU these are Triton kernels, forward and backward; on a CPU compiled C++,
or torch's primitives.
"""

import torch
from normswap_kernels import add_rms_norm, gated_rms_norm, rms_norm
from torch import Tensor, nn

EPS = 1e-6


class Block(nn.Module):
    """A gated mixer of rows; takes what is to be added to the residual, and hands on the same."""

    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        self.groups = groups
        self.norm_weight = nn.Parameter(torch.ones(width))
        self.gated_weight = nn.Parameter(torch.ones(width))
        self.into = nn.Linear(width, 2 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return the block's own output and the residual."""
        x, residual = add_rms_norm(x, residual, self.norm_weight, eps=EPS)
        mixed, gate = self.into(x).chunk(2, dim=-1)
        mixed = gated_rms_norm(mixed, gate, self.gated_weight, eps=EPS, gate_position="before", groups=self.groups)
        return self.out(mixed), residual


class Model(nn.Module):
    """A few blocks, and a norm at the end."""

    def __init__(self, width: int = 64, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, groups=4) for _ in range(blocks))
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Map rows to rows."""
        residual = torch.zeros_like(x)
        for block in self.blocks:
            x, residual = block(x, residual)
        return rms_norm(x + residual, self.weight, eps=EPS)


def main() -> None:
    """Fit a fixed random map, eager and compiled, from the same start."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("eager", "compiled"):
        torch.manual_seed(0)
        model = Model().to(device)
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if name == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        x = torch.randn(256, 64, device=device)
        target = rms_norm(torch.tanh(x @ torch.randn(64, 64, device=device) / 8), eps=EPS)
        losses = []
        for _ in range(60):
            loss = nn.functional.mse_loss(step(x), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        print(f"{name + ':':10} loss {losses[0]:.3f} at first, {losses[-1]:.3f} at last")


if __name__ == "__main__":
    main()
