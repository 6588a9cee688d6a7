"""Cases for the gradients of the norms, and what a right gradient is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from norm_cases import BF16, CHOICES, FP32, GROUPS, Case, Inputs, covering_cases, public_cases
from normswap_kernels.gradients import Gradients, closed_form
from normswap_kernels.reference import exact
from torch import Tensor

BACKWARD_CHOICES: dict[str, tuple[Any, ...]] = {
    **CHOICES,
    "rows": (0, 1, 7, 60, 300),
    # Roundings count as the identity, and the statistics are always saved.
    "roundings": ("none",),
    "save": (True,),
    "grad": ("contiguous", "sliced", "expanded"),
    "frozen": (False, True),
}


@dataclass(frozen=True)
class BackwardCase(Case):
    """One call of a norm that is differentiated.

    The residual's dtypes say what the row's is, and with a residual there is a gradient of the sum; ``wide_out`` says
    that the gradient of the result is float32. A norm with a gate after it has no bias, and one without a gain has none
    a head.
    """

    grad: str = "contiguous"
    frozen: bool = False

    def __str__(self) -> str:
        return f"{super().__str__()}-grad.{self.grad}{'-frozen' * self.frozen}"

    def inputs(self) -> Inputs:
        """Make the inputs, the same in every process."""
        made = super().inputs()
        none = self.gate == "after" or (self.structure == "heads" and self.gain is None)
        return made._replace(bias=None) if none else made

    def row(self) -> Tensor:
        """Give the row that is normalised: the input, or its sum with the residual."""
        inputs, dtype = self.inputs(), self.formula().sum_dtype
        if inputs.residual is None or dtype is None:
            return inputs.x
        return (inputs.x.float() + inputs.residual.float()).to(dtype)

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Make the gradients of the result and of the sum."""
        generator = torch.Generator().manual_seed(1 + sum(map(ord, str(self))))

        def draw(dtype: torch.dtype) -> Tensor:
            shape = self.shape
            if self.grad == "expanded":
                return torch.randn(shape[1:], generator=generator).to(dtype).expand(shape)
            drawn = torch.randn(shape, generator=generator).to(dtype)
            if self.grad == "sliced":
                beside = torch.full((*shape[:-1], 3), torch.nan, dtype=dtype)
                drawn = torch.cat([beside, drawn, beside], -1)[..., 3:-3]
            return drawn

        sum_dtype = self.formula().sum_dtype
        return draw(self.out), None if sum_dtype is None else draw(sum_dtype)


CASES = [
    *covering_cases(300_000, BACKWARD_CHOICES, BackwardCase),
    *public_cases(BACKWARD_CHOICES, BackwardCase),
]
# The widest rows, and every kernel for rows that do not fit; enough of them that each loop goes round, and ends short.
SLOW_CASES = [
    BackwardCase("rms", 65537, 13, dtype=BF16, gain=BF16, save=True),
    BackwardCase("layer", 16384, 21, dtype=BF16, gain=BF16, bias=BF16, residual="same", save=True),
    BackwardCase("layer", 70000, 9, "groups", dtype=BF16, gain=FP32, bias=FP32, save=True),
    BackwardCase("rms", 131072, 5, "heads", dtype=BF16, gain=BF16, gate="before", save=True),
]


class Bound(NamedTuple):
    """What an error is held to.

    Attributes:
        truth: the gradient in float64.
        magnitude: the sum of the absolute values of the terms that it is the sum of, which their order rounds.
    """

    truth: Tensor
    magnitude: Tensor


def check(case: BackwardCase, found: Gradients) -> None:
    """Hold gradients to ``2 * (|closed form - float64| + one rounding)``, and to float32's order of summation."""
    formula, inputs, row = case.formula(), case.inputs(), case.row()
    grad, grad_sum = case.gradients()
    plain = formula._replace(sum_dtype=None)
    bias_dtype = None if inputs.bias is None or case.frozen else inputs.bias.dtype
    closed = closed_form(plain, grad, grad_sum, row, inputs.gate, inputs.weight, bias_dtype)
    if case.frozen:
        closed = closed._replace(weight=None)
    assert [None if t is None else (t.shape, t.dtype) for t in found] == [
        None if t is None else (t.shape, t.dtype) for t in closed
    ]
    for name, bound in _bounds(case, row, grad, grad_sum).items():
        result, own = getattr(found, name), getattr(closed, name)
        if result is None or not result.numel():
            continue
        assert torch.isfinite(result).all(), f"the gradient of the {name} is not finite"
        # Where a root is 0 the oracle's slope is no number, and the row counts as constant.
        truth, limits = torch.where(bound.truth.isnan(), own.double(), bound.truth), torch.finfo(result.dtype)
        error = (own.double() - truth).abs()
        error = error.amax(-1, keepdim=True) if name in ("row", "gate") else error.amax()
        rounding = limits.eps / 2 * truth.abs() + limits.smallest_normal * limits.eps / 2
        order = 8 * torch.finfo(FP32).eps * bound.magnitude
        excess = ((result.double() - truth).abs() - 2 * (error + rounding + order)).max().item()
        assert excess <= 0, f"the gradient of the {name} passes its budget by {excess:.3g}"
        # Rounding otherwise than to nearest stays within the budget, and gives half of the elements another last digit.
        different = (result != own) & (rounding > 8 * order)
        allowed = max(3, result.numel() // 8)
        assert different.sum() <= allowed, (
            f"{different.sum()} elements of the gradient of the {name} are rounded otherwise"
        )


def _bounds(case: BackwardCase, row: Tensor, grad: Tensor, grad_sum: Tensor | None) -> dict[str, Bound]:
    """Differentiate the oracle in float64, and once more with every term made positive."""
    formula, inputs = case.formula()._replace(sum_dtype=None), case.inputs()
    names = ("row", "gate", "weight", "bias")
    leaves = [None if t is None else t.detach().double() for t in (row, inputs.gate, inputs.weight, inputs.bias)]
    given = [leaf.requires_grad_() for leaf in leaves if leaf is not None]
    y, _ = exact(formula, leaves[0], leaves[2], leaves[3], gate=leaves[1])
    derivatives = iter(torch.autograd.grad(y, given, grad.double()))
    truth = {name: next(derivatives) for name, leaf in zip(names, leaves, strict=True) if leaf is not None}
    if grad_sum is not None:
        truth["row"] = truth["row"] + grad_sum.double()
    magnitudes = _magnitudes(case, *(None if leaf is None else leaf.detach() for leaf in leaves), grad, grad_sum)
    return {name: Bound(value, magnitudes[name]) for name, value in truth.items()}


def _magnitudes(
    case: BackwardCase,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    grad: Tensor,
    grad_sum: Tensor | None,
) -> dict[str, Tensor]:
    groups = GROUPS if case.structure == "groups" else 1
    formula, dy, factor, slope = case.formula(), grad.double().abs(), torch.ones(()), torch.ones(())
    if gate is not None:
        s = torch.sigmoid(gate)
        factor = gate * s if case.activation == "silu" else s
        slope = s * (1 + gate.abs() * (1 - s)) if case.activation == "silu" else s * (1 - s)
    v = (row * factor if case.gate == "before" else row).unflatten(-1, (groups, -1))
    off = torch.zeros(())
    if case.kind == "layer":
        off = v.mean(-1, keepdim=True).abs()
        v = v - v.mean(-1, keepdim=True)
    moment = v[..., : formula.partial or None].square().sum(-1, keepdim=True)
    count = 1 if case.reduction == "sum" else formula.partial or case.width
    moment = moment / count
    below = {
        "inside": (moment + case.eps).sqrt(),
        "outside": moment.sqrt() + case.eps,
        "clamp": moment.sqrt().clamp_min(case.eps),
    }[case.eps_position]
    # What the mean rounds is part of each element.
    n = ((v.abs() + off) / below).flatten(-2)
    gain = 1.0 if weight is None else (weight + case.offset).abs()
    inner = dy * factor.abs() if case.gate == "after" else dy
    d = (inner * gain).unflatten(-1, (groups, -1))
    parts = n.unflatten(-1, (groups, -1))
    dv = (d + d.mean(-1, keepdim=True) + parts * (d * parts).sum(-1, keepdim=True) / count) / below
    dv = dv.flatten(-2)
    dims = list(range(dy.dim() - (1 if weight is None else weight.dim())))
    total = dv * factor.abs() if case.gate == "before" else dv
    if grad_sum is not None:
        total = total + grad_sum.double().abs()
    return {
        "row": total.amax(-1, keepdim=True),
        "gate": slope * (dv * row.abs() if case.gate == "before" else dy * n * gain),
        "weight": (inner * n).sum(dims),
        "bias": inner.sum(dims if weight is not None else list(range(dy.dim() - (1 if bias is None else bias.dim())))),
    }
