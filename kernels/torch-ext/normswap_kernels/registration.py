"""The operations as torch sees them: autograd, ``torch.library`` with fake implementations, and no vmap."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import Parameter

from . import engine
from .formula import Formula
from .gradients import Gradients, closed_form

NORMS = ("rms_norm", "layer_norm", "add_rms_norm", "add_layer_norm", "gated_rms_norm")

_FORMULA = (
    "str kind, float eps, float offset, ScalarType? round_dtype, ScalarType? product_dtype, ScalarType out_dtype, "
    "int groups, int partial, str eps_position, str reduction, str gate_position, str activation, "
    "ScalarType? sum_dtype, ScalarType? scale_dtype"
)
_FORWARD = (
    f"(Tensor x, Tensor? residual, Tensor? gate, Tensor? weight, Tensor? bias, {_FORMULA}, bool save, str backend) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_BACKWARD = (
    "(Tensor grad, Tensor? grad_sum, Tensor row, Tensor? gate, Tensor? weight, ScalarType? bias_dtype, Tensor scale, "
    f"Tensor mean, {_FORMULA}, bool weight_grad, str backend) -> (Tensor, Tensor, Tensor, Tensor)"
)
_QUANTIZE = (
    f"(Tensor x, Tensor? weight, Tensor? bias, {_FORMULA}, ScalarType dtype, str backend) "
    "-> (Tensor values, Tensor scales)"
)

_N_TENSORS = 5
_N_FORMULA = len(Formula._fields)


def outside_of_eager(
    _compiling: Callable[[], bool] = torch.compiler.is_compiling,
    _transforming: Callable[[], bool] = torch._C._are_functorch_transforms_active,
    _n_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack,
) -> bool:
    """Whether something stands between Python and the tensors that must see one operation.

    The compiler, the transforms of ``torch.func``, which hide behind plain tensors, dispatch modes (fake tensors,
    counters), or forward-mode differentiation.
    """
    return bool(_compiling() or _transforming() or _n_modes() or forward_ad._current_level >= 0)


def plain(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether the engine may be called past torch's dispatcher, which costs more than a short row."""
    # A trace of torch.jit does not see what is written past torch.
    if outside_of_eager() or torch._C._get_tracing_state() is not None:
        return False
    for t in tensors:
        if t is not None and ((type(t) is not Tensor and type(t) is not Parameter) or t.is_meta or t.is_neg()):
            return False
    return True


def recorded(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for t in tensors:
            if t is not None and t.requires_grad:
                return True
    return False


class _Norm(torch.autograd.Function):
    """The eager training path: a norm between plain tensors, with fewer layers than a registered operation has."""

    @staticmethod
    def forward(
        ctx: Any,
        name: str,
        formula: Formula,
        backend: str,
        x: Tensor,
        residual: Tensor | None,
        gate: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
    ) -> Any:
        y, summed, scale, mean = engine.forward(formula, x, residual, gate, weight, bias, True, backend)
        ctx.save_for_backward(x if summed is None else summed, gate, weight, scale, mean)
        ctx.call = name, formula, backend
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
        ctx.set_materialize_grads(False)
        return y if summed is None else (y, summed)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        row, gate, weight, scale, mean = ctx.saved_tensors
        name, formula, backend = ctx.call
        dx, dresidual, dgate, dweight, dbias = _differentiate(
            name, formula, backend, grads, row, gate, weight, scale, mean, ctx.dtypes, ctx.needs_input_grad[3:]
        )
        return None, None, None, dx, dresidual, dgate, dweight, dbias


def _differentiate(
    name: str,
    formula: Formula,
    backend: str,
    grads: tuple[Tensor | None, ...],
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    scale: Tensor | None,
    mean: Tensor | None,
    dtypes: tuple[torch.dtype, torch.dtype | None, torch.dtype | None],
    needed: tuple[bool, ...],
) -> tuple[Tensor | None, ...]:
    """Return the gradients of x, residual, gate, weight and bias; None where not needed."""
    x_dtype, residual_dtype, bias_dtype = dtypes
    grad, grad_sum = grads[0], grads[1] if residual_dtype is not None else None
    _refuse_transforms(f"the backward of {name}", (grad, grad_sum, row, gate, weight))
    if grad is None:
        # Only the sum was used, or nothing was.
        if grad_sum is None:
            return (None,) * _N_TENSORS
        found = Gradients(grad_sum, None, None, None)
    else:
        wanted = bias_dtype if needed[4] else None
        arguments = (grad, grad_sum, row, gate, weight, wanted)
        if scale is None or (scale.numel() == 0 and row.numel()):
            found = closed_form(formula, *arguments)
        elif torch.is_grad_enabled() or not plain((grad, grad_sum, row, gate, weight)):
            drow, dgate, dweight, dbias = BACKWARD[name](
                *arguments, scale, scale.new_empty(0) if mean is None else mean, *_flat(formula), needed[3], backend
            )
            found = Gradients(drow, dgate, dweight, dbias)
        else:
            found = engine.backward(formula, *arguments, scale, mean, needed[3], backend)
    dx = found.row.to(x_dtype) if needed[0] else None
    dresidual = found.row.to(residual_dtype) if needed[1] and residual_dtype is not None else None
    return (
        dx,
        dresidual,
        found.gate if needed[2] else None,
        found.weight if needed[3] else None,
        found.bias if needed[4] else None,
    )


def run(
    name: str,
    formula: Formula,
    x: Tensor,
    residual: Tensor | None,
    gate: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    backend: str,
) -> tuple[Tensor, Tensor | None]:
    """Run one of `NORMS` by the shortest way that torch allows; returns the result and the sum or None."""
    tensors = x, residual, gate, weight, bias
    recording = recorded(tensors)
    if not plain(tensors):
        _refuse_transforms(name, tensors)
        y, summed, _, _ = FORWARD[name](*tensors, *_flat(formula), recording, backend)
        return y, None if residual is None else summed
    if recording:
        found = _Norm.apply(name, formula, backend, *tensors)
        return (found, None) if residual is None else found
    y, summed, _, _ = engine.forward(formula, *tensors, False, backend)
    return y, summed


def run_quantize(
    formula: Formula, x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype, backend: str
) -> tuple[Tensor, Tensor]:
    """Run the quantizing norm, likewise; returns values and scales."""
    if recorded((x, weight, bias)):
        x, weight, bias = x.detach(), *(None if t is None else t.detach() for t in (weight, bias))
    if plain((x, weight, bias)):
        return engine.quantize(formula, x, weight, bias, dtype, backend)
    _refuse_transforms("rms_norm_quant", (x, weight, bias))
    values, scales = QUANTIZE(x, weight, bias, *_flat(formula), dtype, backend)
    return values, scales


def _flat(formula: Formula) -> tuple[Any, ...]:
    """Give the formula as arguments of an operation, whose schema tells a float from an int."""
    return formula._replace(eps=float(formula.eps), offset=float(formula.offset))


def _namespaced(name: str) -> str:
    """Give the operation's full name; builds for the Hub bring a namespace of their own in a module ``_ops``."""
    if __package__ and importlib.util.find_spec("._ops", __package__):
        built = importlib.import_module("._ops", __package__)
        return str(built.add_op_namespace_prefix(name))
    return f"normswap::{name}"


def _run_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (x, residual, gate, weight, bias), formula, (save, backend) = _split(arguments, _N_TENSORS)
    return _filled(x, *engine.forward(formula, x, residual, gate, weight, bias, save, backend))


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (x, residual, _, weight, _), formula, (save, _) = _split(arguments, _N_TENSORS)
    return _filled(x, *engine.allocate(formula, x, residual, weight, save))


def _run_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (grad, grad_sum, row, gate, weight, bias_dtype, scale, mean), formula, (weight_grad, backend) = _split(arguments, 8)
    mean = mean if formula.kind == "layer" else None
    found = engine.backward(formula, grad, grad_sum, row, gate, weight, bias_dtype, scale, mean, weight_grad, backend)
    return _filled(row, *found)


def _fake_backward(*arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (_, _, row, gate, weight, bias_dtype, _, _), formula, (weight_grad, _) = _split(arguments, 8)
    return _filled(row, *engine.allocate_gradients(formula, row, gate, weight, bias_dtype, weight_grad))


def _run_quantize(*arguments: Any) -> tuple[Tensor, Tensor]:
    (x, weight, bias), formula, (dtype, backend) = _split(arguments, 3)
    return engine.quantize(formula, x, weight, bias, dtype, backend)


def _fake_quantize(*arguments: Any) -> tuple[Tensor, Tensor]:
    return engine.allocate_quantized(arguments[0], arguments[-2])


def _split(arguments: tuple[Any, ...], n_tensors: int) -> tuple[Any, Formula, Any]:
    end = n_tensors + _N_FORMULA
    return arguments[:n_tensors], Formula(*arguments[n_tensors:end]), arguments[end:]


def _filled(like: Tensor, *results: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Put an empty tensor for each result that there is none of: an operation cannot return None."""
    first, second, third, fourth = (like.new_empty(0) if t is None else t for t in results)
    return first, second, third, fourth


def _forward_context(name: str) -> Callable[..., None]:
    def setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        (x, residual, gate, weight, bias), ctx.formula, (_, ctx.backend) = _split(inputs, _N_TENSORS)
        _, summed, scale, mean = output
        ctx.save_for_backward(x if residual is None else summed, gate, weight, scale, mean)
        ctx.dtypes = x.dtype, None if residual is None else residual.dtype, None if bias is None else bias.dtype
        ctx.norm = name
        ctx.set_materialize_grads(False)

    return setup


def _forward_gradient(ctx: Any, grad: Tensor | None, grad_sum: Tensor | None, *_: Any) -> tuple[Any, ...]:
    row, gate, weight, scale, mean = ctx.saved_tensors
    found = _differentiate(
        ctx.norm,
        ctx.formula,
        ctx.backend,
        (grad, grad_sum),
        row,
        gate,
        weight,
        scale,
        mean if ctx.formula.kind == "layer" else None,
        ctx.dtypes,
        ctx.needs_input_grad,
    )
    return (*found, *(None,) * (_N_FORMULA + 2))


def _backward_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    (grad, grad_sum, row, gate, weight, ctx.bias_dtype, _, _), ctx.formula, _ = _split(inputs, 8)
    ctx.save_for_backward(grad, grad_sum, row, gate, weight)
    ctx.set_materialize_grads(False)


def _backward_gradient(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
    """Differentiate the gradients, by torch's own differentiation of their closed formula."""
    with torch.enable_grad():
        leaves: list[Any] = [None if t is None else t.detach().requires_grad_() for t in ctx.saved_tensors]
        grad, grad_sum, row, gate, weight = leaves
        outputs = closed_form(ctx.formula, grad, grad_sum, row, gate, weight, ctx.bias_dtype)
        pairs = [(o, g) for o, g in zip(outputs, grads, strict=True) if o is not None and g is not None]
        inputs = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad([o for o, _ in pairs], inputs, [g for _, g in pairs], allow_unused=True))
    return (*(None if leaf is None else next(found) for leaf in leaves), *(None,) * (3 + _N_FORMULA + 2))


def _refuse_transforms(name: str, tensors: tuple[Tensor | None, ...]) -> None:
    """Refuse ``torch.func`` and forward-mode differentiation, under which the operations would give wrong tangents.

    Raises:
        NotImplementedError: a transform is at work.
    """
    if torch.compiler.is_compiling():
        return
    # What torch.autograd.grad makes of is_grads_batched, and jacobian of vectorize.
    batched = any(t is not None and torch._C._functorch.is_legacy_batchedtensor(t) for t in tensors)
    if batched or torch._C._are_functorch_transforms_active():
        raise NotImplementedError(
            f"expected {name} outside the transforms of torch.func (vmap, grad, jvp ...), got one inside: instead of "
            "vmap call it on the whole batch, since it normalises the rows of any leading dimensions at once; instead "
            "of grad call backward"
        )
    if forward_ad._current_level >= 0 and any(
        t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors
    ):
        raise NotImplementedError(
            f"expected {name} outside forward-mode differentiation, got a tensor with a tangent: call backward instead"
        )


def _register(name: str, schema: str, run: Any, fake: Any) -> Any:
    op = torch.library.custom_op(_namespaced(name), run, mutates_args=(), schema=schema)
    op.register_fake(fake)
    return op


FORWARD = {name: _register(name, _FORWARD, _run_forward, _fake_forward) for name in NORMS}
BACKWARD = {name: _register(f"{name}_backward", _BACKWARD, _run_backward, _fake_backward) for name in NORMS}
QUANTIZE = _register("rms_norm_quant", _QUANTIZE, _run_quantize, _fake_quantize)
for _name in NORMS:
    FORWARD[_name].register_autograd(_forward_gradient, setup_context=_forward_context(_name))
    BACKWARD[_name].register_autograd(_backward_gradient, setup_context=_backward_context)
