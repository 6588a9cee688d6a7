"""Measure whether a converted model computes what the original computes, and give a verdict."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from typing import Any

import torch
from torch import nn

from normswap.controls import Dropped
from normswap.figures import Criterion, NormFigures, ParityReport
from normswap.inputs import Inputs
from normswap.meter import NormUnderTest
from normswap.session import Loader, Progress, Session
from normswap.spool import Spool
from normswap.writing import Writing

__all__ = ["Criterion", "Dropped", "NormFigures", "NormUnderTest", "ParityReport", "measure"]

# Each of the outputs that wait, those of one forward, and the residual stream gets this part of the memory.
_KEEPERS = 32


def measure(
    original: Loader,
    converted: Loader,
    norms: Callable[[nn.Module], list[NormUnderTest]],
    inputs: Inputs,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    backend: str,
    criterion: Criterion | None = None,
    progress: Progress | None = None,
    exact: Loader | None = None,
    dropped: Sequence[Dropped] = (),
    folded: Collection[str] = (),
    reference: torch.dtype | None = None,
    swapped: bool = True,
    generate: int = 0,
    tokenizer: Any = None,
    budget: int | None = None,
    explained: bool = True,
) -> ParityReport:
    """Run original and converted on the same inputs and judge by three gates.

    The reference is the original's stored weights in float32 arithmetic (in float64 where the models are served in
    float32, or where that is asked for). ``exact``: both in the reference's dtype agree (in float32 where they are
    served so). ``norms``: each norm, on the activations of the served run, is within the unit bound of its own
    original. ``served``: the converted model is as near to the reference as the original is. Beside the gates the
    residual stream is compared layer by layer, and faults are put in that some gate has to see. One model is in memory
    at a time; the reference's outputs wait, in a temporary folder where they are many.

    Args:
        original: loads the original in a dtype.
        converted: loads the converted model in a dtype.
        norms: lists the norms of a converted model that are judged.
        inputs: what to run on.
        dtype: dtype that the models are served in.
        device: where they run.
        backend: which implementation of the norms runs; goes to the report.
        criterion: the bounds; the project's by default.
        progress: called with (stage, done, total) before each step.
        exact: loads the model that the gate ``exact`` runs, where that is not the converted one: with gains folded
            and not rounded.
        dropped: gains that the converted model has folded, for the control of the gate ``served``.
        folded: names of all norms that it has folded.
        reference: dtype of the reference's arithmetic, float32 or float64; by default float32, and float64 where the
            models are served in float32.
        swapped: whether the converted model has swapped norms, so that it is a failure if none is reached.
        generate: how many tokens both write greedily after each prompt; 0 for none.
        tokenizer: that tells the words of these; None for the ids alone.
        budget: bytes of memory to get along with, where that matters: less is kept in memory then.
        explained: whether the stored weights are known to be those of ``exact``, rounded: only then is what they add
            taken for rounding.

    Returns:
        The figures and the verdict.

    Raises:
        ModelError: a model does not run on the inputs.
    """
    criterion = criterion or Criterion()
    room = None if budget is None else budget // _KEEPERS
    with closing(Spool() if room is None else Spool(room=min(Spool.room, room))) as spool:
        session = Session(
            original, converted, norms, inputs, torch.device(device), criterion, spool, swapped, room=room
        )
        session.progress = progress or session.progress
        session.exact, session.dropped, session.folded, session.explained = exact, dropped, folded, explained
        session.writing = Writing(inputs, generate, tokenizer)
        return session.report(dtype, reference, backend)
