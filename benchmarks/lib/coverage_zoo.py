"""The zoo of tiny models, brought to whatever transformers is installed."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import transformers
from torch import nn

__all__ = ["build", "load_zoo", "names"]


def load_zoo(folder: Path) -> types.ModuleType:
    """Import the zoo's ``tiny.py``, also where transformers is of the 4 series.

    The zoo reads the fields of configuration classes, which are dataclasses from transformers 5 on; before, their
    fields are the arguments of ``__init__``.

    Args:
        folder: what holds ``tiny.py``.

    Raises:
        FileNotFoundError: there is none.
    """
    if not (folder / "tiny.py").is_file():
        raise FileNotFoundError(f"expected a zoo with tiny.py at {folder}, which is absent; name it with --zoo")
    older = not hasattr(transformers, "PreTrainedConfig")
    sys.path.insert(0, str(folder))
    try:
        if older:
            transformers.PreTrainedConfig = transformers.PretrainedConfig
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tiny = importlib.import_module("tiny")
    finally:
        sys.path.remove(str(folder))
        if older:
            del transformers.PreTrainedConfig
    if older:
        _adapt(tiny)
    return tiny


def _adapt(tiny: Any) -> None:
    auto = importlib.import_module("transformers.models.auto.modeling_auto")
    tiny.dataclasses = types.SimpleNamespace(**vars(dataclasses) | {"fields": _fields})
    tiny._mapping = lambda name: getattr(
        auto, "MODEL_MAPPING_NAMES" if name == "MODEL" else f"MODEL_FOR_{name}_MAPPING_NAMES", {}
    )
    tiny._build = _built


def _built(settings: dict[str, Any]) -> Any:
    """Build a configuration: with its nested ones as dictionaries, which transformers 4 wants, else as objects."""
    cls, plain = settings["__cls__"], {k: v for k, v in settings.items() if k != "__cls__"}
    inner = {k: _built(v) for k, v in plain.items() if isinstance(v, dict) and "__cls__" in v}
    try:
        return cls(**plain | {k: v.to_dict() for k, v in inner.items()})
    except Exception:
        return cls(**plain | inner)


def _fields(cls: type) -> list[Any]:
    if dataclasses.is_dataclass(cls):
        return list(dataclasses.fields(cls))
    given = [p for p in inspect.signature(cls).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [
        types.SimpleNamespace(
            name=p.name,
            default=dataclasses.MISSING if p.default is p.empty else p.default,
            default_factory=dataclasses.MISSING,
        )
        for p in given
    ]


def names(tiny: Any) -> list[str]:
    """List the model types of this transformers, and the zoo's variants of them."""
    known = set(transformers.CONFIG_MAPPING.keys())
    return [*sorted(known), *(name for name, (base, _) in tiny.VARIANTS.items() if base in known)]


def build(tiny: Any, name: str) -> nn.Module:
    """Build a model with gains and biases away from 1 and 0.

    Args:
        tiny: the zoo.
        name: a model type or a variant.

    Raises:
        Exception: whatever the zoo or transformers raise where it cannot be built here.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tiny.tiny_variant(name) if name in tiny.VARIANTS else tiny.tiny_model(name)
        return tiny.perturb_norms_(model)
