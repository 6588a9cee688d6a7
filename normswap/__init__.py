"""normswap: fused Triton norms for any Hugging Face model, with parity as a measured verdict.

>>> import normswap
>>> model = normswap.patch(model)                    # before inference, in place  # doctest: +SKIP
>>> normswap.convert("org/model", "converted")       # what `normswap patch` does  # doctest: +SKIP
>>> normswap.verify("converted").passed              # doctest: +SKIP
True
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from normswap._version import __version__

if TYPE_CHECKING:
    from normswap.api import Conversion, Inspection, convert, fold, inspect, load, patch, unpatch, verify
    from normswap.errors import NormswapError, ParityError
    from normswap.foldplan import Fold, FoldPlan
    from normswap.parity import Criterion, ParityReport
    from normswap.plan import Decision, Plan
    from normswap.spec import NormSpec

__all__ = [
    "Conversion",
    "Criterion",
    "Decision",
    "Fold",
    "FoldPlan",
    "Inspection",
    "NormSpec",
    "NormswapError",
    "ParityError",
    "ParityReport",
    "Plan",
    "__version__",
    "convert",
    "fold",
    "inspect",
    "load",
    "patch",
    "unpatch",
    "verify",
]

_HOME = {
    "Criterion": "parity",
    "Decision": "plan",
    "Fold": "foldplan",
    "FoldPlan": "foldplan",
    "NormSpec": "spec",
    "NormswapError": "errors",
    "ParityError": "errors",
    "ParityReport": "parity",
    "Plan": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'normswap' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"normswap.{_HOME.get(name, 'api')}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
