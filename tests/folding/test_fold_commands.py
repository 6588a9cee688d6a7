"""Folding on the command line: what is printed, written and refused."""

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


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(tiny_llama(tie_word_embeddings=True), tmp_path_factory.mktemp("models") / "tied")


def test_patch_says_what_was_folded_and_what_was_not(tied: Path, tmp_path: Path) -> None:
    done = run("patch", tied, "-o", tmp_path / "out", "--fold", "--quant-report", "--max-memory", "64MB")
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert "4 of 5 gains folded into 10 weights" in lines
    assert any(line.startswith("  before rounding, folded and original differ by at most ") for line in lines)
    assert any(line.startswith("  gain kept: 1 x model.norm: lm_head.weight is tied") for line in lines)
    assert any(line.startswith("all folded weights ") for line in lines)
    assert any(line.startswith("power") and "4 of 4" in line for line in lines)


def test_patch_unties_when_asked(tied: Path, tmp_path: Path) -> None:
    done = run("patch", tied, "-o", tmp_path / "out", "--fold", "--tied", "untie", "--json", tmp_path / "parity.json")
    assert done.exit_code == 0, done.output
    assert "5 of 5 gains folded into 11 weights" in done.stdout
    control = json.loads((tmp_path / "parity.json").read_text())["logits"]["control"]
    assert control["detected"] and control["ratio"] > 1.25
    checked = run("verify", tmp_path / "out")
    assert checked.exit_code == 0 and checked.stdout.startswith("PASS"), checked.output


def test_inspect_lists_folds_and_reasons(tied: Path) -> None:
    shown = run("inspect", tied, "--fold")
    assert shown.exit_code == 0, shown.output
    assert "  model.layers.*.input_layernorm  (2)\n      into model.layers.*.self_attn.k_proj.weight," in shown.stdout
    assert "gains that stay\n  model.norm  (1)\n      lm_head.weight is tied to the embedding" in shown.stdout
    assert "4 of 5 gains to fold into 10 weights" in shown.stdout
    data = json.loads(run("inspect", tied, "--fold", "--json", "--tied", "untie").stdout)
    assert {norm["fold"]["action"] for norm in data["norms"]} == {"fold"}
    assert [norm["fold"]["consumers"] for norm in data["norms"] if norm["fold"]["untie"]] == [["lm_head.weight"]]
    assert "fold" not in json.loads(run("inspect", tied, "--json").stdout)["norms"][0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--tied", "untie"], "add --fold"),
        (["--quant-report"], "add --fold"),
        (["--fold", "--max-memory", "much"], "much"),
        (["--fold", "--max-memory", "1KB"], "expected at least"),
        (["--fold", "--include", "*.nothing"], "matches no norm"),
    ],
)
def test_bad_options_are_one_line_and_write_nothing(tied: Path, tmp_path: Path, options: list[str], words: str) -> None:
    done = run("patch", tied, "-o", tmp_path / "out", *options)
    assert done.exit_code == 2
    assert words in done.stderr and len(done.stderr.splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_what_is_excluded_keeps_its_gain(tied: Path, tmp_path: Path) -> None:
    done = run("patch", tied, "-o", tmp_path / "out", "--fold", "--exclude", "*post_attention*", "--no-verify")
    assert done.exit_code == 0, done.output
    assert "2 of 5 gains folded into 6 weights" in done.stdout
    assert "  gain kept: 2 x model.layers.*.post_attention_layernorm: excluded by name" in done.stdout


def test_inspect_takes_no_option_of_folding_without_it(tied: Path) -> None:
    done = run("inspect", tied, "--tied", "untie")
    assert done.exit_code == 2 and "add --fold" in done.stderr
