"""A whole model before and after the swap, on the same inputs, in float32."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from coverage_units import counting_originals
from torch import Tensor, nn

from normswap import modules, unpatch
from normswap.patching import apply_plan
from normswap.plan import Plan

__all__ = ["BOUND", "Parity", "compare", "floats", "measure_parity", "scale_invariant"]

BOUND = 1e-5
"""Greatest relative distance of an output, as of the exact gate."""

# A block that normalises on its way (an attention with normalised queries) is no norm.
_MATRICES = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd)


@dataclass(frozen=True)
class Parity:
    """What the swap does to a model's outputs.

    Attributes:
        error: greatest relative distance (root of the mean square) among the outputs.
        where: the output that it is of.
        outputs: floating-point outputs compared.
        same_nonfinite: whether NaN and infinities stand at the same places.
        norms_reached: swapped norms that were called.
        originals: swapped norms whose original's forward was called all the same.
        repeated: the distance of the original from itself in a second run; None where nothing was amiss.
    """

    error: float
    where: str
    outputs: int
    same_nonfinite: bool
    norms_reached: int
    originals: int
    repeated: float | None = None

    @property
    def passed(self) -> bool:
        """Whether every output is within the bound, and not a number where the original is not."""
        return self.error <= BOUND and self.same_nonfinite


@torch.no_grad()
def measure_parity(model: nn.Module, plan: Plan, inputs: Mapping[str, Any]) -> Parity:
    """Run a model, swap what the plan says, run it again, and leave it as it was.

    Args:
        model: the original, in float32.
        plan: of this model.
        inputs: keyword arguments of its forward.
    """
    expected = _run(model, inputs)
    apply_plan(model, plan, backend="auto", verify=False)
    norms = [module for _, module, _ in modules.fused_norms(model)]
    reached: set[nn.Module] = set()
    hooks = [norm.register_forward_pre_hook(lambda norm, _: reached.add(norm)) for norm in norms]
    try:
        with counting_originals(norms) as called:
            got = _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
        unpatch(model)
    error, where, same = compare(got, expected)
    repeated = None
    if not (error <= BOUND and same):
        repeated, _, _ = compare(_run(model, inputs), expected)
    return Parity(error, where, len(expected), same, len(reached), len(set(called)), repeated)


@torch.no_grad()
def scale_invariant(model: nn.Module, plan: Plan, inputs: Mapping[str, Any]) -> list[nn.Module]:
    """Find what is in no plan and behaves like a norm, whatever it is called: four times its input changes nothing.

    Args:
        model: it is run once.
        plan: of this model.
        inputs: keyword arguments of its forward.

    Returns:
        The innermost modules that were called with one tensor, hold no norm of the plan and no matrix, and do not
        change with its scale.
    """
    names = [decision.name for decision in plan.decisions]
    seen: dict[nn.Module, Tensor] = {}

    def look(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        x = args[0] if len(args) == 1 else None
        if isinstance(x, Tensor) and isinstance(output, Tensor) and x.is_floating_point() and x.shape == output.shape:
            seen.setdefault(module, x.clone())

    hooks = [
        module.register_forward_hook(look)
        for name, module in model.named_modules()
        if name
        and not any(f"{decided}.".startswith(f"{name}.") for decided in names)
        and not any(isinstance(inner, _MATRICES) for inner in module.modules())
    ]
    try:
        _run(model, inputs)
    finally:
        for hook in hooks:
            hook.remove()
    found = [module for module, x in seen.items() if _keeps(module, x)]
    return [module for module in found if not any(other in found for other in module.modules() if other is not module)]


def _keeps(module: nn.Module, given: Tensor) -> bool:
    """Whether the result is that of four times the input: of the one that was given, and of normal numbers."""
    for x in (given, torch.randn(given.shape, generator=torch.Generator().manual_seed(0)).to(given.dtype)):
        try:
            y, scaled, flipped = module(x), module(4 * x), module(x.flip(-1))
        except Exception:
            return False
        # What gives the same numbers whatever comes is no norm.
        if not y.is_floating_point() or not float((flipped - y).norm()) > 0:
            return False
        if not float((scaled - y).norm()) <= 1e-3 * float(y.norm()):
            return False
    return True


def _run(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    # Some models draw numbers when they run.
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = {name: value.clone() if isinstance(value, Tensor) else value for name, value in inputs.items()}
        return {name: value.clone() for name, value in floats(model(**given))}


def floats(output: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield every floating-point tensor among a model's outputs, by its path."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield name or "output", output
    elif isinstance(output, Mapping):
        for key, value in output.items():
            yield from floats(value, f"{name}.{key}" if name else str(key))
    elif isinstance(output, (list, tuple)):
        for at, value in enumerate(output):
            yield from floats(value, f"{name}.{at}" if name else str(at))


def compare(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> tuple[float, str, bool]:
    """Return the greatest relative distance, the output that it is of, and whether all that is not finite agrees."""
    if got.keys() != expected.keys():
        return float("inf"), f"outputs {sorted(got.keys() ^ expected.keys())[:3]}", False
    worst, where, same = 0.0, "", True
    for name, right in expected.items():
        left = got[name]
        if left.shape != right.shape or left.dtype != right.dtype:
            return float("inf"), name, False
        finite = left.isfinite() & right.isfinite()
        same = same and bool(((left == right) | (left.isnan() & right.isnan()) | finite).all())
        left, right = (value.double().masked_fill(~finite, 0.0) for value in (left, right))
        size, off = float(right.norm()), float((left - right).norm())
        error = off / size if size else (0.0 if off == 0 else float("inf"))
        if error > worst:
            worst, where = error, name
    return worst, where, same
