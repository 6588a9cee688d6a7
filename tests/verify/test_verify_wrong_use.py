"""What cannot be verified is refused in words; a manifest that names another source is told of."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_checkpoints import saved, tiny_llama

import normswap
from normswap.errors import CheckpointError, UsageError

pytestmark = pytest.mark.core
FEW: dict[str, Any] = {"tokens": 128, "device": "cpu"}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_llama(), tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture
def folded(llama: Path, tmp_path: Path) -> Path:
    return normswap.convert(llama, tmp_path / "folded", fold=True, verify=False).out


def _manifest(folder: Path, **source: Any) -> None:
    file = folder / "normswap.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["source"] |= source
    file.write_text(json.dumps(data), encoding="utf-8")


def test_a_model_without_values_is_refused() -> None:
    model = tiny_llama()
    for pair in ((tiny_llama().to("meta"), model), (model, tiny_llama().to("meta"))):
        with pytest.raises(UsageError, match="on the meta device"):
            normswap.verify(*pair, **FEW)


def test_fewer_tokens_than_none_are_refused(llama: Path) -> None:
    with pytest.raises(UsageError, match="got -1"):
        normswap.verify(llama, generate=-1, **FEW)


def test_a_checkpoint_that_names_itself_as_its_source_is_refused(folded: Path) -> None:
    _manifest(folded, name=str(folded))
    with pytest.raises(CheckpointError, match=r"is the checkpoint itself.*--against"):
        normswap.verify(folded, **FEW)


def test_an_original_that_is_not_the_recorded_one_is_told(llama: Path, folded: Path, tmp_path: Path) -> None:
    words = "not those that the manifest says"
    report = normswap.verify(folded, **FEW)
    assert report.passed and not any(words in note for note in report.notes)
    copied = Path(shutil.copytree(llama, tmp_path / "copy"))
    assert not any(words in note for note in normswap.verify(folded, copied, **FEW).notes)
    _manifest(folded, files={"model.safetensors": "0" * 64})
    assert any(words in note for note in normswap.verify(folded, **FEW).notes)
