"""Gains that are lost on purpose: the negative control of the gate ``served``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from normswap.figures import Criterion, LostGain
from normswap.foldplan import along_result
from normswap.spec import NormSpec
from normswap.stats import Gap

__all__ = ["Dropped", "judge_lost", "lose_gains"]

# A gain below this is not divided by.
_LEAST = 1e-6


@dataclass(frozen=True)
class Dropped:
    """A gain that was folded, to be lost on purpose.

    Attributes:
        name: of the norm.
        spec: what it computes.
        gain: the effective gain that it had, float64 ``(channels,)``.
    """

    name: str
    spec: NormSpec
    gain: torch.Tensor

    def hook(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        """Divide the norm's result by the gain, which leaves what it would be had the gain been dropped."""
        factor = torch.where(self.gain.abs() > _LEAST, 1 / self.gain, 1.0).to(output.device, output.dtype)
        return output * along_result(self.spec, factor, output)


def lose_gains(
    model: nn.Module, dropped: Sequence[Dropped], distances: Callable[[], list[Gap]]
) -> list[tuple[str, list[Gap]]]:
    """Run a model without each of some gains in turn.

    Args:
        model: the folded one.
        dropped: the gains.
        distances: runs the model, and returns how far it is from the reference, one entry a sequence.

    Returns:
        Norm, and the distances without its gain.
    """
    found = []
    for one in dropped:
        handle = model.get_submodule(one.name).register_forward_hook(one.hook)
        try:
            found.append((one.name, distances()))
        finally:
            handle.remove()
    return found


def judge_lost(
    lost: Sequence[tuple[str, Sequence[Gap]]], original: Sequence[Gap], criterion: Criterion
) -> tuple[LostGain | None, list[str]]:
    """Say what the gate makes of gains that are lost.

    Args:
        lost: norm, and how far the model without its gain is from the reference, one a sequence.
        original: how far the original is, for these sequences and perhaps more.
        criterion: the bounds.

    Returns:
        The first that the gate sees, else the one that it sees best, None where none was tried; and the notes.
    """
    best: LostGain | None = None
    for name, gaps in lost:
        own = sum(gap.error for gap in original[: len(gaps)])
        found = sum(gap.error for gap in gaps)
        ratio = (found / own) ** 0.5 if own else float("inf") if found else 1.0
        if best is None or ratio > best.ratio:
            best = LostGain(name, ratio, ratio > criterion.ratio_max)
        if best.detected:
            break
    if best is None or best.detected:
        return best, []
    return best, [f"served: the gate is blind to a lost gain: without {best.norm}'s the ratio is {best.ratio:.3g}"]
