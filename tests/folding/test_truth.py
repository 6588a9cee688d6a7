"""Who reads a norm, against a table that was found by numerical experiment, and against folds carried out by hand."""

from __future__ import annotations

import importlib
import json
import re
import sys
import warnings
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from normswap.folding import make_fold_plan
from normswap.foldplan import Fold
from normswap.plan import make_plan

pytestmark = pytest.mark.zoo

LIB = Path(__file__).resolve().parents[2] / "benchmarks" / "lib"
TABLE = Path(__file__).resolve().parents[3] / "shared" / "zoo" / "fold_truth_sample.json"
TRUTH = json.loads(TABLE.read_text()) if TABLE.is_file() else {}
FAMILIES = sorted(set(TRUTH) - {"_meta"})

# How the variants of the table are built: a class of its own, or changes of the configuration.
CLASSES = {"bert|masked-lm": "BertForMaskedLM", "bart": "BartForCausalLM", "whisper": "WhisperForCausalLM"}
CHANGES: dict[str, dict[str, Any]] = {
    "bloom|post_ln_residual": {"apply_residual_connection_post_layernorm": True},
    "deepseek_v2": {"first_k_dense_replace": 1},
    "falcon|new_decoder(40b)": {"new_decoder_architecture": True},
    "gemma4_text|moe": {
        "enable_moe_block": True,
        "hidden_size_per_layer_input": 0,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "opt|post_ln(350m)": {"do_layer_norm_before": False, "word_embed_proj_dim": 32},
}
# Kinds of layers that the zoo's model has and the table's had not. Their folds are carried out below like all others.
QKV = tuple(f"model.layers.{{i}}.self_attn.{part}_proj.weight" for part in "qkv")
MORE_KINDS = {
    ("bamba", "model.layers.{i}.input_layernorm"): QKV,
    ("jamba", "model.layers.{i}.input_layernorm"): QKV,
}
# Readers of refused norms that the table does not list. Attention only averages values, channel by channel, so that the
# output projection reads them: measured below. The other two read their norm beside the operation that is in the way.
MORE_READERS = {
    ("gemma3n_text", "model.layers.{i}.self_attn.v_norm"): "model.layers.{i}.self_attn.o_proj.weight",
    ("gemma4_text|moe", "model.layers.{i}.self_attn.v_norm"): "model.layers.{i}.self_attn.o_proj.weight",
    ("longcat_flash", "model.layers.{i}.post_attention_layernorm.{i}"): "model.layers.{i}.mlp.experts.gate_up_proj",
    ("siglip_vision_model", "post_layernorm"): "head.attention.in_proj_weight",
}
# The table ran this decoder without an encoder's states. It is run with them and without: its cross-attention reads the
# norm, or the first linear map does. The residual stream reads it both times, so that it is refused anyway.
OTHER_RUN = {
    ("bart", "model.decoder.layers.{i}.self_attn_layer_norm"): [
        "model.decoder.layers.{i}.encoder_attn.q_proj.weight",
        "model.decoder.layers.{i}.fc1.weight",
    ],
}
TIED = ("bert", "gemma", "gpt2", "lfm2", "t5")
FEW = ("axk2", "bamba", "falcon", "gpt2", "jamba", "mixtral", "qwen2_vl|vision", "t5", "zamba2")
Answer = tuple[bool, frozenset[str]]


def most_are_slow(keys: list[str]) -> list[Any]:
    return [pytest.param(key, marks=[] if key in FEW else pytest.mark.slow) for key in keys]


@pytest.fixture(scope="module")
def lib(zoo: Path) -> Iterator[SimpleNamespace]:
    """What folds by hand, and the zoo."""
    names = ("coverage_zoo", "folding_hand", "folding_sweep")
    sys.path.insert(0, str(LIB))
    try:
        found = {name.partition("_")[2]: importlib.import_module(name) for name in names}
        yield SimpleNamespace(**found, tiny=found["zoo"].load_zoo(zoo))
    finally:
        sys.path.remove(str(LIB))
        for name in names:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def model_of(lib: SimpleNamespace) -> Any:
    """Build each family once, gains and biases away from 1 and 0."""

    @lru_cache
    def build(key: str) -> nn.Module:
        name, _, variant = key.partition("|")
        if name not in transformers.CONFIG_MAPPING:
            pytest.skip(f"{name} is not built by this transformers")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = lib.tiny.tiny_model(name, class_name=CLASSES.get(key), config_overrides=CHANGES.get(key))
            if variant == "vision":
                model = type(model.model.visual)._from_config(model.config.vision_config).eval()
            return lib.tiny.perturb_norms_(model)

    return build


@lru_cache
def folds_of(model: nn.Module, tied: str) -> tuple[Fold, ...]:
    return make_fold_plan(model, make_plan(model), tied=tied).decisions


def pattern(name: str) -> str:
    """Write a name as the table does."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "{i}", name).replace("{e}", "{i}")


def answer(foldable: bool, consumers: Any) -> Answer:
    # A slice of the columns stands behind the name.
    return foldable, frozenset(pattern(consumer.partition("[")[0]) for consumer in consumers)


def answers_of_table(key: str, name: str) -> set[Answer]:
    entry = TRUTH[key][name]
    if (key, name) in OTHER_RUN:
        return {answer(False, OTHER_RUN[key, name])}
    kinds = [(kind["foldable"], kind["consumers"]) for kind in entry.get("variants") or [entry]]
    if (key, name) in MORE_KINDS:
        kinds.append((True, MORE_KINDS[key, name]))
    more = [MORE_READERS[key, name]] if (key, name) in MORE_READERS else []
    return {answer(foldable, consumers if foldable else [*consumers, *more]) for foldable, consumers in kinds}


def by_pattern(decisions: tuple[Fold, ...]) -> dict[str, list[Fold]]:
    groups: dict[str, list[Fold]] = {}
    for fold in decisions:
        groups.setdefault(pattern(fold.name), []).append(fold)
    return groups


def differences(key: str, name: str, folds: list[Fold]) -> list[str]:
    """Say where the decisions for one pattern are not those of the table."""
    entry = TRUTH[key][name]
    if entry.get("status") == "untraced":
        return []
    told = []
    ours = {answer(fold.action == "fold", fold.parameters) for fold in folds}
    if ours != (table := answers_of_table(key, name)):
        told.append(f"expected {readable(table)}, got {readable(ours)}: {sorted({fold.reason for fold in folds})}")
    folded = [fold for fold in folds if fold.action == "fold"]
    if any(fold.untie for fold in folded) != entry.get("needs_untie", False) and entry["foldable"]:
        told.append(f"expected untie {entry.get('needs_untie', False)}, got {[fold.untie for fold in folded]}")
    if "bias_foldable" in entry and {fold.bias for fold in folded} != {"move" if entry["bias_foldable"] else "keep"}:
        told.append(f"expected bias_foldable {entry['bias_foldable']}, got {[fold.bias for fold in folded]}")
    return told


def readable(answers: set[Answer]) -> list[str]:
    return sorted(f"{'fold' if foldable else 'refuse'} {sorted(consumers)}" for foldable, consumers in answers)


@pytest.mark.parametrize("key", FAMILIES)
def test_the_plan_is_that_of_the_table(model_of: Any, key: str) -> None:
    groups = by_pattern(folds_of(model_of(key), "untie"))
    assert groups.keys() == TRUTH[key].keys()
    found = {name: differences(key, name, folds) for name, folds in groups.items()}
    assert {name: told for name, told in found.items() if told} == {}


@pytest.mark.parametrize("key", TIED)
def test_only_tied_heads_are_skipped(model_of: Any, key: str) -> None:
    untied, skipped = (folds_of(model_of(key), tied) for tied in ("untie", "skip"))
    for with_head, without in zip(untied, skipped, strict=True):
        if with_head.action == "fold" and with_head.untie:
            assert without.action == "refuse" and "tied" in without.reason
        else:
            assert without == with_head


@pytest.mark.parametrize("key", most_are_slow(FAMILIES))
def test_every_fold_leaves_the_output_where_it_was(lib: SimpleNamespace, model_of: Any, key: str) -> None:
    model = model_of(key)
    folds = [fold for fold in folds_of(model, "untie") if fold.action == "fold"]
    if not folds:
        pytest.skip(f"{key} has nothing to fold")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trial = lib.sweep.Trial(model, lib.sweep.inputs_of(lib.tiny, model))
    assert trial.wrong(folds) == {}
    # One pattern at a time, each has to be seen when it is dropped instead.
    for name, group in by_pattern(tuple(folds)).items():
        # The zoo's inputs give some decoders no encoder's states; then the table has no answer, and there is none here.
        if TRUTH[key].get(name, {}).get("status") != "untraced":
            assert trial.sees(group), group[0].name


@pytest.mark.parametrize("key", [key for key, name in MORE_READERS if name.endswith("v_norm")])
def test_attention_hands_values_on_channel_by_channel(lib: SimpleNamespace, model_of: Any, key: str) -> None:
    """The table lists no linear map for the norm of values; rescaled there and back, they leave the output alone."""
    model = model_of(key)
    trial = lib.sweep.Trial(model, lib.sweep.inputs_of(lib.tiny, model))
    parameters = dict(trial.model.named_parameters())
    found = [fold for fold in folds_of(model, "untie") if fold.name.endswith("v_norm")]
    factors = {fold.name: torch.rand(fold.consumers[0].pieces[0].stop, dtype=torch.float64) + 0.5 for fold in found}

    def distance(back: bool) -> float:
        handles = []
        for fold in found:
            (consumer,), factor = fold.consumers, factors[fold.name]
            weight = parameters[consumer.parameter]
            kept = weight.detach().clone()
            if back:
                with torch.no_grad():
                    weight.mul_(consumer.spread(1.0 / factor, weight.shape[1], 1.0))
            norm = trial.model.get_submodule(fold.name)
            handles.append(
                (
                    norm.register_forward_hook(lambda _, args, out, factor=factor: out * factor.to(out.dtype)),
                    weight,
                    kept,
                )
            )
        try:
            return max(
                lib.hand.distance(lib.hand.results(trial.model, batch), expected)
                for batch, expected in zip(trial.batches, trial.expected, strict=True)
            )
        finally:
            for handle, weight, kept in handles:
                handle.remove()
                with torch.no_grad():
                    weight.copy_(kept)

    assert distance(back=True) <= 1e-5
    assert distance(back=False) > 1e-2
