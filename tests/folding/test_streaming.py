"""A checkpoint written in pieces is what a fold of whole tensors gives, and nothing else in it changes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from stream_edits import Scaled, digest, rounded_by_hand, same, tiny_llama, written
from transformers import LlamaForCausalLM

from normswap import streaming
from normswap.shards import check_source
from normswap.streaming import Added

pytestmark = pytest.mark.core

INDEX = "model.safetensors.index.json"
FLOATS = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.float8_e4m3fnuz, torch.float8_e5m2fnuz),
]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    tiny_llama().save_pretrained(tmp_path / "sharded", max_shard_size="20KB")
    return tmp_path / "sharded"


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    tiny_llama(tied=True).save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_pieces_give_what_whole_tensors_give(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    place = tmp_path_factory.mktemp("pieces")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    tensors, edits, expected = {}, {}, {}
    for number in range(data.draw(st.integers(1, 4))):
        dtype = data.draw(st.sampled_from(FLOATS))
        shape = data.draw(st.lists(st.integers(1, 17), min_size=0, max_size=3))
        key = f"layers.{number}.weight"
        value = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
        # A value that rounds to zero is not zero any more when it is multiplied.
        value = torch.where(value.double() == 0, 1.0, value.double()).to(dtype)
        tensors[key] = expected[key] = value
        if data.draw(st.booleans()):
            columns = shape[-1] if shape else 1
            factor = torch.rand(columns, generator=generator, dtype=torch.float64) + 0.5
            edits[key] = Scaled(factor)
            product = value.double() * factor.reshape(-1 if shape else ())
            expected[key] = rounded_by_hand(product, dtype)
    (place / "in").mkdir()
    save_file(tensors, place / "in" / "model.safetensors", metadata={"format": "pt"})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "_PIECE", data.draw(st.sampled_from([16, 64, 4096])))
        hashes = written(place / "in", place / "out", edits=edits)
    file = place / "out" / "model.safetensors"
    found = load_file(file)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert same(found[key], value), (key, value.dtype)
    assert hashes.files == {"model.safetensors": digest(file)}
    assert hashes.source == {"model.safetensors": digest(place / "in" / "model.safetensors")}
    shutil.rmtree(place)


def test_what_does_not_change_is_byte_identical(sharded: Path, tmp_path: Path) -> None:
    (sharded / "vocab.txt").write_text("words")
    (sharded / "sub").mkdir()
    (sharded / "sub" / "config.json").write_text("{}")
    seen: list[tuple[int, int]] = []
    hashes = written(sharded, tmp_path / "out", progress=lambda *figures: seen.append(figures))
    before = {str(file.relative_to(sharded)): file.read_bytes() for file in sharded.rglob("*") if file.is_file()}
    after = {str(f.relative_to(tmp_path / "out")): f.read_bytes() for f in (tmp_path / "out").rglob("*") if f.is_file()}
    assert before == after
    checkpoint = check_source(sharded)
    assert hashes.source == hashes.files == {name: digest(sharded / name) for name in checkpoint.files}
    assert seen == sorted(seen) and seen[-1] == (checkpoint.size, checkpoint.size)


def test_only_the_shards_of_edited_tensors_change_and_only_in_these(sharded: Path, tmp_path: Path) -> None:
    checkpoint = check_source(sharded)
    key = "model.layers.1.mlp.up_proj.weight"
    factor = torch.rand(32, dtype=torch.float64) + 0.5
    hashes = written(sharded, tmp_path / "out", edits={key: Scaled(factor)})
    differing = [name for name in checkpoint.files if hashes.source[name] != hashes.files[name]]
    assert differing == [checkpoint.tensors[key].file]
    for name in checkpoint.files:
        one, other = (sharded / name).read_bytes(), (tmp_path / "out" / name).read_bytes()
        entry = checkpoint.tensors[key]
        if name in differing:
            assert one[: entry.start] == other[: entry.start] and one[entry.end :] == other[entry.end :]
            assert one[entry.start : entry.end] != other[entry.start : entry.end]
        else:
            assert one == other
        assert hashes.files[name] == digest(tmp_path / "out" / name)
    assert (sharded / INDEX).read_bytes() == (tmp_path / "out" / INDEX).read_bytes()
    found = LlamaForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").state_dict()
    truth = LlamaForCausalLM.from_pretrained(sharded, dtype="auto").state_dict()
    assert all(same(found[k], value) for k, value in truth.items() if k != key)
    assert same(found[key], rounded_by_hand(truth[key].double() * factor, torch.bfloat16))


@pytest.mark.parametrize("form", ["whole", "sharded"])
@pytest.mark.parametrize("edited", [False, True])
def test_an_added_tensor_stands_in_its_shard_its_header_and_the_index(form: str, edited: bool, tmp_path: Path) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    tiny_llama(tied=True).save_pretrained(path, max_shard_size="20KB" if form == "sharded" else "1GB")
    source, new = "model.embed_tokens.weight", "lm_head.weight"
    factor = torch.rand(32, dtype=torch.float64) + 0.5
    edits = {"model.norm.weight": Scaled(torch.full((32,), 2.0))}
    written(path, out, edits=edits, added={new: Added(source, Scaled(factor) if edited else None)})
    before, after = check_source(path), check_source(out)
    assert after.tensors.keys() == {*before.tensors, new}
    entry = after.tensors[new]
    assert (entry.file, entry.shape, entry.dtype) == (before.tensors[source].file, (64, 32), "BF16")
    with safe_open(out / entry.file, "pt") as file:
        embedding, head = file.get_tensor(source), file.get_tensor(new)
        assert file.metadata() == {"format": "pt"}
    with safe_open(path / entry.file, "pt") as file:
        assert same(embedding, file.get_tensor(source))
    wanted = rounded_by_hand(embedding.double() * factor, torch.bfloat16) if edited else embedding
    assert same(head, wanted)
    if form == "sharded":
        assert after.index is not None and before.index is not None
        for key, more in (("total_size", 64 * 32 * 2), ("total_parameters", 64 * 32)):
            if key in before.index["metadata"]:
                assert after.index["metadata"][key] == before.index["metadata"][key] + more
        assert "total_size" in after.index["metadata"]
        assert after.index["weight_map"] == {**before.index["weight_map"], new: entry.file}
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    model = LlamaForCausalLM.from_pretrained(out, dtype="auto")
    assert same(model.lm_head.weight.detach(), wanted)
    assert same(model.model.embed_tokens.weight.detach(), embedding)


def test_added_tensors_keep_the_others_aligned(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, dtype=torch.float64), "b": torch.randn(5), "c": torch.randn(3).half()}
    tensors["d"] = torch.ones(1, dtype=torch.int8)
    (tmp_path / "in").mkdir()
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    written(tmp_path / "in", tmp_path / "out", added={"a2": Added("a"), "b2": Added("b"), "c2": Added("c")})
    checkpoint = check_source(tmp_path / "out")
    for key, entry in checkpoint.tensors.items():
        assert entry.start is not None and entry.start % tensors[key[0]].itemsize == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert all(same(value, tensors[key[0]]) for key, value in found.items()) and len(found) == 7


@pytest.mark.parametrize("sharded_", [False, True])
def test_a_pickle_stays_a_pickle(tmp_path: Path, sharded_: bool) -> None:
    path, out = tmp_path / "in", tmp_path / "out"
    path.mkdir()
    tied = torch.randn(6, 4).bfloat16()
    state = {"embed.weight": tied, "up.weight": torch.randn(5, 4).bfloat16(), "scale": torch.tensor(3.0), "note": "x"}
    state["buffer"] = torch.arange(3)
    names = {key: f"pytorch_model-{n:05}-of-00005.bin" for n, key in enumerate(state)}
    if sharded_:
        for key, value in state.items():
            torch.save({key: value}, path / names[key])
        weight_map = {key: name for key, name in names.items() if key != "note"}
        (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    else:
        torch.save(state, path / "pytorch_model.bin")
    factor = torch.rand(4, dtype=torch.float64) + 0.5
    edits = {"up.weight": Scaled(factor), "scale": Scaled(torch.tensor([0.5], dtype=torch.float64))}
    hashes = written(path, out, edits=edits, added={"head.weight": Added("embed.weight", Scaled(factor))})
    found: dict[str, torch.Tensor] = {}
    for name in check_source(out).files:
        found |= torch.load(out / name, weights_only=True)
        assert hashes.files[name] == digest(out / name) and hashes.source[name] == digest(path / name)
    assert found.keys() == {*state, "head.weight"} - {"note"}
    assert same(found["embed.weight"], tied) and same(found["buffer"], torch.arange(3))
    assert same(found["up.weight"], rounded_by_hand(state["up.weight"].double() * factor, torch.bfloat16))
    assert same(found["head.weight"], rounded_by_hand(tied.double() * factor, torch.bfloat16))
    assert same(found["scale"], torch.tensor(1.5))
    if sharded_:
        assert {n for n in hashes.files if hashes.files[n] == hashes.source[n]} == {names["buffer"]}


def test_threads_of_torch_come_back(whole: Path, tmp_path: Path) -> None:
    torch.set_num_threads(2)
    try:
        counts: list[int] = []
        written(whole, tmp_path / "out", progress=lambda *_: counts.append(torch.get_num_threads()))
        assert set(counts) == {1} and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


PEAK = """
import resource, sys, torch
from pathlib import Path
from normswap.shards import check_source
from normswap.streaming import Added, write_checkpoint
import normswap.loading
class Scaled:
    def apply(self, rows, start):
        return rows.double().mul_(1.5)
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) * 1024
source, target, limit = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) or None
target.mkdir()
checkpoint = check_source(source)
torch.ones(4, dtype=torch.bfloat16).double().mul_(1.5)
before = peak()
edits = {key: Scaled() for key in checkpoint.tensors}
write_checkpoint(checkpoint, target, edits=edits, added={"z": Added("b", Scaled())}, max_memory=limit)
print(peak() - before)
"""


@pytest.mark.parametrize(("limit", "bound"), [(0, 1 << 26), (1 << 25, 1 << 25)])
def test_memory_is_bounded_by_pieces(tmp_path: Path, limit: int, bound: int) -> None:
    (tmp_path / "in").mkdir()
    tensors = {"a": torch.ones(2048, 4096, dtype=torch.bfloat16), "b": torch.ones(64, 16, 8192, dtype=torch.bfloat16)}
    tensors["c"] = torch.ones(1 << 23, dtype=torch.float16)
    save_file(tensors, tmp_path / "in" / "model.safetensors")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", PEAK, tmp_path / "in", tmp_path / "out", str(limit)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=200)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= bound, f"{int(done.stdout) >> 20} MiB"
