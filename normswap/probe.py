"""Find out what a module computes by running a private copy of it, and prove it on fresh inputs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn

from normswap.proof import (
    ELEMENTS,
    disagreement,
    dtype_name,
    prove,
    prove_extremes,
    prove_gradients,
    prove_invariance,
    relative,
    row_count,
    rows,
    try_run,
)
from normswap.replica import Replica, Unfit, original_class
from normswap.spec import NormSpec

__all__ = ["Refusal", "probe", "settings_key"]

_NAMED_LIKE_A_NORM = re.compile(r"norm(?!al(?!iz|is))|(?<![A-Z])LN(?![a-z])|RMS", re.IGNORECASE)
_CONTAINER_NORM = re.compile(r"Norm(Gated|PerHead|Layer|alization)?(\dd)?$")
_Gain = Literal["w", "1+w", "none"]
# The order is that of trust: the pairs that models are served in first.
_DTYPE_PAIRS = (
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
    (torch.float32, torch.bfloat16),
)
_ROUNDINGS: tuple[tuple[Literal["before_gain", "after_gain"], Literal["input", "promote", "weight"]], ...] = (
    ("after_gain", "input"),
    ("before_gain", "promote"),
    ("before_gain", "input"),
    ("before_gain", "weight"),
    ("after_gain", "promote"),
    ("after_gain", "weight"),
)


_NO_SETTINGS = {*vars(nn.Module()), "forward", "_hf_hook", "_old_forward", "_is_hf_initialized", "_normswap"}


@dataclass(frozen=True)
class Refusal:
    """Why a norm is left alone.

    Attributes:
        reason: one clause that a person can act on.
    """

    reason: str


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
    named = _NAMED_LIKE_A_NORM.search(name) is not None
    try:
        if not _is_candidate(module):
            return None
        with _quiet():
            return _find(Replica(module))
    except Unfit as unfit:
        return Refusal(str(unfit)) if named or unfit.is_norm else None


def settings_key(module: nn.Module) -> Hashable:
    """Return what tells apart two modules that may compute differently: class, settings, tensor shapes."""
    plain = {name: value for name, value in vars(module).items() if name not in _NO_SETTINGS}
    tensors = {
        name: None if tensor is None else tuple(tensor.shape)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
    }
    hooked = "forward" in vars(module), hasattr(module, "_hf_hook")
    return original_class(module), repr(sorted(plain.items())), repr(sorted(tensors.items())), hooked


def _is_candidate(module: nn.Module) -> bool:
    cls = original_class(module)
    if isinstance(module, (nn.LayerNorm, nn.RMSNorm)):
        return True
    if isinstance(module, (nn.GroupNorm, nn.LocalResponseNorm, nn.CrossMapLRN2d)):
        raise Unfit(f"{cls.__name__} normalises over channels, not over the last dimension")
    if isinstance(module, (nn.modules.batchnorm._NormBase, nn.SyncBatchNorm)):
        raise Unfit(f"{cls.__name__} normalises over the batch or over positions, not over the last dimension")
    if cls.__module__.startswith("torch.nn."):
        return False
    if isinstance(module, (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)):
        return False
    if module._modules:
        if _CONTAINER_NORM.search(cls.__name__) and _is_small(module):
            raise Unfit(f"it is made of other modules ({', '.join(sorted(module._modules)[:4])})")
        return False
    return True


def _is_small(module: nn.Module) -> bool:
    """Whether a container could be a norm by itself (one for each head, one with a projection), not a whole block."""
    leaves = [child for child in module.modules() if not child._modules]
    linears = sum(isinstance(leaf, nn.Linear) for leaf in leaves)
    deep = any(grandchild._modules for child in module.children() for grandchild in child.children())
    return linears <= 1 and not deep


def _find(replica: Replica) -> NormSpec | Refusal:
    replica.check_signature()
    spec = replace(_find_formula(replica), eps=1.0)
    spec = replace(spec, eps=_find_eps(replica, spec))
    prove(replica, spec, ((torch.float32, torch.float32),))
    spec = _find_rounding(replica, spec)
    prove(replica, spec, _DTYPE_PAIRS)
    prove_invariance(replica)
    prove_extremes(replica, spec)
    prove_gradients(replica, spec)
    return spec


def _find_formula(replica: Replica) -> NormSpec:
    """Regress the output on the normalised row, column by column; eps is negligible at this scale."""
    replica.randomise(torch.float32)
    width = replica.width
    x = 1e3 * (rows(width, max(64, min(4096, ELEMENTS // width))) + 0.5)
    try:
        y = replica.run(x)
    except Unfit:
        if try_run(replica, torch.randn(2, width, 3, 5)) is not None:
            raise Unfit("it normalises the channels of a channels-first image, which is not swapped yet") from None
        raise
    if y.dtype != torch.float32:
        raise Unfit(f"it returns {dtype_name(y.dtype)} for a float32 input and float32 parameters")
    if not y.isfinite().all():
        raise Unfit("it returns values that are not finite for an ordinary input")
    if relative(replica.run(4 * x), y) > 1e-3:
        raise Unfit("it does not normalise: its output changes with the scale of its input")
    kinds: tuple[Literal["rms", "layer"], ...] = ("rms", "layer")
    for kind in kinds:
        gain, bias, residual = _regress(y, _unit(x, kind))
        if residual < 1e-4:
            break
    else:
        raise Unfit(_other_formula(replica, x, y), is_norm=True)
    form, gain_name = _match_gain(replica, gain, kind)
    bias_name = _match_bias(replica, bias)
    return NormSpec(
        kind=kind,
        width=width if replica.tensors else None,
        eps=0.0,
        gain=form,
        bias=bias_name is not None,
        gain_name=gain_name,
        bias_name=bias_name,
    )


def _unit(x: torch.Tensor, kind: str, groups: int = 1) -> torch.Tensor:
    rows = x.double().reshape(*x.shape[:-1], groups, -1)
    if kind == "layer":
        rows = rows - rows.mean(-1, keepdim=True)
    return (rows * rows.pow(2).mean(-1, keepdim=True).rsqrt()).reshape(x.shape)


def _regress(y: torch.Tensor, n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, float]:
    y, n = y.double().reshape(-1, y.shape[-1]), n.reshape(-1, n.shape[-1])
    n_mean, y_mean = n.mean(0), y.mean(0)
    gain = ((n - n_mean) * (y - y_mean)).sum(0) / (n - n_mean).pow(2).sum(0)
    bias = y_mean - gain * n_mean
    return gain, bias, relative(gain * n + bias, y)


def _other_formula(replica: Replica, x: torch.Tensor, y: torch.Tensor) -> str:
    """Name the kind of normalisation that is not this version's, as far as it can be told."""
    other = 1e3 * torch.randn_like(x)
    other[..., 0, :] = x[..., 0, :]
    if relative(replica.run(other)[..., 0, :], y[..., 0, :]) > 1e-3:
        return "its rows are not independent of each other"
    for groups in range(2, replica.width // 2 + 1):
        if replica.width % groups == 0 and any(
            _regress(y, _unit(x, kind, groups))[2] < 1e-4 for kind in ("rms", "layer")
        ):
            return f"it is a grouped norm ({groups} groups a row), which is not swapped yet"
    return "it is neither RMSNorm nor LayerNorm over the last dimension"


def _match_gain(replica: Replica, gain: torch.Tensor, kind: str) -> tuple[_Gain, str | None]:
    forms: tuple[tuple[_Gain, float], ...] = (("w", 0.0), ("1+w", 1.0))
    for name, tensor in replica.tensors.items():
        for form, offset in forms:
            if relative(gain, tensor.double() + offset) < 1e-4:
                return form, name
    if relative(gain, torch.ones_like(gain)) < 1e-4:
        return "none", None
    if relative(gain, torch.full_like(gain, replica.width**-0.5)) < 1e-4:
        raise Unfit("it divides by the root of the sum (L2), which is not swapped yet", is_norm=True)
    raise Unfit(f"its gain is neither w nor 1 + w of a parameter ({kind} normalisation)", is_norm=True)


def _match_bias(replica: Replica, bias: torch.Tensor) -> str | None:
    if bias.abs().max() < 1e-4:
        return None
    for name, tensor in replica.tensors.items():
        if relative(bias, tensor.double()) < 1e-3:
            return name
    raise Unfit("what it adds after the gain is no parameter of its own", is_norm=True)


def _find_eps(replica: Replica, spec: NormSpec) -> float:
    """Feed rows so close to zero that eps alone is left under the root."""
    replica.randomise(torch.float32)
    if spec.bias_name is not None:
        # A bias would swallow the tiny products that eps is read from.
        replica.tensors[spec.bias_name].zero_()
    x = 1e-12 * (rows(replica.width, 64) + 0.5)
    y = replica.run(x).double()
    gain = replica.tensors[spec.gain_name].double() + spec.offset if spec.gain_name else 1.0
    centred = x.double() - (x.double().mean(-1, keepdim=True) if spec.kind == "layer" else 0.0)
    large = centred.abs() > centred.abs().mean()
    root = (centred * gain / y)[large]
    variance = centred.pow(2).mean(-1, keepdim=True).expand_as(x)[large]
    eps = float((root.pow(2) - variance).median())
    if not eps >= -1e-25 or eps == float("inf"):
        raise Unfit("what it adds under the root cannot be measured", is_norm=True)
    if eps < 1e-20:
        return 0.0
    for known in (*replica.numbers(), torch.finfo(torch.float32).eps, float(f"{eps:.3g}")):
        if abs(eps - known) <= 3e-5 * known:
            return known
    return eps


def _find_rounding(replica: Replica, spec: NormSpec) -> NormSpec:
    """Choose the first of the known roundings that reproduces every pair of dtypes that the original runs in."""
    runs = []
    for x_dtype, gain_dtype in _DTYPE_PAIRS:
        replica.randomise(gain_dtype)
        x = (rows(replica.width, row_count(replica.width)) + 0.25).to(x_dtype)
        if (not replica.tensors and x_dtype != gain_dtype) or (y := try_run(replica, x)) is None:
            if x_dtype == gain_dtype:
                raise Unfit(f"it does not run in {dtype_name(x_dtype)}", is_norm=True)
            continue
        runs.append((x, dict(replica.tensors), y))
    first_fault = ""
    for cast, out in _ROUNDINGS:
        candidate = replace(spec, cast=cast, out=out)
        faults = (disagreement(candidate, x, tensors, y) for x, tensors, y in runs)
        fault = next((fault for fault in faults if fault), None)
        if fault is None:
            return candidate
        first_fault = first_fault or fault
    raise Unfit(f"no known order of casts gives its half-precision results ({first_fault})", is_norm=True)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the caller's random state, and its screen clean of what odd dtypes make torch say."""
    # Tensors made in inference mode can be neither watched nor differentiated.
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(20240229)
        yield
