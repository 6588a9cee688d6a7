"""Folding in memory: against a naive oracle in float64, and what must be refused before anything changes."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normswap
from normswap.errors import ModelError
from normswap.factors import leave
from normswap.foldplan import Consumer, Fold, FoldPlan, Piece
from normswap.gains import check_fold, fold_
from normswap.spec import NormSpec

pytestmark = pytest.mark.core

WIDTH = 6
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Norm(nn.Module):
    def __init__(self, width: int = WIDTH, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width, dtype=torch.float64).add(0.5).to(dtype))
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float64).to(dtype)) if bias else None


class Map(nn.Module):
    def __init__(self, *shape: int, axis: int = 1, bias: bool = False, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=torch.float64).to(dtype))
        rest = shape[:axis] + shape[axis + 1 :]
        self.bias = nn.Parameter(torch.randn(rest, dtype=torch.float64).to(dtype)) if bias else None


def spec(form: str = "w", *, bias: bool = False, width: int = WIDTH) -> NormSpec:
    kind: Any = "layer" if bias else "rms"
    return NormSpec(kind, width, 1e-6, gain=form, bias=bias, bias_name="bias" if bias else None)  # type: ignore[arg-type]


def whole(name: str, axis: int = 1, bias: str | None = None) -> Consumer:
    return Consumer(f"{name}.weight", axis, (Piece(0, WIDTH, 0),), bias)


def plan_of(*folds: Fold) -> FoldPlan:
    return FoldPlan(folds)


def fold(norm: str, *consumers: Consumer, bias: Any = "none", form: str = "w", **more: Any) -> Fold:
    return Fold(norm, "fold", "", consumers, bias=bias, spec=spec(form, bias=bias != "none"), **more)


def model(**modules: nn.Module) -> nn.Module:
    return nn.ModuleDict(modules)


def nearest(value: float, dtype: torch.dtype) -> float:
    """Round by comparison with the neighbours of what torch gives, ties to even."""
    first = torch.tensor(value, dtype=torch.float64).to(dtype)
    kind = {2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    steps = [(first.view(kind) + step).to(kind).view(dtype) for step in (-1, 0, 1)]
    near = [candidate for candidate in steps if bool(candidate.double().isfinite())]
    key = [(abs(float(c.double()) - value), int(c.view(kind)) & 1) for c in near]
    return float(near[key.index(min(key))].double())


@st.composite
def cases(draw: Any) -> dict[str, Any]:
    dims = draw(st.integers(2, 3))
    axis = draw(st.integers(0, dims - 1))
    width = draw(st.integers(1, 5))
    pieces, at = [], 0
    for _ in range(draw(st.integers(1, 3))):
        at += draw(st.integers(0, 2))
        count = draw(st.integers(1, width))
        step = draw(st.sampled_from([0, 1]))
        channel = draw(st.integers(0, width - (count if step else 1)))
        pieces.append(Piece(at, at + count, channel, step))
        at += count
    shape = [draw(st.integers(1, 4)) for _ in range(dims)]
    shape[axis] = at + draw(st.integers(0, 2))
    return {
        "axis": axis,
        "width": width,
        "pieces": tuple(pieces),
        "shape": tuple(shape),
        "form": draw(st.sampled_from(["w", "1+w"])),
        "bias": draw(st.sampled_from(["none", "move", "keep"])),
        "dtype": draw(st.sampled_from(DTYPES)),
        "gain_dtype": draw(st.sampled_from(DTYPES)),
        "seed": draw(st.integers(0, 1 << 16)),
    }


@settings(max_examples=60, deadline=None)
@given(cases())
def test_what_is_stored_is_the_product_rounded_once(case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    dtype, axis, kind = case["dtype"], case["axis"], case["bias"]
    norm = Norm(case["width"], kind != "none", case["gain_dtype"])
    reader = Map(*case["shape"], axis=axis, bias=True, dtype=dtype)
    subject = model(norm=norm, reader=reader)
    consumer = Consumer("reader.weight", axis, case["pieces"], "reader.bias")
    known = spec(case["form"], bias=kind != "none", width=case["width"])
    plan = plan_of(Fold("norm", "fold", "", (consumer,), bias=kind, spec=known))
    old, old_bias = reader.weight.detach().double().numpy().copy(), reader.bias.detach().double().numpy().copy()
    gain = norm.weight.detach().double().numpy() + (case["form"] == "1+w")
    shift = None if norm.bias is None else norm.bias.detach().double().numpy().copy()

    with mock.patch("normswap.gains._PIECE", 3):
        assert fold_(subject, plan) is subject

    expected, moved, size = old.copy(), old_bias.copy(), abs(old_bias)
    for index in np.ndindex(*old.shape):
        for piece in case["pieces"]:
            if piece.start <= index[axis] < piece.stop:
                channel = piece.channel + piece.step * (index[axis] - piece.start)
                expected[index] = nearest(old[index] * gain[channel], dtype)
                if kind == "move":
                    assert shift is not None
                    moved[index[:axis] + index[axis + 1 :]] += old[index] * shift[channel]
                    size[index[:axis] + index[axis + 1 :]] += abs(old[index] * shift[channel])
    np.testing.assert_array_equal(reader.weight.detach().double().numpy(), expected)
    identity = 0.0 if case["form"] == "1+w" else 1.0
    assert norm.weight.detach().unique().tolist() == [identity]
    # One rounding is half of this; the rest is the order of a sum in float64.
    assert bool((abs(reader.bias.detach().double().numpy() - moved) <= torch.finfo(dtype).eps * size).all())
    if shift is not None:
        left = [nearest(b / g, case["gain_dtype"]) for b, g in zip(shift, gain, strict=True)]
        assert norm.bias.detach().double().tolist() == (left if kind == "keep" else [0.0] * len(left))


def test_the_parameters_stay_the_same_objects() -> None:
    subject = model(norm=Norm(bias=True), reader=Map(4, WIDTH, bias=True))
    subject.requires_grad_(False)
    subject["norm"].weight.requires_grad_(True)
    before = {name: (id(value), value.data_ptr(), value.requires_grad) for name, value in subject.named_parameters()}
    fold_(subject, plan_of(fold("norm", whole("reader", bias="reader.bias"), bias="move")))
    after = {name: (id(value), value.data_ptr(), value.requires_grad) for name, value in subject.named_parameters()}
    assert after == before


def test_two_norms_on_one_weight_are_rounded_once() -> None:
    one, other = Norm(dtype=torch.bfloat16), Norm(dtype=torch.bfloat16)
    reader = Map(3, 2 * WIDTH, dtype=torch.bfloat16)
    expected = reader.weight.detach().double() * torch.cat([one.weight, other.weight]).detach().double()
    right = Consumer("reader.weight", 1, (Piece(WIDTH, 2 * WIDTH, 0),))
    fold_(model(one=one, other=other, reader=reader), plan_of(fold("one", whole("reader")), fold("other", right)))
    torch.testing.assert_close(reader.weight.detach(), expected.to(torch.bfloat16), rtol=0, atol=0)


def test_a_value_beside_the_middle_is_not_rounded_twice() -> None:
    """It is just above the middle of two bfloat16 values, and by way of float32 it would fall on it."""
    norm, reader = Norm(1), Map(1, 1, dtype=torch.bfloat16)
    norm.weight = nn.Parameter(torch.tensor([1 + 2.0**-8 + 2.0**-32], dtype=torch.float64))
    with torch.no_grad():
        reader.weight.fill_(1.0)
    consumer = Consumer("reader.weight", 1, (Piece(0, 1, 0),))
    fold_(model(norm=norm, reader=reader), plan_of(Fold("norm", "fold", "", (consumer,), spec=spec(width=1))))
    assert float(reader.weight.detach()[0, 0]) == 1 + 2.0**-7


@pytest.mark.parametrize(
    ("weight", "gain", "reason"),
    [(60000.0, 4.0, "overflow"), (6e-8, 0.1, "become zero")],
    ids=["overflow", "underflow"],
)
def test_values_that_leave_the_range_are_refused_and_nothing_is_changed(
    weight: float, gain: float, reason: str
) -> None:
    subject = model(sound=Norm(), norm=Norm(), first=Map(3, WIDTH), reader=Map(3, WIDTH, dtype=torch.float16))
    with torch.no_grad():
        subject["norm"].weight[2] = gain
        subject["reader"].weight[1, 2] = weight
    plan = plan_of(fold("sound", whole("first")), fold("norm", whole("reader")))
    before = copy.deepcopy(subject.state_dict())
    found = check_fold(subject, plan)
    assert set(found) == {"norm"} and reason in found["norm"] and "reader.weight" in found["norm"]
    with pytest.raises(ModelError, match=r"cannot fold norm: in reader.weight 1 values .* nothing was changed"):
        fold_(subject, plan)
    assert all(torch.equal(value, before[name]) for name, value in subject.state_dict().items())
    fold_(subject, leave(plan, found))
    assert bool((subject["sound"].weight == 1).all()) and not bool((subject["norm"].weight == 1).all())


def test_a_gain_of_zero_is_no_underflow() -> None:
    subject = model(norm=Norm(), reader=Map(3, WIDTH, dtype=torch.float16))
    with torch.no_grad():
        subject["norm"].weight[2] = 0.0
    fold_(subject, plan_of(fold("norm", whole("reader"))))
    assert bool((subject["reader"].weight[:, 2] == 0).all())


@pytest.mark.parametrize("gain", [0.0, 1e-8], ids=["zero", "near zero"])
def test_a_bias_that_cannot_be_divided_by_its_gain_is_refused(gain: float) -> None:
    norm = Norm(bias=True, dtype=torch.float16)
    with torch.no_grad():
        norm.weight[1], norm.bias[1] = gain, 7.0
    subject = model(norm=norm, reader=Map(3, WIDTH))
    plan = plan_of(fold("norm", whole("reader"), bias="keep"))
    reason = check_fold(subject, plan)["norm"]
    assert "its bias stays in the norm" in reason
    with torch.no_grad():
        norm.weight[1], norm.bias[1] = 0.0, 0.0
    assert check_fold(subject, plan) == {}
    fold_(subject, plan)
    assert norm.bias[1] == 0.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("kind", ["weight", "bias"])
def test_a_norm_that_is_not_finite_is_refused(kind: str, value: float) -> None:
    subject = model(norm=Norm(bias=True), reader=Map(3, WIDTH, bias=True))
    with torch.no_grad():
        getattr(subject["norm"], kind)[0] = value
    found = check_fold(subject, plan_of(fold("norm", whole("reader", bias="reader.bias"), bias="move")))
    assert "NaN or infinite" in found["norm"]


def test_a_tied_weight_is_left_alone() -> None:
    subject = model(norm=Norm(), embedding=nn.Embedding(9, WIDTH), head=Map(9, WIDTH))
    subject["head"].weight = subject["embedding"].weight
    found = check_fold(subject, plan_of(fold("norm", whole("head"), untie=True)))
    assert "embedding.weight too" in found["norm"] and "untie the head first" in found["norm"]


def test_a_bias_with_another_owner_is_left_alone() -> None:
    subject = model(norm=Norm(bias=True), reader=Map(3, WIDTH, bias=True), bystander=Map(3, WIDTH, bias=True))
    subject["bystander"].bias = subject["reader"].bias
    found = check_fold(subject, plan_of(fold("norm", whole("reader", bias="reader.bias"), bias="move")))
    assert "bystander.bias too" in found["norm"]


def test_one_gain_in_two_norms_is_folded_once_and_only_with_both() -> None:
    one, other = Norm(), Norm()
    other.weight = one.weight
    subject = model(one=one, other=other, first=Map(3, WIDTH), second=Map(3, WIDTH))
    gain, weights = one.weight.detach().clone(), [subject[name].weight.detach().clone() for name in ("first", "second")]
    assert "other.weight too" in check_fold(subject, plan_of(fold("one", whole("first"))))["one"]
    fold_(subject, plan_of(fold("one", whole("first")), fold("other", whole("second"))))
    for name, weight in zip(("first", "second"), weights, strict=True):
        torch.testing.assert_close(subject[name].weight.detach(), weight * gain)


def test_a_module_under_two_names_is_folded_once() -> None:
    shared = Map(3, WIDTH)
    subject = model(norm=Norm(), reader=shared, again=shared)
    expected = shared.weight.detach() * subject["norm"].weight.detach()
    fold_(subject, plan_of(fold("norm", whole("reader"), whole("again"))))
    torch.testing.assert_close(shared.weight.detach(), expected)


@pytest.mark.parametrize("action", ["fold", "refuse"])
def test_columns_of_two_norms_are_refused(action: Any) -> None:
    subject = model(one=Norm(), other=Norm(), reader=Map(3, WIDTH))
    other = Fold("other", action, "", (whole("reader"),), spec=spec())
    found = check_fold(subject, plan_of(fold("one", whole("reader")), other))
    assert found["one"] == "reader.weight reads other too, and not with other columns"
    assert ("other" in found) == (action == "fold")


def test_one_weight_along_two_axes_is_refused() -> None:
    subject = model(one=Norm(), other=Norm(), reader=Map(WIDTH, WIDTH))
    plan = plan_of(fold("one", whole("reader", 1)), fold("other", whole("reader", 0)))
    assert set(check_fold(subject, plan)) == {"one", "other"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m["reader"].to("meta"), "on the meta device"),
        (lambda m: m["reader"].register_parameter("weight", nn.Parameter(torch.ones(3, WIDTH).char(), False)), "int8"),
        (lambda m: m["reader"].to(torch.float8_e4m3fn), "float8_e4m3fn"),
        (lambda m: m["reader"].register_parameter("weight", None), "it has none"),
        (lambda m: m["reader"].register_parameter("weight", nn.Parameter(torch.ones(3, 2))), "columns"),
    ],
)
def test_a_model_that_cannot_be_folded_is_an_error(change: Any, words: str) -> None:
    subject = model(norm=Norm(), reader=Map(3, WIDTH))
    change(subject)
    with pytest.raises(ModelError, match=words):
        fold_(subject, plan_of(fold("norm", whole("reader"))))


def test_unrounded_weights_stand_in_float32() -> None:
    subject = model(norm=Norm(dtype=torch.bfloat16), reader=Map(3, WIDTH, dtype=torch.bfloat16))
    expected = subject["reader"].weight.detach().float() * subject["norm"].weight.detach().float()
    fold_(subject, plan_of(fold("norm", whole("reader"))), rounded=False)
    assert subject["reader"].weight.dtype == torch.float32
    assert torch.equal(subject["reader"].weight.detach(), expected)


def test_a_swapped_model_is_folded_too() -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.reader = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.reader(self.norm(x))

    subject = Reader()
    with torch.no_grad():
        subject.norm.weight.uniform_(0.5, 2.0)
        subject.norm.bias.normal_()
    x = torch.randn(3, WIDTH)
    expected = subject(x)
    normswap.patch(subject)
    fold_(subject, plan_of(fold("norm", whole("reader", bias="reader.bias"), bias="move")))
    torch.testing.assert_close(subject(x), expected, rtol=1e-5, atol=1e-5)
    assert bool((subject.norm.weight == 1).all()) and bool((subject.norm.bias == 0).all())
