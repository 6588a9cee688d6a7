"""What a swapped norm runs: its spec and the dtypes at hand made into a call of a kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import normswap_kernels as kernels
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from normswap import channels, distributed
from normswap.errors import BackendError
from normswap.replica import bare
from normswap.signatures import parameter_names
from normswap.spec import NormSpec, Rounding

__all__ = ["Execution", "resolve_backend"]

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms": kernels.rms_norm,
    "layer": kernels.layer_norm,
    "gated": kernels.gated_rms_norm,
}
_SERVED = (torch.float32, torch.float16, torch.bfloat16)


class Execution:
    """The fused computation in the place of one norm's forward.

    Args:
        spec: what the norm computes.
        backend: one of ``normswap_kernels.BACKENDS``.
        original: the norm's own class.

    What goes to the original's own forward: dtypes that the spec does not cover, and float64, which no model is served
    in; calls under ``torch.func`` and forward-mode differentiation; arguments other than the row and its gate.
    """

    def __init__(self, spec: NormSpec, backend: str, original: type[nn.Module]) -> None:
        self.spec = spec
        self.backend = backend
        self.original = original
        names = parameter_names(original)
        self._x_at = names.index(spec.input_name)
        self._gate_at = names.index(spec.gate_name) if spec.gate_name else -1
        gains = _SERVED if spec.gain_name else (None,)
        pairs = [(x, gain) for x in _SERVED for gain in gains if spec.covers(x, gain)]
        self._plain = {pair: _call(spec, spec.rounding(*pair), backend, pair[0], gated=False) for pair in pairs}
        self._gated = (
            {pair: _call(spec, spec.rounding(*pair), backend, pair[0], gated=True) for pair in pairs}
            if spec.gate
            else {}
        )
        if spec.gate and not spec.gate_optional:
            self._plain = {}
        self._autocast: dict[tuple[str | torch.dtype | None, ...], Callable[..., Tensor] | None] = {}
        # A row along the last dimension and parameters as the kernels take them: the usual case, and the short way.
        self._parameter_dim = 2 if spec.heads > 1 else 1
        self._direct = (spec.axis, spec.joins, spec.gain_position, spec.offset_dtype) == ("last", 1, "after", "float32")

    def __reduce__(self) -> tuple[Any, ...]:
        return Execution, (self.spec, self.backend, self.original)

    def __deepcopy__(self, memo: dict[int, Any]) -> Execution:
        return self

    def run(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Compute what the original's forward would return for these arguments."""
        x: Tensor | None
        gate: Tensor | None
        if len(args) == 1 and not kwargs and self._x_at == 0 and isinstance(args[0], Tensor):
            x, gate = args[0], None
        else:
            x, gate = self.bind(args, kwargs)
        if x is None or not self._fits(x) or _transformed():
            return self.original.forward(module, *args, **kwargs)
        spec = self.spec
        gain = None if spec.gain_name is None else getattr(module, spec.gain_name)
        bias = None if spec.bias_name is None else getattr(module, spec.bias_name)
        calls = self._plain if gate is None else self._gated
        call = calls.get((x.dtype, None if gain is None else gain.dtype))
        if call is None:
            return self.original.forward(module, *args, **kwargs)
        if _has_autocast(x) and (call := self._under_autocast(module, x, gate, gain)) is None:
            return self.original.forward(module, *args, **kwargs)
        if distributed.involved(x, gate, gain, bias):
            y = self._on_dtensors(module, call, (x, gate, gain, bias), args, kwargs)
        elif self._direct and gate is None and self._is_row(gain) and self._is_row(bias):
            y = call(x, gain, bias)
        else:
            y = self._prepared(call, x, gate, gain, bias)
        for name in spec.then:
            y = getattr(module, name)(y)
        return y

    def _fits(self, x: Tensor) -> bool:
        """Whether an input has the shape that the formula is of; of another the original says what is wrong."""
        spec = self.spec
        if x.dim() == 0 or (spec.ranks and x.dim() not in spec.ranks) or x.is_nested:
            return False
        if spec.width is None:
            return True
        if spec.axis == "channels":
            return x.size(1) == spec.width
        if spec.joins > 1:
            return x.size(-1) * spec.joins == spec.width and x.size(-2) == spec.joins
        return x.size(-1) == spec.width and (spec.heads == 1 or (x.dim() > 1 and x.size(-2) == spec.heads))

    def _is_row(self, parameter: Tensor | None) -> bool:
        return parameter is None or (parameter.dim() == self._parameter_dim and parameter.size(-1) > 1)

    def _on_dtensors(
        self,
        module: nn.Module,
        call: Callable[..., Tensor],
        tensors: tuple[Tensor, Tensor | None, Tensor | None, Tensor | None],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Tensor:
        def original() -> Tensor:
            with bare(module, self.spec.then):
                y: Tensor = self.original.forward(module, *args, **kwargs)
            return y

        if self.spec.axis != "last" or self.spec.joins > 1:
            return original()
        return distributed.run(functools.partial(self._prepared, call), *tensors, original)

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor | None, Tensor | None]:
        """Return the row and the gate among a call's arguments; no row where there are others, or none."""
        spec, left = self.spec, len(args) + len(kwargs)
        found: list[Any] = []
        for at, name in ((self._x_at, spec.input_name), (self._gate_at, spec.gate_name)):
            value = None
            if 0 <= at < len(args):
                value, left = args[at], left - 1
            elif name in kwargs:
                value, left = kwargs[name], left - 1
            found.append(value)
        x, gate = found
        if left or not isinstance(x, Tensor):
            return None, None
        if gate is None or (isinstance(gate, Tensor) and gate.dtype in _SERVED and gate.shape == x.shape):
            return x, gate
        return None, None

    def _prepared(
        self, call: Callable[..., Tensor], x: Tensor, gate: Tensor | None, gain: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        """Bring the row and the parameters into the shape that kernels take, and the result back."""
        spec, given = self.spec, x
        if gate is None and channels.takes(spec, x, gain, bias):
            gain = spec.scale(gain, torch.float32)
            return channels.norm_in_place(spec, x, gain, None if bias is None else spec.row(bias))
        x = spec.rows(x)
        scale = spec.scale(gain, torch.float32) if spec.gain_position == "before" else None
        if scale is not None:
            x, gain = (x.float() * scale).to(x.dtype), None
        elif gain is not None and spec.offset_dtype == "weight":
            gain = gain + 1.0
        gain, bias = self._row(gain, x), self._row(bias, x)
        y = call(x, gain, bias) if gate is None else call(x, spec.rows(gate), gain)
        if spec.axis == "last":
            return y
        y = y.movedim(-1, 1)
        return y.contiguous() if spec.dense and given.is_contiguous() else y

    def _row(self, parameter: Tensor | None, x: Tensor) -> Tensor | None:
        if parameter is None:
            return None
        row = self.spec.row(parameter)
        return row.expand(x.size(-1)) if row.numel() == 1 else row

    def _under_autocast(
        self, module: nn.Module, x: Tensor, gate: Tensor | None, gain: Tensor | None
    ) -> Callable[..., Tensor] | None:
        """Return the call that gives what the original gives under autocast; None where its own code must run.

        Some operations of torch widen their result under autocast, and some classes narrow what they are given. What a
        class does shows on a few rows, once for each combination of dtypes.
        """
        dtypes = x.dtype, None if gain is None else gain.dtype
        device = x.device.type
        key = (device, torch.get_autocast_dtype(device), *dtypes, None if gate is None else gate.dtype)
        if key in self._autocast:
            return self._autocast[key]
        if torch.compiler.is_compiling() or distributed.involved(x, gate, gain) or not x.numel():
            return None
        bias = None if self.spec.bias_name is None else getattr(module, self.spec.bias_name)
        x, gate = _like_few_rows(x, self.spec), None if gate is None else _like_few_rows(gate, self.spec)
        arguments = {self.spec.input_name: x} | ({} if gate is None else {str(self.spec.gate_name): gate})
        with torch.no_grad(), bare(module, self.spec.then):
            expected = self.original.forward(module, **arguments)
            where = self.spec.rounding(*dtypes)
            call = _call(self.spec, replace(where, out=expected.dtype), self.backend, gated=gate is not None)
            same = expected.dtype == torch.promote_types(expected.dtype, where.out)
            fits = same and _nearly_equal(self._prepared(call, x, gate, gain, bias), expected)
        self._autocast[key] = call if fits else None
        return self._autocast[key]


def _has_autocast(x: Tensor) -> bool:
    # The question that is asked first is the cheap one; dynamo knows only the other.
    if not (torch.compiler.is_compiling() or torch._C._is_any_autocast_enabled()):
        return False
    # torch knows no autocast of the meta device, and fails when asked for it.
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def _nearly_equal(a: Tensor, b: Tensor) -> bool:
    """Whether two results differ by the order of a sum and no more, let alone by a cast on the way."""
    if b.dtype in (torch.float16, torch.bfloat16):
        return bool((a == b).float().mean() > 0.98)
    return bool((a - b).norm() <= 1e-5 * b.norm())


def _like_few_rows(x: Tensor, spec: NormSpec) -> Tensor:
    """Draw a few rows of the rank, dtype and device of an input; its own could be all zeros, which tell nothing."""
    keep = (1,) if spec.axis == "channels" else range(x.dim() - (2 if max(spec.heads, spec.joins) > 1 else 1), x.dim())
    shape = [size if dim in keep else min(4, size) for dim, size in enumerate(x.shape)]
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), device="cpu").to(x.device, x.dtype)


def _call(
    spec: NormSpec, where: Rounding, backend: str, usual: torch.dtype | None = None, *, gated: bool
) -> Callable[..., Tensor]:
    """Return the operation with everything but its tensors filled in; a result of the ``usual`` dtype is not asked for.

    Where nothing is asked for, a LayerNorm on a CPU is torch's own, by a shorter way.
    """
    options: dict[str, Any] = {"eps": spec.eps, "offset": spec.offset, "round_dtype": where.middle}
    options |= {"out_dtype": None if where.out == usual else where.out, "backend": backend}
    if spec.offset_dtype == "weight" or spec.gain_position == "before":
        options["offset"] = 0.0
    if spec.groups > 1:
        options["groups"] = spec.groups
    if gated:
        options |= {"gate_position": spec.gate_position, "activation": spec.gate, "product_dtype": where.product}
        return functools.partial(_OPERATIONS["gated"], **options)
    if spec.eps_position != "inside":
        options["eps_position"] = spec.eps_position
    if spec.partial is not None:
        options["partial"] = spec.partial
    if spec.reduction != "mean":
        options["reduction"] = spec.reduction
    if where.scale is not None:
        options["scale_dtype"] = where.scale
    return functools.partial(_OPERATIONS[spec.kind], **options)


def _transformed() -> bool:
    """Whether ``torch.func`` or forward-mode differentiation is at work, which the fused operations know nothing of."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def resolve_backend(backend: str, device: torch.device | str) -> str:
    """Return the backend that would run for tensors of a device.

    Raises:
        BackendError: an unknown name, or one that cannot run here; with the reason and what to do.
    """
    try:
        return kernels.check_backend(backend, device)
    except (ValueError, RuntimeError) as error:
        raise BackendError(str(error)) from None
