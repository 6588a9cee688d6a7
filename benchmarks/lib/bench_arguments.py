"""What the benchmarks take on their command lines; anything else is argparse's own error."""

from __future__ import annotations

import argparse
import re
from typing import NamedTuple


class Shape(NamedTuple):
    """A matrix, as ``ROWSxWIDTH``."""

    rows: int
    width: int

    def __str__(self) -> str:
        return f"{self.rows}x{self.width}"


def shape(text: str) -> Shape:
    """Read ``ROWSxWIDTH``."""
    match = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"expected ROWSxWIDTH such as 2048x4096, got {text!r}")
    return Shape(int(match[1]), int(match[2]))


def count(text: str) -> int:
    """Read a number of at least 1."""
    if not re.fullmatch(r"[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)
