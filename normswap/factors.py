"""What a fold moves, as numbers: the norm's gain and bias by channel, and what stays behind in the norm."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from normswap.foldplan import Consumer, Fold, FoldPlan, effective_gain
from normswap.narrowing import lost_range, round_once

__all__ = ["Channels", "along", "channel_count", "channels_of", "factor_of", "leave"]


@dataclass(frozen=True)
class Channels:
    """The values of one norm, float64, one for each channel.

    Attributes:
        gain: the effective gain.
        moved: the bias, where it is moved into the consumers; else None.
        kept: what the norm's bias becomes where it is kept, ``b / g``, of the bias's own number of values; else None.
    """

    gain: torch.Tensor
    moved: torch.Tensor | None = None
    kept: torch.Tensor | None = None


def channel_count(fold: Fold) -> int:
    """Return how many channels of a norm its consumers read, counted from the first to the last."""
    return max(
        (p.channel + (p.stop - p.start - 1) * p.step + 1 for consumer in fold.consumers for p in consumer.pieces),
        default=1,
    )


def channels_of(fold: Fold, gain: torch.Tensor | None, bias: torch.Tensor | None) -> Channels | str:
    """Work out what a fold moves.

    Args:
        fold: of a norm whose spec is known.
        gain: the gain as stored; None for a norm without.
        bias: likewise.

    Returns:
        The values, or the reason why this fold would not be exact.
    """
    assert fold.spec is not None
    size = max(channel_count(fold), 1 if bias is None else bias.numel())
    ones = torch.ones(size, dtype=torch.float64) if bias is None else bias.new_ones(size, dtype=torch.float64)
    factor = ones if gain is None else _laid(effective_gain(fold.spec, gain).clone(), size)
    if not bool(factor.isfinite().all()):
        return "its gain holds NaN or infinite values"
    if factor.numel() < size:
        return f"its gain has {factor.numel()} channels, its consumers read {size}"
    if bias is None or fold.bias == "none":
        return Channels(factor)
    shift = bias.detach().to(torch.float64, copy=True).reshape(-1)
    if not bool(shift.isfinite().all()):
        return "its bias holds NaN or infinite values"
    if fold.bias == "move":
        return Channels(factor, moved=_laid(shift, factor.numel()))
    return _kept(factor, shift, bias.dtype)


def _kept(factor: torch.Tensor, shift: torch.Tensor, dtype: torch.dtype) -> Channels | str:
    if shift.numel() == 1 and factor.numel() > 1:
        if bool((factor != factor[0]).any()):
            return "its bias is one number for all channels, and cannot stay divided by a gain for each"
        factor_of_shift = factor[:1]
    else:
        factor_of_shift = factor[: shift.numel()]
    if bool(((factor_of_shift == 0) & (shift != 0)).any()):
        return "its bias stays in the norm, divided by the gain, and a gain is zero"
    kept = torch.where(shift == 0, 0.0, shift / factor_of_shift)
    if lost := lost_range(round_once(kept, dtype), shift != 0):
        return f"its bias stays in the norm, divided by the gain, where {lost}"
    return Channels(factor, kept=kept)


def _laid(values: torch.Tensor, size: int) -> torch.Tensor:
    """Give every channel its value where all have one and the same."""
    return values.expand(size).contiguous() if values.numel() == 1 else values


def factor_of(parts: Iterable[tuple[Consumer, Channels]], size: int) -> torch.Tensor:
    """Compose what several norms multiply the columns of one weight by.

    Args:
        parts: how the weight reads each of them, with its values.
        size: number of its columns.

    Returns:
        ``(size,)``, float64.
    """
    laid = [consumer.spread(channels.gain, size, 1.0) for consumer, channels in parts]
    return torch.stack(laid).prod(0) if len(laid) > 1 else laid[0]


def along(values: torch.Tensor, axis: int, dim: int) -> torch.Tensor:
    """View ``(n,)`` so that it broadcasts along one axis of a tensor of so many dimensions."""
    return values.view(*(1,) * axis, -1, *(1,) * (dim - axis - 1))


def leave(plan: FoldPlan, reasons: Mapping[str, str]) -> FoldPlan:
    """Return the plan with some folds refused.

    Args:
        plan: the plan.
        reasons: name of a norm to the reason.
    """
    return FoldPlan(
        tuple(
            replace(fold, action="refuse", reason=reasons[fold.name])
            if fold.action == "fold" and fold.name in reasons
            else fold
            for fold in plan.decisions
        )
    )
