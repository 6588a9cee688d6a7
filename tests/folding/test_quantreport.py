"""The errors of rounding to the nearest, against plain arithmetic on whole matrices."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from normswap.edits import Edits, make_edits
from normswap.errors import RangeLost
from normswap.folding import make_fold_plan
from normswap.foldplan import Consumer, Fold, FoldPlan, Piece
from normswap.gains import fold_
from normswap.loading import build_meta, load_model, resolve
from normswap.plan import make_plan
from normswap.quantreport import Errors, QuantReport, quant_report
from normswap.rows import row_reader
from normswap.shards import check_source
from normswap.spec import NormSpec
from normswap.stored import Stored, StoredMap, map_stored

pytestmark = pytest.mark.core


class Toy(nn.Module):
    def __init__(self, shape: tuple[int, ...], axis: int, dtype: torch.dtype, gain: torch.Tensor) -> None:
        super().__init__()
        self.norm, self.reader = nn.Module(), nn.Module()
        self.norm.weight = nn.Parameter(gain)
        self.reader.weight = nn.Parameter((torch.randn(shape) * torch.rand(shape)).to(dtype))
        self.axis = axis


def edits_of(toy: Toy, size: int) -> tuple[Edits, Any]:
    width = toy.norm.weight.numel()
    consumer = Consumer("reader.weight", toy.axis, (Piece(0, width, 0),))
    plan = FoldPlan((Fold("norm", "fold", "", (consumer,), spec=NormSpec("rms", width, 1e-6)),))
    tensors = {name: value.detach() for name, value in toy.named_parameters()}
    where = {
        name: (
            Stored(
                name,
                name,
                tuple(range(value.dim())),
                tuple(map(range, value.shape)),
                tuple(map(range, value.shape)),
            ),
        )
        for name, value in tensors.items()
    }

    def read(key: str) -> Iterator[torch.Tensor]:
        # As a reader of files does, in memory that is used again.
        buffer = torch.full((size, *tensors[key].shape[1:]), math.nan).to(tensors[key].dtype)
        for part in tensors[key].split(size):
            yield buffer[: len(part)].copy_(part)

    return make_edits(toy, plan, StoredMap(where, where, (), (), {}, {}, {}), read), read


def quantized(weights: torch.Tensor, kind: str) -> torch.Tensor:
    """Round ``(outputs, inputs)``, row by row and group by group."""
    result = torch.zeros_like(weights)
    for output, row in enumerate(weights):
        step = 128 if kind == "int4" else len(row)
        for start in range(0, len(row), step):
            group = row[start : start + step]
            top = float(group.abs().max())
            scale = top / {"int8": 127, "int4": 7, "fp8": 448}[kind] if top else 1.0
            if kind == "fp8":
                result[output, start : start + step] = (group / scale).to(torch.float8_e4m3fn).to(group.dtype) * scale
            else:
                result[output, start : start + step] = (group / scale).round() * scale
    return result


def matrix(weight: torch.Tensor, axis: int) -> torch.Tensor:
    return weight.detach().clone().float().movedim(axis, -1).reshape(-1, weight.shape[axis])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    ("shape", "axis", "size"),
    [
        ((6, 300), 1, 4),
        ((300, 6), 0, 7),
        ((300, 3, 2), 0, 290),
        ((3, 4, 140), 2, 2),
        ((3, 140, 5), 1, 1),
        ((9, 5), 1, 9),
        ((128, 4), 0, 200),
    ],
)
def test_errors_are_those_of_the_whole_matrices(
    shape: tuple[int, ...], axis: int, size: int, dtype: torch.dtype
) -> None:
    gain = torch.exp(torch.randn(shape[axis]))
    toy = Toy(shape, axis, dtype, gain.clone())
    edits, read = edits_of(toy, size)
    report = quant_report(edits, read)
    old = matrix(toy.reader.weight, axis)
    plan = FoldPlan(
        (
            Fold(
                "norm",
                "fold",
                "",
                (Consumer("reader.weight", axis, (Piece(0, shape[axis], 0),)),),
                spec=NormSpec("rms", shape[axis], 1e-6),
            ),
        )
    )
    fold_(toy, plan)
    new = matrix(toy.reader.weight, axis)
    for kind, errors in report.consumers["reader.weight"].items():
        got = errors.to_dict()
        lost, lost_after = quantized(old, kind) - old, quantized(new, kind) - new
        assert got["before"] == pytest.approx(float(lost.norm() / old.norm()), rel=1e-4)
        assert got["after"] == pytest.approx(float(lost_after.norm() / new.norm()), rel=1e-4)
        assert got["before_with_gain"] == pytest.approx(float((lost * gain).norm() / new.norm()), rel=1e-4)
        assert report.total[kind].to_dict() == got


def test_a_gain_of_few_large_channels_hurts_integers_and_not_floats() -> None:
    gain = torch.ones(256)
    gain[::50] = 8.0
    report = quant_report(*edits_of(Toy((32, 256), 1, torch.float32, gain), 8))
    assert report.total["int8"].change > 1.5 and report.total["int4"].change > 1.2
    assert report.total["fp8"].change < 1.1
    text = report.to_text()
    assert "int8: folding hurts" in text and "int4: folding hurts" in text


def test_a_gain_that_evens_the_columns_out_helps() -> None:
    gain = torch.ones(256)
    gain[::50] = 1 / 64
    toy = Toy((32, 256), 1, torch.float32, gain)
    with torch.no_grad():
        toy.reader.weight[:, ::50] *= 64
    text = quant_report(*edits_of(toy, 8)).to_text()
    assert "int8: folding helps" in text


def test_a_gain_of_one_changes_nothing() -> None:
    report = quant_report(*edits_of(Toy((8, 64), 1, torch.bfloat16, torch.ones(64)), 3))
    for kind, errors in report.total.items():
        told = errors.to_dict()
        assert told["before"] == told["after"] == told["before_with_gain"] > 0
        assert f"{kind}: folding leaves the error as it is" in report.to_text()


def test_weights_that_overflow_are_an_error_and_no_figure() -> None:
    toy = Toy((4, 8), 1, torch.float16, torch.full((8,), 1e5))
    with torch.no_grad():
        toy.reader.weight.fill_(10.0)
    with pytest.raises(RangeLost, match=r"reader\.weight .* overflow"):
        quant_report(*edits_of(toy, 2))


def test_the_worst_weights_are_shown_and_the_total_is_pooled() -> None:
    report = QuantReport()
    for number, after in enumerate((1.0, 9.0, 4.0)):
        report.consumers[f"w{number}"] = {k: Errors(1.0, 100.0, 1.0, after, 100.0) for k in ("int8", "int4", "fp8")}
    assert report.total["int8"].to_dict() == {
        "before": 0.1,
        "before_with_gain": 0.1,
        "after": pytest.approx((14 / 300) ** 0.5),
    }
    shown = [line.split()[0] for line in report.to_text(worst=2).splitlines() if line.startswith("w")]
    assert shown == ["w1", "w2"]
    data = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert set(data) == {"formats", "consumers", "total"} and set(data["consumers"]) == {"w0", "w1", "w2"}
    assert data["total"]["fp8"]["change"] == pytest.approx((14 / 3) ** 0.5)


def test_a_column_of_zeros_has_no_error() -> None:
    toy = Toy((4, 8), 1, torch.float32, torch.ones(8))
    with torch.no_grad():
        toy.reader.weight.zero_()
    for errors in quant_report(*edits_of(toy, 2)).total.values():
        assert errors.to_dict() == {"before": 0.0, "before_with_gain": 0.0, "after": 0.0} and errors.change == 1.0


@pytest.mark.slow
def test_a_trained_model_is_folded_and_reported(smollm2: Path) -> None:
    """60 norms of SmolLM2, in bf16; integers lose by the fold, and fp8 does not."""
    source, checkpoint = resolve(str(smollm2)), check_source(smollm2)
    meta = build_meta(source)
    plan = make_fold_plan(meta, make_plan(meta))
    assert len(plan.folds) == 60
    read = row_reader(checkpoint)
    edits = make_edits(meta, plan, map_stored(meta, checkpoint), read)
    report = quant_report(edits, read)
    changes = {kind: errors.change for kind, errors in report.total.items()}
    print(report.to_text())
    assert 1.1 < changes["int8"] < 1.3 and 1.05 < changes["int4"] < 1.2 and 0.98 < changes["fp8"] < 1.02
    assert all(figure.passed for figure in edits.algebra.figures.values())
    ids = torch.arange(1, 257).view(4, 64)
    served = load_model(source, dtype=torch.bfloat16)
    with torch.no_grad():
        reference, original = load_model(source, dtype=torch.float32)(ids).logits, served(ids).logits.float()
        folded = fold_(copy.deepcopy(served), plan)(ids).logits.float()
        exact = fold_(served, plan, rounded=False)(ids).logits
    assert all(bool((served.get_submodule(fold.name).weight == 1).all()) for fold in plan.folds)
    assert float((exact - reference).norm() / reference.norm()) < 1e-5
    ratio = float((folded - reference).norm() / (original - reference).norm())
    print(f"distance from float32, folded over original: {ratio:.3f}")
    assert ratio < 1.25
