"""Put stored values of one checkpoint into a model that holds those of another."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from normswap import loading
from normswap.shards import check_source
from normswap.source import Source
from normswap.stored import map_stored

__all__ = ["overlay_"]


@torch.no_grad()
def overlay_(model: nn.Module, source: Source, keys: Collection[str], dtype: torch.dtype) -> None:
    """Give a model the values that a checkpoint stores under some names, in place.

    Args:
        model: of the checkpoint's class, whole in memory.
        source: the checkpoint; it is loaded once more, if its class loads any of the names.
        keys: names of tensors on disk.
        dtype: of the model.
    """
    stored = map_stored(loading.build_meta(source), check_source(source.path))
    names = {piece.parameter for key in keys for piece in stored.by_key.get(key, ())}
    ours = model.state_dict()
    if not names & ours.keys():
        return
    theirs = loading.load_model(source, dtype=dtype).state_dict()
    for name in names & ours.keys() & theirs.keys():
        if ours[name].shape == theirs[name].shape:
            ours[name].copy_(theirs[name])
