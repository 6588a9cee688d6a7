"""What one call computes, as data: handed unchanged to every implementation and to the oracle.

Rows have ``D`` elements: the last dimension, or a part of it where the norm is grouped.

========  =============================================================================================
sum       ``h = x + residual`` rounded to ``sum_dtype`` (with a residual; else ``h = x``)
gate      ``v = h * activation(gate)`` (``gate_position == "before"``; else ``v = h``)
moment    ``S = mean(v**2)``, ``sum(v**2)``, or over the first ``partial`` elements alone (``rms``);
          ``v -= mean(v)`` first, ``S = mean(v**2)`` (``layer``)
scale     ``1 / sqrt(S + eps)`` (inside), ``1 / (sqrt(S) + eps)`` (outside), ``1 / max(sqrt(S), eps)`` (clamp),
          rounded to ``scale_dtype``
row       ``n = v * scale``, rounded to ``round_dtype``
product   ``p = n * (weight + offset)``, rounded to ``product_dtype``
bias      ``p + bias``
gate      ``p * activation(gate)`` (``gate_position == "after"``)
result    rounded to ``out_dtype``
========  =============================================================================================

Arithmetic is float32 (float64 for a float64 input); a dtype of None is a rounding that does not take place.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

Kind = Literal["rms", "layer"]
EpsPosition = Literal["inside", "outside", "clamp"]
Reduction = Literal["mean", "sum"]
GatePosition = Literal["none", "before", "after"]
Activation = Literal["silu", "sigmoid"]

EPS_POSITIONS = ("inside", "outside", "clamp")
REDUCTIONS = ("mean", "sum")
GATE_POSITIONS = ("before", "after")
ACTIVATIONS = ("silu", "sigmoid")

QUANTIZED_MAXIMUM = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""The dtypes that rows are quantized to, and the largest magnitude that a row is scaled to."""


class Formula(NamedTuple):
    """The options of one call; a tuple, since building one is on the path of every call.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        eps: in the place that ``eps_position`` names.
        offset: added to the weight, in float32.
        round_dtype: dtype of the normalised row before the gain; None for no rounding there.
        product_dtype: dtype of the product with the gain before bias or gate; None for no rounding there.
        out_dtype: dtype of the result.
        groups: rows that each vector of the last dimension is split into.
        partial: leading elements of a row that the moment is taken from; 0 for all.
        eps_position: ``"inside"`` the root, ``"outside"`` it, or ``"clamp"``.
        reduction: ``"mean"`` or ``"sum"`` of the squares.
        gate_position: ``"none"``, ``"before"`` or ``"after"`` the norm.
        activation: ``"silu"`` or ``"sigmoid"`` of the gate.
        sum_dtype: dtype of the sum with the residual; None without residual.
        scale_dtype: dtype that the scale of a row is rounded to before the row is multiplied by it (``rms`` without
            gate); None for no rounding there.
    """

    kind: Kind
    eps: float
    offset: float
    round_dtype: torch.dtype | None
    product_dtype: torch.dtype | None
    out_dtype: torch.dtype
    groups: int = 1
    partial: int = 0
    eps_position: EpsPosition = "inside"
    reduction: Reduction = "mean"
    gate_position: GatePosition = "none"
    activation: Activation = "silu"
    sum_dtype: torch.dtype | None = None
    scale_dtype: torch.dtype | None = None


def product_rounding(
    round_dtype: torch.dtype | None, out_dtype: torch.dtype, weight: object, bias: object
) -> torch.dtype | None:
    """Say where the product is rounded before the bias: in a norm that rounds before the gain, and so twice again."""
    return out_dtype if round_dtype is not None and weight is not None and bias is not None else None
