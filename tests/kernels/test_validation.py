"""What the operations and backends refuse, in words: expected, got, what to do."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from normswap_kernels import (
    BackendUnavailable,
    add_layer_norm,
    add_rms_norm,
    check_backend,
    gated_rms_norm,
    layer_norm,
    rms_norm,
    rms_norm_quant,
)

EPS = 1e-6
X = torch.ones(2, 8)
NAN = float("nan")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    NESTED = torch.nested.nested_tensor([torch.ones(1, 8)])

# The operation as a function of x, weight, bias and options.
OPERATIONS: dict[str, Callable[..., Any]] = {
    "rms_norm": rms_norm,
    "layer_norm": layer_norm,
    "add_rms_norm": lambda x, *rest, **options: add_rms_norm(x, x, *rest, **options),
    "add_layer_norm": lambda x, *rest, **options: add_layer_norm(x, x, *rest, **options),
    "gated_rms_norm": lambda x, w=None, b=None, **options: gated_rms_norm(x, x, w, **options),
    "rms_norm_quant": rms_norm_quant,
}
WITHOUT_BIAS = ("gated_rms_norm",)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    (
        ((None,), {}, TypeError, "expected x to be a tensor, got NoneType"),
        ((X.int(),), {}, TypeError, "expected x of dtype float32, float16, bfloat16.*got torch.int32: convert"),
        ((torch.tensor(1.0),), {}, ValueError, "expected x of shape .*pass at least one row"),
        ((X, torch.ones(7)), {}, ValueError, r"expected weight of shape \(8,\).*got \(7,\): pass"),
        ((X, torch.ones(1, 8)), {}, ValueError, r"expected weight of shape \(8,\).*got \(1, 8\)"),
        ((X, None, torch.ones(9)), {}, ValueError, r"expected bias of shape \(8,\).*got \(9,\)"),
        ((X, torch.ones(8), torch.ones(2, 8)), {}, ValueError, r"expected bias of shape \(8,\), got \(2, 8\): reshape"),
        ((X, torch.ones(8).int()), {}, TypeError, "expected weight of dtype .*got torch.int32: convert"),
        ((X, [1.0] * 8), {}, TypeError, "expected weight to be a tensor or None, got list"),
        ((X, torch.ones(8, device="meta")), {}, ValueError, "expected weight on the device of x, cpu, got meta: move"),
        ((X,), {"eps": -1e-6}, ValueError, "expected a finite eps of 0 or more, got -1e-06: pass"),
        ((X,), {"eps": NAN}, ValueError, "expected a finite eps of 0 or more, got nan"),
        ((X,), {"eps": "1e-6"}, TypeError, "expected eps and offset to be numbers, got str"),
        ((X,), {"eps": True}, TypeError, "expected eps and offset to be numbers, got bool and float: pass floats"),
        ((X,), {"eps": torch.tensor(EPS)}, TypeError, "expected eps and offset to be numbers, got Tensor"),
        ((X,), {"eps": np.array([EPS, EPS])}, TypeError, "expected eps and offset to be numbers, got ndarray"),
        ((X,), {"eps": 10**400}, ValueError, "expected a finite eps of 0 or more, got 10+: pass"),
        ((X,), {"offset": torch.zeros(3)}, TypeError, "expected eps and offset to be numbers, got float and Tensor"),
        ((X,), {"offset": 1e300}, ValueError, r"expected a finite offset, got 1e\+300: pass 1.0"),
        ((X,), {"offset": None}, TypeError, "expected eps and offset to be numbers, got float and NoneType"),
        ((X,), {"offset": NAN}, ValueError, "expected a finite offset, got nan: pass 1.0"),
        ((X,), {"round_dtype": torch.int8}, TypeError, "expected round_dtype and out_dtype to be floating"),
        ((X,), {"out_dtype": torch.int8}, TypeError, "expected round_dtype and out_dtype .*int8: pass float32 or"),
        ((X,), {"out_dtype": 0}, TypeError, "expected round_dtype and out_dtype to be floating"),
        ((X.to_sparse(),), {}, TypeError, "expected x to be a dense tensor, got layout torch.sparse_coo: convert"),
        ((X, torch.ones(8).to_sparse()), {}, TypeError, "expected weight to be a dense tensor, got layout torch.sp"),
        ((NESTED,), {}, TypeError, "expected x to be a dense tensor, got a nested tensor: convert"),
        ((X,), {"backend": "cuda"}, ValueError, "expected a backend among auto, .*interpret, got 'cuda': pass one"),
        ((X,), {"backend": "triton"}, BackendUnavailable, "got device 'cpu': move the tensors to a GPU, or choose"),
    ),
)
@pytest.mark.parametrize("name", OPERATIONS)
def test_bad_input_is_refused_in_words(
    name: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    if name in WITHOUT_BIAS and len(arguments) == 3:
        pytest.skip("has no bias")
    with pytest.raises(error, match=message) as caught:
        OPERATIONS[name](*arguments, **{"eps": EPS, **options})
    assert "\n" not in str(caught.value)


HEADS = torch.ones(2, 4, 8)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    (
        (
            lambda: rms_norm(X, eps=EPS, groups=3),
            ValueError,
            "expected groups of 1 or more that divide rows of 8, got 3",
        ),
        (lambda: layer_norm(X, eps=EPS, groups=0), ValueError, "expected groups of 1 or more .*got 0: pass"),
        (
            lambda: rms_norm(X, eps=EPS, groups=2.0),
            TypeError,
            "expected groups to be a whole number, got float: pass",
        ),
        (
            lambda: rms_norm(HEADS, torch.ones(4, 8), eps=EPS, groups=2),
            ValueError,
            r"expected a weight of shape \(8,\) beside groups, got one of two dimensions: flatten",
        ),
        (
            lambda: rms_norm(HEADS, None, torch.ones(4, 8), eps=EPS),
            ValueError,
            r"expected bias of shape \(8,\), got \(4, 8\)",
        ),
        (lambda: rms_norm(X, eps=EPS, groups=True), TypeError, "expected groups to be a whole number, got bool: pass"),
        (lambda: layer_norm(X, eps=EPS, groups=1.0), TypeError, "expected groups to be a whole number, got float"),
        (lambda: rms_norm(X, eps=EPS, partial=2.5), TypeError, "expected partial to be a whole number or None, got f"),
        (lambda: rms_norm(X, eps=EPS, partial=9), ValueError, "expected partial between 1 and the row's 8, got 9"),
        (
            lambda: rms_norm(X, eps=EPS, partial=0),
            ValueError,
            "expected partial between 1 and the row's 8, got 0: pass",
        ),
        (
            lambda: rms_norm(X, eps=EPS, partial=5, groups=2),
            ValueError,
            "expected partial between 1 and the row's 4, got 5",
        ),
        (
            lambda: rms_norm(X, eps=EPS, eps_position="within"),
            ValueError,
            "expected eps_position among 'inside', 'outside', 'clamp', got 'within': pass one",
        ),
        (lambda: layer_norm(X, eps=EPS, eps_position=1), ValueError, "expected eps_position among .*got 1"),
        (
            lambda: rms_norm(X, eps=EPS, reduction="max"),
            ValueError,
            "expected reduction among 'mean', 'sum', got 'max'",
        ),
        (
            lambda: rms_norm(X, eps=EPS, scale_dtype=torch.float64),
            TypeError,
            "expected scale_dtype to be float32, float16, bfloat16 or None, got torch.float64: pass",
        ),
        (lambda: rms_norm(X, eps=EPS, scale_dtype="bfloat16"), TypeError, "expected scale_dtype to be .*got bfloat16"),
        (lambda: add_rms_norm(X, None, eps=EPS), TypeError, "expected residual to be a tensor, got NoneType"),
        (
            lambda: add_rms_norm(X, torch.ones(8), eps=EPS),
            ValueError,
            r"expected residual of the shape of x, \(2, 8\), got \(8,\): expand or reshape",
        ),
        (
            lambda: add_layer_norm(X, X.int(), eps=EPS),
            TypeError,
            "expected residual of dtype .*got torch.int32: convert",
        ),
        (lambda: add_layer_norm(X, X.to_sparse(), eps=EPS), TypeError, "expected residual to be a dense tensor, got"),
        (lambda: gated_rms_norm(X, X.to_sparse(), eps=EPS), TypeError, "expected gate to be a dense tensor, got lay"),
        (lambda: add_layer_norm(X, X.double(), eps=EPS), TypeError, "expected residual of dtype .*got torch.float64"),
        (
            lambda: add_layer_norm(X, X.to("meta"), eps=EPS),
            ValueError,
            "expected residual on the device of x, cpu, got meta",
        ),
        (
            lambda: add_rms_norm(X, X, eps=EPS, sum_dtype=torch.int8),
            TypeError,
            "expected sum_dtype to be a floating dtype",
        ),
        (
            lambda: gated_rms_norm(X, torch.ones(2, 7), eps=EPS),
            ValueError,
            r"expected gate of the shape of x, \(2, 8\), got \(2, 7\): expand or reshape",
        ),
        (lambda: gated_rms_norm(X, None, eps=EPS), TypeError, "expected gate to be a tensor, got NoneType"),
        (
            lambda: gated_rms_norm(X, X, eps=EPS, gate_position="none"),
            ValueError,
            "expected gate_position among 'before', 'after', got 'none'",
        ),
        (
            lambda: gated_rms_norm(X, X, eps=EPS, gate_position="around"),
            ValueError,
            "expected gate_position among 'before', 'after', got 'around'",
        ),
        (
            lambda: gated_rms_norm(X, X, eps=EPS, activation="relu"),
            ValueError,
            "expected activation among 'silu', 'sigmoid'",
        ),
        (
            lambda: rms_norm_quant(X, eps=EPS, dtype=torch.int16),
            TypeError,
            "expected dtype to be torch.int8 or torch.float8",
        ),
        (lambda: rms_norm_quant(X.double(), eps=EPS), TypeError, "expected x of dtype float32, .*got torch.float64"),
        (
            lambda: rms_norm_quant(HEADS, torch.ones(4, 8), eps=EPS),
            ValueError,
            r"expected weight of shape \(8,\), got \(4, 8\): a row is quantized as a whole",
        ),
    ),
)
def test_options_that_do_not_fit_are_refused_in_words(
    call: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_backends_resolve_or_say_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check_backend("auto", "cpu") == check_backend("cpu", torch.device("cpu")) == "cpu"
    assert check_backend("auto", "meta") == "cpu"
    assert check_backend("triton", "meta") == "triton"
    with pytest.raises(BackendUnavailable, match="no implementation for device 'mps': move"):
        check_backend("auto", "mps")
    for backend in ("cpu", "interpret"):
        with pytest.raises(BackendUnavailable, match=f"backend '{backend}' takes CPU tensors, got device 'cuda': move"):
            check_backend(backend, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for backend in ("auto", "triton"):
        with pytest.raises(BackendUnavailable, match="sees no 'cuda' device: check the driver"):
            check_backend(backend, "cuda")


@pytest.mark.parametrize("name", OPERATIONS)
def test_interpreter_after_a_compiled_import_is_refused(name: str) -> None:
    pytest.importorskip("triton.language")
    with pytest.raises(BackendUnavailable, match="start a new process with TRITON_INTERPRET=1"):
        OPERATIONS[name](X, eps=EPS, backend="interpret")


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(BackendUnavailable, match="needs the package triton, which is not installed: pip install"):
        check_backend("interpret", "cpu")
