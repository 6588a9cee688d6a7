"""A sharded bf16 checkpoint of a Llama of any size, made in seconds: its weights are random and repeat."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
import transformers

SHARD = 10**9
# One block of random values serves all tensors, each from another place on.
_BLOCK = 1 << 26


def config_of(gigabytes: float) -> transformers.LlamaConfig:
    """Return the config of a Llama with about so many gigabytes of weights in bf16."""
    narrow = gigabytes < 1
    hidden, intermediate, vocabulary = (512, 1408, 8192) if narrow else (4096, 11008, 32000)
    layer = 4 * hidden * hidden + 3 * hidden * intermediate + 2 * hidden
    layers = round((gigabytes * 5e8 - 2 * vocabulary * hidden) / layer)
    return transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=max(1, layers),
        num_attention_heads=hidden // 128,
        num_key_value_heads=hidden // 128,
        vocab_size=vocabulary,
        max_position_embeddings=512,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


def make_checkpoint(folder: Path, gigabytes: float, config: transformers.LlamaConfig | None = None) -> int:
    """Write the checkpoint, in shards of at most 1 GB, as `save_pretrained` would lay it out.

    Args:
        folder: an existing folder.
        gigabytes: about the size of its weights; of no account where a config is given.
        config: of the model; `config_of` by default.

    Returns:
        The bytes of its weights.
    """
    config = config_of(gigabytes) if config is None else config
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {key: tuple(value.shape) for key, value in transformers.LlamaForCausalLM(config).state_dict().items()}
    shards: list[dict[str, tuple[int, ...]]] = [{}]
    filled = 0
    for key, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        if filled + size > SHARD and shards[-1]:
            shards.append({})
            filled = 0
        shards[-1][key] = shape
        filled += size
    weight_map, total = {}, 0
    block = torch.randn(_BLOCK // 2, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    for number, shard in enumerate(shards, 1):
        name = f"model-{number:05}-of-{len(shards):05}.safetensors"
        total += _write(folder / name, shard, block)
        weight_map |= dict.fromkeys(shard, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return total


def _write(file: Path, shapes: dict[str, tuple[int, ...]], block: torch.Tensor) -> int:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    position = 0
    for key, shape in shapes.items():
        size = 2 * torch.Size(shape).numel()
        header[key] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        for number, (key, shape) in enumerate(shapes.items()):
            for piece in _pieces(block + 1 if "norm" in key else block, torch.Size(shape).numel(), 4099 * number):
                stream.write(piece.view(torch.int16).numpy().data)
    return position


def _pieces(block: torch.Tensor, count: int, start: int) -> Iterator[torch.Tensor]:
    start %= len(block)
    while count:
        piece = block[start : start + count]
        yield piece
        count -= len(piece)
        start = 0
