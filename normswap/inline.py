"""Find the norms of a model that are no modules: functions, and code that stands in the middle of a forward."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any

from torch import nn

from normswap.formulas import Formula, Kind, Reading, read
from normswap.naming import name_pattern
from normswap.replica import original_class

__all__ = ["CodeNorm", "find_code_norms"]

# What a function cannot do without if it normalises rows; any other is not read.
_SIGNS = {"rsqrt", "rsqrt_", "rms_norm", "layer_norm", "native_layer_norm", "normalize", "norm", "vector_norm"}
_ROOTS = {"sqrt", "sqrt_", "std", "pow", "float_power"}
_REDUCTIONS = {"mean", "sum", "var", "std"}
_EXPONENTS = {0.5, -0.5}
_BUILDING = {"__init__", "_init_weights", "reset_parameters", "init_weights"}
_DEPTH = 3

_Found = tuple[str, Kind, str]


@dataclass(frozen=True)
class CodeNorm:
    """Norms of a model that are code, not modules: nothing can be put in their place.

    Attributes:
        name: qualified name of the modules whose code it is, layer and expert numbers replaced by ``*``.
        cls: name of their class.
        function: where it is written: ``"rms_forward"``, or ``"Class.method"`` for code in a method.
        kind: ``"RMS"``, ``"LayerNorm"`` or ``"L2"``.
        reason: why it is not swapped, with the method that it is reached from.
        count: how many modules have it.
    """

    name: str
    cls: str
    function: str
    kind: Kind
    reason: str
    count: int

    def to_dict(self) -> dict[str, Any]:
        """Return the finding as it stands in ``inspect --json``."""
        return {
            "name": self.name,
            "class": self.cls,
            "function": self.function,
            "kind": self.kind,
            "count": self.count,
            "reason": self.reason,
        }


def find_code_norms(model: nn.Module, norms: Container[type[nn.Module]]) -> tuple[CodeNorm, ...]:
    """Find norms that are written as functions or inline, by reading the source of the model's own classes.

    Every method of each distinct class is looked at, and the functions that it calls, three levels deep. What
    counts is the root of a mean or a sum of squares over the last dimension that something is divided by, and
    the functions of torch that do the same. Code that has no source (built-in, made by ``exec``) shows nothing.

    Args:
        model: any module; nothing of it is run.
        norms: classes that are norms themselves; their code is left out.

    Returns:
        One entry for each (name pattern, class, function, kind).
    """
    counts: Counter[tuple[str, str, _Found]] = Counter()
    of_class: dict[tuple[Any, ...], list[_Found]] = {}
    for name, module in model.named_modules():
        cls = original_class(module)
        if cls in norms or _is_library(cls.__module__):
            continue
        own = tuple((key, value) for key, value in vars(module).items() if isinstance(value, FunctionType))
        key = (cls, own, not module._modules)
        if key not in of_class:
            of_class[key] = _of_class(*key)
        for found in of_class[key]:
            counts[name_pattern(name), cls.__name__, found] += 1
    return tuple(
        CodeNorm(name, cls, function, kind, reason, count)
        for (name, cls, (function, kind, reason)), count in counts.items()
    )


def _of_class(cls: type[nn.Module], own: tuple[tuple[str, FunctionType], ...], is_leaf: bool) -> list[_Found]:
    """Return (function, kind, reason) for each norm in the code of a class and in its instance's functions."""
    found: dict[tuple[str, Kind], str] = {}
    lead = "in a module that cannot be called as a norm" if is_leaf else "not a module"
    for method, function in (*_methods(cls), *own):
        place = f"{cls.__name__}.{method}"
        for home, formula in _reached(function, _DEPTH):
            inside = home is function and (method, function) not in own
            where = place if inside else home.__name__
            if formula.call is not None:
                what = f"{formula.call}() in {where}" + ("" if inside else f"(), which {place} calls")
            else:
                what = f"inline code of {place}" if inside else f"{where}() in {place}"
            found.setdefault((where, formula.kind), f"{lead}: {what}")
    return [(where, kind, reason) for (where, kind), reason in found.items()]


def _methods(cls: type[nn.Module]) -> Iterator[tuple[str, FunctionType]]:
    """Yield the functions of a class and of its bases, as far as they are a model's own code and no set-up."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if _is_library(base.__module__):
            continue
        for name, value in vars(base).items():
            function = getattr(value, "__func__", value)
            plain = inspect.unwrap(function) if callable(function) else None
            if isinstance(plain, FunctionType) and name not in seen and name not in _BUILDING:
                yield name, plain
            seen.add(name)


def _is_library(module: str) -> bool:
    """Whether a module belongs to torch, or to the part of transformers that is no model's."""
    first, _, rest = (module or "").partition(".")
    if first == "transformers":
        return rest.partition(".")[0] != "models"
    return first in ("torch", "builtins", "typing", "abc")


@lru_cache(maxsize=4096)
def _reading(function: FunctionType, depth: int) -> Reading:
    callees = _callees(function)
    calls_root = depth > 0 and any(_reading(callee, depth - 1).returns for callee in callees)
    if not calls_root and not _may_normalise(function.__code__):
        return Reading()
    return read(function, lambda callee: _reading(callee, depth - 1).returns if depth > 0 else None)


@lru_cache(maxsize=4096)
def _reached(function: FunctionType, depth: int) -> tuple[tuple[FunctionType, Formula], ...]:
    """Return the norms in a function and in those that it calls, each with the function that has it."""
    found = dict.fromkeys((function, formula) for formula in _reading(function, depth).formulas)
    if depth > 0:
        for callee in _callees(function):
            found |= dict.fromkeys(_reached(callee, depth - 1))
    return tuple(found)


def _callees(function: FunctionType) -> list[FunctionType]:
    """Return the functions of models that a function names: its globals, and members of modules among them."""
    names = list(_names(function.__code__))
    values = [function.__globals__.get(name) for name in names]
    for owner in [value for value in values if isinstance(value, ModuleType)]:
        if not _is_library(owner.__name__):
            values += [vars(owner).get(name) for name in names]
    plain = [inspect.unwrap(value) for value in values if isinstance(value, FunctionType)]
    return [v for v in plain if isinstance(v, FunctionType) and v is not function and not _is_library(v.__module__)]


def _names(code: CodeType) -> set[str]:
    inner = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _may_normalise(code: CodeType) -> bool:
    names, constants = _names(code), set(_numbers(code))
    if names & _SIGNS:
        return True
    return bool((names & _ROOTS or constants & _EXPONENTS) and names & _REDUCTIONS)


def _numbers(code: CodeType) -> Iterator[float]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _numbers(constant)
        elif isinstance(constant, float):
            yield constant
