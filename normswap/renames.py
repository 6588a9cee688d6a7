"""Which stored tensors transformers puts together for which parameter: its own renames, in both of its generations."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import modeling_utils

from normswap.errors import CheckpointError
from normswap.quiet import first_line, quiet

__all__ = ["Group", "follows_another", "group_keys", "shared_names"]


@dataclass(frozen=True)
class Group:
    """Stored tensors that are loaded together.

    Attributes:
        parameter: name of what they become; of the first, where a conversion gives several.
        keys: the stored tensors by the pattern that each matched, in the order in which transformers takes them.
        converter: transformers' conversion, to be copied for each use; None where the first tensor is taken as it is.
    """

    parameter: str
    keys: dict[str, list[str]]
    converter: Any | None = None

    def names(self) -> tuple[str, ...]:
        """Names of all parameters that the tensors become, as far as they follow from the conversion's patterns."""
        if self.converter is None:
            return (self.parameter,)
        first, *others = self.converter.target_patterns
        return (self.parameter, *(self.parameter.replace(first, pattern) for pattern in others))


def group_keys(model: nn.Module, keys: Iterable[str]) -> list[Group]:
    """Group the keys of a checkpoint as transformers does when it loads them, in its order.

    A key that becomes no parameter or persistent buffer of the model is in no group.

    Args:
        model: of the class that is loaded; it may be on meta.
        keys: names of the stored tensors, of all shards.

    Raises:
        CheckpointError: transformers refuses these names for this class.
    """
    # Version 5 converts on load; version 4 renames only.
    converts = importlib.util.find_spec("transformers.core_model_loading") is not None
    with quiet():
        return list(_converted(model, keys) if converts else _renamed(model, list(keys)))


def _converted(model: Any, keys: Iterable[str]) -> Iterator[Group]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    mapping = get_model_conversion_mapping(model)
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    groups: dict[str, Group] = {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], base_model_prefix=prefix, meta_state_dict=state)
        if name not in state:
            continue
        # The first key decides how a parameter is made.
        group = groups.setdefault(name, Group(name, {}, by_pattern[pattern] if pattern else None))
        group.keys.setdefault(pattern or key, []).append(key)
    yield from groups.values()


def _renamed(model: Any, keys: list[str]) -> Iterator[Group]:
    """Group one key each, as `PreTrainedModel.from_pretrained` of transformers 4 takes them."""
    prefix = model.base_model_prefix
    stored_prefix = bool(prefix) and any(key.startswith(prefix) for key in keys)
    own_prefix = bool(prefix) and hasattr(model, prefix)
    families = getattr(modeling_utils, "VLMS", ())
    names = [cls.__name__.lower() for cls in type(model).__mro__[:-1]]
    patterns = (
        model._checkpoint_conversion_mapping if any(part in name for name in names for part in families) else None
    )
    to_base = stored_prefix and not own_prefix
    try:
        renames = model._get_key_renaming_mapping(keys, patterns, to_base, not stored_prefix and own_prefix)
    except ValueError as error:
        raise CheckpointError(
            f"the names of the stored tensors do not fit {type(model).__name__}: {first_line(error)}"
        ) from error
    state = model.state_dict()
    # Where two keys get one name, the last one counts.
    last = {name: key for key, name in renames.items() if name in state}
    for name, key in last.items():
        yield Group(name, {key: [key]})


def shared_names(state: Mapping[str, torch.Tensor]) -> list[list[str]]:
    """Return the names of each parameter that has more than one, in the order of the class."""
    names: dict[int, list[str]] = {}
    for name, value in state.items():
        names.setdefault(id(value), []).append(name)
    return [group for group in names.values() if len(group) > 1]


def follows_another(model: Any, name: str) -> bool:
    """Tell whether the class declares that the parameter of this name takes the values of another one."""
    declared = getattr(model, "all_tied_weights_keys", None)
    if declared is not None:
        return name in declared
    # transformers 4 lists patterns instead of pairs.
    patterns = getattr(model, "_tied_weights_keys", None) or ()
    return any(re.search(pattern, name) for pattern in patterns)
