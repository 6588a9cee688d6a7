"""Hold a formula to what the original does: on fresh parameters, extreme rows, other strides, and differentiated."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import nn

from normswap.meter import NormMeter, units_from_exact
from normswap.replica import CHANNELS, Replica, Unfit
from normswap.spec import NormSpec, dtype_name
from normswap.stats import FLOAT32_NOISE, ulp_distance

__all__ = [
    "ELEMENTS",
    "disagreement",
    "evaluate",
    "gates",
    "prove",
    "prove_any_width",
    "prove_extremes",
    "prove_followers",
    "prove_gradients",
    "prove_invariance",
    "relative",
    "row_count",
    "rows",
    "try_run",
]

# Numbers that one comparison looks at, of short rows and of long ones. Of 2**15, right formulas let 3 differ and wrong
# ones 6,000, where 32 are allowed; of long rows there have to be some, as what differs may be one number of each row.
_NUMBERS, ELEMENTS, _ROWS = 1 << 15, 1 << 17, 32
# Right formulas differ in at most one of ten thousand elements, by the order of summation; wrong ones in one of five.
_AGREEING = 0.999


def prove(replica: Replica, spec: NormSpec, pairs: Iterable[tuple[torch.dtype, torch.dtype]]) -> None:
    """Compare with the original on fresh parameters and fresh inputs: ordinary, large, and small beside eps.

    Raises:
        Unfit: they disagree.
    """
    small = max(spec.eps or 1e-12, 1e-30)
    scales = (1.0, 1e3, 1e6, max(1e-16, small**0.5 if spec.eps_position == "inside" else small), 1e-12)
    for x_dtype, gain_dtype in pairs:
        if not spec.covers(x_dtype, gain_dtype if spec.gain_name else None):
            continue
        for scale in scales:
            if x_dtype == torch.float16 and not 1e-3 < scale < 1e4:
                continue
            replica.randomise(gain_dtype, wide=scale == 1.0)
            x = scale * (rows(replica, row_count(replica)) - 0.5)
            if scale == 1.0:
                # Rows that one element outweighs, as trained models have them: what is normalised is large there.
                x[:, ::4, ..., replica.width // 3] *= 300.0
            x = x.to(x_dtype)
            for gate in gates(spec, x):
                y = try_run(replica, x, gate)
                if y is None:
                    continue
                if fault := disagreement(spec, x, gate, replica.tensors, y):
                    # The regression held for large rows in float32, so a smaller row that is off is off by eps.
                    where = "; eps may stand elsewhere" if x_dtype == torch.float32 and scale < 1e3 else ""
                    raise Unfit(f"the formula found for it is not proved ({fault}{where})", is_norm=True)


def prove_any_width(replica: Replica, spec: NormSpec) -> None:
    """Hold a norm whose parameters do not say the length of a row to its formula on rows twice as long.

    Raises:
        Unfit: something in the formula depends on the length.
    """
    shape = replica.shape
    replica.shape = (*shape[:-1], 2 * shape[-1])
    try:
        prove(replica, spec, ((torch.float32, torch.float32),))
    except Unfit:
        raise Unfit(
            "what it computes depends on the length of the row, which no parameter says", is_norm=True
        ) from None
    finally:
        replica.shape = shape


def prove_invariance(replica: Replica, spec: NormSpec) -> NormSpec:
    """Run once more, in training mode, in other ranks and strides: the result must stay.

    Returns:
        The spec, with the ranks that it runs in where it does not run in all.

    Raises:
        Unfit: it does not.
    """
    replica.randomise(torch.float32)
    x = rows(replica, 24)
    row = replica.shape
    once = tuple(1 for _ in row)
    many = max(2, min(100, 4 * ELEMENTS // x.numel()))
    views: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t[:, :2],
        lambda t: t[:, :6],
        lambda t: t.repeat(1, many, *once),
    ]
    if replica.arrangement == "rows":
        views += [
            lambda t: t.reshape(24, *row)[0],
            lambda t: t.reshape(24, *row),
            lambda t: t.reshape(24, *row)[:1],
            lambda t: t.reshape(24, *row)[:7],
            lambda t: t[:1],
            lambda t: t[:1, :1],
            lambda t: t.reshape(2, 3, 4, *row),
            lambda t: t.reshape(24, *row).repeat(many, *once),
            lambda t: torch.cat([t, t], -1)[..., : replica.width],
            lambda t: t.transpose(-1, -2).contiguous().transpose(-1, -2),
        ]
    ran: dict[int, bool] = {}
    for gate in gates(spec, x):
        y = replica.run(x, gate)
        if not torch.equal(replica.run(x, gate), y):
            raise Unfit("it gives another result the second time", is_norm=True)
        if not torch.equal(replica.run(x, gate, training=True), y):
            raise Unfit("it computes something else in training mode", is_norm=True)
        for view in views:
            given = view(x)
            result = try_run(replica, given, None if gate is None else view(gate))
            if result is not None and relative(result, view(y)) > 1e-5:
                raise Unfit(f"it computes something else on an input of shape {list(given.shape)}", is_norm=True)
            ran[given.dim()] = ran.get(given.dim(), True) and result is not None
    if replica.arrangement in CHANNELS:
        return replace(spec, ranks=tuple(_ranks_of_channels(replica, x, y, gate)))
    if replica.arrangement != "rows" or all(ran.values()):
        return spec
    return replace(spec, ranks=tuple(sorted(rank for rank, did in ran.items() if did)))


def _ranks_of_channels(replica: Replica, x: torch.Tensor, y: torch.Tensor, gate: torch.Tensor | None) -> Iterator[int]:
    """Yield the ranks of an input in which a norm over channels computes the same."""
    for sizes in ((12,), (3, 4), (2, 2, 3)):

        def channels(t: torch.Tensor, sizes: tuple[int, ...] = sizes) -> torch.Tensor:
            return t.movedim(-1, 1).reshape(2, replica.width, *sizes)

        try:
            result = replica.run(channels(x), None if gate is None else channels(gate), arranged=True)
        except Unfit:
            continue
        if relative(result, channels(y)) <= 1e-5:
            yield 2 + len(sizes)


def prove_extremes(replica: Replica, spec: NormSpec) -> None:
    """Feed rows that no ordinary run brings: the pattern of what is not finite must be the formula's.

    Zeros, an infinity or a NaN in one column, a constant row, a single number, denormal and huge numbers.

    Raises:
        Unfit: it is another.
    """
    replica.randomise(torch.float32)
    x = rows(replica, 24)
    flat = x.reshape(24, *replica.shape)
    flat[0] = 0.0
    for row, value in ((1, torch.nan), (2, torch.inf), (3, -torch.inf)):
        flat[row, ..., -1] = value
    flat[4] = 3.0
    flat[5] = 0.0
    flat[5, ..., 1] = 7.0
    flat[6] *= 1e-40
    if spec.kind == "rms":
        # Of numbers whose squares overflow, torch's own LayerNorm makes one thing on a CPU and another on a GPU.
        flat[7] *= 1e30
    for gate in gates(spec, x):
        expected = evaluate(replica, spec, x, gate)
        got = replica.run(x, gate)
        if not (torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())):
            raise Unfit("it treats zeros, infinities or NaN in its input in a way of its own", is_norm=True)


def prove_gradients(replica: Replica, spec: NormSpec) -> None:
    """Differentiate it with gradients on, as training does: result and gradients must be those of the formula.

    Raises:
        Unfit: they are not.
    """
    x = rows(replica, 24)
    direction = torch.randn_like(x)
    for gate in gates(spec, x):
        replica.randomise(torch.float32)
        with torch.enable_grad():
            replica.track_gradients()
            inputs = [x.clone().requires_grad_(), *([] if gate is None else [gate.clone().requires_grad_()])]
            tensors = [replica.tensors[name] for name in (spec.gain_name, spec.bias_name) if name is not None]
            leaves = [*inputs, *(tensor for tensor in tensors if tensor.requires_grad)]
            y = replica.run(*inputs, training=True)
            expected = evaluate(replica, spec, *inputs)
            if relative(y.detach(), expected.detach()) > 1e-5:
                raise Unfit("it computes something else when gradients are recorded", is_norm=True)
            if not y.requires_grad:
                raise Unfit("no gradient flows through it", is_norm=True)
            got = torch.autograd.grad(y, leaves, direction, allow_unused=True)
            wanted = torch.autograd.grad(expected, leaves, direction)
        for one, other in zip(got, wanted, strict=True):
            if one is None or relative(one, other) > 1e-3:
                raise Unfit("its gradients are not those of its formula", is_norm=True)


def prove_followers(replica: Replica, spec: NormSpec) -> NormSpec:
    """Find in which order its children follow the norm, and prove it: in training mode too, with the same seed.

    Returns:
        The spec with that order, and without the dtypes in which something lies between, such as a later cast.

    Raises:
        Unfit: no order gives what it computes.
    """
    active = [name for name, child in replica.children.items() if not isinstance(child, nn.Identity)]
    if not active:
        return spec
    for order in itertools.permutations(active):
        if _is_followed(replica, spec, order, torch.float32):
            halves = (torch.bfloat16, torch.float16)
            other = [
                dtype for dtype in halves if spec.covers(dtype, None) and not _is_followed(replica, spec, order, dtype)
            ]
            return replace(spec, then=order, own_code=(*spec.own_code, *(dtype_name(dtype) for dtype in other)))
    raise Unfit(f"its norm does not simply stand before its other modules ({', '.join(active)})", is_norm=True)


def _is_followed(replica: Replica, spec: NormSpec, order: Iterable[str], dtype: torch.dtype) -> bool:
    replica.randomise(dtype)
    x = rows(replica, 24).to(dtype)
    for gate, training in itertools.product(gates(spec, x), (False, True)):
        for child in replica.children.values():
            child.train(training)
        row, beside = replica.arrange(x), None if gate is None else replica.arrange(gate)
        torch.manual_seed(1)
        y = replica.run(row, beside, training=training, arranged=True)
        for name in order:
            y = replica.children[name](y)
        torch.manual_seed(1)
        if not torch.equal(y, replica.run_whole(row, beside, training=training)):
            return False
    return True


def evaluate(replica: Replica, spec: NormSpec, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor:
    """Compute a spec on a replica's tensors, for rows as `Replica.run` takes and gives them."""
    spec = spec.plain()
    return spec.compute(x, replica.get(spec.gain_name), replica.get(spec.bias_name), gate)


def disagreement(
    spec: NormSpec, x: torch.Tensor, gate: torch.Tensor | None, tensors: Mapping[str, torch.Tensor], y: torch.Tensor
) -> str | None:
    """Say how far an original's result is from the formula; None where it is the formula's.

    Args:
        spec: the formula.
        x: rows, as `Replica.run` takes them.
        gate: of the shape of ``x``, or None.
        tensors: the original's parameters by name.
        y: its result.
    """
    spec = spec.plain()
    gain, bias = (None if name is None else tensors[name] for name in (spec.gain_name, spec.bias_name))
    where = spec.rounding(x.dtype, None if gain is None else gain.dtype)
    pair = f"{dtype_name(x.dtype)} input" + (f", {dtype_name(gain.dtype)} gain" if gain is not None else "")
    if y.dtype != where.out:
        return f"{pair}: expected {dtype_name(where.out)}, got {dtype_name(y.dtype)}"
    computed = spec.compute(x, gain, bias, gate)
    if where.unit == torch.float32:
        units = units_from_exact(spec, x, gain, bias, y, gate)
        if units is not None and units <= 2 * FLOAT32_NOISE:
            return None
    elif _agree(y, computed, neighbours=not where.twice):
        return None
    meter = NormMeter(spec)
    meter.add(x, gain, bias, y, computed, gate)
    if where.unit == torch.float32:
        off = meter.exact_ulp_original
        return None if off <= 2 * FLOAT32_NOISE else f"{pair}: {off:.3g} units from the formula in float64"
    agreeing = meter.agreeing / meter.elements
    if not (meter.max_ulp <= (2 if where.twice else 1) and agreeing >= _AGREEING):
        return f"{pair}: {meter.max_ulp:.3g} units off, {100 * agreeing:.2f}% identical"
    return None


def _agree(y: torch.Tensor, computed: torch.Tensor, *, neighbours: bool) -> bool:
    """Whether all bits agree or, if `neighbours`, nearly all and the rest are neighbours: what needs no measuring."""
    other = y != computed
    differing = int(other.sum())
    if not differing:
        return True
    if not neighbours or differing > (1 - _AGREEING) * y.numel():
        return False
    return float(ulp_distance(y[other], computed[other]).max()) <= 1


def try_run(replica: Replica, x: torch.Tensor, gate: torch.Tensor | None = None) -> torch.Tensor | None:
    """Run a replica; None where it does not run on such an input."""
    try:
        return replica.run(x, gate)
    except Unfit:
        return None


def rows(replica: Replica, count: int) -> torch.Tensor:
    """Draw ``(2, count / 2, *shape)`` normal numbers; the second size is a multiple of four."""
    return torch.randn(2, 4 * ((count + 7) // 8), *replica.shape)


def gates(spec: NormSpec, x: torch.Tensor) -> list[torch.Tensor | None]:
    """Return the gates that a norm is called with beside an input: none, a random one, or the one and the other."""
    if spec.gate is None:
        return [None]
    gate = (2 * torch.randn(x.shape)).to(x.device, x.dtype)
    return [None, gate] if spec.gate_optional else [gate]


def row_count(replica: Replica) -> int:
    """Return how many rows one comparison takes."""
    row = math.prod(replica.shape)
    return max(8, min(_ROWS, ELEMENTS // row), _NUMBERS // row)


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the relative distance of ``a`` from ``b``, in the root of the mean square."""
    if a.shape == b.shape and torch.equal(a, b):
        return 0.0
    return float((a.double() - b.double()).norm() / b.double().norm())
