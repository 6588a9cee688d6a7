"""Run the backward kernels in Triton's interpreter: ``python backward_process.py RESULTS [slow]``.

Triton decides at its import whether it interprets, so the process that compiles kernels in the tests cannot. The
results go to a file by the name of the case; a case that raised leaves its traceback there instead. All memory that
a kernel writes is full of NaN before, the partial sums between two kernels too.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import traceback
from typing import Any

import normswap_kernels
import torch
from backward_cases import CASES, SLOW_CASES, BackwardCase
from norm_cases import BF16, FP32
from normswap_kernels.formula import Formula
from normswap_kernels.gradients import Gradients
from normswap_kernels.rows import find_rows
from torch import Tensor

INVARIANT_WIDTHS = (3, 128, 1000, 20000)


def poisoned(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype)


def run(case: BackwardCase) -> Gradients:
    """Run the forward kernel for the statistics, and the backward kernels."""
    formula, inputs = case.formula(), case.inputs()
    rows = find_rows(inputs.x, formula.groups, case.structure == "heads")
    shape = rows.shape
    x, residual, gate = (None if t is None else rows.view(t) for t in inputs[:3])
    weight, bias = (None if t is None else t.view(shape[1:]) for t in inputs[3:])
    scale = poisoned(shape[:2], FP32)
    mean = poisoned(shape[:2], FP32) if case.kind == "layer" else None
    summed = None if formula.sum_dtype is None else poisoned(shape, formula.sum_dtype)
    y = poisoned(shape, formula.out_dtype)
    _module("norm_forward").forward(formula, x, residual, gate, weight, bias, y, summed, scale, mean, interpret=True)
    grad, grad_sum = (None if t is None else rows.view(t) for t in case.gradients())
    row = x if summed is None else summed
    assert row is not None
    dweight, dbias = (None if t is None or case.frozen else poisoned(t.shape, t.dtype) for t in (weight, bias))
    found = Gradients(poisoned(shape, row.dtype), None if gate is None else poisoned(shape, gate.dtype), dweight, dbias)
    kept = [None if t is None else t.clone() for t in (grad, grad_sum, row, gate, weight, scale, mean)]
    given = (grad, grad_sum, row, gate, weight, scale, mean)
    _module("norm_backward").backward(formula, *given, *found, interpret=True)
    for before, after in zip(kept, given, strict=True):
        # As bytes: what lies between the rows may be NaN, and the rows themselves are not.
        assert before is None or torch.equal(before, after), "an input was written over"
    parameter = inputs.x.shape[-2:] if case.structure == "heads" else inputs.x.shape[-1:]
    return Gradients(
        found.row.view(inputs.x.shape),
        None if found.gate is None else found.gate.view(inputs.x.shape),
        None if dweight is None else dweight.view(parameter),
        None if dbias is None else dbias.view(parameter),
    )


def differentiate(
    formula: Formula, x: Tensor, grad: Tensor, gate: Tensor | None, weight: Tensor, parameters: bool = True
) -> Gradients:
    """Differentiate the norm of ``(R, D)`` rows, and its parameters or not."""
    shape = (x.size(0), 1, x.size(1))
    statistics = [poisoned(shape[:2], FP32) for _ in range(2 if formula.kind == "layer" else 1)]
    scale, mean = statistics[0], statistics[1] if formula.kind == "layer" else None
    viewed = [None if t is None else t.view(shape) for t in (x, gate, grad)]
    line = weight.view(shape[1:])
    y = poisoned(shape, formula.out_dtype)
    _module("norm_forward").forward(
        formula, viewed[0], None, viewed[1], line, None, y, None, scale, mean, interpret=True
    )
    found = Gradients(
        poisoned(shape, x.dtype),
        None if gate is None else poisoned(shape, gate.dtype),
        poisoned(shape[1:], weight.dtype) if parameters else None,
        poisoned(shape[1:], FP32) if parameters else None,
    )
    _module("norm_backward").backward(
        formula, viewed[2], None, viewed[0], viewed[1], line, scale, mean, *found, interpret=True
    )
    return found


def invariance() -> dict[str, dict[str, bool]]:
    """Say for each norm whether it comes out the same again, and rows alone, and rows beside NaN and infinity."""
    found = {}
    for kind, width, gate_position in itertools.product(("rms", "layer"), INVARIANT_WIDTHS, ("none", "before")):
        formula = Formula(kind, 1e-6, 0.0, None, None, BF16, gate_position=gate_position)  # type: ignore[arg-type]
        generator = torch.Generator().manual_seed(width)
        # Of the widest, each row takes the interpreter half a second.
        count = 12 if width < 20000 else 5
        x, grad, drawn = (torch.randn(count, width, generator=generator).to(BF16) for _ in range(3))
        gate = None if gate_position == "none" else drawn
        weight = torch.randn(width, generator=generator)
        batch = differentiate(formula, x, grad, gate, weight)
        again = differentiate(formula, x, grad, gate, weight)
        alone = [
            differentiate(formula, x[i:][:1], grad[i:][:1], None if gate is None else gate[i:][:1], weight, False).row
            for i in (0, count - 1)
        ]
        x[1], grad[3] = torch.nan, torch.inf
        beside = differentiate(formula, x, grad, gate, weight)
        keep = [i for i in range(count) if i not in (1, 3)]
        found[f"{kind}-{width}-{gate_position}"] = {
            "again": all(a is None or torch.equal(a, b) for a, b in zip(batch, again, strict=True)),
            "alone": torch.equal(batch.row[[0, count - 1]], torch.cat(alone)),
            "beside": torch.equal(batch.row[keep], beside.row[keep]),
            "spread": bool(beside.row[1].isnan().all() and beside.row[3].isnan().any()),
        }
    return found


def without_rows() -> Gradients:
    """Differentiate no rows at all."""
    empty = torch.empty(0, 8)
    return differentiate(Formula("layer", 1e-6, 0.0, None, None, FP32), empty, empty, None, torch.ones(8))


def _module(name: str) -> Any:
    return importlib.import_module(f"normswap_kernels.{name}")


def main() -> None:
    # The first use of the backend is what switches the interpreter on.
    assert normswap_kernels.check_backend("interpret", "cpu") == "interpret"
    slow = "slow" in sys.argv
    work: list[tuple[str, Any, tuple[Any, ...]]] = [
        (str(case), run, (case,)) for case in (SLOW_CASES if slow else CASES)
    ]
    if not slow:
        work += [("invariance", invariance, ()), ("without rows", without_rows, ())]
    results: dict[str, Any] = {}
    new_empty = Tensor.new_empty
    # The launcher's partial sums are the only memory that comes from there.
    Tensor.new_empty = lambda t, *size, **options: new_empty(t, *size, **options).fill_(torch.nan)  # type: ignore
    for name, function, arguments in work:
        try:
            found = function(*arguments)
            results[name] = tuple(found) if isinstance(found, Gradients) else found
        except Exception:
            results[name] = traceback.format_exc()
    torch.save(results, sys.argv[1])


if __name__ == "__main__":
    main()
