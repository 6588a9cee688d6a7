"""Folding on disk: any layout of stored tensors gives what folding in memory gives, and the algebra is measured."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import nn

from normswap.algebra import BOUND, Figure
from normswap.edits import Edits, make_edits, unstorable
from normswap.errors import ModelError
from normswap.exact import Fit
from normswap.folding import make_fold_plan
from normswap.foldplan import Consumer, Fold, FoldPlan, Piece
from normswap.gains import fold_
from normswap.loading import build_meta, resolve
from normswap.narrowing import round_once
from normswap.plan import make_plan
from normswap.rows import row_reader
from normswap.shards import check_source
from normswap.spec import NormSpec
from normswap.stored import Stored, StoredMap, map_stored

pytestmark = pytest.mark.core

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 61,
}
EXPERTS = {"num_local_experts": 11, "num_experts_per_tok": 2}
OLD = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 32}


class Toy(nn.Module):
    """A norm, and a weight and bias of any shape that read it."""

    def __init__(self, shape: tuple[int, ...], axis: int, width: int, dtype: torch.dtype, gain: torch.dtype) -> None:
        super().__init__()
        self.norm, self.reader = nn.Module(), nn.Module()
        self.norm.weight = nn.Parameter(torch.rand(width).add(0.5).to(gain))
        self.norm.bias = nn.Parameter(torch.randn(width).to(gain))
        self.reader.weight = nn.Parameter(torch.randn(shape).to(dtype))
        self.reader.bias = nn.Parameter(torch.randn(shape[:axis] + shape[axis + 1 :]).to(dtype))


def in_pieces(tensors: dict[str, torch.Tensor], size: int) -> Callable[[str], Iterator[torch.Tensor]]:
    def read(key: str) -> Iterator[torch.Tensor]:
        yield from tensors[key].split(size) if tensors[key].dim() else (tensors[key],)

    return read


def applied(edits: Edits, tensors: dict[str, torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Do what the conversion does, in the plainest way."""
    sources = {key: (key, edit) for key, edit in edits.edits.items()}
    sources |= {key: (new.source, new.edit) for key, new in edits.added.items()}
    done = dict(tensors)
    for key, (source, edit) in sources.items():
        old = tensors[source]
        new = old.clone()
        for start in range(0, len(old), size) if edit is not None else ():
            rows = old[start : start + size].clone()
            new[start : start + size] = round_once(edit.apply(rows, start), old.dtype)
            assert torch.equal(rows, old[start : start + size])
        done[key] = new
    return done


@st.composite
def layouts(draw: Any) -> dict[str, Any]:
    dims = draw(st.integers(1, 3))
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=dims, max_size=dims)))
    return {
        "shape": shape,
        "axis": draw(st.integers(0, dims - 1)),
        "order": draw(st.permutations(range(dims))),
        "split": draw(st.integers(0, dims - 1)),
        "seed": draw(st.integers(0, 1 << 16)),
        "stacked": draw(st.booleans()),
        "inside": draw(st.booleans()),
        "shuffled": draw(st.booleans()),
        "dtype": draw(st.sampled_from(DTYPES)),
        "gain_dtype": draw(st.sampled_from(DTYPES)),
        "bias": draw(st.sampled_from(["move", "keep"])),
        "size": draw(st.integers(1, 7)),
        "form": draw(st.sampled_from(["w", "1+w"])),
    }


def store(
    name: str, value: torch.Tensor, case: dict[str, Any], rng: Any
) -> tuple[dict[str, torch.Tensor], list[Stored]]:
    """Lay a parameter out on disk: split along one axis, permuted, transposed, perhaps inside larger tensors."""
    split = case["split"] % value.dim()
    places = list(range(value.shape[split]))
    if case["shuffled"]:
        rng.shuffle(places)
    stacked = case["stacked"] and value.dim() > 1
    cuts = [[place] for place in places] if stacked else [places[: len(places) // 2], places[len(places) // 2 :]]
    tensors, pieces = {}, []
    order = [axis for axis in case["order"] if axis < value.dim()]
    for number, chosen in enumerate(part for part in cuts if part):
        part = value.index_select(split, torch.tensor(chosen))
        kept = [axis for axis in order if not (stacked and axis == split)]
        disk = part.permute(*kept, *([split] if stacked else [])).reshape([part.shape[axis] for axis in kept])
        held: list[Any] = [range(size) for size in disk.shape]
        key = f"disk.{name}.{number}"
        if case["inside"] and disk.dim():
            # Every other row of a tensor that is twice as long; what lies between belongs to nobody.
            whole = torch.full((2 * len(disk), *disk.shape[1:]), 3.0, dtype=disk.dtype)
            held[0] = tuple(sorted(rng.sample(range(2 * len(disk)), len(disk))))
            whole[torch.tensor(held[0])] = disk
            disk = whole
        positions: list[Any] = [range(size) for size in value.shape]
        positions[split] = tuple(chosen)
        axes = tuple(None if stacked and axis == split else kept.index(axis) for axis in range(value.dim()))
        tensors[key] = disk.contiguous()
        pieces.append(Stored(key, name, axes, tuple(positions), tuple(held)))
    return tensors, pieces


@settings(max_examples=80, deadline=None)
@given(layouts())
def test_any_layout_on_disk_gives_what_memory_gives(case: dict[str, Any]) -> None:
    torch.manual_seed(case["seed"])
    rng = random.Random(case["seed"])
    shape, axis = case["shape"], case["axis"]
    width = shape[axis] + 1
    toy = Toy(shape, axis, width, case["dtype"], case["gain_dtype"])
    spec = NormSpec("layer", width, 1e-6, gain=case["form"], bias=True, bias_name="bias")
    consumer = Consumer("reader.weight", axis, (Piece(0, shape[axis], 1),), "reader.bias")
    plan = FoldPlan((Fold("norm", "fold", "", (consumer,), bias=case["bias"], spec=spec),))
    tensors: dict[str, torch.Tensor] = {}
    where: dict[str, tuple[Stored, ...]] = {}
    for name, parameter in toy.named_parameters():
        value = parameter.detach().clone()
        if not value.dim():
            tensors[name], where[name] = value, (Stored(name, name, (), (), ()),)
            continue
        found, pieces = store(name, value, case, rng)
        tensors |= found
        where[name] = tuple(pieces)
    by_key = {piece.key: (piece,) for pieces in where.values() for piece in pieces}
    stored = StoredMap(where, by_key, (), (), {}, {}, {})
    edits = make_edits(toy, plan, stored, in_pieces(tensors, case["size"]))
    new = applied(edits, {k: v.reshape(1) if not v.dim() else v for k, v in tensors.items()}, case["size"])
    fold_(toy, plan)
    for name, parameter in toy.named_parameters():
        for piece in where[name]:
            old, got = tensors[piece.key], new[piece.key].reshape(tensors[piece.key].shape)
            for index in np.ndindex(*old.shape):
                if all(at in places for at, places in zip(index, piece.held, strict=True)):
                    place = tuple(
                        positions[0 if at is None else list(piece.held[at]).index(index[at])]
                        for at, positions in zip(piece.axes, piece.positions, strict=True)
                    )
                    assert got[index] == parameter.detach()[place], (name, index)
                else:
                    assert got[index] == 3.0
    figure = edits.algebra.figures["norm"]
    assert figure.samples and figure.error <= BOUND
    assert figure.passed


FAMILIES = {
    "llama": ("Llama", {**SMALL, "tie_word_embeddings": False}),
    "gemma": ("Gemma", {**SMALL, "head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("Mixtral", {**SMALL, **EXPERTS, "tie_word_embeddings": False}),
    "gpt2": ("GPT2", OLD),
    "phi": ("Phi", {**SMALL, "num_key_value_heads": 4}),
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61}),
}


def build(name: str, dtype: torch.dtype) -> nn.Module:
    family, settings_ = FAMILIES[name]
    config = getattr(transformers, f"{family}Config")(**settings_)
    heads = [f"{family}ForCausalLM", f"{family}LMHeadModel"]
    cls = next(getattr(transformers, head) for head in heads if hasattr(transformers, head))
    model = cls(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", list(FAMILIES))
def test_a_checkpoint_folds_to_the_same_bits_on_disk_and_in_memory(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    model = build(name, dtype)
    model.save_pretrained(tmp_path)
    checkpoint, meta = check_source(tmp_path), build_meta(resolve(str(tmp_path)))
    plan = make_fold_plan(meta, make_plan(meta))
    assert len(plan.folds) >= 2
    edits = make_edits(meta, plan, map_stored(meta, checkpoint), row_reader(checkpoint, piece=4096))
    assert not edits.added
    file = tmp_path / "model.safetensors"
    save_file(applied(edits, load_file(file), 5), file, metadata={"format": "pt"})
    loaded = type(model).from_pretrained(tmp_path, dtype=dtype)
    folded = fold_(copy.deepcopy(model), plan)
    assert any(not torch.equal(a, b) for a, b in zip(folded.parameters(), model.parameters(), strict=True))
    for (key, expected), got in zip(folded.state_dict().items(), loaded.state_dict().values(), strict=True):
        assert torch.equal(got, expected), key
    for figure in edits.algebra.figures.values():
        assert figure.passed, figure
    assert all(0 < error < torch.finfo(dtype).eps for error in edits.algebra.roundings.values())
    assert set(edits.algebra.roundings) == {parameter for fold in plan.folds for parameter in fold.parameters}


def tiny(tmp_path: Path) -> tuple[Any, FoldPlan, StoredMap, Any, dict[str, torch.Tensor]]:
    build("llama", torch.bfloat16).save_pretrained(tmp_path)
    checkpoint, meta = check_source(tmp_path), build_meta(resolve(str(tmp_path)))
    plan = make_fold_plan(meta, make_plan(meta))
    return meta, plan, map_stored(meta, checkpoint), row_reader(checkpoint), load_file(tmp_path / "model.safetensors")


def test_a_wrong_weight_fails_the_algebra(tmp_path: Path) -> None:
    meta, plan, stored, read, tensors = tiny(tmp_path)
    edits = make_edits(meta, plan, stored, read)
    key = "model.layers.1.mlp.up_proj.weight"
    edit: Any = edits.edits[key]
    edit.scales[0].factor = edit.scales[0].factor * (1 + 1e-9)
    applied(edits, tensors, 8)
    failed = {name for name, figure in edits.algebra.figures.items() if not figure.passed}
    assert failed == set(edits.norms[key]) == {"model.layers.1.post_attention_layernorm"}


def test_a_gain_that_would_be_dropped_without_notice_fails_the_control(tmp_path: Path) -> None:
    meta, plan, stored, read, tensors = tiny(tmp_path)
    edits = make_edits(meta, plan, stored, read)
    applied(edits, tensors, 8)
    figure = edits.algebra.figures["model.norm"]
    assert figure.passed and figure.control > 1e-3
    figure.control = 0.0
    assert not figure.passed
    figure.identity = True
    assert figure.passed
    figure.add(float("nan"), 1.0)
    figure.add(0.0, 1.0)
    assert not figure.passed
    assert not Figure("seen by nothing", control=1.0).passed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda s: s.opaque.update({"lm_head.weight": "it is scaled"}), "not stored as it stands .* it is scaled"),
        (lambda s: s.by_parameter.pop("model.norm.weight"), r"model\.norm\.weight is not stored in the checkpoint"),
    ],
    ids=["opaque", "missing"],
)
def test_what_is_not_stored_is_not_folded(change: Any, words: str, tmp_path: Path) -> None:
    meta, plan, stored, read, _ = tiny(tmp_path)
    change(stored)
    found = unstorable(meta, plan, stored, read)
    assert set(found) == {"model.norm"}
    with pytest.raises(ModelError, match=words):
        make_edits(meta, plan, stored, read)


@pytest.mark.parametrize(
    ("dtype", "factor", "expected"),
    [
        (torch.bfloat16, [1.5, 0.75, 0.0], True),
        (torch.bfloat16, [1 + 2.0**-15], True),
        (torch.bfloat16, [1 + 2.0**-16], False),
        (torch.float16, [1 + 2.0**-12], True),
        (torch.float16, [1 + 2.0**-13], False),
        (torch.float16, [2.0**-101], False),
        (torch.float32, [1.5], False),
        (torch.float64, [1.5], False),
    ],
)
def test_float32_is_taken_where_it_is_exact(dtype: torch.dtype, factor: list[float], expected: bool) -> None:
    factors = torch.tensor(factor, dtype=torch.float64)
    weights = torch.tensor([[1.0], [-3.25], [0.0]]).to(dtype).expand(3, len(factor)).contiguous()
    assert Fit(factors, dtype).holds(weights) == expected
    exact = weights.double() * factors
    if expected:
        assert torch.equal((weights.float() * factors.float()).double(), exact)


def test_tiny_bfloat16_weights_go_by_way_of_float64() -> None:
    factors = torch.tensor([2.0**-20], dtype=torch.float64)
    fit = Fit(factors, torch.bfloat16)
    assert fit.holds(torch.tensor([[2.0**-106], [0.0]], dtype=torch.bfloat16))
    assert not fit.holds(torch.tensor([[1.0], [2.0**-107]], dtype=torch.bfloat16))
    assert fit.holds(torch.zeros(2, 1, dtype=torch.bfloat16))
    smallest = torch.tensor([[2.0**-133]], dtype=torch.bfloat16)
    assert Fit(torch.tensor([1 + 2.0**-15], dtype=torch.float64), torch.bfloat16).holds(smallest)
