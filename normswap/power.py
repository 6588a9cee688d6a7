"""Faults put into a model on purpose: a gate that could not have failed proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from normswap.evidence import Fault, Power
from normswap.figures import Control, Criterion, Exact
from normswap.gates import judge_norm
from normswap.inputs import Inputs, run
from normswap.meter import NormMeter, NormUnderTest, trial_inputs
from normswap.spec import NormSpec
from normswap.stats import gap, relative

__all__ = [
    "Trial",
    "control_of",
    "doubts_of",
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


def in_the_whole_model(reached: Sequence[NormUnderTest], error: Callable[[], float], bound: float) -> list[Fault]:
    """Put faults into a model in float32, and measure what the gate ``exact`` makes of each.

    Args:
        reached: the norms that ran, in the order of their last call.
        error: runs the model on a sequence and returns its relative distance from the original.
        bound: of the gate.

    Returns:
        One fault of each kind.
    """
    faults = []
    for kind in _KINDS:
        best: Fault | None = None
        for norm in _candidates(kind, reached):
            changed = kind.change(norm.spec, _detached(norm.gain()))
            if changed is None:
                continue
            with _hooked(norm, *changed):
                found = error()
            fault = Fault(kind.name, norm.name, "exact", found, bound, found > bound)
            if best is None or fault.detected or (fault.figure or 0.0) > (best.figure or 0.0):
                best = fault
            if best.detected:
                break
        faults.append(best or Fault(kind.name, None, None, None, None, None, kind.cannot))
    return faults


def _candidates(kind: _Kind, reached: Sequence[NormUnderTest]) -> list[NormUnderTest]:
    usable = [norm for norm in reached if not norm.spec.then]
    places = dict.fromkeys(int((len(usable) - 1) * part) for part in kind.places if usable)
    return [usable[at] for at in places]


@contextmanager
def _hooked(norm: NormUnderTest, spec: NormSpec, gain: torch.Tensor | None) -> Iterator[None]:
    """Let a norm's result be what another spec makes of its input, by the difference of the two in float64."""

    def hook(module: nn.Module, args: Any, kwargs: Any, output: torch.Tensor) -> torch.Tensor:
        x, gate = norm.bind(args, kwargs)
        if x is None:
            return output
        bias = _detached(norm.bias())
        with torch.no_grad():
            right = norm.spec.compute_exact(x, _detached(norm.gain()), bias, gate)
            wrong = spec.compute_exact(x, gain, bias, gate)
        return (output.double() + (wrong - right).reshape(output.shape)).to(output.dtype)

    handle = norm.module.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
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


class Trial:
    """One short sequence by which faults are tried: how far the output moves from what it was without.

    Args:
        model: that runs it, without faults so far.
        inputs: its first sequence is taken, and the first tokens of that where sequences can be cut.
        dtype: of the model.
        device: where it is.
    """

    def __init__(self, model: nn.Module, inputs: Inputs, dtype: torch.dtype, device: torch.device) -> None:
        batch = inputs.batches[0]
        if inputs.positional is not None:
            batch = {key: value[:, :_TRIAL_TOKENS] if torch.is_tensor(value) else value for key, value in batch.items()}
        self.run = lambda: run(model, batch, dtype, device).main
        self.right = self.run()

    def error(self) -> float:
        """Relative RMS distance of the output, with whatever hooks the model has now, from that without."""
        found = gap(self.run(), self.right)
        return relative([found.error], [found.size])


def control_of(order: Sequence[NormUnderTest], error: Callable[[], float], criterion: Criterion) -> Control | None:
    """Disturb one norm and see whether the exact gate would notice; the last one first, it is the surest.

    Args:
        order: the norms that ran, in the order of their last call.
        error: see `Trial.error`.
        criterion: the bounds.

    Returns:
        The first that is noticed, else the one that comes nearest; None where no norm ran.
    """
    best: Control | None = None
    for at in dict.fromkeys(int((len(order) - 1) * part) for part in (1, 0, 0.5, 0.25, 0.75) if order):
        norm, scale = order[at], criterion.control_scale
        handle = _scaled(norm.module, scale)
        try:
            found = error()
        finally:
            handle.remove()
        control = Control(norm.name, scale, found, found > criterion.exact_bound)
        if control.detected:
            return control
        best = control if best is None or control.error > best.error else best
    return best


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


def _scaled(module: nn.Module, scale: float) -> Any:
    """Multiply every other channel of a module's result; a norm further on would cancel a common factor."""

    def hook(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        factor = torch.ones(output.shape[-1], dtype=output.dtype, device=output.device)
        factor[::2] = scale
        return output * factor

    return module.register_forward_hook(hook)


def power_of(faults: Sequence[Fault], exact: Exact) -> Power:
    """Put the faults together with the control of the gate ``exact``, and say what it would just have seen."""
    control = exact.control
    if control is None:
        return Power(list(faults))
    words = f"every other channel times {control.scale:g}"
    first = Fault("gain scaled", control.norm, "exact", control.error, exact.bound, control.detected, words)
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
