"""Judge each swapped norm on the activations of a real run, beside its original and the float64 truth."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from normswap.replica import ANY_WIDTH, bare
from normswap.spec import NormSpec
from normswap.stats import FLOAT32_NOISE, ulp_distance, ulp_size

__all__ = ["NormMeter", "NormUnderTest", "trial_inputs", "units_from_exact", "watching"]

_HALF = (torch.float16, torch.bfloat16)
_SAMPLE = 1 << 18
# One in so many elements of a float16 result may differ: of those that cancel further nothing can be said.
_CANCELLED = 1e3
# Upper ends of the histogram's bins, in units in the last place; the last bin has none.
_EDGES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0)


def _row_alone(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return next((value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), None), None


@dataclass(frozen=True)
class NormUnderTest:
    """A swapped norm inside the converted model, and what it is held against.

    Attributes:
        name: its name in the model.
        spec: what it computes.
        module: the swapped module itself.
        original: the original class's forward with this module's own parameters.
        gain: returns the gain as stored, or None.
        bias: returns the bias as stored, or None.
        bind: finds the row and the gate, if any, among the arguments of a call; no row where there are others.
    """

    name: str
    spec: NormSpec
    module: nn.Module
    original: Callable[..., Any]
    gain: Callable[[], torch.Tensor | None]
    bias: Callable[[], torch.Tensor | None]
    bind: Callable[[tuple[Any, ...], dict[str, Any]], tuple[torch.Tensor | None, torch.Tensor | None]] = _row_alone

    def swapped(self, *args: Any, **kwargs: Any) -> Any:
        """Run the fused norm, without what its module applies to the result."""
        with bare(self.module, self.spec.then):
            return self.module.forward(*args, **kwargs)


@dataclass
class NormMeter:
    """Collect how far a swapped norm is from its original and both from the float64 truth, call by call.

    Let ``s = max(|n * g|, |b|)``, for a LayerNorm also ``rms(x) * |g| / sqrt(var + eps)`` (what the mean is
    subtracted from): the largest term behind a result. A small difference of large terms has no better digits to
    agree on than those terms have in float32. So, between original and swapped:

    - 16-bit result: the number of representable numbers between the two, and 0 where they differ by no more than
      `FLOAT32_NOISE` units of float32 at ``s``. The chance that such noise flips a rounding is in proportion to
      ``s / |out|``: `cancellation` is the mean of that (at least 1, at most `_CANCELLED`), by which the fraction of
      differing elements may grow. It is 1 for an RMSNorm without bias.
    - 16-bit result of a 16-bit product and a bias (three roundings): units of the dtype at ``max(|out|, s)``.
    - float32 result of a 16-bit row (a float32 gain on a 16-bit input): units of the row's dtype times ``|g|``.
    - float32 result otherwise: units of float32 at ``max(|out|, s)``.

    The distances from the truth are in units of the result's dtype at ``max(|out|, s)``.

    ``histogram`` counts the elements by these units, `_EDGES` being the bins' upper ends; ``worst`` is the call, row
    and channel of the element furthest apart, which is ``most`` units, None where none is.
    """

    spec: NormSpec
    calls: int = 0
    elements: int = 0
    dtype: torch.dtype | None = None
    middle: torch.dtype | None = None
    twice: bool = False
    max_ulp: float = 0.0
    sum_ulp: float = 0.0
    identical: int = 0
    agreeing: int = 0
    nonfinite_differs: int = 0
    sum_cancellation: float = 0.0
    exact_ulp_original: float = 0.0
    exact_ulp_swapped: float = 0.0
    square_original: float = 0.0
    square_swapped: float = 0.0
    square_exact: float = 0.0
    histogram: list[int] = field(default_factory=lambda: [0] * (len(_EDGES) + 1))
    worst: tuple[int, int, int] | None = None
    most: float = 0.0
    problems: list[str] = field(default_factory=list)

    @property
    def cancellation(self) -> float:
        """Mean of ``s / |out|``: 1 where no result is a difference of larger terms."""
        return self.sum_cancellation / self.elements if self.elements else 1.0

    @torch.no_grad()
    def add(
        self,
        x: torch.Tensor,
        gain: torch.Tensor | None,
        bias: torch.Tensor | None,
        original: torch.Tensor,
        swapped: torch.Tensor,
        gate: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Take in the results of one call.

        Args:
            x: what the norm was called on, as `NormSpec.compute` takes it.
            gain: as stored, or None.
            bias: as stored, or None.
            original: what the original class makes of ``x``.
            swapped: what the swapped norm made of ``x``.
            gate: of the shape of ``x``; None for a call without.
            rows: the numbers of these rows in the call; None where they are all of it.
        """
        if original.dtype != swapped.dtype or original.shape != swapped.shape:
            self.problems.append(
                f"returned {swapped.dtype} {tuple(swapped.shape)} where the original returns "
                f"{original.dtype} {tuple(original.shape)}"
            )
            return
        self.calls += 1
        if swapped.numel() == 0:
            return
        given, spec = self.spec, self.spec.plain()
        x = given.rows(x.detach())
        original, swapped = (given.result_rows(t.detach()) for t in (original, swapped))
        gate = None if gate is None else given.rows(gate.detach())
        rounding = spec.rounding(x.dtype, None if gain is None else gain.dtype)
        self.dtype, self.middle, self.twice = original.dtype, rounding.middle, rounding.twice
        exact = spec.compute_exact(x, gain, bias, gate)
        at, g, after = _scales(spec, x, gain, bias, gate, exact)
        finite = original.isfinite() & swapped.isfinite() & exact.isfinite()
        every = bool(finite.all())
        if not every:
            # Only the pattern of NaN and infinities is compared there; the figures are those of the rest.
            same = (original == swapped) | (original.isnan() & swapped.isnan())
            self.nonfinite_differs += int((~same & ~(original.isfinite() & swapped.isfinite())).sum())
            exact, at = (torch.where(finite, value, 1.0) for value in (exact, at))
        wide = original.double() if every else torch.where(finite, original.double(), exact)
        unit = ulp_size(torch.maximum(at, exact.abs()), original.dtype)
        off = (wide - exact).abs()
        self.elements += original.numel()
        self.exact_ulp_original = max(self.exact_ulp_original, float((off / unit).max()))
        self.square_original += float(off.pow(2).sum())
        self.square_exact += float(exact.pow(2).sum())
        if spec.kind == "layer" or bias is not None:
            shrunk = (at / exact.abs()).nan_to_num(1.0, _CANCELLED).clamp(1.0, _CANCELLED)
            self.sum_cancellation += float(shrunk.sum())
        else:
            self.sum_cancellation += original.numel()
        if every and torch.equal(original, swapped):
            self.identical += original.numel()
            self.agreeing += original.numel()
            self.histogram[0] += original.numel()
            self.exact_ulp_swapped = max(self.exact_ulp_swapped, float((off / unit).max()))
            self.square_swapped += float(off.pow(2).sum())
            return
        other = swapped.double() if every else torch.where(finite, swapped.double(), exact)
        off = (other - exact).abs()
        self.exact_ulp_swapped = max(self.exact_ulp_swapped, float((off / unit).max()))
        self.square_swapped += float(off.pow(2).sum())
        gap = (wide - other).abs()
        noise = gap <= FLOAT32_NOISE * ulp_size(at, torch.float32)
        if original.dtype in _HALF and self.twice and bias is not None:
            ulp = (gap / unit).masked_fill(noise, 0.0)
        elif original.dtype in _HALF:
            ulp = ulp_distance(original, swapped).masked_fill(noise, 0.0)
        elif self.twice and self.middle is not None:
            # The normalised row, as it is before what it is multiplied by.
            n = spec.compute_exact(x, gain if spec.gain_position == "before" else None, None, gate)
            n = n if after is None else n / after
            n = n if every else torch.where(finite, n, 1.0)
            ulp = (gap / (ulp_size(n, self.middle) * g)).masked_fill(noise, 0.0)
        else:
            ulp = gap / unit
        ulp = ulp if every else ulp.masked_fill(~finite, 0.0)
        bits = (original == swapped) | (original.isnan() & swapped.isnan())
        self._count(ulp if every else ulp.masked_fill(~finite & ~bits, float("inf")), rows)
        self.max_ulp = max(self.max_ulp, float(ulp.max()))
        self.sum_ulp += float(ulp.sum())
        self.identical += int(bits.sum())
        self.agreeing += int((bits | (noise & finite)).sum())

    def _count(self, ulp: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Sort the distances of one call into the histogram, and remember the greatest so far."""
        edges = torch.tensor(_EDGES, dtype=ulp.dtype, device=ulp.device)
        counts = torch.bucketize(ulp.flatten(), edges).bincount(minlength=len(_EDGES) + 1)
        self.histogram = [before + int(count) for before, count in zip(self.histogram, counts, strict=True)]
        most = float(ulp.max())
        if most > self.most:
            at = int(ulp.argmax())
            row, channel = divmod(at, self._row_size(ulp))
            self.worst = self.calls - 1, row if rows is None else int(rows[row]), channel
            self.most = most

    def _row_size(self, ulp: torch.Tensor) -> int:
        return ulp.shape[-2:].numel() if self.spec.heads > 1 else ulp.shape[-1]


def _scales(
    spec: NormSpec,
    x: torch.Tensor,
    gain: torch.Tensor | None,
    bias: torch.Tensor | None,
    gate: torch.Tensor | None,
    exact: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The largest term behind each result, the row's factor, and the gate's part of that: magnitudes in float64."""
    g = spec.scale(gain, torch.float64)
    g = torch.ones((), dtype=torch.float64, device=x.device) if g is None else g.abs()
    after = None if gate is None or spec.gate_position != "after" else spec.activation(gate.double()).abs()
    at = exact.abs()
    if bias is not None:
        shift = spec.row(bias).double()
        at = torch.maximum((exact - shift).abs(), shift.abs().expand_as(exact))
    if after is not None:
        g = g * after
    if spec.kind == "layer":
        wide = spec.grouped(x.double())
        variance = wide.var(-1, unbiased=False, keepdim=True)
        subtracted = (wide.pow(2).mean(-1, keepdim=True) / (variance + spec.eps)).sqrt().expand_as(wide)
        at = torch.maximum(at, subtracted.reshape(x.shape) * g)
    return at, g, after


def units_from_exact(
    spec: NormSpec,
    x: torch.Tensor,
    gain: torch.Tensor | None,
    bias: torch.Tensor | None,
    result: torch.Tensor,
    gate: torch.Tensor | None = None,
) -> float | None:
    """Say how far a result is from the formula in float64, as `NormMeter.exact_ulp_original` does for one call.

    Args are those of `NormMeter.add`, for a spec of rows along the last dimension.

    Returns:
        The greatest distance, in units of the dtype of ``result``; None where a number is not finite.
    """
    exact = spec.compute_exact(x, gain, bias, gate)
    at = torch.maximum(_scales(spec, x, gain, bias, gate, exact)[0], exact.abs())
    units = float(((result.double() - exact).abs() / ulp_size(at, result.dtype)).max())
    return units if math.isfinite(units) else None


def trial_inputs(spec: NormSpec, *, eps_alone: bool = False) -> Iterator[dict[str, torch.Tensor]]:
    """Yield arguments that a real run may not bring, float32 on the CPU: each kind of launch, and rows where eps tells.

    A few rows, some hundred and a batch of short sequences of ordinary size; rows far above it; rows that eps
    outweighs.
    A gated norm gets a random gate, and where it may be called without one, each input once more without.

    Args:
        spec: what is tried.
        eps_alone: yield the rows that eps outweighs only.

    Yields:
        The row, and the gate if any, by the names that the norm's forward gives them.
    """
    generator = torch.Generator().manual_seed(0)
    row = (spec.heads, spec.width or ANY_WIDTH) if spec.heads > 1 else (spec.width or ANY_WIDTH,)
    small = max(spec.eps, 1e-12)
    small = small**0.5 if spec.eps_position == "inside" else small
    kinds = (((1, 1), 1.0), ((2, 1), 1.0), ((1, 7), 1.0), ((2, 150), 1.0), ((1, 67), 1e3), ((1, 67), small))
    for sizes, scale in kinds[-1:] if eps_alone else kinds:
        x = _as_input(spec, scale * torch.randn(*sizes, *row, generator=generator))
        if spec.gate is None or spec.gate_optional:
            yield {spec.input_name: x}
        if spec.gate_name is not None:
            yield {spec.input_name: x, spec.gate_name: 2 * torch.randn(x.shape, generator=generator)}


def _as_input(spec: NormSpec, rows: torch.Tensor) -> torch.Tensor:
    """Bring rows ``(A, B, ...)`` into what a norm takes: as they are, or as channels of an image or a sequence."""
    if spec.joins > 1:
        return rows.unflatten(-1, (spec.joins, -1))
    if spec.axis == "channels":
        rows = rows.movedim(-1, 1).contiguous()
        return rows.reshape(*rows.shape, *(1,) * (min(spec.ranks) - 3))
    return rows.flatten(0, 1) if spec.ranks == (2,) and spec.heads == 1 else rows


@contextmanager
def watching(norms: list[NormUnderTest], sample: int = _SAMPLE) -> Iterator[dict[str, NormMeter]]:
    """Measure each norm on every call that is made to it inside the ``with`` block.

    Args:
        norms: the norms to watch; their hooks are gone when the block ends, however it ends.
        sample: elements of one call that are compared; rows beyond it are left out evenly.

    Yields:
        A meter for each norm's name, filled as the model runs.
    """
    meters = {norm.name: NormMeter(norm.spec) for norm in norms}
    handles = []
    try:
        for norm in norms:
            hook = _hook(norm, meters[norm.name], sample)
            handles.append(norm.module.register_forward_hook(hook, with_kwargs=True))
        yield meters
    finally:
        for handle in handles:
            handle.remove()


def _hook(norm: NormUnderTest, meter: NormMeter, sample: int) -> Callable[..., None]:
    busy = False
    sampler = _Sampler(sample)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        nonlocal busy
        # An original that calls its module again would measure itself.
        if busy:
            return
        x, gate = norm.bind(args, kwargs)
        if x is None or not isinstance(output, torch.Tensor):
            meter.problems.append(f"returned {type(output).__name__}, expected one tensor for one tensor")
            return
        busy = True
        try:
            with torch.no_grad():
                expected = norm.original(*args, **kwargs)
                if norm.spec.then:
                    # What follows the norm is the same in both: held to the unit bound is the norm alone.
                    output = norm.swapped(*args, **kwargs)
                if not isinstance(expected, torch.Tensor) or expected.shape != output.shape:
                    meter.problems.append(f"returned {tuple(output.shape)} where the original returns another shape")
                    return
                x, expected, output, gate, rows = sampler.pick(norm.spec, x.detach(), expected, output.detach(), gate)
                meter.add(x, norm.gain(), norm.bias(), expected, output, gate, rows)
        finally:
            busy = False

    return hook


class _Sampler:
    """Choose which rows of a call are compared.

    Evenly spaced ones of a large call; and each distinct row once: the first norm of a model sees a token's
    embedding again and again, and one rounding that differs would count as many.

    Args:
        most: elements of one call that are compared.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.seen: set[float] = set()

    def pick(
        self, spec: NormSpec, x: torch.Tensor, expected: torch.Tensor, output: torch.Tensor, gate: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        """Return the rows to compare and their numbers.

        The call as it is, without numbers, where that is every row of it, or where rows are channels.
        """
        row = x.shape[-2:] if spec.heads > 1 else x.shape[-1:]
        if x.dim() <= len(row) or x.shape != output.shape or not x.numel() or spec.axis != "last":
            return x, expected, output, gate, None
        size = row.numel()
        rows = x.numel() // size
        keep = max(1, min(rows, self.most // size))
        index = torch.linspace(0, rows - 1, keep, dtype=torch.float64, device=x.device).round().long()
        index = index[self._new(x.reshape(rows, size)[index])]
        if len(index) == rows:
            return x, expected, output, gate, None
        x, expected, output = (t.reshape(rows, *row)[index] for t in (x, expected, output))
        return x, expected, output, None if gate is None else gate.detach().reshape(rows, *row)[index], index

    def _new(self, rows: torch.Tensor) -> list[int]:
        # A projection tells rows apart; a NaN is equal to nothing and so is always new.
        direction = torch.arange(1, rows.shape[-1] + 1, dtype=torch.float64, device=rows.device).sin()
        new = []
        for at, key in enumerate((rows.double() * direction).sum(-1).tolist()):
            if key not in self.seen:
                self.seen.add(key)
                new.append(at)
        return new
