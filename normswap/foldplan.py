"""What folding gains would do to a model, as data: which linear maps read a norm, and what is decided for each norm."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from normswap.naming import name_pattern
from normswap.spec import NormSpec

__all__ = ["Consumer", "Fold", "FoldPlan", "Piece", "along_result", "effective_gain", "stored_gain"]


@dataclass(frozen=True)
class Piece:
    """A run of columns of a consumer: columns ``[start, stop)`` read channels from ``channel`` on, one each.

    With ``step`` 0 all of them read the one channel ``channel``.
    """

    start: int
    stop: int
    channel: int
    step: Literal[0, 1] = 1


@dataclass(frozen=True)
class Consumer:
    """A linear map that reads a norm's output.

    Attributes:
        parameter: qualified name of its weight in the model's class.
        axis: the dimension of the weight that is contracted with the norm's output; its positions are the columns.
        pieces: which channel of the norm each column reads, in order; columns in no piece read something else.
        bias: qualified name of the parameter that is added to this map's result; None without. Its shape is that of
            the weight without ``axis``.
    """

    parameter: str
    axis: int
    pieces: tuple[Piece, ...]
    bias: str | None = None

    def spread(self, values: torch.Tensor, size: int, fill: float) -> torch.Tensor:
        """Lay a norm's channels out over the columns.

        Args:
            values: ``(channels,)``, of any dtype.
            size: number of columns.
            fill: for columns that read something else: 1 for factors, 0 for a bias.

        Returns:
            ``(size,)``, in the dtype of ``values``.
        """
        laid = values.new_full((size,), fill)
        for piece in self.pieces:
            count = (piece.stop - piece.start - 1) * piece.step + 1
            laid[piece.start : piece.stop] = values[piece.channel : piece.channel + count]
        return laid


@dataclass(frozen=True)
class Fold:
    """What is decided for one norm.

    Attributes:
        name: qualified name of the norm, as in `normswap.plan.Decision`.
        action: ``"fold"`` or ``"refuse"``.
        reason: why it is refused, with the operation that stands in the way; empty for a fold.
        consumers: the linear maps that read it, also of a refused norm where they are known.
        untie: whether a consumer is the head that is tied to the embedding, which has to be untied for this fold.
        bias: what becomes of the norm's bias: ``"none"`` without one; ``"move"`` into the consumers' biases, where
            every one has a bias and reads the norm's rows as they are; else ``"keep"``: it stays in the norm, divided
            by the gain, and the fold is refused where a gain is (near) zero.
        spec: what the norm computes; None where that is not known.
    """

    name: str
    action: Literal["fold", "refuse"]
    reason: str
    consumers: tuple[Consumer, ...] = ()
    untie: bool = False
    bias: Literal["none", "move", "keep"] = "none"
    spec: NormSpec | None = None

    @property
    def parameters(self) -> tuple[str, ...]:
        """Names of the consumers' weights, sorted."""
        return tuple(sorted({consumer.parameter for consumer in self.consumers}))

    @property
    def pattern(self) -> str:
        """The name with every layer or expert number replaced by ``*``."""
        return name_pattern(self.name)

    def to_dict(self) -> dict[str, Any]:
        """Return the decision as it stands in ``inspect --fold --json``."""
        return {
            "action": self.action,
            "reason": self.reason,
            "consumers": list(self.parameters),
            "untie": self.untie,
            "bias": self.bias,
        }


@dataclass(frozen=True)
class FoldPlan:
    """The decisions for every norm of a model that has a place in a plan, in the model's order.

    Attributes:
        decisions: one for each norm.
    """

    decisions: tuple[Fold, ...]

    @property
    def folds(self) -> tuple[Fold, ...]:
        """The norms whose gains would be folded."""
        return tuple(fold for fold in self.decisions if fold.action == "fold")

    @property
    def refusals(self) -> tuple[Fold, ...]:
        """The norms that keep their gains."""
        return tuple(fold for fold in self.decisions if fold.action == "refuse")

    @property
    def unties(self) -> bool:
        """Whether a fold needs the head untied."""
        return any(fold.untie for fold in self.folds)

    def by_name(self) -> dict[str, Fold]:
        """Return the decisions by the norm's name."""
        return {fold.name: fold for fold in self.decisions}


def effective_gain(spec: NormSpec, stored: torch.Tensor) -> torch.Tensor:
    """Return what a norm multiplies its channels by, ``w`` or ``1 + w``, as float64 ``(channels,)``.

    Args:
        spec: of the norm.
        stored: the gain as stored.
    """
    gain = spec.scale(stored.detach(), torch.float64)
    assert gain is not None
    return gain.reshape(-1)


def stored_gain(spec: NormSpec, effective: torch.Tensor | Sequence[float], like: torch.Tensor) -> torch.Tensor:
    """Return the stored gain that gives an effective one: the inverse of `effective_gain`, rounded once.

    Args:
        spec: of the norm.
        effective: ``(channels,)``.
        like: the gain as stored, for shape, dtype and device.
    """
    wide = torch.as_tensor(effective, dtype=torch.float64, device=like.device) - spec.offset
    return wide.reshape(like.shape).to(like.dtype)


def along_result(spec: NormSpec, channels: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
    """Bring a norm's channels into a shape that broadcasts against its result.

    Args:
        spec: of the norm.
        channels: ``(channels,)``, any values.
        result: what the norm returned.
    """
    count = channels.numel()
    if count == 1:
        return channels.reshape(())
    if spec.axis == "channels":
        return channels.reshape(count, *(1,) * (result.dim() - 2))
    if spec.heads > 1 and spec.joins == 1 and result.shape[-1] != count:
        return channels.reshape(spec.heads, -1)
    return channels
