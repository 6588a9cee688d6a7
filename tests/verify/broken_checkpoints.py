"""Makers of faults: each leaves a sound checkpoint, and another of it with one thing wrong."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_families import Family

Tensors = dict[str, torch.Tensor]
CHANNEL = 3
SHARD = "24KB"


@dataclass(frozen=True)
class Broken:
    """A sound checkpoint and a faulty one.

    Attributes:
        sound: folder of the right one.
        faulty: folder of the wrong one.
        names: of tensors, modules or settings: a report has to name one of them.
    """

    sound: Path
    faulty: Path
    names: tuple[str, ...]


def files_of(folder: Path) -> list[Path]:
    """Return the files of its weights."""
    return sorted(folder.glob("*.safetensors"))


def read(folder: Path) -> Tensors:
    """Return every stored tensor."""
    return {name: tensor for file in files_of(folder) for name, tensor in load_file(file).items()}


def copied(source: Path, target: Path) -> Path:
    """Copy a checkpoint, without what a conversion wrote of itself."""
    return Path(shutil.copytree(source, target, ignore=shutil.ignore_patterns("normswap.json")))


def changed(source: Path, target: Path, change: Callable[[Tensors], None]) -> Path:
    """Copy a checkpoint and let `change` work on its tensors; each stays in the file that it was in."""
    copied(source, target)
    tensors = read(target)
    change(tensors)
    for file in files_of(target):
        with safe_open(file, framework="pt") as opened:
            kept = {name: tensors[name].contiguous() for name in opened.keys() if name in tensors}  # noqa: SIM118
        save_file(kept, file, metadata={"format": "pt"})
    return target


def configured(source: Path, target: Path, **settings: object) -> Path:
    """Copy a checkpoint and write over entries of its ``config.json``."""
    copied(source, target)
    file = target / "config.json"
    data = json.loads(file.read_text())
    for name in settings:
        assert name in data, f"{name} is no setting of {source.name}"
    file.write_text(json.dumps({**data, **settings}))
    return target


def module_of(tensor: str) -> str:
    """Return the name of the module that a tensor belongs to."""
    return tensor.rpartition(".")[0]


def one_channel(family: Family, sound: Path, faulty: Path) -> Broken:
    """Make one channel of one gain 2% too large."""

    def change(tensors: Tensors) -> None:
        gain = tensors[family.gain]
        gain[CHANNEL] = 1.02 * (gain[CHANNEL].double() + family.offset) - family.offset

    return Broken(sound, changed(sound, faulty, change), (family.gain, family.layer))


def eps_smaller(family: Family, sound: Path, faulty: Path) -> Broken:
    """Read an eps of 1e-5 as 1e-6."""
    return Broken(sound, configured(sound, faulty, **{family.eps: 1e-6}), (family.eps,))


def norms_exchanged(family: Family, sound: Path, faulty: Path) -> Broken:
    """Exchange a norm of layer 0 with that of layer 1."""

    def change(tensors: Tensors) -> None:
        tensors[family.gain], tensors[family.twin] = tensors[family.twin], tensors[family.gain]

    return Broken(sound, changed(sound, faulty, change), (family.gain, family.twin))


def embeddings_centred(family: Family, sound: Path, faulty: Path) -> Broken:
    """Subtract its mean from each row of the embedding, which only a norm that subtracts it as well would not see."""

    def change(tensors: Tensors) -> None:
        rows = tensors[family.embedding]
        tensors[family.embedding] = (rows.double() - rows.double().mean(-1, keepdim=True)).to(rows.dtype)

    return Broken(sound, changed(sound, faulty, change), (family.embedding,))


def head_left_tied(family: Family, sound: Path, faulty: Path) -> Broken:
    """Fold the final gain away, and leave the head tied to the embedding, which was not multiplied by it."""

    def change(tensors: Tensors) -> None:
        gain = tensors[family.final]
        bias = family.final.replace("weight", "bias")
        if bias in tensors:
            tensors[bias] = (tensors[bias].double() / (gain.double() + family.offset)).to(gain.dtype)
        tensors[family.final] = torch.full_like(gain, 1 - family.offset)

    return Broken(sound, changed(sound, faulty, change), (family.final,))


def expert_not_scaled(family: Family, sound: Path, faulty: Path) -> Broken:
    """Fold a gain into the router and into every expert but the last."""
    assert family.readers is not None
    left: list[str] = []

    def change(tensors: Tensors) -> None:
        gain = tensors[family.gain]
        factor = gain.double() + family.offset
        for name in [name for name in tensors if re.fullmatch(family.readers or "", name)]:
            weight = tensors[name].double()
            if weight.dim() == 3:
                folded = weight * factor[:, None]
                folded[-1] = weight[-1]
                left.append(name)
            elif "experts.3." in name:
                folded = weight
                left.append(name)
            else:
                folded = weight * factor
            tensors[name] = folded.to(gain.dtype)
        tensors[family.gain] = torch.full_like(gain, 1 - family.offset)

    folder = changed(sound, faulty, change)
    assert left
    return Broken(sound, folder, (*left, family.gain))


def foreign_shard(family: Family, sound: Path, other: Path, faulty: Path) -> Broken:
    """Take one shard from another checkpoint of the same shape."""
    copied(sound, faulty)
    file = files_of(faulty)[1]
    shutil.copyfile(other / file.name, file)
    ours, theirs = load_file(sound / file.name), load_file(file)
    assert ours.keys() == theirs.keys()
    return Broken(sound, faulty, tuple(name for name in ours if not torch.equal(ours[name], theirs[name])))
