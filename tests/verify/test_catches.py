"""What a verification has to catch: for each fault the verdict is fail, and the place is named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import broken_checkpoints as broken
import pytest
import torch
from broken_checkpoints import Broken
from tiny_families import FAMILIES, Family

import normswap
from normswap import ParityReport

Fault = Callable[[Family, Path, Path], Broken]

FAULTS: dict[str, Fault] = {
    "a gain off by 2% in one channel": broken.one_channel,
    "eps 1e-5 read as 1e-6": broken.eps_smaller,
    "two layers' norms exchanged": broken.norms_exchanged,
}
QUICK = ("llama",)


def families(of: Callable[[Family], bool] = lambda family: True, quick: tuple[str, ...] = QUICK) -> list[Any]:
    """Return names of families; those that are not `quick` are tried by the slow tests."""
    names = [name for name, family in FAMILIES.items() if of(family)]
    return [pytest.param(name, marks=() if name in quick else pytest.mark.slow) for name in names]


def named(report: ParityReport) -> set[str]:
    """Everything that a reader of the report is pointed to: words of failures, tensors, settings, layers, pairs."""
    words = {word.strip(".,:;()'`\"") for failure in report.failures for word in failure.split()}
    if report.departs:
        words.add(report.departs)
    if report.tensors is not None:
        words |= {change.name for change in report.tensors.unexplained}
        words |= {change.name for change in report.tensors.settings}
    words |= {pair.norm for pair in report.pairs if not pair.passed}
    return words


def hold_caught(pair: Broken, **options: object) -> ParityReport:
    """Verify the faulty checkpoint against the sound one, and expect to be told."""
    report = normswap.verify(pair.faulty, against=pair.sound, **options)  # type: ignore[arg-type]
    assert report.verdict == "fail", (report.doubts, report.notes)
    assert not report.passed
    assert set(pair.names) & named(report), (pair.names, report.failures, report.tensors)
    return report


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Sound checkpoints in bfloat16, made once."""
    made: dict[tuple[object, ...], Path] = {}

    def make(name: str, seed: int = 0, **options: object) -> Path:
        key = (name, seed, *sorted(options.items()))
        if key not in made:
            folder = tmp_path_factory.mktemp(name)
            made[key] = FAMILIES[name].save(folder, torch.bfloat16, seed, **options)  # type: ignore[arg-type]
        return made[key]

    return make


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_norm_is_caught(fault: str, family: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    hold_caught(FAULTS[fault](FAMILIES[family], sound(family), tmp_path / "faulty"))


@pytest.mark.parametrize("family", families(quick=("gpt2",)))
def test_a_head_left_tied_is_caught(family: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    tied = sound(family, tie_word_embeddings=True)
    hold_caught(broken.head_left_tied(FAMILIES[family], tied, tmp_path / "faulty"))


@pytest.mark.parametrize("family", families(quick=("t5",)))
def test_a_shard_of_another_checkpoint_is_caught(family: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    ours, theirs = (sound(family, seed, shard=broken.SHARD) for seed in (0, 1))
    hold_caught(broken.foreign_shard(FAMILIES[family], ours, theirs, tmp_path / "faulty"))


@pytest.mark.parametrize("family", families(lambda family: family.readers is not None, ("mixtral",)))
def test_an_expert_that_was_not_scaled_is_caught(family: str, sound: Callable[..., Path], tmp_path: Path) -> None:
    hold_caught(broken.expert_not_scaled(FAMILIES[family], sound(family), tmp_path / "faulty"))


@pytest.mark.parametrize("family", families(lambda family: not family.centred))
def test_centred_embeddings_under_norms_that_keep_the_mean_are_caught(
    family: str, sound: Callable[..., Path], tmp_path: Path
) -> None:
    hold_caught(broken.embeddings_centred(FAMILIES[family], sound(family), tmp_path / "faulty"))
