"""A checkpoint's model as it is after loading, but for its weights, which stay on disk."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.errors import ModelError
from normswap.loading import check_complete, meta_parameters, model_class, quantization, told
from normswap.quiet import first_line, quiet
from normswap.shards import Checkpoint, check_source
from normswap.source import Source
from normswap.stored import StoredMap, map_stored

__all__ = ["DTYPES", "Skeleton", "build_skeleton"]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""What a stored tensor of a model that is not quantized may be of, by safetensors' spelling."""


@dataclass(frozen=True)
class Skeleton:
    """A model without its weights.

    Attributes:
        model: in eval mode. What the checkpoint holds is on the meta device, in the shapes and dtypes that
            ``from_pretrained`` gives it; everything else has its values, on the CPU.
        checkpoint: where the weights are.
        stored: which tensors hold which parameters.
    """

    model: nn.Module
    checkpoint: Checkpoint
    stored: StoredMap


def build_skeleton(source: Source, dtype: torch.dtype) -> Skeleton:
    """Build a model as `normswap.loading.load_model` does, without reading a weight.

    transformers loads it from tensors on the meta device, so that dtypes, ties and what is missing are its own
    decisions; then what it computes itself (rotary tables, position ids) is computed once more on the CPU.

    Args:
        source: what `normswap.loading.resolve` found.
        dtype: as for `normswap.loading.load_model`.

    Raises:
        CheckpointError: tensors are missing, or of another shape than the configuration says.
        ModelError: the checkpoint is quantized, or its parameters are no rearrangement of stored tensors.
    """
    if method := quantization(source.config):
        raise ModelError(
            f"{source.name} is quantized with {method}: its weights cannot be read one by one; load it whole"
        )
    checkpoint = check_source(source.path)
    cls = model_class(source)
    with told(source, None), quiet(), torch.random.fork_rng(devices=[]):
        model, info = cls.from_pretrained(  # type: ignore[attr-defined]
            None,
            config=copy.deepcopy(source.config),
            state_dict=dict(_hollow(source, checkpoint)),
            dtype=dtype,
            device_map={"": "meta"},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    check_complete(source, info, False)
    # What accelerate notes of the device map.
    vars(model).pop("hf_device_map", None)
    stored = map_stored(model, checkpoint)
    if stored.opaque:
        name, reason = next(iter(stored.opaque.items()))
        raise ModelError(f"{name} of {source.name} cannot be read by itself: {reason}; load the model whole")
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            # The same as for a model that is loaded whole, so that what is missing gets the same random numbers.
            torch.default_generator.manual_seed(0)
            _compute_rest(model, stored, source, dtype)
    except Exception as error:
        raise ModelError(
            f"what {cls.__name__} computes when it is built cannot be had without its weights: {first_line(error)}; "
            "load the model whole"
        ) from error
    return Skeleton(model.eval(), checkpoint, stored)


def _hollow(source: Source, checkpoint: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    for key, entry in checkpoint.tensors.items():
        if entry.dtype not in DTYPES:
            raise ModelError(f"{key} of {source.name} is stored as {entry.dtype}, which is quantized; load it whole")
        yield key, torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")


def _compute_rest(model: nn.Module, stored: StoredMap, source: Source, dtype: torch.dtype) -> None:
    missing = set(stored.missing) - set(stored.tied)
    if hasattr(model, "_move_missing_keys_from_meta_to_device"):
        _initialise(model, missing)
        return
    # Before version 5 buffers get their values when the model is built.
    with meta_parameters():
        built = type(model)._from_config(copy.deepcopy(source.config), dtype=dtype)  # type: ignore[attr-defined]
    modules = dict(built.named_modules())
    for name, module in model.named_modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and (key in module._non_persistent_buffers_set or _join(name, key) in missing):
                module._buffers[key] = modules[name]._buffers[key]
    if parameters := sorted(missing & {name for name, _ in model.named_parameters()}):
        raise ModelError(f"{parameters[0]} is not stored")


def _initialise(model: nn.Module, missing: set[str]) -> None:
    """Have the model fill what is not stored, as it does at the end of loading; everything else counts as filled."""
    absent = {id(parameter) for name, parameter in model.named_parameters() if name in missing}
    rooms: dict[int, nn.Parameter] = {}
    for name, module in model.named_modules():
        vars(module).pop("_is_hf_initialized", None)
        for key, parameter in module._parameters.items():
            if id(parameter) in absent:
                if id(parameter) not in rooms:
                    rooms[id(parameter)] = nn.Parameter(_room(parameter), requires_grad=parameter.requires_grad)
                module._parameters[key] = rooms[id(parameter)]
            elif parameter is not None:
                parameter._is_hf_initialized = True
        for key, buffer in module._buffers.items():
            if buffer is None:
                continue
            if key in module._non_persistent_buffers_set or _join(name, key) in missing:
                module._buffers[key] = _room(buffer)
            else:
                buffer._is_hf_initialized = True
    initialize: Any = model.initialize_weights
    initialize()


def _room(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


def _join(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key
