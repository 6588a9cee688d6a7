"""Fused norms on DTensors: each rank normalises the whole rows that it holds, or torch redistributes them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

__all__ = ["distribute", "held", "involved", "run"]

_Local = Callable[[Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]


def involved(*tensors: Tensor | None) -> bool:
    """Return whether any of the tensors is a DTensor; for plain tensors this costs a look at their types."""
    for tensor in tensors:
        if tensor is not None and type(tensor) is not Tensor and type(tensor) is not Parameter and _is_dtensor(tensor):
            return True
    return False


def _is_dtensor(tensor: object) -> bool:
    # Where there is a DTensor, something has imported this already; a third of torch's own import is saved elsewhere.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def held(tensor: Tensor) -> Tensor:
    """Return a plain tensor of the same shape, with values of this one that this rank holds; nothing is sent.

    A plain tensor and a replica are returned as they are; the part of one that is divided among ranks is repeated.
    """
    if not involved(tensor):
        return tensor
    given: Any = tensor
    here: Tensor = given.to_local()
    if here.shape == tensor.shape:
        return here
    values = here.flatten() if here.numel() else here.new_ones(1)
    return values.repeat(-(-tensor.numel() // values.numel()))[: tensor.numel()].reshape(tensor.shape)


def distribute(values: Tensor, like: Tensor) -> Tensor:
    """Return a DTensor of values that every rank has whole, placed as another DTensor is; nothing is sent."""
    from torch.distributed.tensor import distribute_tensor

    given: Any = like
    return distribute_tensor(values, given.device_mesh, given.placements, src_data_rank=None)


def run(
    local: _Local,
    x: Tensor,
    gate: Tensor | None,
    gain: Tensor | None,
    bias: Tensor | None,
    original: Callable[[], Tensor],
) -> Tensor:
    """Run a row-wise norm whose input or parameters are DTensors (for which `involved` is true).

    Where every rank holds whole rows (``x`` is replicated, or sharded along any dimension but the last, as behind
    ``SequenceParallel``) the fused norm runs on what the rank holds, and the result is a DTensor placed as ``x`` is.
    The gradient of a replicated gain or bias is summed over the ranks among which the rows of ``x`` are divided.
    Gains of heads, ``(H, D)``, may be sharded by heads where ``x`` is.

    What goes to the original's forward, where torch redistributes or says what it cannot mix: rows that are split
    between ranks, inputs that are pending sums, sharded gains, DTensors beside plain tensors, several meshes.

    Args:
        local: the fused norm of plain tensors, called as ``local(x, gate, gain, bias)``; it returns the shape of ``x``.
        x: ``(..., D)`` or ``(..., H, D)``.
        gate: of the shape of ``x``, or None.
        gain: ``(D,)`` or ``(H, D)``, or None.
        bias: like the gain, or None.
        original: the module's own forward on the same arguments.

    Returns:
        What ``original()`` would return, of the shape of ``x``.
    """
    if not _is_dtensor(x):
        return original()
    given: Any = x
    gradients = [_gradient_placements(given, tensor) for tensor in (gain, bias)]
    if not _has_whole_rows(given) or None in gradients or not _lies_beside(given, gate):
        return original()
    here = given.to_local()
    result = local(
        here,
        None if gate is None else gate.to_local(),  # type: ignore[attr-defined]
        *(_local_parameter(*pair) for pair in zip((gain, bias), gradients, strict=True)),
    )
    return _like(given, here, result)


def _has_whole_rows(x: Any) -> bool:
    return all(
        placement.is_replicate() or (_shard_dim(placement) is not None and _shard_dim(placement) != x.ndim - 1)
        for placement in x.placements
    )


def _shard_dim(placement: Any) -> int | None:
    """Return the dimension that a placement divides; None for a replica or a pending sum."""
    return None if placement.is_replicate() or placement.is_partial() else placement.dim


def _lies_beside(x: Any, gate: Any) -> bool:
    if gate is None:
        return True
    return (
        _is_dtensor(gate)
        and gate.shape == x.shape
        and gate.device_mesh == x.device_mesh
        and gate.placements == x.placements
    )


def _gradient_placements(x: Any, parameter: Any) -> tuple[Any, ...] | None:
    """Say how the gradient of a gain or bias lies after the local backward; None where its rows are not at hand."""
    if parameter is None:
        return ()
    if not _is_dtensor(parameter) or parameter.device_mesh != x.device_mesh:
        return None
    from torch.distributed.tensor import Partial, Shard

    placements: list[Any] = []
    for of_x, own in zip(x.placements, parameter.placements, strict=True):
        dim = _shard_dim(of_x)
        inner = -1 if dim is None else dim - (x.ndim - parameter.ndim)
        if inner < 0 and own.is_replicate():
            placements.append(own if dim is None else Partial())
        elif inner >= 0 and type(of_x) is Shard and own == Shard(inner):
            placements.append(own)
        else:
            return None
    return tuple(placements)


def _local_parameter(parameter: Any, gradient: Any) -> Tensor | None:
    if parameter is None:
        return None
    return parameter.to_local(grad_placements=gradient)


def _like(x: Any, here: Tensor, result: Tensor) -> Tensor:
    """Make a DTensor of this rank's part of the result, placed as ``x`` is; shards need not be of one size."""
    from torch.distributed.tensor import DTensor

    stride = x.stride()
    if result.stride() != here.stride():
        result = result.contiguous()
        stride = _contiguous_stride(x.shape)
    return DTensor.from_local(result, x.device_mesh, x.placements, run_check=False, shape=x.shape, stride=stride)


def _contiguous_stride(shape: Any) -> tuple[int, ...]:
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))
