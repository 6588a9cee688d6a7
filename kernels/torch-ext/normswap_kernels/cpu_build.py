"""Build the compiled CPU path once for a user and a machine, and keep it.

The library is kept in ``$NORMSWAP_CACHE``, else ``$XDG_CACHE_HOME/normswap``, else ``~/.cache/normswap``, under a
name made of what it was built from, by and for. A file ends with its own digest, so that a damaged one is built anew.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

SOURCES = ("cpu_kernels.cpp", "cpu_vectors.h")

FUNCTIONS = ("normswap_forward", "normswap_backward")

# No -ffast-math and no contraction: a product and a sum round once each, as in torch.
FLAGS = (
    *("-std=c++17", "-O3", "-march=native", "-ffp-contract=off", "-fno-exceptions", "-fno-rtti"),
    *("-fvisibility=hidden", "-fPIC", "-shared"),
)

COMPILERS = ("c++", "g++", "clang++")

_SECONDS = 120
_DIGEST = hashlib.sha256().digest_size


class BuildError(RuntimeError):
    """The library could not be built or loaded; the message says why."""


def find_compiler() -> list[str] | None:
    """Return the command of a C++ compiler: ``$CXX``, else the first of `COMPILERS` on the path; None without one.

    Raises:
        BuildError: ``$CXX`` is no command.
    """
    for command in (os.environ.get("CXX", ""), *COMPILERS):
        try:
            words = shlex.split(command)
        except ValueError as error:
            raise BuildError(f"CXX is no command, {command!r}: {error}") from error
        if words and (found := shutil.which(words[0])):
            return [found, *words[1:]]
    return None


def cache_folder() -> Path | None:
    """Return the folder that libraries are kept in; None where the user has no home."""
    try:
        if chosen := os.environ.get("NORMSWAP_CACHE"):
            return Path(chosen).expanduser() / "cpu"
        if base := os.environ.get("XDG_CACHE_HOME"):
            return Path(base) / "normswap" / "cpu"
        return Path.home() / ".cache" / "normswap" / "cpu"
    except RuntimeError:
        return None


def open_library(compiler: list[str]) -> tuple[ctypes.CDLL, str]:
    """Load the library, building it where it is not kept yet.

    Args:
        compiler: from `find_compiler`.

    Returns:
        The library; and why it could not be kept, or an empty string.

    Raises:
        BuildError: the compiler failed, or what it built cannot be loaded.
    """
    path, reason = _place(f"norms-{_key(compiler)}.so")
    if (kept := _load_kept(path)) is not None:
        return kept, ""
    # What is mapped stays when its file is gone, so the private folder may go.
    with _locked(path), tempfile.TemporaryDirectory(prefix="normswap-") as private:
        # Another process may have built it meanwhile.
        if (kept := _load_kept(path)) is not None:
            return kept, ""
        built = Path(private) / "norms.so"
        _compile(compiler, built)
        if path is not None:
            try:
                _keep(built, path)
                return _load(path), ""
            except (OSError, BuildError) as error:
                reason = str(error)
        return _load(built), reason


def _place(name: str) -> tuple[Path | None, str]:
    """Return where the library is kept; or None, and why it cannot be."""
    folder = cache_folder()
    if folder is None:
        return None, "the user has no home folder"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        return None, str(error)
    # A file in a folder that others can write to could be another's code.
    if status.st_uid != os.geteuid() or status.st_mode & 0o022:
        return None, f"{folder} is not this user's alone"
    return folder / name, ""


def _keep(built: Path, path: Path) -> None:
    """Copy a library and its digest to where it is kept, whole or not at all."""
    content = built.read_bytes()
    handle, name = tempfile.mkstemp(prefix=".norms-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content + hashlib.sha256(content).digest())
            file.flush()
            os.fsync(file.fileno())
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _compile(compiler: list[str], path: Path) -> None:
    source = str(Path(__file__).parent / SOURCES[0])
    command = [*compiler, *FLAGS, source, "-o", str(path)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", check=False, timeout=_SECONDS, cwd=path.parent
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{shlex.join(command[:1])} could not be run: {error}") from error
    if done.returncode or not path.is_file():
        said = (done.stderr or done.stdout).strip().splitlines()[:5]
        raise BuildError(f"{shlex.join(command)} failed with exit code {done.returncode}: {' / '.join(said)}")


def _load(path: Path) -> ctypes.CDLL:
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise BuildError(f"what the compiler built cannot be loaded: {error}") from error
    try:
        for name in FUNCTIONS:
            function = getattr(loaded, name)
            function.argtypes, function.restype = [ctypes.c_char_p], None
    except AttributeError as error:
        # Else whatever is put in its place could not be loaded by this process.
        ctypes.CDLL(None).dlclose(ctypes.c_void_p(loaded._handle))
        raise BuildError(f"what the compiler built cannot be loaded: {error}") from error
    return loaded


def _load_kept(path: Path | None) -> ctypes.CDLL | None:
    """Load what is kept; None where that is nothing, or damaged, or does not load here."""
    if path is None or not _is_whole(path):
        return None
    try:
        return _load(path)
    except BuildError:
        return None


def _is_whole(path: Path) -> bool:
    try:
        content = path.read_bytes()
    except OSError:
        return False
    return hashlib.sha256(content[:-_DIGEST]).digest() == content[-_DIGEST:]


@contextlib.contextmanager
def _locked(path: Path | None) -> Iterator[None]:
    """Let one process build while others wait; where no lock can be had, all build."""
    with contextlib.ExitStack() as stack:
        if path is not None:
            with contextlib.suppress(OSError):
                file = stack.enter_context(path.with_suffix(".lock").open("a"))
                fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _key(compiler: list[str]) -> str:
    """Name what the library depends on; asking the compiler itself would take longer than loading."""
    digest = hashlib.sha256()
    for source in SOURCES:
        digest.update((Path(__file__).parent / source).read_bytes())
    status = Path(compiler[0]).stat()
    identity = (FLAGS, compiler, os.path.realpath(compiler[0]), status.st_size, status.st_mtime_ns, platform.machine())
    digest.update(repr((identity, _processor())).encode())
    return digest.hexdigest()[:32]


def _processor() -> str:
    """Describe the first processor: its model and what it can do."""
    try:
        with Path("/proc/cpuinfo").open(encoding="ascii", errors="replace") as file:
            first = file.read(8192).split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor()
    # Clock and the like change from one reading to the next.
    lasting = ("vendor", "cpu family", "model", "stepping", "flags", "Features", "CPU ")
    return "\n".join(line for line in first if line.startswith(lasting))
