"""The command line of a verification: what it takes, prints and writes, and its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file
from tiny_checkpoints import saved, tiny_llama

from normswap.cli import main

pytestmark = pytest.mark.core

FEW = ("--tokens", "256", "--device", "cpu")


def run(*arguments: Any) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_llama(), tmp_path_factory.mktemp("llama") / "llama")


@pytest.fixture(scope="module")
def wrong(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(llama, tmp_path_factory.mktemp("wrong") / "wrong"))
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.input_layernorm.weight"][5] *= 1.02
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_the_verdict_comes_first_and_decides_the_exit_code(llama: Path, wrong: Path) -> None:
    done = run("verify", wrong, "--against", llama, *FEW)
    assert done.exit_code == 1 and done.stdout.startswith("FAIL")
    assert "model.layers.1.input_layernorm.weight differs in 1 of" in " ".join(done.stdout.split())
    done = run("verify", Path(shutil.copytree(llama, llama.parent / "copy")), "--against", llama, *FEW)
    assert done.exit_code == 0 and done.stdout.startswith("PASS") and "identical" in done.stdout


def test_a_fault_that_no_gate_sees_leaves_it_open(llama: Path) -> None:
    done = run("verify", llama, *FEW, "--bound", "control_scale=1.0")
    assert done.exit_code == 1 and done.stdout.startswith("INCONCLUSIVE")
    assert "--reference float64" in " ".join(done.stdout.split())


def test_quiet_is_one_line_and_verbose_lists_all(llama: Path) -> None:
    quiet, verbose = (run("verify", llama, *FEW, flag) for flag in ("--quiet", "-v"))
    assert len(quiet.stdout.strip().splitlines()) == 1 and quiet.stdout.startswith("PASS")
    assert all(name in verbose.stdout for name in ("model.layers.0.input_layernorm", "model.layers.1", "cast order"))
    both = run("verify", llama, "--quiet", "--verbose")
    assert both.exit_code == 2 and "opposites" in both.stderr


def test_every_form_of_the_report_is_written(llama: Path, wrong: Path, tmp_path: Path) -> None:
    files = {name: tmp_path / name for name in ("r.json", "r.html", "r.md")}
    out = Path(shutil.copytree(wrong, tmp_path / "out"))
    options = ("--json", files["r.json"], "--report", files["r.html"], "--markdown", files["r.md"], "--readme")
    done = run("verify", out, "--against", llama, *FEW, *options)
    assert done.exit_code == 1
    data = json.loads(files["r.json"].read_text())
    assert data["verdict"] == "fail" and data["departs"] == "model.layers.1" and data["schema"] == 2
    assert data["command"].startswith(f"normswap verify {out} --against {llama} --device cpu --tokens 256")
    assert files["r.html"].read_text().lstrip().lower().startswith("<!doctype html>")
    assert files["r.md"].read_text() in (out / "README.md").read_text()
    assert {path.name for path in llama.iterdir()} == {path.name for path in wrong.iterdir()}


def test_the_original_gets_no_readme(llama: Path) -> None:
    before = {path.name: path.read_bytes() for path in llama.iterdir()}
    done = run("verify", llama, *FEW, "--readme")
    assert done.exit_code == 2 and "refusing to write into" in done.stderr
    assert {path.name: path.read_bytes() for path in llama.iterdir()} == before


def test_a_conversion_says_how_to_measure_it_again(llama: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = run("patch", llama, "-o", out, "--device", "cpu", "--tokens", "128", "--dtype", "float16")
    assert done.exit_code == 0, done.stderr
    assert f"normswap verify {out} --tokens 128 --dtype float16" in " ".join(done.stdout.split())


def test_a_conversion_writes_the_same_forms(llama: Path, tmp_path: Path) -> None:
    options = ("--report", tmp_path / "r.html", "--markdown", tmp_path / "r.md", "--readme", "--device", "cpu")
    done = run("patch", llama, "-o", tmp_path / "out", *options)
    assert done.exit_code == 0, done.stderr
    assert (tmp_path / "r.md").read_text() in (tmp_path / "out" / "README.md").read_text()
    assert "verdict" in (tmp_path / "r.html").read_text().lower()
    refused = run("patch", llama, "-o", tmp_path / "other", "--no-verify", "--readme")
    assert refused.exit_code == 2 and "--readme writes the measurements" in refused.stderr


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ("nonsense=1", "expected NAME=VALUE with a name among exact_bound"),
        ("ratio_max", "expected NAME=VALUE"),
        ("ratio_max=much", "expected ratio_max as float, got 'much'"),
        ("min_sequences=1.5", "expected min_sequences as int"),
        ("ratio_max=nan", "at least 0"),
        ("ratio_max=-1", "at least 0"),
    ],
)
def test_a_bound_that_cannot_be_is_refused(llama: Path, option: str, told: str) -> None:
    done = run("verify", llama, "--bound", option)
    assert done.exit_code == 2 and told in done.stderr


def test_a_bound_decides_and_is_told(llama: Path, wrong: Path, tmp_path: Path) -> None:
    done = run(
        "verify", llama, *FEW, "--bound", "exact_bound=1e-30", "--bound", "bootstrap=100", "--json", tmp_path / "r"
    )
    data = json.loads((tmp_path / "r").read_text())
    assert data["criterion"]["exact_bound"] == 1e-30 and "1e-30" in data["criterion"]["text"]
    assert "--bound exact_bound=1e-30 --bound bootstrap=100" in data["command"]
    assert done.exit_code == (0 if data["exact"]["error"] == 0 else 1)


def test_more_ways_to_run_are_told(llama: Path, tmp_path: Path) -> None:
    options = ("--generate", "4", "--reference", "float64", "--batch", "2", "--tokens", "512", "--dtype", "bfloat16")
    done = run("verify", llama, *options, "--json", tmp_path / "r", "--device", "cpu")
    data = json.loads((tmp_path / "r").read_text())
    assert done.exit_code == 0, done.stdout
    assert data["reference_dtype"] == data["exact"]["dtype"] == "float64"
    assert data["generation"]["tokens"] == 4 and data["generation"]["prompts"] >= 4
    assert "padded" in data["inputs"]["description"]
    for words in ("--generate 4", "--reference float64", "--batch 2", "--tokens 512", "--dtype bfloat16"):
        assert words in data["command"]


def test_little_memory_reads_layer_by_layer_and_finds_the_same(llama: Path, wrong: Path, tmp_path: Path) -> None:
    found = []
    for name, options in (("whole", ()), ("streamed", ("--max-memory", "100KB"))):
        done = run("verify", wrong, "--against", llama, *FEW, *options, "--json", tmp_path / name)
        assert done.exit_code == 1, done.stderr
        found.append(json.loads((tmp_path / name).read_text()))
    whole, streamed = found
    assert streamed["streamed"] and not whole["streamed"]
    assert streamed["failures"] == whole["failures"] and streamed["departs"] == whole["departs"]
    assert torch.isclose(torch.tensor(streamed["logits"]["ratio"]), torch.tensor(whole["logits"]["ratio"]), rtol=1e-3)


@pytest.mark.parametrize("option", ["--json", "--report", "--markdown"])
def test_a_file_that_cannot_be_written_is_refused_before_the_work(llama: Path, tmp_path: Path, option: str) -> None:
    done = run("verify", llama, option, tmp_path / "absent" / "file")
    assert done.exit_code == 2 and f"{option}: cannot write" in done.stderr
