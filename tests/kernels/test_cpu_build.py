"""The build of the compiled CPU path: kept, shared, and never in the way."""

from __future__ import annotations

import ctypes
import hashlib
import os
import signal
import stat
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from normswap_kernels import cpu_build

COMPILER = cpu_build.find_compiler()

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler, and finds none")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library as the compiler makes it."""
    assert COMPILER is not None
    path = tmp_path_factory.mktemp("built") / "norms.so"
    cpu_build._compile(COMPILER, path)
    return path


@pytest.fixture
def compiler(built: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], int]:
    """A compiler that is ``$CXX`` and copies what was built before, with an empty cache; returns how often it ran."""
    log, script = tmp_path / "log", tmp_path / "compiler"
    script.write_text(f'#!/bin/sh\necho ran >> "{log}"\nfor last; do :; done\nsleep 0.2\ncp "{built}" "$last"\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))
    monkeypatch.setenv("NORMSWAP_CACHE", str(tmp_path / "cache"))
    return lambda: len(log.read_text().splitlines()) if log.exists() else 0


def open_library() -> tuple[ctypes.CDLL, str]:
    found = cpu_build.find_compiler()
    assert found is not None
    return cpu_build.open_library(found)


def run(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a fresh process."""
    return start(script, **environment)()


def start(script: str, **environment: str) -> Callable[[], subprocess.CompletedProcess[str]]:
    path = os.pathsep.join(p for p in sys.path if p)
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )

    def finish() -> subprocess.CompletedProcess[str]:
        try:
            out, err = process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            # Its children too.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return finish


CALL = """
    import torch, warnings
    from normswap_kernels import cpu_library, rms_norm
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            y = rms_norm(torch.full((2, 8), 3.0), eps=0.0)
    assert torch.equal(y, torch.ones(2, 8))
    print("compiled" if cpu_library.library() else "blocks", *[w.message for w in caught])
"""


def test_a_kept_library_is_not_built_again(compiler: Callable[[], int], tmp_path: Path) -> None:
    for _ in range(2):
        library, reason = open_library()
        assert library.normswap_forward and not reason
    assert compiler() == 1
    folder = tmp_path / "cache" / "cpu"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert [file.suffix for file in sorted(folder.iterdir())] == [".lock", ".so"]


@pytest.mark.parametrize("damage", (b"", b"\0" * 100_000, None), ids=("empty", "zeros", "cut"))
def test_a_damaged_library_is_built_again(compiler: Callable[[], int], tmp_path: Path, damage: bytes | None) -> None:
    open_library()
    (kept,) = (tmp_path / "cache").rglob("*.so")
    content = kept.read_bytes()
    # A new file: what is mapped must not change.
    kept.unlink()
    kept.write_bytes(content[: len(content) // 2] if damage is None else damage)
    open_library()
    assert compiler() == 2
    assert kept.read_bytes() == content


@pytest.mark.parametrize("content", (b"no library", None), ids=("no library", "another library"))
def test_a_whole_file_that_does_not_load_is_built_again(
    compiler: Callable[[], int], tmp_path: Path, content: bytes | None
) -> None:
    assert COMPILER is not None
    # Not loaded before: the system gives what it has loaded under that name.
    found = cpu_build.find_compiler()
    assert found is not None
    kept, _ = cpu_build._place(f"norms-{cpu_build._key(found)}.so")
    assert kept is not None
    if content is None:
        (tmp_path / "other.cpp").write_text("int nothing;")
        subprocess.run([*COMPILER, "-shared", "-o", "other.so", "other.cpp"], cwd=tmp_path, check=True)
        content = (tmp_path / "other.so").read_bytes()
    kept.write_bytes(content + hashlib.sha256(content).digest())
    for _ in range(2):
        library, reason = open_library()
        assert library.normswap_forward and not reason
        assert compiler() == 1


def test_a_cache_that_nothing_can_be_loaded_from_costs_only_time(
    compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = cpu_build._load

    def mounted_without_execution(path: Path) -> ctypes.CDLL:
        if tmp_path in path.parents:
            raise cpu_build.BuildError("failed to map segment from shared object")
        return load(path)

    monkeypatch.setattr(cpu_build, "_load", mounted_without_execution)
    library, reason = open_library()
    assert library.normswap_forward and "failed to map" in reason


@pytest.mark.parametrize("change", ("flags", "compiler", "source", "processor"))
def test_another_build_has_another_name(
    compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    open_library()
    if change == "flags":
        monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-g"))
    elif change == "compiler":
        script = tmp_path / "compiler"
        script.write_text(script.read_text() + "\n")
    elif change == "source":
        monkeypatch.setattr(cpu_build, "SOURCES", cpu_build.SOURCES[:1])
    else:
        monkeypatch.setattr(cpu_build, "_processor", lambda: "another")
    open_library()
    assert compiler() == 2


def test_a_cache_that_cannot_be_made_costs_only_time(compiler: Callable[[], int], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    library, reason = open_library()
    assert library.normswap_forward
    assert "cache" in reason
    assert compiler() == 1


def test_a_full_cache_costs_only_time(
    compiler: Callable[[], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    library, reason = open_library()
    assert library.normswap_forward
    assert "No space left on device" in reason
    assert [file.suffix for file in (tmp_path / "cache" / "cpu").iterdir()] == [".lock"]


def test_code_that_another_could_have_written_is_not_loaded(compiler: Callable[[], int], tmp_path: Path) -> None:
    open_library()
    (tmp_path / "cache" / "cpu").chmod(0o777)
    library, reason = open_library()
    assert library.normswap_forward
    assert "not this user's alone" in reason
    assert compiler() == 2


def test_no_home_is_no_error(compiler: Callable[[], int], monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("NORMSWAP_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    library, reason = open_library()
    assert library.normswap_forward and "home" in reason


def test_the_cache_is_where_the_user_wants_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NORMSWAP_CACHE", "/chosen")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("HOME", "/home/user")
    assert cpu_build.cache_folder() == Path("/chosen/cpu")
    monkeypatch.setenv("NORMSWAP_CACHE", "~/chosen")
    assert cpu_build.cache_folder() == Path("/home/user/chosen/cpu")
    monkeypatch.delenv("NORMSWAP_CACHE")
    assert cpu_build.cache_folder() == Path("/xdg/normswap/cpu")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cpu_build.cache_folder() == Path("/home/user/.cache/normswap/cpu")


def test_processes_that_start_at_once_build_once(compiler: Callable[[], int]) -> None:
    processes = [start(CALL) for _ in range(2)]
    for finish in processes:
        done = finish()
        assert (done.returncode, done.stdout.strip()) == (0, "compiled"), done.stderr
    assert compiler() == 1


def test_a_compiler_that_fails_is_told_of_once(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text("#!/bin/sh\necho some reason >&2\nexit 3\n")
    script.chmod(0o700)
    done = run(CALL, CXX=str(script), NORMSWAP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("blocks norms run on torch's operations, since compiling them failed")
    assert "exit code 3: some reason" in done.stdout
    assert done.stdout.count("compiling them failed") == 1


def test_what_cannot_be_loaded_is_told_of(tmp_path: Path) -> None:
    script = tmp_path / "compiler"
    script.write_text('#!/bin/sh\nfor last; do :; done\necho nothing > "$last"\n')
    script.chmod(0o700)
    done = run(CALL, CXX=str(script), NORMSWAP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "what the compiler built cannot be loaded" in done.stdout


@pytest.mark.parametrize(
    ("environment", "reason"),
    (
        ({"CXX": "g++ '"}, 'CXX is no command, "g++ \'": No closing quotation'),
        ({"TMPDIR": "/nowhere"}, "No usable temporary directory"),
    ),
    ids=("command", "temporary folder"),
)
def test_what_cannot_be_built_with_is_told_of_once(
    environment: dict[str, str], reason: str, tmp_path: Path, compiler: Callable[[], int]
) -> None:
    # Where there is no usable folder, the system's own are none either.
    script = "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nowhere']\n" + textwrap.dedent(CALL)
    done = run(script, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("blocks norms run on torch's operations, since compiling them failed")
    assert done.stdout.count("compiling them failed") == 1 and reason in done.stdout
    assert compiler() == 0


def test_an_interrupted_build_is_tried_again(compiler: Callable[[], int]) -> None:
    done = run(
        """
        import torch
        from normswap_kernels import cpu_build, cpu_library, rms_norm
        compile, x = cpu_build._compile, torch.randn(2, 8)
        def interrupted(*arguments):
            raise KeyboardInterrupt
        cpu_build._compile = interrupted
        try:
            rms_norm(x, eps=1e-6)
        except KeyboardInterrupt:
            print("interrupted")
        cpu_build._compile = compile
        rms_norm(x, eps=1e-6)
        print(cpu_library._library is not None)
        """
    )
    assert done.stdout.split() == ["interrupted", "True"], done.stderr
    assert compiler() == 1


def test_the_warning_points_at_the_users_line(tmp_path: Path) -> None:
    module = tmp_path / "theirs.py"
    module.write_text(
        textwrap.dedent(
            """
            import torch
            from normswap_kernels import rms_norm
            class Theirs(torch.nn.Module):
                def forward(self, x):
                    return rms_norm(x, eps=1e-6)  # here
            Theirs()(torch.randn(2, 8))
            """
        )
    )
    done = run(f"import runpy; runpy.run_path({str(module)!r})", CXX="g++ '", NORMSWAP_CACHE=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert "theirs.py" in done.stderr and "# here" in done.stderr


@pytest.mark.parametrize(
    "environment",
    (
        *({"NORMSWAP_CPU_COMPILE": word} for word in ("0", "false", "Off", "no")),
        {"PATH": "/nowhere", "CXX": ""},
    ),
    ids=str,
)
def test_without_it_the_results_are_torchs(environment: dict[str, str], tmp_path: Path) -> None:
    done = run(CALL, **environment, NORMSWAP_CACHE=str(tmp_path / "cache"))
    assert (done.returncode, done.stdout.strip()) == (0, "blocks"), done.stderr
    assert not (tmp_path / "cache").exists()


def test_importing_builds_and_loads_nothing(compiler: Callable[[], int]) -> None:
    done = run(
        """
        import sys, normswap_kernels
        from normswap_kernels import cpu_library
        print(cpu_library._looked_for, "normswap_kernels.cpu_build" in sys.modules)
        """
    )
    assert done.stdout.split() == ["False", "False"], done.stderr
    assert compiler() == 0


def test_a_forked_process_does_not_wait_for_the_threads_of_its_parent() -> None:
    done = run(
        """
        import os, torch
        from normswap_kernels import cpu_library, rms_norm
        torch.set_num_threads(2)
        x = torch.randn(600, 1024)
        y = rms_norm(x, eps=1e-6)
        assert cpu_library.library() is not None
        child = os.fork()
        if not child:
            # Torch's own operations would wait, but for such as are too short for threads.
            os._exit(0 if torch.equal(rms_norm(x, eps=1e-6)[580:], y[580:]) else 1)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        """
    )
    assert done.stdout.split() == ["0"], done.stderr


def test_several_threads_may_come_first(compiler: Callable[[], int]) -> None:
    done = run(
        """
        import threading, torch
        from normswap_kernels import cpu_library, rms_norm
        x = torch.randn(300, 512)
        results = [None] * 4
        def call(i):
            for _ in range(20):
                results[i] = rms_norm(x, eps=1e-6)
        threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        assert all(torch.equal(r, results[0]) for r in results)
        print(cpu_library.library() is not None)
        """
    )
    assert done.stdout.split() == ["True"], done.stderr
    assert compiler() == 1
