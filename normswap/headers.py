"""Read what a weight file says about its tensors, without their data, and refuse a file that cannot be whole."""

from __future__ import annotations

import json
import os
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normswap.errors import CheckpointError

__all__ = ["BITS", "Entry", "load_pickle", "read_pickle", "read_safetensors"]

BITS = (
    dict.fromkeys(("F64", "I64", "U64", "C64"), 64)
    | dict.fromkeys(("F32", "I32", "U32"), 32)
    | dict.fromkeys(("F16", "BF16", "I16", "U16"), 16)
    | dict.fromkeys(("I8", "U8", "BOOL"), 8)
    | dict.fromkeys(("F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | {"F6_E2M3": 6, "F6_E3M2": 6, "F4": 4}
)
_MAX_HEADER = 100_000_000
# A git-lfs pointer: a few lines of text that stand for a file that was never fetched.
_POINTER = re.compile(rb"\Aversion .*\noid sha256:[0-9a-f]{64}\nsize (\d+)", re.DOTALL)
_AGAIN = "fetch the checkpoint again"


@dataclass(frozen=True)
class Entry:
    """One tensor of a weight file.

    Attributes:
        file: name of the file, relative to the checkpoint.
        dtype: as safetensors spells it, such as ``"BF16"``.
        shape: of the tensor.
        start: where its data begins in the file; None in a pickle.
        end: where its data ends.
    """

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int | None = None
    end: int | None = None


def read_safetensors(file: Path, name: str) -> dict[str, Entry]:
    """Read the header of a safetensors file and hold it against the file's size.

    Args:
        file: the file.
        name: its name relative to the checkpoint, for the entries and the messages.

    Raises:
        CheckpointError: a git-lfs pointer, or a header that is damaged or does not fit the file: truncated and
            padded files are refused both.
    """
    header, data_start, size = _read_header(file, name)
    entries = {}
    for key, value in header.items():
        if key != "__metadata__":
            entries[key] = _entry(name, key, value, data_start)
    position = data_start
    for key, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].end)):
        if entry.start != position:
            raise _damaged(name, f"the data of {key} begins at byte {entry.start}, expected {position}")
        position = entry.end or 0
    if size < position:
        raise CheckpointError(
            f"{name} is truncated: its header promises {position} bytes, the file has {size}; {_AGAIN}"
        )
    if size > position:
        raise CheckpointError(
            f"{name} is too long: its header accounts for {position} bytes, the file has {size}; {_AGAIN}"
        )
    return entries


def read_pickle(file: Path, name: str) -> dict[str, Entry]:
    """Read keys, dtypes and shapes of a PyTorch pickle with ``weights_only=True``, without the data.

    Raises:
        CheckpointError: a git-lfs pointer, a truncated file, or a pickle that holds more than tensors.
    """
    with file.open("rb") as stream:
        start = stream.read(1024)
    _refuse_pointer(start, name)
    if start.startswith(b"PK") and not zipfile.is_zipfile(file):
        raise CheckpointError(f"{name} is truncated: it has no directory at its end; {_AGAIN}")
    state = load_pickle(file, name, "meta")
    return {key: Entry(name, _dtype_name(value.dtype), tuple(value.shape)) for key, value in state.items()}


def load_pickle(file: Path, name: str, device: str) -> dict[str, Any]:
    """Load the tensors of a PyTorch pickle, mapped from disk where its format allows it.

    Args:
        file: the file.
        name: its name relative to the checkpoint.
        device: ``"cpu"``, or ``"meta"`` for shapes alone.

    Raises:
        CheckpointError: it is damaged, or holds more than tensors.
    """
    import torch

    # Only the zip format can be mapped; files from before torch 1.6 have to be read.
    mapped = zipfile.is_zipfile(file)
    try:
        state = torch.load(str(file), map_location=device, weights_only=True, mmap=mapped)
    except Exception as error:
        if "weights_only" in str(error) or "Weights only" in str(error):
            raise CheckpointError(
                f"{name} is refused: as a pickle it would run code when loaded; convert it to safetensors where it "
                "can be trusted"
            ) from error
        raise _damaged(name, f"torch cannot read it ({type(error).__name__})") from error
    if not isinstance(state, dict):
        raise _damaged(name, f"expected a dict of tensors, got a {type(state).__name__}")
    return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}


def _read_header(file: Path, name: str) -> tuple[dict[str, Any], int, int]:
    with file.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        start = stream.read(1024)
        _refuse_pointer(start, name)
        if size < 8:
            raise CheckpointError(f"{name} is truncated: expected at least 8 bytes, got {size}; {_AGAIN}")
        length = int.from_bytes(start[:8], "little")
        if length > _MAX_HEADER:
            raise _damaged(name, f"it announces a header of {length} bytes, more than safetensors allows")
        if 8 + length > size:
            raise CheckpointError(
                f"{name} is truncated: its header alone takes {8 + length} bytes, the file has {size}; {_AGAIN}"
            )
        stream.seek(8)
        raw = stream.read(length)
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _damaged(name, "its header is not JSON") from error
    if not isinstance(header, dict):
        raise _damaged(name, f"its header is a {type(header).__name__}, expected a JSON object")
    return header, 8 + length, size


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in an object")
    return found


def _entry(name: str, key: str, value: Any, data_start: int) -> Entry:
    if not isinstance(value, dict) or not {"dtype", "shape", "data_offsets"} <= set(value):
        raise _damaged(name, f"its header does not give dtype, shape and data_offsets of {key}")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in BITS:
        raise _damaged(name, f"{key} has dtype {dtype!r}, expected one of {', '.join(sorted(BITS))}")
    if not _counts(shape) or not _counts(offsets) or len(offsets) != 2:
        raise _damaged(name, f"{key} has shape {shape!r} and data_offsets {offsets!r}")
    bits = BITS[dtype]
    for length in shape:
        bits *= length
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        raise _damaged(
            name, f"{key} of {dtype} {shape} needs {bits / 8:.0f} bytes, its offsets span {offsets[1] - offsets[0]}"
        )
    return Entry(name, dtype, tuple(shape), data_start + offsets[0], data_start + offsets[1])


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _dtype_name(dtype: Any) -> str:
    """Spell a torch dtype as safetensors does."""
    plain = str(dtype).removeprefix("torch.")
    if plain in ("bool", "bfloat16"):
        return {"bool": "BOOL", "bfloat16": "BF16"}[plain]
    if found := re.fullmatch(r"float8_(.+?)(fn|fnu)?", plain):
        return f"F8_{found[1].upper()}"
    for long, short in (("uint", "U"), ("int", "I"), ("float", "F"), ("complex", "C")):
        plain = plain.replace(long, short)
    return plain.upper()


def _refuse_pointer(start: bytes, name: str) -> None:
    if found := _POINTER.search(start):
        raise CheckpointError(
            f"{name} is a git-lfs pointer to {int(found[1])} bytes, not the file itself: half-downloaded; run "
            "`git lfs pull` in the checkpoint"
        )


def _damaged(name: str, what: str) -> CheckpointError:
    return CheckpointError(f"{name} is damaged: {what}; {_AGAIN}")
