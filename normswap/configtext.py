"""Change values in the text of a JSON file and leave every other character as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from normswap.errors import CheckpointError

__all__ = ["set_in_json"]

_SPACE = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


def set_in_json(text: str, path: Sequence[str], key: str, value: bool) -> str:
    """Set a key of an object inside a JSON text; where the key is not there, it is put in first.

    Args:
        text: a JSON object.
        path: keys that lead from the outermost object to the one to be changed.
        key: name of the value.
        value: what it becomes.

    Returns:
        The text, the same but for this value.

    Raises:
        CheckpointError: the text is no JSON, or no object is at the path.

    Example:
        >>> set_in_json('{"a": 1e-5, "b": {"tied": true}}', ["b"], "tied", False)
        '{"a": 1e-5, "b": {"tied": false}}'
    """
    written = json.dumps(value)
    try:
        start = _after_space(text, 0)
        for step in path:
            members = _members(text, start)
            if step not in members:
                raise CheckpointError(f"expected an object {'.'.join(path)} in config.json, there is no {step}")
            start = members[step][0]
        members = _members(text, start)
    except (ValueError, IndexError, RecursionError) as error:
        raise CheckpointError(
            f"expected a JSON object in config.json{''.join(f', under {step}' for step in path)}, got something else"
        ) from error
    if key in members:
        begin, end = members[key]
        return text[:begin] + written + text[end:]
    space = _SPACE.match(text, start + 1)
    assert space is not None
    between = space.group() if members else ""
    return f"{text[: start + 1]}{between}{json.dumps(key)}: {written}{',' if members else ''}{text[start + 1 :]}"


def _members(text: str, start: int) -> dict[str, tuple[int, int]]:
    """Return where the value of each key of an object begins and ends; of a key that stands twice, the last."""
    if text[start] != "{":
        raise ValueError("no object")
    found: dict[str, tuple[int, int]] = {}
    at = _after_space(text, start + 1)
    while text[at] != "}":
        if text[at] == ",":
            at = _after_space(text, at + 1)
        if text[at] != '"':
            raise ValueError("no key")
        key, at = _DECODER.raw_decode(text, at)
        at = _after_space(text, at)
        if text[at] != ":":
            raise ValueError("no value")
        begin = _after_space(text, at + 1)
        _, end = _DECODER.raw_decode(text, begin)
        found[key] = begin, end
        at = _after_space(text, end)
    return found


def _after_space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None
    return found.end()
