"""Text as rows of token ids: the built-in prompts or a file, through the checkpoint's tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from normswap.errors import ModelError, UsageError
from normswap.settings import embedding_size

__all__ = ["encode", "known", "passages_of"]

# Shorter sequences say too little of a model to be worth more of them.
_SHORTEST = 16


def passages_of(text: Path | None) -> list[str]:
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


def encode(tokenizer: Any, passages: list[str], sequences: int, length: int, *, whole: bool) -> list[list[int]]:
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


def known(rows: list[list[int]], tokenizer: Any, model: nn.Module, *, insist: bool) -> list[list[int]]:
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
