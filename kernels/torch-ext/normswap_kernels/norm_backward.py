"""The gradients of every norm in Triton: which kernels are launched, and how.

A persistent program takes every ``n_parts``-th tile of rows, so that it can add up the gradients of gain and bias in
registers; a second kernel adds the programs' sums, always in the same order. Where a row or its sums do not fit in
registers, one kernel goes along the rows, and another along the columns for the parameters.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .formula import Formula
from .launch import (
    BACKWARD_LOOP,
    COLUMNS,
    INTERPRETER,
    PARTS,
    WIDE_PARTS,
    BackwardTile,
    Device,
    Launch,
    choose_backward_tile,
    device_of,
    find_alignment,
)
from .launching import run
from .norm_backward_columns import parameter_bwd_kernel, sum_parts_kernel
from .norm_backward_rows import norm_bwd_kernel, norm_bwd_loop_kernel
from .tiles import triton_dtype


class _Plan(NamedTuple):
    """How one call is launched, apart from the number of rows.

    Attributes:
        tile: what a program of the row kernel works on.
        row: the row kernel.
        row_options: its compile-time arguments.
        column_options: those of the parameter kernel.
        sum_options: those of the kernel that adds the parts.
    """

    tile: BackwardTile
    row: Any
    row_options: dict[str, Any]
    column_options: dict[str, Any]
    sum_options: dict[str, Any]


@functools.lru_cache(maxsize=4096)
def _plan(
    formula: Formula,
    groups: int,
    width: int,
    sizes: tuple[int, ...],
    gain_size: int,
    align: int,
    device: Device,
) -> _Plan:
    """Plan a call for streams (row, gradients, gate) of these bytes an element."""
    tile = choose_backward_tile(width, formula.gate_position != "none", gain_size > 2, max(sizes) > 2)
    loops = tile is BACKWARD_LOOP
    common = {
        "N": width,
        "GROUPS": groups,
        "GATE": formula.gate_position,
        "ACTIVATION": formula.activation,
        "SCALE": triton_dtype(formula.scale_dtype),
        "ALIGN": align,
        "EMULATE": device.interpreted,
        # The same on every compiler; the kernels wait for memory, so it costs nothing.
        "enable_fp_fusion": False,
    }
    row_options = common | {
        "COUNTED": formula.partial or width,
        "SUM": formula.reduction == "sum",
        "EPS_POSITION": formula.eps_position,
        "OFFSET": float(formula.offset),
        "BLOCK_N": tile.block_n,
        "num_warps": tile.num_warps(device.warp_size),
    }
    if not loops:
        keep = tile.keep_gain and gain_size > 0
        row_options["ROWS"] = tile.rows
        row_options["KEEP_GAIN"] = keep
        row_options["STAGES"] = tile.stages(sum(sizes) + (0 if keep else gain_size), device.shared_bytes)
    column_options = common | {
        "ROWS": COLUMNS.rows,
        "BLOCK_N": COLUMNS.block_n,
        "STAGES": COLUMNS.stages(sum(sizes), device.shared_bytes),
        "num_warps": COLUMNS.num_warps(device.warp_size),
    }
    sums = PARTS if tile.sums else WIDE_PARTS
    sum_options = {
        "N": groups * width,
        "ROWS": sums.rows,
        "BLOCK_N": sums.block_n,
        "STAGES": sums.stages(4, device.shared_bytes),
        "EMULATE": device.interpreted,
        "enable_fp_fusion": False,
        "num_warps": sums.num_warps(device.warp_size),
    }
    return _Plan(tile, norm_bwd_loop_kernel if loops else norm_bwd_kernel, row_options, column_options, sum_options)


def prepare(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    drow: Tensor,
    dgate: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    device: Device,
) -> list[Launch]:
    """Put the launches of `backward` together, in their order, for a device that need not be here."""
    n_rows, groups, width = row.shape
    streams = (row, grad, grad_sum, gate)
    strides, align = None, 16
    if not all(t is None or t.is_contiguous() for t in streams):
        of = [(0, 0, 0) if t is None else t.stride() for t in streams]
        strides = tuple(stride for three in of for stride in three)
        align = find_alignment(*(stride for three in of for stride in three[:2]))
    sizes = tuple(t.element_size() for t in streams if t is not None)
    gain_size = 0 if weight is None else weight.element_size()
    plan = _plan(formula, groups, width, sizes, gain_size, align, device)
    tile = plan.tile

    wanted = [out for out in (dweight, dbias) if out is not None]
    fused, left = wanted[: tile.sums], wanted[tile.sums :]
    slots = device.processors * tile.programs
    parts = n_rows if tile is BACKWARD_LOOP else min(-(-n_rows // tile.rows), max(1, slots // groups))
    sums = row.new_empty((len(fused), parts, groups, width), dtype=torch.float32)
    of_output = dict(zip(map(id, fused), sums, strict=True))
    arguments: tuple[Any, ...] = (row, grad, grad_sum, gate, weight, rstd, mean, drow, dgate)
    if tile is BACKWARD_LOOP:
        arguments += (strides, width, formula.eps)
    else:
        arguments += (of_output.get(id(dweight)), of_output.get(id(dbias)), strides, n_rows, parts, formula.eps)
    launches = [Launch(plan.row, (parts * groups,), arguments, plan.row_options)]
    if fused:
        launches.append(_sum_parts(sums, fused, plan))
    if left:
        blocks = -(-width // COLUMNS.block_n) * groups
        parts = min(-(-n_rows // COLUMNS.rows), max(1, device.processors * COLUMNS.programs // blocks))
        sums = row.new_empty((len(left), parts, groups, width), dtype=torch.float32)
        of_output = dict(zip(map(id, left), sums, strict=True))
        partial = (of_output.get(id(dweight)), of_output.get(id(dbias)))
        arguments = (row, grad, gate, rstd, mean, *partial, strides, n_rows, parts)
        launches.append(Launch(parameter_bwd_kernel, (parts * blocks,), arguments, plan.column_options))
        launches.append(_sum_parts(sums, left, plan))
    return launches


def _sum_parts(sums: Tensor, outputs: list[Tensor], plan: _Plan) -> Launch:
    blocks = -(-plan.sum_options["N"] // plan.sum_options["BLOCK_N"])
    arguments = (sums, outputs[0], outputs[1] if len(outputs) > 1 else None, sums.size(1))
    return Launch(sum_parts_kernel, (blocks * len(outputs),), arguments, plan.sum_options)


def backward(
    formula: Formula,
    grad: Tensor,
    grad_sum: Tensor | None,
    row: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    drow: Tensor,
    dgate: Tensor | None,
    dweight: Tensor | None,
    dbias: Tensor | None,
    *,
    interpret: bool = False,
) -> None:
    """Write the gradients of a norm, as `gradients.closed_form` has them; bit-identical from run to run.

    Args:
        formula: what the forward computed.
        grad: ``(R, G, D)`` of any strides, float32, float16 or bfloat16: gradient of the result.
        grad_sum: likewise, gradient of the sum with the residual; or None.
        row: likewise, ``x`` or the sum with the residual as the forward gave it.
        gate: likewise, or None.
        weight: ``(G, D)``, contiguous, of any of the three dtypes; or None.
        rstd: ``(R, G)``, contiguous, float32: the scale of each row from the forward, not rounded.
        mean: likewise, the mean of each row (``"layer"``); or None.
        drow: ``(R, G, D)``, contiguous, in the dtype of ``row``; written: gradient of ``row``, ``grad_sum`` included.
        dgate: ``(R, G, D)``, contiguous, in the dtype of ``gate``; written. None without ``gate``.
        dweight: ``(G, D)``, contiguous, of any of the three dtypes; written. None where it is not wanted.
        dbias: likewise.
        interpret: whether Triton interprets in this process.
    """
    if row.numel():
        device = INTERPRETER if interpret else device_of(row.device)
        launches = prepare(formula, grad, grad_sum, row, gate, weight, rstd, mean, drow, dgate, dweight, dbias, device)
        for launch in launches:
            run(launch, row, interpret)
    else:
        for out in (dweight, dbias):
            if out is not None:
                out.zero_()
