"""Outputs that wait: the same bits again, from memory and from a file that leaves no trace."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
import torch

from normswap.errors import OutputError
from normswap.running import Output
from normswap.spool import Spool

pytestmark = pytest.mark.core
FULL = Path("/dev/full")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("room", [0, 1 << 20])
def test_tensors_come_back_bit_for_bit_and_no_file_has_a_name(room: int, folder: Path) -> None:
    spool = Spool(room=room)
    wide = torch.randn(3, 40)
    outputs = [
        {"logits": wide[:, ::2].to(dtype), "one": torch.tensor(float("nan")), "none": torch.zeros(0, 4)}
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    ]
    for index, tensors in enumerate(outputs):
        spool.put("reference", index, Output("logits", tensors))
    for index in (2, 0, 3, 1):
        got = spool.get("reference", index, torch.device("cpu"))
        for name, tensor in outputs[index].items():
            assert got[name].dtype == tensor.dtype and got[name].shape == tensor.shape
            assert torch.equal(got[name].nan_to_num(7.0), tensor.nan_to_num(7.0))
    assert list(folder.iterdir()) == []
    assert bool(spool.kept) == (room > 0)
    spool.close()


@pytest.mark.skipif(not FULL.exists(), reason="needs a device that is always full")
def test_a_full_disk_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "TemporaryFile", lambda **_: FULL.open("r+b", buffering=0))
    spool = Spool(room=0)
    with pytest.raises(OutputError, match="No space left on device; make room there, name another folder with TMPDIR"):
        spool.put("reference", 0, Output("logits", {"logits": torch.ones(2, 3)}))
    spool.close()
