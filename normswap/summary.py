"""A parity report as markdown for a model card, and its place in a README."""

from __future__ import annotations

import contextlib
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from normswap.errors import OutputError
from normswap.gatetable import gate_table
from normswap.syncing import sync
from normswap.temporary import new_name
from normswap.wording import clean, few_sequences, headline

if TYPE_CHECKING:
    from normswap.figures import ParityReport

__all__ = ["to_markdown", "write_into_readme"]

_MARK = "normswap:verify"
_BEGIN, _END = f"<!-- {_MARK} begin -->", f"<!-- {_MARK} end -->"
# An underscore within a word is no markup; a scheme or a host would become a link.
_SPECIAL = re.compile(r"([\\`*{}\[\]<>#|~$&!@]|(?<![^\W_])_|_(?![^\W_])|:(?=//)|(?<=www)\.)")
# What the card lists before it counts the rest.
_REASONS = 10


def to_markdown(report: ParityReport) -> str:
    """Write what a model card should say of a verification: verdict, figures, and how to measure them again.

    Args:
        report: what was measured.

    Returns:
        Markdown under a heading of level 2, without HTML, ending in a newline.
    """
    other = report.against if report.against != report.checkpoint else ""
    # A card is read elsewhere: of a folder on this machine its name is enough.
    against = f" with {_code(Path(other).name if Path(other).is_absolute() else other)}" if other else ""
    version = f" {report.versions['normswap']}" if "normswap" in report.versions else ""
    lines = [
        f"## Parity{against}",
        "",
        f"**{report.verdict.upper()}**: {_text(headline(report))}. Measured by normswap{_text(version)}.",
        "",
    ]
    for label, reasons in (("", report.failures), ("in doubt: ", report.doubts)):
        lines += [f"- {label}{_text(reason)}" for reason in reasons[:_REASONS]]
        if len(reasons) > _REASONS:
            lines.append(f"- and {len(reasons) - _REASONS} more")
        lines += [""] if reasons else []
    table = gate_table(report, brief=True)
    head = ["gate", "state", *table.head[2:]]
    lines += [_row(head), _row(["---"] * len(head))]
    lines += [_row([_text(cell) for cell in row]) for row in table.rows]
    lines += ["", f"Inputs: {_text(report.inputs['description'])}.", ""]
    if few := few_sequences(report):
        lines += [f"The intervals rest on few sequences: {_text(few)}.", ""]
    if report.command:
        fence = "`" * max(3, _ticks(report.command) + 1)
        lines += ["To measure it again:", "", f"{fence}sh", clean(report.command), fence, ""]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _text(text: object) -> str:
    """Write words so that no letter of theirs is markup."""
    return _SPECIAL.sub(r"\\\1", clean(text))


def _code(text: str) -> str:
    """Write a name as code; a backtick in it gets longer ones around."""
    text = clean(text)
    fence = "`" * (_ticks(text) + 1)
    return f"{fence} {text} {fence}" if "`" in text else f"`{text}`"


def _ticks(text: str) -> int:
    return max((len(run) for run in re.findall("`+", text)), default=0)


def write_into_readme(folder: Path, markdown: str, *, sources: Iterable[Path] = ()) -> Path:
    """Put a summary into the README.md of a checkpoint, between two comments; the next one takes its place.

    All else in the file stays byte for byte as it is. The file is replaced as a whole or not at all.

    Args:
        folder: the checkpoint that the summary is about.
        markdown: what `to_markdown` returned.
        sources: folders that must not be written into: the original, and what was converted.

    Returns:
        The file.

    Raises:
        OutputError: the folder is not there, is one of the sources or lies in the Hub cache; its README.md is a
            link or has one of the two comments without the other; or it cannot be written.
    """
    folder = Path(folder)
    readme = folder / "README.md"
    _refuse(folder, readme, sources)
    try:
        before = readme.read_bytes() if readme.exists() else b""
        _replace(readme, _placed(before, markdown, readme))
    except OSError as error:
        raise OutputError(f"cannot write {readme}: {error.strerror}") from error
    return readme


def _refuse(folder: Path, readme: Path, sources: Iterable[Path]) -> None:
    if not folder.is_dir():
        raise OutputError(f"expected the folder of a checkpoint, got {folder}; give the folder whose README is meant")
    if any(Path(source).exists() and folder.samefile(source) for source in sources):
        raise OutputError(f"refusing to write into {folder}: it is the original; write the summary to a file instead")
    around = [folder.absolute(), *folder.absolute().parents, folder.resolve(), *folder.resolve().parents]
    if any((parent / "snapshots").is_dir() and (parent / "blobs").is_dir() for parent in around):
        raise OutputError(f"refusing to write into {folder}: it lies inside the Hub cache; copy the checkpoint first")
    if readme.is_symlink():
        raise OutputError(f"refusing to write {readme}: it is a link; put a file of its own in its place")
    if readme.exists() and not readme.is_file():
        raise OutputError(f"expected a file at {readme}, got something else; move it away")


def _placed(before: bytes, markdown: str, readme: Path) -> bytes:
    """Return the file with the summary in its place, in the file's own line ends."""
    # A name in the report may hold the mark, and would end the block for the next run.
    inside = markdown.replace(_MARK, _MARK.replace(":", "-")).strip("\n")
    line = b"\r\n" if b"\r\n" in before else b"\n"
    block = f"{_BEGIN}\n{inside}\n{_END}".encode("utf-8", "replace").replace(b"\n", line)
    begin, end = _BEGIN.encode(), _END.encode()
    counts = before.count(begin), before.count(end)
    if counts == (0, 0):
        gap = b"" if not before else line if before.endswith(b"\n") else line * 2
        return before + gap + block + line
    start, stop = before.find(begin), before.find(end)
    if counts != (1, 1) or stop < start:
        raise OutputError(
            f"expected one block between {_BEGIN} and {_END} in {readme}, got {counts[0]} and {counts[1]} of these "
            "comments; remove what is left of it"
        )
    return before[:start] + block + before[stop + len(end) :]


def _replace(readme: Path, content: bytes) -> None:
    temporary = readme.with_name(new_name())
    try:
        with temporary.open("xb") as file:
            file.write(content)
        if readme.exists():
            shutil.copymode(readme, temporary)
        sync(temporary)
        temporary.replace(readme)
        sync(readme.parent)
    finally:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
