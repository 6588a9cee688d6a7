"""What is measured on one model of the zoo, and the process that measures one after the other."""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Hashable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from coverage_parity import measure_parity, scale_invariant
from coverage_peers import hub_layer, liger_reaches
from coverage_units import measure_units
from coverage_zoo import build, load_zoo
from torch import nn

from normswap.plan import Decision, Plan, make_plan
from normswap.replica import original_class

__all__ = ["Walk", "serve"]

# Names alone decide nothing: what bears one and is in no plan is shown, so that a person can look for what was missed.
_NAMED_LIKE_A_NORM = re.compile(r"norm(?!al(?!iz|is))|(?<![A-Z])LN(?![a-z])", re.IGNORECASE)


class Walk:
    """Measure models of the zoo; each distinct norm is held to the unit bound once.

    Args:
        zoo: the folder of the zoo.
    """

    def __init__(self, zoo: Path) -> None:
        self.tiny = load_zoo(zoo)
        self._units: dict[Hashable, dict[str, Any]] = {}

    def measure(self, name: str) -> dict[str, Any]:
        """Measure one model.

        Args:
            name: a model type or a variant of the zoo.

        Returns:
            Plain data: ``type``; ``error`` where the model is not built, or ``crash`` where normswap failed; else
            ``model``, ``norms`` (classes of norms with their count), ``others`` (classes in no plan that are norms by
            name, or behave like one), ``parity`` and ``liger``.
        """
        try:
            model = build(self.tiny, name)
        except Exception as error:
            return {"type": name, "error": _words(error)}
        found: dict[str, Any] = {"type": name, "model": type(model).__name__}
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                plan = make_plan(model)
            replaced, failure = liger_reaches(model, [d.name for d in plan.decisions])
            found |= {"norms": self._norms(model, plan, set(replaced)), "liger": failure}
            inputs = self._inputs(model)
            return found | {"others": _others(model, plan, inputs), "parity": _parity(model, plan, inputs)}
        except Exception:
            return found | {"crash": traceback.format_exc(limit=-4)}

    def _norms(self, model: nn.Module, plan: Plan, replaced: set[str]) -> list[dict[str, Any]]:
        rows: dict[Any, dict[str, Any]] = {}
        names = [d.name for d in plan.decisions]
        for decision in plan.decisions:
            module = model.get_submodule(decision.name)
            cls = original_class(module)
            # A container of norms is no norm besides them.
            inner = any(name.startswith(f"{decision.name}.") for name in names)
            key = (cls, decision.action, decision.reason, decision.key, inner)
            if key not in rows:
                rows[key] = {
                    "class": f"{cls.__module__}.{cls.__qualname__}",
                    "action": decision.action,
                    "reason": decision.reason,
                    "example": decision.name,
                    "count": 0,
                    "liger": 0,
                    "hub": hub_layer(cls),
                    "contains_norms": inner,
                    "units": self._worst(module, decision) if decision.action == "swap" else None,
                }
            rows[key]["count"] += 1
            rows[key]["liger"] += decision.name in replaced
        return list(rows.values())

    def _worst(self, module: nn.Module, decision: Decision) -> dict[str, Any]:
        if decision.key not in self._units:
            assert decision.spec is not None
            self._units[decision.key] = {k: asdict(v) for k, v in measure_units(module, decision.spec).items()}
        return self._units[decision.key]

    def _inputs(self, model: nn.Module) -> dict[str, Any] | str:
        """Return inputs that the model runs on, or why there are none."""
        try:
            return self.tiny.tiny_inputs(model)
        except Exception as error:
            return f"no inputs: {_words(error)}"


def _parity(model: nn.Module, plan: Plan, inputs: dict[str, Any] | str) -> dict[str, Any]:
    if not plan.swaps:
        return {"not_run": "no norm is swapped"}
    if isinstance(inputs, str):
        return {"not_run": inputs}
    parity = measure_parity(model, plan, inputs)
    return {**asdict(parity), "passed": parity.passed}


def _words(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:200]


def _others(model: nn.Module, plan: Plan, inputs: dict[str, Any] | str) -> list[dict[str, Any]]:
    """List the classes in no plan that are named like a norm, or behave like one."""
    behaving = {type(module) for module in ([] if isinstance(inputs, str) else scale_invariant(model, plan, inputs))}
    decided = {decision.name for decision in plan.decisions}
    rows: dict[type, dict[str, Any]] = {}
    for name, module in model.named_modules():
        cls = type(module)
        if name not in decided and (cls in behaving or _NAMED_LIKE_A_NORM.search(cls.__name__)):
            usual = {"class": f"{cls.__module__}.{cls.__qualname__}", "count": 0, "behaves": cls in behaving}
            rows.setdefault(cls, usual)["count"] += 1
    return list(rows.values())


def serve(zoo: Path) -> None:
    """Read names from the standard input, one a line, and answer each with one line of JSON on the standard output."""
    # Libraries print what they like; the answers have a channel of their own.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    walk = Walk(zoo)
    for line in sys.stdin:
        print(json.dumps(walk.measure(line.strip())), file=answers, flush=True)
