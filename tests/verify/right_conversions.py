"""Right conversions of a checkpoint of a family, each made as its users make it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from broken_checkpoints import copied, files_of, read
from hand_folds import READERS, folded_by_hand
from safetensors.torch import save_file
from tiny_families import FAMILIES
from transformers import PreTrainedModel

import normswap
from normswap.folding import Tied

Conversion = Callable[[str, Path, Path], Path]
# Transformers 4 shares a bias of the one's head too, and vLLM loads the other only tied.
KEPT_TIED = ("bert", "gemma2")


def identical(family: str, source: Path, target: Path) -> Path:
    """Copy the files."""
    return copied(source, target)


def swapped(family: str, source: Path, target: Path) -> Path:
    """Convert without folding."""
    return normswap.convert(source, target, verify=False).out


def folded(family: str, source: Path, target: Path) -> Path:
    """Convert with every gain folded that can be, heads untied where that is not advised against."""
    tied: Tied = "skip" if family in KEPT_TIED else "untie"
    return normswap.convert(source, target, fold=True, tied=tied, verify=False).out


def folded_unrecorded(family: str, source: Path, target: Path) -> Path:
    """Fold, and lose the record of it."""
    folder = folded(family, source, target)
    (folder / "normswap.json").unlink()
    return folder


def folded_elsewhere(family: str, source: Path, target: Path) -> Path:
    """Fold in plain torch."""
    return folded_by_hand(source, target, family, FAMILIES[family].offset)


def resharded(family: str, source: Path, target: Path) -> Path:
    """Load with transformers and save in several files."""
    _load(family, source).save_pretrained(target, max_shard_size="24KB")
    assert len(files_of(target)) > 1
    return target


def pickled(family: str, source: Path, target: Path) -> Path:
    """Write the tensors as ``pytorch_model.bin``."""
    copied(source, target)
    torch.save(read(target), target / "pytorch_model.bin")
    for file in files_of(target):
        file.unlink()
    return target


def unpickled(family: str, source: Path, target: Path) -> Path:
    """Write the tensors of a ``pytorch_model.bin`` as safetensors."""
    copied(source, target)
    file = target / "pytorch_model.bin"
    save_file(torch.load(file, weights_only=True), target / "model.safetensors", metadata={"format": "pt"})
    file.unlink()
    return target


def to_bfloat16(family: str, source: Path, target: Path) -> Path:
    """Load with transformers in bfloat16 and save."""
    _load(family, source, torch.bfloat16).save_pretrained(target)
    return target


def to_float16(family: str, source: Path, target: Path) -> Path:
    """Load with transformers in float16 and save."""
    _load(family, source, torch.float16).save_pretrained(target)
    return target


def made_by_hand(family: str) -> bool:
    """Whether `folded_elsewhere` knows a family."""
    return family in READERS


def _load(family: str, source: Path, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
    model: PreTrainedModel = getattr(transformers, FAMILIES[family].model).from_pretrained(source, dtype=dtype)
    return model
