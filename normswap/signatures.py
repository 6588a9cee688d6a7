"""What the forward of a class takes."""

from __future__ import annotations

import inspect
import re

from torch import nn

__all__ = ["parameter_names", "required_names", "takes_a_dictionary"]

_DICTIONARY = re.compile(r"(<class ')?([\w.]+\.)?(dict|Dict|(Mutable)?Mapping|OrderedDict)\b")


def parameter_names(cls: type[nn.Module]) -> list[str]:
    """Return the names that a class's forward gives to its arguments, without ``self`` and without ``*args``."""
    return [parameter.name for parameter in _parameters(cls)]


def required_names(cls: type[nn.Module]) -> list[str]:
    """Return those of them that have no default."""
    return [parameter.name for parameter in _parameters(cls) if parameter.default is parameter.empty]


def takes_a_dictionary(cls: type[nn.Module]) -> bool:
    """Return whether a class's forward says that its first argument is a dictionary, as sentence-transformers' do."""
    return any(_DICTIONARY.match(str(parameter.annotation)) for parameter in _parameters(cls)[:1])


def _parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
