"""What a verification finds beside its gates: what changed on disk, where it shows, and what would have been seen."""

from __future__ import annotations

from dataclasses import dataclass, field

__all__ = [
    "Divergence",
    "Fault",
    "Generation",
    "LayerFigures",
    "PairFigures",
    "Power",
    "SettingChange",
    "TensorChange",
    "TensorFigures",
]


@dataclass(frozen=True)
class TensorChange:
    """One stored tensor that is not the original's.

    Attributes:
        name: on disk; of the original where it is missing, else of the checkpoint under test.
        kind: ``"missing"``, ``"extra"``, ``"shape"``, ``"dtype"`` (the original's values, rounded once to another
            dtype), ``"folded"`` (what folding gains gives), ``"tied"`` (stored where the original ties it, or the other
            way round), ``"zeros"`` (zeros of the other sign, and nothing else), ``"nonfinite"`` (NaN or infinities that
            the original lacks) or ``"changed"``.
        explained: whether the change leaves the function as it was but for rounding.
        detail: in words: dtypes, shapes, the norms of a fold, the largest difference, where it is.
        file: that holds it; None where it is missing.
        error: relative RMS distance from the original's values, or from what explains the change; None where there is
            nothing to compare with.
    """

    name: str
    kind: str
    explained: bool
    detail: str
    file: str | None = None
    error: float | None = None


@dataclass(frozen=True)
class SettingChange:
    """One entry of ``config.json`` that differs and bears on what is computed.

    Attributes:
        name: dotted path, such as ``text_config.rms_norm_eps``.
        original: value in the original; None where it has none.
        converted: value in the checkpoint under test.
    """

    name: str
    original: object
    converted: object


@dataclass(frozen=True)
class TensorFigures:
    """Two checkpoints compared tensor by tensor.

    Attributes:
        summary: one line, such as ``"60 gains folded into 150 linears"``, ``"identical"``, ``"cast to bf16"`` or
            ``"unknown change in 3 tensors"``.
        kind: ``"identical"``, ``"folded"``, ``"cast"``, ``"zeros"`` (equal but for the sign of zeros), ``"rearranged"``
            (same tensors, other files or format) or ``"unknown"``; several joined by ``+``.
        tensors: how many the original has.
        same: how many of them are bit for bit the same.
        changes: all that are not, in the order of the original's files.
        settings: how the configurations differ.
        files: how the weight files differ, in words; None where they hold the same tensors under the same names.
        altered: files whose hashes are not those that the manifest records; empty without a manifest.
    """

    summary: str
    kind: str
    tensors: int
    same: int
    changes: list[TensorChange] = field(default_factory=list)
    settings: list[SettingChange] = field(default_factory=list)
    files: str | None = None
    altered: list[str] = field(default_factory=list)

    @property
    def unexplained(self) -> list[TensorChange]:
        """The changes that may change the function."""
        return [change for change in self.changes if not change.explained]


@dataclass(frozen=True)
class PairFigures:
    """One folded norm and the weights that read it: ``W(g*x + b)`` against ``W'x + b'``, from the stored tensors.

    Attributes:
        norm: whose gain was folded.
        consumers: names of the weights in the model's class.
        error: relative RMS distance of the two on random rows, in float64, of the stored (rounded) weights.
        bound: what rounding once to the stored dtype explains.
        passed: whether it is kept, by each channel alone as well, and every stored tensor of the fold is as it should
            be.
        channel: the channel that is furthest off in one of the weights.
        channel_error: relative RMS distance of what that weight makes of this channel alone.
        channel_bound: what another tool's order of multiplying and rounding explains: half a unit for the rounding and
            one unit more.
    """

    norm: str
    consumers: list[str]
    error: float
    bound: float
    passed: bool
    channel: int | None = None
    channel_error: float | None = None
    channel_bound: float | None = None


@dataclass(frozen=True)
class LayerFigures:
    """The residual stream after one layer, over all sequences.

    Distances are taken row by row, relative to the row's own size, and their root mean square is the figure: the norms
    that read the stream bring every row to one size.

    Attributes:
        name: of the layer's module, such as ``model.layers.3``.
        stack: the list that it is of, such as ``model.layers``.
        index: its place there.
        error_exact: distance of the two models, both in float32; None where that was not run.
        error_original: distance from the reference, of the original as served; None without a reference.
        error_converted: the same of the converted model.
        ratio: the last over the one before.
        ratio_interval: its 95% bootstrap interval over sequences.
        departs: whether it passes the bounds of the gate ``exact`` or of the gate ``served``, or has half the error in
            float32 of the next one that does.
        folded: name of the folded norm whose result the layer returns. That differs from the original's, and rightly,
            since the gain is where it is read; so the converted model's is not compared. None for other layers.
    """

    name: str
    stack: str
    index: int
    error_exact: float | None = None
    error_original: float | None = None
    error_converted: float | None = None
    ratio: float | None = None
    ratio_interval: tuple[float, float] | None = None
    departs: bool = False
    folded: str | None = None


@dataclass(frozen=True)
class Fault:
    """A fault put into this model on purpose.

    Attributes:
        kind: ``"gain dropped"``, ``"eps x 10"``, ``"1+w flipped"``, ``"cast order swapped"`` or ``"gain scaled"``.
        norm: where; None where no norm can have this fault.
        gate: the first gate that saw it; None where none did.
        figure: what that gate measured; of the gate that came nearest where none did.
        bound: what it may be.
        detected: whether a gate saw it; None where no norm can have it, or it was not tried.
        detail: in words, such as why it cannot be had.
    """

    kind: str
    norm: str | None
    gate: str | None
    figure: float | None
    bound: float | None
    detected: bool | None
    detail: str = ""


@dataclass(frozen=True)
class Power:
    """What the gates would have seen.

    Attributes:
        faults: those that were put in.
        smallest: relative change of every other channel of one gain that the gate ``exact`` would just have seen, by
            proportion from the one that was measured; None where none was.
        norm: of which norm.
    """

    faults: list[Fault] = field(default_factory=list)
    smallest: float | None = None
    norm: str | None = None


@dataclass(frozen=True)
class Divergence:
    """Where two greedy continuations of one prompt part.

    Attributes:
        prompt: number of the prompt, from 0.
        position: new tokens that are the same before.
        original: the original's next token id.
        converted: the converted model's.
        words: both as text; None without a tokenizer.
        margin: logit of the original's token minus that of the other in the reference, on the common beginning.
        resolution: what the served arithmetic cannot tell apart there.
        tie: whether the margin is within the resolution, so that the parting is no fault.
    """

    prompt: int
    position: int
    original: int
    converted: int
    words: tuple[str, str] | None
    margin: float
    resolution: float
    tie: bool


@dataclass(frozen=True)
class Generation:
    """Greedy continuations compared.

    Attributes:
        tokens: new tokens a prompt.
        prompts: how many prompts.
        same: how many have the same continuation.
        divergences: the others.
    """

    tokens: int
    prompts: int
    same: int
    divergences: list[Divergence] = field(default_factory=list)
