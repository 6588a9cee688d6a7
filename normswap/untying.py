"""Give a head that shares the embedding's weight one of its own, in memory and on disk."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

from normswap.configtext import set_in_json
from normswap.errors import CheckpointError, ModelError
from normswap.inputs import run
from normswap.loading import build_meta
from normswap.quiet import first_line, quiet
from normswap.replica import original_class
from normswap.shards import Checkpoint
from normswap.shrinking import small_twin
from normswap.source import Source
from normswap.stored import Stored, StoredMap, map_stored

__all__ = [
    "Untying",
    "changes_when_untied",
    "is_tied",
    "plan_untying",
    "require_untied",
    "separated",
    "tying_readers",
    "untie_",
    "untie_config_text",
]

_FLAG = "tie_word_embeddings"
_BOUND = 1e-9
# vLLM's classes of these families assert the flag when they are built, and read no weight for the head.
_TIED_IN_VLLM = ("gemma", "gemma2", "mpt")
_TIED_IN_VLLM_FAMILY = "cohere"


@dataclass(frozen=True)
class Untying:
    """What untying changes in a checkpoint.

    Attributes:
        keys: parameter that has a tensor of its own from then on, to the name of that tensor on disk.
        sources: those of these tensors that are new, to those that they copy.
    """

    keys: dict[str, str]
    sources: dict[str, str]


def is_tied(model: nn.Module) -> bool:
    """Return whether the weight of an embedding is held by another module too."""
    return bool(_heads(model))


def separated(model: nn.Module) -> dict[str, str]:
    """Find what the class keeps apart when its configuration says that nothing is tied.

    The class is built from the changed configuration on the meta device, and compared.

    Args:
        model: a model of transformers whose head is tied; its parameters may be on the meta device.

    Returns:
        Name of each parameter that becomes one of its own, to the name that it is counted under so far.

    Raises:
        ModelError: the class cannot be built untied, or keeps the head tied.
    """
    return _separate(model)[1]


def _separate(model: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """Return an untied model of the class on the meta device, and what is its own there."""
    name = original_class(model).__name__
    apart = copy.deepcopy(_config(model))
    for part in _parts(apart, _paths(model)):
        setattr(part, _FLAG, False)
    # As it is read from a file: some classes set the flag themselves.
    other = _build(original_class(model), type(apart).from_dict(apart.to_dict()), "meta")
    before, after = _first_names(model), _first_names(other)
    if before.keys() != after.keys():
        raise ModelError(f"{name} has other parameters when it is untied; leave the head tied")
    found = {alias: first for alias, first in before.items() if alias != first and after[alias] == alias}
    if not _heads(model) & found.keys():
        raise ModelError(f"{name} ties its head whatever its configuration says; leave the head tied")
    return other, found


def untie_(model: nn.Module) -> dict[str, str]:
    """Give each tied parameter a copy of its own, in place, and say so in the configuration.

    Args:
        model: a model of transformers whose head is tied; its parameters may be on the meta device.

    Returns:
        What `separated` returns.

    Raises:
        ModelError: it cannot be untied; nothing was changed.
    """
    found = separated(model)
    paths, submodels = _paths(model), _tied_models(model)
    for name, source in found.items():
        path, _, attribute = name.rpartition(".")
        weight = model.get_parameter(source)
        own = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
        model.get_submodule(path).register_parameter(attribute, own)
    for config in (*_parts(_config(model), paths), *(submodel.config for submodel in submodels)):
        setattr(config, _FLAG, False)
    for submodel in submodels:
        # What transformers leaves out when it saves.
        if isinstance(getattr(submodel, "all_tied_weights_keys", None), dict):
            submodel.all_tied_weights_keys = submodel.get_expanded_tied_weights_keys(all_submodels=True)
    return found


def changes_when_untied(model: nn.Module) -> str:
    """Tell whether the class computes something else from equal weights when its configuration says untied.

    A small model of the class is run, tied and untied.

    Args:
        model: of any size; its parameters may be on the meta device.

    Returns:
        The reason not to untie it, empty where the outputs stay as they are.

    Raises:
        ModelError: no small model of the class builds and runs here.
    """
    twin = small_twin(model)
    tied = twin.model
    apart = copy.deepcopy(tied)
    untie_(apart)
    # A class may read the flag when it is built, and no more afterwards.
    built = _build(original_class(tied), copy.deepcopy(apart.config), "cpu").to(twin.dtype).eval()
    built.load_state_dict(apart.state_dict())
    worst = 0.0
    for batch in twin.batches:
        expected = run(tied, batch, twin.dtype, "cpu")
        got = run(built, batch, twin.dtype, "cpu")
        for one, other in zip(expected.tensors.values(), got.tensors.values(), strict=True):
            size = float(one.double().abs().max()) if one.numel() else 0.0
            error = float((one.double() - other.double()).abs().max()) / size if size else 0.0
            worst = worst if error <= worst else error
    if worst <= _BOUND:
        return ""
    return (
        f"{original_class(model).__name__} computes something else when its configuration says untied (outputs of "
        f"a small one differ by {worst:.1g})"
    )


def plan_untying(model: nn.Module, checkpoint: Checkpoint, stored: StoredMap) -> Untying:
    """Find which tensors have to be added to a checkpoint for its head to be untied, and what they are called there.

    Names on disk may differ from those of the class. One that transformers loads into the right parameter is found by
    trying: in the manner of the tensor that is copied, else the parameter's own.

    Args:
        model: what `normswap.loading.build_meta` returned for the checkpoint.
        checkpoint: what `normswap.shards.check_source` returned.
        stored: what `normswap.stored.map_stored` returned for both.

    Raises:
        ModelError: the class cannot be untied, or no name on disk was found.
    """
    other, found = _separate(model)
    needed = {name: stored.by_parameter[name][0] for name in sorted({*found, *found.values()}) if name in stored.tied}
    for name in needed:
        if len(stored.by_parameter[name]) > 1:
            raise ModelError(f"{name} is stored in {len(stored.by_parameter[name])} pieces; leave the head tied")
    own = {name: stored.by_parameter[name][0].key for name in {*found, *found.values()} & stored.twice.keys()}
    for prefix in _prefixes(needed.values()):
        keys = {name: prefix + name for name in needed} | own
        sources = {keys[name]: piece.key for name, piece in needed.items()}
        if not any(key in checkpoint.tensors for key in sources) and _loads(other, checkpoint, stored, keys, sources):
            return Untying(keys, sources)
    raise ModelError(f"found no name on disk that transformers loads {', '.join(needed)} from; leave the head tied")


def _prefixes(pieces: Iterable[Stored]) -> list[str]:
    renamed = [piece.key.split(".") for piece in pieces if piece.key != piece.parameter]
    parts = renamed[0][:-1] if renamed else []
    return [*(".".join(parts[:count]) + "." for count in range(len(parts), 0, -1)), ""]


def _loads(
    other: nn.Module, checkpoint: Checkpoint, stored: StoredMap, keys: Mapping[str, str], sources: Mapping[str, str]
) -> bool:
    """Whether an untied model finds all that it needs once these tensors are there."""
    more = {key: checkpoint.tensors[source] for key, source in sources.items()}
    try:
        found = map_stored(other, replace(checkpoint, tensors={**checkpoint.tensors, **more}))
    except CheckpointError:
        return False
    reads = all([piece.key for piece in found.by_parameter.get(name, ())] == [key] for name, key in keys.items())
    return reads and set(found.missing) <= set(stored.missing) and found.opaque.keys() <= stored.opaque.keys()


def untie_config_text(text: str, model: nn.Module) -> str:
    """Set ``tie_word_embeddings`` to false in a ``config.json``, in the root and wherever the head's part has its own.

    Args:
        text: of the file; all else in it stays as it is.
        model: what it describes, still tied.

    Raises:
        CheckpointError: the text is no JSON object.
    """
    known = json.loads(text)
    for path in _paths(model):
        at = known
        for step in path:
            at = at.get(step) if isinstance(at, dict) else None
        # A part that the file leaves out is as the class has it.
        if not path or isinstance(at, dict):
            text = set_in_json(text, path, _FLAG, False)
    return text


def require_untied(source: Source, checkpoint: Checkpoint) -> None:
    """Check a written checkpoint: its configuration gives an untied model, and every parameter has its tensor.

    Args:
        source: what `normswap.loading.resolve` returned for the folder.
        checkpoint: what `normswap.shards.check_source` returned for it.

    Raises:
        CheckpointError: it would be loaded tied, or with random numbers for a head.
    """
    model = build_meta(source)
    if heads := sorted(_heads(model)):
        raise CheckpointError(f"expected {heads[0]} untied in {source.name}, its configuration ties it still")
    embeddings = {name for name, _ in model.named_parameters()} & set(map_stored(model, checkpoint).missing)
    if embeddings:
        raise CheckpointError(f"expected a tensor for {sorted(embeddings)[0]} in {source.name}, there is none")


def tying_readers(config: Any) -> str:
    """Say which other program will not load this model untied; empty where none is known.

    Args:
        config: of the model.
    """
    for part in (config, *(part for _, part in _nested(config, ()))):
        family = str(getattr(part, "model_type", ""))
        if family in _TIED_IN_VLLM or family.startswith(_TIED_IN_VLLM_FAMILY):
            return f"vLLM asserts that {family} models are tied, and does not load this one untied"
    return ""


def _heads(model: nn.Module) -> set[str]:
    """Return the names under which something other than an embedding holds the weight of one."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return {
        f"{name}.{attribute}".removeprefix(".")
        for name, module in model.named_modules(remove_duplicate=False)
        if not isinstance(module, nn.Embedding)
        for attribute, parameter in module._parameters.items()
        if id(parameter) in tables
    }


def _first_names(model: nn.Module) -> dict[str, str]:
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    return {name: first[id(parameter)] for name, parameter in model.named_parameters(remove_duplicate=False)}


def _config(model: nn.Module) -> Any:
    config = getattr(model, "config", None)
    if not isinstance(config, PretrainedConfig):
        raise ModelError(
            f"expected a model of transformers to untie, got a {type(model).__name__} without its configuration"
        )
    return config


def _tied_models(model: nn.Module) -> list[PreTrainedModel]:
    """Return the model, and those inside it that the head belongs to."""
    heads = _heads(model)
    return [
        module
        for name, module in model.named_modules()
        if isinstance(module, PreTrainedModel) and (not name or any(head.startswith(f"{name}.") for head in heads))
    ]


def _paths(model: nn.Module) -> list[tuple[str, ...]]:
    """Return where in the configuration it says whether the head is tied."""
    config = _config(model)
    text = config.get_text_config()
    inner = [module.config for module in _tied_models(model)[1:]]

    def concerns(part: Any) -> bool:
        return part is text or any(part is one or part.to_dict() == one.to_dict() for one in inner)

    return [(), *(path for path, part in _nested(config, ()) if concerns(part))]


def _nested(config: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, part in vars(config).items():
        if isinstance(part, PretrainedConfig):
            yield (*path, name), part
            yield from _nested(part, (*path, name))


def _parts(config: Any, paths: Iterable[tuple[str, ...]]) -> Iterator[Any]:
    for path in paths:
        part = config
        for name in path:
            part = getattr(part, name)
        yield part


def _build(cls: type[nn.Module], config: Any, device: str) -> nn.Module:
    try:
        with quiet(), torch.random.fork_rng(devices=[]), torch.device(device):
            model: nn.Module = cls._from_config(config)  # type: ignore[attr-defined]
    except Exception as error:
        raise ModelError(f"cannot build {cls.__name__} untied: {first_line(error)}; leave the head tied") from error
    return model
