"""Batches of sequences of unequal length, padded on one side or the other."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from normswap.settings import Settings, embedding_size
from normswap.stacking import Group

__all__ = ["pad", "pad_token", "shortened"]

_IDS = ("input_ids", "decoder_input_ids")


def shortened(batches: Sequence[Mapping[str, Any]], rows: int) -> list[dict[str, Any]]:
    """Cut sequences to unequal lengths, those of one batch evenly from the whole down to a half.

    Args:
        batches: keyword arguments of one sequence each; tensors (1, n).
        rows: of a batch.

    Returns:
        The same with fewer positions. A last token stays the last: it may be one that ends a sequence.
    """
    found = []
    for index, one in enumerate(batches):
        # A decoder's ids may be fewer; of one length, the same positions count in all outputs.
        most = min(value.shape[1] for value in one.values() if torch.is_tensor(value))
        keep = max(1, most - (most // 2) * (index % rows) // max(1, rows - 1))
        found.append({name: _kept(value, keep) for name, value in one.items()})
    return found


def pad(
    model: nn.Module,
    config: Any,
    batches: Sequence[Mapping[str, Any]],
    rows: int,
    token: int,
    positional: frozenset[str],
) -> list[Group]:
    """Join sequences into batches, padded on the left in every other batch, from the first on, and else on the right.

    Masks say what is padding, the decoder's own too where there is one. A model that generates and takes positions
    gets them as generation gives them: counted from the first token that is none.

    Args:
        model: that runs them; its forward takes ``attention_mask``.
        config: its configuration.
        batches: what `shortened` gave.
        rows: sequences of a batch; the last may have fewer.
        token: id of the padding.
        positional: names of the outputs whose second dimension is the positions.

    Returns:
        The batches, in the order of the sequences.
    """
    names = list(inspect.signature(model.forward).parameters)
    able = getattr(model, "can_generate", None)
    counted = (
        *("position_ids" in names, "decoder_input_ids" not in names, callable(able) and bool(able())),
        not _several_axes(config),
    )
    found = []
    for number, start in enumerate(range(0, len(batches), rows)):
        members = list(range(start, min(start + rows, len(batches))))
        some = [batches[index] for index in members]
        lengths = [one["input_ids"].shape[1] for one in some]
        longest = max(lengths)
        valid = torch.zeros(len(some), longest, dtype=torch.bool)
        for row, length in enumerate(lengths):
            valid[row, slice(longest - length, None) if number % 2 == 0 else slice(length)] = True
        batch: dict[str, Any] = {}
        for name, value in some[0].items():
            batch[name] = value
            if torch.is_tensor(value):
                batch[name] = value.new_full((len(some), longest), token if name in _IDS else 0)
                batch[name][valid] = torch.cat([one[name][0] for one in some])
        batch["attention_mask"] = valid.long()
        if "decoder_input_ids" in batch and "decoder_attention_mask" in names:
            batch["decoder_attention_mask"] = valid.long()
        if all(counted):
            batch["position_ids"] = (valid.long().cumsum(1) - 1).clamp(min=0)
        found.append(Group(batch, members, valid, positional))
    return found


def pad_token(model: nn.Module, config: Any, tokenizer: Any) -> int:
    """Return the id to pad with: the tokenizer's or the configuration's, else one that ends a sequence, else 0."""
    known = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
    for token in (*known, Settings(config).value("pad_token_id"), Settings(config).value("eos_token_id")):
        token = token[0] if isinstance(token, (list, tuple)) and token else token
        if isinstance(token, int) and 0 <= token < (embedding_size(model) or token + 1):
            return token
    return 0


def _kept(value: Any, count: int) -> Any:
    if not torch.is_tensor(value) or value.shape[1] == count:
        return value
    return torch.cat([value[:, : count - 1], value[:, -1:]], 1)


def _several_axes(config: Any) -> bool:
    """Whether positions have more than one axis, as where text stands beside images."""
    kinds = [Settings(config).value(name) for name in ("rope_parameters", "rope_scaling")]
    return any("mrope_section" in str(kind) for kind in kinds if kind is not None)
