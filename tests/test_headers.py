"""What a weight file says about itself: truncated, padded and damaged files, and values that are no numbers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from normswap.bits import FLOATS, count_bad
from normswap.checkpoint import check_finite, check_source
from normswap.errors import CheckpointError


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    path = tmp_path / "whole"
    path.mkdir()
    save_file({"a": torch.ones(100), "b": torch.zeros(3, 4, dtype=torch.bfloat16)}, path / "model.safetensors")
    return path


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_source(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def write_raw(path: Path, header: object, data: bytes = b"") -> Path:
    path.mkdir(exist_ok=True)
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return path


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        (-100, "is truncated: its header promises"),
        (100, "is truncated: its header alone takes"),
        (5, "is truncated: expected at least 8 bytes, got 5"),
        (0, "is truncated: expected at least 8 bytes, got 0"),
    ],
)
def test_a_truncated_file_is_refused(whole: Path, cut: int, words: str) -> None:
    file = whole / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:cut])
    message = refusal(whole)
    assert message.startswith("model.safetensors ") and words in message and str(len(data[:cut])) in message


def test_a_padded_file_is_refused(whole: Path) -> None:
    file = whole / "model.safetensors"
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"\0" * 7)
    assert f"is too long: its header accounts for {size} bytes, the file has {size + 7}" in refusal(whole)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (b"not json", "its header is not JSON"),
        (b'{"a": {}, "a": {}}', "its header is not JSON"),
        ([1], "its header is a list, expected a JSON object"),
        ({"a": {"dtype": "F32"}}, "does not give dtype, shape and data_offsets of a"),
        ({"a": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, "a has dtype 'F31', expected one of"),
        ({"a": {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]}}, "a has dtype ['F32']"),
        ({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, "a has shape [-1]"),
        (
            {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
            "a of F32 [2] needs 8 bytes, its offsets span 4",
        ),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, "the data of a begins at byte"),
        ({}, "expected tensors in"),
    ],
)
def test_a_damaged_header_is_refused(tmp_path: Path, header: object, words: str) -> None:
    assert words in refusal(write_raw(tmp_path / "m", header, b"\0" * 4 if header else b""))


def test_an_absurd_header_length_is_refused_unread(tmp_path: Path) -> None:
    path = write_raw(tmp_path / "m", {})
    (path / "model.safetensors").write_bytes((1 << 60).to_bytes(8, "little") + b"{}")
    assert f"announces a header of {1 << 60} bytes" in refusal(path)


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2],
)
def test_nan_and_infinity_are_found_in_every_float_type(tmp_path: Path, dtype: torch.dtype) -> None:
    good, bad = torch.ones(3, 5).to(dtype), torch.ones(4, 5)
    bad[1, 2] = bad[3, 4] = float("nan")
    tensors = {"good": good, "ids": torch.arange(3), "layer.norm.weight": bad.to(dtype)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"^layer.norm.weight in model.safetensors holds 2 NaN or infinite"):
        check_finite(check_source(tmp_path))
    pickles = tmp_path / "pickles"
    pickles.mkdir()
    torch.save(tensors, pickles / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"^layer.norm.weight in pytorch_model.bin holds 2 NaN or infinite"):
        check_finite(check_source(pickles))


def test_infinity_is_found_past_the_first_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("normswap.finite._CHUNK", 1024)
    weight = torch.zeros(1000)
    weight[999] = float("-inf")
    save_file({"w": weight, "empty": torch.zeros(0)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"w in model.safetensors holds 1 NaN or infinite values"):
        check_finite(check_source(tmp_path))


@pytest.mark.parametrize("dtype", sorted(set(FLOATS.values()), key=str), ids=str)
def test_the_quick_look_agrees_with_arithmetic_on_every_pattern(dtype: torch.dtype) -> None:
    width = dtype.itemsize
    # All patterns of the leading bits, which hold sign and exponent; the trailing ones all clear or all set.
    leading = np.arange(1 << min(8 * width, 13), dtype=np.uint64) << max(8 * width - 13, 0)
    trailing = np.uint64((1 << max(8 * width - 13, 0)) - 1)
    for bits in (leading, leading | trailing):
        patterns = bits.astype(f"u{width}")
        values = torch.from_numpy(patterns.view(np.uint8).copy()).view(dtype)
        truth = ~torch.isfinite(values if width > 1 else values.float())
        found = [count_bad(patterns[i : i + 1].view(np.uint8), dtype) for i in range(len(patterns))]
        assert found == truth.int().tolist()
