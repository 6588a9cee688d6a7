"""The Triton kernels on a GPU: what the interpreter cannot show. ``test_devices.py`` runs its whole grid there too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from normswap_kernels import add_rms_norm, layer_norm, rms_norm, rms_norm_quant
from operation_cases import CALLS, listed, tensors_of
from torch import Tensor

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16


@pytest.fixture
def large(device: torch.device) -> Iterator[None]:
    """Room for tensors of more than two billion elements."""
    free, _ = torch.cuda.mem_get_info(device)
    if free < 40e9:
        pytest.skip(f"needs 40 GB of free memory, got {free / 1e9:.0f}")
    yield
    torch.cuda.empty_cache()


def inputs(name: str, device: torch.device, shape: tuple[int, int] = (37, 1024)) -> list[Tensor]:
    return [t.to(device, BF16) for t in tensors_of(name, shape, torch.float32)]


@pytest.mark.usefixtures("large")
def test_offsets_past_two_billion_elements(device: torch.device) -> None:
    rows, width = 2**19 + 3, 4096
    x = torch.zeros(rows, width, device=device, dtype=BF16)
    x[-1] = torch.arange(width, device=device)
    last = x[-1:].clone()
    weight = torch.randn(width, device=device)
    assert torch.equal(rms_norm(x, weight, eps=1e-6)[-1:], rms_norm(last, weight, eps=1e-6))
    assert torch.equal(layer_norm(x, weight, eps=1e-6)[-1:], layer_norm(last, weight, eps=1e-6))
    values, scales = rms_norm_quant(x, weight, eps=1e-6)
    expected, expected_scales = rms_norm_quant(last, weight, eps=1e-6)
    assert torch.equal(values[-1:], expected) and torch.equal(scales[-1:], expected_scales)


@pytest.mark.usefixtures("large")
def test_gradients_past_two_billion_elements(device: torch.device) -> None:
    rows, width = 2**19 + 3, 4096
    x = torch.zeros(rows, width, device=device, dtype=BF16)
    x[-1] = torch.arange(width, device=device)
    grad = torch.zeros_like(x)
    grad[-1] = torch.randn(width, device=device)
    weight = torch.randn(width, device=device, requires_grad=True)
    found = torch.autograd.grad(rms_norm(x.requires_grad_(), weight, eps=1e-6), (x, weight), grad)
    last = x[-1:].detach().clone().requires_grad_()
    expected = torch.autograd.grad(rms_norm(last, weight, eps=1e-6), (last, weight), grad[-1:])
    assert torch.equal(found[0][-1:], expected[0]) and not found[0][:-1].any()
    torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.usefixtures("large")
def test_strides_past_two_billion_elements(device: torch.device) -> None:
    far = torch.zeros(2**31 + 4096, device=device, dtype=BF16).as_strided((2, 4096), (2**31, 1))
    near = torch.randn(2, 4096, device=device).to(BF16)
    far.copy_(near)
    assert torch.equal(rms_norm(far, eps=1e-6), rms_norm(near, eps=1e-6))
    assert torch.equal(add_rms_norm(near, far, eps=1e-6)[0], add_rms_norm(near, near, eps=1e-6)[0])


@pytest.mark.parametrize("name", CALLS)
def test_runs_on_a_device_that_is_not_the_current_one(name: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    _, call, _ = CALLS[name]
    results, drawn = [], inputs(name, torch.device("cpu"))
    for index in (0, 1):
        tensors = [t.to(f"cuda:{index}").requires_grad_() for t in drawn]
        found = listed(call(*tensors))
        assert all(t.device.index == index for t in found) and torch.cuda.current_device() == 0
        torch.stack([t.float().sum() for t in found]).sum().backward()
        results.append([*found, tensors[0].grad])
    for first, second in zip(*results, strict=True):
        assert first is not None and second is not None
        assert torch.equal(first.cpu(), second.cpu())


@pytest.mark.parametrize("name", CALLS)
def test_compiles_with_inductor_forward_and_backward(name: str, device: torch.device) -> None:
    _, call, _ = CALLS[name]
    torch.compiler.reset()
    drawn = inputs(name, device)

    def model(*tensors: Tensor) -> Tensor:
        return torch.stack([(t * 2).float().square().mean() for t in listed(call(*tensors))]).sum()

    def run(function: object) -> tuple[Tensor, list[Tensor | None]]:
        tensors = [t.clone().requires_grad_() for t in drawn]
        loss: Tensor = function(*tensors)  # type: ignore[operator]
        loss.backward()
        return loss, [t.grad for t in tensors]

    loss, gradients = run(torch.compile(model, fullgraph=True))
    expected, expected_gradients = run(model)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=0)
    for gradient, right in zip(gradients, expected_gradients, strict=True):
        assert (gradient is None) == (right is None)
        if gradient is not None and right is not None:
            torch.testing.assert_close(gradient, right, rtol=0.02, atol=0.02 * float(right.abs().max()))


@pytest.mark.parametrize("name", CALLS)
def test_is_captured_in_a_graph_on_a_stream_of_its_own(name: str, device: torch.device) -> None:
    _, call, _ = CALLS[name]
    tensors = inputs(name, device)
    expected = listed(call(*tensors))
    fixed = [torch.zeros_like(t) for t in tensors]
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        listed(call(*fixed))
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = listed(call(*fixed))
    for t, value in zip(fixed, tensors, strict=True):
        t.copy_(value)
    graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(captured, expected, strict=True))


@pytest.mark.parametrize("name", CALLS)
def test_never_waits_for_the_device(name: str, device: torch.device) -> None:
    _, call, _ = CALLS[name]
    tensors = [t.requires_grad_() for t in inputs(name, device)]
    listed(call(*tensors))
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.stack([t.float().sum() for t in listed(call(*tensors))]).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("operation", (rms_norm, layer_norm))
def test_saves_nothing_but_the_statistics(operation: object, device: torch.device) -> None:
    x = torch.randn(4096, 4096, device=device).to(BF16).requires_grad_()
    weight = torch.randn(4096, device=device).to(BF16).requires_grad_()
    operation(x, weight, eps=1e-6)  # type: ignore[operator]
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    y = operation(x, weight, eps=1e-6)  # type: ignore[operator]
    statistics = 2 * 4 * 4096
    for used in (torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)):
        assert used - before <= y.numel() * y.element_size() + statistics + 4096
