"""Zeros of the other sign change nothing that linears and norms compute: they are told, and fail nothing."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import saved, tiny_llama
from two_checkpoints import Tensors, compared, fold_llama, remade, tensors_of

import normswap
from normswap.gaps import Gap

pytestmark = pytest.mark.core
WEIGHT = "model.layers.1.mlp.up_proj.weight"
TOLD = "equal but for the sign of zeros"


def flip(tensors: Tensors) -> None:
    tensors[WEIGHT][3, :5] *= -1


@pytest.fixture(scope="module", params=[torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
def original(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    """Five zeros in a weight that reads a norm; in float32 they stand among values that are no narrower ones."""
    model = tiny_llama().to(request.param)
    with torch.no_grad():
        model.get_parameter(WEIGHT)[3, :5] = 0.0
    return saved(model, tmp_path_factory.mktemp("original"))


def test_zeros_of_the_other_sign_are_a_kind_of_their_own(original: Path, tmp_path: Path) -> None:
    found = compared(original, remade(original, tmp_path / "flipped", flip))
    assert (found.figures.summary, found.figures.kind) == (f"{TOLD} in 1 tensor", "zeros")
    (change,) = found.figures.changes
    assert (change.name, change.kind, change.explained, change.error) == (WEIGHT, "zeros", True, 0.0)
    assert change.detail == f"{TOLD}: 5 of 1536"
    assert found.figures.same == found.figures.tensors - 1
    assert not found.failures


def test_another_value_beside_them_fails_and_is_counted_alone(original: Path, tmp_path: Path) -> None:
    def fault(tensors: Tensors) -> None:
        flip(tensors)
        tensors[WEIGHT][7, 11] *= 1.5

    (failure,) = compared(original, remade(original, tmp_path / "fault", fault)).failures
    assert failure == f"tensors: {WEIGHT} differs in 1 of 1536 values, row 7, column 11, by 50%"


def test_the_smallest_number_is_no_zero(original: Path, tmp_path: Path) -> None:
    def fault(tensors: Tensors) -> None:
        whole = {2: torch.int16, 4: torch.int32}[tensors[WEIGHT].itemsize]
        tensors[WEIGHT].view(whole)[3, 0] = 1

    assert "in 1 of 1536 values" in compared(original, remade(original, tmp_path / "small", fault)).failures[0]
    gap = Gap(allowed=0)
    small = torch.tensor([[5e-324, -0.0], [0.0, -0.0]], dtype=torch.float64)
    gap.add(torch.zeros(2, 2, dtype=torch.float64), small, 0)
    assert (gap.off, gap.signs, gap.exact) == (1, 2, False)


def test_a_cast_may_lose_the_sign_of_a_zero(original: Path, tmp_path: Path) -> None:
    def cast(tensors: Tensors) -> None:
        flip(tensors)
        tensors.update({name: value.to(torch.float16) for name, value in tensors.items()})

    if tensors_of(original)[WEIGHT].dtype == torch.bfloat16:
        pytest.skip("bfloat16 does not go into float16")
    found = compared(original, remade(original, tmp_path / "cast", cast))
    assert not found.failures and "cast to fp16" in found.figures.summary
    (change,) = [one for one in found.figures.changes if one.name == WEIGHT]
    assert change.kind == "dtype" and change.detail.endswith(f"; {TOLD}: 5 of 1536")


def test_a_fold_may_give_a_zero_the_other_sign(original: Path, tmp_path: Path) -> None:
    """0 times a negative gain is -0; a tool that adds what it multiplied gives 0."""

    def fold(tensors: Tensors) -> None:
        fold_llama(tensors, 2)
        flip(tensors)

    found = compared(original, remade(original, tmp_path / "folded", fold))
    assert found.figures.summary == "4 gains folded into 10 linears" and not found.failures
    (change,) = [one for one in found.figures.changes if one.name == WEIGHT]
    assert change.kind == "folded" and change.detail.endswith(f"; {TOLD}: 5 of 1536")


def test_a_fold_of_the_manifest_may_have_zeros_of_the_other_sign(original: Path, tmp_path: Path) -> None:
    """A recorded fold has to be rounded once, bit for bit but for these signs."""
    target = tmp_path / "folded"
    normswap.convert(original, target, fold=True, verify=False)
    manifest = (target / "normswap.json").read_bytes()
    other = remade(target, tmp_path / "flipped", flip)
    (other / "normswap.json").write_bytes(manifest)
    found = compared(original, other)
    assert not found.failures, found.failures
    (change,) = [one for one in found.figures.changes if one.name == WEIGHT]
    assert change.kind == "folded" and change.explained and TOLD in change.detail


def test_a_head_that_is_left_out_may_have_zeros_of_the_other_sign(tmp_path: Path) -> None:
    source = saved(tiny_llama(), tmp_path / "source")

    def equal(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"][3, :5] = 0.0
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][3, :5] = -0.0

    def left_out(tensors: Tensors) -> None:
        del tensors["lm_head.weight"]

    source = remade(source, tmp_path / "equal", equal)
    found = compared(source, remade(source, tmp_path / "tied", left_out, tie_word_embeddings=True))
    assert not found.failures


def test_the_model_is_run_and_passes(original: Path, tmp_path: Path) -> None:
    other = remade(original, tmp_path / "flipped", flip)
    for options in ({}, {"max_memory": 1}):
        report = normswap.verify(other, against=original, tokens=2048, **options)
        assert report.passed, (report.failures, report.doubts)
        assert report.exact.error == 0 and report.streamed == bool(options)
        assert report.tensors is not None and report.tensors.kind == "zeros"


def test_modules_are_told_alike() -> None:
    model = tiny_llama()
    other = copy.deepcopy(model)
    with torch.no_grad():
        model.get_parameter(WEIGHT)[3, :5] = 0.0
        other.get_parameter(WEIGHT)[3, :5] = -0.0
    report = normswap.verify(other, model, tokens=2048)
    assert report.passed, (report.failures, report.doubts)
    assert report.tensors is not None
    assert (report.tensors.summary, report.tensors.kind) == (f"{TOLD} in 1 tensor", "zeros")
    assert report.tensors.same == report.tensors.tensors - 1
