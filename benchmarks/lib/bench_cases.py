"""What is measured: the operations, their inputs, and the least bytes that each has to move."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import normswap_kernels as kernels
import torch
from normswap_kernels.formula import Formula
from torch import Tensor

EPS = 1e-6
HEAD = 128
GROUPS = 8
PARTIAL = 4


@dataclass(frozen=True)
class Operation:
    """One operation with one choice of its options.

    Attributes:
        name: as it is printed.
        function: the public function.
        kind: ``"rms"`` or ``"layer"``.
        round_first: whether the row is rounded to the input's dtype before the gain, as Llama's class does.
        offset: added to the gain.
        gain: whether there is a gain.
        bias: whether there is a bias.
        residual: whether a residual is added first.
        gate: ``"none"``, ``"before"`` or ``"after"``.
        groups: parts of a row.
        per_head: whether each head of `HEAD` elements has a gain of its own.
        partial: whether the moment is taken from one in `PARTIAL` of the elements.
        l2: whether the sum of the squares is taken and clamped, as ``torch.nn.functional.normalize`` does.
        quantized: dtype of the result of a quantizing operation, or None.
    """

    name: str
    function: str
    kind: str = "rms"
    round_first: bool = False
    offset: float = 0.0
    gain: bool = True
    bias: bool = False
    residual: bool = False
    gate: str = "none"
    groups: int = 1
    per_head: bool = False
    partial: bool = False
    l2: bool = False
    quantized: torch.dtype | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """Return what can be measured of it."""
        return ("forward",) if self.quantized else ("forward", "backward")

    def formula(self, dtype: torch.dtype, width: int) -> Formula:
        """Say what it computes for an input of this dtype and width."""
        rounding = dtype if self.round_first else None
        return Formula(
            kind="layer" if self.kind == "layer" else "rms",
            eps=EPS,
            offset=self.offset,
            round_dtype=rounding,
            product_dtype=rounding if self.gate == "after" else None,
            out_dtype=dtype,
            groups=self.groups,
            partial=width // PARTIAL if self.partial else 0,
            eps_position="clamp" if self.l2 else "inside",
            reduction="sum" if self.l2 else "mean",
            gate_position={"none": "none", "before": "before", "after": "after"}[self.gate],  # type: ignore[arg-type]
            sum_dtype=dtype if self.residual else None,
        )


OPERATIONS = (
    Operation("rms_norm", "rms_norm", round_first=True),
    Operation("add_rms_norm", "add_rms_norm", round_first=True, residual=True),
    Operation("layer_norm", "layer_norm", kind="layer", bias=True),
    Operation("rms_norm gain first", "rms_norm"),
    Operation("rms_norm 1+w", "rms_norm", offset=1.0),
    Operation("add_layer_norm", "add_layer_norm", kind="layer", bias=True, residual=True),
    Operation("gated after", "gated_rms_norm", round_first=True, gate="after"),
    Operation("gated before", "gated_rms_norm", round_first=True, gate="before"),
    Operation("gated grouped", "gated_rms_norm", round_first=True, gate="before", groups=GROUPS),
    Operation("grouped", "rms_norm", groups=GROUPS),
    Operation("per head", "rms_norm", per_head=True),
    Operation("partial", "rms_norm", partial=True),
    Operation("l2", "rms_norm", gain=False, l2=True),
    Operation("quant int8", "rms_norm_quant", round_first=True, quantized=torch.int8),
    Operation("quant fp8", "rms_norm_quant", round_first=True, quantized=torch.float8_e4m3fn),
)


@dataclass(frozen=True)
class Case:
    """One operation in one direction on one shape and dtype."""

    operation: Operation
    direction: str
    dtype: torch.dtype
    rows: int
    width: int

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.operation.name} {self.direction} {dtype} {self.rows}x{self.width}"

    @property
    def formula(self) -> Formula:
        """Return what is computed."""
        return self.operation.formula(self.dtype, self.width)

    @property
    def least_bytes(self) -> int:
        """Return the bytes that have to be moved: each input read once, each result written once."""
        op, size = self.operation, self.dtype.itemsize
        elements, parameters = self.rows * self.width, self.width * (op.gain + op.bias)
        if op.quantized:
            return elements * (size + op.quantized.itemsize) + parameters * size + 4 * self.rows
        if self.direction == "forward":
            # x, residual or gate, the result, and the sum.
            return size * (elements * (2 + 2 * op.residual + (op.gate != "none")) + parameters)
        # The gradient, that of the sum, the row and the gate are read; the gradients of row and gate are written. The
        # gradients of x and of the residual are one.
        gated = op.gate != "none"
        return size * (elements * (3 + op.residual + 2 * gated) + parameters + self.width * op.gain)


@dataclass(frozen=True)
class Inputs:
    """What a case is measured on; a tensor that the operation does not take is None."""

    x: Tensor
    residual: Tensor | None
    gate: Tensor | None
    weight: Tensor | None
    bias: Tensor | None

    def differentiable(self) -> list[Tensor]:
        """Return the tensors that gradients are taken of."""
        return [t for t in (self.x, self.residual, self.gate, self.weight, self.bias) if t is not None]


def draw(case: Case, device: torch.device) -> tuple[Inputs, list[Tensor]]:
    """Draw the inputs of a case, and a gradient for each of its results; the same for every contender."""
    op, generator = case.operation, torch.Generator(device).manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32).to(case.dtype)

    width = (case.width // HEAD, HEAD) if op.per_head else (case.width,)
    rows = (case.rows, *width)
    inputs = Inputs(
        normal(*rows),
        normal(*rows) if op.residual else None,
        normal(*rows) if op.gate != "none" else None,
        normal(*width) if op.gain else None,
        normal(*width) if op.bias else None,
    )
    gradients = [normal(*rows) for _ in range(1 + op.residual)] if case.direction == "backward" else []
    if gradients:
        for t in inputs.differentiable():
            t.requires_grad_()
    return inputs, gradients


def ours(case: Case) -> Callable[[Inputs], Any]:
    """Return the call of the public operation, with all but the tensors bound: binding them is none of its time."""
    op, formula = case.operation, case.formula
    options: dict[str, Any] = {"eps": EPS, "offset": op.offset, "round_dtype": formula.round_dtype}
    if op.quantized:
        quantize = partial(kernels.rms_norm_quant, dtype=op.quantized, **options)
        return lambda i: quantize(i.x, i.weight)
    if op.residual:
        add = partial(kernels.add_layer_norm if op.kind == "layer" else kernels.add_rms_norm, **options)
        return lambda i: add(i.x, i.residual, i.weight, i.bias)
    if op.gate != "none":
        options |= {"gate_position": op.gate, "groups": op.groups, "product_dtype": formula.product_dtype}
        gated = partial(kernels.gated_rms_norm, **options)
        return lambda i: gated(i.x, i.gate, i.weight)
    if op.kind == "layer":
        layer = partial(kernels.layer_norm, **options)
        return lambda i: layer(i.x, i.weight, i.bias)
    options |= {"groups": op.groups, "partial": formula.partial or None}
    options |= {"eps_position": formula.eps_position, "reduction": formula.reduction}
    rms = partial(kernels.rms_norm, **options)
    return lambda i: rms(i.x, i.weight, i.bias)
