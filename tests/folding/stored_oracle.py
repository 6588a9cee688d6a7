"""Put parameters together from stored tensors as a map says, to hold against what transformers loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from normswap.labels import Part, Positions
from normswap.loading import build_meta
from normswap.shards import check_source
from normswap.source import resolve
from normswap.stored import Stored, StoredMap, map_stored


def index(positions: Positions) -> torch.Tensor:
    return torch.tensor(tuple(positions), dtype=torch.int64)


def gathered(shape: Iterable[int], pieces: Iterable[tuple[Stored | Part, torch.Tensor]]) -> torch.Tensor:
    """Return a parameter as float64, from the pieces and their stored tensors; each element must come once."""
    result = torch.full(tuple(shape), torch.nan, dtype=torch.float64)
    filled = torch.zeros(result.shape, dtype=torch.int64)
    for piece, tensor in pieces:
        values = tensor.double()
        for axis, held in enumerate(piece.held):
            values = values.index_select(axis, index(held))
        along = [axis for axis in piece.axes if axis is not None]
        rest = [axis for axis in range(values.ndim) if axis not in along]
        assert all(values.shape[axis] == 1 for axis in rest)
        values = values.permute((*along, *rest)).reshape([len(places) for places in piece.positions])
        grid = torch.meshgrid(*map(index, piece.positions), indexing="ij") if piece.positions else ()
        result[grid] = values
        filled[grid] += 1
    assert bool((filled == 1).all()), "the pieces do not cover the parameter exactly once"
    return result


def scrambled(model: PreTrainedModel) -> PreTrainedModel:
    """Give every element of every parameter and buffer a value of its own."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for value in {id(value): value for value in (*model.parameters(), *model.buffers())}.values():
            if value.is_floating_point():
                value.copy_(torch.randn(value.shape, generator=generator))
    model.config.architectures = [type(model).__name__]
    return model.eval()


def mapped(folder: Path) -> StoredMap:
    """Map a checkpoint as the converter does: the class on meta, the headers alone."""
    return map_stored(build_meta(resolve(str(folder))), check_source(folder))


def wrong(stored: StoredMap, folder: Path, loaded: PreTrainedModel) -> list[str]:
    """Return the mapped parameters that are not, element by element, what transformers loaded."""
    tensors: Mapping[str, torch.Tensor] = {}
    for file in check_source(folder).files:
        tensors = {**tensors, **load_file(folder / file)}
    state = loaded.state_dict()
    return [
        name
        for name, pieces in stored.by_parameter.items()
        if not torch.equal(
            gathered(state[name].shape, [(piece, tensors[piece.key]) for piece in pieces]), state[name].double()
        )
    ]
