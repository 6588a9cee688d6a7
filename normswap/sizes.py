"""Read sizes of memory as people write them."""

from __future__ import annotations

import re

from normswap.errors import UsageError

__all__ = ["parse_size"]

_UNITS = {"": 1} | {
    name + end: base**power
    for power, name in enumerate("KMGT", 1)
    for base, end in ((1000, "B"), (1024, "iB"), (1000, ""))
}
_UNITS["B"] = 1
_KNOWN = {unit.lower(): size for unit, size in _UNITS.items()}


def parse_size(text: str) -> int:
    """Return the bytes that a text such as ``512MB`` or ``1.5 GiB`` names.

    ``KB``, ``MB``, ``GB`` and ``TB`` are powers of 1000, with or without the ``B``; ``KiB`` and so on powers of 1024;
    a number alone is bytes. Small letters do as well.

    Raises:
        UsageError: it names no size of at least one byte.

    Example:
        >>> parse_size("1.5GiB")
        1610612736
    """
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text, re.IGNORECASE | re.ASCII)
    unit = None if found is None else _KNOWN.get(found[2].lower())
    if found is None or unit is None or (size := int(float(found[1]) * unit)) < 1:
        raise UsageError(f"expected a size such as 512MB or 2GiB, got {text!r}")
    return size
