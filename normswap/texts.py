"""Text as rows of token ids: the built-in prompts or a file, through the checkpoint's tokenizer."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from normswap.errors import ModelError, UsageError
from normswap.settings import embedding_size

__all__ = ["SHORTEST", "encode", "known", "passages_of", "share"]

# Shorter sequences say too little of a model to be worth more of them.
SHORTEST = 16


def share(tokens: int, sequences: int) -> tuple[int, int]:
    """Share tokens out over sequences, fewer of them where they would be too short.

    Args:
        tokens: in all.
        sequences: how many are wanted.

    Returns:
        How many sequences, and the tokens of each.

    Raises:
        UsageError: the tokens are too few for one sequence.
    """
    if tokens < SHORTEST:
        raise UsageError(
            f"--tokens {tokens}: expected at least {SHORTEST}, for one sequence; {SHORTEST * 8} give eight"
        )
    count = min(sequences, tokens // SHORTEST)
    return count, tokens // count


def passages_of(text: Path | None) -> list[str]:
    """Read a file, or the built-in prompts.

    Args:
        text: the file, as one passage; None for the prompts, one a passage.

    Raises:
        UsageError: the file is empty, unreadable or not UTF-8.
    """
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


def encode(
    tokenizer: Any, passages: list[str], sequences: int, length: int, *, whole: bool
) -> tuple[list[list[int]], int]:
    """Make rows of at most ``length`` tokens, each with the tokenizer's own special tokens around it.

    Args:
        tokenizer: the checkpoint's.
        passages: what `passages_of` read.
        sequences: how many rows to make.
        length: of a row.
        whole: whether the passages are one text, cut into rows from its beginning. Else each row begins with another
            passage and goes on through the others, over and over in a new order each time, until it is full.

    Returns:
        The rows, and how many tokens the passages have in all.

    Raises:
        ModelError: the tokenizer fails.
    """
    plain = [_ids(tokenizer, passage, special=False) for passage in passages]
    before, after = _frame(tokenizer)
    room = max(1, length - len(before) - len(after))
    bodies: list[list[int]] = []
    if whole:
        ids = plain[0]
        room = max(min(room, len(ids) // sequences), min(SHORTEST, room))
        bodies = [ids[start : start + room] for start in range(0, len(ids), room)][:sequences]
        if len(bodies) > 1 and len(bodies[-1]) < room:
            bodies.pop()
    else:
        for index in range(sequences):
            # Past the last passage, the second halves; a short passage goes on into the next.
            turn, start = divmod(index, len(plain))
            body = plain[start][(turn * len(plain[start])) // (turn + 1) :]
            order = [(start + step) % len(plain) for step in range(1, len(plain) + 1)]
            for step in _rounds(order, index):
                if len(body) >= room or not any(plain):
                    break
                body = body + plain[step]
            bodies.append(body[:room])
    return [[*before, *body, *after] for body in bodies if body], sum(map(len, plain))


def _rounds(order: list[int], seed: int) -> Iterator[int]:
    """Go through an order again and again: first as it is, then in an order that is drawn anew each time."""
    yield from order[:-1]
    shuffled, draws = list(order), random.Random(seed)
    while True:
        draws.shuffle(shuffled)
        yield from shuffled


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


def known(rows: list[list[int]], tokenizer: Any, model: nn.Module, *, insist: bool) -> list[list[int]]:
    """Refuse ids beyond the embedding; drop text of which the tokenizer knows less than half.

    Args:
        rows: token ids.
        tokenizer: that made them.
        model: that is to read them.
        insist: whether to keep text that the tokenizer does not know.

    Raises:
        ModelError: an id lies beyond the model's embedding.
    """
    if not rows:
        return rows
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
