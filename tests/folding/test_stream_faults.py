"""What ends a conversion: values out of range, a damaged source, a target that is not what it should be."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from stream_edits import Scaled, tiny_llama, written

from normswap.errors import CheckpointError, OutputError, RangeLost, UsageError
from normswap.layout import check_written
from normswap.shards import check_source
from normswap.streaming import Added, write_checkpoint

pytestmark = pytest.mark.core


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    tiny_llama(tied=True).save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@pytest.mark.parametrize("format_", ["safetensors", "pickle"])
@pytest.mark.parametrize("edited", [False, True])
def test_nan_in_the_source_is_found_on_the_way(tmp_path: Path, format_: str, edited: bool) -> None:
    (tmp_path / "in").mkdir()
    tensors = {"mask": torch.full((4,), -torch.inf), "up.weight": torch.tensor([[1.0, torch.nan]])}
    if format_ == "pickle":
        torch.save(tensors, tmp_path / "in" / "pytorch_model.bin")
    else:
        save_file(tensors, tmp_path / "in" / "model.safetensors")
    edits = {"up.weight": Scaled(torch.ones(2))} if edited else {}
    with pytest.raises(CheckpointError, match=r"^up\.weight in .* holds 1 NaN or infinite values; the checkpoint is"):
        written(tmp_path / "in", tmp_path / "out", edits=edits, check=not edited, parameters={"up.weight"})
    if not edited:
        written(tmp_path / "in", tmp_path / "unchecked", check=False)
        with pytest.raises(
            CheckpointError, match=r"^mask in .* holds 4 NaN .*\(1 more tensors of this file do as well"
        ):
            written(tmp_path / "in", tmp_path / "strict")


def test_edits_need_one_floating_point_tensor_each(sharded: Path, tmp_path: Path) -> None:
    def refusal(**options: Any) -> str:
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        with pytest.raises(CheckpointError) as caught:
            written(sharded, tmp_path / "out", **options)
        return str(caught.value)

    edit = Scaled(torch.ones(32))
    assert "expected missing.weight in" in refusal(edits={"missing.weight": edit})
    assert "expected missing.weight in" in refusal(added={"new": Added("missing.weight")})
    assert "expected no lm_head.weight in" in refusal(added={"lm_head.weight": Added("model.norm.weight")})
    checkpoint = check_source(sharded)
    place, key = checkpoint.tensors["model.norm.weight"].file, "model.norm.weight"
    other = next(name for name in checkpoint.files if name != place)
    tensors = load_file(sharded / other)
    save_file({**tensors, key: torch.ones(32)}, sharded / other, metadata={"format": "pt"})
    assert f"{key} stands in {place} and in {other}; expected it once" in refusal(edits={key: edit})
    written(sharded, tmp_path / "plain")
    tensors["counts"] = torch.ones(3, dtype=torch.int32)
    save_file(tensors, sharded / other, metadata={"format": "pt"})
    assert "expected floating-point numbers in counts" in refusal(edits={"counts": edit})


def test_what_was_written_is_held_against_the_source(sharded: Path, tmp_path: Path) -> None:
    checkpoint = check_source(sharded)
    out = tmp_path / "out"

    def fault(damage: Any) -> str:
        shutil.rmtree(out, ignore_errors=True)
        written(sharded, out)
        damage()
        with pytest.raises(CheckpointError) as caught:
            check_written(checkpoint, out, {})
        return str(caught.value)

    first = checkpoint.files[0]
    tensors = load_file(sharded / first)
    key = next(iter(tensors))
    stale = "expected model-00001-of-"
    assert stale in fault(lambda: save_file(tensors, out / "model.safetensors"))
    assert "names the shard" in fault(lambda: (out / first).unlink())
    assert "which has no such tensor" in fault(lambda: save_file({"x": torch.ones(1)}, out / first))
    assert "expected no tensor for x" in fault(lambda: save_file({**tensors, "x": torch.ones(1)}, out / first))
    wide = {name: value.float() for name, value in tensors.items()}
    assert f"for {key}, got" in fault(lambda: save_file(wide, out / first))
    flat = {name: value.reshape(-1, 1) for name, value in tensors.items()}
    assert f"for {key}, got" in fault(lambda: save_file(flat, out / first))


@pytest.mark.parametrize("change", ["longer", "shorter", "touched"])
def test_a_source_that_changes_meanwhile_is_refused(whole: Path, tmp_path: Path, change: str) -> None:
    file = whole / "model.safetensors"
    size = file.stat().st_size

    def disturb(done: int, _: int) -> None:
        if 0 < done < 5000:
            if change == "touched":
                os.utime(file)
            else:
                os.truncate(file, size + 1 if change == "longer" else size - 100)

    with pytest.raises(CheckpointError, match=r"model\.safetensors changed while it was read; run again"):
        written(whole, tmp_path / "out", progress=disturb)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_ends_the_threads_and_closes_the_files(sharded: Path, tmp_path: Path, error: type) -> None:
    def interrupt(done: int, total: int) -> None:
        if done > total // 2:
            raise error

    with pytest.raises(error):
        written(sharded, tmp_path / "out", progress=interrupt)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("normswap")]
    handles = [str(handle.readlink()) for handle in Path("/proc/self/fd").iterdir() if handle.exists()]
    assert not [name for name in handles if str(tmp_path) in name]


def test_too_little_memory_is_refused(whole: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"expected at least 32 MiB as --max-memory, got 1000 bytes"):
        written(whole, tmp_path / "out", max_memory=1000)


def test_a_target_that_cannot_be_written_is_told(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "out" / "model.safetensors").mkdir(parents=True)
    (tmp_path / "out" / "model.safetensors" / "x").write_text("x")
    with pytest.raises(OutputError, match=r"cannot write model\.safetensors: "):
        write_checkpoint(check_source(whole), tmp_path / "out")


@pytest.mark.parametrize(
    ("dtype", "factor", "words"),
    [
        (torch.float16, 1e6, r"3 values overflow in float16"),
        (torch.float16, 1e-9, r"3 values that are not zero become zero in float16"),
        (torch.float8_e4m3fn, 1e4, r"3 values overflow in float8_e4m3fn"),
        (torch.float8_e5m2, 1e9, r"3 values overflow in float8_e5m2"),
        (torch.float8_e4m3fnuz, 1e4, r"3 values overflow in float8_e4m3fnuz"),
        (torch.float8_e5m2fnuz, 1e9, r"3 values overflow in float8_e5m2fnuz"),
        (torch.float8_e4m3fn, 1e-9, r"3 values that are not zero become zero in float8_e4m3fn"),
        (torch.float8_e4m3fnuz, -1e-9, r"3 values that are not zero become zero in float8_e4m3fnuz"),
        (torch.float8_e5m2, 1e-9, r"3 values that are not zero become zero in float8_e5m2"),
        (torch.bfloat16, 1e39, r"3 values overflow in bfloat16"),
        (torch.float32, -1e-50, r"3 values that are not zero become zero in float32"),
    ],
)
def test_values_out_of_range_are_refused_by_name(tmp_path: Path, dtype: torch.dtype, factor: float, words: str) -> None:
    (tmp_path / "in").mkdir()
    # The zero stays zero, and is no loss.
    save_file({"up.weight": torch.tensor([[1.0, 2, 0, -3]]).to(dtype)}, tmp_path / "in" / "model.safetensors")
    edits = {"up.weight": Scaled(torch.full((4,), factor, dtype=torch.float64))}
    with pytest.raises(RangeLost, match=rf"^up\.weight cannot be changed within its stored dtype: {words}") as caught:
        written(tmp_path / "in", tmp_path / "out", edits=edits)
    assert caught.value.key == "up.weight" and caught.value.what in str(caught.value)
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_factor_of_zero_loses_no_range(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    save_file({"up.weight": torch.tensor([[1.0, -2.0]]).half()}, tmp_path / "in" / "model.safetensors")
    written(tmp_path / "in", tmp_path / "out", edits={"up.weight": Scaled(torch.zeros(2))})
    assert load_file(tmp_path / "out" / "model.safetensors")["up.weight"].tolist() == [[0.0, -0.0]]


def test_a_stale_file_in_the_target_that_would_be_loaded_is_told(sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    save_file({"model.norm.weight": torch.zeros(32)}, out / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"the checkpoint written to .*out is wrong: expected model-00001-of-"):
        write_checkpoint(check_source(sharded), out)


def test_new_values_of_another_shape_are_no_edit(sharded: Path, tmp_path: Path) -> None:
    class Summed:
        def apply(self, rows: torch.Tensor, start: int) -> torch.Tensor:
            return rows.double().sum(1, keepdim=True)

    with pytest.raises(ValueError, match=r"expected new values of shape \(64, 32\) for lm_head\.weight, got"):
        written(sharded, tmp_path / "out", edits={"lm_head.weight": Summed()})
