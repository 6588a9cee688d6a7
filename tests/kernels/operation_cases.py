"""Every operation with its options as one table, shared by the tests of what torch sees of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from normswap_kernels import add_layer_norm, add_rms_norm, gated_rms_norm, layer_norm, rms_norm
from normswap_kernels.formula import Formula
from normswap_kernels.reference import exact
from torch import Tensor

EPS = 1e-5

Call = Callable[..., Any]

# Name of the operation, call with (x, other, weight, bias), and what it says in a formula.
CALLS: dict[str, tuple[str, Call, dict[str, Any]]] = {
    "rms": ("rms_norm", lambda x, o, w, b, **k: rms_norm(x, w, b, eps=EPS, **k), {}),
    "rms 1+w": ("rms_norm", lambda x, o, w, b, **k: rms_norm(x, w, b, eps=EPS, offset=1.0, **k), {"offset": 1.0}),
    "rms groups": ("rms_norm", lambda x, o, w, b, **k: rms_norm(x, w, b, eps=EPS, groups=4, **k), {"groups": 4}),
    "rms partial": ("rms_norm", lambda x, o, w, b, **k: rms_norm(x, w, b, eps=EPS, partial=3, **k), {"partial": 3}),
    "rms outside": (
        "rms_norm",
        lambda x, o, w, b, **k: rms_norm(x, w, b, eps=0.1, eps_position="outside", **k),
        {"eps": 0.1, "eps_position": "outside"},
    ),
    "rms scale": (
        "rms_norm",
        lambda x, o, w, b, **k: rms_norm(x, w, b, eps=EPS, scale_dtype=_scale_dtype(x.dtype), **k),
        {"scale_dtype": True},
    ),
    "l2": (
        "rms_norm",
        lambda x, o, w, b, **k: rms_norm(x, w, b, eps=1.0, eps_position="clamp", reduction="sum", **k),
        {"eps": 1.0, "eps_position": "clamp", "reduction": "sum"},
    ),
    "layer": ("layer_norm", lambda x, o, w, b, **k: layer_norm(x, w, b, eps=EPS, **k), {"kind": "layer"}),
    "layer groups": (
        "layer_norm",
        lambda x, o, w, b, **k: layer_norm(x, w, b, eps=EPS, groups=2, **k),
        {"kind": "layer", "groups": 2},
    ),
    "add rms": ("add_rms_norm", lambda x, o, w, b, **k: add_rms_norm(x, o, w, b, eps=EPS, **k), {"sum_dtype": True}),
    "add layer": (
        "add_layer_norm",
        lambda x, o, w, b, **k: add_layer_norm(x, o, w, b, eps=EPS, **k),
        {"kind": "layer", "sum_dtype": True},
    ),
    "gate after": (
        "gated_rms_norm",
        lambda x, o, w, b, **k: gated_rms_norm(x, o, w, eps=EPS, activation="sigmoid", **k),
        {"gate_position": "after", "activation": "sigmoid"},
    ),
    "gate before": (
        "gated_rms_norm",
        lambda x, o, w, b, **k: gated_rms_norm(x, o, w, eps=EPS, gate_position="before", groups=2, **k),
        {"gate_position": "before", "groups": 2},
    ),
}


def _scale_dtype(dtype: torch.dtype) -> torch.dtype | None:
    """Round the scale to the dtype of the rows, but for float64, which it is not rounded to."""
    return None if dtype == torch.float64 else dtype


def formula_of(case: str, x_dtype: torch.dtype, **options: Any) -> Formula:
    _, _, extra = CALLS[case]
    extra = {"eps": EPS, "offset": 0.0, "kind": "rms", **extra, **options}
    if extra.get("sum_dtype"):
        extra["sum_dtype"] = x_dtype
    if extra.get("scale_dtype"):
        extra["scale_dtype"] = _scale_dtype(x_dtype)
    return Formula(**{"round_dtype": None, "product_dtype": None, "out_dtype": x_dtype, **extra})


def tensors_of(case: str, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x, other = torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)
    return x, other, torch.randn(shape[-1], dtype=dtype), torch.randn(shape[-1], dtype=dtype)


def oracle(
    case: str, formula: Formula, x: Tensor, other: Tensor, weight: Tensor, bias: Tensor, to: Call = exact
) -> Any:
    """Call an oracle; give what the operation gives: one tensor, or two with a residual."""
    gated, added = "gate" in case, "add" in case
    found = to(
        formula,
        x,
        weight,
        None if gated else bias,
        residual=other if added else None,
        gate=other if gated else None,
    )
    return found if added else found[0]


def listed(results: Any) -> list[Tensor]:
    return list(results) if isinstance(results, tuple) else [results]
