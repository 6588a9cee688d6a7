"""Tiny checkpoints of families that are easily folded wrong: what is folded, what is refused and why, and the end."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from transformers import PreTrainedModel
from trap_checkpoints import TRAPS, Trap, outputs

import normswap
from normswap.folding import make_fold_plan
from normswap.foldplan import Fold, FoldPlan
from normswap.plan import make_plan

# By the names that transformers 5 gives to what it fuses.
pytestmark = pytest.mark.skipif(transformers.__version__ < "5", reason="named as transformers 5 has them")

# Biases with and without a home, a transposed weight, a fused one, layers of two kinds with experts.
FEW = ("falcon", "gpt2", "qwen3_next")


@lru_cache
def built(name: str) -> PreTrainedModel:
    """Return the model of a trap; it is not to be changed."""
    try:
        return TRAPS[name].build()
    except AttributeError as error:
        pytest.skip(f"not in this transformers: {error}")


@lru_cache
def plan_of(name: str, tied: str = "untie") -> FoldPlan:
    model = built(name)
    return make_fold_plan(model, make_plan(model), tied=tied)


def named(folds: Iterable[Fold], name: str) -> list[Fold]:
    """Return the decisions for norms of this name, in which a star stands for a number."""
    wanted = re.compile(re.escape(name).replace(r"\*", "[0-9]+"))
    return [fold for fold in folds if wanted.fullmatch(fold.name)]


def ends(fold: Fold, wanted: set[str]) -> set[str]:
    """Replace each consumer's name by the wanted end that it has."""
    return {next((end for end in wanted if name.endswith(f".{end}") or name == end), name) for name in fold.parameters}


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_folded_and_into_what(name: str) -> None:
    trap, plan = TRAPS[name], plan_of(name)
    for norm, kinds in trap.folds.items():
        found = named(plan.decisions, norm)
        assert found and all(fold.action == "fold" for fold in found), (norm, [fold.reason for fold in found])
        every = set().union(*kinds)
        assert {frozenset(ends(fold, every)) for fold in found} == {frozenset(kind) for kind in kinds}
        assert {fold.bias for fold in found} <= ({"keep"} if norm in trap.keeps_bias else {"none", "move"})


@pytest.mark.parametrize("name", TRAPS)
def test_what_is_refused_says_which_operation_stands_in_the_way(name: str) -> None:
    plan = plan_of(name)
    for norm, words in TRAPS[name].refuses.items():
        found = named(plan.decisions, norm)
        assert found and all(fold.action == "refuse" for fold in found), norm
        assert all(words in fold.reason for fold in found), [fold.reason for fold in found]


def test_a_slice_of_a_concatenation_takes_only_its_columns() -> None:
    """AX-K2's gate reads the normed row and, behind it, the row itself."""
    (fold, *_) = named(plan_of("axk2").folds, "model.layers.*.self_attn.q_a_layernorm")
    consumer = next(consumer for consumer in fold.consumers if "q_gate_proj" in consumer.parameter)
    laid = consumer.spread(torch.arange(2.0, 26.0), 48, 1.0)
    assert laid.tolist() == [*range(2, 26), *[1] * 24]


def test_rows_side_by_side_take_the_gain_several_times() -> None:
    """Qwen2-VL's merger reads four normed rows as one."""
    (fold,) = named(plan_of("qwen2_vl").folds, "model.visual.merger.ln_q")
    (consumer,) = fold.consumers
    assert consumer.spread(torch.arange(16.0), 64, 1.0).tolist() == [*range(16)] * 4
    assert fold.bias == "move"


def loaded(name: str, folder: Path) -> PreTrainedModel:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return getattr(transformers, TRAPS[name].model).from_pretrained(folder, dtype=torch.float32).eval()


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as shard:
            assert not found.keys() & set(shard.keys())
            found |= {key: shard.get_tensor(key) for key in shard.keys()}  # noqa: SIM118
    return found


def moved(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@torch.no_grad()
def with_one_gain_dropped(model: PreTrainedModel, fold: Fold) -> torch.Tensor:
    assert fold.spec is not None and fold.spec.gain_name is not None
    gain = getattr(model.get_submodule(fold.name), fold.spec.gain_name)
    kept = gain.clone()
    gain.fill_(1.0 - fold.spec.offset)
    try:
        return outputs(model)
    finally:
        gain.copy_(kept)


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in FEW else pytest.mark.slow) for n in TRAPS])
def test_the_folded_checkpoint_computes_the_same_in_plain_transformers(name: str, tmp_path: Path) -> None:
    trap: Trap = TRAPS[name]
    model, plan = built(name), plan_of(name, trap.tied)
    model.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    normswap.convert(tmp_path / "in", tmp_path / "out", fold=True, tied=trap.tied, verify=False)
    before, after = tensors_of(tmp_path / "in"), tensors_of(tmp_path / "out")
    heads = {parameter for fold in plan.folds if fold.untie for parameter in fold.parameters}
    assert after.keys() - before.keys() <= heads and before.keys() <= after.keys()
    assert all(after[key].dtype == before[key].dtype and after[key].shape == before[key].shape for key in before)
    original, folded = loaded(name, tmp_path / "in"), loaded(name, tmp_path / "out")
    for fold in plan.folds:
        assert fold.spec is not None and fold.spec.gain_name is not None
        gain = getattr(folded.get_submodule(fold.name), fold.spec.gain_name)
        assert torch.equal(gain, torch.full_like(gain, 1.0 - fold.spec.offset)), fold.name
    expected = outputs(original)
    assert moved(outputs(folded), expected) <= 1e-5
    for norm in trap.folds:
        for fold in named(plan.folds, norm)[:1]:
            assert moved(with_one_gain_dropped(original, fold), expected) > 1e-4, norm
