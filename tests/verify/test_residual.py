"""The residual stream: which modules are layers, and where one run departs from another."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from parity_models import Pair, Swapped
from torch import nn

from normswap.figures import Criterion
from normswap.residual import Stream, layers_of
from normswap.stacking import Group
from normswap.stats import relative

pytestmark = pytest.mark.core


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(width, width))])

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return x + self.linear(x), None


class Stack(nn.Module):
    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.projections = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x, _ = block(x)
        return x


def test_layers_are_entries_of_the_outermost_lists_that_have_parts() -> None:
    assert [layer.name for layer, _ in layers_of(Stack())] == ["blocks.0", "blocks.1", "blocks.2"]
    assert [(layer.stack, layer.index) for layer, _ in layers_of(Stack())][-1] == ("blocks", 2)
    both = nn.ModuleDict({"encoder": Stack(), "decoder": Stack()})
    assert [layer.stack for layer, _ in layers_of(both)] == ["encoder.blocks"] * 3 + ["decoder.blocks"] * 3


def test_rows_of_a_batch_are_compared_sequence_by_sequence_without_padding() -> None:
    torch.manual_seed(0)
    model, x = Stack(), torch.randn(2, 5, 6)
    valid = torch.tensor([[True] * 5, [False, False, True, True, True]])
    group = Group({"ids": torch.zeros(2, 5, dtype=torch.long)}, [3, 7], valid)
    stream = Stream(8)
    with torch.no_grad(), stream.keeping(model, lambda: group):
        model(x)
    spoiled = x.clone()
    spoiled[1, 0] = 100.0  # under the padding
    with torch.no_grad(), stream.comparing(model, lambda: group) as found:
        model(spoiled)
    assert stream.order == ["blocks.0", "blocks.1", "blocks.2"]
    assert {sequence: error for sequence, (error, _) in found["blocks.2"].items()} == {3: 0.0, 7: 0.0}
    spoiled[1, 4] += 1.0
    with torch.no_grad(), stream.comparing(model, lambda: group) as found:
        model(spoiled)
    assert found["blocks.0"][3][0] == 0 and found["blocks.0"][7][0] > 0


def test_few_rows_are_kept_of_many_layers() -> None:
    group = Group({}, [0])
    stream = Stream(1, most=3 * 6 * 10)
    with torch.no_grad(), stream.keeping(model := Stack(), lambda: group):
        model(torch.randn(1, 500, 6))
    assert [len(kept[0][0]) for kept in stream.kept.values()] == [10, 10, 10]


def _errors(rows: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Relative error of each layer in a stack that hands on what it is given."""
    group, stream, model = Group({}, [0]), Stream(1), Stack()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        with stream.keeping(model, lambda: group):
            model(rows)
        with stream.comparing(model, lambda: group) as found:
            model(other)
    return [relative([error], [count]) for error, count in (found[name][0] for name in stream.order)]


def test_one_row_that_outweighs_all_others_hides_nothing() -> None:
    rows = torch.ones(1, 4, 6) * torch.tensor([1e4, 1, 1, 1])[:, None]
    other = rows * torch.tensor([1.0, 1, 1 + 2**-7, 1])[:, None]
    assert _errors(rows, other) == pytest.approx([2**-8] * 3)


def test_a_row_of_zeros_counts_by_the_size_of_the_others() -> None:
    rows = torch.tensor([0.0, 1, 1, 1])[:, None].expand(1, 4, 6)
    assert _errors(rows, rows.clone()) == [0.0] * 3
    assert _errors(rows, rows + torch.tensor([2.0**-20, 0, 0, 0])[:, None]) == pytest.approx([2**-21 * 1e3] * 3)
    none = torch.zeros(1, 4, 6)
    assert _errors(none, none) == [0.0] * 3
    assert min(_errors(none, none + 1.0)) > 1


class EndsInNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.norm(x + self.linear(x)), None


@pytest.mark.parametrize(("folded", "compared"), [(["blocks.1.norm"], [0, 2]), (["blocks.9.norm"], [0, 1, 2])])
def test_what_a_folded_norm_returns_is_not_compared(folded: list[str], compared: list[int]) -> None:
    model, x, stream = Stack(), torch.randn(1, 4, 6), Stream(1)
    model.blocks[1] = EndsInNorm()  # type: ignore[assignment]
    group = Group({}, [0])
    with torch.no_grad(), stream.keeping(model, lambda: group):
        model(x)
    with torch.no_grad(), stream.comparing(model, lambda: group, folded) as found:
        model(x)
    assert sorted(found) == [f"blocks.{at}" for at in compared]
    assert stream.folded == ({"blocks.1": "blocks.1.norm"} if len(compared) == 2 else {})
    model.blocks[1].norm.weight.data.mul_(2.0)
    with torch.no_grad(), stream.comparing(model, lambda: group) as found:
        model(x)
    assert found["blocks.1"][0][0] > 0


def test_another_shape_is_nan() -> None:
    group, stream = Group({}, [0]), Stream(1)
    model = Stack()
    with torch.no_grad(), stream.keeping(model, lambda: group):
        model(torch.randn(1, 4, 6))
    with torch.no_grad(), stream.comparing(model, lambda: group) as found:
        model(torch.randn(1, 3, 6))
    assert math.isnan(found["blocks.0"][0][0])


def _scaled(at: int) -> Callable[[list[Swapped]], None]:
    def fault(norms: list[Swapped]) -> None:
        norms[at].scale = 1.02

    return fault


@pytest.mark.parametrize(("norm", "layer"), [(0, "model.layers.0"), (3, "model.layers.1"), (4, None)])
def test_the_first_layer_that_departs_is_named(norm: int, layer: str | None) -> None:
    report = Pair(_scaled(norm)).measure()
    assert report.verdict == "fail" and report.departs == layer
    assert [one.departs for one in report.layers] == [layer is not None and one.name >= layer for one in report.layers]


def test_a_right_conversion_departs_nowhere() -> None:
    report = Pair().measure()
    assert report.passed and report.departs is None
    assert [layer.name for layer in report.layers] == ["model.layers.0", "model.layers.1"]
    for layer in report.layers:
        assert 0 < layer.error_exact < 1e-6
        assert layer.ratio == pytest.approx(layer.error_converted / layer.error_original)


def test_a_bound_that_the_original_fails_itself_is_told_and_judged_in_float64() -> None:
    # Llama's norms compute in float32 even in a model in float64, so no tighter bound can be kept there.
    tight = Criterion(exact_bound=1e-7)
    right = Pair().measure(criterion=tight)
    assert right.exact.dtype == "float64" and right.exact.error < 1e-7 < right.exact.error_original
    assert not [failure for failure in right.failures if failure.startswith("exact")]
    assert [note for note in right.notes if "the original itself fails this bound" in note]
    wrong = Pair(_scaled(2)).measure(criterion=tight)
    assert [failure for failure in wrong.failures if failure.startswith("exact: error")]
    usual = Pair(_scaled(2)).measure()
    assert usual.exact.dtype == "float32" and 0 < usual.exact.error_original < 1e-6
