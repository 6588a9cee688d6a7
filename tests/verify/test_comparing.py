"""What kind of change a comparison of two checkpoints on disk sees, without and with folds left aside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tiny_checkpoints import saved, tiny_bert, tiny_llama
from two_checkpoints import Tensors, compared, remade, split, tensors_of, without, write

pytestmark = pytest.mark.core
GAIN = "model.layers.1.input_layernorm.weight"
EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, bfloat16, one file."""
    return saved(tiny_llama().bfloat16(), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Untied, float32."""
    return saved(tiny_llama(), tmp_path_factory.mktemp("wide"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tied, bfloat16: no head is stored."""
    folder = saved(tiny_llama(tie_word_embeddings=True).bfloat16(), tmp_path_factory.mktemp("tied"))
    assert HEAD not in tensors_of(folder)
    return folder


def test_a_copy_is_identical(llama: Path, tmp_path: Path) -> None:
    found = compared(llama, remade(llama, tmp_path / "copy"))
    assert (found.figures.summary, found.figures.kind) == ("identical", "identical")
    assert found.figures.same == found.figures.tensors == len(tensors_of(llama))
    assert (found.figures.changes, found.figures.settings, found.figures.files) == ([], [], None)
    assert (found.failures, found.notes, found.pairs, found.folds) == ([], [], [], None)


@pytest.mark.parametrize(
    ("options", "files"),
    [
        ({"files": 3}, "3 files instead of 1"),
        ({"pickle": True}, ".bin instead of safetensors"),
        ({"files": 2, "pickle": True}, "2 files instead of 1, .bin instead of safetensors"),
    ],
)
def test_the_same_tensors_in_other_files(llama: Path, tmp_path: Path, options: dict, files: str) -> None:
    other = remade(llama, tmp_path / "other", **options)
    for one, two in ((llama, other), (other, llama)):
        found = compared(one, two)
        assert (found.figures.kind, found.failures) == ("rearranged", [])
        assert found.figures.same == found.figures.tensors
    assert compared(llama, other).figures.files == files
    assert files in compared(llama, other).figures.summary


def test_tensors_in_other_files_of_the_same_number(llama: Path, tmp_path: Path) -> None:
    one = remade(llama, tmp_path / "one", files=2)
    other = remade(llama, tmp_path / "other", files=2)
    first, second = split(tensors_of(llama), 2)
    name = next(iter(second))
    write(other, [first | {name: second.pop(name)}, second])
    assert compared(one, other).figures.kind == "rearranged"
    assert compared(one, remade(llama, tmp_path / "same", files=2)).figures.kind == "identical"


@pytest.mark.parametrize(("dtype", "word"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16")])
def test_a_cast_is_told_from_a_change(wide: Path, tmp_path: Path, dtype: torch.dtype, word: str) -> None:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: value.to(dtype) for name, value in tensors.items()})

    found = compared(wide, remade(wide, tmp_path / "cast", cast, dtype=str(dtype).removeprefix("torch.")))
    assert (found.figures.summary, found.figures.kind) == (f"cast to {word}", "cast")
    assert {change.kind for change in found.figures.changes} == {"dtype"}
    assert not found.failures and not found.figures.settings

    def nearly(tensors: Tensors) -> None:
        cast(tensors)
        tensors[EMBEDDING].view(torch.int16)[5, 7] += 1

    found = compared(wide, remade(wide, tmp_path / "nearly", nearly))
    assert found.figures.kind == "cast+unknown"
    assert "row 5, column 7" in found.failures[0] and EMBEDDING in found.failures[0]


def test_a_cast_from_float64_may_go_by_way_of_float32(tmp_path: Path) -> None:
    between = 1 + 2.0**-8 + 2.0**-40
    source = saved(tiny_llama().double(), tmp_path / "source")

    def odd(tensors: Tensors) -> None:
        tensors[EMBEDDING][0, 0] = between

    def cast(tensors: Tensors) -> None:
        tensors.update({name: value.to(torch.bfloat16) for name, value in tensors.items()})

    source = remade(source, tmp_path / "odd", odd)
    other = remade(source, tmp_path / "chained", cast)
    assert tensors_of(other)[EMBEDDING][0, 0] == 1.0
    assert compared(source, other).figures.summary == "cast to bf16"


def test_a_widening_cast_is_exact(llama: Path, tmp_path: Path) -> None:
    def cast(tensors: Tensors) -> None:
        tensors.update({name: value.float() for name, value in tensors.items()})

    found = compared(llama, remade(llama, tmp_path / "wide", cast))
    assert found.figures.summary == "cast to fp32"
    assert {change.error for change in found.figures.changes} == {0.0}


def test_values_rounded_and_stored_wide_again(wide: Path, tmp_path: Path) -> None:
    def rounded(tensors: Tensors) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].bfloat16().float()

    (change,) = compared(wide, remade(wide, tmp_path / "rounded", rounded)).figures.changes
    assert change.explained and change.detail == "rounded to bfloat16, stored as fp32"


def test_one_channel_is_named_with_its_size(llama: Path, tmp_path: Path) -> None:
    def fault(tensors: Tensors) -> None:
        tensors[GAIN][17] *= 1.02

    found = compared(llama, remade(llama, tmp_path / "fault", fault))
    assert found.figures.summary == "unknown change in 1 tensor"
    (failure,) = found.failures
    assert failure.startswith(f"tensors: {GAIN} differs in 1 of 32 values, channel 17, by ")
    assert float(failure.rpartition("by ")[2].rstrip("%")) == pytest.approx(2, abs=0.5)


def test_missing_and_extra_tensors_are_named(llama: Path, tmp_path: Path) -> None:
    less = remade(llama, tmp_path / "less", without(GAIN))
    found = compared(llama, less)
    assert found.figures.summary == "1 tensor missing"
    assert found.failures == [f"tensors: {GAIN} is missing"]

    found = compared(less, llama)
    assert found.figures.summary == "1 tensor too many"
    assert found.failures == [f"tensors: {GAIN} is not of the original"]


def test_a_tensor_that_the_class_does_not_load_is_only_noted(llama: Path, tmp_path: Path) -> None:
    def more(tensors: Tensors) -> None:
        tensors["model.layers.7.extra.weight"] = torch.ones(4, 4)

    other = remade(llama, tmp_path / "more", more)
    for one, two in ((llama, other), (other, llama)):
        found = compared(one, two)
        assert not found.failures
        assert "model.layers.7.extra.weight" in found.notes[0]
        assert "1 tensor that the class does not load" in found.figures.summary


def test_another_shape(llama: Path, tmp_path: Path) -> None:
    def shorter(tensors: Tensors) -> None:
        tensors[GAIN] = tensors[GAIN][:16]

    (failure,) = compared(llama, remade(llama, tmp_path / "shorter", shorter)).failures
    assert failure == f"tensors: {GAIN} is BF16 [16], the original's BF16 [32]"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers(llama: Path, tmp_path: Path, value: float) -> None:
    def spoil(tensors: Tensors) -> None:
        tensors[EMBEDDING][3, 4] = value

    found = compared(llama, remade(llama, tmp_path / "spoilt", spoil))
    (change,) = found.figures.changes
    assert change.kind == "nonfinite" and not change.explained
    assert found.failures == [f"tensors: {EMBEDDING} holds 1 NaN or infinite value"]


def test_a_tied_head_that_is_written_out(tied: Path, tmp_path: Path) -> None:
    def write_out(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    for flag in (True, False):
        found = compared(tied, remade(tied, tmp_path / str(flag), write_out, tie_word_embeddings=flag))
        assert not found.failures and not found.figures.settings
        assert found.figures.kind == "rearranged" and HEAD in found.figures.summary
        (change,) = found.figures.changes
        assert (change.name, change.kind, change.explained) == (HEAD, "tied", True)


def test_an_equal_head_that_is_tied(tied: Path, tmp_path: Path) -> None:
    def write_out(tensors: Tensors) -> None:
        tensors[HEAD] = tensors[EMBEDDING].clone()

    untied = remade(tied, tmp_path / "untied", write_out, tie_word_embeddings=False)
    found = compared(untied, tied)
    (change,) = found.figures.changes
    assert (change.name, change.kind, change.explained) == (HEAD, "tied", True)
    assert not found.failures


def test_another_head_that_is_tied(llama: Path, tmp_path: Path) -> None:
    less = remade(llama, tmp_path / "less", without(HEAD), tie_word_embeddings=True)
    (failure,) = compared(llama, less).failures
    assert failure == f"tensors: {HEAD} left out and tied to {EMBEDDING}, which has other values"

    flagged = remade(llama, tmp_path / "flagged", tie_word_embeddings=True)
    (failure,) = compared(llama, flagged).failures
    assert failure.startswith(f"tensors: {HEAD} is stored with other values than {EMBEDDING}")


def test_an_untied_head_without_a_tensor(tied: Path, tmp_path: Path) -> None:
    found = compared(tied, remade(tied, tmp_path / "untied", tie_word_embeddings=False))
    assert found.failures == [f"tensors: {HEAD} is missing"]


def test_norms_of_two_layers_exchanged(llama: Path, tmp_path: Path) -> None:
    other = GAIN.replace("1", "0")

    def exchange(tensors: Tensors) -> None:
        tensors[GAIN], tensors[other] = tensors[other], tensors[GAIN]

    found = compared(llama, remade(llama, tmp_path / "exchanged", exchange))
    assert sorted(found.failures) == [
        f"tensors: {other} holds the values of {GAIN}",
        f"tensors: {GAIN} holds the values of {other}",
    ]


def test_a_shard_of_another_checkpoint(llama: Path, tmp_path: Path) -> None:
    one = remade(llama, tmp_path / "one", files=3)

    def other_values(tensors: Tensors) -> None:
        for value in tensors.values():
            value.copy_(torch.randn(value.shape))

    mixed = remade(llama, tmp_path / "mixed", files=3)
    file = "model-00002-of-00003.safetensors"
    (tmp_path / "mixed" / file).write_bytes((remade(llama, tmp_path / "b", other_values, files=3) / file).read_bytes())
    found = compared(one, mixed)
    assert found.failures == [f"tensors: every tensor of {file} differs: is it of another checkpoint?"]
    assert {change.file for change in found.figures.unexplained} == {file}


@pytest.mark.parametrize(("axis", "word"), [(-1, "row"), (0, "column")])
def test_a_centred_matrix_is_recognised(llama: Path, tmp_path: Path, axis: int, word: str) -> None:
    def centre(tensors: Tensors) -> None:
        rows = tensors[EMBEDDING].double()
        tensors[EMBEDDING] = (rows - rows.mean(axis, keepdim=True)).bfloat16()

    found = compared(llama, remade(llama, tmp_path / "centred", centre))
    (failure,) = found.failures
    assert f"its {word}s were centred, which changes an RMSNorm model" in failure and EMBEDDING in failure


def test_a_centred_embedding_of_a_layer_norm_model_stays_unexplained(tmp_path: Path) -> None:
    bert = saved(tiny_bert(), tmp_path / "bert")
    name = "bert.embeddings.word_embeddings.weight"

    def centre(tensors: Tensors) -> None:
        tensors[name] -= tensors[name].mean(-1, keepdim=True)

    (failure,) = compared(bert, remade(bert, tmp_path / "centred", centre)).failures
    assert "were centred, which may be made up for in a LayerNorm model" in failure


def test_a_scaled_matrix_is_recognised(llama: Path, tmp_path: Path) -> None:
    def scale(tensors: Tensors) -> None:
        tensors[EMBEDDING] *= 0.5

    (failure,) = compared(llama, remade(llama, tmp_path / "scaled", scale)).failures
    assert failure == f"tensors: {EMBEDDING} is the original's times 0.5"


def test_many_unknown_changes_are_counted_first(llama: Path, tmp_path: Path) -> None:
    def other_values(tensors: Tensors) -> None:
        for name in sorted(tensors)[:8]:
            tensors[name].copy_(torch.randn(tensors[name].shape))

    found = compared(llama, remade(llama, tmp_path / "other", other_values))
    assert found.figures.summary == "unknown change in 8 tensors"
    assert found.failures[0].startswith("tensors: unknown change in 8 tensors: lm_head.weight, ")
    assert found.failures[0].endswith("and 5 more")
    assert len(found.failures) == 4


def test_settings_that_bear_on_the_computation_are_listed_and_norms_compared(llama: Path, tmp_path: Path) -> None:
    found = compared(llama, remade(llama, tmp_path / "eps", rms_norm_eps=1e-5, use_cache=False, eos_token_id=3))
    (setting,) = found.figures.settings
    assert (setting.name, setting.original, setting.converted) == ("rms_norm_eps", 1e-6, 1e-5)
    assert found.figures.summary == "identical tensors, other settings: rms_norm_eps"
    assert found.failures == [
        "norms: model.layers.0.input_layernorm and 4 more: eps 1e-05, the original has 1e-06",
    ]
    found = compared(llama, remade(llama, tmp_path / "act", hidden_act="gelu"))
    assert not found.failures
    assert found.notes == ["settings: hidden_act is 'gelu', the original has 'silu'"]


def test_files_that_the_manifest_does_not_know_are_named(llama: Path, tmp_path: Path) -> None:
    other = remade(llama, tmp_path / "other")
    norm = {"name": "model.norm", "spec": {"kind": "rms", "width": 32, "eps": 1e-6}}
    manifest = {
        "schema": 1,
        "source": {"name": str(llama), "revision": None, "files": {"model.safetensors": "0" * 64}},
        "files": {"model.safetensors": "1" * 64},
        "norms": [norm],
    }
    (other / "normswap.json").write_text(json.dumps(manifest), encoding="utf-8")
    found = compared(llama, other)
    assert found.figures.altered == ["model.safetensors"]
    assert found.notes == [
        "the weights were changed since the conversion (model.safetensors)",
        "the original's weight files are not those that the manifest says it was converted from",
    ]
    assert not found.failures


def test_integers_are_compared_by_their_bytes(llama: Path, tmp_path: Path) -> None:
    def quantize(tensors: Tensors) -> None:
        tensors[EMBEDDING] = tensors[EMBEDDING].mul(10).to(torch.int8)

    one = remade(llama, tmp_path / "one", quantize)

    def fault(tensors: Tensors) -> None:
        tensors[EMBEDDING][0, 0] += 1

    assert compared(one, remade(one, tmp_path / "same")).figures.kind == "identical"
    assert compared(one, remade(one, tmp_path / "two", fault)).failures == [f"tensors: {EMBEDDING} differs"]
    (failure,) = compared(llama, one).failures
    assert failure == f"tensors: {EMBEDDING} is I8 [64, 32], the original's BF16 [64, 32]"


def test_a_checkpoint_of_the_bare_model_has_other_names(tmp_path: Path) -> None:
    bare = saved(tiny_bert().bert, tmp_path / "bare")

    def prefix(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[f"bert.{name}"] = tensors.pop(name)

    other = remade(bare, tmp_path / "other", prefix)
    for one, two in ((bare, other), (other, bare)):
        found = compared(one, two)
        assert not found.failures and found.figures.kind == "rearranged"
        assert found.figures.files == f"{len(tensors_of(bare))} tensors renamed"

    def fault(tensors: Tensors) -> None:
        prefix(tensors)
        tensors["bert.encoder.layer.0.output.LayerNorm.weight"][5] *= 1.02

    (failure,) = compared(bare, remade(bare, tmp_path / "fault", fault)).failures
    assert "bert.encoder.layer.0.output.LayerNorm.weight differs in 1 of 32 values, channel 5, by 2%" in failure
