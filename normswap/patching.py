"""Swap a model's norms in place, and undo it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import torch
from torch import nn

from normswap import checking, modules
from normswap.errors import UsageError
from normswap.plan import Plan, make_plan

__all__ = ["apply_plan", "patch", "unpatch"]

ModelT = TypeVar("ModelT", bound=nn.Module)
Patterns = str | Iterable[str] | None


def patch(
    model: ModelT,
    *,
    backend: str = "auto",
    include: Patterns = None,
    exclude: Patterns = None,
    verify: bool = True,
) -> ModelT:
    """Swap every norm that can be proved for its fused implementation, in place.

    Parameters stay the same objects under the same keys; `unpatch` undoes it; patching twice is harmless.

    Args:
        model: any module, on any device (the meta device too).
        backend: ``"auto"`` (Triton on a GPU, ``cpu`` on the CPU), ``"triton"``, ``"cpu"`` or ``"interpret"``.
        include: shell patterns of module names; only these are swapped.
        exclude: shell patterns of module names that are left alone.
        verify: compare each distinct norm with its original on the spot, before anything is changed.

    Returns:
        The same model.

    Raises:
        NothingToPatchError: no norm can be swapped; the message has the reasons.
        ParityError: a fused norm is out of the unit bound; nothing was changed.
        BackendError: the backend cannot run on the model's device.
        ModelError: something unknown changed the class of a norm that was swapped before; nothing was changed.
        UsageError: an include pattern matches no norm, or `model` is no module.

    Example:
        >>> import torch, normswap
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8))
        >>> normswap.patch(model)[1]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True, normswap='auto')
    """
    _require_module(model)
    plan = make_plan(model, include=include, exclude=exclude)
    plan.require_swaps()
    apply_plan(model, plan, backend=backend, verify=verify)
    return model


def unpatch(model: ModelT) -> ModelT:
    """Put back every original norm, in place; a model without swapped norms is returned as it is.

    Raises:
        ModelError: something unknown changed the class of a swapped norm since; nothing was changed.
        UsageError: `model` is no module.

    Example:
        >>> import torch, normswap
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8))
        >>> normswap.unpatch(normswap.patch(model))[0]
        LayerNorm((8,), eps=1e-05, elementwise_affine=True, bias=True)
    """
    _require_module(model)
    norms = [module for _, module, _ in modules.fused_norms(model)]
    for module in norms:
        modules.require_own_class(module)
    for module in norms:
        modules.unswap(module)
    return model


def apply_plan(model: nn.Module, plan: Plan, *, backend: str, verify: bool) -> None:
    """Swap what a plan of this very model says; with `verify`, after comparing each distinct norm.

    Raises:
        BackendError, ModelError, ParityError: as for `patch`; nothing was changed.
    """
    chosen = [(decision, model.get_submodule(decision.name)) for decision in plan.swaps]
    for _, module in chosen:
        modules.require_own_class(module)
    for device in {_device_of(module) for _, module in chosen}:
        modules.resolve_backend(backend, device)
    if verify:
        seen = set()
        for decision, module in chosen:
            assert decision.spec is not None
            key = (decision.key, _device_of(module), _dtype_of(module))
            if key not in seen:
                seen.add(key)
                checking.check_swap(module, decision.name, decision.spec, backend)
    before = [modules.execution_of(module) if isinstance(module, modules.FusedNorm) else None for _, module in chosen]
    try:
        for decision, module in chosen:
            assert decision.spec is not None
            modules.swap(module, decision.spec, backend)
    except BaseException:
        for (_, module), execution in zip(chosen, before, strict=True):
            modules.unswap(module)
            if execution is not None:
                modules.swap(module, execution.spec, execution.backend)
        raise


def _require_module(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"expected a torch.nn.Module, got {type(model).__name__}; for a checkpoint use normswap.convert, for a "
            "converted one normswap.load"
        )


def _device_of(module: nn.Module) -> torch.device:
    tensor = next(module.parameters(), None)
    # Meta tensors are offloaded or not loaded yet; what runs will be brought to the CPU at least.
    return torch.device("cpu") if tensor is None or tensor.is_meta else tensor.device


def _dtype_of(module: nn.Module) -> torch.dtype | None:
    tensor = next(module.parameters(), None)
    return None if tensor is None else tensor.dtype
