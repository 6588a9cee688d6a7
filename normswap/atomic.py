"""An output folder that is there as a whole or not at all, whatever interrupts the run."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from types import TracebackType

from normswap.errors import CheckpointError, OutputError
from normswap.renaming import exchange, rename_new
from normswap.shards import files_to_copy
from normswap.syncing import sync, sync_tree
from normswap.temporary import claim, lock, new_name, remove_stale

__all__ = ["AtomicFolder", "check_output", "partial_folder"]

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_WEIGHTS = (".safetensors", ".bin", ".index.json")


def check_output(out: Path, source: Path, overwrite: bool) -> None:
    """Check, before any work, that an output folder may and can be written. Nothing is changed.

    Args:
        out: the folder to be made.
        source: the folder of the checkpoint that is converted into it.
        overwrite: whether an existing checkpoint may be replaced.

    Raises:
        OutputError: it exists, is (in) the source or the Hub cache or holds it, cannot be written, or the disk
            has not enough room.
    """
    try:
        _check_output(Path(out), Path(source), overwrite)
    except (OSError, ValueError) as error:
        raise OutputError(f"cannot use {out} as output: {getattr(error, 'strerror', None) or error}") from error


class AtomicFolder:
    """Write a folder under a temporary name beside its place, and move it there when it is complete.

    Entering checks the output as `check_output` does, removes what killed runs left behind, and returns the
    temporary folder. Leaving without an exception brings every file to the disk and renames the folder;
    with one, it removes the temporary folder and leaves the output as it was. With ``overwrite`` the new folder and the
    old one change places in one step where the system can do that, else the old one is kept aside until
    the new one stands.

    Args:
        out: the folder to be made; missing parents are made at the end.
        overwrite: whether an existing checkpoint may be replaced.
        source: the folder of the checkpoint that is converted.

    Raises:
        OutputError: what `check_output` refuses; the disk is full; the output appeared meanwhile.

    Example:
        >>> import tempfile
        >>> place = Path(tempfile.mkdtemp())
        >>> with AtomicFolder(place / "out", source=place / "model") as folder:
        ...     written = (folder / "config.json").write_text("{}")
        >>> sorted(file.name for file in place.rglob("*"))
        ['config.json', 'out']
    """

    def __init__(self, out: Path, *, overwrite: bool = False, source: Path) -> None:
        self._out = Path(out)
        self._overwrite = overwrite
        self._source = Path(source)
        self._temporary: Path | None = None
        self._lock: int | None = None

    def __enter__(self) -> Path:
        base = self._prepare()
        _remove_partial(self._out)
        self._temporary = base / new_name()
        try:
            self._temporary.mkdir()
            self._lock = lock(self._temporary)
        except OSError as error:
            raise OutputError(f"cannot write into {base}: {error.strerror}") from error
        except BaseException:
            self._clean()
            raise
        return self._temporary

    def _prepare(self) -> Path:
        """Check the output, clean up after killed runs, and return the nearest folder above it that exists."""
        base = _existing_ancestor(self._out)
        _restore(self._out)
        check_output(self._out, self._source, self._overwrite)
        remove_stale(base)
        # Absolute, so that a change of the working folder in between does no harm.
        self._out = self._out.parent.absolute() / self._out.name
        return base.absolute()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._commit()
            elif (full := _full_disk(error)) is not None:
                raise self._full(full) from error
        except OSError as failure:
            if failure.errno in _FULL:
                raise self._full(failure) from failure
            raise OutputError(f"cannot write {self._out}: {failure.strerror}") from failure
        finally:
            self._clean()

    def _commit(self) -> None:
        assert self._temporary is not None
        sync_tree(self._temporary)
        self._out.parent.mkdir(parents=True, exist_ok=True)
        if self._overwrite and os.path.lexists(self._out):
            # Looked at again: what stands there now need not be what stood there hours ago.
            _refuse_to_replace(self._out)
            self._before_exchange()
            if not exchange(self._temporary, self._out):
                _replace_in_two_steps(self._temporary, self._out)
        else:
            try:
                rename_new(self._temporary, self._out)
            except FileExistsError as error:
                raise OutputError(f"{self._out} appeared while this run was working; it was left as it is") from error
        sync(self._out.parent)

    def _before_exchange(self) -> None:
        """Do what has to be done before the old output takes the place of the temporary folder."""

    def _full(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write {self._out}: {error.strerror}; make room and run again (nothing was left)")

    def _clean(self) -> None:
        # After an exchange the temporary name holds the old output, which goes as well.
        if self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def partial_folder(out: Path) -> Path:
    """Return the folder beside an output in which a run that can be resumed keeps what is finished."""
    return out.with_name(f".{out.name[:200]}.normswap-partial")


def _full_disk(error: BaseException) -> OSError | None:
    """Return the error of a full disk, if that is what an error comes from."""
    for cause in (error, error.__cause__):
        if isinstance(cause, OSError) and cause.errno in _FULL:
            return cause
    return None


def _remove_partial(out: Path) -> None:
    """Remove what an interrupted run kept to be resumed; refuse to go on beside a live one."""
    with contextlib.suppress(OSError, ValueError):
        partial = partial_folder(out)
        if partial.is_symlink():
            return
        try:
            handle = claim(partial)
        except BlockingIOError as error:
            raise OutputError(f"another run is writing {out}; wait for it to end, or choose another name") from error
        shutil.rmtree(partial, ignore_errors=True)
        if handle is not None:
            os.close(handle)


def _held(folder: Path) -> int:
    try:
        return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    except (OSError, ValueError):
        return 0


def _check_output(out: Path, source: Path, overwrite: bool) -> None:
    if "\0" in str(out):
        raise OutputError(f"cannot use {str(out)!r} as output: no name may hold a NUL character")
    if out.is_symlink():
        raise OutputError(f"expected a new folder as output, {out} is a link; give the folder it points at")
    if out.exists():
        if not out.is_dir():
            raise OutputError(f"expected a new folder as output, {out} is a file; choose another name")
        _refuse_same(out, source)
        if not overwrite:
            raise OutputError(f"the output {out} exists; choose another name, or pass --overwrite to replace it")
        _refuse_to_replace(out)
    base = _existing_ancestor(out)
    _refuse_inside(out, base, source)
    if not base.is_dir():
        raise OutputError(f"cannot make {out}: {base} is a file")
    if not os.access(base, os.W_OK | os.X_OK):
        raise OutputError(f"cannot make {out}: no permission to write into {base}")
    _refuse_without_room(out, base, source)


def _refuse_same(out: Path, source: Path) -> None:
    if source.exists() and out.samefile(source):
        raise OutputError(f"the output {out} is the source itself; choose another folder")
    real = source.resolve()
    if any(parent.exists() and out.samefile(parent) for parent in real.parents):
        raise OutputError(f"the output {out} holds the source {source}; choose another folder")


def _refuse_to_replace(out: Path) -> None:
    if out.is_symlink() or not out.is_dir():
        raise OutputError(f"expected a folder at {out}, got something else; it was left as it is")
    content = {file.name for file in out.iterdir()}
    if content and not _is_checkpoint(out, content):
        raise OutputError(
            f"refusing to replace {out}: it holds no checkpoint (no normswap.json, nor the config.json of a model "
            "beside its weights)"
        )
    if ".git" in content:
        raise OutputError(f"refusing to replace {out}: it is a git repository; choose another folder")
    for precious in (Path.home(), Path.cwd()):
        if any(parent.exists() and out.samefile(parent) for parent in (precious, *precious.parents)):
            raise OutputError(f"refusing to replace {out}: {precious} is in it; choose another folder")


def _is_checkpoint(out: Path, content: set[str]) -> bool:
    if (out / "normswap.json").is_file():
        return True
    try:
        config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    describes = isinstance(config, dict) and bool(config.get("model_type") or config.get("architectures"))
    return describes and any(name.endswith(_WEIGHTS) for name in content)


def _refuse_inside(out: Path, base: Path, source: Path) -> None:
    around = [base.resolve(), *base.resolve().parents]
    if source.exists() and any(parent.samefile(source) for parent in around):
        raise OutputError(f"the output {out} lies inside the source {source}; choose another folder")
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    known = cache.exists() and any(parent.samefile(cache) for parent in around)
    if known or any((parent / "snapshots").is_dir() and (parent / "blobs").is_dir() for parent in around):
        raise OutputError(f"the output {out} lies inside the Hub cache; choose another folder")


def _refuse_without_room(out: Path, base: Path, source: Path) -> None:
    try:
        needed = sum((source / name).stat().st_size for name in files_to_copy(source))
    except (OSError, CheckpointError):
        # A source that cannot be read is for `check_source` to tell.
        return
    # What an interrupted run kept is either taken up again or removed.
    free = shutil.disk_usage(base).free + _held(partial_folder(out))
    if needed > free:
        raise OutputError(f"not enough room for {out}: {_size(needed)} needed, {_size(free)} free; choose another disk")


def _size(count: int) -> str:
    for unit, name in ((10**9, "GB"), (10**6, "MB"), (10**3, "KB")):
        if count >= unit:
            return f"{count / unit:.2f} {name}"
    return f"{count} bytes"


def _existing_ancestor(out: Path) -> Path:
    for parent in out.absolute().parents:
        if os.path.lexists(parent):
            return parent
    raise OutputError(f"cannot make {out}: no folder above it exists")


def _aside(out: Path) -> Path:
    return out.with_name(f".{out.name[:200]}.normswap-old")


def _replace_in_two_steps(new: Path, out: Path) -> None:
    aside = _aside(out)
    if aside.exists():
        shutil.rmtree(aside)
    out.rename(aside)
    try:
        new.rename(out)
    except BaseException:
        aside.rename(out)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _restore(out: Path) -> None:
    """Put back the old output of a run that was killed between the two steps of replacing it."""
    with contextlib.suppress(OSError, ValueError):
        aside = _aside(out)
        if aside.is_dir() and not os.path.lexists(out):
            aside.rename(out)
