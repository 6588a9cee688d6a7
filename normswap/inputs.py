"""What to run a model on: text through its tokenizer, or seeded ids, images and sounds of the right shape."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from normswap import candidates
from normswap.errors import ModelError, UsageError
from normswap.settings import embedding_size

__all__ = ["Inputs", "Output", "make_inputs", "output_of", "run"]

# Shorter sequences say too little of a model to be worth more of them.
_SHORTEST = 16


@dataclass(frozen=True)
class Output:
    """What a forward gave.

    Attributes:
        name: of the tensor that is compared first; see `output_of`.
        tensors: every floating tensor in the output, by name.
    """

    name: str
    tensors: dict[str, torch.Tensor]

    @property
    def main(self) -> torch.Tensor:
        """The tensor that is compared first."""
        return self.tensors[self.name]


@dataclass(frozen=True)
class Inputs:
    """What a model is run on.

    Attributes:
        description: one line for the report.
        batches: keyword arguments of one forward each, an independent sequence (batch 1), on the CPU. Floating
            tensors are cast to the model's dtype when run.
        kind: ``"text"``, ``"ids"``, ``"image"``, ``"audio"``, or several joined by ``+``.
        length: tokens of a sequence; for images and sounds, what the model's first input is long.
    """

    description: str
    batches: list[dict[str, Any]]
    kind: str = "ids"
    length: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return what the report says of the inputs."""
        return {
            "kind": self.kind,
            "sequences": len(self.batches),
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
) -> Inputs:
    """Find inputs that the model runs on, by trying.

    Args:
        model: any transformers model, with real weights on a real device.
        config: its configuration.
        tokenizer: the checkpoint's, or None.
        text: a UTF-8 file to take the text from, instead of the built-in prompts.
        sequences: how many independent sequences to make.
        length: tokens of a sequence; less where the model or the text ends before.
        seed: of everything that is drawn.

    Returns:
        Inputs on which one forward has succeeded.

    Raises:
        UsageError: the text file is empty, unreadable or not UTF-8, or the model reads no text.
        ModelError: nothing that was tried runs, or the tokenizer's ids lie beyond the embedding.
    """
    names = list(inspect.signature(model.forward).parameters)
    if text is not None and tokenizer is None:
        raise UsageError(f"--text {text}: the checkpoint has no tokenizer to read it with; leave --text out")
    if text is not None and "input_ids" not in names:
        raise UsageError(f"--text {text}: {type(model).__name__} reads no text; leave --text out")
    rows: list[list[int]] = []
    if tokenizer is not None and "input_ids" in names:
        rows = _encode(tokenizer, _passages(text), sequences, length, whole=text is not None)
        if text is not None and not rows:
            raise UsageError(f"--text {text}: expected text, got a file without any token")
        rows = _known(rows, tokenizer, model, insist=text is not None)
    errors: list[str] = []
    for candidate in candidates.propose(model, config, names, rows, sequences, length, seed):
        try:
            run(model, candidate.batches[0], _dtype(model), _device(model))
        except ModelError as error:
            errors.append(str(error))
            continue
        return Inputs(_describe(candidate, text), candidate.batches, candidate.kind, candidate.length)
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


@torch.no_grad()
def run(model: nn.Module, batch: dict[str, Any], dtype: torch.dtype, device: torch.device | str) -> Output:
    """Run one forward.

    Args:
        model: what to run.
        batch: keyword arguments; floating tensors are cast to ``dtype``.
        dtype: of the model.
        device: where the model is.

    Returns:
        What `output_of` finds in the result.

    Raises:
        ModelError: the forward raises.
    """
    device = torch.device(device)
    moved = {
        key: value.to(device, dtype if value.is_floating_point() else None) if torch.is_tensor(value) else value
        for key, value in batch.items()
    }
    # Some forwards draw numbers; both models must draw the same.
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(0)
        try:
            result = model(**moved)
        # Whatever a model's code raises on inputs that it was not made for.
        except Exception as error:
            words = (str(error).strip().splitlines() or [""])[0]
            raise ModelError(
                f"{type(model).__name__} does not run on {', '.join(batch)} in {dtype}: "
                f"{type(error).__name__}: {words[:200]}"
            ) from error
    return output_of(result)


def output_of(model_output: Any) -> Output:
    """Collect the floating tensors of an output, and choose the one that two runs are compared by first.

    Args:
        model_output: what a forward returned: a mapping, a tuple or a tensor.

    Returns:
        The tensors, and the first one's name: ``logits``, else ``last_hidden_state``, else the first floating tensor
        with at least two dimensions and more than one value.

    Raises:
        ModelError: there is none.
    """
    if isinstance(model_output, torch.Tensor):
        model_output = {"output": model_output}
    elif isinstance(model_output, (tuple, list)) and not hasattr(model_output, "keys"):
        model_output = {f"output[{index}]": value for index, value in enumerate(model_output)}
    if hasattr(model_output, "items"):
        found = dict(_tensors(model_output))
        for name in ("logits", "last_hidden_state"):
            if name in found:
                return Output(name, found)
        for name, tensor in found.items():
            if tensor.dim() >= 2 and tensor.numel() > 1:
                return Output(name, found)
    raise ModelError(f"expected a floating tensor in the model's output, got {type(model_output).__name__}")


def _tensors(output: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, value in output.items():
        if isinstance(value, torch.Tensor):
            if value.is_floating_point():
                yield name, value
        elif isinstance(value, (tuple, list)):
            for index, entry in enumerate(value):
                if isinstance(entry, torch.Tensor) and entry.is_floating_point():
                    yield f"{name}[{index}]", entry
        elif hasattr(value, "items"):
            for inner, tensor in _tensors(value):
                yield f"{name}.{inner}", tensor


def _passages(text: Path | None) -> list[str]:
    if text is None:
        raw = Path(__file__).with_name("prompts.txt").read_text(encoding="utf-8")
        return [passage.strip() for passage in raw.split("\n====\n")]
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UsageError(f"--text {text}: expected UTF-8 text, got other bytes at {error.start}") from error
    except OSError as error:
        raise UsageError(f"--text {text}: cannot be read: {error.strerror or error}") from error
    if not words.strip():
        raise UsageError(f"--text {text}: expected text, got an empty file")
    return [words]


def _encode(tokenizer: Any, passages: list[str], sequences: int, length: int, *, whole: bool) -> list[list[int]]:
    """Make rows of at most ``length`` tokens, each with the tokenizer's own special tokens around it."""
    plain = [_ids(tokenizer, passage, special=False) for passage in passages]
    before, after = _frame(tokenizer)
    room = max(1, length - len(before) - len(after))
    bodies: list[list[int]] = []
    if whole:
        ids = plain[0]
        room = max(min(room, len(ids) // sequences), min(_SHORTEST, room))
        bodies = [ids[start : start + room] for start in range(0, len(ids), room)][:sequences]
        if len(bodies) > 1 and len(bodies[-1]) < room:
            bodies.pop()
    else:
        for index in range(sequences):
            # Past the last passage, the second halves; a short passage goes on into the next.
            turn, start = divmod(index, len(plain))
            body = plain[start][(turn * len(plain[start])) // (turn + 1) :]
            for step in range(1, len(plain)):
                if len(body) >= room:
                    break
                body = body + plain[(start + step) % len(plain)]
            bodies.append(body[:room])
    return [[*before, *body, *after] for body in bodies if body]


def _ids(tokenizer: Any, text: str, *, special: bool) -> list[int]:
    try:
        return [int(i) for i in tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]]
    except Exception as error:
        raise ModelError(f"the tokenizer {type(tokenizer).__name__} fails: {type(error).__name__}: {error}") from error


def _frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer puts before and after a text."""
    bare, framed = _ids(tokenizer, "a b", special=False), _ids(tokenizer, "a b", special=True)
    for start in range(len(framed) - len(bare) + 1):
        if framed[start : start + len(bare)] == bare:
            return framed[:start], framed[start + len(bare) :]
    return [], []


def _known(rows: list[list[int]], tokenizer: Any, model: nn.Module, *, insist: bool) -> list[list[int]]:
    """Refuse ids beyond the embedding; drop text of which the tokenizer knows less than half."""
    size = embedding_size(model)
    top = max(max(row) for row in rows)
    if size is not None and top >= size:
        raise ModelError(
            f"expected token ids below {size}, the size of {type(model).__name__}'s embedding, got {top}: the "
            f"tokenizer does not belong to this checkpoint; repair it"
        )
    unknown = getattr(tokenizer, "unk_token_id", None)
    total = sum(len(row) for row in rows)
    if not insist and unknown is not None and sum(row.count(unknown) for row in rows) * 2 > total:
        return []
    return rows


def _dtype(model: nn.Module) -> torch.dtype:
    return next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)


def _device(model: nn.Module) -> torch.device:
    return next((p.device for p in model.parameters()), torch.device("cpu"))


def _describe(candidate: candidates.Candidate, text: Path | None) -> str:
    count = len(candidate.batches)
    noun = "sequence" if count == 1 else "sequences"
    if candidate.kind.startswith("text"):
        source = f"of {text.name}" if text is not None else "of the built-in prompts"
        rest = candidate.kind.removeprefix("text").replace("+", " with seeded ")
        return f"{count} {noun} of {candidate.length} tokens {source}{rest}"
    if candidate.kind.startswith("ids"):
        rest = candidate.kind.removeprefix("ids").replace("+", " with seeded ")
        return f"{count} {noun} of {candidate.length} seeded token ids{rest}"
    return f"{count} seeded {candidate.kind} inputs of shape {candidate.shape}"
