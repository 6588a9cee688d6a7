"""What normswap raises. Each message says what was expected, what came, and what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from normswap.parity import ParityReport

__all__ = [
    "BackendError",
    "CheckpointError",
    "ModelError",
    "NormswapError",
    "NothingToPatchError",
    "OutputError",
    "ParityError",
    "RangeLost",
    "UsageError",
]


class NormswapError(Exception):
    """Base of all errors that normswap raises on purpose.

    Attributes:
        exit_code: what the command line exits with when this error ends it.
    """

    exit_code = 2


class UsageError(NormswapError):
    """An argument has a value that normswap cannot use."""


class CheckpointError(NormswapError):
    """The source checkpoint is missing, incomplete, damaged or unsafe to read."""


class ModelError(NormswapError):
    """The checkpoint's model cannot be built, loaded or run here."""


class OutputError(NormswapError):
    """The output folder cannot be written, or must not be."""


class BackendError(NormswapError):
    """The backend that was asked for cannot run here."""


class NothingToPatchError(NormswapError):
    """No norm of the model could be (or was selected to be) swapped.

    Attributes:
        reasons: norm to the reason why its gain cannot be folded, where that was asked for; else empty.
    """

    def __init__(self, message: str = "", reasons: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.reasons = dict(reasons or {})


class RangeLost(NormswapError):
    """A stored tensor cannot be changed as asked: its new values leave the range of the dtype that it is stored in.

    Attributes:
        key: the tensor.
        what: which values, and the dtype.
    """

    def __init__(self, key: str, what: str) -> None:
        super().__init__(f"{key} cannot be changed within its stored dtype: {what}; leave the norm that it reads")
        self.key = key
        self.what = what


class ParityError(NormswapError):
    """The converted model does not compute what the original computes; nothing was saved or changed.

    Attributes:
        report: the measurements behind the verdict, or None when a single norm failed on the spot.
    """

    exit_code = 1

    def __init__(self, message: str, report: ParityReport | None = None) -> None:
        super().__init__(message)
        self.report = report
