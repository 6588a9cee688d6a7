"""Memory that the package asks for is poisoned in tests, and nobody else's is."""

from __future__ import annotations

import pytest
import torch

ALLOCATIONS = (
    "torch.empty(3)",
    "torch.empty_like(torch.ones(3))",
    "torch.empty_strided((3,), (1,))",
    "torch.ones(3).new_empty(3)",
    "torch.ones(3).new_empty_strided((3,), (1,))",
)


@pytest.mark.parametrize("package", ["normswap", "normswap.somewhere", "normswap_kernels.somewhere"])
@pytest.mark.parametrize("allocation", ALLOCATIONS)
def test_memory_of_the_package_is_nan(allocation: str, package: str) -> None:
    assert eval(allocation, {"torch": torch, "__name__": package}).isnan().all()


def test_other_memory_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    filled = []
    monkeypatch.setattr(torch.Tensor, "fill_", lambda tensor, value: filled.append(value))
    for allocation in ALLOCATIONS:
        eval(allocation, {"torch": torch, "__name__": "normswapper"})
    assert filled == []


def test_compiler_can_trace_poisoned_memory() -> None:
    @torch.compile(fullgraph=True, backend="eager")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x)
        out.copy_(2 * x)
        return out

    assert torch.equal(doubled(torch.ones(4)), torch.full((4,), 2.0))
