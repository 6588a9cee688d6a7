"""Whatever rearranges whole axes is followed exactly; whatever does not is told apart."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_oracle import gathered

from normswap.labels import Unfollowable, compact, follow

pytestmark = pytest.mark.core

Tensors = dict[str, list[torch.Tensor]]


def check(convert: Callable[[Tensors], dict[str, torch.Tensor]], *shapes: tuple[int, ...]) -> dict[str, Any]:
    """Follow a conversion, and hold what was learnt against the conversion of random values."""
    layouts = follow(convert, {"in": list(shapes)})
    values = [torch.randn(shape, dtype=torch.float64) for shape in shapes]
    expected = convert({"in": list(values)})
    assert set(layouts) == set(expected)
    for name, layout in layouts.items():
        assert layout.shape == expected[name].shape
        pieces = [(part, values[part.source]) for part in layout.parts]
        assert torch.equal(gathered(layout.shape, pieces), expected[name])
    return layouts


def one(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], dict[str, torch.Tensor]]:
    return lambda tensors: {"out": function(tensors["in"][0])}


def test_a_square_transpose_is_told_from_none() -> None:
    kept = check(one(lambda value: value.clone()), (6, 6))["out"].parts[0]
    turned = check(one(lambda value: value.t().contiguous()), (6, 6))["out"].parts[0]
    assert kept.axes == (0, 1)
    assert turned.axes == (1, 0)


def test_a_stack_and_a_join_of_square_tensors() -> None:
    layout = check(
        lambda tensors: {"out": torch.cat([torch.stack(tensors["in"][:3]), torch.stack(tensors["in"][3:])], dim=1)},
        *[(5, 5)] * 6,
    )["out"]
    fourth = next(part for part in layout.parts if part.source == 4)
    assert fourth.axes == (None, 0, 1)
    assert fourth.positions == (range(1, 2), range(5, 10), range(5))


def test_a_split_gives_the_held_positions() -> None:
    layouts = check(lambda tensors: dict(zip("qkv", torch.split(tensors["in"][0], [6, 2, 2]), strict=True)), (10, 4))
    assert layouts["k"].parts[0].held == (range(6, 8), range(4))
    assert layouts["k"].parts[0].positions == (range(2), range(4))


def test_an_unstacked_tensor_is_held_in_part() -> None:
    layouts = check(
        lambda tensors: {f"{at}": value for at, value in enumerate(torch.unbind(tensors["in"][0]))}, (3, 4, 4)
    )
    assert layouts["2"].parts[0].held[0] == range(2, 3)
    assert layouts["2"].parts[0].axes == (1, 2)


def test_rotary_halves_are_permuted() -> None:
    def halves(value: torch.Tensor) -> torch.Tensor:
        return value.view(2, 3, 2, value.shape[1]).transpose(1, 2).reshape(12, value.shape[1])

    part = check(one(halves), (12, 5))["out"].parts[0]
    assert part.axes == (0, 1)
    assert isinstance(part.positions[0], tuple)
    assert part.positions[0][:4] == (0, 3, 1, 4)


def test_axes_of_one_position_are_paired_in_order() -> None:
    assert check(one(lambda value: value), (8, 1, 4))["out"].parts[0].axes == (0, 1, 2)
    assert check(one(lambda value: value.squeeze(1)), (8, 1, 4))["out"].parts[0].axes == (0, 2)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (lambda value: value * 2, "changes values"),
        (lambda value: value + value.flip(0), "changes values"),
        (lambda value: -value, "changes values"),
        (lambda value: torch.zeros_like(value), "changes values"),
        (lambda value: value.to(torch.bfloat16), "dtype"),
        (lambda value: value.expand(3, 4, 6), "repeats"),
        (lambda value: torch.cat([value, value]), "repeats"),
        (lambda value: value.reshape(24), "merges axes"),
        (lambda value: value.reshape(2, 2, 6), "several"),
        (lambda value: value.reshape(6, 4), "several"),
        (lambda value: value.tril(), "changes values"),
        (lambda value: value.missing, "cannot be tried: AttributeError"),
    ],
)
def test_what_is_no_rearrangement_of_axes_is_refused(function: Callable[..., torch.Tensor], reason: str) -> None:
    with pytest.raises(Unfollowable, match=reason):
        follow(one(function), {"in": [(4, 6)]})


def test_a_checkerboard_of_two_tensors_is_refused() -> None:
    board = torch.arange(4)[:, None] % 2 == torch.arange(4) % 2
    with pytest.raises(Unfollowable, match="position by position"):
        follow(lambda tensors: {"out": torch.where(board, *tensors["in"])}, {"in": [(4, 4), (4, 4)]})


def test_stacks_larger_than_memory_are_followed() -> None:
    shape = (16384, 5120)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def convert(tensors: Tensors) -> dict[str, torch.Tensor]:
        half = len(tensors["in"]) // 2
        joined = torch.cat([torch.stack(tensors["in"][:half]), torch.stack(tensors["in"][half:])], dim=1)
        return {"out": joined.transpose(1, 2).contiguous()}

    layout = follow(convert, {"in": [shape] * 128})["out"]
    assert layout.shape == (64, 5120, 32768)
    assert layout.parts[100].axes == (None, 1, 0)
    assert layout.parts[100].positions == (range(36, 37), range(5120), range(16384, 32768))
    # In KiB; the stack itself would take 80 GiB of labels.
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000


def test_what_takes_too_much_memory_to_follow_is_refused_and_not_tried() -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Unfollowable, match="too large"):
        follow(one(lambda value: value.roll(1, 0)), {"in": [(128, 5120, 16384)]})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000


@pytest.mark.parametrize(
    ("positions", "expected"),
    [
        ((), ()),
        ((3,), range(3, 4)),
        ((3, 4, 5), range(3, 6)),
        ((1, 3, 5), range(1, 6, 2)),
        ((1, 3, 4), (1, 3, 4)),
        ((2, 1), (2, 1)),
        ((2, 2), (2, 2)),
    ],
)
def test_even_positions_become_a_range(positions: tuple[int, ...], expected: object) -> None:
    assert compact(positions) == expected


@st.composite
def rearrangements(draw: st.DrawFn) -> tuple[int, tuple[int, ...], list[tuple[str, Any]]]:
    """Draw a number of tensors, their shape, and steps to take with them; a split only as the last."""
    count = draw(st.integers(1, 4))
    shape = tuple(draw(st.lists(st.integers(1, 4), min_size=1, max_size=3)))
    steps = draw(
        st.lists(
            st.tuples(st.sampled_from(["transpose", "permute", "stack", "cat", "interleave"]), st.integers(0, 10**6)),
            max_size=5,
        )
    )
    return count, shape, [*steps, ("split", draw(st.integers(0, 3)))] if draw(st.booleans()) else steps


def rearranged(values: list[torch.Tensor], steps: list[tuple[str, int]]) -> list[torch.Tensor]:
    for step, seed in steps:
        ndim = values[0].ndim
        dim = seed % max(ndim, 1)
        same = all(value.shape == values[0].shape for value in values)
        if step == "transpose":
            values = [value.transpose(dim, (seed // 7) % ndim).contiguous() for value in values]
        elif step == "permute":
            order = torch.randperm(values[0].shape[dim], generator=torch.Generator().manual_seed(seed))
            values = [value.index_select(dim, order) if len(order) == value.shape[dim] else value for value in values]
        elif step == "split":
            values = [piece for value in values for piece in value.chunk(2, dim)]
        elif step == "stack" and same and ndim < 5:
            values = [torch.stack(values, dim)]
        elif step == "cat" and same:
            values = [torch.cat(values, dim)]
        elif step == "interleave" and all(value.shape[dim] % 2 == 0 for value in values):
            values = [
                value.unflatten(dim, (2, value.shape[dim] // 2)).transpose(dim, dim + 1).reshape(value.shape)
                for value in values
            ]
    return values


@settings(max_examples=150, deadline=None)
@given(rearrangements())
def test_any_chain_of_rearrangements_is_followed(drawn: tuple[int, tuple[int, ...], list[tuple[str, int]]]) -> None:
    count, shape, steps = drawn
    check(
        lambda tensors: {f"{at}": value for at, value in enumerate(rearranged(tensors["in"], steps))},
        *[shape] * count,
    )
