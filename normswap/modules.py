"""The swap and its undoing. A norm keeps its parameters, attributes and hooks; only its forward changes."""

from __future__ import annotations

import copyreg
import types
from collections.abc import Iterator
from typing import Any

from torch import nn

from normswap.errors import ModelError
from normswap.execution import Execution, resolve_backend
from normswap.spec import NormSpec
from normswap.wrapping import bare_class, original_class, regraft

__all__ = [
    "FusedNorm",
    "execution_of",
    "fused_norms",
    "original_class",
    "original_forward",
    "require_own_class",
    "resolve_backend",
    "swap",
    "unswap",
]

_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


class FusedNorm(nn.Module):
    """Mixed in before the original class of a swapped norm; never built directly.

    The class made of the two bears the original's name, so code that looks at names sees what it saw before.
    """

    _normswap_original: type[nn.Module]
    _normswap: Execution

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do not tell the original class of this one: it may register its subclasses, or ask for arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute what the original's forward returns for these arguments, by the fused implementation.

        Its own forward runs where `normswap.execution.Execution` says so.
        """
        if "_normswap" not in self.__dict__:
            # Undone since, below a forward that somebody put on this very module and that calls the one it found.
            return original_class(self).forward(self, *args, **kwargs)
        return self._normswap.run(self, args, kwargs)

    def extra_repr(self) -> str:
        """Return the original's words and the backend."""
        own = self._normswap_original.extra_repr(self)
        return f"{own}, normswap={self._normswap.backend!r}" if own else f"normswap={self._normswap.backend!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the original class, since a class made at run time cannot be found by name."""
        reduced = super().__reduce_ex__(protocol)
        if "_normswap_original" not in vars(type(self)):
            return reduced
        if reduced[0] is copyreg.__newobj__ and reduced[1] == (type(self),):  # type: ignore[attr-defined]
            return (_new_fused, (self._normswap_original,), *reduced[2:])
        return reduced


def _new_fused(original: type[nn.Module]) -> nn.Module:
    cls = _fused_class(original)
    return cls.__new__(cls)


def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    if original not in _CLASSES:
        namespace = {
            "__module__": original.__module__,
            "__qualname__": original.__qualname__,
            "__doc__": original.__doc__,
            "_normswap_original": original,
        }
        _CLASSES[original] = types.new_class(
            original.__name__, (FusedNorm, original), exec_body=lambda body: body.update(namespace)
        )
    return _CLASSES[original]


def swap(module: nn.Module, spec: NormSpec, backend: str) -> None:
    """Put the fused implementation in the place of a norm's forward, in place.

    Args:
        module: the norm; a norm that is swapped already gets the new spec and backend.
        spec: what it computes.
        backend: one of ``normswap_kernels.BACKENDS``.

    Raises:
        ModelError: the module's class was changed by something else after an earlier swap.
    """
    original = original_class(module)
    require_own_class(module)
    vars(module)["_normswap"] = Execution(spec, backend, original)
    _give_class(module, _fused_class(original))


def unswap(module: nn.Module) -> bool:
    """Put back the original forward of one module; return whether it had been swapped.

    Raises:
        ModelError: the module's class was changed by something unknown after the swap.
    """
    if not isinstance(module, FusedNorm):
        return False
    require_own_class(module)
    _give_class(module, original_class(module))
    del module._normswap
    return True


def require_own_class(module: nn.Module) -> None:
    """Check that below what torch put on top stands the original class, or the one made of it.

    Raises:
        ModelError: something unknown changed the module's class after the swap.
    """
    bare = bare_class(type(module))
    if issubclass(bare, FusedNorm) and "_normswap_original" not in vars(bare):
        raise ModelError(
            f"expected a swapped {original_class(module).__name__}, got one whose class became "
            f"{bare.__name__} afterwards; undo that wrapping first"
        )


def _give_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Put a class in the place of the module's own, below what torch put on top, and in the bound forwards it keeps."""
    before, after = type(module), regraft(type(module), cls)
    module.__class__ = after
    for name in ("forward", "_old_forward"):
        # accelerate's hooks keep the class's forward on the module, and leave it there when they go.
        bound = vars(module).get(name)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            vars(module)[name] = types.MethodType(after.forward, module)


def fused_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, NormSpec]]:
    """Yield name, module and spec of each swapped norm of a model."""
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm):
            yield name, module, module._normswap.spec


def execution_of(module: nn.Module) -> Execution:
    """Return what a swapped norm runs."""
    execution: Execution = vars(module)["_normswap"]
    return execution


def original_forward(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run the original class's forward with the module's own parameters, whether it is swapped or not."""
    return original_class(module).forward(module, *args, **kwargs)
