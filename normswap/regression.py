"""Find the formula of a norm in float32: regress what it returns on the candidates for its normalised row."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import torch

from normswap.proof import ELEMENTS, evaluate, gates, relative, rows, try_run
from normswap.replica import CHANNELS, Arrangement, NotRun, Replica, Unfit
from normswap.signatures import required_names
from normswap.spec import NormSpec, dtype_name

__all__ = ["find_formula"]

_FITS = 1e-4
_KINDS: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
_FORMS: tuple[tuple[Literal["w", "1+w"], float], ...] = (("w", 0.0), ("1+w", 1.0))
_GATES: tuple[tuple[Literal["before", "after"], Literal["silu", "sigmoid"]], ...] = (
    ("before", "silu"),
    ("after", "silu"),
    ("before", "sigmoid"),
    ("after", "sigmoid"),
)
_RANKS: dict[Arrangement, int] = {"flat": 2, "sequence": 3, "image": 4, "volume": 5, "heads": 4}


@dataclass(frozen=True)
class _Trial:
    """One run on large rows, beside which eps is nothing: input, gate, result."""

    x: torch.Tensor
    gate: torch.Tensor | None
    y: torch.Tensor


def find_formula(replica: Replica) -> NormSpec:
    """Find kind, gain, bias, gate, groups and eps; the roundings of half precision are found later.

    The replica is left as it is to be called: with the names of its row and gate, and the arrangement of its rows.

    Raises:
        Unfit: it computes none of the known formulas; the reason says what it does instead, as far as it can be told.
    """
    spec = replace(_first_fit(replica), eps=1.0)
    spec = replace(spec, input_name=replica.input_name, gate_name=replica.gate_name)
    if replica.arrangement != "rows":
        axis: Literal["last", "channels"] = "channels" if replica.arrangement in CHANNELS else "last"
        x = replica.arrange(rows(replica, 8))
        y = replica.run(x, None if spec.gate is None else x, arranged=True)
        ranks = (_RANKS[replica.arrangement],)
        spec = replace(spec, axis=axis, ranks=ranks, joins=replica.joins, dense=y.is_contiguous())
    eps, position = _find_eps(replica, spec)
    spec = replace(spec, eps=eps, eps_position=position)
    return _with_optional_gate(replica, spec) if spec.gate is None else spec


def _first_fit(replica: Replica) -> NormSpec:
    required = required_names(replica.cls)
    orders = [required, required[::-1]]
    if len(required) < 2:
        row = [*required, *replica.names][0]
        # A gate may be required in fact, though it has a default.
        orders = [[row], *([row, name] for name in replica.names[:3] if name != row)]
    arrangements: list[tuple[Arrangement, int]] = [("rows", 1)]
    if len(replica.shape) == 1:
        arrangements += [("image", 1), ("sequence", 1), ("volume", 1)]
        arrangements += [("heads", heads) for heads in replica.head_counts()]
        # Last, since a matrix of rows looks the same to a norm over channels.
        arrangements += [("flat", 1)]
    first: Unfit | None = None
    for order, (arrangement, joins) in itertools.product(orders, arrangements):
        replica.input_name, replica.gate_name = order[0], order[1] if len(order) == 2 else None
        replica.arrangement, replica.joins = arrangement, joins
        try:
            return _fit(replica)
        except Unfit as unfit:
            if isinstance(unfit, _NoNorm) and len(order) == 1:
                raise
            # The first that it says of rows that it takes; of others, it says nothing.
            if first is None or (isinstance(first, NotRun) and not isinstance(unfit, NotRun)):
                first = unfit
    assert first is not None
    raise first


class _NoNorm(Unfit):
    """It runs on rows and normalises nothing, however they are arranged."""


def _fit(replica: Replica) -> NormSpec:
    replica.randomise(torch.float32)
    # A few rows tell most that is no norm; the wider a module, the longer that takes.
    for count in (8, max(16, min(1024, ELEMENTS // math.prod(replica.shape) // 4))):
        x = 1e3 * (rows(replica, count) + 0.5)
        gate = None if replica.gate_name is None else 2 * torch.randn(x.shape)
        y = replica.run(x, gate)
        if y.dtype != torch.float32:
            raise Unfit(f"it returns {dtype_name(y.dtype)} for a float32 input and float32 parameters")
        if not y.isfinite().all():
            raise Unfit("it returns values that are not finite for an ordinary input")
        if not torch.equal(replica.run(x, gate), y):
            raise Unfit("it gives another result the second time", is_norm=True)
        if relative(replica.run(4 * x, gate), y) > 1e-3:
            if gate is not None and relative(replica.run(4 * x, 4 * gate), y) < 1e-3:
                raise Unfit("it normalises a mixture of its two inputs, which is not swapped", is_norm=True)
            raise _NoNorm("it does not normalise: its output changes with the scale of its input", of_rows=False)
    trial = _Trial(x, gate, y)
    for candidate in _plain_candidates(replica, gate is not None):
        if spec := _matched(replica, candidate, trial):
            return spec
    _check_rows_are_independent(replica, trial)
    for candidate in _rare_candidates(replica, trial):
        if spec := _matched(replica, candidate, trial):
            return spec
    if spec := _scaled_before(replica, trial):
        return spec
    raise _unknown(replica, trial)


def _plain_candidates(replica: Replica, gated: bool) -> Iterator[NormSpec]:
    base = NormSpec("rms", None, 0.0, gain="none", gain_name=None)
    base = replace(base, heads=replica.shape[0] if len(replica.shape) == 2 else 1)
    if not gated:
        yield from (replace(base, kind=kind) for kind in _KINDS)
        return
    for position, activation in _GATES:
        yield replace(base, gate=activation, gate_position=position)


def _rare_candidates(replica: Replica, trial: _Trial) -> Iterator[NormSpec]:
    plain = list(_plain_candidates(replica, trial.gate is not None))
    if (partial := _columns_read(replica, trial)) < replica.width:
        yield from (replace(spec, partial=partial) for spec in plain if spec.kind == "rms")
    if len(replica.shape) == 1:
        for groups in range(2, replica.width // 2 + 1):
            if replica.width % groups == 0:
                yield from (replace(spec, groups=groups) for spec in plain)


def _matched(replica: Replica, candidate: NormSpec, trial: _Trial) -> NormSpec | None:
    """Return the candidate with its gain and bias named, where the result is a multiple of its row plus a constant."""
    n = candidate.compute_exact(trial.x, None, None, trial.gate)
    y, n = (t.double().reshape(-1, *replica.shape) for t in (trial.y, n))
    n_mean, y_mean = n.mean(0), y.mean(0)
    gain = ((n - n_mean) * (y - y_mean)).sum(0) / (n - n_mean).pow(2).sum(0)
    bias = y_mean - gain * n_mean
    if not relative(gain * n + bias, y) < _FITS:
        return None
    spec = _name_gain(replica, candidate, gain)
    if bias.abs().max() < _FITS:
        return spec
    for name, tensor in replica.tensors.items():
        if relative(bias, candidate.row(tensor).double().expand_as(bias)) < 1e-3:
            if spec.gate is not None:
                raise Unfit("it is gated and adds a bias, which is not swapped", is_norm=True)
            return replace(spec, bias=True, bias_name=name, width=replica.width if replica.sized else None)
    raise Unfit("what it adds after the gain is no parameter of its own", is_norm=True)


def _name_gain(replica: Replica, spec: NormSpec, gain: torch.Tensor) -> NormSpec:
    """Say which parameter the gain is; a constant factor is that of a sum of squares in the place of their mean."""
    width = replica.width if replica.sized else None
    spec = replace(spec, width=width)
    length = spec.partial or replica.width // spec.groups
    reductions: tuple[tuple[Literal["mean", "sum"], float], ...] = (("mean", 1.0), ("sum", length**-0.5))
    for reduction, factor in reductions if spec.kind == "rms" and spec.gate is None else reductions[:1]:
        found = replace(spec, reduction=reduction)
        for name, tensor in replica.tensors.items():
            for form, offset in _FORMS:
                if relative(gain, (factor * (spec.row(tensor).double() + offset)).expand_as(gain)) < _FITS:
                    return replace(found, gain=form, gain_name=name)
        if relative(gain, torch.full_like(gain, factor)) < _FITS:
            return found
    unbiased = gain * (length / (length - 1)) ** 0.5
    for tensor in replica.tensors.values():
        if spec.kind == "layer" and relative(unbiased, spec.row(tensor).double().expand_as(gain)) < _FITS:
            raise Unfit("it divides by the unbiased standard deviation, of n - 1, which is not swapped", is_norm=True)
    raise Unfit(f"its gain is neither w nor 1 + w of a parameter ({spec.kind} normalisation)", is_norm=True)


def _scaled_before(replica: Replica, trial: _Trial) -> NormSpec | None:
    """Try a gain that multiplies the row before it is normalised."""
    for spec in _plain_candidates(replica, trial.gate is not None):
        for (name, tensor), (form, _) in itertools.product(replica.tensors.items(), _FORMS):
            if tensor.numel() == 1 or spec.gate is not None:
                continue
            found = replace(spec, gain=form, gain_name=name, gain_position="before", width=replica.width)
            if relative(found.compute_exact(trial.x, tensor, None, trial.gate), trial.y) < _FITS:
                return found
    return None


def _columns_read(replica: Replica, trial: _Trial) -> int:
    """Return how many leading columns the first column's result depends on."""
    x, gate, y = (None if t is None else t[:, :2] for t in (trial.x, trial.gate, trial.y))
    assert x is not None and y is not None

    def unread(first: int) -> bool:
        other = x.clone()
        other[..., first:] *= 3.0
        return relative(replica.run(other, gate)[..., :1], y[..., :1]) < 1e-6

    low, high = 1, replica.width
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if unread(middle) else (middle + 1, high)
    return low


def _check_rows_are_independent(replica: Replica, trial: _Trial) -> None:
    other = 1e3 * torch.randn_like(trial.x)
    other[:, 0] = trial.x[:, 0]
    if relative(replica.run(other, trial.gate)[:, 0], trial.y[:, 0]) > 1e-3:
        raise Unfit("its rows are not independent of each other", is_norm=True)


def _unknown(replica: Replica, trial: _Trial) -> Unfit:
    centred = trial.x.double()
    deviation = centred.std(-1, keepdim=True)
    n = (centred / deviation).reshape(-1, *replica.shape)
    y = trial.y.double().reshape(-1, *replica.shape)
    gain = (n * y).sum(0) / n.pow(2).sum(0)
    if relative(gain * n, y) < _FITS:
        return Unfit("it divides by the standard deviation of a row that it does not centre", is_norm=True)
    if trial.gate is not None:
        return Unfit("it is no norm with a gate by silu or sigmoid of its second argument", is_norm=False)
    return Unfit("it is neither RMSNorm nor LayerNorm over the last dimension")


def _find_eps(replica: Replica, spec: NormSpec) -> tuple[float, Literal["inside", "outside", "clamp"]]:
    """Feed rows so close to zero that eps alone is left, and rows as large as it, which tell where it stands."""
    far = _roots(replica, spec, 1e-16)
    tiny = float(far.root.median())
    if not 0 <= tiny < float("inf"):
        raise Unfit("what it adds under the root cannot be measured", is_norm=True)
    if relative(far.root, far.moment) < 1e-3:
        return 0.0, "inside"
    near = _roots(replica, spec, tiny / float(far.moment.mean() / 1e-16))
    excess = (far.root.pow(2) - far.moment.pow(2)).median(), (far.root - far.moment).median(), far.root.median()
    positions: tuple[Literal["inside", "outside", "clamp"], ...] = ("inside", "outside", "clamp")
    for position, eps in zip(positions, (float(value) for value in excess), strict=True):
        if position == "inside":
            expected = (near.moment.pow(2) + eps).sqrt()
        else:
            expected = near.moment + eps if position == "outside" else near.moment.clamp_min(eps)
        if relative(near.root, expected) < 1e-3:
            return _rounded(replica, eps), position
    raise Unfit("what it adds under the root cannot be measured", is_norm=True)


@dataclass(frozen=True)
class _Roots:
    """What large elements were divided by, and the root of the moment of their rows."""

    root: torch.Tensor
    moment: torch.Tensor


def _roots(replica: Replica, spec: NormSpec, scale: float) -> _Roots:
    replica.randomise(torch.float32)
    if spec.bias_name is not None:
        # A bias would swallow the tiny products that eps is read from.
        replica.tensors[spec.bias_name].zero_()
    x = scale * (rows(replica, min(64, max(8, ELEMENTS // replica.width))) + 0.5)
    gate = None if spec.gate is None else 1 + torch.rand(x.shape)
    y = replica.run(x, gate).double()
    v, factor = x.double(), spec.scale(replica.get(spec.gain_name), torch.float64)
    if factor is not None and spec.gain_position == "before":
        v, factor = v * factor, None
    activation = None if gate is None else spec.activation(gate.double())
    if activation is not None and spec.gate_position == "before":
        v, activation = v * activation, None
    for multiplier in (factor, activation):
        y = y if multiplier is None else y / multiplier
    v, y = spec.grouped(v), spec.grouped(y)
    if spec.kind == "layer":
        v = v - v.mean(-1, keepdim=True)
    squares = (v if spec.partial is None else v[..., : spec.partial]).pow(2)
    moment = squares.sum(-1, keepdim=True) if spec.reduction == "sum" else squares.mean(-1, keepdim=True)
    large = v.abs() > v.abs().mean(-1, keepdim=True)
    return _Roots((v / y)[large], moment.sqrt().expand_as(v)[large])


def _rounded(replica: Replica, eps: float) -> float:
    """Return the setting of the module that the measured number is, or else the number."""
    known = [*replica.numbers(), torch.finfo(torch.float32).eps, float(f"{eps:.3g}")]
    for value in (*known, *(number * replica.width**-0.5 for number in known)):
        if abs(eps - value) <= 3e-5 * value:
            return value
    return eps


def _with_optional_gate(replica: Replica, spec: NormSpec) -> NormSpec:
    """Try the arguments that it can be called without as a gate."""
    if spec.kind != "rms" or spec.bias or spec.eps_position != "inside" or spec.reduction != "mean":
        return spec
    for name in replica.names:
        if name == replica.input_name:
            continue
        replica.gate_name = name
        for position, activation in _GATES:
            gated = replace(spec, gate=activation, gate_position=position, gate_optional=True, gate_name=name)
            x = rows(replica, 16)
            gate = gates(gated, x)[1]
            y = try_run(replica, x, gate)
            if y is None:
                break
            if relative(y, evaluate(replica, gated, x, gate)) < _FITS:
                return gated
    replica.gate_name = None
    return spec
