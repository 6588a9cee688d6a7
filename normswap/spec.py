"""What one norm computes, as data, and that meaning in plain torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

import torch

__all__ = ["NormSpec", "Rounding"]

_HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Rounding:
    """Where a norm rounds, for one pair of input and gain dtypes.

    Attributes:
        middle: the dtype that the normalised row is rounded to before the gain is applied; None where the
            gain is applied in float32.
        out: the dtype of the result.
    """

    middle: torch.dtype | None
    out: torch.dtype

    @property
    def unit(self) -> torch.dtype:
        """The narrowest dtype on the way, whose unit in the last place is that of the result."""
        return self.out if self.out in _HALF or self.middle is None else self.middle

    @property
    def twice(self) -> bool:
        """Whether a rounding to half precision is followed by the product with the gain."""
        return self.middle in _HALF


@dataclass(frozen=True)
class NormSpec:
    """What one norm computes on each row (last dimension) of its input.

    With ``n = x / sqrt(mean(x**2) + eps)`` (kind ``rms``) or ``n = (x - mean(x)) / sqrt(var(x) + eps)`` (kind
    ``layer``, biased variance), the result is ``n * g + b``. Statistics and arithmetic are float32.

    Attributes:
        kind: ``"rms"`` or ``"layer"``.
        width: length of a row; None for a norm without parameters, which takes rows of any length.
        eps: added to the mean square or to the variance.
        gain: ``"w"`` (``g = w``), ``"1+w"`` (``g = 1 + w``, summed in float32) or ``"none"`` (``g = 1``).
        bias: whether ``b`` is there.
        cast: ``"before_gain"``: ``n`` is cast back to a narrower dtype and then multiplied (two roundings, as in
            Llama's class); ``"after_gain"``: everything in float32, cast once at the end (as in ``F.layer_norm``).
        out: dtype of the result: that of the ``"input"``, that of the ``"weight"``, or ``"promote"`` of both.
        gain_name: attribute that holds ``w``; None without gain.
        bias_name: attribute that holds ``b``; None without bias.
        eps_position: ``"inside"`` the root. Room for ``"outside"`` and ``"clamp"``.
        groups: number of equal groups of a row that are normalised separately.
        partial: number of leading columns that the statistics read; None for all.
        gate: None, or the activation of a second input that multiplies the row.
        gate_position: ``"before"`` or ``"after"`` the norm; None without gate.
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
    eps_position: Literal["inside"] = "inside"
    groups: int = 1
    partial: int | None = None
    gate: None = None
    gate_position: None = None

    @property
    def offset(self) -> float:
        """What is added to the stored gain: 1.0 for the form ``1+w``, else 0.0."""
        return 1.0 if self.gain == "1+w" else 0.0

    def rounding(self, x: torch.dtype, gain: torch.dtype | None) -> Rounding:
        """Say where this norm rounds for an input and a gain of these dtypes.

        Args:
            x: dtype of the input.
            gain: dtype of the stored gain; None without gain.
        """
        gain = x if gain is None else gain
        if self.out == "weight":
            return Rounding(gain if self.cast == "before_gain" and gain in _HALF else None, gain)
        out = torch.promote_types(x, gain) if self.out == "promote" else x
        return Rounding(x if self.cast == "before_gain" else None, out)

    def compute(self, x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute what the spec says, in float32 with the norm's own roundings.

        Args:
            x: ``(..., width)``, any floating dtype.
            gain: ``(width,)`` as stored, or None.
            bias: ``(width,)`` as stored, or None.

        Returns:
            ``(..., width)`` in the dtype that `rounding` names.
        """
        where = self.rounding(x.dtype, None if gain is None else gain.dtype)
        n = self._normalise(x.float())
        if where.middle is None:
            if gain is not None:
                n = n * (gain.float() + self.offset)
            if bias is not None:
                n = n + bias.float()
            return n.to(where.out)
        n = n.to(where.middle)
        if gain is not None:
            n = (n.float() * (gain.float() + self.offset)).to(where.out)
        if bias is not None:
            n = n.float() + bias.float()
        return n.to(where.out)

    def compute_exact(self, x: torch.Tensor, gain: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
        """Compute the same in float64 with no rounding on the way; the truth that errors are measured from."""
        n = self._normalise(x.double())
        if gain is not None:
            n = n * (gain.double() + self.offset)
        return n if bias is None else n + bias.double()

    def _normalise(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)

    def to_dict(self) -> dict[str, Any]:
        """Return the spec as plain data, as it stands in JSON and in the manifest."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> NormSpec:
        """Rebuild a spec from `to_dict`'s data; keys that this version does not know are a ValueError."""
        known = {field.name for field in fields(cls)}
        if unknown := set(data) - known:
            raise ValueError(f"expected spec keys among {sorted(known)}, got also {sorted(unknown)}")
        return cls(**data)
