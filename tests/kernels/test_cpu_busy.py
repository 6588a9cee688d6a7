"""A busy CPU: one thread does the work without a compiler, and gives the same."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from norm_cases import BF16, FP32
from normswap_kernels import cpu, cpu_blocks, cpu_blocks_backward, cpu_busy, cpu_compiled, cpu_library
from normswap_kernels.formula import Formula


@pytest.mark.parametrize("shape", ((3000, 512), (40, 40_000), (2, 200_000), (1, 300_000), (300_000, 1)), ids=str)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_a_busy_machine_gets_the_same_from_one_thread(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "_looked_for", True)
    monkeypatch.setattr(cpu_library, "_library", None)
    x, residual, gate = (torch.randn(shape).to(dtype) for _ in range(3))
    weight, groups = torch.randn(shape[1]).to(dtype), 2 if shape[1] > 1 else 1
    plain = Formula("rms", 1e-6, 0.0, dtype, None, dtype)
    added, layer = plain._replace(sum_dtype=dtype), plain._replace(kind="layer")
    gated = plain._replace(groups=groups, gate_position="after")

    def results() -> list[torch.Tensor | None]:
        return [
            *cpu.forward(plain, x, None, None, weight, weight, True),
            *cpu.forward(added, x, residual, None, weight, None, True),
            *cpu.forward(layer, x, None, None, weight, None, True),
            *cpu.forward(gated, x, None, gate, weight, None, True),
            *cpu.quantize(plain, x, weight, None, torch.int8),
        ]

    largest = []

    def forward(formula: Formula, rows: torch.Tensor, *arguments: Any) -> None:
        largest.append(rows.numel())
        block_forward(formula, rows, *arguments)

    def quantize(y: torch.Tensor, *arguments: torch.Tensor) -> None:
        largest.append(y.numel())
        block_quantize(y, *arguments)

    block_forward, block_quantize = cpu_blocks.forward, cpu_blocks.quantize
    monkeypatch.setattr(cpu_blocks, "forward", forward)
    monkeypatch.setattr(cpu_blocks, "quantize", quantize)
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for runnable in (1, os.cpu_count(), 1000):
            monkeypatch.setattr(cpu_busy, "_runnable", lambda: runnable)  # noqa: B023
            largest.clear()
            found.append(results())
            row = max(shape[1], cpu_blocks.SERIAL - 1)
            assert (max(largest) <= row) == (runnable == 1000 or x.numel() <= row)
    finally:
        torch.set_num_threads(threads)
    for once, again, busy in zip(*found, strict=True):
        assert (once is None) == (busy is None)
        if once is not None and again is not None and busy is not None:
            assert torch.equal(once, again) and torch.equal(once, busy)


@pytest.mark.parametrize(
    "shape", ((3000, 512), (300, 1746), (13, 40_000), (2, 200_000), (300_000, 1), (5, 700_000)), ids=str
)
@pytest.mark.parametrize("dtype", (FP32, BF16), ids=str)
def test_a_busy_machine_gets_the_same_gradients_from_one_thread(
    dtype: torch.dtype, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_library, "_looked_for", True)
    monkeypatch.setattr(cpu_library, "_library", None)
    row, grad, gate = (torch.randn(shape).to(dtype) for _ in range(3))
    weight, groups = torch.randn(shape[1]).to(dtype), 2 if shape[1] > 1 else 1
    plain = Formula("rms", 1e-6, 0.0, None, None, dtype)
    gated = plain._replace(groups=groups, gate_position="before")

    def results() -> list[torch.Tensor | None]:
        found: list[torch.Tensor | None] = []
        for formula, beside, bias, grad_sum in (
            (plain, None, dtype, grad),
            (plain._replace(kind="layer"), None, dtype, None),
            (gated, gate, None, None),
            (plain._replace(gate_position="after", eps_position="outside"), gate, None, grad),
        ):
            scale, mean = cpu.forward(formula, row, None, beside, weight, None, True)[2:]
            assert scale is not None
            found += cpu.backward(formula, grad, grad_sum, row, beside, weight, bias, scale, mean)
        return found

    largest = []

    def differentiate(formula: Formula, given: torch.Tensor, *arguments: Any) -> Any:
        largest.append(given.numel())
        return part_differentiate(formula, given, *arguments)

    part_differentiate = cpu_blocks_backward._differentiate
    monkeypatch.setattr(cpu_blocks_backward, "_differentiate", differentiate)
    found, threads = [], torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for runnable in (1, 1000):
            monkeypatch.setattr(cpu_busy, "_runnable", lambda: runnable)  # noqa: B023
            largest.clear()
            found.append(results())
            row_or_less = max(shape[1], cpu_blocks.SERIAL - 1)
            assert (max(largest) <= row_or_less) == (runnable == 1000 or shape[1] == 700_000)
    finally:
        torch.set_num_threads(threads)
    for once, busy in zip(*found, strict=True):
        assert (once is None) == (busy is None)
        assert once is None or busy is None or torch.equal(once, busy)


@pytest.mark.parametrize("content", ("0.00 0.01 0.05 7/107 12345", "", "0.00 0.01", None))
def test_what_can_run_is_read_from_the_system(
    content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "loadavg"
    if content is not None:
        file.write_text(f"{content}\n")
    monkeypatch.setattr(cpu_busy, "_LOAD", file)
    assert cpu_busy._runnable() == (7 if content and "/" in content else 0)
    for cores, busy in ((6, True), (7, False)):
        monkeypatch.setattr(os, "cpu_count", lambda: cores)  # noqa: B023
        assert cpu_busy.is_busy() == (busy and cpu_busy._runnable() == 7)


def test_what_is_compiled_stays_in_one_thread_where_the_machine_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for runnable, expected in ((1, 2), (1000, 1)):
            monkeypatch.setattr(cpu_busy, "_runnable", lambda: runnable)  # noqa: B023
            assert cpu_compiled._threads(2**19, 64) == expected
            assert cpu_compiled._threads(2**19 - 1, 64) == 2
            assert cpu_compiled._threads(2**10, 64) == 1
    finally:
        torch.set_num_threads(threads)


def test_a_small_input_does_not_ask_how_busy_the_system_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "_looked_for", True)
    monkeypatch.setattr(cpu_library, "_library", None)
    asked: list[None] = []
    monkeypatch.setattr(cpu_busy, "_runnable", lambda: asked.append(None) or 0)
    cpu.forward(Formula("rms", 1e-6, 0.0, FP32, None, FP32), torch.randn(1, 4096), None, None, None, None, False)
    assert not asked
    cpu.forward(Formula("rms", 1e-6, 0.0, FP32, None, FP32), torch.randn(64, 4096), None, None, None, None, False)
    assert asked
