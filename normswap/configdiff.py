"""How the configurations of two checkpoints differ in what bears on the computation, and what their norms compute."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from normswap.evidence import SettingChange
from normswap.settings import SPECIAL
from normswap.sides import Side
from normswap.spec import NormSpec

__all__ = ["TIES", "compare_norms", "compare_settings", "doubts_on_settings", "note_on_settings"]

TIES = "tie_word_embeddings"

# What is written beside the model, what only training or generation reads, and what only labels it.
_IRRELEVANT = re.compile(
    r"^_|^(transformers_version|torch_dtype|dtype|architectures|auto_map|model_type|transformers_weights|torchscript"
    r"|use_cache|use_bfloat16|return_dict|return_dict_in_generate|output_.*|gradient_checkpointing|id2label|label2id"
    r"|num_labels|problem_type|task_specific_params|finetuning_task|tokenizer_class|prefix|name_or_path"
    r"|chunk_size_feed_forward|cross_attention_hidden_size|initializer_.*|init_.*|.*_init_std|.*dropout.*|.*pdrop"
    r"|.*drop_path.*|drop_prob|layerdrop|router_aux_loss_coef|.*_loss_.*|remove_invalid_values|is_decoder_only"
    r"|min_length|max_length|max_new_tokens|do_sample|early_stopping|num_beams|num_beam_groups|diversity_penalty"
    r"|temperature|top_k|top_p|typical_p|repetition_penalty|length_penalty|no_repeat_ngram_size|bad_words_ids"
    r"|encoder_no_repeat_ngram_size|num_return_sequences|exponential_decay_length_penalty|suppress_tokens"
    r"|begin_suppress_tokens|forced_decoder_ids|tf_legacy_loss)$"
)
_SHOWN = 5


def compare_settings(before: Side, after: Side) -> list[SettingChange]:
    """Compare what two configurations say, in the root and in nested parts.

    They are compared as transformers reads them, with what a file leaves out filled in.
    """
    ours, theirs = (_flat(side.source.config.to_dict()) for side in (before, after))
    return [
        SettingChange(name, ours.get(name), theirs.get(name))
        for name in dict.fromkeys((*ours, *theirs))
        if ours.get(name) != theirs.get(name)
    ]


def _flat(config: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in config.items():
        if _IRRELEVANT.search(str(name)) or SPECIAL.search(str(name)):
            continue
        if isinstance(value, Mapping):
            found |= _flat(value, f"{path}{name}.")
        else:
            found[f"{path}{name}"] = list(value) if isinstance(value, tuple) else value
    return found


def note_on_settings(changes: list[SettingChange]) -> list[str]:
    """Return a note that names the settings that differ; none without."""
    if not changes:
        return []
    told = [f"{one.name} is {one.converted!r}, the original has {one.original!r}" for one in changes[:_SHOWN]]
    more = f" (and {len(changes) - _SHOWN} more)" if len(changes) > _SHOWN else ""
    return [f"settings: {'; '.join(told)}{more}"]


def doubts_on_settings(changes: list[SettingChange]) -> list[str]:
    """Return a doubt that names the settings that differ; none without.

    What a setting does, such as a window or a way to stretch positions, may show on longer inputs only, or on none.
    """
    if not changes:
        return []
    names = ", ".join(one.name for one in changes[:_SHOWN])
    return [
        f"settings: {names}{_and_others(len(changes) - _SHOWN)} differ, and inputs of other lengths or kinds than "
        "these may show it; set them in config.json as the original has them"
    ]


def compare_norms(before: Side, after: Side) -> list[str]:
    """Compare what the norms of two configurations compute.

    Returns:
        A failure for each kind of difference, with the first norm that has it and how many there are.

    Raises:
        ModelError: a configuration gives no model.
    """
    ours, theirs = ({d.name: d.spec for d in side.plan.decisions} for side in (before, after))
    groups: dict[str, list[str]] = {}
    for name in dict.fromkeys((*ours, *theirs)):
        if told := _difference(name, ours, theirs):
            groups.setdefault(told, []).append(name)
    return [f"norms: {names[0]}{_and_others(len(names) - 1)}: {told}" for told, names in groups.items()]


def _difference(name: str, ours: Mapping[str, NormSpec | None], theirs: Mapping[str, NormSpec | None]) -> str:
    if name not in theirs:
        return "the original has it, the checkpoint has no such norm"
    if name not in ours:
        return "the original has no such norm"
    one, other = (spec.to_dict() if spec else {"spec": "unknown"} for spec in (ours[name], theirs[name]))
    differs = [key for key in dict.fromkeys((*one, *other)) if one.get(key) != other.get(key)]
    return "; ".join(f"{key} {_plain(other.get(key))}, the original has {_plain(one.get(key))}" for key in differs)


def _plain(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _and_others(count: int) -> str:
    return f" and {count} more" if count > 0 else ""
