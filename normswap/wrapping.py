"""What other tools put on a module at run time: classes on top of its own, hooks, computed tensors. Seen through."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

__all__ = ["bare_class", "has_own_forward", "original_class", "plain_state", "regraft"]

# accelerate's, transformers', FSDP's and this package's own notes on a module.
_NOTES = ("_hf_hook", "_old_forward", "_is_hf_initialized", "_normswap", "_compiled_call_impl")
_FSDP_NOTES = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
_FSDP_STATE = "__composable_api_"
_TWIN = "_normswap_twin"


def bare_class(cls: type[nn.Module]) -> type[nn.Module]:
    """Return the class below those that torch's parametrizations and FSDP make and put on top of a module's own."""
    while _is_wrapper(cls):
        cls = cls.__bases__[-1]
    return cls


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the module's own class, as it was before a swap and before torch put classes on top."""
    cls = bare_class(type(module))
    original: type[nn.Module] = getattr(cls, "_normswap_original", cls)
    return original


def _is_wrapper(cls: type) -> bool:
    if not cls.__module__.startswith("torch.") or {"_normswap_original", "forward"} & vars(cls).keys():
        return False
    # What torch makes at run time stands in none of its modules.
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is not cls


def regraft(cls: type[nn.Module], base: type[nn.Module]) -> type[nn.Module]:
    """Return the class that would be if `base` had been in the place of the bare class of `cls`.

    The class that was there before comes back on the way back, with the properties that were added or removed since.

    Args:
        cls: a module's class, with or without classes that torch put on top.
        base: what is wanted below those.
    """
    if not _is_wrapper(cls):
        return base
    below = regraft(cls.__bases__[-1], base)
    twin = vars(cls).get(_TWIN)
    if twin is None or twin.__bases__[-1] is not below:
        bases = (*cls.__bases__[:-1], below)
        name = cls.__name__.removesuffix(cls.__bases__[-1].__name__) + below.__name__
        twin = types.new_class(name, bases, exec_body=lambda body: body.update(__module__=cls.__module__))
        setattr(cls, _TWIN, twin)
        setattr(twin, _TWIN, cls)
    _match(twin, cls)
    return twin


def _match(twin: type, cls: type) -> None:
    """Give one class the attributes of the other: parametrizations come and go as properties of the class."""
    unequal = {"__dict__", "__weakref__", "__doc__", _TWIN}
    wanted = {name: value for name, value in vars(cls).items() if name not in unequal}
    for name in set(vars(twin)) - set(wanted) - unequal:
        delattr(twin, name)
    for name, value in wanted.items():
        if vars(twin).get(name) is not value:
            setattr(twin, name, value)


def has_own_forward(module: nn.Module) -> bool:
    """Whether somebody put another forward on this very module; accelerate's hooks, which call its own, are none."""
    forward = vars(module).get("forward")
    return forward is not None and not hasattr(module, "_hf_hook") and not _is_bound(module, forward)


def _is_bound(module: nn.Module, forward: Any) -> bool:
    # accelerate leaves the class's own forward on a module that it takes its hook from.
    return isinstance(forward, types.MethodType) and forward.__func__ is getattr(type(module), "forward", None)


def plain_state(module: nn.Module) -> dict[str, Any]:
    """Return a module's ``vars`` as they would be if no other tool had touched it.

    Without hooks and the forward that accelerate puts in the place of the class's. For a tensor that a parametrization,
    a pruning or a weight norm computes, one of its shape stands among the parameters, in the place of what it is
    computed from. Nothing is run, and nothing copied but the dictionaries.
    """
    notes = (*_NOTES, *_FSDP_NOTES)
    state = {n: value for n, value in vars(module).items() if n not in notes and not n.startswith(_FSDP_STATE)}
    if not has_own_forward(module):
        state.pop("forward", None)
    for name in ("_parameters", "_buffers", "_modules"):
        state[name] = dict(state[name])
    for name, parametrizations in _parametrized(module).items():
        # Computing it could change buffers (spectral norm's do); only weight norm, with g and v, has a choice.
        sources = [*parametrizations.parameters(recurse=False), *parametrizations.buffers(recurse=False)]
        state["_parameters"][name] = max(sources, key=torch.Tensor.numel)
    if _parametrized(module):
        del state["_modules"]["parametrizations"]
    for name in _computed_before_forward(module):
        for kind in ("_parameters", "_buffers"):
            state[kind] = {key: tensor for key, tensor in state[kind].items() if not key.startswith(f"{name}_")}
        state["_parameters"][name] = state.pop(name)
    for name, value in state.items():
        if isinstance(value, OrderedDict) and name.endswith("_hooks"):
            state[name] = OrderedDict()
    return state


def _parametrized(module: nn.Module) -> nn.ModuleDict | dict[str, nn.Module]:
    return module.parametrizations if nn.utils.parametrize.is_parametrized(module) else {}  # type: ignore[return-value]


def _computed_before_forward(module: nn.Module) -> Iterator[str]:
    """Yield the attributes that a hook of torch's pruning, weight norm or spectral norm computes before each call."""
    for hook in module._forward_pre_hooks.values():
        if type(hook).__module__.startswith("torch.nn.utils."):
            name = getattr(hook, "_tensor_name", None) or getattr(hook, "name", None)
            if isinstance(name, str) and isinstance(vars(module).get(name), torch.Tensor):
                yield name
