"""An interrupted conversion goes on from its finished files, or leaves nothing, and never mixes two."""

from __future__ import annotations

import errno
import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from stream_edits import Scaled

from normswap import atomic, resuming
from normswap.atomic import AtomicFolder, check_output
from normswap.errors import CheckpointError, OutputError, RangeLost
from normswap.journal import fingerprint
from normswap.resuming import ResumableFolder
from normswap.shards import check_source
from normswap.streaming import Written, write_checkpoint

pytestmark = pytest.mark.core

SHARDS = 6
# Converts as a user's process would that may be killed or hit a limit; tells of each shard that it begins.
CONVERTER = """
import sys, time
from pathlib import Path
import torch
from normswap.atomic import AtomicFolder
from normswap.errors import OutputError
from normswap.journal import fingerprint
from normswap.resuming import ResumableFolder
from normswap.shards import check_source
from normswap.streaming import write_checkpoint
source, out, resume, pause, limit = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "1", *map(float, sys.argv[4:])
if limit:
    import resource, signal
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
class Doubled:
    def __init__(self, key):
        self.key = key
    def apply(self, rows, start):
        print(self.key, flush=True)
        time.sleep(pause)
        return rows.double() * 2
checkpoint = check_source(source)
edits = {key: Doubled(key) for key in checkpoint.tensors}
mark = fingerprint(checkpoint, "doubled")
if resume:
    folder = ResumableFolder(out, mark=mark, overwrite=True, source=source)
else:
    folder = AtomicFolder(out, overwrite=True, source=source)
print("ready", flush=True)
try:
    with folder as target:
        write_checkpoint(checkpoint, target, edits=edits, journal=folder.journal if resume else None)
        (target / "normswap.json").write_text("{}")
except OutputError as error:
    sys.exit(f"{error}")
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.mkdir()
    weight_map = {}
    for number in range(SHARDS):
        name = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        save_file({f"t{number}": torch.randn(40, 50)}, path / name, metadata={"format": "pt"})
        weight_map[f"t{number}"] = name
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return path


def start(source: Path, out: Path, *, resume: bool = True, pause: float = 0.0, limit: int = 0) -> subprocess.Popen[str]:
    command = [sys.executable, "-W", "ignore", "-c", CONVERTER, str(source), str(out), str(int(resume))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command += [str(pause), str(limit)]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    assert run.stdout is not None and run.stdout.readline() == "ready\n"
    return run


def kill_in_shard(run: subprocess.Popen[str], number: int) -> None:
    assert run.stdout is not None
    for line in run.stdout:
        if line == f"t{number}\n":
            break
    run.kill()
    run.communicate(timeout=60)


def finish(run: subprocess.Popen[str]) -> list[str]:
    # What came along with the first line waits in the stream's own buffer, which `communicate` does not read.
    assert run.stdout is not None and run.stderr is not None
    with run:
        text, errors = run.stdout.read(), run.stderr.read()
    assert run.returncode == 0, errors
    return text.split()


def entries(path: Path) -> list[str]:
    return sorted(file.name for file in path.iterdir())


def require_doubled(source: Path, out: Path) -> None:
    checkpoint = check_source(out)
    assert len(checkpoint.files) == SHARDS
    for name in checkpoint.files:
        before, after = load_file(source / name), load_file(out / name)
        assert (
            all(torch.equal(after[key], 2 * value) for key, value in before.items()) and before.keys() == after.keys()
        )


def convert(source: Path, out: Path, changes: str = "doubled", factor: float = 2.0, stop: int | None = None) -> Written:
    """Convert in this process, with an exception in the edit of one shard where that is asked for."""

    class Edit:
        def __init__(self, number: int) -> None:
            self.number = number

        def apply(self, rows: torch.Tensor, first: int) -> torch.Tensor:
            if self.number == stop:
                raise KeyboardInterrupt
            seen.append(self.number)
            return rows.double() * factor

    checkpoint, seen = check_source(source), SEEN
    seen.clear()
    folder = ResumableFolder(out, mark=fingerprint(checkpoint, changes), source=source)
    with folder as target:
        edits = {f"t{number}": Edit(number) for number in range(SHARDS)}
        return write_checkpoint(checkpoint, target, edits=edits, journal=folder.journal)


SEEN: list[int] = []


@pytest.mark.parametrize("moment", [0, 4])
def test_a_killed_run_is_taken_up_from_its_finished_shards(tmp_path: Path, source: Path, moment: int) -> None:
    out = tmp_path / "place" / "out"
    kill_in_shard(start(source, out, pause=0.2), moment)
    partial = atomic.partial_folder(out)
    assert entries(out.parent) == [partial.name]
    kept = [file for file in (partial / "checkpoint").iterdir() if file.suffix == ".safetensors"]
    recorded = (partial / "journal").read_text().count('"own"')
    # The last shards may be on their way to the disk when the kill comes.
    assert max(0, moment - 2) <= recorded <= moment
    inodes = {file.name: file.stat().st_ino for file in kept}
    begun = finish(start(source, out))
    assert begun == [f"t{number}" for number in range(recorded, SHARDS)]
    require_doubled(source, out)
    assert entries(out.parent) == ["out"]
    names = check_source(source).files[:recorded]
    assert all((out / name).stat().st_ino == inodes[name] for name in names)


@pytest.mark.slow
def test_kills_at_random_moments_come_to_a_right_end(tmp_path: Path, source: Path) -> None:
    chance = random.Random(1)
    out = tmp_path / "place" / "out"
    for _ in range(3):
        run = start(source, out, pause=0.05)
        time.sleep(chance.uniform(0, 0.3))
        run.kill()
        run.communicate(timeout=60)
    finish(start(source, out))
    require_doubled(source, out)
    assert entries(out.parent) == ["out"]


def test_a_run_without_resuming_leaves_no_trace_and_removes_what_was_kept(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "place" / "out"
    kill_in_shard(start(source, out, pause=0.2), 3)
    assert atomic.partial_folder(out).is_dir()
    kill_in_shard(start(source, out, resume=False, pause=0.2), 3)
    assert not out.exists() and not atomic.partial_folder(out).exists()
    begun = finish(start(source, out, resume=False))
    assert begun == [f"t{number}" for number in range(SHARDS)]
    require_doubled(source, out)
    assert entries(out.parent) == ["out"]


def test_a_full_disk_is_told_and_keeps_what_is_finished(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    large = check_source(source).files[4]
    save_file({"t4": torch.randn(400, 50)}, source / large, metadata={"format": "pt"})
    run = start(source, out, limit=20_000)
    _, text = run.communicate(timeout=60)
    assert run.returncode == 1 and "File too large; make room and resume (finished files were kept" in text
    kept = entries(atomic.partial_folder(out) / "checkpoint")
    # Whether the last one was written before the failure was noticed is a matter of moments.
    assert large not in kept and len([name for name in kept if name.endswith(".safetensors")]) >= 4
    assert finish(start(source, out)) in (["t4"], ["t4", "t5"])
    require_doubled(source, out)
    run = start(source, tmp_path / "other", resume=False, limit=20_000)
    _, text = run.communicate(timeout=60)
    assert run.returncode == 1 and "File too large; make room and run again (nothing was left)" in text
    assert entries(tmp_path) == ["out", "source"]


def test_the_hashes_of_kept_shards_come_from_the_journal(tmp_path: Path, source: Path) -> None:
    out, clean = tmp_path / "out", tmp_path / "clean"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=3)
    hashes = convert(source, out)
    assert SEEN[0] >= 1, "no shard was kept"
    assert hashes == convert(source, clean)
    assert all((out / name).read_bytes() == (clean / name).read_bytes() for name in entries(clean))
    assert entries(out) == entries(clean)


@pytest.mark.parametrize("change", ["edits", "touched", "replaced", "longer", "damaged", "torn", "no journal"])
def test_only_the_very_same_conversion_is_taken_up(tmp_path: Path, source: Path, change: str) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    partial = atomic.partial_folder(out)
    journal = partial / "journal"
    first = check_source(source).files[0]
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) >= 3
    # The first shard of them is wrong in a way that only a fresh start mends.
    file = partial / "checkpoint" / first
    file.write_bytes(bytes(file.stat().st_size))
    again, factor = list(range(SHARDS)), 2.0
    if change == "edits":
        factor = 3.0
    elif change == "touched":
        os.utime(source / first)
    elif change == "replaced":
        state = (source / first).stat()
        save_file({"t0": torch.randn(40, 50)}, source / first, metadata={"format": "pt"})
        assert (source / first).stat().st_size == state.st_size
        os.utime(source / first, ns=(state.st_atime_ns, state.st_mtime_ns))
    elif change == "longer":
        # This one alone is written again: its size is not the recorded one.
        file.write_bytes(bytes(10))
        again = [0, *range(len(lines) - 1, SHARDS)]
    elif change == "damaged":
        journal.write_text("{" + journal.read_text())
    elif change == "torn":
        # A record that was cut off counts for nothing, and those after it do.
        journal.write_text(lines[0] + lines[1][:30])
    else:
        journal.unlink()
    convert(source, out, changes=f"times {factor}" if change == "edits" else "doubled", factor=factor)
    assert again == SEEN
    for number, name in enumerate(check_source(source).files):
        assert torch.equal(load_file(out / name)[f"t{number}"], factor * load_file(source / name)[f"t{number}"])


def test_a_torn_record_does_not_spoil_the_next(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    journal = atomic.partial_folder(out) / "journal"
    journal.write_text(journal.read_text().splitlines(keepends=True)[0] + '{"name": "mod')
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    convert(source, out)
    assert SEEN[0] >= 2


def test_what_is_not_recorded_is_removed(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    folder = atomic.partial_folder(out) / "checkpoint"
    (folder / "model.safetensors").write_bytes(b"stale")
    (folder / "sub").mkdir()
    (folder / "sub" / "stale.json").write_text("{}")
    convert(source, out)
    assert not (out / "model.safetensors").exists() and not (out / "sub" / "stale.json").exists()


def test_a_second_run_at_once_is_refused(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    mark = fingerprint(check_source(source), "doubled")
    with ResumableFolder(out, mark=mark, source=source) as live:
        (live / "x").write_text("x")
        with (
            pytest.raises(OutputError, match=r"another run is writing .*out; wait for it to end"),
            ResumableFolder(out, mark=mark, source=source),
        ):
            pass
        with AtomicFolder(tmp_path / "out2", source=source):
            pass
        with pytest.raises(OutputError, match="another run is writing"), AtomicFolder(out, source=source):
            pass
        assert (live / "x").read_text() == "x"
    assert entries(tmp_path) == ["out", "out2", "source"]


@pytest.mark.parametrize("error", [CheckpointError("damaged"), RangeLost("t0", "overflow")])
def test_what_ends_a_run_for_good_leaves_nothing(tmp_path: Path, source: Path, error: Exception) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    mark = fingerprint(check_source(source), "doubled")
    with pytest.raises(type(error)), ResumableFolder(out, mark=mark, source=source) as folder:
        assert list(folder.glob("*.safetensors"))
        raise error
    assert entries(tmp_path) == ["source"]


def test_an_interruption_before_anything_is_finished_leaves_nothing(tmp_path: Path, source: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "out", stop=0)
    assert entries(tmp_path) == ["source"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_overwriting_never_takes_the_old_output_for_its_own(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    """A run that dies right after the exchange leaves the old output in the place of the finished files."""
    if not exchanges:
        monkeypatch.setattr("normswap.renaming._renameat2", lambda *_: False)
    out = tmp_path / "out"
    convert(source, out, changes="tripled", factor=3.0)
    checkpoint = check_source(source)
    mark = fingerprint(checkpoint, "doubled")
    edits = {f"t{number}": Scaled(torch.full((50,), 2.0)) for number in range(SHARDS)}

    def run() -> None:
        folder = ResumableFolder(out, mark=mark, overwrite=True, source=source)
        with folder as target:
            write_checkpoint(checkpoint, target, edits=edits, journal=folder.journal)

    with monkeypatch.context() as patch:
        # As if killed: nothing is cleaned up behind the exchange.
        patch.setattr(resuming.ResumableFolder, "_leave", lambda self, remove: self._release())
        run()
    require_doubled(source, out)
    assert not (atomic.partial_folder(out) / "journal").exists()
    run()
    require_doubled(source, out)
    assert entries(tmp_path) == ["out", "source"]


def test_an_output_that_appears_meanwhile_is_left_alone_and_the_work_kept(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    checkpoint = check_source(source)
    folder = ResumableFolder(out, mark=fingerprint(checkpoint, "copy"), source=source)
    with pytest.raises(OutputError, match=r"appeared while this run was working"), folder as target:
        write_checkpoint(checkpoint, target, journal=folder.journal)
        out.mkdir()
    assert entries(out) == []
    out.rmdir()
    again = ResumableFolder(out, mark=fingerprint(checkpoint, "copy"), source=source)
    with again as target:
        assert all(again.journal.finished(name) for name in checkpoint.files)
        write_checkpoint(checkpoint, target, journal=again.journal)
    assert entries(out) == entries(source)


def test_what_is_kept_counts_as_room(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt):
        convert(source, out, stop=4)
    usage = type("Usage", (), {"free": 17_000})
    monkeypatch.setattr(atomic.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(OutputError, match=r"not enough room for .*other"):
        check_output(tmp_path / "other", source, False)
    check_output(out, source, False)


def test_a_place_that_cannot_be_written_is_told(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EIO, "no luck")

    monkeypatch.setattr(resuming, "claim", refuse)
    with pytest.raises(OutputError, match=r"cannot write into .*normswap-partial: no luck"):
        ResumableFolder(tmp_path / "out", mark="x", source=source).__enter__()
