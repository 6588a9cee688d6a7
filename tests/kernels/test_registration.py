"""The operations under torch's own machinery: registration, compilation, export, fake tensors, transforms."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from normswap_kernels import add_rms_norm, gated_rms_norm, layer_norm, registration, rms_norm_quant
from operation_cases import CALLS, EPS, formula_of, listed, tensors_of
from torch import Tensor, nn

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(params=CALLS)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
@pytest.mark.parametrize("transposed", (False, True))
def test_opcheck(case: str, dtype: torch.dtype, transposed: bool) -> None:
    name, _, _ = CALLS[case]
    formula = formula_of(case, dtype, round_dtype=dtype, product_dtype=dtype)
    for recording in (False, True):
        x, other, weight, bias = tensors_of(case, (4, 3, 16), dtype)
        weight, bias = weight.float(), bias.float()
        if transposed:
            x, other = x.transpose(0, 1), other.transpose(0, 1)
        residual, gate = (other if "add" in case else None), (other if "gate" in case else None)
        tensors = [x, residual, gate, weight, None if "gate" in case else bias]
        for t in tensors:
            if t is not None and recording:
                t.requires_grad_()
        torch.library.opcheck(registration.FORWARD[name], (*tensors, *formula, recording, "auto"))


def test_opcheck_of_the_quantizing_norm_and_of_a_backward() -> None:
    x, weight = torch.randn(4, 16, dtype=BF16), torch.randn(16)
    for dtype in (torch.int8, torch.float8_e4m3fn):
        torch.library.opcheck(registration.QUANTIZE, (x, weight, None, *formula_of("rms", BF16), dtype, "cpu"))
    formula = formula_of("layer", FP32)
    scale, mean = torch.rand(4, 1), torch.randn(4, 1)
    arguments = torch.randn(4, 16), None, torch.randn(4, 16), None, weight, FP32, scale, mean
    torch.library.opcheck(registration.BACKWARD["layer_norm"], (*arguments, *formula, True, "cpu"))


@pytest.mark.parametrize("dynamic", (False, True))
def test_compiles_to_one_graph(case: str, dynamic: bool) -> None:
    _, call, _ = CALLS[case]
    torch.compiler.reset()
    weight, bias = torch.randn(32, requires_grad=True), torch.randn(32, requires_grad=True)

    def model(x: Tensor, other: Tensor) -> Tensor:
        return sum(result.sin() for result in listed(call(x, other, weight, bias)))  # type: ignore[return-value]

    compiled = torch.compile(model, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for rows in (3, 8):
        x, other = torch.randn(rows, 32, requires_grad=True), torch.randn(rows, 32)
        assert torch.equal(compiled(x, other), model(x, other))
        (theirs,) = torch.autograd.grad(model(x, other).sum(), x)
        weight.grad = None
        compiled(x, other).sum().backward()
        torch.testing.assert_close(x.grad, theirs)
        assert weight.grad is not None
        with torch.no_grad():
            assert torch.equal(compiled(x, other), model(x, other))


def test_inductor_compiles_a_block_to_one_graph() -> None:
    torch.compiler.reset()
    weight = torch.randn(32, dtype=BF16)

    def block(x: Tensor, residual: Tensor) -> tuple[Tensor, ...]:
        y, h = add_rms_norm(x, residual, weight, eps=EPS, round_dtype=BF16)
        values, scales = rms_norm_quant(h, weight, eps=EPS)
        return gated_rms_norm(y, h, weight, eps=EPS), layer_norm(h, eps=EPS), values, scales

    x, residual = torch.randn(5, 32, dtype=BF16), torch.randn(5, 32, dtype=BF16)
    for a, b in zip(torch.compile(block, fullgraph=True)(x, residual), block(x, residual), strict=True):
        assert torch.equal(a, b)


def test_exports(case: str) -> None:
    name, call, _ = CALLS[case]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))

        def forward(self, x: Tensor, other: Tensor) -> Any:
            return call(x, other, self.weight, self.bias)

    model, given = Model(), (torch.randn(4, 16), torch.randn(4, 16))
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, given, dynamic_shapes=({0: batch}, {0: batch}))
    targets = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    assert f"normswap.{name}.default" in targets
    more = torch.randn(7, 16), torch.randn(7, 16)
    for a, b in zip(listed(program.module()(*more)), listed(model(*more)), strict=True):
        assert torch.equal(a, b)


def test_meta_tensors_give_meta_tensors(case: str) -> None:
    _, call, _ = CALLS[case]
    x, other, weight, bias = (t.to("meta") for t in tensors_of(case, (2, 8), BF16))
    for result in listed(call(x, other, weight, bias, out_dtype=FP32)):
        assert result.is_meta and result.shape == x.shape
    values, scales = rms_norm_quant(x, eps=EPS)
    assert values.is_meta and values.dtype == torch.int8 and scales.shape == (2, 1)


def test_fake_tensors_match_in_strides(case: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    _, call, _ = CALLS[case]
    tensors = [torch.randn(2, 3, 4, 8).transpose(1, 2) for _ in range(2)] + [torch.randn(8), torch.randn(8)]
    with FakeTensorMode() as mode:
        fakes = listed(call(*(mode.from_tensor(t) for t in tensors)))
    for fake, real in zip(fakes, listed(call(*tensors)), strict=True):
        assert fake.stride() == real.stride() and fake.dtype == real.dtype


def test_a_dispatch_mode_sees_one_operation(case: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    name, call, _ = CALLS[case]
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Watch():
        call(*tensors_of(case, (2, 8), FP32))
    assert [name for name in seen if name.startswith("normswap")] == [f"normswap.{name}.default"]


def test_transforms_are_refused_in_words(case: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    name, call, _ = CALLS[case]
    x, other, weight, bias = tensors_of(case, (2, 3, 8), FP32)

    def function(x: Tensor) -> Any:
        return listed(call(x, other[0], weight, bias))[0]

    with pytest.raises(NotImplementedError, match=f"expected {name} outside .*vmap call it on the whole batch"):
        torch.vmap(function)(x)
    with pytest.raises(NotImplementedError, match="instead of grad call backward"):
        torch.func.grad(lambda x: function(x).sum())(x[0])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=f"expected {name} outside forward-mode"):
        function(forward_ad.make_dual(x[0], x[1]))
    with forward_ad.dual_level():
        assert torch.isfinite(function(x[0])).all()


def test_the_backward_refuses_transforms_too(case: str) -> None:
    import torch.autograd.forward_ad as forward_ad

    name, call, _ = CALLS[case]
    x, other, weight, bias = tensors_of(case, (3, 8), BF16)
    y = listed(call(x.requires_grad_(), other, weight, bias))[0]
    grads = torch.ones(2, *y.shape, dtype=y.dtype)
    with pytest.raises(NotImplementedError, match=f"expected the backward of {name} outside the transforms"):
        torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="outside forward-mode"):
        torch.autograd.grad(y, x, forward_ad.make_dual(grads[0], grads[1]))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_of_torch_jit_sees_the_operation(case: str) -> None:
    _, call, _ = CALLS[case]
    _, other, weight, bias = tensors_of(case, (4, 8), FP32)

    def function(x: Tensor) -> Tensor:
        return listed(call(x, other[:1].expand(len(x), 8), weight, bias))[0]

    traced = torch.jit.trace(function, (torch.randn(4, 8),))
    x = torch.randn(4, 8)
    assert torch.equal(traced(x), function(x))


def test_negated_views_are_negated(case: str) -> None:
    _, call, _ = CALLS[case]
    tensors = tensors_of(case, (4, 8), FP32)
    negated = [torch._neg_view(-t) for t in tensors]
    assert all(t.is_neg() for t in negated)
    for a, b in zip(listed(call(*negated)), listed(call(*tensors)), strict=True):
        assert torch.equal(a, b)
    values, scales = rms_norm_quant(negated[0], negated[2], eps=EPS)
    expected, its_scales = rms_norm_quant(tensors[0], tensors[2], eps=EPS)
    assert torch.equal(values, expected) and torch.equal(scales, its_scales)
