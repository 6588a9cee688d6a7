"""Inputs for the models inside a model, where no input of the whole comes by their norms."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn
from transformers import PreTrainedModel

from normswap.attempts import Attempts
from normswap.candidates import Candidate, propose

__all__ = ["propose_towers"]

_TOKENS = 8


def propose_towers(model: nn.Module, unreached: Sequence[str]) -> Iterator[tuple[str, nn.Module, Candidate]]:
    """Find the smallest models inside a model that run by themselves and come by modules that were not reached.

    Args:
        model: what holds them; it may be on the meta device.
        unreached: names in it of the modules to come by.

    Yields:
        The inner model's name, the inner model, and inputs on which it runs and comes by some of the modules that none
        before came by.
    """
    waiting = dict.fromkeys(unreached)
    tried: set[str] = set()
    for name in unreached:
        for tower in _around(model, name):
            if name not in waiting:
                break
            if tower not in tried:
                tried.add(tower)
                yield from _reaching(model, tower, waiting)


def _around(model: nn.Module, name: str) -> Iterator[str]:
    """Yield the names of the models inside the model that hold a module, the smallest first."""
    words = name.split(".")
    for count in range(len(words) - 1, 0, -1):
        outer = ".".join(words[:count])
        if isinstance(model.get_submodule(outer), PreTrainedModel):
            yield outer


def _reaching(model: nn.Module, tower: str, waiting: dict[str, None]) -> Iterator[tuple[str, nn.Module, Candidate]]:
    module = model.get_submodule(tower)
    names = list(inspect.signature(module.forward).parameters)
    inside = [name for name in waiting if name.startswith(f"{tower}.")]
    attempts = Attempts(module, [model.get_submodule(name) for name in inside])
    for candidate in propose(module, getattr(module, "config", None), names, [], 1, _TOKENS, 0):
        attempt = attempts.forward(candidate.batches[0])
        reached = [inside[place] for place in attempt.reached if inside[place] in waiting]
        if attempt.error is None and reached:
            for name in reached:
                del waiting[name]
            yield tower, module, candidate
        if not any(name in waiting for name in inside):
            return
