"""What the forward of a class takes."""

from __future__ import annotations

import inspect

from torch import nn

__all__ = ["parameter_names", "required_names"]


def parameter_names(cls: type[nn.Module]) -> list[str]:
    """Return the names that a class's forward gives to its arguments, without ``self`` and without ``*args``."""
    return [parameter.name for parameter in _parameters(cls)]


def required_names(cls: type[nn.Module]) -> list[str]:
    """Return those of them that have no default."""
    return [parameter.name for parameter in _parameters(cls) if parameter.default is parameter.empty]


def _parameters(cls: type[nn.Module]) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    return [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
