"""What a comparison makes of folds: those of this tool, those of others, and those that went wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from tiny_checkpoints import saved, tiny_bert, tiny_llama
from two_checkpoints import (
    LLAMA_READERS,
    Tensors,
    compared,
    fold_llama,
    product,
    remade,
    tensors_of,
    tiny_gpt2,
    tiny_mixtral,
)

import normswap
from normswap.comparing import Comparison
from normswap.errors import CheckpointError

pytestmark = pytest.mark.core
GAIN = "model.layers.1.post_attention_layernorm.weight"
NORM = GAIN.removesuffix(".weight")
READER = "model.layers.1.mlp.gate_proj.weight"
HEAD, EMBEDDING, FINAL = "lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
PRODUCTS: dict[str, Product] = {
    "float64": product,
    "float32": lambda weight, gain: (weight.float() * gain.float()).to(weight.dtype),
    "stored": lambda weight, gain: weight * gain,
}


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
    """Tied, bfloat16."""
    return saved(tiny_llama(tie_word_embeddings=True).bfloat16(), tmp_path_factory.mktemp("tied"))


def hold_folded(found: Comparison, gains: int, linears: int, kind: str = "folded") -> None:
    """Expect nothing but folds."""
    words = f"{gains} gain{'s' if gains > 1 else ''} folded into {linears} linear{'s' if linears > 1 else ''}"
    assert found.failures == []
    assert found.figures.summary.startswith(words) and found.figures.kind == kind
    assert found.folds is not None and len(found.folds.folds) == len(found.pairs) == gains
    assert all(pair.passed and pair.error <= pair.bound for pair in found.pairs)
    assert all((pair.channel_error or 0.0) <= (pair.channel_bound or 0.0) for pair in found.pairs)


@pytest.mark.parametrize(
    ("way", "dtype"), [("float64", torch.float16), ("float32", torch.bfloat16), ("stored", torch.float32)]
)
def test_a_fold_of_another_tool(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    source = saved(tiny_llama().to(dtype), tmp_path / "source")
    found = compared(source, remade(source, tmp_path / "hand", lambda t: fold_llama(t, 2, PRODUCTS[way])))
    hold_folded(found, 4, 10)
    assert {change.kind for change in found.figures.changes} == {"folded"}
    assert found.figures.same == found.figures.tensors - 14


def test_some_of_the_gains(llama: Path, tmp_path: Path) -> None:
    found = compared(llama, remade(llama, tmp_path / "some", lambda t: fold_llama(t, 1, norms=("input_layernorm",))))
    hold_folded(found, 1, 3)
    assert found.folds is not None
    assert [fold.name for fold in found.folds.folds] == ["model.layers.0.input_layernorm"]


def test_products_that_are_rounded_twice_are_counted_in_units(llama: Path, tmp_path: Path) -> None:
    def twice(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
        cut = (weight.float() * gain.float()).view(torch.int32) & ~0x1FFF
        return cut.view(torch.float32).to(weight.dtype)

    found = compared(llama, remade(llama, tmp_path / "twice", lambda t: fold_llama(t, 2, twice)))
    hold_folded(found, 4, 10)
    assert any("1 unit in the last place off, rounded in another way" in one.detail for one in found.figures.changes)


@pytest.mark.parametrize(("first", "dtype"), [("fold", torch.float16), ("cast", torch.bfloat16)])
def test_a_fold_and_a_cast(wide: Path, tmp_path: Path, first: str, dtype: torch.dtype) -> None:
    def change(tensors: Tensors) -> None:
        if first == "fold":
            fold_llama(tensors, 2)
        tensors.update({name: value.to(dtype) for name, value in tensors.items()})
        if first == "cast":
            fold_llama(tensors, 2, PRODUCTS["stored"])

    found = compared(wide, remade(wide, tmp_path / "both", change))
    hold_folded(found, 4, 10, "folded+cast")
    assert found.figures.summary.endswith(f", cast to {'bf16' if dtype == torch.bfloat16 else 'fp16'}")


def test_a_fold_that_is_cast_to_finer_numbers(llama: Path, tmp_path: Path) -> None:
    def change(tensors: Tensors) -> None:
        fold_llama(tensors, 2)
        tensors.update({name: value.half() for name, value in tensors.items()})

    hold_folded(compared(llama, remade(llama, tmp_path / "both", change)), 4, 10, "folded+cast")


def untie(tensors: Tensors) -> None:
    tensors[HEAD] = product(tensors[EMBEDDING], tensors[FINAL])
    tensors[FINAL] = torch.ones_like(tensors[FINAL])


def test_a_head_that_another_tool_untied(tied: Path, tmp_path: Path) -> None:
    found = compared(tied, remade(tied, tmp_path / "untied", untie, tie_word_embeddings=False))
    hold_folded(found, 1, 1)
    assert not found.figures.settings

    left = remade(tied, tmp_path / "left", untie)
    (failure,) = compared(tied, left).failures
    assert failure.startswith(f"tensors: {HEAD} is stored with other values than {EMBEDDING}")


def test_a_final_gain_that_is_gone_while_the_head_is_tied(tied: Path, tmp_path: Path) -> None:
    def drop(tensors: Tensors) -> None:
        tensors[FINAL] = torch.ones_like(tensors[FINAL])

    found = compared(tied, remade(tied, tmp_path / "left", drop))
    assert found.figures.kind == "unknown" and found.folds is None
    assert found.failures == [
        f"folds: model.norm: its gain became the identity: {HEAD}, which reads it, is still tied to {EMBEDDING} and "
        "not scaled"
    ]


def test_a_reader_that_was_not_scaled(llama: Path, tmp_path: Path) -> None:
    found = compared(llama, remade(llama, tmp_path / "fault", lambda t: fold_llama(t, 2, but=(READER,))))
    assert found.failures == [f"folds: {READER} was not scaled: it is the original's, though {NORM} was folded"]
    assert found.figures.summary == "4 gains folded into 9 linears, unknown change in 1 tensor"
    assert [pair.norm for pair in found.pairs if not pair.passed] == [NORM]
    assert found.folds is not None and NORM not in {fold.name for fold in found.folds.folds}


def test_a_gain_that_nothing_took(llama: Path, tmp_path: Path) -> None:
    readers = tuple(f"model.layers.1.{name}.weight" for name in LLAMA_READERS["post_attention_layernorm"])
    found = compared(llama, remade(llama, tmp_path / "fault", lambda t: fold_llama(t, 2, but=readers)))
    assert len(found.failures) == 2 and all("was not scaled" in failure for failure in found.failures)
    assert "3 gains folded into 8 linears" in found.figures.summary


def test_one_channel_of_one_reader(llama: Path, tmp_path: Path) -> None:
    def fault(tensors: Tensors) -> None:
        tensors[READER][:, 17] *= 1.02
        fold_llama(tensors, 2)

    found = compared(llama, remade(llama, tmp_path / "fault", fault))
    (failure,) = found.failures
    assert READER in failure and NORM in failure and "column 17" in failure
    (pair,) = [pair for pair in found.pairs if not pair.passed]
    assert (pair.norm, pair.channel) == (NORM, 17)
    assert pair.channel_error is not None and pair.channel_bound is not None
    assert pair.channel_error > pair.channel_bound


def test_one_expert_that_was_not_scaled(tmp_path: Path) -> None:
    source = saved(tiny_mixtral().bfloat16(), tmp_path / "source")
    names = [name for name in tensors_of(source) if ".experts." in name and "layers.1." in name]
    left = [name for name in names if name.endswith(("2.w1.weight", "2.w3.weight"))]
    readers = [name for name in names if name.endswith(("w1.weight", "w3.weight"))]
    assert len(readers) == 6, "this transformers stores experts in another way"
    readers.append("model.layers.1.block_sparse_moe.gate.weight")

    def fold(tensors: Tensors, but: list[str]) -> None:
        for name in readers:
            if name not in but:
                tensors[name] = product(tensors[name], tensors[GAIN])
        tensors[GAIN] = torch.ones_like(tensors[GAIN])

    hold = compared(source, remade(source, tmp_path / "right", lambda t: fold(t, [])))
    assert hold.failures == [] and hold.figures.kind == "folded"
    found = compared(source, remade(source, tmp_path / "wrong", lambda t: fold(t, left)))
    assert len(found.failures) == len(left) == 2
    assert all(name in failure and NORM in failure for name, failure in zip(left, found.failures, strict=True))


@pytest.mark.parametrize(("way", "dtype"), [("float64", torch.bfloat16), ("stored", torch.float32)])
def test_layer_norms_whose_bias_is_moved(tmp_path: Path, way: str, dtype: torch.dtype) -> None:
    source = saved(tiny_gpt2().to(dtype), tmp_path / "source")
    norm, reader = "transformer.h.1.ln_1", "transformer.h.1.attn.c_attn"

    def change(tensors: Tensors, share: float = 1.0) -> None:
        gain, bias = tensors[f"{norm}.weight"], tensors[f"{norm}.bias"]
        weight, home = tensors[f"{reader}.weight"], tensors[f"{reader}.bias"]
        if way == "float64":
            moved = home.double() + share * (bias.double() @ weight.double())
        else:
            moved = home + share * (bias @ weight)
        tensors[f"{reader}.bias"] = moved.to(dtype)
        # A Conv1D has its inputs along the rows.
        tensors[f"{reader}.weight"] = PRODUCTS[way](weight, gain[:, None])
        tensors[f"{norm}.weight"], tensors[f"{norm}.bias"] = torch.ones_like(gain), torch.zeros_like(bias)

    hold_folded(compared(source, remade(source, tmp_path / "moved", change)), 1, 1)
    found = compared(source, remade(source, tmp_path / "wrong", lambda t: change(t, 0.95)))
    (failure,) = found.failures
    assert failure.startswith(f"folds: {reader}.bias is not what folding gives in ") and norm in failure
    assert [pair.passed for pair in found.pairs] == [False]


def test_a_bias_that_is_kept_in_a_layer_norm(tmp_path: Path) -> None:
    source = saved(tiny_gpt2(), tmp_path / "source")
    norm, reader = "transformer.h.1.ln_1", "transformer.h.1.attn.c_attn"

    def change(tensors: Tensors, divide: bool = True) -> None:
        gain, bias = tensors[f"{norm}.weight"], tensors[f"{norm}.bias"]
        tensors[f"{reader}.weight"] = product(tensors[f"{reader}.weight"], gain[:, None])
        tensors[f"{norm}.weight"] = torch.ones_like(gain)
        tensors[f"{norm}.bias"] = bias / gain if divide else bias

    hold_folded(compared(source, remade(source, tmp_path / "kept", change)), 1, 1)
    (failure,) = compared(source, remade(source, tmp_path / "wrong", lambda t: change(t, False))).failures
    assert failure == f"folds: {norm}.bias was not scaled: it is the original's, though {norm} was folded"


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (tiny_llama, {"tied": "untie"}),
        (tiny_bert, {}),
        pytest.param(tiny_llama, {}, marks=pytest.mark.slow),
        pytest.param(tiny_bert, {"tied": "untie"}, marks=pytest.mark.slow),
    ],
)
def test_a_conversion_of_this_tool_with_and_without_its_manifest(
    tmp_path: Path, make: Callable[..., object], options: dict[str, str]
) -> None:
    if make is tiny_bert and options and transformers.__version__.startswith("4."):
        pytest.skip("the head's bias is tied as well, so that untying is refused")
    model = make(tie_word_embeddings=True) if make is tiny_llama else make()
    source = saved(model.bfloat16(), tmp_path / "source")  # type: ignore[attr-defined]
    folder = tmp_path / "folded"
    normswap.convert(source, folder, fold=True, verify=False, **options)  # type: ignore[arg-type]
    recorded = compared(source, folder)
    shutil.copytree(folder, tmp_path / "bare")
    (tmp_path / "bare" / "normswap.json").unlink()
    inferred = compared(source, tmp_path / "bare")
    for found in (recorded, inferred):
        assert found.failures == [] and found.figures.kind == "folded"
        assert found.folds is not None and all(pair.passed for pair in found.pairs)
    assert recorded.figures == inferred.figures
    assert recorded.pairs == inferred.pairs


def test_a_recorded_fold_is_held_to_one_rounding(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folded"
    normswap.convert(llama, folder, fold=True, verify=False)
    file = (folder / "normswap.json").read_bytes()

    def nudge(tensors: Tensors) -> None:
        tensors[READER].view(torch.int16)[0, 0] += 1

    other = remade(folder, tmp_path / "nudged", nudge)
    assert compared(llama, other).failures == []
    (other / "normswap.json").write_bytes(file)
    found = compared(llama, other)
    assert found.figures.altered == ["model.safetensors"]
    assert found.failures == [
        f"folds: {READER} is not rounded once: 1 of 1536 values are 1 unit in the last place off, though {NORM} was "
        "folded"
    ]


def test_a_manifest_of_another_model_is_refused(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folded"
    normswap.convert(llama, folder, fold=True, verify=False)
    file = folder / "normswap.json"
    data = json.loads(file.read_text(encoding="utf-8"))
    data["folds"][0]["name"] = "model.layers.9.input_layernorm"
    file.write_text(json.dumps(data), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"names folds of model\.layers\.9"):
        compared(llama, folder)


def test_smollm2_folded_by_plain_torch(smollm2: Path, tmp_path: Path) -> None:
    other = remade(smollm2, tmp_path / "hand", lambda t: fold_llama(t, 30, PRODUCTS["stored"]))
    hold_folded(compared(smollm2, other), 60, 150)
