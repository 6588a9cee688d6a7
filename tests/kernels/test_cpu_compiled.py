"""The compiled CPU path: torch's bits, and gates within the bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import pytest
import torch
from norm_cases import BF16, CHOICES, FP16, FP32, SCALED, Case, check, check_statistics, covering_cases
from normswap_kernels import cpu, cpu_build, cpu_check, cpu_compiled, cpu_library, rms_norm
from normswap_kernels.formula import Activation, Formula, GatePosition
from torch import Tensor

LLAMA = Formula("rms", 1e-6, 0.0, BF16, None, BF16)
COMPILER = cpu_build.find_compiler()

# What is compiled.
COVERED = {**CHOICES, "kind": ("rms",), "gate": ("none",), "eps_position": ("inside",)}
GATED = {**COVERED, "gate": ("before", "after")}

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, and finds none")


@pytest.fixture
def loaded() -> cpu_compiled.Library:
    """The library of this process."""
    found = cpu_library.library()
    assert found is not None, "there is a compiler, and no library"
    assert found.backward is not None and found.quantizes and found.gates, "the library does not agree with torch"
    return found


@pytest.fixture
def ran(loaded: cpu_compiled.Library, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What the library was called with since."""
    packed: list[bytes] = []

    def counted(function: Callable[[bytes], None]) -> Callable[[bytes], None]:
        return lambda call: (packed.append(call), function(call))[1]

    changed = loaded._replace(forward=counted(loaded.forward), backward=counted(loaded.backward))
    monkeypatch.setattr(cpu_library, "_library", changed)
    return packed


@pytest.mark.parametrize(
    "case", [*covering_cases(choices=COVERED), *covering_cases(300_000, {**COVERED, **SCALED})], ids=str
)
def test_gives_the_bits_of_torchs_operations(case: Case, ran: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    ours = cpu.forward(case.formula(), *case.inputs(), True)
    assert len(ran) == (case.rows > 0), "the case is covered, and was not compiled"
    monkeypatch.setattr(cpu_library, "_library", None)
    theirs = cpu.forward(case.formula(), *case.inputs(), True)
    for found, expected in zip(ours, theirs, strict=True):
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found.stride() == expected.stride()
            assert torch.equal(found, expected)


@pytest.mark.parametrize("case", covering_cases(300_000, GATED), ids=str)
def test_a_gate_is_compiled_and_within_the_bounds(case: Case, ran: list[bytes]) -> None:
    formula, inputs, shape = case.formula(), case.inputs(), case.shape
    result, summed, scale, _ = cpu.forward(formula, *inputs, True)
    check(case, result, summed)
    assert scale is not None
    if not case.rows:
        return
    check_statistics(case, scale.reshape(case.rows, -1), None)
    assert len(ran) == 1, "the case is covered, and was not compiled"
    row = inputs.x if summed is None else summed
    cpu.backward(formula, torch.ones(shape), None, row, inputs.gate, inputs.weight, None, scale, None)
    assert len(ran) == 1 + (not case.partial), "the gradients are covered, and were not compiled"


def sigmoid_and_silu(gate: Tensor, position: GatePosition) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield activations of a gate, and what they are in float64; by way of rows of ones, which are their own norm."""
    activations: tuple[Activation, ...] = ("sigmoid", "silu")
    for activation in activations:
        formula = Formula("rms", 0.0, 0.0, None, None, FP32, gate_position=position, activation=activation)
        truth = torch.sigmoid(gate.double()) * (gate.double() if activation == "silu" else 1.0)
        if position == "after":
            yield cpu.forward(formula, torch.ones_like(gate), None, gate, None, None, False)[0], truth
        else:
            # What was normalised is the result by its scale.
            rows = gate.view(-1, 1)
            y, _, scale, _ = cpu.forward(formula._replace(eps=1.0), torch.ones_like(rows), None, rows, None, None, True)
            assert scale is not None
            yield (y / scale).view(gate.shape), truth


@pytest.mark.parametrize("position", ("before", "after"))
def test_the_exponential_is_that_of_float64(position: GatePosition, ran: list[bytes]) -> None:
    limits = torch.finfo(FP32)
    gate = torch.cat([torch.linspace(-110, 110, 200_003), torch.logspace(-45, 0, 5000), -torch.logspace(-45, 2, 5000)])
    for found, truth in sigmoid_and_silu(gate, position):
        # Past float32 the exponential is infinite.
        finite = gate >= -math.log(limits.max)
        units = (found.double() - truth).abs() / (limits.eps * (truth.abs() + limits.smallest_normal))
        assert units[finite].max() <= (1.5 if position == "after" else 2.0), f"off by {units[finite].max()} units"
        assert (found[~finite] == 0).all()
    assert len(ran) == 2


def test_a_gate_that_is_no_number_gives_none(ran: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    gate = torch.tensor([torch.nan, -torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 3e38, -3e38, 1e-45])
    ours = [found for found, _ in sigmoid_and_silu(gate, "after")]
    assert len(ran) == 2
    monkeypatch.setattr(cpu_library, "_library", None)
    for found, (expected, _) in zip(ours, sigmoid_and_silu(gate, "after"), strict=True):
        assert found[:2].isnan().all()
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("low", (0, 0x7FFF, 0x8000, 0x8001, 0x1000), ids=hex)
@pytest.mark.parametrize("dtype", (FP16, BF16), ids=str)
def test_rounds_every_number_as_torch_does(dtype: torch.dtype, low: int) -> None:
    # eps alone makes the scale, a power of two: below, at and above the middle between two numbers, to denormals.
    x = (torch.arange(2**16, dtype=torch.int32) << 16 | low).view(FP32)
    for exponent in (-63, -20, 0):
        formula = LLAMA._replace(eps=2.0 ** (-2 * exponent), round_dtype=dtype, out_dtype=FP32)
        rows = x[x.abs() < 2.0 ** (-exponent - 14)]
        rows = rows[: rows.numel() // 17 * 17].view(-1, 17)
        found = cpu.forward(formula, rows, None, None, torch.full((17,), 2.0**63), None, False)[0]
        assert torch.equal(found, (rows * 2.0**exponent).to(dtype).float() * 2.0**63)


def test_what_is_not_covered_is_not_compiled() -> None:
    for formula in (
        LLAMA._replace(kind="layer"),
        LLAMA._replace(eps_position="clamp"),
        LLAMA._replace(out_dtype=FP16),
        LLAMA._replace(round_dtype=torch.float64),
    ):
        assert cpu_compiled.plan_forward(formula, BF16, None, 8) is None
    assert cpu_compiled.plan_forward(LLAMA, torch.float64, None, 8) is None
    assert cpu_compiled.plan_forward(LLAMA, BF16, None, 8) is not None
    x, rstd = torch.empty(1, 8), torch.empty(1, 1)
    assert cpu_compiled.covers_backward(LLAMA._replace(gate_position="after"), x, None, x, rstd, None)
    assert cpu_compiled.covers_backward(LLAMA._replace(kind="layer"), x, None, x, rstd, rstd)
    assert not cpu_compiled.covers_backward(LLAMA._replace(kind="layer", gate_position="after"), x, None, x, rstd, rstd)
    assert not cpu_compiled.covers_backward(LLAMA, x, None, x, rstd.double(), None)
    assert not cpu_compiled.covers_backward(LLAMA._replace(kind="layer"), x, None, x, rstd, rstd.double())


def test_a_library_that_gives_other_bits_is_not_used(loaded: cpu_compiled.Library) -> None:
    assert cpu_check.prove(loaded) == loaded
    assert cpu_check.prove(loaded._replace(forward=lambda packed: None)) is None
    # The other numbers of lanes would give sums in another order.
    others = [lanes for lanes in cpu_check._LANES if lanes != loaded.lanes]
    x = torch.randn(64, 4096)
    plan = cpu_compiled.plan_forward(LLAMA._replace(round_dtype=None, out_dtype=FP32), FP32, None, 4096)
    assert plan is not None
    results = [torch.empty_like(x) for _ in cpu_check._LANES]
    for lanes, result in zip((loaded.lanes, *others), results, strict=True):
        changed = loaded._replace(lanes=lanes)
        cpu_compiled.forward(changed, plan, (64, 1, 4096), x, None, None, None, None, result, None, None)
    assert not torch.equal(results[0], results[1]) and not torch.equal(results[0], results[2])


def test_what_alone_differs_from_torch_is_left_out(loaded: cpu_compiled.Library) -> None:
    found = cpu_check.prove(loaded._replace(backward=lambda packed: None))
    assert found is not None and found.backward is None and found.quantizes

    def without_values(packed: bytes) -> None:
        if not cpu_compiled._FORWARD.unpack(packed)[24]:
            loaded.forward(packed)

    plan = cpu_compiled.plan_forward(LLAMA, BF16, None, 8, torch.int8)
    assert plan is not None and plan[5] == 1
    found = cpu_check.prove(loaded._replace(forward=without_values))
    assert found is not None and not found.quantizes and found.gates and found.backward is not None


@pytest.mark.parametrize("name", ("forward", "backward"))
def test_without_its_gates_the_library_leaves_them_to_torch(
    name: str, loaded: cpu_compiled.Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, gated = (cpu_compiled._FORWARD, 33) if name == "forward" else (cpu_compiled._BACKWARD, 30)
    function, ran = getattr(loaded, name), []

    def with_the_other_activation(packed: bytes) -> None:
        fields = list(layout.unpack(packed))
        ran.append(fields[gated])
        if fields[gated]:
            fields[gated + 1] = 1 - fields[gated + 1]
        function(layout.pack(*fields))

    found = cpu_check.prove(loaded._replace(**{name: with_the_other_activation}))
    assert found is not None and not found.gates and found.quantizes and found.backward is not None
    monkeypatch.setattr(cpu_library, "_library", found)
    ran.clear()
    formula, x = LLAMA._replace(gate_position="after"), torch.randn(2, 8).to(BF16)
    _, _, scale, _ = cpu.forward(formula, x, None, x, None, None, True)
    assert scale is not None
    cpu.backward(formula, x, None, x, x, None, None, scale, None)
    assert not ran


def test_a_region_within_a_region_does_not_wait_for_ever(loaded: cpu_compiled.Library) -> None:
    # More threads are asked for than OpenMP gives.
    before = torch.get_num_threads()
    x = torch.randn(5000, 128)
    alone = rms_norm(x, eps=1e-6)
    torch.set_num_threads(64)
    try:
        assert torch.equal(rms_norm(x, eps=1e-6), alone)
    finally:
        torch.set_num_threads(before)
