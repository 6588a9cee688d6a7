"""Folding as another tool does it: on the stored tensors, in plain torch, with nothing written about it."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from broken_checkpoints import Tensors, changed

LAYER = r"model\.layers\.(\d)\."
ATTENTION = (LAYER + r"input_layernorm\.weight", r"model\.layers\.{0}\.self_attn\.[qkv]_proj\.weight")
DENSE = r"model\.layers\.{0}\.mlp\.(gate|up)_proj\.weight"
HEAD = (r"model\.norm\.weight", r"lm_head\.weight")

# Family: patterns of a gain's name and of its readers' names.
READERS: dict[str, list[tuple[str, str]]] = {
    "llama": [ATTENTION, (LAYER + r"post_attention_layernorm\.weight", DENSE), HEAD],
    "qwen3": [ATTENTION, (LAYER + r"post_attention_layernorm\.weight", DENSE), HEAD],
    "gemma2": [ATTENTION, (LAYER + r"pre_feedforward_layernorm\.weight", DENSE)],
    "olmo2": [HEAD],
    "mixtral": [
        ATTENTION,
        (
            LAYER + r"post_attention_layernorm\.weight",
            r"model\.layers\.{0}\.block_sparse_moe\.(gate|experts\.\d\.w[13])\.weight",
        ),
        HEAD,
    ],
    "gpt_oss": [
        ATTENTION,
        (
            LAYER + r"post_attention_layernorm\.weight",
            r"model\.layers\.{0}\.mlp\.(router\.weight|experts\.gate_up_proj)",
        ),
        HEAD,
    ],
    "gpt2": [
        (r"transformer\.h\.(\d)\.ln_1\.weight", r"transformer\.h\.{0}\.attn\.c_attn\.weight"),
        (r"transformer\.h\.(\d)\.ln_2\.weight", r"transformer\.h\.{0}\.mlp\.c_fc\.weight"),
    ],
}


def fold(tensors: Tensors, family: str, offset: float) -> list[str]:
    """Multiply gains into their readers in float64 and round once; returns the gains' names."""
    folded = []
    for pattern, readers in READERS[family]:
        for name in [name for name in tensors if re.fullmatch(pattern, name)]:
            found = re.fullmatch(pattern, name)
            assert found is not None
            gain = tensors[name]
            bias = tensors.get(name.replace("weight", "bias"))
            reading = [key for key in tensors if re.fullmatch(readers.format(*found.groups()), key)]
            assert reading, name
            for key in reading:
                _multiply(tensors, key, gain.double() + offset, bias)
            if bias is not None:
                bias.zero_()
            tensors[name] = torch.full_like(gain, 1 - offset)
            folded.append(name)
    assert folded
    return folded


def _multiply(tensors: Tensors, key: str, factor: torch.Tensor, bias: torch.Tensor | None) -> None:
    weight = tensors[key].double()
    # Of a Conv1D and of experts side by side the rows are inputs.
    inputs_first = weight.dim() == 3 or ".c_" in key
    if bias is not None:
        home = key.replace("weight", "bias")
        moved = bias.double() @ weight if inputs_first else weight @ bias.double()
        tensors[home] = (tensors[home].double() + moved).to(tensors[home].dtype)
    weight = weight * factor[:, None] if inputs_first else weight * factor
    tensors[key] = weight.to(tensors[key].dtype)


def folded_by_hand(source: Path, target: Path, family: str, offset: float) -> Path:
    """Fold a checkpoint; returns the folder."""
    return changed(source, target, lambda tensors: fold(tensors, family, offset) and None)
