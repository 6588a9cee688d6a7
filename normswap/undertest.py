"""The norms of a converted model beside those of its original, as the gate ``norms`` judges them."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from normswap import modules
from normswap.execution import Execution
from normswap.meter import NormUnderTest
from normswap.plan import Plan
from normswap.replica import bare
from normswap.spec import NormSpec

__all__ = ["OriginalNorms", "norms_under_test"]


class OriginalNorms:
    """Copies of an original's norms, for when the original itself is no longer in memory.

    Args:
        folded: names of those whose gain the converted model has elsewhere; there the original's code is run with the
            converted norm's own parameters.
        rounded: whether that holds for all of them, since the converted model has the original's values rounded.
    """

    def __init__(self, folded: Collection[str] = (), *, rounded: bool = False) -> None:
        self.folded, self.rounded = frozenset(folded), rounded
        self._copies: dict[str, nn.Module] = {}

    def keep(self, model: nn.Module, names: Iterable[str]) -> None:
        """Copy the norms of these names as soon as each of them first runs, with the values that it then has."""
        for name in names:
            try:
                module = model.get_submodule(name)
            except AttributeError:
                continue
            self._keep_when_run(name, module)

    def _keep_when_run(self, name: str, module: nn.Module) -> None:
        def hook(*_: Any) -> None:
            handle.remove()
            self._copies[name] = _copy(module)

        handle = module.register_forward_pre_hook(hook)

    def of(self, name: str, module: nn.Module) -> nn.Module | None:
        """Return the copy that a converted norm is held against; None where its own code is."""
        kept = self._copies.get(name)
        if kept is None:
            return None
        if self.rounded or name in self.folded:
            kept._parameters.update(module._parameters)
        return kept


def _copy(module: nn.Module) -> nn.Module:
    twin = copy.deepcopy(module)
    for part in twin.modules():
        for hooks in (part._forward_hooks, part._forward_pre_hooks, part._backward_hooks):
            hooks.clear()
    return twin


def norms_under_test(model: nn.Module, plan: Plan | None, originals: OriginalNorms) -> list[NormUnderTest]:
    """List the norms that are judged.

    Args:
        model: the converted model.
        plan: of its norms, where they run as they are; None where they are swapped.
        originals: the original's.
    """
    if plan is None:
        found = [
            (name, module, spec, modules.execution_of(module)) for name, module, spec in modules.fused_norms(model)
        ]
    else:
        found = []
        for decision in plan.swaps:
            assert decision.spec is not None
            module = model.get_submodule(decision.name)
            found.append((decision.name, module, decision.spec, Execution(decision.spec, "auto", type(module))))
    return [_under_test(name, module, spec, execution, originals) for name, module, spec, execution in found]


def _in_its_words(
    theirs: nn.Module, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Hand a norm by their places the arguments that another class calls otherwise."""
    words = inspect.signature(modules.original_class(theirs).forward).parameters
    if kwargs.keys() <= words.keys():
        return args, kwargs
    bound = inspect.signature(modules.original_class(module).forward).bind(module, *args, **kwargs)
    return bound.args[1:], bound.kwargs


def _under_test(
    name: str, module: nn.Module, spec: NormSpec, execution: Execution, originals: OriginalNorms
) -> NormUnderTest:
    def held() -> nn.Module:
        return originals.of(name, module) or module

    def original(*args: Any, **kwargs: Any) -> Any:
        theirs = held()
        args, kwargs = _in_its_words(theirs, module, args, kwargs)
        with bare(theirs, spec.then):
            return modules.original_forward(theirs, *args, **kwargs)

    def parameter(attribute: str | None) -> Any:
        theirs = held()
        return getattr(theirs if hasattr(theirs, attribute) else module, attribute) if attribute else None

    return NormUnderTest(
        name=name,
        spec=spec,
        module=module,
        original=original,
        bind=execution.bind,
        gain=lambda: parameter(spec.gain_name),
        bias=lambda: parameter(spec.bias_name),
    )
