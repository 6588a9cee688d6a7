"""Where reports may be written: never over a file of a checkpoint, and not two in one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tiny_checkpoints import saved, tiny_llama

from normswap.cli import main

pytestmark = pytest.mark.core


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    folder = saved(tiny_llama(), tmp_path / "llama")
    (folder / "README.md").write_text("The card. Measured with `normswap verify`.\n")
    (folder / "page.html").write_text("a page of somebody's")
    return folder


@pytest.mark.parametrize(
    "flag, name",
    [
        ("--json", "config.json"),
        ("--json", "model.safetensors"),
        ("--report", "model.safetensors"),
        ("--report", "page.html"),
        ("--markdown", "config.json"),
        ("--markdown", "README.md"),
    ],
)
@pytest.mark.parametrize("by", ["name", "link"])
def test_no_report_overwrites_a_file_of_a_checkpoint(
    llama: Path, tmp_path: Path, flag: str, name: str, by: str
) -> None:
    before = (llama / name).read_bytes()
    file = llama / name
    if by == "link":
        file = tmp_path / "link"
        file.symlink_to(llama / name)
    done = run("verify", llama, "--tokens", "128", "--device", "cpu", flag, file)
    assert done.exit_code == 2 and "a file of a checkpoint" in done.stderr
    assert (llama / name).read_bytes() == before


def test_a_report_beside_the_weights_is_written_and_written_again(llama: Path) -> None:
    files = [llama / name for name in ("r.json", "r.html", "r.md")]
    for _ in range(2):
        options = [word for pair in zip(("--json", "--report", "--markdown"), files, strict=True) for word in pair]
        done = run("verify", llama, "--tokens", "128", "--device", "cpu", *options)
        assert done.exit_code == 0, done.stderr
    assert json.loads(files[0].read_text())["verdict"] == "pass"


def test_two_reports_in_one_file_are_refused(llama: Path, tmp_path: Path) -> None:
    done = run("verify", llama, "--json", tmp_path / "one", "--markdown", tmp_path / "one")
    assert done.exit_code == 2 and "--json and --markdown both name" in done.stderr


def test_no_resampling_at_all_is_refused(llama: Path) -> None:
    done = run("verify", llama, "--bound", "bootstrap=0")
    assert done.exit_code == 2 and "at least one resampling" in done.stderr
