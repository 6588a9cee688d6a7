"""Find where a norm rounds in half precision, by its results."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import torch

from normswap.proof import disagreement, gates, row_count, rows, try_run
from normswap.replica import Replica
from normswap.spec import NormSpec, dtype_name

__all__ = ["DTYPE_PAIRS", "find_rounding"]

# The order is that of trust: the pairs that models are served in first.
DTYPE_PAIRS = (
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


class _Run(NamedTuple):
    pair: tuple[torch.dtype, torch.dtype | None]
    x: torch.Tensor
    gate: torch.Tensor | None
    tensors: dict[str, torch.Tensor]
    y: torch.Tensor


def find_rounding(replica: Replica, spec: NormSpec) -> NormSpec:
    """Choose the first of the known roundings that reproduces every pair of dtypes that the original runs in.

    Where none reproduces all, the one that reproduces most; the pairs that it does not go into ``own_code``.
    """
    runs = list(_runs(replica, spec))
    least: tuple[int, NormSpec] | None = None
    for candidate in _candidates(spec):
        missed = dict.fromkeys(
            run.pair for run in runs if disagreement(candidate, run.x, run.gate, run.tensors, run.y) is not None
        )
        if least is None or len(missed) < least[0]:
            least = len(missed), replace(candidate, own_code=_own_code(list(missed), [run.pair for run in runs]))
        if not missed:
            break
    assert least is not None
    return least[1]


def _runs(replica: Replica, spec: NormSpec) -> Iterator[_Run]:
    for x_dtype, gain_dtype in DTYPE_PAIRS:
        if not replica.tensors and x_dtype != gain_dtype:
            continue
        replica.randomise(gain_dtype)
        x = (rows(replica, row_count(replica)) + 0.25).to(x_dtype)
        for gate in gates(spec, x):
            if (y := try_run(replica, x, gate)) is not None:
                yield _Run((x_dtype, gain_dtype if spec.gain_name else None), x, gate, dict(replica.tensors), y)


def _candidates(spec: NormSpec) -> Iterator[NormSpec]:
    sums: list[Any] = ["float32", "weight"] if spec.gain == "1+w" else ["float32"]
    products: list[Any] = ["none", "promote", "input"] if spec.gate_position == "after" else ["none"]
    for (cast, out), offset_dtype, product in itertools.product(_ROUNDINGS, sums, products):
        yield replace(spec, cast=cast, out=out, offset_dtype=offset_dtype, product_cast=product)
    if spec.kind == "rms" and spec.eps_position == "inside" and spec.gate is None:
        for (cast, out), offset_dtype in itertools.product(_ROUNDINGS, sums):
            yield replace(spec, cast=cast, out=out, offset_dtype=offset_dtype, scale_cast="input")


def _own_code(missed: list[Any], ran: list[Any]) -> tuple[str, ...]:
    """Name the dtypes, or else the pairs, that are not reproduced, and half-precision dtypes in which nothing ran."""
    names = [dtype_name(dtype) for dtype in (torch.bfloat16, torch.float16) if dtype not in {pair[0] for pair in ran}]
    for x_dtype in dict.fromkeys(pair[0] for pair in missed):
        name = dtype_name(x_dtype)
        pairs = [pair for pair in missed if pair[0] == x_dtype]
        if x_dtype != torch.float32 and set(pairs) == {pair for pair in ran if pair[0] == x_dtype}:
            names.append(name)
        else:
            names += [f"{name}+{dtype_name(gain)}" for _, gain in pairs]
    return tuple(names)
