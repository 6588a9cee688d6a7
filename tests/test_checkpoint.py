"""Checking, copying and describing a checkpoint: every kind of damage is told in one line."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from normswap.checkpoint import (
    MANIFEST,
    check_finite,
    check_floating,
    check_source,
    hash_weights,
    read_manifest,
    write_checkpoint,
    write_manifest,
)
from normswap.errors import CheckpointError
from normswap.spec import NormSpec

INDEX = "model.safetensors.index.json"
SPEC = NormSpec("rms", 8, 1e-6).to_dict()
SOURCE = {"name": "x", "revision": None, "files": {}}


def tiny_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
    )
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("saved")
    tiny_llama().save_pretrained(place / "whole")
    tiny_llama().save_pretrained(place / "sharded", max_shard_size="20KB")
    return place


@pytest.fixture
def whole(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "whole", tmp_path / "whole"))


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved / "sharded", tmp_path / "sharded"))


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        check_source(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def edit_index(path: Path, change: object) -> None:
    index = json.loads((path / INDEX).read_text())
    index["weight_map"].update(change)
    (path / INDEX).write_text(json.dumps(index))


def write_pickles(path: Path, state: dict[str, object], *, index: bool = False) -> Path:
    path.mkdir()
    if not index:
        torch.save(state, path / "pytorch_model.bin")
        return path
    weight_map = {}
    for number, (key, value) in enumerate(state.items()):
        name = f"pytorch_model-{number:05}-of-{len(state):05}.bin"
        torch.save({key: value}, path / name)
        weight_map[key] = name
    (path / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def test_a_sound_checkpoint_is_read_from_its_headers(whole: Path, sharded: Path) -> None:
    one, many = check_source(whole), check_source(sharded)
    assert one.files == ("model.safetensors",) and one.index is None and one.format == "safetensors"
    assert len(many.files) > 2 and many.index_name == INDEX and many.index is not None
    truth = load_file(whole / "model.safetensors")
    for checkpoint in (one, many):
        assert {key: entry.shape for key, entry in checkpoint.tensors.items()} == {
            key: tuple(value.shape) for key, value in truth.items()
        }
        assert {entry.dtype for entry in checkpoint.tensors.values()} == {"F32"}
        check_finite(checkpoint)
    assert INDEX in many.others and "config.json" in many.others


def test_half_downloads_are_told_as_such(whole: Path, sharded: Path) -> None:
    pointer = f"version 1\noid sha256:{'0' * 64}\nsize 4000000\n"
    (whole / "model.safetensors").write_text(pointer)
    assert "is a git-lfs pointer to 4000000 bytes, not the file itself: half-downloaded" in refusal(whole)
    (whole / "model.safetensors").rename(whole / "model.safetensors.incomplete")
    assert "is half-downloaded: it holds *.incomplete and no weights" in refusal(whole)
    first = check_source(sharded).files[0]
    (sharded / first).rename(sharded / f"{first}.incomplete")
    assert f"names the shard {first}, half-downloaded" in refusal(sharded)
    (sharded / f"{first}.incomplete").unlink()
    assert f"names the shard {first}, it is not there" in refusal(sharded)


def test_a_folder_without_default_weights_is_refused(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "model.fp16.safetensors")
    message = refusal(whole)
    assert "expected weights in" in message and "model.fp16.safetensors is not what transformers loads" in message


@pytest.mark.parametrize("shard", ["/etc/passwd", "../other/model.safetensors", "a/../../b.safetensors", "..\\b"])
def test_a_weight_map_that_leaves_the_folder_is_refused(sharded: Path, shard: str) -> None:
    edit_index(sharded, {"lm_head.weight": shard})
    assert f"{INDEX} points outside its folder, to {shard!r}; refused" in refusal(sharded)


def test_a_damaged_index_is_refused(sharded: Path) -> None:
    checkpoint = check_source(sharded)
    edit_index(
        sharded,
        {"model.norm.weight": next(n for n in checkpoint.files if n != checkpoint.tensors["model.norm.weight"].file)},
    )
    assert "says that model.norm.weight is in" in refusal(sharded)
    edit_index(sharded, {"model.norm.weight": 3})
    assert "expected the name of a shard for model.norm.weight" in refusal(sharded)
    for text, words in (
        ("{", "expected JSON in"),
        ("[]", "expected a weight_map in"),
        ("{}", "expected a weight_map in"),
    ):
        (sharded / INDEX).write_text(text)
        assert words in refusal(sharded)


def test_links_may_lead_to_the_hub_cache_blobs_only(whole: Path, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / ("0" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    checkpoint = check_source(snapshot)
    target = tmp_path / "copy"
    target.mkdir()
    write_checkpoint(checkpoint, target, check=False)
    assert not any(file.is_symlink() for file in target.iterdir())
    (snapshot / "model.safetensors").resolve().unlink()
    assert "model.safetensors in" in refusal(snapshot) and "half-downloaded" in refusal(snapshot)

    shutil.move(whole / "model.safetensors", tmp_path / "elsewhere.safetensors")
    (whole / "model.safetensors").symlink_to(tmp_path / "elsewhere.safetensors")
    assert "points outside its folder, to" in refusal(whole)


def test_private_files_behind_links_do_not_slip_into_a_copy(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("key")
    (whole / "README.md").symlink_to(tmp_path / "secret")
    assert "README.md in" in refusal(whole) and "points outside its folder" in refusal(whole)
    (whole / "README.md").unlink()
    os.mkfifo(whole / "README.md")
    assert "expected a plain file at" in refusal(whole)


def test_a_single_file_wins_over_an_index_as_in_transformers(whole: Path, sharded: Path) -> None:
    shutil.copy(whole / "model.safetensors", sharded)
    checkpoint = check_source(sharded)
    assert checkpoint.files == ("model.safetensors",) and checkpoint.index is None
    assert checkpoint.notes == (
        f"model.safetensors and {INDEX} are both there: transformers loads model.safetensors, the rest is left behind",
    )
    assert not [name for name in checkpoint.others if name.startswith("model")]


def test_the_config_may_name_the_weights(whole: Path) -> None:
    (whole / "model.safetensors").rename(whole / "mine.safetensors")
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "transformers_weights": "mine.safetensors"}))
    assert check_source(whole).files == ("mine.safetensors",)
    (whole / "config.json").write_text(json.dumps({**config, "transformers_weights": "../mine.safetensors"}))
    assert "config.json points outside its folder" in refusal(whole)


def test_pickles_are_checked_too(tmp_path: Path) -> None:
    state = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.zeros(3)}
    path = write_pickles(tmp_path / "sharded", state, index=True)
    checkpoint = check_source(path)
    assert checkpoint.format == "pickle" and len(checkpoint.files) == 2
    assert {key: (entry.dtype, entry.shape) for key, entry in checkpoint.tensors.items()} == {
        "a": ("BF16", (2,)),
        "b": ("F32", (3,)),
    }
    torch.save({"c": torch.zeros(3)}, path / checkpoint.tensors["b"].file)
    assert "says that b is in pytorch_model-00001-of-00002.bin, which has no such tensor" in refusal(path)
    legacy = tmp_path / "legacy"
    legacy.mkdir()
    torch.save(state, legacy / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    check_finite(check_source(legacy))


def test_a_truncated_or_unsafe_pickle_is_refused(tmp_path: Path) -> None:
    path = write_pickles(tmp_path / "m", {"a": torch.ones(1000)})
    file = path / "pytorch_model.bin"
    file.write_bytes(file.read_bytes()[:-500])
    assert "pytorch_model.bin is truncated" in refusal(path)
    torch.save({"a": os.system}, file)
    assert "pytorch_model.bin is refused: as a pickle it would run code when loaded" in refusal(path)
    file.write_bytes(b"nothing of the kind")
    assert "pytorch_model.bin" in refusal(path)


def test_a_copy_is_whole_independent_and_without_junk(sharded: Path, tmp_path: Path) -> None:
    keep = (
        *(
            "generation_config.json",
            "tokenizer.json",
            "LICENSE",
            "README.md",
            "modeling_mine.py",
            "chat_template.jinja",
        ),
        *("additional_chat_templates/tool.jinja", "modules.json", "1_Pooling/config.json", "2_Dense/model.safetensors"),
        *("colbert_linear.pt", "decision_head.safetensors", "vocab.txt", "preprocessor_config.json"),
    )
    leave = (
        *("pytorch_model.bin", "pytorch_model.bin.index.json", "model.fp16.safetensors", "tf_model.h5", "optimizer.pt"),
        *("model-00001-of-00099.safetensors", "flax_model.msgpack", "onnx/model.onnx", "openvino/openvino_model.xml"),
        *(
            "model.gguf",
            "original/consolidated.00.pth",
            "params.json",
            "rng_state_0.pth",
            ".git/config",
            ".gitattributes",
        ),
        *(".cache/huggingface/x.lock", "normswap.json", "training_args.bin", "checkpoint-500/model.safetensors"),
        *("__pycache__/modeling_mine.pyc", "2_Dense/pytorch_model.bin", "trainer_state.json", "x.lock", "runs/events"),
    )
    for name in (*keep, *leave):
        (sharded / name).parent.mkdir(exist_ok=True, parents=True)
        (sharded / name).write_text(name)
    checkpoint = check_source(sharded)
    target, seen = tmp_path / "copy", []
    target.mkdir()
    written = write_checkpoint(checkpoint, target, check=False, progress=lambda done, total: seen.append((done, total)))
    hashes = written.source
    copied = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert copied == {*keep, *checkpoint.files, INDEX, "config.json"}
    assert all((target / name).read_bytes() == (sharded / name).read_bytes() for name in copied)
    assert all((target / name).stat().st_nlink == 1 for name in copied)
    assert hashes == hash_weights(checkpoint) == hash_weights(check_source(target))
    assert set(hashes) == set(checkpoint.files) and seen[-1] == (checkpoint.size, checkpoint.size)
    reloaded = LlamaForCausalLM.from_pretrained(target).state_dict()
    assert all(torch.equal(value, reloaded[key]) for key, value in tiny_llama().state_dict().items())


def test_the_manifest_is_read_back_and_strict(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None
    write_manifest(tmp_path, {"source": SOURCE, "norms": [{"name": "a", "spec": SPEC}]})
    found = read_manifest(tmp_path)
    assert found is not None and found["schema"] == 1 and found["source"] == SOURCE and "normswap" in found
    with pytest.raises(TypeError, match=r"expected a dict for normswap.json, got a list"):
        write_manifest(tmp_path, ["x"])  # type: ignore[arg-type]
    for text, words in (
        ('{"schema": 2}', "expected schema 1 in .*, got 2; upgrade normswap"),
        ("{", "expected JSON in"),
    ):
        (tmp_path / MANIFEST).write_text(text)
        with pytest.raises(CheckpointError, match=words):
            read_manifest(tmp_path)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({}, "expected an object under source, got none"),
        ({"source": None}, "expected an object under source, got null"),
        ({"source": {}}, "expected a text under source.name, got none"),
        ({"source": {**SOURCE, "revision": 3}}, "expected a text or null under source.revision, got 3"),
        ({"source": {"name": "x"}}, "expected an object under source.files, got none"),
        ({"source": SOURCE}, "expected a list under norms, got none"),
        ({"source": SOURCE, "norms": []}, "expected at least one norm under norms, it is empty"),
        ({"source": SOURCE, "norms": [3]}, r"expected an object at norms\[0\], got 3"),
        ({"source": SOURCE, "norms": [{"spec": SPEC}]}, r"expected a text under norms\[0\].name, got none"),
        ({"source": SOURCE, "norms": [{"name": "a"}]}, r"expected an object under norms\[0\].spec, got none"),
        ({"source": SOURCE, "norms": [{"name": "a", "spec": None}]}, r"norms\[0\].spec, got null"),
        (
            {"source": SOURCE, "norms": [{"name": "a", "spec": {**SPEC, "taste": 1}}]},
            r"no spec: .*got also \['taste'\]",
        ),
        (
            {"source": SOURCE, "norms": [{"name": "a", "spec": {"kind": "rms"}}]},
            r"norms\[0\].spec is no spec: .*'width'",
        ),
    ],
)
def test_a_damaged_manifest_is_told_with_what_is_missing(tmp_path: Path, data: dict[str, object], words: str) -> None:
    write_manifest(tmp_path, data)
    with pytest.raises(CheckpointError, match=rf"normswap\.json in .* is damaged: .*{words}.*; convert the checkpoint"):
        read_manifest(tmp_path)


def test_minus_infinity_is_sound_in_a_stored_mask_only(tmp_path: Path) -> None:
    def check(mask: float, weight: float) -> None:
        tensors = {"bert.mask": torch.full((3,), mask), "bert.up.weight": torch.full((3,), weight)}
        save_file(tensors, tmp_path / "model.safetensors")
        check_finite(check_source(tmp_path), {"up.weight"})

    check(-torch.inf, 1.0)
    for value in (torch.nan, torch.inf):
        with pytest.raises(CheckpointError, match=r"bert\.mask in model\.safetensors holds 3 NaN or infinite values"):
            check(value, 1.0)
    with pytest.raises(CheckpointError, match=r"bert\.up\.weight in model\.safetensors holds 3 NaN"):
        check(-torch.inf, -torch.inf)
    save_file({"mask": torch.full((3,), -torch.inf)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"mask in model\.safetensors holds 3 NaN"):
        check_finite(check_source(tmp_path))


def test_integers_are_no_weights(tmp_path: Path) -> None:
    tensors = {"up.weight": torch.ones(3, dtype=torch.int8), "position_ids": torch.arange(3)}
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = check_source(tmp_path)
    check_floating(checkpoint, ["down.weight"])
    for name in ("up.weight", "model.up.weight"):
        with pytest.raises(CheckpointError, match=r"the parameter up\.weight in model\.safetensors, got dtype I8"):
            check_floating(checkpoint, [name])


def test_complex_numbers_of_a_pickle_are_looked_at(tmp_path: Path) -> None:
    path = write_pickles(tmp_path / "m", {"a": torch.tensor([complex(1, torch.nan)], dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"a in pytorch_model\.bin holds 1 NaN"):
        check_finite(check_source(path))
