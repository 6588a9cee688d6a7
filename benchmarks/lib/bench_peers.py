"""Whom the operations are measured beside: each peer by its public interface, on the same inputs.

A peer is made for a case or refuses with a reason; what is not installed refuses too.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from bench_cases import EPS, Case, Inputs
from normswap_kernels.reference import quantized, rounded
from torch import Tensor, nn

Contender = Callable[[Inputs], Any]


class NoPeer(Exception):
    """There is nothing to measure here, and why."""


# By name of the operation: module and class in transformers.
_CLASSES: dict[str, tuple[str, str]] = {
    "rms_norm": ("llama", "LlamaRMSNorm"),
    "add_rms_norm": ("llama", "LlamaRMSNorm"),
    "rms_norm gain first": ("olmo2", "Olmo2RMSNorm"),
    "rms_norm 1+w": ("gemma3", "Gemma3RMSNorm"),
    "gated after": ("qwen3_next", "Qwen3NextRMSNormGated"),
    "gated before": ("mamba2", "MambaRMSNormGated"),
    "gated grouped": ("zamba2", "Zamba2RMSNormGated"),
}


def hugging_face(case: Case, inputs: Inputs) -> Contender:
    """Return the module of transformers (``nn.LayerNorm`` for LayerNorm), with its residual sum where there is one."""
    op = case.operation
    if op.kind == "layer":
        norm: nn.Module = nn.LayerNorm(case.width, eps=EPS)
    elif op.name in _CLASSES:
        module, name = _CLASSES[op.name]
        try:
            cls = getattr(importlib.import_module(f"transformers.models.{module}.modeling_{module}"), name)
        except (ImportError, AttributeError) as error:
            raise NoPeer(f"this transformers has no {name}") from error
        # Those with a gate before them take the width of a group.
        norm = cls(case.width, *([case.width // op.groups] if op.gate == "before" else []), eps=EPS)
    else:
        raise NoPeer("no class of transformers computes this")
    norm = norm.to(inputs.x.device, case.dtype)
    for name in ("weight", "bias"):
        if getattr(norm, name, None) is not None:
            # The same tensor for all contenders, so that gradients are asked of the same.
            del norm._parameters[name]
            setattr(norm, name, getattr(inputs, name))

    def call(i: Inputs) -> Any:
        if i.gate is not None:
            return norm(i.x, i.gate)
        if i.residual is None:
            return norm(i.x)
        summed = i.residual + i.x
        return norm(summed), summed

    return call


def formula(case: Case, inputs: Inputs) -> Contender:
    """Return the formula in plain torch, operation by operation, where transformers has no class for it."""
    if case.operation.kind == "layer" or case.operation.name in _CLASSES:
        raise NoPeer("transformers has a class for this")
    return _formula(case)


def _formula(case: Case) -> Contender:
    def call(i: Inputs) -> Any:
        y, summed = rounded(case.formula, i.x, i.weight, i.bias, residual=i.residual, gate=i.gate)
        if case.operation.quantized:
            return quantized(y, case.operation.quantized)
        return y if i.residual is None else (y, summed)

    return call


def functional(case: Case, inputs: Inputs) -> Contender:
    """Return torch's own fused function, where there is one."""
    op, shape = case.operation, (case.width,)
    if op.residual or op.gate != "none" or op.groups > 1 or op.per_head or op.partial or op.quantized or op.offset:
        raise NoPeer("torch has no function for this")
    if op.l2:
        return lambda i: F.normalize(i.x, dim=-1, eps=EPS)
    if op.kind == "layer":
        return lambda i: F.layer_norm(i.x, shape, i.weight, i.bias, EPS)
    return lambda i: F.rms_norm(i.x, shape, i.weight, EPS)


def compiled(case: Case, inputs: Inputs) -> Contender:
    """Return the module of transformers, or else the formula, compiled for this shape."""
    # A graph is run backward more than once here.
    importlib.import_module("torch._functorch.config").donated_buffer = False  # type: ignore[attr-defined]
    torch._dynamo.reset()
    try:
        eager = hugging_face(case, inputs)
    except NoPeer:
        eager = _formula(case)

    def flat(*tensors: Tensor | None) -> Any:
        return eager(Inputs(*tensors))  # type: ignore[arg-type]

    run = torch.compile(flat, dynamic=False, fullgraph=True)
    return lambda i: run(i.x, i.residual, i.gate, i.weight, i.bias)


def liger(case: Case, inputs: Inputs) -> Contender:
    """Return Liger-Kernel's function."""
    op = case.operation
    functions = _import("liger_kernel.transformers.functional", "liger-kernel")
    mode = "llama" if op.round_first else "gemma"
    if op.function == "rms_norm" and op.gain and op.groups == 1 and not (op.per_head or op.partial):
        return lambda i: functions.liger_rms_norm(i.x, i.weight, EPS, op.offset, mode, False)
    if op.function == "layer_norm":
        return lambda i: functions.liger_layer_norm(i.x, i.weight, i.bias, EPS)
    if op.function == "add_rms_norm":
        return lambda i: functions.liger_fused_add_rms_norm(i.x, i.residual, i.weight, EPS, op.offset, mode, False)
    raise NoPeer("Liger-Kernel has no function for this")


def quack(case: Case, inputs: Inputs) -> Contender:
    """Return quack's function."""
    op = case.operation
    package = _import("quack", "quack-kernels")
    if op.function == "rms_norm" and op.groups == 1 and not (op.partial or op.l2):
        return lambda i: package.rmsnorm(i.x, i.weight, eps=EPS, weight_offset=op.offset)
    if op.function == "add_rms_norm":
        return lambda i: package.rmsnorm(i.x, i.weight, residual=i.residual, eps=EPS, prenorm=True)
    if op.function == "layer_norm" and case.direction == "forward":
        assert inputs.weight is not None and inputs.bias is not None
        layernorm = partial(
            importlib.import_module("quack.rmsnorm").layernorm_fwd,
            weight=inputs.weight.float(),
            bias=inputs.bias.float(),
            eps=EPS,
        )
        return lambda i: layernorm(i.x)
    raise NoPeer("quack has no function for this")


PEERS: dict[str, Callable[[Case, Inputs], Contender]] = {
    "transformers": hugging_face,
    "formula": formula,
    "functional": functional,
    "compile": compiled,
    "liger": liger,
    "quack": quack,
}


def _import(module: str, distribution: str) -> Any:
    if importlib.util.find_spec(module.partition(".")[0]) is None:
        raise NoPeer(f"{distribution} is not installed")
    return importlib.import_module(module)
