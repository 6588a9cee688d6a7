"""Write a report where it was asked for: as JSON, as a page, as a summary."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from normswap.errors import OutputError, UsageError
from normswap.figures import Criterion, ParityReport

__all__ = ["criterion_of", "spoils", "writers"]


def criterion_of(bounds: Iterable[str]) -> Criterion | None:
    """Read bounds as the command line gives them, such as ``"ratio_max=1.5"``.

    Args:
        bounds: names of `Criterion` with their values.

    Returns:
        The criterion with these bounds; None without any.

    Raises:
        UsageError: a name is not known, or a value is no number of its kind.
    """
    known = asdict(Criterion())
    given: dict[str, float | int] = {}
    for bound in bounds:
        name, equals, value = bound.partition("=")
        name = name.strip()
        if not equals or name not in known:
            raise UsageError(f"--bound: expected NAME=VALUE with a name among {', '.join(known)}, got {bound!r}")
        kind = type(known[name])
        try:
            number = kind(value)
        except ValueError:
            raise UsageError(f"--bound: expected {name} as {kind.__name__}, got {value!r}") from None
        if not 0 <= number < float("inf"):
            raise UsageError(f"--bound: expected {name} to be a number of at least 0, got {value!r}")
        if name == "bootstrap" and number < 1:
            raise UsageError(f"--bound: expected bootstrap to be at least one resampling, got {value!r}")
        given[name] = number
    return replace(Criterion(), **given) if given else None  # type: ignore[arg-type]


def spoils(flag: str, file: Path) -> bool:
    """Say whether writing a report would overwrite a file of a checkpoint, such as its weights or its README.md.

    Args:
        flag: the option of the command line that asks for the report.
        file: where it would be written.

    Returns:
        Whether the file stands in a folder with a ``config.json`` and is no earlier report of that form.
    """
    if not any((place.parent / "config.json").exists() for place in (file, file.resolve())) or not file.is_file():
        return False
    if flag != "--json":
        with file.open("rb") as opened:
            start = opened.read(1 << 16).lstrip().lower()
        return not (start.startswith(b"<!doctype html") if flag == "--report" else b"normswap verify" in start) or (
            file.resolve().stem.lower() == "readme"
        )
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return True
    return not isinstance(data, dict) or not {"schema", "verdict"} <= data.keys()


def writers(
    report: ParityReport, files: Mapping[str, Path | None], folder: str | Path | None
) -> list[Callable[[], object]]:
    """Return what writes each form of a report that was asked for.

    Args:
        report: what is written.
        files: where to, by the option of the command line: ``--json``, ``--report`` (a page), ``--markdown``.
        folder: checkpoint whose README.md gets the summary; None for none.

    Returns:
        Functions that raise `OutputError` where a file cannot be written.
    """
    found: list[Callable[[], object]] = []
    for flag, file in files.items():
        if file is not None:
            found.append(partial(_write, flag, file, _FORMS[flag], report))
    if folder is not None:
        found.append(partial(_into_readme, report, Path(folder)))
    return found


def _write(flag: str, file: Path, form: Callable[[ParityReport], str], report: ParityReport) -> None:
    text = form(report)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutputError(f"{flag}: cannot write {file}: {error.strerror}") from None


def _as_json(report: ParityReport) -> str:
    return json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n"


def _as_page(report: ParityReport) -> str:
    from normswap.page import to_html

    return to_html(report)


def _as_markdown(report: ParityReport) -> str:
    from normswap.summary import to_markdown

    return to_markdown(report)


_FORMS = {"--json": _as_json, "--report": _as_page, "--markdown": _as_markdown}


def _into_readme(report: ParityReport, folder: Path) -> None:
    from normswap.summary import to_markdown, write_into_readme

    if not folder.is_dir():
        raise UsageError(f"--readme: expected a folder to write README.md into, got {str(folder)!r}")
    sources = [Path(report.against)] if report.against and Path(report.against).is_dir() else []
    write_into_readme(folder, to_markdown(report), sources=sources)
