"""What one norm computes, as data, and that meaning in plain torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

import torch

__all__ = ["NormSpec", "Rounding", "dtype_name"]

_HALF = (torch.float16, torch.bfloat16)
_Tensor = torch.Tensor
_TUPLES = ("own_code", "ranks", "then")


@dataclass(frozen=True)
class Rounding:
    """Where a norm rounds, for one pair of input and gain dtypes.

    Attributes:
        middle: the dtype that the normalised row is rounded to before the gain is applied; None where the
            gain is applied in float32.
        out: the dtype of the result.
        product: the dtype that the product with the gain is rounded to before a bias or a gate; None where it is not.
        scale: the dtype that ``1 / sqrt(...)`` is rounded to before the row is multiplied by it; None where it is not.
    """

    middle: torch.dtype | None
    out: torch.dtype
    product: torch.dtype | None = None
    scale: torch.dtype | None = None

    @property
    def unit(self) -> torch.dtype:
        """The narrowest dtype on the way, whose unit in the last place is that of the result."""
        return self.out if self.out in _HALF or self.middle is None else self.middle

    @property
    def twice(self) -> bool:
        """Whether a rounding to half precision is followed by the product with the gain, or is that of the scale."""
        return self.middle in _HALF or self.scale in _HALF


@dataclass(frozen=True)
class NormSpec:
    """What one norm computes on each row of its input.

    With ``n = x / sqrt(mean(x**2) + eps)`` (kind ``rms``) or ``n = (x - mean(x)) / sqrt(var(x) + eps)`` (kind
    ``layer``, biased variance), the result is ``n * g + b``. Statistics and arithmetic are float32.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        width: length of a row; None for a norm without a gain of its own for each column, which takes rows of any
            length.
        eps: added to the mean square or to the variance.
        gain: ``"w"`` (``g = w``), ``"1+w"`` (``g = 1 + w``) or ``"none"`` (``g = 1``).
        bias: whether ``b`` is there.
        cast: ``"before_gain"``: ``n`` is cast back to a narrower dtype and then multiplied (two roundings, as in
            Llama's class); ``"after_gain"``: everything in float32, cast once at the end (as in ``F.layer_norm``).
        out: dtype of the result: that of the ``"input"``, that of the ``"weight"``, or ``"promote"`` of both.
        gain_name: attribute that holds ``w``; None without gain.
        bias_name: attribute that holds ``b``; None without bias.
        eps_position: ``"inside"`` the root, ``"outside"`` (``1 / (sqrt(m) + eps)``), or ``"clamp"``
            (``1 / max(sqrt(m), eps)``).
        groups: number of equal groups of a row that are normalised separately.
        partial: number of leading columns that the statistics read; None for all.
        gate: None, or the activation (``"silu"``, ``"sigmoid"``) of a second input that multiplies the row.
        gate_position: ``"before"`` or ``"after"`` the norm; None without gate.
        heads: rows of a two-dimensional gain ``(heads, width)``, beside an input ``(..., heads, width)``; else 1.
        reduction: ``"mean"`` of the squares, or their ``"sum"`` (L2 normalisation).
        gain_position: ``"after"`` the norm, or ``"before"``: the row is multiplied, rounded to its dtype, and then
            normalised.
        offset_dtype: dtype that ``1 + w`` is summed in: ``"float32"``, or that of the ``"weight"``.
        product_cast: dtype that the product with the gain is rounded to before a gate after the norm: that of the
            ``"input"``, ``"promote"`` of input and gain, or ``"none"``.
        scale_cast: dtype that ``1 / sqrt(...)`` is rounded to before the row is multiplied by it: that of the
            ``"input"``, or ``"none"``.
        gate_optional: whether it is also called without its gate.
        input_name: parameter of its forward that takes the row.
        gate_name: parameter of its forward that takes the gate; None without gate.
        axis: ``"last"``, or ``"channels"``: the rows lie along dimension 1, as in ``(N, C, H, W)``.
        ranks: numbers of dimensions of its input in which it computes this; empty where the number does not matter.
        dense: whether the result of a contiguous input over channels is contiguous; else it is a permuted view.
        joins: heads that its input is split in, ``(..., joins, width / joins)``, while its result has whole rows
            ``(..., width)``; else 1.
        then: child modules that it applies to the result in turn (dropout, an activation); they go on running as they
            are.
        own_code: dtypes of the input (``"bfloat16"``), or pairs of input and gain (``"bfloat16+float32"``), in which
            its results are those of no known order of roundings, so that the original's own code runs for them.
    """

    kind: Literal["rms", "layer"]
    width: int | None
    eps: float
    gain: Literal["w", "1+w", "none"] = "w"
    bias: bool = False
    cast: Literal["before_gain", "after_gain"] = "after_gain"
    out: Literal["input", "promote", "weight"] = "input"
    gain_name: str | None = "weight"
    bias_name: str | None = None
    eps_position: Literal["inside", "outside", "clamp"] = "inside"
    groups: int = 1
    partial: int | None = None
    gate: Literal["silu", "sigmoid"] | None = None
    gate_position: Literal["before", "after"] | None = None
    heads: int = 1
    reduction: Literal["mean", "sum"] = "mean"
    gain_position: Literal["after", "before"] = "after"
    offset_dtype: Literal["float32", "weight"] = "float32"
    product_cast: Literal["none", "promote", "input"] = "none"
    scale_cast: Literal["none", "input"] = "none"
    gate_optional: bool = False
    input_name: str = "x"
    gate_name: str | None = None
    axis: Literal["last", "channels"] = "last"
    ranks: tuple[int, ...] = ()
    dense: bool = True
    joins: int = 1
    then: tuple[str, ...] = ()
    own_code: tuple[str, ...] = ()

    @property
    def offset(self) -> float:
        """What is added to the stored gain: 1.0 for the form ``1+w``, else 0.0."""
        return 1.0 if self.gain == "1+w" else 0.0

    def covers(self, x: torch.dtype, gain: torch.dtype | None) -> bool:
        """Whether the formula holds for an input and a gain of these dtypes; else the original's own code runs."""
        if not self.own_code:
            return True
        name = dtype_name(x)
        return name not in self.own_code and (gain is None or f"{name}+{dtype_name(gain)}" not in self.own_code)

    def rounding(self, x: torch.dtype, gain: torch.dtype | None) -> Rounding:
        """Say where this norm rounds for an input and a gain of these dtypes.

        Args:
            x: dtype of the input.
            gain: dtype of the stored gain; None without gain.
        """
        gain = x if gain is None else gain
        scale = x if self.scale_cast == "input" and x in _HALF else None
        if self.out == "weight":
            middle = gain if self.cast == "before_gain" and gain in _HALF else None
            return Rounding(middle, gain, gain if self.bias and middle is not None else None, scale)
        wide = torch.promote_types(x, gain)
        out = wide if self.out == "promote" else x
        middle = x if self.cast == "before_gain" else None
        product = {"none": None, "promote": wide, "input": x}[self.product_cast]
        return Rounding(middle, out, out if self.bias and middle is not None else product, scale)

    def rows(self, x: _Tensor) -> _Tensor:
        """View an input or a gate with its rows whole along the last dimension."""
        if self.joins > 1:
            x = x.flatten(-2)
        return x.movedim(1, -1) if self.axis == "channels" else x

    def result_rows(self, y: _Tensor) -> _Tensor:
        """View a result with its rows along the last dimension."""
        return y.movedim(1, -1) if self.axis == "channels" else y

    def plain(self) -> NormSpec:
        """Return the same for rows as `rows` gives them."""
        return replace(self, axis="last", joins=1)

    def scale(self, gain: _Tensor | None, dtype: torch.dtype) -> _Tensor | None:
        """Return the effective gain, ``w`` or ``1 + w``, in ``dtype``, in a shape that broadcasts against `rows`."""
        if gain is None:
            return None
        if self.gain == "1+w":
            gain = gain + 1.0 if self.offset_dtype == "weight" else gain.to(dtype) + 1.0
        return self.row(gain).to(dtype)

    def row(self, parameter: _Tensor) -> _Tensor:
        """View a gain or bias as one row, ``(width,)`` or ``(heads, width)``, or as a number ``(1,)``."""
        return parameter if self.heads > 1 else parameter.reshape(-1)

    def compute(self, x: _Tensor, gain: _Tensor | None, bias: _Tensor | None, gate: _Tensor | None = None) -> _Tensor:
        """Compute what the spec says, in float32 with the norm's own roundings.

        Args:
            x: ``(..., width)``, ``(..., heads, width)`` or ``(N, width, ...)``, any floating dtype.
            gain: as stored, or None.
            bias: as stored, or None.
            gate: of the shape of ``x``, or None.

        Returns:
            Of the shape of ``x``, in the dtype that `rounding` names.
        """
        where = self.rounding(x.dtype, None if gain is None else gain.dtype)
        n, g, after = self._normalised(x, gain, gate, torch.float32, where.scale)
        if where.middle is not None:
            n = n.to(where.middle).float()
        if g is not None:
            n = n * g
        if where.product is not None:
            n = n.to(where.product).float()
        if bias is not None:
            n = n + self.row(bias).float()
        if after is not None:
            n = n * after
        return self._as_given(n.to(where.out))

    def compute_exact(
        self, x: _Tensor, gain: _Tensor | None, bias: _Tensor | None, gate: _Tensor | None = None
    ) -> _Tensor:
        """Compute the same in float64, without the roundings on the way; the truth that errors are measured from."""
        n, g, after = self._normalised(x, gain, gate, torch.float64)
        if g is not None:
            n = n * g
        if bias is not None:
            n = n + self.row(bias).double()
        return self._as_given(n if after is None else n * after)

    def _normalised(
        self,
        x: _Tensor,
        gain: _Tensor | None,
        gate: _Tensor | None,
        dtype: torch.dtype,
        scale_dtype: torch.dtype | None = None,
    ) -> tuple[_Tensor, _Tensor | None, _Tensor | None]:
        """Return the normalised row, the gain that is still to be applied, and the gate that is."""
        v, g = self.rows(x).to(dtype), self.scale(gain, dtype)
        if g is not None and self.gain_position == "before":
            v, g = (v * g).to(x.dtype).to(dtype), None
        after = None
        if gate is not None and self.gate is not None:
            after = self.activation(self.rows(gate).to(dtype))
            if self.gate_position == "before":
                v, after = v * after, None
        return self.normalise(v, scale_dtype), g, after

    def activation(self, gate: _Tensor) -> _Tensor:
        """Return what the gate multiplies the row by."""
        return gate.sigmoid() if self.gate == "sigmoid" else torch.nn.functional.silu(gate)

    def normalise(self, v: _Tensor, scale_dtype: torch.dtype | None = None) -> _Tensor:
        """Return the normalised rows of ``v``, ``(..., width)``, without gain or bias, in its dtype.

        Args:
            v: the rows.
            scale_dtype: what ``1 / sqrt(...)`` is rounded to (with eps inside the root); None for no rounding.
        """
        v = self.grouped(v)
        if self.kind == "layer":
            v = v - v.mean(-1, keepdim=True)
        squares = (v if self.partial is None else v[..., : self.partial]).pow(2)
        moment = squares.sum(-1, keepdim=True) if self.reduction == "sum" else squares.mean(-1, keepdim=True)
        if self.eps_position == "inside":
            scale = torch.rsqrt(moment + self.eps)
            v = v * (scale if scale_dtype is None else scale.to(scale_dtype).to(v.dtype))
        elif self.eps_position == "outside":
            v = v / (moment.sqrt() + self.eps)
        else:
            v = v / moment.sqrt().clamp_min(self.eps)
        return v.flatten(-2) if self.groups > 1 else v

    def grouped(self, v: _Tensor) -> _Tensor:
        """View rows as the groups that are normalised separately, ``(..., groups, width / groups)``."""
        return v.unflatten(-1, (self.groups, -1)) if self.groups > 1 else v

    def _as_given(self, y: _Tensor) -> _Tensor:
        return y.movedim(-1, 1) if self.axis == "channels" else y

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data, as it stands in JSON and in the manifest."""
        return {**asdict(self), **{name: list(getattr(self, name)) for name in _TUPLES}}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NormSpec:
        """Rebuild a spec from `to_dict`'s data; keys that this version does not know are a ValueError."""
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"expected spec keys among {sorted(known)}, got also {sorted(unknown)}")
        lists = {name: tuple(data.get(name, ())) for name in _TUPLES}
        return cls(**{**data, **lists})


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name without its module."""
    return str(dtype).removeprefix("torch.")
