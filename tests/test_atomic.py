"""The output folder is there as a whole or not at all, and nothing that exists is harmed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from normswap import atomic, temporary
from normswap.checkpoint import AtomicFolder, check_output
from normswap.errors import OutputError

# Writes 40 files of 64 KiB into the output, as a user's process would that may be killed or hit a limit.
WRITER = """
import sys, time
from pathlib import Path
from normswap.atomic import AtomicFolder
from normswap.errors import OutputError
out, source, limit, text = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
pause = int(sys.argv[5])
if limit:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
print("ready", flush=True)
try:
    with AtomicFolder(out, overwrite=True, source=source) as folder:
        for number in range(40):
            if number == pause:
                print("paused", flush=True)
                time.sleep(60)
            (folder / f"{number}.bin").write_bytes(b"n" * 65536)
            time.sleep(0.001)
        (folder / "normswap.json").write_text(text)
except OutputError as error:
    sys.exit(f"{error}")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"s" * 1000)
    return path


def make_checkpoint(path: Path, text: str = "old") -> Path:
    path.mkdir(parents=True)
    (path / "normswap.json").write_text(text)
    return path


def names(path: Path) -> list[str]:
    return sorted(str(file.relative_to(path)) for file in path.rglob("*"))


def entries(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def start_writer(out: Path, source: Path, limit: int = 0, text: str = "new", pause: int = -1) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(out), str(source), str(limit), text, str(pause)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    writer = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert writer.stdout is not None and writer.stdout.readline() == "ready\n"
    return writer


def test_a_finished_run_leaves_the_folder_and_nothing_else(tmp_path: Path, source: Path) -> None:
    with AtomicFolder(tmp_path / "a" / "b" / "out", source=source) as folder:
        (folder / "sub").mkdir()
        (folder / "sub" / "x").write_text("x")
        assert not (tmp_path / "a").exists()
    assert names(tmp_path / "a") == ["b", "b/out", "b/out/sub", "b/out/sub/x"]
    assert entries(tmp_path) == ["a", "source"]
    plain = tmp_path / "plain"
    plain.mkdir()
    assert (tmp_path / "a/b/out").stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, SystemExit])
@pytest.mark.parametrize("overwrite", [False, True])
def test_an_exception_leaves_no_trace(tmp_path: Path, source: Path, error: type, overwrite: bool) -> None:
    if overwrite:
        make_checkpoint(tmp_path / "x" / "out")
    before = names(tmp_path)
    with pytest.raises(error), AtomicFolder(tmp_path / "x" / "out", overwrite=overwrite, source=source) as folder:
        (folder / "normswap.json").write_text("new")
        raise error
    assert names(tmp_path) == before


@pytest.mark.parametrize("exchanges", [True, False])
def test_overwriting_replaces_the_whole_folder(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("normswap.renaming._renameat2", lambda *_: False)
    out = make_checkpoint(tmp_path / "out")
    (out / "stale.txt").write_text("stale")
    with AtomicFolder(out, overwrite=True, source=source) as folder:
        (folder / "normswap.json").write_text("new")
    assert names(tmp_path) == ["out", "out/normswap.json", "source", "source/config.json", "source/model.safetensors"]
    assert (out / "normswap.json").read_text() == "new"


def test_a_failed_replacement_puts_the_old_folder_back(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = make_checkpoint(tmp_path / "out")
    before = names(tmp_path)
    monkeypatch.setattr(atomic, "exchange", lambda *_: False)
    rename = Path.rename

    def refuse(path: Path, target: Path) -> Path:
        if path.name.endswith(".tmp"):
            raise OSError(errno.EIO, "no luck")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refuse)
    with (
        pytest.raises(OutputError, match=r"cannot write .*out: no luck"),
        AtomicFolder(out, overwrite=True, source=source) as folder,
    ):
        (folder / "normswap.json").write_text("new")
    assert names(tmp_path) == before and (out / "normswap.json").read_text() == "old"


def test_a_run_killed_between_two_renames_loses_nothing(tmp_path: Path, source: Path) -> None:
    make_checkpoint(tmp_path / ".out.normswap-old")
    with pytest.raises(OutputError, match=r"exists"):
        AtomicFolder(tmp_path / "out", source=source).__enter__()
    assert (tmp_path / "out" / "normswap.json").read_text() == "old"


@pytest.mark.parametrize("exchanges", [True, False])
def test_an_output_that_appears_meanwhile_is_left_alone(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    if not exchanges:
        monkeypatch.setattr("normswap.renaming._renameat2", lambda *_: False)
    out = tmp_path / "out"
    with pytest.raises(OutputError, match=r"appeared while this run was working"), AtomicFolder(out, source=source):
        out.mkdir()
    assert names(tmp_path) == ["out", "source", "source/config.json", "source/model.safetensors"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_told_and_leaves_no_trace(tmp_path: Path, source: Path, code: int) -> None:
    before = names(tmp_path)
    with (
        pytest.raises(OutputError, match=r"cannot write .*out: .*; make room and run again"),
        AtomicFolder(tmp_path / "out", source=source) as folder,
    ):
        (folder / "half").write_text("half")
        raise OSError(code, os.strerror(code))
    assert names(tmp_path) == before


def test_a_full_disk_at_the_last_moment_too(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    before = names(tmp_path)
    with pytest.raises(OutputError, match=r"No space left"), AtomicFolder(tmp_path / "out", source=source) as folder:
        (folder / "x").write_text("x")
    assert names(tmp_path) == before


def test_a_file_size_limit_in_a_real_process(tmp_path: Path, source: Path) -> None:
    before = names(tmp_path)
    writer = start_writer(tmp_path / "out", source, limit=1000)
    _, text = writer.communicate(timeout=60)
    assert writer.returncode == 1 and "File too large; make room and run again" in text
    assert names(tmp_path) == before


@pytest.mark.parametrize("moment", [0, 17, 39])
def test_a_kill_while_it_writes_leaves_what_was_there(tmp_path: Path, source: Path, moment: int) -> None:
    out = make_checkpoint(tmp_path / "out")
    writer = start_writer(out, source, pause=moment)
    assert writer.stdout is not None and writer.stdout.readline() == "paused\n"
    writer.kill()
    writer.communicate(timeout=60)
    assert (entries(out), (out / "normswap.json").read_text()) == (["normswap.json"], "old")
    assert start_writer(out, source).communicate(timeout=60) == ("", "")
    assert entries(tmp_path) == ["out", "source"]


def test_kill_at_random_moments_leaves_a_whole_folder_and_little_rubbish(tmp_path: Path, source: Path) -> None:
    chance = random.Random(0)
    out = make_checkpoint(tmp_path / "out")
    before = "old"
    for run in range(12):
        writer = start_writer(out, source, text=f"run {run}")
        time.sleep(chance.uniform(0, 0.4))
        writer.kill()
        writer.communicate(timeout=60)
        found = (out / "normswap.json").read_text()
        assert found in (before, f"run {run}")
        assert len(entries(out)) == (1 if found == "old" else 41)
        # At most what this run left: it cleaned up after those before it.
        assert len(list(tmp_path.glob(".normswap-*"))) <= 1
        before = found
    writer = start_writer(out, source)
    assert writer.communicate(timeout=60) == ("", "")
    assert entries(tmp_path) == ["out", "source"]


def test_only_what_is_dead_and_ours_is_removed(tmp_path: Path, source: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    mine = temporary.new_name()
    stale = tmp_path / mine.replace(f"-{os.getpid()}-", f"-{dead.pid}-")
    elsewhere = tmp_path / f".normswap-{'0' * 8}-{'0' * 8}-{dead.pid}-{'0' * 8}.tmp"
    earlier_boot = tmp_path / f".normswap-{mine.split('-')[1]}-{'0' * 8}-1-{'0' * 8}.tmp"
    for folder in (stale, elsewhere, earlier_boot, tmp_path / ".normswap-notes"):
        folder.mkdir()
        (folder / "x").write_text("x")
    with AtomicFolder(tmp_path / "one", source=source) as live:
        with AtomicFolder(tmp_path / "two", source=source):
            assert live.is_dir()
        os.utime(live, (0, 0))
        temporary.remove_stale(tmp_path)
        assert live.is_dir()
    assert entries(tmp_path) == sorted([elsewhere.name, ".normswap-notes", "one", "source", "two"])


def test_what_exists_is_refused(tmp_path: Path, source: Path) -> None:
    out = make_checkpoint(tmp_path / "out")
    with pytest.raises(OutputError, match=r"the output .*out exists; choose another name, or pass --overwrite"):
        check_output(out, source, False)
    check_output(out, source, True)
    check_output(tmp_path / "new" / "deep", source, False)
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"expected a new folder as output, .*file is a file"):
        check_output(tmp_path / "file", source, True)
    with pytest.raises(OutputError, match=r"cannot make .*: .*file is a file"):
        check_output(tmp_path / "file" / "out", source, False)
    (tmp_path / "link").symlink_to(out)
    with pytest.raises(OutputError, match=r"link is a link; give the folder it points at"):
        check_output(tmp_path / "link", source, True)


def test_overwrite_replaces_checkpoints_only(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    check_output(precious, source, True)
    (precious / "thesis.tex").write_text("x")
    with pytest.raises(OutputError, match=r"refusing to replace .*: it holds no checkpoint"):
        check_output(precious, source, True)
    (precious / "normswap.json").write_text("{}")
    (precious / ".git").mkdir()
    with pytest.raises(OutputError, match=r"refusing to replace .*: it is a git repository"):
        check_output(precious, source, True)
    (precious / ".git").rmdir()
    (precious / "deeper").mkdir()
    monkeypatch.chdir(precious / "deeper")
    with pytest.raises(OutputError, match=r"deeper is in it; choose another folder"):
        check_output(precious, source, True)


@pytest.mark.parametrize(
    ("config", "others", "replaced"),
    [
        ('{"port": 80}', ["server.py", "model.safetensors"], False),
        ('{"model_type": "llama"}', ["server.py"], False),
        ("not JSON", ["model.safetensors"], False),
        ("[]", ["model.safetensors"], False),
        ('{"model_type": "llama"}', ["model.safetensors"], True),
        ('{"architectures": ["LlamaModel"]}', ["pytorch_model.bin"], True),
        ('{"model_type": "llama"}', ["model.safetensors.index.json"], True),
    ],
)
def test_overwrite_wants_the_config_of_a_model_beside_weights(
    tmp_path: Path, source: Path, config: str, others: list[str], replaced: bool
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text(config)
    for name in others:
        (out / name).write_text("x")
    if replaced:
        check_output(out, source, True)
    else:
        with pytest.raises(OutputError, match=r"refusing to replace .*: it holds no checkpoint"):
            check_output(out, source, True)


def test_source_and_output_do_not_overlap(tmp_path: Path, source: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(source)
    for inside in (source / "out", alias / "out", source / "a" / "b", alias / ".." / "source" / "x"):
        with pytest.raises(OutputError, match=r"lies inside the source"):
            check_output(inside, source, False)
    with pytest.raises(OutputError, match=r"is the source itself"):
        check_output(source, alias, True)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(OutputError, match=r"holds the source"):
        check_output(tmp_path, alias, True)


def test_the_hub_cache_is_refused(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache" / "models--a--b").mkdir(parents=True)
    other = tmp_path / "moved" / "models--a--b"
    (other / "snapshots" / "0").mkdir(parents=True)
    (other / "blobs").mkdir()
    for out in (tmp_path / "cache" / "models--a--b" / "out", other / "snapshots" / "0" / "out"):
        with pytest.raises(OutputError, match=r"lies inside the Hub cache"):
            check_output(out, source, False)


def test_a_disk_too_small_is_told_before_the_work(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: SimpleNamespace(free=1001))
    with pytest.raises(OutputError, match=r"not enough room for .*out: 1.00 KB needed, 1.00 KB free"):
        check_output(tmp_path / "out", source, False)
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: SimpleNamespace(free=1002))
    check_output(tmp_path / "out", source, False)


@pytest.mark.parametrize(
    ("count", "words"),
    [(7, "7 bytes"), (1500, "1.50 KB"), (2_340_000, "2.34 MB"), (999_999_999, "1000.00 MB"), (16 * 10**9, "16.00 GB")],
)
def test_sizes_are_told_in_a_fitting_unit(count: int, words: str) -> None:
    assert atomic._size(count) == words


@pytest.mark.parametrize("make", [lambda p: p / ("x" * 300), lambda p: p / "a\0b", lambda p: Path("/proc/x/y")])
def test_impossible_names_are_told(tmp_path: Path, source: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(OutputError), AtomicFolder(make(tmp_path), source=source):
        pass
