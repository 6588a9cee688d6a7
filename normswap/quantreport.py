"""What folding does to weight-only quantization: the error of rounding to the nearest, before and after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from normswap.algebra import region_of
from normswap.edits import Edits, WeightEdit
from normswap.errors import RangeLost
from normswap.narrowing import round_once
from normswap.places import Read, cut, numbered

__all__ = ["FORMATS", "Errors", "QuantReport", "quant_report"]

FORMATS = {
    "int8": "int8, symmetric, a scale for each output channel",
    "int4": "int4, symmetric, a scale for each 128 inputs",
    "fp8": "fp8 e4m3, a scale for each output channel",
}
_SCHEME = (
    "rounded to the nearest, without calibration: int8 with a scale for each output channel, int4 with one",
    "for each 128 inputs, both symmetric; fp8 e4m3 with a scale for each output channel",
)
_INT8, _INT4, _FP8 = 127.0, 7.0, 448.0
_GROUP = 128
# Elements that are worked on at a time.
_BLOCK = 1 << 18
# A change of the error by less than this is told as none.
_ALIKE = 0.01


@dataclass
class Errors:
    """Sums of squares over weights, from which relative errors follow.

    Attributes:
        before: of the rounding errors of the weights as they are.
        before_size: of these weights.
        met: of the rounding errors before the fold as normalised rows meet them: each times the gain of its column.
        after: of the rounding errors of the folded weights.
        after_size: of the folded weights.
    """

    before: float = 0.0
    before_size: float = 0.0
    met: float = 0.0
    after: float = 0.0
    after_size: float = 0.0

    def __iadd__(self, other: Errors) -> Errors:
        """Pool the sums of two parts."""
        for name in vars(self):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        return self

    def to_dict(self) -> dict[str, float]:
        """Return the relative errors.

        ``before`` and ``after`` are ``|Q(W) - W| / |W|`` in the Frobenius norm. ``before_with_gain`` is
        ``|(Q(W) - W) G| / |W G|``: what the unfolded weights, quantized, err by in what norm and weight compute
        together; of what it becomes, ``after``, it is the fair comparison.
        """
        return {
            "before": _relative(self.before, self.before_size),
            "before_with_gain": _relative(self.met, self.after_size),
            "after": _relative(self.after, self.after_size),
        }

    @property
    def change(self) -> float:
        """The error after the fold over that before it, of what norm and weight compute together."""
        return (self.after / self.met) ** 0.5 if self.met else 1.0


@dataclass
class QuantReport:
    """The errors of every weight that a gain is folded into.

    Attributes:
        consumers: weight to format to errors.
    """

    consumers: dict[str, dict[str, Errors]] = field(default_factory=dict)

    @property
    def total(self) -> dict[str, Errors]:
        """The errors of all of them, pooled."""
        total = {name: Errors() for name in FORMATS}
        for errors in self.consumers.values():
            for name, part in errors.items():
                total[name] += part
        return total

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: relative errors for each weight and in total, and the change in total."""
        return {
            "formats": dict(FORMATS),
            "consumers": {name: _plain(errors) for name, errors in self.consumers.items()},
            "total": {name: {**errors.to_dict(), "change": errors.change} for name, errors in self.total.items()},
        }

    def to_text(self, *, worst: int = 5) -> str:
        """Return a table: the total, and the weights whose error grows most in some format.

        Args:
            worst: number of weights to be shown.
        """
        width = max([len("all folded weights"), *(len(name) for name in self._worst(worst))])
        lines = [f"{'relative error':{width}}  " + "  ".join(f"{name:>16}" for name in FORMATS)]
        lines.append(f"{'':{width}}  " + "  ".join(f"{'before    after':>16}" for _ in FORMATS))
        rows = {"all folded weights": self.total, **{name: self.consumers[name] for name in self._worst(worst)}}
        for name, errors in rows.items():
            told = (errors[kind].to_dict() for kind in FORMATS)
            cells = "  ".join(f"{one['before_with_gain']:7.3%}  {one['after']:7.3%}" for one in told)
            lines.append(f"{name:{width}}  {cells}")
        return "\n".join([*lines, *(f"{name}: {_words(errors)}" for name, errors in self.total.items()), *_SCHEME])

    def _worst(self, count: int) -> list[str]:
        """Return the weights whose error grows most in some format."""
        growth = {name: max(part.change for part in errors.values()) for name, errors in self.consumers.items()}
        return sorted(growth, key=lambda name: growth[name], reverse=True)[:count]


def quant_report(edits: Edits, read: Read) -> QuantReport:
    """Quantize every weight that a gain is folded into by rounding to the nearest, before and after.

    The weights are read in pieces, those whose columns run along the first axis twice; no tensor is held whole.

    Args:
        edits: what folding changes.
        read: reads a stored tensor.

    Raises:
        RangeLost: folded weights overflow the dtype that they are stored in.
    """
    report = QuantReport()
    for weight in edits.weights:
        errors = report.consumers.setdefault(weight.parameter, {name: Errors() for name in FORMATS})
        for name, part in _errors_of(weight, read).items():
            errors[name] += part
    return report


def _errors_of(weight: WeightEdit, read: Read) -> dict[str, Errors]:
    found = {name: Errors() for name in FORMATS}
    largest = _largest(weight, read) if weight.axis == 0 else None
    for start, rows in numbered(_aligned(read(weight.source), _GROUP if weight.axis == 0 else 1)):
        for old, new, gain, outputs in _blocks(weight, rows, start):
            tops = (old.abs().amax(1), new.abs().amax(1)) if largest is None else [top[outputs] for top in largest]
            _add(found, old, new, gain, *tops)
    return found


def _largest(weight: WeightEdit, read: Read) -> list[torch.Tensor]:
    """Return the largest magnitudes of the output channels of a weight whose columns run along its rows."""
    tops = [torch.zeros(0), torch.zeros(0)]
    for start, rows in numbered(read(weight.source)):
        for old, new, _, outputs in _blocks(weight, rows, start):
            for at, matrix in enumerate((old, new)):
                missing = max(0, outputs.stop - len(tops[at]))
                tops[at] = torch.cat([tops[at], torch.zeros(missing)])
                tops[at][outputs] = torch.maximum(tops[at][outputs], matrix.abs().amax(1))
    return tops


def _blocks(
    weight: WeightEdit, rows: torch.Tensor, start: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, slice]]:
    """Yield some outputs at a time of some stored rows: before and after the fold, float32 ``(outputs, columns)``.

    With them the factors ``(columns,)``, and which of all outputs these are.
    """
    region, before = region_of(weight.piece, start, rows)
    if region is None:
        return
    new = round_once(weight.edit.apply(rows, start), rows.dtype)
    if not bool(new.float().isfinite().all()):
        raise RangeLost(weight.key, f"values overflow in {str(rows.dtype).removeprefix('torch.')}")
    pair = [cut(tensor, region).movedim(weight.axis, -1) for tensor in (rows, new)]
    factor = weight.factor
    if weight.axis == 0:
        factor = factor[before : before + len(region[0])]
    columns = pair[0].shape[-1]
    step = max(1, _BLOCK // max(1, columns))
    done = 0
    # What stands between the first axes and the columns is taken apart, for a copy of it all would be large.
    for old_part, new_part in zip(_matrices(pair[0]), _matrices(pair[1]), strict=True):
        for at in range(0, len(old_part), step):
            one, other = old_part[at : at + step].float(), new_part[at : at + step].float()
            yield one, other, factor.float(), slice(done + at, done + at + len(one))
        done += len(old_part)


def _matrices(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the matrices that a tensor is a stack of."""
    if tensor.dim() == 1:
        yield tensor.unsqueeze(0)
    elif tensor.dim() == 2:
        yield tensor
    else:
        for part in tensor:
            yield from _matrices(part)


def _aligned(pieces: Iterable[torch.Tensor], multiple: int) -> Iterator[torch.Tensor]:
    """Yield the same rows in pieces that each have a multiple of some number of them, but for the last."""
    rest: torch.Tensor | None = None
    for piece in pieces:
        whole = piece if rest is None else torch.cat([rest, piece])
        even = len(whole) // multiple * multiple
        # The next piece overwrites this one.
        rest = whole[even:].clone() if even < len(whole) else None
        if even:
            yield whole[:even]
    if rest is not None:
        yield rest


def _add(
    found: dict[str, Errors],
    old: torch.Tensor,
    new: torch.Tensor,
    gain: torch.Tensor,
    old_top: torch.Tensor,
    new_top: torch.Tensor,
) -> None:
    for name in FORMATS:
        error, error_after = _quantized(name, old, old_top).sub_(old), _quantized(name, new, new_top).sub_(new)
        found[name] += Errors(
            _squares(error), _squares(old), _squares(error * gain), _squares(error_after), _squares(new)
        )


def _quantized(name: str, weights: torch.Tensor, top: torch.Tensor) -> torch.Tensor:
    """Round ``(outputs, columns)`` to a format and back, float32; `top` is each output's largest magnitude."""
    if name == "int4":
        even = weights.shape[1] // _GROUP * _GROUP
        groups = weights[:, :even].unflatten(1, (-1, _GROUP)) if even else weights[:, :0].unsqueeze(1)
        parts = [_rounded(groups, groups.abs().amax(2, keepdim=True), _INT4).flatten(1)] if even else []
        if even < weights.shape[1]:
            rest = weights[:, even:]
            parts.append(_rounded(rest, rest.abs().amax(1, keepdim=True), _INT4))
        return torch.cat(parts, 1)
    if name == "int8":
        return _rounded(weights, top.unsqueeze(1), _INT8)
    scale = _scale(top.unsqueeze(1), _FP8)
    return (weights / scale).to(torch.float8_e4m3fn).float().mul_(scale)


def _rounded(weights: torch.Tensor, top: torch.Tensor, steps: float) -> torch.Tensor:
    scale = _scale(top, steps)
    return (weights / scale).round_().mul_(scale)


def _scale(top: torch.Tensor, steps: float) -> torch.Tensor:
    return torch.where(top == 0, 1.0, top / steps)


def _squares(values: torch.Tensor) -> float:
    return float(values.square().sum(dtype=torch.float64))


def _relative(error: float, size: float) -> float:
    return (error / size) ** 0.5 if size else 0.0


def _plain(errors: dict[str, Errors]) -> dict[str, dict[str, float]]:
    return {name: part.to_dict() for name, part in errors.items()}


def _words(errors: Errors) -> str:
    change = errors.change - 1
    if abs(change) <= _ALIKE:
        return f"folding leaves the error as it is ({change:+.1%})"
    return (
        f"folding {'hurts' if change > 0 else 'helps'}: the error of norm and weight together changes by {change:+.1%}"
    )
