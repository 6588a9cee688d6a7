"""The operations as torch sees them: gradients, compilation, meta tensors, vmap; and what they refuse."""

from __future__ import annotations

import doctest
import importlib
import subprocess
import sys
from typing import Any

import normswap_kernels
import pytest
import torch
from norm_cases import BF16, EPS, FP32
from normswap_kernels import BackendUnavailable, check_backend, layer_norm, layers, ops, rms_norm
from normswap_kernels.reference import exact
from torch import nn
from transformers.models.llama.modeling_llama import LlamaRMSNorm

OPERATIONS = {"rms": rms_norm, "layer": layer_norm}


@pytest.fixture(params=OPERATIONS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_import_loads_no_triton() -> None:
    code = "import sys, normswap_kernels; sys.exit('triton' in sys.modules)"
    environment = {"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": ""}
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, env=environment)


def test_public_names_exist() -> None:
    assert all(hasattr(normswap_kernels, name) for name in normswap_kernels.__all__)
    assert normswap_kernels.BACKENDS == ("auto", "triton", "cpu", "interpret")


@pytest.mark.parametrize("name", ("ops", "backends", "launch"))
def test_examples_in_docstrings(name: str) -> None:
    module = importlib.import_module(f"normswap_kernels.{name}")
    results = doctest.testmod(module)
    assert results.attempted and not results.failed


@pytest.mark.parametrize("shape", ((5,), (3, 7), (2, 3, 4)))
@pytest.mark.parametrize("offset", (0.0, 1.0))
def test_gradients_are_those_of_the_oracle(kind: str, offset: float, shape: tuple[int, ...]) -> None:
    def leaf(*size: int) -> torch.Tensor:
        return torch.randn(*size, dtype=torch.float64, requires_grad=True)

    ours = leaf(*shape), leaf(shape[-1]), leaf(shape[-1])
    theirs = [t.detach().clone().requires_grad_() for t in ours]
    grad = torch.randn(shape, dtype=torch.float64)
    OPERATIONS[kind](*ours, eps=EPS, offset=offset).backward(grad)
    exact(kind, *theirs, eps=EPS, offset=offset).backward(grad)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)
    assert torch.autograd.gradcheck(lambda *a: OPERATIONS[kind](*a, eps=EPS, offset=offset), ours)
    assert torch.autograd.gradgradcheck(lambda *a: OPERATIONS[kind](*a, eps=EPS, offset=offset), ours)


def test_gradients_without_parameters_and_in_mixed_dtypes(kind: str) -> None:
    x = torch.randn(4, 6, dtype=BF16, requires_grad=True)
    weight = torch.randn(6, requires_grad=True)
    OPERATIONS[kind](x, eps=EPS).sum().backward()
    assert x.grad is not None and x.grad.dtype == BF16
    OPERATIONS[kind](x.detach(), weight, eps=EPS, round_dtype=BF16).sum().backward()
    assert weight.grad is not None and weight.grad.dtype == FP32


def test_gradients_in_bf16_are_near_the_eager_classs() -> None:
    norm = LlamaRMSNorm(64).to(BF16)
    x = torch.randn(50, 64).to(BF16).requires_grad_()
    grad = torch.randn(50, 64).to(BF16)
    truth = x.detach().double().requires_grad_()
    exact("rms", truth, norm.weight.detach(), eps=EPS).backward(grad.double())
    norm(x).backward(grad)
    theirs = (x.grad.double() - truth.grad).abs().max()
    x.grad = None
    rms_norm(x, norm.weight, eps=EPS, round_dtype=BF16).backward(grad)
    assert (x.grad.double() - truth.grad).abs().max() <= 2 * theirs


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_opcheck(kind: str, dtype: torch.dtype) -> None:
    op = {"rms": ops._rms_norm_op, "layer": ops._layer_norm_op}[kind]
    x = torch.randn(4, 3, 32).to(dtype)
    weight = torch.randn(32)
    torch.library.opcheck(op, (x.transpose(0, 1), weight, None, EPS, 0.0, dtype, dtype, "auto"))
    x.requires_grad_(), weight.requires_grad_()
    torch.library.opcheck(op, (x, weight, torch.randn(32, requires_grad=True), EPS, 1.0, None, FP32, "cpu"))


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_to_one_graph(kind: str, dynamic: bool) -> None:
    torch.compiler.reset()
    weight = torch.randn(32, requires_grad=True)

    def model(x: torch.Tensor) -> torch.Tensor:
        return OPERATIONS[kind](x, weight, eps=EPS, round_dtype=x.dtype).sin()

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 8):
        x = torch.randn(rows, 32)
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
        with torch.no_grad():
            assert torch.equal(compiled(x), model(x))
    assert weight.grad is not None


def test_meta_tensors_give_meta_tensors(kind: str) -> None:
    x = torch.empty(2, 8, device="meta", dtype=BF16)
    result = OPERATIONS[kind](x, eps=EPS, out_dtype=FP32)
    assert result.is_meta and result.shape == x.shape and result.dtype == FP32


def test_fake_tensors_match_in_strides(kind: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(2, 3, 4, 8).transpose(1, 2)
    with FakeTensorMode() as mode:
        fake = OPERATIONS[kind](mode.from_tensor(x), eps=EPS)
    assert fake.stride() == OPERATIONS[kind](x, eps=EPS).stride()


def test_vmap(kind: str) -> None:
    x, weights = torch.randn(5, 4, 8), torch.randn(5, 8)
    expected = torch.stack([OPERATIONS[kind](r, w, eps=EPS) for r, w in zip(x, weights, strict=True)])
    assert torch.equal(torch.vmap(lambda r, w: OPERATIONS[kind](r, w, eps=EPS))(x, weights), expected)
    assert torch.equal(
        torch.vmap(lambda r: OPERATIONS[kind](r, eps=EPS), in_dims=1)(x)[:, 2], OPERATIONS[kind](x, eps=EPS)[2]
    )


def test_a_dispatch_mode_sees_one_operation(kind: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        OPERATIONS[kind](torch.ones(2, 4), eps=EPS)
    assert [name for name in seen if name.startswith("normswap")] == [f"normswap.{kind}_norm.default"]


@pytest.mark.parametrize("shape", ((0, 8), (3, 0), (0,), (2, 0, 8)))
def test_empty_inputs(kind: str, shape: tuple[int, ...]) -> None:
    assert OPERATIONS[kind](torch.ones(shape), torch.ones(shape[-1]), eps=EPS).shape == shape


X = torch.ones(2, 8)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    (
        ((None,), {}, TypeError, "expected x to be a tensor, got NoneType"),
        ((X.int(),), {}, TypeError, "expected x of dtype float32, float16, bfloat16.*got torch.int32: convert"),
        ((torch.tensor(1.0),), {}, ValueError, "expected x of shape .*pass at least one row"),
        ((X, torch.ones(7)), {}, ValueError, r"expected weight of shape \(8,\).*got \(7,\): pass"),
        ((X, torch.ones(1, 8)), {}, ValueError, r"expected weight of shape \(8,\).*got \(1, 8\)"),
        ((X, None, torch.ones(9)), {}, ValueError, r"expected bias of shape \(8,\).*got \(9,\)"),
        ((X, torch.ones(8).int()), {}, TypeError, "expected weight of dtype .*got torch.int32: convert"),
        ((X, [1.0] * 8), {}, TypeError, "expected weight to be a tensor or None, got list"),
        ((X, torch.ones(8, device="meta")), {}, ValueError, "expected weight on the device of x, cpu, got meta: move"),
        ((X,), {"eps": -1e-6}, ValueError, "expected a finite eps of 0 or more, got -1e-06: pass"),
        ((X,), {"eps": float("nan")}, ValueError, "expected a finite eps of 0 or more, got nan"),
        ((X,), {"eps": "1e-6"}, TypeError, "expected eps and offset to be numbers, got str"),
        ((X,), {"round_dtype": torch.int8}, TypeError, "expected round_dtype and out_dtype to be floating"),
        ((X,), {"out_dtype": torch.int8}, TypeError, "expected round_dtype and out_dtype to be floating"),
        ((X,), {"backend": "cuda"}, ValueError, "expected a backend among auto, triton, cpu, interpret, got 'cuda'"),
        ((X,), {"backend": "triton"}, BackendUnavailable, "got device 'cpu': move the tensors to a GPU, or choose"),
    ),
)
def test_bad_input_is_refused_in_words(
    kind: str, arguments: tuple[Any, ...], options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        OPERATIONS[kind](*arguments, **{"eps": EPS, **options})
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


def test_interpreter_after_a_compiled_import_is_refused() -> None:
    pytest.importorskip("triton.language")
    with pytest.raises(BackendUnavailable, match="start a new process with TRITON_INTERPRET=1"):
        rms_norm(X, eps=EPS, backend="interpret")


def test_missing_triton_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "triton", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(BackendUnavailable, match="needs the package triton, which is not installed: pip install"):
        check_backend("interpret", "cpu")


def test_layers_are_stateless_and_do_what_they_replace() -> None:
    for layer in (layers.RMSNorm, layers.LayerNorm):
        assert layer.__init__ is nn.Module.__init__
        own = {name for name in dir(layer) if name not in dir(nn.Module)}
        assert own <= {"can_torch_compile", "has_backward"}
    x = torch.randn(5, 48).to(BF16)
    norm = LlamaRMSNorm(48).to(BF16)
    assert torch.equal(layers.RMSNorm.forward(norm, x), norm(x))
    layer_norm_module = nn.LayerNorm(48)
    assert torch.equal(layers.LayerNorm.forward(layer_norm_module, x.float()), layer_norm_module(x.float()))
