"""Find out what a module computes by running a private copy of it, and prove it on fresh inputs."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from normswap.proof import prove, prove_any_width, prove_extremes, prove_followers, prove_gradients, prove_invariance
from normswap.regression import find_formula
from normswap.replica import Replica, Unfit, followers, original_class
from normswap.roundings import DTYPE_PAIRS, find_rounding
from normswap.spec import NormSpec
from normswap.surroundings import plain_surroundings
from normswap.wrapping import has_own_forward, plain_state

__all__ = ["Refusal", "probe", "settings_key"]

_NAMED_LIKE_A_NORM = re.compile(r"norm(?!al(?!iz|is))|(?<![A-Z])LN(?![a-z])|RMS", re.IGNORECASE)
_CONTAINER_NORM = re.compile(r"Norm(Gated|PerHead|Layer|alization)?(\dd)?$")
_NO_SETTINGS = set(vars(nn.Module()))
# A list that contains itself ends here.
_DEEPEST = 8


@dataclass(frozen=True)
class Refusal:
    """Why a norm is left alone.

    Attributes:
        reason: one clause that a person can act on.
        of_rows: whether it may be a norm of rows; a BatchNorm is none.
    """

    reason: str
    of_rows: bool = True


def probe(module: nn.Module) -> NormSpec | Refusal | None:
    """Find the spec of a module from its behaviour, and prove it.

    A copy with random parameters of its own is run on chosen inputs; the module itself is neither run nor
    changed, so one on the meta device is probed all the same. Regression of the output on the normalised row
    gives kind, gain form and bias; rows near zero give eps; half-precision runs give the cast order. The spec is
    then proved on fresh parameters and inputs in float32, bfloat16 and float16, at three scales.

    Args:
        module: any module.

    Returns:
        The proved spec; a `Refusal` for what is a norm by name or behaviour but is not one that can be swapped;
        None for a module that is no norm.
    """
    name = original_class(module).__name__
    if isinstance(module, torch.jit.ScriptModule):
        name = str(getattr(module, "original_name", name))
    named = _NAMED_LIKE_A_NORM.search(name) is not None
    try:
        if not _is_candidate(module):
            return None
        with plain_surroundings(20240229):
            return _find(Replica(module))
    except Unfit as unfit:
        return Refusal(str(unfit), unfit.of_rows) if named or unfit.is_norm else None


def settings_key(module: nn.Module) -> Hashable:
    """Return what tells apart two modules that may compute differently: class, settings, tensor shapes."""
    if isinstance(module, torch.jit.ScriptModule):
        return id(module)
    state = plain_state(module)
    plain = {name: value for name, value in state.items() if name not in _NO_SETTINGS}
    tensors = {
        name: None if tensor is None or is_lazy(tensor) else (tuple(tensor.shape), tensor.is_floating_point())
        for name, tensor in (*state["_parameters"].items(), *state["_buffers"].items())
    }
    plain = {name: value if _is_plain(value) else id(value) for name, value in plain.items()}
    after = {name: repr(child) for name, child in followers(module).items()}
    settings = (repr(sorted(of.items())) for of in (plain, tensors, after))
    return original_class(module), *settings, has_own_forward(module)


def _is_plain(value: object, depth: int = 0) -> bool:
    """Whether a setting is told from others by its words; a configuration, shared by all layers, is by what it is."""
    if isinstance(value, (list, tuple, set, frozenset, dict)):
        entries = [*value, *value.values()] if isinstance(value, dict) else value
        return depth < _DEEPEST and all(_is_plain(entry, depth + 1) for entry in entries)
    return isinstance(value, (bool, int, float, str, bytes, type(None), torch.dtype, torch.device))


def _is_candidate(module: nn.Module) -> bool:
    cls = original_class(module)
    if isinstance(module, torch.jit.ScriptModule):
        raise Unfit("it was compiled by torch.jit, and has no forward of Python's any more")
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    if isinstance(module, (nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)):
        raise Unfit(f"{cls.__name__} normalises over channels, not over the last dimension", of_rows=False)
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.SyncBatchNorm)):
        raise Unfit(
            f"{cls.__name__} normalises over the batch or over positions, not over the last dimension", of_rows=False
        )
    if cls.__module__.startswith("torch.nn."):
        return False
    if isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)):
        return False
    if plain_state(module)["_modules"] and not _may_end_in_others(module):
        if _CONTAINER_NORM.search(cls.__name__) and _is_small(module):
            raise Unfit(f"it is made of other modules ({', '.join(sorted(module._modules)[:4])})")
        return False
    return True


def _may_end_in_others(module: nn.Module) -> bool:
    """Whether it could be a norm of its own and a dropout or an activation after it."""
    return bool(module._parameters or _NAMED_LIKE_A_NORM.search(original_class(module).__name__)) and bool(
        followers(module)
    )


def _is_small(module: nn.Module) -> bool:
    """Whether a container could be a norm by itself (one for each head, one with a projection), not a whole block."""
    leaves = [child for child in module.modules() if not child._modules]
    linears = sum(isinstance(leaf, nn.Linear) for leaf in leaves)
    deep = any(grandchild._modules for child in module.children() for grandchild in child.children())
    return linears <= 1 and not deep


def _find(replica: Replica) -> NormSpec:
    replica.check_signature()
    spec = find_formula(replica)
    prove(replica, spec, ((torch.float32, torch.float32),))
    spec = find_rounding(replica, spec)
    prove(replica, spec, DTYPE_PAIRS)
    spec = _find_width(replica, spec)
    spec = prove_invariance(replica, spec)
    prove_extremes(replica, spec)
    prove_gradients(replica, spec)
    return prove_followers(replica, spec)


def _find_width(replica: Replica, spec: NormSpec) -> NormSpec:
    """Try rows of another length where none of the parameters is used; there may be one that is not."""
    if spec.gain_name or spec.bias_name or replica.stated:
        return spec
    try:
        prove_any_width(replica, spec)
    except Unfit:
        if spec.width is None:
            raise
        return spec
    return replace(spec, width=None)
