"""Keep transformers off the console, and put its errors into one line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Iterator

from transformers.utils import logging

__all__ = ["first_line", "quiet"]


def first_line(error: BaseException) -> str:
    """Return the first meaningful line of an error's text, cut to a readable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep transformers' reports, bars and warnings off the console; what matters becomes our error."""
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(sys.stderr):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
