"""The summary for a model card, and its place in a README."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
from example_reports import EXAMPLES, HOSTILE, failing, hostile, inconclusive, passing

from normswap.errors import OutputError
from normswap.summary import to_markdown, write_into_readme

pytestmark = pytest.mark.core

CARD = b"---\nlicense: apache-2.0\ntags:\n- x\n---\n# A model\n\nText \xff that is no UTF-8.\n"
BLOCK = re.compile(rb"<!-- normswap:verify begin -->.*<!-- normswap:verify end -->", re.DOTALL)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_summary_is_a_heading_a_verdict_and_one_table(name: str) -> None:
    report = EXAMPLES[name]()
    lines = to_markdown(report).splitlines()
    assert lines[0].startswith("## Parity") and sum(line.startswith("#") for line in lines) == 1
    assert lines[2].startswith(f"**{report.verdict.upper()}**: ")
    rows = [line for line in lines if line.startswith("|")]
    assert rows[1] == "| --- | --- | --- | --- | --- |"
    # A pipe that is none of the table's is escaped.
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}
    first, last = lines.index(rows[0]), lines.index(rows[-1])
    assert lines[first : last + 1] == rows and len(lines) < 60


def test_a_summary_holds_the_figures_and_the_command() -> None:
    text = to_markdown(passing())
    for words in ("1.004", "0.981 to 1.026", "60 gains folded into 210 linears", "\n```sh\nnormswap verify ./smollm2"):
        assert words in text
    assert "model.layers.3.input_layernorm" in text
    text = to_markdown(failing())
    assert "- exact: error 0.0304 above 1e-05" in text and "model.layers.4" in text
    assert "- in doubt: power: " in to_markdown(inconclusive()) and "3 sequences only" in to_markdown(inconclusive())


def test_no_name_is_markup() -> None:
    text = to_markdown(hostile())
    prose = re.sub(r"(?ms)^(`{3,})sh\n.*?^\1$", "", text)
    prose = re.sub(r"(`+) .*? \1", "", prose)
    assert not re.search(r"(?<!\\)[<>`|*\[\]]", re.sub(r"(?m)^\|.*|\*\*FAIL\*\*", "", prose))
    assert "\x1b" not in text and "\u202e" not in text
    fence = re.search(r"(?m)^(`+)sh$", text)
    assert fence is not None and fence[1] not in text.split(f"{fence[1]}sh\n")[1].split(f"\n{fence[1]}\n")[0]


@pytest.mark.parametrize(
    ("against", "heading"),
    [
        ("owner/model", "## Parity with `owner/model`"),
        ("/home/someone/model", "## Parity with `model`"),
        ("./smollm2-folded", "## Parity"),
        ("", "## Parity"),
    ],
)
def test_the_heading_names_the_original_as_others_know_it(against: str, heading: str) -> None:
    assert to_markdown(replace(passing(), against=against)).splitlines()[0] == heading


def test_a_command_cannot_end_its_block() -> None:
    report = replace(passing(), command="normswap verify '```'")
    assert "\n````sh\nnormswap verify '```'\n````\n" in to_markdown(report)


def test_an_underscore_in_a_word_stays_as_it_is_and_links_are_none() -> None:
    report = passing()
    host, scheme = "w" * 3, "x:"
    report.inputs["description"] = f"a_b _c_ see {host}.example and {scheme}//y by @someone"
    text = to_markdown(report)
    assert f"a_b \\_c\\_ see {host}\\.example and x\\:{'/' * 2}y by \\@someone" in text


@pytest.mark.parametrize("card", [b"", CARD, CARD.rstrip(b"\n"), CARD.replace(b"\n", b"\r\n"), b"\xef\xbb\xbf# x\n"])
def test_a_readme_keeps_all_else_byte_for_byte(card: bytes, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    if card:
        readme.write_bytes(card)
        readme.chmod(0o640)
    assert write_into_readme(tmp_path, to_markdown(failing())) == readme
    first = readme.read_bytes()
    assert first.startswith(card) and b"**FAIL**" in first
    assert (b"\n" in first.replace(b"\r\n", b"")) == (b"\r\n" not in card)
    if card:
        assert readme.stat().st_mode & 0o777 == 0o640
    after = b"\r\n\r\n## More\r\n\xfe"
    readme.write_bytes(first + after)
    write_into_readme(tmp_path, to_markdown(passing()))
    second = readme.read_bytes()
    assert b"**PASS**" in second and b"**FAIL**" not in second
    assert BLOCK.sub(b"", second).replace(b"\r", b"") == BLOCK.sub(b"", first + after).replace(b"\r", b"")
    assert second.startswith(card) and second.endswith(after)
    write_into_readme(tmp_path, to_markdown(passing()))
    assert readme.read_bytes() == second
    assert [file.name for file in tmp_path.iterdir()] == ["README.md"]


def test_a_new_readme_may_be_read_by_whom_the_mask_lets(tmp_path: Path) -> None:
    mask = os.umask(0o022)
    try:
        readme = write_into_readme(tmp_path, "## x\n")
    finally:
        os.umask(mask)
    assert readme.stat().st_mode & 0o777 == 0o644


def test_a_name_cannot_end_the_block(tmp_path: Path) -> None:
    text = "## x\n\n`<!-- normswap:verify end -->`\n"
    write_into_readme(tmp_path, text)
    readme = write_into_readme(tmp_path, text)
    assert readme.read_bytes().count(b"normswap:verify") == 2


@pytest.mark.parametrize(
    "text",
    [
        b"<!-- normswap:verify begin -->\n",
        b"<!-- normswap:verify end -->\n<!-- normswap:verify begin -->\n",
        b"<!-- normswap:verify begin --><!-- normswap:verify end -->" * 2,
    ],
)
def test_half_a_block_is_left_for_a_person(text: bytes, tmp_path: Path) -> None:
    (tmp_path / "README.md").write_bytes(text)
    with pytest.raises(OutputError, match=r"expected one block between .* remove what is left"):
        write_into_readme(tmp_path, "## x\n")
    assert (tmp_path / "README.md").read_bytes() == text


def test_neither_a_source_nor_the_hub_cache_is_written(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs = tmp_path / "models--a--b" / "blobs"
    for folder in (snapshot, blobs, tmp_path / "source", tmp_path / "out"):
        folder.mkdir(parents=True)
    (blobs / "card").write_bytes(CARD)
    (snapshot / "README.md").symlink_to(blobs / "card")
    (tmp_path / "out" / "README.md").symlink_to(blobs / "card")
    (tmp_path / "alias").symlink_to(snapshot)
    for folder, words in (
        (snapshot, "inside the Hub cache"),
        (tmp_path / "alias", "inside the Hub cache"),
        (tmp_path / "source", "it is the original"),
        (tmp_path / "out", "it is a link"),
        (tmp_path / "none", "expected the folder"),
    ):
        with pytest.raises(OutputError, match=words):
            write_into_readme(folder, "## x\n", sources=[tmp_path / "source" / "..", tmp_path / "source"])
    assert (blobs / "card").read_bytes() == CARD
    assert list((tmp_path / "source").iterdir()) == []


def test_a_readme_that_another_name_shares_is_not_changed_under_that_name(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "README.md").write_bytes(CARD)
    (tmp_path / "b").mkdir()
    os.link(tmp_path / "a" / "README.md", tmp_path / "b" / "README.md")
    write_into_readme(tmp_path / "b", to_markdown(hostile()))
    assert (tmp_path / "a" / "README.md").read_bytes() == CARD
    assert HOSTILE.encode() not in (tmp_path / "b" / "README.md").read_bytes()


def test_what_cannot_be_written_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "README.md").write_bytes(CARD)

    def full(self: Path, target: Path) -> Path:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_into_readme(tmp_path, "## x\n")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("README.md", CARD)]
