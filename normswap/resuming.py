"""An output folder that an interrupted run leaves half done, for the next run to finish."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import TracebackType

from normswap.atomic import AtomicFolder, partial_folder
from normswap.errors import NormswapError, OutputError
from normswap.journal import Journal
from normswap.temporary import claim

__all__ = ["ResumableFolder"]


class ResumableFolder(AtomicFolder):
    """Write a folder beside its place as `AtomicFolder` does, but keep what is finished when the run is interrupted.

    The folder and the record of its finished files lie in ``.OUT.normswap-partial`` beside the output. The next run
    with the same mark takes them up; one with another mark, or none, removes them. What ends a run for good (a
    damaged source, values out of range) removes them too.

    Args:
        out: the folder to be made; missing parents are made at once.
        mark: of the conversion, see `normswap.journal.fingerprint`.
        overwrite: whether an existing checkpoint may be replaced.
        source: the folder of the checkpoint that is converted.

    Attributes:
        journal: the record of the finished files, once entered.

    Raises:
        OutputError: as for `AtomicFolder`, or another run is at work on the same output.
    """

    journal: Journal

    def __init__(self, out: Path, *, mark: str, overwrite: bool = False, source: Path) -> None:
        super().__init__(out, overwrite=overwrite, source=source)
        self._mark = mark
        self._partial: Path | None = None

    def __enter__(self) -> Path:
        self._prepare()
        partial = partial_folder(self._out)
        try:
            self._out.parent.mkdir(parents=True, exist_ok=True)
            self._claim(partial)
            self._temporary = partial / "checkpoint"
            self.journal = Journal(partial / "journal", self._temporary, self._mark)
            self.journal.open()
        except BaseException as error:
            self._release()
            if isinstance(error, OSError):
                raise OutputError(f"cannot write into {partial}: {error.strerror}") from error
            raise
        self._partial = partial
        return self._temporary

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        final = isinstance(error, NormswapError) and not isinstance(error, OutputError)
        try:
            super().__exit__(kind, error, trace)
        except BaseException:
            self._leave(remove=False)
            raise
        self._leave(remove=error is None or final)

    def _claim(self, partial: Path) -> None:
        while True:
            partial.mkdir(exist_ok=True)
            try:
                self._lock = claim(partial)
            except FileNotFoundError:
                continue
            except BlockingIOError as error:
                raise OutputError(
                    f"another run is writing {self._out}; wait for it to end, or choose another name"
                ) from error
            # A run that ended in between may have removed the folder that was opened.
            if self._lock is None or _same(self._lock, partial):
                return
            self._release()

    def _before_exchange(self) -> None:
        # From here on the folder may hold the old output, which no later run may take for its own work.
        self.journal.remove()

    def _clean(self) -> None:
        """Nothing is removed before it is known how the run ended."""

    def _leave(self, *, remove: bool) -> None:
        if self._partial is not None and (remove or not self.journal.begun):
            shutil.rmtree(self._partial, ignore_errors=True)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _full(self, error: OSError) -> OutputError:
        return OutputError(
            f"cannot write {self._out}: {error.strerror}; make room and resume (finished files were kept beside it)"
        )


def _same(handle: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
