"""The command line as a person meets it: words, exit codes, no traceback."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result
from tiny_checkpoints import saved, tiny_llama
from transformers import DacConfig, DacModel, ResNetConfig, ResNetModel

from normswap import __version__, api, execution
from normswap.cli import main

pytestmark = pytest.mark.core


def run(*arguments: object) -> Result:
    result = CliRunner().invoke(main, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_llama(), tmp_path_factory.mktemp("llama"))


def assert_one_line(result: Result, words: str) -> None:
    """One line on stderr, nothing on stdout, exit code 2."""
    assert result.exit_code == 2
    assert result.stdout == ""
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("normswap: ")
    assert re.search(words, lines[0]), lines[0]


def test_version_and_help_do_not_import_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from normswap.cli import main\n"
        "for flag in ('--help', '--version'): assert CliRunner().invoke(main, [flag]).exit_code == 0\n"
        "assert not {'torch', 'transformers', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert __version__ in run("--version").stdout
    words = " ".join(run("--help").stdout.split())
    assert "0 done, 1 parity failed (patch saves nothing then) or was left open, 2 bad usage or bad input" in words


def test_inspect_prints_a_table_or_json(llama: Path) -> None:
    table = run("inspect", llama)
    assert table.exit_code == 0
    assert re.search(r"model\.layers\.\*\.input_layernorm +LlamaRMSNorm +2 +swap", table.stdout)
    data = json.loads(run("inspect", llama, "--json").stdout)
    assert set(data) == {"model", "model_type", "norms", "functions"}
    assert {norm["action"] for norm in data["norms"]} == {"swap"}


def test_inspect_honours_the_selection(llama: Path) -> None:
    data = json.loads(run("inspect", llama, "--json", "--exclude", "*input*").stdout)
    assert [norm["reason"] for norm in data["norms"] if norm["action"] == "refuse"] == ["excluded by name"] * 2


def test_patch_saves_and_reports_then_verify_passes(llama: Path, tmp_path: Path) -> None:
    out, report = tmp_path / "out", tmp_path / "report.json"
    done = run("patch", llama, "-o", out, "--dtype", "bfloat16", "--json", report, "--exclude", "model.norm")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.startswith("PASS")
    assert f"4 of 5 norms swapped; saved to {out}" in done.stdout
    assert "left alone: 1 x model.norm (LlamaRMSNorm): excluded by name" in done.stdout
    data = json.loads(report.read_text())
    assert data["verdict"] == "pass"
    assert len(data["norms"]) == 4
    again = run("verify", out, "--dtype", "bfloat16", "--json", report)
    assert again.exit_code == 0
    assert {"verdict", "device", "backend", "dtype", "reference_dtype", "inputs", "criterion"} <= set(
        json.loads(report.read_text())
    )


def test_patch_without_verification_says_so(llama: Path, tmp_path: Path) -> None:
    done = run("patch", llama, "-o", tmp_path / "out", "--no-verify")
    assert done.exit_code == 0
    assert "parity was not measured" in done.stdout
    assert json.loads((tmp_path / "out" / "normswap.json").read_text())["parity"] is None


def test_failed_parity_exits_with_1_saves_nothing_and_still_writes_the_figures(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = execution._OPERATIONS["rms"]
    monkeypatch.setitem(execution._OPERATIONS, "rms", lambda *a, eps, **k: right(*a, eps=eps + 0.1, **k))
    done = run("patch", llama, "-o", tmp_path / "out", "--json", tmp_path / "report.json")
    assert done.exit_code == 1
    assert done.stdout.startswith("FAIL")
    assert "parity failed, so nothing was saved" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["report.json"]
    assert json.loads((tmp_path / "report.json").read_text())["verdict"] == "fail"
    assert run("verify", llama).exit_code == 1


def test_text_is_read_through_the_tokenizer(stories260k: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a little girl who liked to count. " * 60)
    done = run("verify", stories260k, "--text", text, "--dtype", "bfloat16")
    assert done.exit_code == 0, done.stdout + done.stderr
    assert "text.txt" in done.stdout
    text.write_text("")
    assert_one_line(run("verify", stories260k, "--text", text), "text.txt")


def test_no_such_folder(tmp_path: Path) -> None:
    assert_one_line(run("inspect", tmp_path / "absent"), "no such folder")
    assert_one_line(run("patch", "./absent", "-o", tmp_path / "out"), "no such folder")
    assert_one_line(run("verify", "./absent"), "no such folder")


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert_one_line(run("patch", tmp_path, "-o", tmp_path.parent / "out"), r"config\.json")


def test_a_truncated_shard(llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in llama.iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    whole = (llama / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(whole[:-100])
    result = run("patch", source, "-o", tmp_path / "out")
    assert_one_line(result, rf"model\.safetensors.*{len(whole):,}|model\.safetensors.*{len(whole)}")
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists(llama: Path, tmp_path: Path) -> None:
    assert_one_line(run("patch", llama, "-o", tmp_path), "exists")
    assert list(tmp_path.iterdir()) == []


def test_a_model_with_no_norm(tmp_path: Path) -> None:
    config = DacConfig(
        encoder_hidden_size=8,
        downsampling_ratios=[2],
        decoder_hidden_size=16,
        n_codebooks=1,
        codebook_size=8,
        codebook_dim=4,
    )
    source = saved(DacModel(config), tmp_path / "source")
    assert_one_line(run("patch", source, "-o", tmp_path / "out"), "at least one RMSNorm or LayerNorm, found none")
    assert not (tmp_path / "out").exists()


def test_a_model_whose_norms_are_all_of_another_kind(tmp_path: Path) -> None:
    config = ResNetConfig(embedding_size=8, hidden_sizes=[8], depths=[1], layer_type="basic")
    source = saved(ResNetModel(config), tmp_path / "source")
    result = run("patch", source, "-o", tmp_path / "out")
    said = "found none .3 modules are no norms of rows: .*BatchNorm2d normalises over the batch.*; nothing was changed"
    assert_one_line(result, said)


def test_a_backend_that_cannot_run_here(llama: Path, tmp_path: Path) -> None:
    assert_one_line(run("patch", llama, "-o", tmp_path / "out", "--backend", "triton", "--device", "cpu"), "triton")


def test_an_unknown_model_type(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "klingon"}')
    assert_one_line(run("inspect", tmp_path), "klingon")


def test_bad_usage_is_clicks_own_exit_code(tmp_path: Path) -> None:
    assert run("patch", "somewhere").exit_code == 2
    assert run("patch", "somewhere", "-o", tmp_path, "--backend", "warp").exit_code == 2


def test_an_unwritable_json_file_is_told_before_any_work(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("convert", "verify"):
        monkeypatch.setattr(api, name, lambda *_, **__: pytest.fail("worked"))
    out = tmp_path / "out"
    for file in (tmp_path / "no" / "such.json", tmp_path, llama / "config.json" / "x.json", tmp_path / ("x" * 300)):
        assert_one_line(run("patch", llama, "-o", out, "--json", file), "--json: cannot write")
        assert_one_line(run("verify", llama, "--json", file), "--json: cannot write")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert_one_line(run("patch", llama, "-o", out, "--json", tmp_path / "x.json"), "no permission to write")
    assert list(tmp_path.iterdir()) == []


def test_a_json_file_that_fails_late_hides_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run("patch", llama, "-o", tmp_path / "out", "--json", "/dev/full")
    assert done.exit_code == 2
    assert f"5 of 5 norms swapped; saved to {tmp_path / 'out'}" in done.stdout
    assert done.stderr.splitlines() == ["normswap: --json: cannot write /dev/full: No space left on device"]
    right = execution._OPERATIONS["rms"]
    monkeypatch.setitem(execution._OPERATIONS, "rms", lambda *a, eps, **k: right(*a, eps=eps + 0.1, **k))
    for failed in (
        run("patch", llama, "-o", tmp_path / "other", "--json", "/dev/full"),
        run("verify", llama, "--json", "/dev/full"),
    ):
        assert failed.exit_code == 1
        assert failed.stdout.startswith("FAIL")
        assert "--json: cannot write /dev/full" in failed.stderr


def test_there_is_no_json_without_verification(tmp_path: Path) -> None:
    done = run("patch", "./absent", "-o", tmp_path / "out", "--no-verify", "--json", tmp_path / "x.json")
    assert_one_line(done, "--json .*--no-verify")


def test_an_internal_error_is_one_line_and_exits_with_3(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("first line\nsecond line")

    monkeypatch.delenv("NORMSWAP_DEBUG", raising=False)
    for name in ("inspect", "convert", "verify"):
        monkeypatch.setattr(api, name, fail)
    words = "normswap: internal error: RuntimeError: first line"
    for done in (run("inspect", llama), run("patch", llama, "-o", llama / "out"), run("verify", llama)):
        assert done.exit_code == 3
        assert done.stderr == f"{words} (set NORMSWAP_DEBUG=1 for the traceback)\n"
    monkeypatch.setenv("NORMSWAP_DEBUG", "1")
    done = run("verify", llama)
    assert done.exit_code == 3
    assert "Traceback" in done.stderr and done.stderr.splitlines()[-1] == words


@pytest.mark.parametrize("closed", [True, False])
def test_an_output_that_nobody_takes_is_one_line(llama: Path, closed: bool) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    full = os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "normswap", "inspect", str(llama)]
    done = subprocess.run(command, stdout=writer if closed else full, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    os.close(full)
    reason = "Broken pipe" if closed else "No space left on device"
    assert done.stderr == f"normswap: cannot write to the standard output: {reason}\n"
    assert done.returncode == 2


def test_the_measurements_are_written_even_where_nobody_takes_the_table(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, err: bool = False, **__: object) -> None:
        if not err:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(click, "echo", full)
    assert run("patch", llama, "-o", tmp_path / "out", "--json", tmp_path / "1.json").exit_code == 2
    assert run("verify", llama, "--json", tmp_path / "2.json").exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1.json", "2.json", "out"]


@pytest.mark.filterwarnings("default")
def test_a_warning_is_one_line(llama: Path) -> None:
    done = run("inspect", llama, "--exclude", "nothing")
    assert done.exit_code == 0
    assert done.stderr == "normswap: warning: exclude pattern 'nothing' matches no norm\n"


def test_an_empty_name_and_a_device_that_is_not_there(llama: Path, tmp_path: Path) -> None:
    assert_one_line(run("patch", "", "-o", tmp_path / "out"), "got '': no such folder")
    for device in ("cpu:3", "hpu", "mps", "xla"):
        assert_one_line(run("verify", llama, "--device", device), f"torch can use here, got '{device}'")


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_answers_at_once(flag: str) -> None:
    """No clock is asserted: what takes long is importing, and these two import nothing heavy (see above)."""
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "normswap", flag], capture_output=True, text=True)
    print(f"normswap {flag}: {time.perf_counter() - start:.2f} s")
    assert done.returncode == 0, done.stderr
