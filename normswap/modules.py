"""The swap and its undoing. A norm keeps its parameters, attributes and hooks; only its forward changes."""

from __future__ import annotations

import copyreg
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import normswap_kernels as kernels
import torch
from torch import nn
from torch.autograd import forward_ad

from normswap.errors import BackendError, ModelError, ParityError
from normswap.figures import Criterion
from normswap.gates import judge_norm
from normswap.meter import NormMeter, trial_rows
from normswap.replica import Replica, input_name, original_class
from normswap.spec import NormSpec

__all__ = [
    "FusedNorm",
    "check_swap",
    "fused_norms",
    "original_forward",
    "resolve_backend",
    "swap",
    "unswap",
]

_SERVED = (torch.float32, torch.float16, torch.bfloat16)
_OPERATIONS: dict[str, Callable[..., torch.Tensor]] = {"rms": kernels.rms_norm, "layer": kernels.layer_norm}
_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


@dataclass(frozen=True)
class _Swap:
    """What a swapped norm carries besides its own state: the spec, and what its forward would look up in it."""

    spec: NormSpec
    backend: str
    operation: Callable[..., torch.Tensor]
    offset: float
    input_name: str
    roundings: dict[tuple[torch.dtype, torch.dtype | None], tuple[torch.dtype | None, torch.dtype]]


class FusedNorm(nn.Module):
    """Mixed in before the original class of a swapped norm; never built directly.

    The class made of the two bears the original's name, so code that looks at names sees what it saw before.
    """

    _normswap_original: type[nn.Module]
    _normswap: _Swap

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Normalise one tensor ``(..., width)`` as the original does, by the fused implementation.

        What goes to the original's own forward: float64 input, which no model is served in; calls under
        ``torch.func`` and forward-mode differentiation; arguments that it does not take, for the error it raises.
        """
        swap = self._normswap
        if args:
            x = args[0] if len(args) == 1 and not kwargs else None
        else:
            x = kwargs.get(swap.input_name) if len(kwargs) == 1 else None
        if x is None or _transformed():
            return self._normswap_original.forward(self, *args, **kwargs)
        spec = swap.spec
        gain = None if spec.gain_name is None else getattr(self, spec.gain_name)
        bias = None if spec.bias_name is None else getattr(self, spec.bias_name)
        rounding = swap.roundings.get((x.dtype, None if gain is None else gain.dtype))
        if rounding is None:
            return self._normswap_original.forward(self, *args, **kwargs)
        return swap.operation(
            x,
            gain,
            bias,
            eps=spec.eps,
            offset=swap.offset,
            round_dtype=rounding[0],
            out_dtype=rounding[1],
            backend=swap.backend,
        )

    def extra_repr(self) -> str:
        """Return the original's words and the backend."""
        own = self._normswap_original.extra_repr(self)
        return f"{own}, normswap={self._normswap.backend!r}" if own else f"normswap={self._normswap.backend!r}"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Name the original class, since a class made at run time cannot be found by name."""
        reduced = super().__reduce_ex__(protocol)
        if reduced[0] is copyreg.__newobj__ and reduced[1] == (type(self),):  # type: ignore[attr-defined]
            return (_new_fused, (self._normswap_original,), *reduced[2:])
        return reduced


def _transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work, which the fused operations know nothing of."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


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
    fused = _fused_class(original)
    if isinstance(module, FusedNorm) and type(module) is not fused:
        raise ModelError(_wrapped_since(module))
    before = type(module)
    vars(module)["_normswap"] = _Swap(
        spec, backend, _OPERATIONS[spec.kind], spec.offset, input_name(original), _roundings(spec)
    )
    module.__class__ = fused
    _rebind(module, before, fused)


def _roundings(
    spec: NormSpec,
) -> dict[tuple[torch.dtype, torch.dtype | None], tuple[torch.dtype | None, torch.dtype]]:
    gains = _SERVED if spec.gain_name else (None,)
    return {
        (x, gain): (where.middle, where.out) for x in _SERVED for gain in gains for where in [spec.rounding(x, gain)]
    }


def unswap(module: nn.Module) -> bool:
    """Put back the original forward of one module; return whether it had been swapped.

    Raises:
        ModelError: the module's class was changed by something else after the swap (FSDP does so).
    """
    if not isinstance(module, FusedNorm):
        return False
    original = original_class(module)
    fused = _fused_class(original)
    if type(module) is not fused:
        raise ModelError(_wrapped_since(module))
    module.__class__ = original  # type: ignore[assignment]
    del module._normswap
    _rebind(module, fused, original)
    return True


def _wrapped_since(module: nn.Module) -> str:
    return (
        f"expected a swapped {original_class(module).__name__}, got one whose class became "
        f"{type(module).__name__} afterwards; undo that wrapping first"
    )


def _rebind(module: nn.Module, before: type[nn.Module], after: type[nn.Module]) -> None:
    """Point the bound forward that hooks (accelerate's) keep on the instance to the new class's."""
    for name in ("forward", "_old_forward"):
        bound = vars(module).get(name)
        if isinstance(bound, types.MethodType) and bound.__func__ is before.forward:
            if name == "forward":
                del module.forward
            else:
                vars(module)["_old_forward"] = types.MethodType(after.forward, module)


def fused_norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, NormSpec]]:
    """Yield name, module and spec of each swapped norm of a model."""
    for name, module in model.named_modules():
        if isinstance(module, FusedNorm):
            yield name, module, module._normswap.spec


def original_forward(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Run the original class's forward with the module's own parameters, whether it is swapped or not."""
    return original_class(module).forward(module, x)


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """Return the backend that would run for tensors of a device.

    Raises:
        BackendError: an unknown name, or one that cannot run here; with the reason and what to do.
    """
    try:
        return kernels.check_backend(backend, device)
    except (ValueError, RuntimeError) as error:
        raise BackendError(str(error)) from None


def check_swap(module: nn.Module, name: str, spec: NormSpec, backend: str) -> None:
    """Run original and fused implementation side by side on the module's device; neither is changed.

    A private copy runs in the module's dtype, with the module's own values and with random ones of trained models'
    sizes: rows of ordinary size, far above it, and where eps outweighs the row; one row, a few, and some hundred.

    Raises:
        ParityError: they differ by more than the unit bound; the message names the norm and the distance.
    """
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    dtype = tensors[0].dtype if tensors else torch.float32
    loaded = bool(tensors) and not any(tensor.is_meta for tensor in tensors)
    device = tensors[0].device if loaded else torch.device("cpu")
    replica = Replica(module, device)
    with torch.inference_mode(False), torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for own in (True, False) if loaded else (False,):
            if own:
                replica.adopt(module)
            else:
                replica.randomise(dtype, wide=True)
            meter, given = NormMeter(spec), []
            for rows in trial_rows(spec, replica.width):
                x = rows.to(device, dtype)
                expected = original_forward(replica.module, x)
                swap(replica.module, spec, backend)
                got = replica.module(x)
                unswap(replica.module)
                meter.add(x, replica.get(spec.gain_name), replica.get(spec.bias_name), expected, got)
                given.append(f"{tuple(rows.shape)}")
            _, failures = judge_norm(name, meter, Criterion())
            if failures:
                raise ParityError(
                    f"{name} ({replica.cls.__name__}): expected backend {backend!r} to stay within the unit bound of "
                    f"the original in {dtype}, got {'; '.join(failures)} on rows of shapes {', '.join(given)}; "
                    "nothing was changed"
                )
