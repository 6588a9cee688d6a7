"""What in a model's structure forbids folds that are right each by itself: parameters with other readers or owners."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import combinations

from torch import nn

from normswap.errors import ModelError
from normswap.factors import channel_count
from normswap.foldplan import Consumer, Fold, FoldPlan

__all__ = ["Owners", "Reading", "conflicts", "norm_parameters", "readings"]

_Holder = tuple[int, str]


class Owners:
    """Which modules hold which parameter of a model."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._holders: dict[int, list[_Holder]] = {}
        self._names: dict[_Holder, str] = {}
        for name, module in model.named_modules():
            for attribute, parameter in module._parameters.items():
                if parameter is not None:
                    holder = (id(module), attribute)
                    self._holders.setdefault(id(parameter), []).append(holder)
                    self._names[holder] = f"{name}.{attribute}".removeprefix(".")

    def get(self, name: str) -> nn.Parameter:
        """Return a parameter by one of its names.

        Raises:
            ModelError: the model has none of that name.
        """
        module, attribute = self._module(name)
        parameter = module._parameters.get(attribute)
        if parameter is None:
            raise ModelError(
                f"expected a parameter {name} in the model, it has none; make the plan from this very model"
            )
        return parameter

    def others(self, names: set[str]) -> list[str]:
        """Name the places that hold one of these parameters too and are not among the names themselves."""
        holders = {(id(module), attribute) for module, attribute in map(self._module, names)}
        found = {holder for name in names for holder in self._holders[id(self.get(name))]}
        return sorted(self._names[holder] for holder in found - holders)

    def _module(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = name.rpartition(".")
        try:
            return self._model.get_submodule(path), attribute
        except AttributeError as error:
            raise ModelError(
                f"expected a module {path} in the model, it has none; make the plan from this very model"
            ) from error


def norm_parameters(fold: Fold) -> tuple[str | None, str | None]:
    """Return the qualified names of a norm's gain and bias; None where it has none."""
    assert fold.spec is not None
    gain, bias = (
        None if name is None else f"{fold.name}.{name}".removeprefix(".")
        for name in (fold.spec.gain_name, fold.spec.bias_name if fold.spec.bias else None)
    )
    return gain, bias


@dataclass(frozen=True)
class Reading:
    """How one weight reads one norm.

    Attributes:
        fold: of the norm.
        consumer: the weight and its columns.
        values: equal for norms that move the same values, as those with one and the same gain do.
    """

    fold: Fold
    consumer: Consumer
    values: Hashable

    @property
    def key(self) -> Hashable:
        """Equal for readings that are folded once, not twice."""
        return self.values, self.consumer.axis, self.consumer.pieces


def readings(owners: Owners, decisions: Iterable[Fold]) -> dict[int, list[Reading]]:
    """Collect how each weight reads norms, by the identity of the parameter."""
    found: dict[int, list[Reading]] = {}
    for fold in decisions:
        names: tuple[str | None, ...] = norm_parameters(fold) if fold.action == "fold" else (None, None)
        own = [None if name is None else id(owners.get(name)) for name in names]
        values = (own[0], own[1] if fold.bias == "move" else None) if own[0] is not None else fold.name
        for consumer in fold.consumers:
            uses = found.setdefault(id(owners.get(consumer.parameter)), [])
            reading = Reading(fold, consumer, values)
            if reading.key not in {use.key for use in uses}:
                uses.append(reading)
    return found


def conflicts(model: nn.Module, plan: FoldPlan) -> dict[str, str]:
    """Find the folds that would change more than they should, from the structure alone.

    A weight, gain or bias may stand in several places. Each of them has to be a reader (or the norm itself) of a norm
    that is folded with it, and no column may read two norms of different gains.

    Args:
        model: of the class that the plan is for; its parameters may be on the meta device.
        plan: the decisions.

    Returns:
        Name of the norm to the reason, for each fold that has to be refused.

    Raises:
        ModelError: the plan names parameters that the model does not have, or of other shapes.
    """
    owners = Owners(model)
    found: dict[str, str] = {}
    gains = {name for fold in plan.folds for name in norm_parameters(fold) if name is not None}
    for fold in plan.folds:
        _check_shapes(owners, fold)
        for reason in _reasons(owners, fold, gains):
            found.setdefault(fold.name, reason)
    for one, other in _clashes(owners, plan):
        for mine, its in ((one, other), (other, one)):
            if mine.fold.action == "fold":
                reason = f"{mine.consumer.parameter} reads {its.fold.name} too, and not with other columns"
                found.setdefault(mine.fold.name, reason)
    return found


def _reasons(owners: Owners, fold: Fold, gains: set[str]) -> Iterator[str]:
    for name in norm_parameters(fold):
        # A gain in several norms becomes the identity in all of them, so all have to be folded.
        if name is not None and (others := [other for other in owners.others({name}) if other not in gains]):
            yield f"{name} is {_and_so_on(others)} too, which would change with it"
    hint = "; untie the head first" if fold.untie else ""
    # A norm that stands in several places, all folded together, is read by weights that stand there with it.
    shared = any(name is not None and owners.others({name}) for name in norm_parameters(fold))
    if (others := owners.others(set(fold.parameters))) and not shared:
        yield f"a weight that reads it is {_and_so_on(others)} too, which would change with it{hint}"
    biases = {consumer.bias for consumer in fold.consumers if consumer.bias is not None}
    if fold.bias == "move" and (others := owners.others(biases)):
        yield f"a bias that would take its own is {_and_so_on(others)} too, which would change with it"


def _and_so_on(names: list[str]) -> str:
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _check_shapes(owners: Owners, fold: Fold) -> None:
    gain_name, _ = norm_parameters(fold)
    if gain_name is not None:
        channels = owners.get(gain_name).numel()
        if channels not in (1,) and channels < channel_count(fold):
            raise ModelError(
                f"expected at least {channel_count(fold)} channels in {gain_name}, it has {channels}; make the plan "
                "from this very model"
            )
    for consumer in fold.consumers:
        shape = tuple(owners.get(consumer.parameter).shape)
        columns = max((piece.stop for piece in consumer.pieces), default=0)
        if not 0 <= consumer.axis < len(shape) or columns > shape[consumer.axis]:
            raise ModelError(
                f"expected at least {columns} columns along axis {consumer.axis} of {consumer.parameter}, its shape is "
                f"{shape}; make the plan from this very model"
            )
        if fold.bias == "move" and consumer.bias is None:
            raise ModelError(f"expected a bias beside {consumer.parameter}, for that of {fold.name} to move there")
        if fold.bias == "move" and consumer.bias is not None:
            expected = shape[: consumer.axis] + shape[consumer.axis + 1 :]
            if (got := tuple(owners.get(consumer.bias).shape)) != expected:
                raise ModelError(f"expected the shape {expected} for {consumer.bias}, got {got}")


def _clashes(owners: Owners, plan: FoldPlan) -> Iterator[tuple[Reading, Reading]]:
    """Yield pairs of norms that one column reads, or that one weight reads along two axes."""
    for uses in readings(owners, plan.decisions).values():
        for one, other in combinations(uses, 2):
            if "fold" in (one.fold.action, other.fold.action) and _overlap(one.consumer, other.consumer):
                yield one, other


def _overlap(one: Consumer, other: Consumer) -> bool:
    return one.axis != other.axis or any(
        a.start < b.stop and b.start < a.stop for a in one.pieces for b in other.pieces
    )
