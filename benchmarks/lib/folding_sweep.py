"""Plan the folds of a tiny model, carry them out by hand, and say what agreed with the plan and what did not."""

from __future__ import annotations

import copy
import inspect
import json
import os
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from coverage_zoo import build, load_zoo
from folding_hand import distance, drop_gains, fold_by_hand, results, several, widened
from torch import nn

from normswap.folding import make_fold_plan
from normswap.foldplan import Fold, FoldPlan
from normswap.plan import make_plan

__all__ = ["EXACT", "Trial", "inputs_of", "measure", "serve"]

EXACT = 1e-5
"""Relative distance up to which a fold counts as exact; many norms compute in float32 whatever the model's dtype."""
SEEN = 20.0
"""How much further a dropped gain has to move the output than the fold does."""


class Trial:
    """A model with inputs, and what it computes.

    Attributes:
        dtype: float64, or float32 where the model's code does not run in float64.
    """

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any]) -> None:
        model = copy.deepcopy(model)
        _wake(model)
        self.model = copy.deepcopy(model).double()
        try:
            self._compute(inputs, torch.float64)
        # Code that names a dtype of its own fails in many ways.
        except Exception:
            self.model = copy.deepcopy(model).float()
            self._compute(inputs, torch.float32)

    def _compute(self, inputs: Mapping[str, Any], dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.batches = list(several(widened(inputs, dtype)))
        self.expected = [results(self.model, batch) for batch in self.batches]
        if any(bool(tensor.isnan().any()) for expected in self.expected for tensor in expected):
            raise ValueError("its output is not a number, and proves nothing")

    def error(self, folds: Sequence[Fold]) -> float:
        """Fold by hand and return the largest relative change of any output."""
        changed = copy.deepcopy(self.model)
        fold_by_hand(changed, folds)
        return self._distance(changed)

    def control(self, folds: Sequence[Fold]) -> float:
        """Drop gains, leave what reads them, and return the same."""
        changed = copy.deepcopy(self.model)
        drop_gains(changed, folds)
        return self._distance(changed)

    def sees(self, folds: Sequence[Fold]) -> bool:
        """Whether the output would tell if these gains were lost."""
        return self.control(folds) > max(SEEN * self.error(folds), 1e-9)

    def _distance(self, changed: nn.Module) -> float:
        found = zip(self.batches, self.expected, strict=True)
        return max(distance(results(changed, batch), expected) for batch, expected in found)

    def wrong(self, folds: Sequence[Fold]) -> dict[str, float]:
        """Return the folds that change the output, by name; several at once first, since most do not."""
        if not folds or (error := self.error(folds)) <= EXACT:
            return {}
        if len(folds) == 1:
            return {folds[0].name: error}
        middle = len(folds) // 2
        return {**self.wrong(folds[:middle]), **self.wrong(folds[middle:])}


@torch.no_grad()
def _wake(model: nn.Module) -> None:
    """Give values to parameters that start at zero, for they hide what reads them."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.is_floating_point() and not parameter.any():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def inputs_of(tiny: Any, model: nn.Module) -> dict[str, Any]:
    """Return inputs that the zoo finds, or tokens for a model that runs without a cache only.

    Raises:
        Exception: the zoo finds none, and the model takes no tokens.
    """
    try:
        return tiny.tiny_inputs(model)
    except tiny.TinyError:
        if "input_ids" not in inspect.signature(model.forward).parameters:
            raise
    return {"input_ids": torch.randint(10, 200, (1, 12), generator=torch.Generator().manual_seed(0))}


def by_pattern(folds: Sequence[Fold]) -> dict[str, list[Fold]]:
    """Group decisions that differ in numbers only."""
    groups: dict[str, list[Fold]] = {}
    for fold in folds:
        groups.setdefault(fold.pattern, []).append(fold)
    return groups


def measure(tiny: Any, name: str) -> dict[str, Any]:
    """Plan and try one model of the zoo.

    Args:
        tiny: the zoo.
        name: a model type or a variant.

    Returns:
        ``type``, and ``absent`` with the reason where it is not built here, ``crash`` where the plan raises, else
        counts, the reasons of the refusals, and what disagrees: ``wrong`` folds with their errors, ``unseen`` ones
        that change nothing when dropped, and ``careful`` refusals whose readers could be folded exactly.
    """
    try:
        model = build(tiny, name)
    except Exception as error:
        return {"type": name, "absent": str(error)[:200]}
    start = time.perf_counter()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            plan = make_fold_plan(model, make_plan(model), tied="untie")
    except Exception as error:
        return {"type": name, "crash": f"{type(error).__name__}: {error}"[:300]}
    found = {
        "type": name,
        "class": type(model).__name__,
        "seconds": round(time.perf_counter() - start, 2),
        "norms": len(plan.decisions),
        "folds": len(plan.folds),
        "unties": plan.unties,
        "refused": sorted({(fold.pattern, fold.reason) for fold in plan.refusals}),
    }
    try:
        trial = Trial(model, inputs_of(tiny, model))
    except Exception as error:
        return {**found, "untried": f"{type(error).__name__}: {error}"[:200]}
    return {**found, **_tried(plan, trial)}


def _tried(plan: FoldPlan, trial: Trial) -> dict[str, Any]:
    wrong = trial.wrong(plan.folds)
    right = [fold for fold in plan.folds if fold.name not in wrong]
    unseen = [pattern for pattern, folds in by_pattern(right).items() if not trial.sees(folds)]
    careful = {}
    for pattern, folds in by_pattern([fold for fold in plan.refusals if fold.consumers and _has_gain(fold)]).items():
        error = trial.error(folds)
        if error <= EXACT and trial.sees(folds):
            careful[pattern] = folds[0].reason
    return {
        "dtype": str(trial.dtype).removeprefix("torch."),
        "error": trial.error(right) if right else 0.0,
        "control": trial.control(right) if right else None,
        "wrong": wrong,
        "unseen": unseen,
        "careful": careful,
    }


def _has_gain(fold: Fold) -> bool:
    return fold.spec is not None and fold.spec.gain_name is not None


def serve(zoo: Path) -> None:
    """Read names from the standard input, one a line, and answer each with one line of JSON on the standard output."""
    # Libraries print what they like; the answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    tiny = load_zoo(zoo)
    for line in sys.stdin:
        print(json.dumps(measure(tiny, line.strip())), file=answers, flush=True)
