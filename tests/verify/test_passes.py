"""What a verification has to pass: right conversions by whatever tool, and copies exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import right_conversions as right
import torch
from right_conversions import Conversion
from test_catches import families
from tiny_families import FAMILIES

import normswap
from normswap import ParityReport
from normswap.page import to_html
from normswap.report import render

EACH = families()
FOLDED = families(quick=("llama", "gpt2"))
BY_HAND = [entry for entry in families(quick=("gpt2", "mixtral")) if right.made_by_hand(str(entry.values[0]))]


def hold_passed(checkpoint: Path, against: Path | None) -> ParityReport:
    """Verify, and expect a pass without a doubt."""
    report = normswap.verify(checkpoint, against=against)
    assert report.verdict == "pass", (report.failures, report.doubts)
    assert report.passed and report.departs is None
    return report


def converted(
    conversion: Conversion, family: str, place: Path, dtype: torch.dtype = torch.bfloat16
) -> tuple[Path, Path]:
    """Return a conversion's folder and its source's."""
    source = FAMILIES[family].save(place / "source", dtype)
    return conversion(family, source, place / "target"), source


@pytest.mark.parametrize("family", EACH)
def test_a_copy_is_the_same_to_the_last_bit(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.identical, family, tmp_path))
    assert report.logits.ratio == 1.0
    assert report.logits.ratio_interval == (1.0, 1.0)
    assert report.exact.error == 0.0
    assert {norm.max_ulp for norm in report.norms} == {0.0}
    assert {norm.bit_identical_fraction for norm in report.norms} == {1.0}
    assert report.tensors is not None
    assert (report.tensors.kind, report.tensors.changes) == ("identical", [])
    assert report.tensors.same == report.tensors.tensors > 0
    assert report.departs is None


def test_a_layer_that_ends_in_a_folded_norm_is_told_and_not_compared(tmp_path: Path) -> None:
    # The last of BERT's layers returns the result of a LayerNorm that the head alone reads.
    report = hold_passed(*converted(right.folded, "bert", tmp_path))
    *others, last = report.layers
    assert last.folded == f"{last.name}.output.LayerNorm" and not last.departs
    assert (last.error_exact, last.error_converted, last.ratio) == (None, None, None)
    assert last.error_original is not None and last.error_original > 0
    assert [layer.folded for layer in others] == [None] * len(others) != []
    assert all(layer.error_exact is not None for layer in others)
    text = render(report)
    assert f"none of {len(others)} departs" in text
    assert "1 not compared: a folded norm gives the result" in text
    assert f"the result of a folded norm: {last.name}." in to_html(report)


@pytest.mark.parametrize("family", FOLDED)
def test_a_fold_passes_with_its_record(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.folded, family, tmp_path))
    assert report.tensors is not None
    assert "folded" in report.tensors.kind
    assert report.tensors.unexplained == report.tensors.altered == []


@pytest.mark.parametrize("family", FOLDED)
def test_a_fold_passes_without_its_record(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.folded_unrecorded, family, tmp_path))
    assert report.tensors is not None
    assert "folded" in report.tensors.kind
    assert report.tensors.unexplained == []
    assert report.pairs and all(pair.passed for pair in report.pairs)


@pytest.mark.parametrize("family", BY_HAND)
def test_a_fold_of_another_tool_passes(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.folded_elsewhere, family, tmp_path))
    assert report.tensors is not None
    assert "folded" in report.tensors.kind
    assert report.tensors.unexplained == []
    assert report.pairs and all(pair.passed for pair in report.pairs)


@pytest.mark.parametrize("family", EACH)
def test_a_swap_passes_against_the_source_that_it_names(family: str, tmp_path: Path) -> None:
    folder, _ = converted(right.swapped, family, tmp_path)
    report = hold_passed(folder, None)
    assert all(norm.passed for norm in report.norms)


@pytest.mark.parametrize("family", EACH)
def test_other_files_pass(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.resharded, family, tmp_path))
    assert report.logits.ratio == 1.0
    assert report.tensors is not None
    assert report.tensors.kind == "rearranged"
    assert report.tensors.changes == []


def test_a_pickle_made_safe_passes_and_so_does_the_reverse(tmp_path: Path) -> None:
    pickled, source = converted(right.pickled, "llama", tmp_path)
    for checkpoint, against in ((right.unpickled("llama", pickled, tmp_path / "again"), pickled), (pickled, source)):
        report = hold_passed(checkpoint, against)
        assert report.logits.ratio == 1.0
        assert report.tensors is not None
        assert (report.tensors.kind, report.tensors.changes) == ("rearranged", [])


@pytest.mark.parametrize("family", EACH)
def test_a_copy_in_a_narrower_dtype_passes(family: str, tmp_path: Path) -> None:
    report = hold_passed(*converted(right.to_bfloat16, family, tmp_path, torch.float32))
    assert report.dtype == "bfloat16"
    assert report.tensors is not None
    assert report.tensors.summary == "cast to bf16"
    assert report.tensors.unexplained == []
