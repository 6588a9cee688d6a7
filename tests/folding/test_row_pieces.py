"""Reading rows, rounding them once, and reading sizes: what the streaming is made of."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from normswap.errors import CheckpointError, UsageError
from normswap.narrowing import lost_range, narrow, round_once
from normswap.rows import row_reader
from normswap.shards import check_source
from normswap.sizes import parse_size

pytestmark = pytest.mark.core

NARROW = [torch.bfloat16, torch.float16, torch.float8_e5m2, torch.float8_e4m3fn]


@pytest.mark.parametrize("dtype", NARROW)
def test_a_value_just_off_the_middle_goes_to_its_own_side(dtype: torch.dtype) -> None:
    """Where a cast by way of float32 lands on the middle first, and then on the even neighbour."""
    width = {1: torch.uint8, 2: torch.int16}[dtype.itemsize]
    last = int(torch.tensor(torch.finfo(dtype).max, dtype=dtype).view(width))
    bits = torch.arange(last, dtype=torch.int32).to(width)
    low = bits.view(dtype).double()
    high = (bits + 1).view(dtype).double()
    middle = (low + high) / 2
    low, high, middle = (torch.cat([value, -value]) for value in (low, high, middle))
    above, below = middle + (high - middle) * 2.0**-30, middle - (middle - low) * 2.0**-30
    assert bool((middle.float().double() == middle).all()) and bool((above.float() == middle.float()).any())
    assert torch.equal(round_once(above, dtype).double(), high)
    assert torch.equal(round_once(below, dtype).double(), low)
    even = torch.cat([bits, bits]) % 2 == 0
    assert torch.equal(round_once(middle, dtype).double(), torch.where(even, low, high))
    for exact in (low, high):
        assert torch.equal(round_once(exact, dtype).double(), exact)


@pytest.mark.parametrize("dtype", [*NARROW, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float32])
def test_the_ends_of_a_dtype_are_told(dtype: torch.dtype) -> None:
    top, bottom = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    inside = torch.tensor([top, -top, bottom, 0.0], dtype=torch.float64)
    assert lost_range(round_once(inside, dtype), inside) is None
    for factor in (1.2, 1e30):
        outside = torch.tensor([top * factor, 1.0, -top * factor], dtype=torch.float64)
        name = str(dtype).removeprefix("torch.")
        assert lost_range(round_once(outside, dtype), outside) == f"2 values overflow in {name}"
        if factor * top < 3e38:
            assert lost_range(round_once(outside.float(), dtype), outside) == f"2 values overflow in {name}"
    small = torch.tensor([bottom * 1e-9, -bottom * 1e-9, 0.0, 1.0], dtype=torch.float64)
    rounded = round_once(small, dtype)
    assert lost_range(rounded, small) == lost_range(rounded, small != 0)
    assert lost_range(rounded, small) == f"2 values that are not zero become zero in {name}"


def test_what_is_not_finite_stays_so() -> None:
    values = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
    found = narrow(values, torch.zeros(3, dtype=torch.bfloat16))
    assert found[0].isnan() and found[1:].tolist() == [torch.inf, -torch.inf]
    assert lost_range(torch.zeros(0, dtype=torch.bfloat16), torch.zeros(0)) is None


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal and of one dtype."""
    return one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("format_", ["safetensors", "pickle"])
@pytest.mark.parametrize("piece", [1, 100, 10**6])
def test_rows_are_read_in_pieces(tmp_path: Path, format_: str, piece: int) -> None:
    tensors = {"a": torch.randn(7, 3).half(), "b": torch.randn(5), "c": torch.tensor(2.0), "d": torch.randn(4, 2, 3)}
    tensors["e"] = torch.zeros(0, 3)
    if format_ == "pickle":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "model.safetensors")
    read = row_reader(check_source(tmp_path), piece)
    for key, value in tensors.items():
        pieces = list(read(key))
        if value.dim():
            assert all(len(p) == 1 or p.nbytes <= piece for p in pieces)
            assert same(torch.cat(pieces) if pieces else value, value)
        else:
            assert same(pieces[0], value) and len(pieces) == 1
    with pytest.raises(CheckpointError, match=r"expected nothing in"):
        next(iter(read("nothing")))


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("1", 1), ("512MB", 512_000_000), ("512 mb", 512_000_000), ("1GiB", 1 << 30), ("1.5GiB", 3 << 29),
        ("2k", 2000), ("7B", 7), ("1TiB", 1 << 40),
    ],
)  # fmt: skip
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GB", "-1GB", "1 apple", "0", "0.1", "1e9", "1_000", "nan", "٣"])
def test_what_is_no_size_is_told(text: str) -> None:
    with pytest.raises(UsageError, match=r"expected a size such as 512MB or 2GiB, got "):
        parse_size(text)
