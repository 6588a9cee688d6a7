"""Edits of stored tensors, and the rounding by hand that they are held against."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from normswap.shards import check_source
from normswap.streaming import Written, write_checkpoint


@dataclass
class Scaled:
    """Multiplies each column (or each row, of a vector) by a factor, in float64."""

    factor: torch.Tensor
    seen: int = 0

    def apply(self, rows: torch.Tensor, start: int) -> torch.Tensor:
        self.seen = max(self.seen, rows.numel())
        factor = self.factor[start : start + len(rows)] if rows.dim() == 1 else self.factor
        return rows.double() * factor


def rounded_by_hand(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round float64 to the nearest value of a dtype by trying the three neighbours of what torch's cast gives."""
    near = values.to(dtype)
    width = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
    bits = near.view(width).long()
    best, error = near.double(), (near.double() - values).abs()
    even = bits % 2 == 0
    for step in (-1, 1):
        other = (bits + step).to(width).view(dtype).double()
        distance = (other - values).abs()
        better = (distance < error) | ((distance == error) & ~even)
        better &= other.isfinite() & (other.signbit() == values.signbit())
        best, error = torch.where(better, other, best), torch.where(better, distance, error)
    return best.to(dtype)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""
    return (one.dtype, one.shape) == (other.dtype, other.shape) and bool(
        (one.contiguous().reshape(-1).view(torch.uint8) == other.contiguous().reshape(-1).view(torch.uint8)).all()
    )


def written(path: Path, target: Path, **options: Any) -> Written:
    target.mkdir()
    return write_checkpoint(check_source(path), target, **options)


def digest(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def tiny_llama(tied: bool = False) -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=64,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    return LlamaForCausalLM(config).bfloat16().eval()
