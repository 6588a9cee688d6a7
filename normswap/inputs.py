"""What to run a model on: text through its tokenizer, or seeded ids, images and sounds of the right shape."""

from __future__ import annotations

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from normswap import candidates
from normswap.errors import ModelError, UsageError
from normswap.padding import pad, pad_token, shortened
from normswap.processors import Processor, processed
from normswap.running import Output, device_of, dtype_of, output_of, run
from normswap.stacking import Group, positional, split, stack
from normswap.texts import SHORTEST, encode, known, passages_of, share

__all__ = ["Group", "Inputs", "Output", "make_inputs", "output_of", "run", "split"]

# Bytes of float32 outputs that one forward of several sequences may give.
_LARGEST_OUTPUT = 256 << 20
# Sequences that are made where each has to be short.
_MOST = 512


@dataclass(frozen=True)
class Inputs:
    """What a model is run on.

    Attributes:
        description: one line for the report.
        batches: keyword arguments of one forward each, an independent sequence (batch 1), on the CPU. Floating
            tensors are cast to the model's dtype when run.
        kind: ``"text"``, ``"ids"``, ``"image"``, ``"audio"``, or several joined by ``+``.
        length: tokens of a sequence; for images and sounds, what the model's first input is long.
        positional: names of the outputs whose second dimension is the positions; None where sequences are not to run
            as rows of one forward.
        numbers: how many numbers the outputs of one sequence have.
        padded: forwards of several sequences of unequal length; empty where each runs as it is.
    """

    description: str
    batches: list[dict[str, Any]]
    kind: str = "ids"
    length: int = 0
    positional: frozenset[str] | None = None
    numbers: int = 0
    padded: list[Group] = field(default_factory=list)

    @property
    def sequences(self) -> int:
        """How many independent sequences there are."""
        return len(self.batches)

    def groups(self, limit_bytes: int = _LARGEST_OUTPUT) -> list[Group]:
        """Return the forwards to run: those that are padded, else as many sequences of equal shapes in one as may be.

        Args:
            limit_bytes: of the outputs of one forward in float32.

        Returns:
            Groups in the order of the sequences; of one sequence each where sequences cannot be stacked. `split` cuts
            their outputs.
        """
        if self.padded:
            return self.padded
        if self.positional is None:
            return [Group(batch, [index]) for index, batch in enumerate(self.batches)]
        most = max(1, limit_bytes // max(1, 4 * self.numbers))
        found = []
        for members in _alike(self.batches):
            size = math.ceil(len(members) / math.ceil(len(members) / most))
            for start in range(0, len(members), size):
                part = members[start : start + size]
                found.append(Group(stack([self.batches[index] for index in part]), part, None, self.positional))
        return found

    def some(self, count: int) -> list[Group]:
        """Return forwards of the first sequences: at least so many, where there are."""
        groups = self.groups()
        first = groups[0]
        if self.positional is not None and not self.padded and len(first.members) > count:
            members = first.members[:count]
            return [Group(stack([self.batches[index] for index in members]), members, None, self.positional)]
        found: list[Group] = []
        while groups and sum(len(group.members) for group in found) < count:
            found.append(groups.pop(0))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Return what the report says of the inputs."""
        return {
            "kind": self.kind,
            "sequences": self.sequences,
            "length": self.length,
            "description": self.description,
        }


def make_inputs(
    model: nn.Module,
    config: Any,
    tokenizer: Any = None,
    *,
    text: Path | None = None,
    sequences: int = 8,
    length: int = 256,
    seed: int = 0,
    stacked: bool = False,
    tokens: int | None = None,
    batch: int = 1,
    processor: Processor | None = None,
) -> Inputs:
    """Find inputs that the model runs on, by trying.

    Args:
        model: any transformers model, with real weights on a real device.
        config: its configuration.
        tokenizer: the checkpoint's, or None.
        text: a UTF-8 file to take the text from, instead of the built-in prompts.
        sequences: how many independent sequences to make, at most.
        length: tokens of a sequence; less where the model's positions or the text end before.
        seed: of everything that is drawn.
        stacked: whether to find out, by one more short forward, if sequences may run as rows of one forward.
        tokens: of all sequences together, in place of `length`; where they are fewer than 16 a sequence, there are
            fewer sequences, and where they are more than the model has positions for, there are more. Images and sounds
            have the length that the model gives them.
        batch: sequences of one forward. Where there are several, their lengths are unequal, from half of the length up,
            and every other batch is padded on the left, the rest on the right; there are at least two batches.
        processor: the checkpoint's; images and sounds go through it where it makes what the model runs on, else they
            are made from the configuration alone.

    Returns:
        Inputs on which one forward has succeeded.

    Raises:
        UsageError: the text file is empty, unreadable or not UTF-8, or the model reads no text; the tokens are too
            few; the model takes no padded batches.
        ModelError: nothing that was tried runs, or the tokenizer's ids lie beyond the embedding.
    """
    if tokens is not None:
        sequences, length = share(tokens, sequences)
    names = list(inspect.signature(model.forward).parameters)
    tokenizer = tokenizer or (processor.tokenizer if processor is not None else None)
    if batch < 1:
        raise UsageError(f"--batch {batch}: expected at least one sequence")
    if batch > 1:
        _check_padding(model, names, batch)
        if (tokens is not None and tokens < 2 * batch * SHORTEST) or batch > _MOST:
            raise UsageError(
                f"--batch {batch}: expected at most {_MOST} sequences, and {SHORTEST} tokens for each of two batches "
                f"(--tokens {2 * batch * SHORTEST} or more)"
            )
        sequences = max(sequences, 2 * batch)
    if text is not None and tokenizer is None:
        raise UsageError(f"--text {text}: the checkpoint has no tokenizer to read it with; leave --text out")
    if text is not None and "input_ids" not in names:
        raise UsageError(f"--text {text}: {type(model).__name__} reads no text; leave --text out")
    rows: list[list[int]] = []
    about = _About(text, length if tokens is not None else None, processor)
    if tokenizer is not None and "input_ids" in names:
        rows, about.total = encode(tokenizer, passages_of(text), sequences, length, whole=text is not None)
        if text is not None and not rows:
            raise UsageError(f"--text {text}: expected text, got a file without any token")
        rows = known(rows, tokenizer, model, insist=text is not None)
    errors: list[str] = []
    proposed = candidates.propose(model, config, names, rows, sequences, length, seed)
    if processor is not None:
        proposed = itertools.chain(processed(processor, model, config, rows, sequences, seed), proposed)
    for candidate in proposed:
        try:
            tensors = run(model, candidate.batches[0], dtype_of(model), device_of(model)).tensors
        except ModelError as error:
            errors.append(str(error))
            if candidate.by and processor is not None:
                processor.fault = processor.fault or str(error)
            continue
        short = tokens is not None and text is None and candidate.kind in ("text", "ids") and candidate.length < length
        if short and (more := math.ceil(min(tokens or 0, _MOST * candidate.length) / candidate.length)) > sequences:
            # The model's positions end before: more sequences in the place of longer ones.
            return make_inputs(
                model, config, tokenizer, sequences=more, length=candidate.length, seed=seed, stacked=stacked,
                batch=batch, processor=processor,
            )  # fmt: skip
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        together = candidate.kind in ("text", "ids") and (stacked or batch > 1)
        inputs = Inputs(
            about.describe(candidate),
            candidate.batches,
            candidate.kind,
            candidate.length,
            positional(model, candidate.batches, shapes) if together else None,
            sum(tensor.numel() for tensor in tensors.values()),
        )
        return inputs if batch == 1 else _padded(model, config, tokenizer, inputs, batch)
    required = [
        name
        for name, parameter in inspect.signature(model.forward).parameters.items()
        if parameter.default is parameter.empty and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ]
    raise ModelError(
        f"found no inputs that {type(model).__name__} runs on (forward takes {', '.join(names)}; required: "
        f"{', '.join(required) or 'none'}); tried {len(errors)}, the first said: "
        f"{errors[0] if errors else 'nothing to try'}"
    )


def _check_padding(model: nn.Module, names: list[str], batch: int) -> None:
    for name in ("input_ids", "attention_mask"):
        if name not in names:
            raise UsageError(
                f"--batch {batch}: expected a model whose forward takes {name}, as padded text does, got "
                f"{type(model).__name__}; leave --batch out"
            )


def _padded(model: nn.Module, config: Any, tokenizer: Any, inputs: Inputs, batch: int) -> Inputs:
    """Return the inputs in padded batches, on which one forward of each side has succeeded."""
    lead = f"--batch {batch}: {type(model).__name__}"
    if inputs.kind not in ("text", "ids"):
        raise UsageError(f"{lead}: expected inputs of text alone, got {inputs.kind}; leave --batch out")
    if inputs.positional is None:
        raise UsageError(f"{lead}: its outputs for several sequences cannot be told apart; leave --batch out")
    singles = shortened(inputs.batches, batch)
    token = pad_token(model, config, tokenizer)
    groups = pad(model, config, singles, batch, token, inputs.positional)
    for group in groups[:2]:
        try:
            split(run(model, group.batch, dtype_of(model), device_of(model)), group)
        except ModelError as error:
            raise UsageError(f"{lead}: it does not run on padded batches: {error}; leave --batch out") from error
    lengths = [one["input_ids"].shape[1] for one in singles]
    description = (
        inputs.description.replace(f"of {inputs.length} ", f"of {min(lengths)} to {max(lengths)} ", 1)
        + f", in {len(groups)} batches of {batch}, padded on the left and on the right in turn"
    )
    return replace(inputs, description=description, batches=singles, padded=groups)


@dataclass
class _About:
    """What is to be said of the inputs."""

    text: Path | None
    asked: int | None
    processor: Processor | None
    total: int = 0

    def describe(self, candidate: candidates.Candidate) -> str:
        by, fault = candidate.by, self.processor.fault if self.processor is not None else ""
        if by:
            # How long they are is for the processor to say.
            self.asked = None
            return f"{self.plainly(candidate)}, through the checkpoint's {by}"
        if fault and self.processor is not None:
            return f"{self.plainly(candidate)}; the checkpoint's {self.processor.name} is not used: {fault}"
        return self.plainly(candidate)

    def plainly(self, candidate: candidates.Candidate) -> str:
        """Say how many there are of what."""
        count, kind = len(candidate.batches), candidate.kind
        noun = "sequence" if count == 1 else "sequences"
        word = next((word for word in ("text", "ids") if kind.startswith(word)), None)
        if word is None:
            return f"{count} seeded {kind} inputs of shape {candidate.shape}"
        rest = kind.removeprefix(word).replace("+", " with seeded ")
        if word == "ids":
            return f"{count} {noun} of {candidate.length} seeded token ids{rest}{self.cut(candidate.length)}"
        source = f"of {self.text.name}" if self.text is not None else "of the built-in prompts"
        if self.text is None and candidate.length > self.total:
            source += f", which are {self.total} tokens and are gone through again in another order"
        return f"{count} {noun} of {candidate.length} tokens {source}{rest}{self.cut(candidate.length)}"

    def cut(self, length: int) -> str:
        """Say that sequences are shorter than was asked for, and why."""
        if self.asked is None or length >= self.asked:
            return ""
        ends = "the model's positions or the text end" if self.text is not None else "the model's positions end"
        return f" ({self.asked} were asked for; {ends} before)"


def _alike(batches: list[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield runs of batches whose tensors have equal shapes."""
    members: list[int] = []
    for index, batch in enumerate(batches):
        if members and _shapes(batch) != _shapes(batches[members[0]]):
            yield members
            members = []
        members.append(index)
    yield members


def _shapes(batch: dict[str, Any]) -> dict[str, Any]:
    return {name: getattr(value, "shape", value) for name, value in batch.items()}
