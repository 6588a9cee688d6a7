"""Tiny checkpoints with something done to their tensors, and their comparison."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tiny_checkpoints import disturb_norms
from transformers import GPT2Config, GPT2LMHeadModel, MixtralConfig, MixtralForCausalLM

from normswap.checkpoint import read_manifest
from normswap.comparing import Comparison, compare_checkpoints
from normswap.shards import check_source
from normswap.source import resolve

Tensors = dict[str, torch.Tensor]
LLAMA_READERS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


def compared(before: Path, after: Path) -> Comparison:
    """Compare two folders; the second one's manifest counts."""
    one, other = resolve(before), resolve(after)
    return compare_checkpoints(
        one, check_source(before), other, check_source(after), manifest=read_manifest(other.path)
    )


def tensors_of(folder: Path) -> Tensors:
    """Return every stored tensor of safetensors files."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def write(folder: Path, parts: list[Tensors], *, pickle: bool = False) -> None:
    """Write weights, in one file or in several with their index."""
    stem, end = ("pytorch_model", "bin") if pickle else ("model", "safetensors")
    names = [f"{stem}-{n + 1:05}-of-{len(parts):05}.{end}" for n in range(len(parts))]
    names = names if len(parts) > 1 else [f"{stem}.{end}"]
    for name, part in zip(names, parts, strict=True):
        if pickle:
            torch.save(part, folder / name)
        else:
            save_file({key: value.contiguous() for key, value in part.items()}, folder / name, {"format": "pt"})
    if len(parts) > 1:
        places = {key: name for name, part in zip(names, parts, strict=True) for key in part}
        index = {"metadata": {}, "weight_map": places}
        (folder / f"{stem}.{end}.index.json").write_text(json.dumps(index), encoding="utf-8")


def split(tensors: Tensors, count: int) -> list[Tensors]:
    """Deal tensors out, by their names' order."""
    names = sorted(tensors)
    size = -(-len(names) // count)
    return [{name: tensors[name] for name in names[at : at + size]} for at in range(0, len(names), size)]


def remade(
    source: Path,
    target: Path,
    change: Callable[[Tensors], None] = lambda tensors: None,
    *,
    files: int = 1,
    pickle: bool = False,
    **settings: Any,
) -> Path:
    """Write a checkpoint anew, with its tensors and settings changed, and without a manifest."""
    leave = shutil.ignore_patterns("*.safetensors*", "*.bin*", "normswap.json")
    shutil.copytree(source, target, ignore=leave)
    tensors = tensors_of(source)
    change(tensors)
    write(target, split(tensors, files), pickle=pickle)
    if settings:
        file = target / "config.json"
        file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **settings}), encoding="utf-8")
    return target


def without(name: str) -> Callable[[Tensors], None]:
    """Return a change that leaves a tensor out."""

    def leave_out(tensors: Tensors) -> None:
        del tensors[name]

    return leave_out


def product(weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """Multiply the columns of a weight in float64, and round once (but for torch's own step by way of float32)."""
    return (weight.double() * gain.double()).to(weight.dtype)


def fold_llama(
    tensors: Tensors,
    layers: int,
    times: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = product,
    *,
    norms: tuple[str, ...] = tuple(LLAMA_READERS),
    but: tuple[str, ...] = (),
) -> None:
    """Fold the gains of a Llama's layers as another tool does; readers in `but` are left as they are."""
    for layer in range(layers):
        for norm in norms:
            name = f"model.layers.{layer}.{norm}.weight"
            for reader in LLAMA_READERS[norm]:
                key = f"model.layers.{layer}.{reader}.weight"
                if key not in but:
                    tensors[key] = times(tensors[key], tensors[name])
            tensors[name] = torch.ones_like(tensors[name])


def tiny_mixtral() -> MixtralForCausalLM:
    """Two layers of three experts each."""
    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=3,
        max_position_embeddings=64,
    )
    return disturb_norms(MixtralForCausalLM(config))


def tiny_gpt2() -> GPT2LMHeadModel:
    """Two layers, five LayerNorms with biases, weights of Conv1D."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=64, bos_token_id=1, eos_token_id=2)
    model: GPT2LMHeadModel = disturb_norms(GPT2LMHeadModel(config))
    with torch.no_grad():
        for name, value in model.named_parameters():
            if ".ln_" in name:
                value.add_(0.1 * torch.randn(value.shape))
    return model
