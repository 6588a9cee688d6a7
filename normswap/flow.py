"""Follow the output of every norm through one forward of the real class, and find all that reads it."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from normswap.errors import ModelError
from normswap.foldplan import Consumer, Piece
from normswap.followed import EMBEDDING, Norm, Read, bias_words
from normswap.quiet import first_line, quiet
from normswap.spec import NormSpec
from normswap.tracing import Tracer

__all__ = ["Reading", "follow"]

# How many times the steps of the first arguments others may take: a loop over tokens takes more.
_SLOWER = 20


@dataclass
class Reading:
    """What reads one norm's output.

    Attributes:
        consumers: the linear maps, sorted by name.
        blockers: what stands in the way of a fold, in words: operations that are not linear in the output, and
            weights that read something else as well.
        plain: whether every consumer gets the norm's rows as they are, so that a constant in them stays a constant.
        reached: whether the forward came by the norm at all.
        looked_up: consumers that are also an embedding's table.
    """

    consumers: tuple[Consumer, ...] = ()
    blockers: list[str] = field(default_factory=list)
    plain: bool = True
    reached: bool = False
    looked_up: tuple[str, ...] = ()


def follow(
    model: nn.Module,
    norms: Mapping[str, NormSpec | None],
    batches: Iterable[Mapping[str, Any]],
    vary: Callable[[Mapping[str, Any]], Iterable[Mapping[str, Any]]] = lambda batch: (),
    watched: Collection[str] = (),
) -> dict[str, Reading]:
    """Run a forward and follow what each norm returns to everything that reads it.

    Elements that a norm returned are followed through operations that move them, multiply them by something else or
    add them to their like, until a product with a parameter (a consumer) or anything else (a blocker) reads them.

    Args:
        model: on the meta device (nothing is computed then, and every expert counts as hit) or on a real one.
        norms: the model's norms by name, with what they compute; None for one that is not understood.
        batches: keyword arguments of a forward each, on the CPU. They are tried in turn until every norm has been
            reached; what several of them show is taken together.
        vary: gives more arguments from the first that run; what they show is added, where they run in reasonable time.
        watched: names of modules whose results code beside the forward reads.

    Returns:
        A reading for each norm.

    Raises:
        ModelError: the model's code raises on all of them.
    """
    tracer = Tracer(model, norms, watched)
    errors: list[str] = []
    first: Mapping[str, Any] | None = None
    usual = 0
    for batch in batches:
        try:
            _run(tracer, batch)
            if first is None:
                first, usual = batch, tracer.steps
        except Exception as error:  # whatever a model's code raises on inputs that it was not made for
            errors.append(f"{type(error).__name__}: {first_line(error)}")
        if first is not None and all(norm.reached for norm in tracer.norms):
            break
    if first is None:
        raise ModelError(
            f"found no inputs on which the data can be followed through {type(model).__name__}; tried {len(errors)}, "
            f"the first said: {errors[0] if errors else 'nothing to try'}"
        )
    for batch in vary(first):
        with contextlib.suppress(Exception):
            _run(tracer, batch, _SLOWER * usual)
    return _readings(tracer)


def _run(tracer: Tracer, batch: Mapping[str, Any], most_steps: int | None = None) -> None:
    with quiet(), torch.no_grad(), tracer.hooked(), _without_fast_path(), _autocast_on_meta():
        tracer.run(batch, most_steps)


@contextlib.contextmanager
def _autocast_on_meta() -> Iterator[None]:
    """Let code switch autocast off where its tensors lie; torch knows no autocast for the meta device."""
    cls = torch.amp.autocast_mode.autocast
    init = cls.__init__

    def start(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        init(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    cls.__init__ = start  # type: ignore[method-assign]
    try:
        yield
    finally:
        cls.__init__ = init  # type: ignore[method-assign]


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _readings(tracer: Tracer) -> dict[str, Reading]:
    consumers: dict[Norm, list[Consumer]] = {norm: [] for norm in tracer.norms}
    looked_up: dict[Norm, list[str]] = {norm: [] for norm in tracer.norms}
    shapes = {id(parameter): tuple(parameter.shape) for parameter in tracer.model.parameters()}
    for (identity, axis), read in tracer.reads.items():
        others = dict(tracer.others.get(identity, {}))
        table = others.pop(EMBEDDING, 0) is None
        for norm, pieces in _pieces(tracer, read).items():
            consumers[norm].append(Consumer(read.name, axis, tuple(pieces), _bias_of(tracer, read)))
            if table:
                looked_up[norm].append(read.name)
            if others:
                norm.blockers[f"{read.name} also reads something else, by {next(iter(others))}"] = None
            if any(key[0] == identity and key[1] != axis for key in tracer.reads):
                norm.blockers[f"{read.name} is read along two of its dimensions"] = None
            # With values, the experts of a stack that no token hit are read by nothing, and by this alone otherwise.
            unhit = not tracer.unreal and not others and axis > 0 and len(shapes[identity]) == 3
            if sum(read.parts.values()) < math.prod(shapes[identity]) and not unhit:
                norm.blockers[f"only a part of {read.name} reads it"] = None
    return {
        name: Reading(
            tuple(sorted(consumers[norm], key=lambda consumer: (consumer.parameter, consumer.axis))),
            list(norm.blockers),
            norm.plain,
            norm.reached,
            tuple(looked_up[norm]),
        )
        for norm in tracer.norms
        for name in norm.names
    }


def _bias_of(tracer: Tracer, read: Read) -> str | None:
    """The parameter that is added to every one of the products and to nothing else."""
    only = next(iter(read.biases)) if len(read.biases) == 1 else None
    if only is None or set(tracer.others.get(only, {})) != {bias_words(read)}:
        return None
    return tracer.names[only]


def _pieces(tracer: Tracer, read: Read) -> dict[Norm, list[Piece]]:
    found: dict[Norm, list[Piece]] = {}
    codes = read.codes.tolist()
    at = 0
    while at < len(codes):
        norm = tracer.norm_of(codes[at])
        if norm is None:
            at += 1
            continue
        last = norm.first + norm.channels - 1
        stop = at + 1
        step: Literal[0, 1] = 0 if stop < len(codes) and codes[stop] == codes[at] else 1
        while stop < len(codes) and codes[stop] == codes[stop - 1] + step <= last:
            stop += 1
        found.setdefault(norm, []).append(Piece(at, stop, codes[at] - norm.first, step))
        at = stop
    return found
