"""Prove a plan of folds by rescaling: gains by random factors, what reads them by the inverse, all at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from normswap.errors import ModelError
from normswap.foldplan import Consumer, Fold, FoldPlan, effective_gain, stored_gain
from normswap.inputs import make_inputs
from normswap.naming import name_pattern
from normswap.observing import Views, distance
from normswap.shrinking import Twin, twins
from normswap.spec import NormSpec

__all__ = ["prove", "prove_by_twin", "signature"]

_BOUND_WIDE, _BOUND_NARROW = 1e-12, 1e-6
_CONTROL = 100
_MOST_TWINS = 3

Signature = tuple[Any, ...]


def prove(model: nn.Module, plan: FoldPlan, batches: Sequence[dict[str, Any]] = (), *, seed: int = 0) -> dict[str, str]:
    """Test every fold of a plan on a model with random weights.

    The gain of every fold is multiplied by a random factor in each channel, its bias too, and the columns that read
    the channel are divided by it: the outputs must stay put, within 1e-12 where all arithmetic is float64, else within
    1e-6. Where a bias is to move, it is moved as well. The factors are powers of two with either sign, so that the
    rescaled model computes the same bits times a power of two throughout and no choice of a router or a top-k can
    flip on a rounding. Controls: a gain that is rescaled alone, and a consumer that is rescaled alone, must change an
    output by more than 100 times the bound.

    Args:
        model: on the CPU, in float64 or float32; as it was, afterwards.
        plan: what is tested, for this very model.
        batches: what to run it on; by default what `make_inputs` finds.
        seed: of the factors.

    Returns:
        For the norm of each fold that is not proved, the reason. Empty: all are.

    Raises:
        ModelError: the model does not run, or gives other numbers on the same inputs each time.
    """
    folds = list(plan.folds)
    if not folds:
        return {}
    bench = _Bench(model, batches or make_inputs(model, getattr(model, "config", None), sequences=2, length=40).batches)
    with _untied(model, folds):
        return _Proof(bench, folds, seed).run()


class _Bench:
    """A model, the ways it is run, and what it gave at first."""

    def __init__(self, model: nn.Module, batches: Iterable[dict[str, Any]]) -> None:
        self.model = model
        self.views = Views(model, batches)
        if not self.views.repeats:
            raise ModelError(
                f"{type(model).__name__} gives other numbers when it is run again on the same inputs: nothing can be "
                f"proved of it; put it in eval mode"
            )
        self.bound = _BOUND_NARROW if self.views.narrow else _BOUND_WIDE

    def moved(self) -> float:
        """Return how far the outputs of all views lie from what they were."""
        return max(distance(self.views.baseline, outputs) for outputs in self.views.each())

    def shows(self) -> bool:
        """Whether an output differs by more than a control has to."""
        least = _CONTROL * self.bound
        return any(distance(self.views.baseline, outputs) > least for outputs in self.views.each())


class _Proof:
    def __init__(self, bench: _Bench, folds: list[Fold], seed: int) -> None:
        self.bench, self.folds = bench, folds
        generator = torch.Generator().manual_seed(seed)
        parameters = dict(bench.model.named_parameters(remove_duplicate=False))
        self.edits = {fold.name: _Edit(bench.model, parameters, fold, generator) for fold in folds}

    def run(self) -> dict[str, str]:
        reasons: dict[str, str] = {}
        for fold in self.folds:
            if problem := self.edits[fold.name].problem:
                reasons[fold.name] = problem
        self._culprits(reasons, move=False)
        if any(fold.bias == "move" for fold in self.folds):
            self._culprits(reasons, move=True)
        for fold in self.folds:
            if fold.name not in reasons and (reason := self._control(self.edits[fold.name])):
                reasons[fold.name] = reason
        return reasons

    def _error(self, names: Sequence[str], move: bool) -> float:
        with self._changed([self.edits[name] for name in names], lambda edit: edit.apply(move=move)):
            return self.bench.moved()

    def _culprits(self, reasons: dict[str, str], *, move: bool) -> None:
        """Add a reason for each fold that moves the output, alone or beside those that do not."""
        rest = [fold.name for fold in self.folds if fold.name not in reasons]
        if not rest or self._error(rest, move) <= self.bench.bound:
            return
        what = "gain and bias rescaled or moved" if move else "gain rescaled"
        right: list[str] = []
        for name in rest:
            error = self._error([name], move)
            if error > self.bench.bound:
                reasons[name] = self._told(what, error)
            else:
                right.append(name)
        if not right or self._error(right, move) <= self.bench.bound:
            return
        kept: list[str] = []
        for name in right:
            error = self._error([*kept, name], move)
            if error > self.bench.bound:
                reasons[name] = f"{self._told(what, error)}, together with other folds"
            else:
                kept.append(name)

    def _told(self, what: str, error: float) -> str:
        return (
            f"with its {what} and its consumers by the inverse, the model's output moves by {error:.1e} "
            f"(bound {self.bench.bound:.0e}): something else reads it"
        )

    def _control(self, edit: _Edit) -> str:
        with self._changed([edit], _Edit.apply_gain):
            if not self.bench.shows():
                return "the model's output does not depend on its gain here, so that nothing is shown"
        for alike in edit.by_pattern():
            for consumer in alike:
                with self._changed([edit], lambda edit, consumer=consumer: edit.apply_consumer(consumer)):  # type: ignore[misc]
                    if self.bench.shows():
                        break
            else:
                return (
                    f"the model's output does not depend on {alike[0].parameter} here, so that nothing is shown of it"
                )
        return ""

    @contextmanager
    def _changed(self, edits: list[_Edit], change: Callable[[_Edit], None]) -> Iterator[None]:
        touched = {id(tensor): tensor for edit in edits for tensor in edit.tensors()}
        saved = [(tensor, tensor.detach().clone()) for tensor in touched.values()]
        try:
            with torch.no_grad():
                for edit in edits:
                    change(edit)
            yield
        finally:
            with torch.no_grad():
                for tensor, value in saved:
                    tensor.copy_(value)


class _Edit:
    """The rescaling of one fold in a model's own tensors."""

    def __init__(
        self, model: nn.Module, parameters: dict[str, nn.Parameter], fold: Fold, generator: torch.Generator
    ) -> None:
        self.fold, self.problem = fold, ""
        self._parameters = parameters
        self.spec = fold.spec
        if self.spec is None or self.spec.gain_name is None:
            self.problem = "it is not known what it computes, or it has no gain"
            return
        module = model.get_submodule(fold.name)
        self.gain: torch.Tensor = getattr(module, self.spec.gain_name)
        self.bias: torch.Tensor | None = getattr(module, self.spec.bias_name) if self.spec.bias_name else None
        self.channels = self.gain.numel()
        sizes = torch.tensor([0.25, 0.5, 2.0, 4.0], dtype=torch.float64)
        size = sizes[torch.randint(4, (self.channels,), generator=generator)]
        sign = torch.where(torch.rand(self.channels, generator=generator) < 0.3, -1.0, 1.0)
        self.factors = size * sign
        self.problem = self._problem()

    def _problem(self) -> str:
        if not self.fold.consumers:
            return "it has no consumer"
        for consumer in self.fold.consumers:
            weight = self._parameters.get(consumer.parameter)
            if weight is None or (consumer.bias is not None and consumer.bias not in self._parameters):
                return f"the model has no parameter {consumer.parameter if weight is None else consumer.bias}"
            ends = [piece.channel + (piece.stop - piece.start - 1) * piece.step for piece in consumer.pieces]
            if not -weight.dim() <= consumer.axis < weight.dim():
                return f"{consumer.parameter} has no dimension {consumer.axis}"
            columns = weight.shape[consumer.axis]
            if max((piece.stop for piece in consumer.pieces), default=0) > columns or max(ends) >= self.channels:
                return f"{consumer.parameter} has {columns} columns, and the norm {self.channels} channels"
        if self.fold.bias == "move" and any(consumer.bias is None for consumer in self.fold.consumers):
            return "its bias is to move, and a consumer has none"
        return ""

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor that a change may touch."""
        yield self.gain
        if self.bias is not None:
            yield self.bias
        for consumer in self.fold.consumers:
            yield self._parameters[consumer.parameter]
            if consumer.bias is not None:
                yield self._parameters[consumer.bias]

    def by_pattern(self) -> list[list[Consumer]]:
        """Return the consumers in groups whose names differ in numbers only."""
        groups: dict[str, list[Consumer]] = {}
        for consumer in self.fold.consumers:
            groups.setdefault(name_pattern(consumer.parameter), []).append(consumer)
        return list(groups.values())

    def apply(self, *, move: bool) -> None:
        """Rescale gain, bias and consumers; the bias moves, where it is to and ``move`` is set."""
        if move and self.fold.bias == "move" and self.bias is not None:
            self._move()
        self.apply_gain()
        for consumer in self.fold.consumers:
            self.apply_consumer(consumer)

    def apply_gain(self) -> None:
        """Rescale the gain and the bias alone."""
        assert self.spec is not None
        self.gain.copy_(stored_gain(self.spec, effective_gain(self.spec, self.gain) * self.factors, self.gain))
        if self.bias is not None:
            self.bias.copy_(self.bias * self.factors.reshape(self.bias.shape).to(self.bias.dtype))

    def apply_consumer(self, consumer: Consumer) -> None:
        """Divide the columns of one consumer by the factors."""
        weight = self._parameters[consumer.parameter]
        shape = [1] * weight.dim()
        shape[consumer.axis] = -1
        inverse = consumer.spread(1 / self.factors, weight.shape[consumer.axis], 1.0)
        weight.mul_(inverse.reshape(shape).to(weight.dtype))

    def _move(self) -> None:
        assert self.bias is not None
        for consumer in self.fold.consumers:
            weight = self._parameters[consumer.parameter]
            assert consumer.bias is not None
            laid = consumer.spread(self.bias.detach().reshape(-1).double(), weight.shape[consumer.axis], 0.0)
            added = torch.tensordot(weight.double(), laid, dims=([consumer.axis], [0]))
            target = self._parameters[consumer.bias]
            target.add_(added.reshape(target.shape).to(target.dtype))
        self.bias.zero_()


@contextmanager
def _untied(model: nn.Module, folds: Iterable[Fold]) -> Iterator[None]:
    """Give consumers of folds that untie a parameter of their own, inside the ``with`` block."""
    changed = []
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for fold in folds:
        for name in fold.parameters if fold.untie else ():
            home, _, attribute = name.rpartition(".")
            module = model.get_submodule(home)
            parameter = getattr(module, attribute)
            if len(names.get(parameter, ())) > 1:
                changed.append((module, attribute, parameter))
                setattr(module, attribute, nn.Parameter(parameter.detach().clone(), requires_grad=False))
    try:
        yield
    finally:
        for module, attribute, parameter in changed:
            setattr(module, attribute, parameter)


def signature(fold: Fold) -> Signature:
    """Return what a fold of a large model and one of its twin must have in common: all but sizes and numbers.

    Where no bias moves it does not matter whether the consumers have one.
    """
    consumers = frozenset(
        (
            name_pattern(consumer.parameter),
            consumer.axis,
            min(len(consumer.pieces), 2),
            frozenset(piece.step for piece in consumer.pieces),
            # Where no bias is moved, the one that a map has is nothing to the fold.
            name_pattern(consumer.bias) if consumer.bias and fold.bias == "move" else None,
        )
        for consumer in fold.consumers
    )
    return fold.pattern, _sizeless(fold.spec), consumers, fold.bias, fold.untie


def _sizeless(spec: NormSpec | None) -> NormSpec | None:
    if spec is None:
        return None
    partial = None if spec.partial is None else 0
    few = {name: min(getattr(spec, name), 2) for name in ("heads", "groups", "joins")}
    return replace(spec, width=None, partial=partial, own_code=(), **few)


def prove_by_twin(
    model: nn.Module, plan: FoldPlan, make_fold_plan: Callable[..., FoldPlan], config: Any = None, *, seed: int = 0
) -> dict[str, str]:
    """Test every fold of a plan for a model of any size on small random models of the same class.

    A fold holds when one with the same signature was proved in a twin, by `prove`, and none with it failed.

    Args:
        model: the model, of any size, on the meta device for one.
        plan: what is tested.
        make_fold_plan: called with a twin, its `normswap.plan.Plan` and ``tied``; returns the twin's plan of folds.
        config: the model's configuration; by default the model's own.
        seed: of weights, inputs and factors.

    Returns:
        For the norm of each fold that is not proved, the reason. Empty: all are.
    """
    wanted = {fold.name: signature(fold) for fold in plan.folds}
    if not wanted:
        return {}
    tied = "untie" if plan.unties else "skip"
    proved: set[Signature] = set()
    failed: dict[Signature, str] = {}
    refused: dict[str, str] = {}
    try:
        for count, twin in enumerate(twins(model, config, seed=seed), 1):
            found = _proved_in(twin, make_fold_plan, tied, seed, refused)
            proved |= {mark for mark, reason in found if not reason}
            failed |= {mark: reason for mark, reason in found if reason}
            if count == _MOST_TWINS or set(wanted.values()) <= proved | failed.keys():
                break
    except ModelError as error:
        if not proved and not failed:
            return dict.fromkeys(wanted, f"it cannot be proved: {error}")
    reasons = {}
    for name, mark in wanted.items():
        if mark in failed:
            reasons[name] = f"in a small model of the same class: {failed[mark]}"
        elif mark not in proved:
            told = refused.get(name_pattern(name))
            why = f"is refused: {told}" if told else "has no fold of these consumers"
            reasons[name] = f"it cannot be proved: its counterpart in a small model of the same class {why}"
    return reasons


def _proved_in(
    twin: Twin, make_fold_plan: Callable[..., FoldPlan], tied: str, seed: int, refused: dict[str, str]
) -> list[tuple[Signature, str]]:
    plan = twin.fold_plan(make_fold_plan, tied)
    refused |= {fold.pattern: fold.reason for fold in plan.refusals}
    reasons = prove(twin.model, plan, twin.batches, seed=seed)
    return [(signature(fold), reasons.get(fold.name, "")) for fold in plan.folds]
