"""Faults put into a model on purpose: a gate that could not have failed proves nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn

from normswap.evidence import Fault, Power
from normswap.figures import Control, Criterion, Exact
from normswap.gates import judge_norm
from normswap.inputs import Inputs, run
from normswap.meter import NormMeter, NormUnderTest, trial_inputs
from normswap.processes import gathered
from normswap.spec import NormSpec
from normswap.stacking import stack as stacked
from normswap.stats import gap, relative

__all__ = [
    "Trial",
    "doubts_of",
    "held_to",
    "in_the_norm_alone",
    "in_the_whole_model",
    "power_of",
    "reached",
]

# Tokens that a fault is tried on, where a sequence can be cut.
_TRIAL_TOKENS = 16
# A gain that differs from the identity by less, relatively, is one.
_IDENTITY = 1e-3
_EPS_FACTOR = 10.0
_CONTROL = "gain scaled"
_Change = Callable[[NormSpec, torch.Tensor | None], tuple[NormSpec, torch.Tensor | None] | None]


def _without_gain(spec: NormSpec, gain: torch.Tensor | None) -> tuple[NormSpec, torch.Tensor | None] | None:
    effective = spec.scale(gain, torch.float64)
    if effective is None or not bool((effective - 1).abs().max() > _IDENTITY):
        return None
    return replace(spec, gain="none"), None


def _flipped(spec: NormSpec, gain: torch.Tensor | None) -> tuple[NormSpec, torch.Tensor | None] | None:
    if gain is None or spec.gain == "none":
        return None
    return replace(spec, gain="w" if spec.gain == "1+w" else "1+w"), gain


def _with_other_eps(spec: NormSpec, gain: torch.Tensor | None) -> tuple[NormSpec, torch.Tensor | None] | None:
    return (replace(spec, eps=_EPS_FACTOR * spec.eps), gain) if spec.eps > 0 else None


def _other_order(spec: NormSpec, gain: torch.Tensor | None) -> tuple[NormSpec, torch.Tensor | None] | None:
    if gain is None or spec.gain_position == "before" or spec.product_cast != "none" or spec.scale_cast != "none":
        return None
    return replace(spec, cast="before_gain" if spec.cast == "after_gain" else "after_gain"), gain


@dataclass(frozen=True)
class _Kind:
    name: str
    change: _Change
    cannot: str
    # Where it is tried, from the first norm that ran to the last: the last is the surest to move the output, the first
    # reads the smallest rows.
    places: tuple[float, ...] = (1, 0, 0.5)


_ORDER = _Kind("cast order swapped", _other_order, "no norm has a gain that can be applied in two orders")
_KINDS = (
    _Kind("gain dropped", _without_gain, "every gain is 1"),
    _Kind("eps x 10", _with_other_eps, "no norm has an eps", (0, 1)),
    _Kind("1+w flipped", _flipped, "no norm has a gain"),
)


@dataclass(frozen=True)
class _Put:
    """A fault in one norm: what it makes of a call's arguments and result."""

    norm: NormUnderTest
    alter: Callable[[tuple[Any, ...], dict[str, Any], torch.Tensor], torch.Tensor]


def in_the_whole_model(
    order: Sequence[NormUnderTest], trial: Trial, criterion: Criterion
) -> tuple[Control | None, list[Fault]]:
    """Put faults into a model in the reference's arithmetic, and measure what the gate ``exact`` makes of each.

    A fault that is not seen in one norm is tried in others. Where sequences can be stacked, the faults of one turn run
    as rows of one forward.

    Args:
        order: the norms that ran, in the order of their last call.
        trial: what is run.
        criterion: the bounds.

    Returns:
        The control, one norm disturbed by a few percent: the first that is noticed, else the one that comes nearest,
        None where no norm ran; and one fault of each kind.
    """
    scale = criterion.control_scale
    waiting: dict[str, list[_Put]] = {_CONTROL: [_Put(norm, partial(_scaled, scale)) for norm in _spread(order)]}
    waiting |= {kind.name: _puts_of(kind, order) for kind in _KINDS}
    best: dict[str, tuple[_Put, float]] = {}
    while turn := {name: puts.pop(0) for name, puts in waiting.items() if puts}:
        for (name, put), error in zip(turn.items(), trial.errors(list(turn.values())), strict=True):
            if name not in best or not error <= best[name][1]:
                best[name] = put, error
            if error > criterion.exact_bound:
                waiting[name].clear()
    control = None
    if _CONTROL in best:
        put, error = best[_CONTROL]
        control = Control(put.norm.name, scale, error, error > criterion.exact_bound)
    return control, [_as_fault(kind, best.get(kind.name), criterion.exact_bound) for kind in _KINDS]


def _as_fault(kind: _Kind, found: tuple[_Put, float] | None, bound: float) -> Fault:
    if found is None:
        return Fault(kind.name, None, None, None, None, None, kind.cannot)
    put, error = found
    return Fault(kind.name, put.norm.name, "exact", error, bound, error > bound)


def held_to(faults: Sequence[Fault], bound: float) -> list[Fault]:
    """Judge faults that were put into the whole model by the bound that the gate ``exact`` has in the end."""
    return [
        fault if fault.figure is None else replace(fault, bound=bound, detected=fault.figure > bound)
        for fault in faults
    ]


def _spread(order: Sequence[NormUnderTest]) -> list[NormUnderTest]:
    places = dict.fromkeys(int((len(order) - 1) * part) for part in (1, 0, 0.5, 0.25, 0.75) if order)
    return [order[at] for at in places]


def _candidates(kind: _Kind, reached: Sequence[NormUnderTest]) -> list[NormUnderTest]:
    usable = [norm for norm in reached if not norm.spec.then]
    places = dict.fromkeys(int((len(usable) - 1) * part) for part in kind.places if usable)
    return [usable[at] for at in places]


def _puts_of(kind: _Kind, order: Sequence[NormUnderTest]) -> list[_Put]:
    found = []
    for norm in _candidates(kind, order):
        changed = kind.change(norm.spec, _detached(norm.gain()))
        if changed is not None:
            found.append(_Put(norm, partial(_respecified, norm, *changed)))
    return found


def _respecified(
    norm: NormUnderTest,
    spec: NormSpec,
    gain: torch.Tensor | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: torch.Tensor,
) -> torch.Tensor:
    """What another spec makes of a norm's input, by the difference of the two in float64."""
    x, gate = norm.bind(args, kwargs)
    if x is None:
        return output
    bias = _detached(norm.bias())
    right = norm.spec.compute_exact(x, _detached(norm.gain()), bias, gate)
    wrong = spec.compute_exact(x, gain, bias, gate)
    return (output.double() + (wrong - right).reshape(output.shape)).to(output.dtype)


def _scaled(scale: float, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """A result with every other channel multiplied; a norm further on would cancel a common factor."""
    factor = torch.ones(output.shape[-1], dtype=output.dtype, device=output.device)
    factor[::2] = scale
    return output * factor


class Trial:
    """One short sequence by which faults are tried: how far the output moves from what it was without.

    Args:
        model: that runs it, without faults so far.
        inputs: its first sequence is taken, and the first tokens of that where sequences can be stacked.
        dtype: of the model.
        device: where it is.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, dtype: torch.dtype, device: torch.device) -> None:
        self.batch, self.stacks = inputs.batches[0], inputs.positional is not None
        if self.stacks:
            self.batch = {
                key: value[:, :_TRIAL_TOKENS] if torch.is_tensor(value) else value for key, value in self.batch.items()
            }
        self.run = lambda batch: gathered(run(model, batch, dtype, device)).main
        self.right: torch.Tensor | None = None

    def errors(self, puts: Sequence[_Put]) -> list[float]:
        """Relative RMS distance of the output with each of some faults from that without."""
        together = self._together(puts) if self.stacks and len(puts) > 1 else None
        return [self._alone(put) for put in puts] if together is None else together

    def _alone(self, put: _Put) -> float:
        if self.right is None:
            self.right = self.run(self.batch)
        with _put_in(put, None, 1):
            return _distance(self.run(self.batch), self.right)

    def _together(self, puts: Sequence[_Put]) -> list[float] | None:
        """Run all in one forward, one row for each and the first without; None where a norm has no such rows."""
        rows = len(puts) + 1
        with ExitStack() as stack:
            apart = [stack.enter_context(_put_in(put, row, rows)) for row, put in enumerate(puts, 1)]
            output = self.run(stacked([self.batch] * rows))
        if not all(all(seen) for seen in apart) or output.shape[0] != rows:
            return None
        return [_distance(output[row], output[0]) for row in range(1, rows)]


def _distance(output: torch.Tensor, right: torch.Tensor) -> float:
    found = gap(output, right)
    return relative([found.error], [found.size])


@contextmanager
def _put_in(put: _Put, row: int | None, rows: int) -> Iterator[list[bool]]:
    """Have a norm's result altered inside the ``with`` block, of one row of a batch or of all.

    Yields:
        Whether the row could be told apart, for each call.
    """
    seen: list[bool] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            wrong = put.alter(args, kwargs, output)
            if row is None:
                return wrong
            seen.append(output.dim() > 2 and output.shape[0] == rows)
            if not seen[-1]:
                return output
            mixed = output.clone()
            mixed[row] = wrong[row]
            return mixed

    handle = put.norm.module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield seen
    finally:
        handle.remove()


def in_the_norm_alone(
    faults: Sequence[Fault],
    norms: Sequence[NormUnderTest],
    dtype: torch.dtype,
    device: torch.device,
    criterion: Criterion,
) -> list[Fault]:
    """Try what the gate ``exact`` did not see, and the order of casts, on one norm as served.

    Each norm's own rows of `normswap.meter.trial_inputs` go through the right formula and the wrong one.

    Args:
        faults: what `in_the_whole_model` returned.
        norms: the norms of the served model.
        dtype: that they are served in.
        device: where they are.
        criterion: the bounds of the gate ``norms``.

    Returns:
        The faults, those that the gate ``norms`` sees marked so, and that of the cast order.
    """
    kinds = {kind.name: kind for kind in _KINDS}
    found = [
        fault
        if fault.detected or fault.norm is None
        else _tried(kinds[fault.kind], norms, dtype, device, criterion, fault)
        for fault in faults
    ]
    if dtype == torch.float32:
        return [*found, Fault(_ORDER.name, None, None, None, None, None, "float32 has one order")]
    return [*found, _tried(_ORDER, norms, dtype, device, criterion, None)]


def _tried(
    kind: _Kind,
    norms: Sequence[NormUnderTest],
    dtype: torch.dtype,
    device: torch.device,
    criterion: Criterion,
    missed: Fault | None,
) -> Fault:
    best = missed
    for norm in _candidates(kind, norms):
        gain, bias = _detached(norm.gain()), _detached(norm.bias())
        changed = kind.change(norm.spec, gain)
        if changed is None:
            continue
        meter, differs = NormMeter(norm.spec), False
        for trial in trial_inputs(norm.spec):
            arguments = {name: tensor.to(device, dtype) for name, tensor in trial.items()}
            x, gate = arguments[norm.spec.input_name], arguments.get(norm.spec.gate_name or "")
            right, wrong = norm.spec.compute(x, gain, bias, gate), changed[0].compute(x, changed[1], bias, gate)
            wrong = wrong.to(right.dtype)
            differs = differs or not torch.equal(right, wrong)
            meter.add(x, gain, bias, right, wrong, gate)
        if not differs:
            continue
        figures, failures = judge_norm(norm.name, meter, criterion)
        coarse = figures.bound_ulp is not None
        figure = figures.max_ulp if coarse else figures.exact_ulp_swapped
        if coarse and figure is not None and figures.bound_ulp is not None and figure <= figures.bound_ulp:
            figure, limit = figures.bit_identical_fraction, figures.bound_identical
        else:
            limit = figures.bound_ulp
        fault = Fault(kind.name, norm.name, "norms", figure, limit, bool(failures))
        if fault.detected:
            return fault
        best = best or fault
    return best or Fault(kind.name, None, None, None, None, None, kind.cannot)


@contextmanager
def reached(norms: Sequence[NormUnderTest]) -> Iterator[dict[str, NormUnderTest]]:
    """Collect the norms that are called inside the ``with`` block, by name, in the order of their last call."""
    order: dict[str, NormUnderTest] = {}

    def note(norm: NormUnderTest) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            order.pop(norm.name, None)
            order[norm.name] = norm

        return hook

    handles = [norm.module.register_forward_pre_hook(note(norm)) for norm in norms]
    try:
        yield order
    finally:
        for handle in handles:
            handle.remove()


def power_of(faults: Sequence[Fault], exact: Exact) -> Power:
    """Put the faults together with the control of the gate ``exact``, and say what it would just have seen."""
    control = exact.control
    if control is None:
        return Power(list(faults))
    words = f"every other channel times {control.scale:g}"
    detected = control.detected if math.isfinite(control.error) else None
    first = Fault(_CONTROL, control.norm, "exact", control.error, exact.bound, detected, words)
    smallest = abs(control.scale - 1) * exact.bound / control.error if control.error > 0 else None
    return Power([first, *faults], smallest, control.norm if smallest is not None else None)


def doubts_of(faults: Sequence[Fault]) -> list[str]:
    """Say which faults no gate would have seen, and what to change."""
    return [
        f"power: {fault.kind} in {fault.norm} passes every gate ({fault.gate}: {fault.figure:.3g}, bound "
        f"{fault.bound:.3g}); give more or other text (--text, --tokens), serve in float32 (--dtype float32), or "
        "take a reference in float64 (--reference float64)"
        for fault in faults
        if fault.detected is False and fault.figure is not None and fault.bound is not None
    ]


def _detached(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach()
