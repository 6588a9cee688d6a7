"""The command line: parse, call, print, exit code. torch is imported only by the commands that need it."""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from normswap._version import __version__
from normswap.errors import NormswapError, OutputError, ParityError, UsageError
from normswap.progress import ProgressLine

if TYPE_CHECKING:
    from normswap.parity import ParityReport

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_BACKENDS = click.Choice(["auto", "triton", "cpu", "interpret"])
_DTYPES = click.Choice(["float32", "float16", "bfloat16"])
_TIED = click.Choice(["skip", "untie"])
_REFERENCES = click.Choice(["float32", "float64"])
_TEXT = click.Path(exists=True, dir_okay=False, path_type=Path)
_FILE = click.Path(path_type=Path)
# What verify writes, and the name of the option's value.
_REPORTS = {"--json": "json_file", "--report": "html_file", "--markdown": "markdown_file"}
_INTERNAL = 3
# What the progress line is drawn over with.
_CLEAR = "\r\x1b[2K"


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="normswap")
def main() -> None:
    """Swap every RMSNorm and LayerNorm of a Hugging Face model for a fused kernel, with measured parity.

    MODEL is a Hub id or a folder. Exit codes: 0 done, 1 parity failed (patch saves nothing then) or was left
    open, 2 bad usage or bad input, 3 internal error.
    """


def _choose_interpreter(context: click.Context, option: click.Parameter, backend: str) -> str:
    # Triton decides when it is first imported, which torch may do on its own, whether it interprets.
    if backend == "interpret":
        os.environ["TRITON_INTERPRET"] = "1"
    return backend


def _running(command: CommandT) -> CommandT:
    for option in (
        click.option(
            "--backend",
            type=_BACKENDS,
            default="auto",
            callback=_choose_interpreter,
            help="What runs the norms.  [auto]",
        ),
        click.option(
            "--dtype",
            type=_DTYPES,
            help="What both models are served in.  [the checkpoint's own]",
        ),
        click.option("--device", help="Where it runs, such as cpu or cuda:0.  [a GPU if there is one]"),
        click.option("--text", type=_TEXT, help="UTF-8 text to measure on.  [built-in prompts]"),
        click.option("--tokens", type=click.IntRange(min=1), help="Tokens to measure on in all.  [2048]"),
        click.option("--json", "json_file", type=_FILE, help="Write all measurements as JSON there."),
        click.option("--report", "html_file", type=_FILE, help="Write all measurements as an HTML page there."),
        click.option("--markdown", "markdown_file", type=_FILE, help="Write a summary for a model card there."),
        click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings along."),
    ):
        command = option(command)
    return command


def _selecting(command: CommandT) -> CommandT:
    for option in (
        click.option("--include", multiple=True, metavar="GLOB", help="Swap (and fold) only norms of this name."),
        click.option(
            "--exclude", multiple=True, metavar="GLOB", help="Leave norms of this name alone, and their gains."
        ),
        click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub id."),
    ):
        command = option(command)
    return command


@main.command("inspect")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one entry for each norm.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings along.")
@click.option("--fold", is_flag=True, help="Show also which gains would be folded into which weights.")
@click.option("--tied", type=_TIED, default="skip", help="As for patch --fold.  [skip]")
@_selecting
def inspect_command(model: str, as_json: bool, **options: Any) -> None:
    """Show what norms MODEL has and what would be done with each. Reads no weights."""
    with _errors():
        from normswap import api, overview

        if options["tied"] != "skip" and not options["fold"]:
            raise UsageError("--tied is about folding; add --fold, or leave it out")
        found = api.inspect(model, **options)
        _say(json.dumps(found.to_dict(), indent=2) if as_json else overview.render_plan(found.plan, found.folds))


@main.command("patch")
@click.argument("model")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to be written.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option("--no-verify", is_flag=True, help="Save without measuring parity.")
@click.option("--fold", is_flag=True, help="Fold gains into the linear weights that read them.")
@click.option(
    "--tied",
    type=_TIED,
    default="skip",
    help="With --fold, of a norm before a head tied to the embedding: leave its gain, or write the head as a tensor "
    "of its own.  [skip]",
)
@click.option("--quant-report", is_flag=True, help="With --fold: what it does to int8, int4 and fp8 rounding.")
@click.option("--max-memory", metavar="SIZE", help="Memory for writing, such as 512MB.  [about 100 MB]")
@click.option("--resume", is_flag=True, help="Keep finished files when interrupted, and go on from there.")
@click.option("--readme", is_flag=True, help="Put a summary of the measurements into OUT's README.md.")
@_selecting
@_running
def patch_command(model: str, out: Path, no_verify: bool, readme: bool, **options: Any) -> None:
    """Swap the norms of MODEL, fold their gains with --fold, measure parity, and save to OUT if it holds."""
    files = _files_of(options)
    with _errors(files, resumes=bool(options["resume"])):
        wanted = [flag for flag, file in files.items() if file is not None] + ["--readme"] * readme
        if no_verify and wanted:
            raise UsageError(
                f"{wanted[0]} writes the measurements, and --no-verify makes none; leave one of the two out"
            )
        _check_writable(files)
        from normswap import api

        with _progress() as progress:
            done = api.convert(model, out, verify=not no_verify, progress=progress, **options)
        with _written(done.report, files, out if readme else None):
            if done.report is not None:
                _show(done.report)
            from normswap.outcome import outcome_lines

            for line in outcome_lines(done):
                _say(line)


@main.command("verify")
@click.argument("checkpoint")
@click.option(
    "--against",
    metavar="MODEL",
    help="The original.  [the source that the manifest names, else CHECKPOINT itself]",
)
@click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub id.")
@click.option("--batch", type=click.IntRange(min=1), default=1, help="Sequences that run as one, padded.  [1]")
@click.option(
    "--generate",
    type=click.IntRange(min=0),
    default=0,
    metavar="N",
    help="Compare N tokens of greedy text after each prompt.",
)
@click.option("--reference", type=_REFERENCES, help="Arithmetic of the reference.  [finer than what is served]")
@click.option(
    "--max-memory", metavar="SIZE", help="Read layer by layer what needs more memory, such as 4GB.  [what is free]"
)
@click.option(
    "--bound",
    "bounds",
    multiple=True,
    metavar="NAME=VALUE",
    help="Judge by another bound, such as ratio_max=1.5; a wrong NAME lists them.",
)
@click.option("--readme", is_flag=True, help="Put the summary into CHECKPOINT's README.md.")
@click.option("-v", "--verbose", is_flag=True, help="Show every norm, layer and tensor.")
@click.option("-q", "--quiet", is_flag=True, help="Show one line.")
@_running
def verify_command(checkpoint: str, verbose: bool, quiet: bool, bounds: tuple[str, ...], **options: Any) -> None:
    """Measure whether CHECKPOINT computes what the original computes, and where it departs.

    CHECKPOINT is a folder or a Hub id. The verdict is pass, fail, or inconclusive, where the measurement cannot tell;
    the exit code is 0 for pass only. A checkpoint with a manifest runs with its norms swapped, one without as it is,
    unless --backend names one.
    """
    files, readme = _files_of(options), options.pop("readme")
    with _errors():
        _check_writable(files)
        if verbose and quiet:
            raise UsageError("--verbose and --quiet are opposites; leave one of the two out")
        from normswap import api, delivery, processes

        criterion = delivery.criterion_of(bounds)
        with processes.together(options["device"]):
            with _progress() as progress:
                report = api.verify(checkpoint, progress=progress, criterion=criterion, **options)
            steps: list[Callable[[], object]] = [lambda: _show(report, verbose=verbose, quiet=quiet)]
            if processes.is_first():
                steps += delivery.writers(report, files, checkpoint if readme else None)
            code = 0 if report.passed else ParityError.exit_code
            code = processes.same_everywhere(_in_turn(steps, code))
        processes.leave(code)


def _in_turn(steps: Sequence[Callable[[], object]], code: int) -> int:
    """Take every step, whatever becomes of the others; trouble is told, and a failed verdict stays the exit code."""
    trouble = 0
    for step in steps:
        try:
            step()
        except Exception as error:
            trouble = max(trouble, _tell(error))
    return code or trouble


def _show(report: ParityReport, *, verbose: bool = False, quiet: bool = False) -> None:
    from normswap.report import render

    _say(render(report, color=_is_terminal(sys.stdout), verbose=verbose, quiet=quiet))


def _files_of(options: dict[str, Any]) -> dict[str, Path | None]:
    """Take the files that a report goes to out of a command's options."""
    return {flag: options.pop(name) for flag, name in _REPORTS.items()}


@contextmanager
def _written(report: ParityReport | None, files: dict[str, Path | None], folder: Path | None) -> Iterator[None]:
    """Write the measurements after what is printed, even where nobody takes that."""
    try:
        yield
    finally:
        if report is not None:
            from normswap import delivery

            for write in delivery.writers(report, files, folder):
                write()


def _say(text: str) -> None:
    try:
        click.echo(text)
    except OSError as error:
        # What is left in the buffer would fail once more, loudly, when Python ends.
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise OutputError(f"cannot write to the standard output: {error.strerror}") from error


def _check_writable(files: dict[str, Path | None]) -> None:
    """Refuse, before any work, files that cannot be written after it, and two reports in one file."""
    taken: dict[Path, str] = {}
    for flag, file in files.items():
        if file is None:
            continue
        if (other := taken.setdefault(file.absolute(), flag)) != flag and (file.is_file() or not file.exists()):
            raise UsageError(f"{other} and {flag} both name {file}; give each a file of its own")
        try:
            reason = _unwritable(flag, file)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
        if reason is not None:
            raise UsageError(f"{flag}: cannot write {file}: {reason}")


def _unwritable(flag: str, file: Path) -> str | None:
    if file.is_dir():
        return "it is a folder"
    if file.exists():
        from normswap import delivery

        if delivery.spoils(flag, file):
            return "it is a file of a checkpoint; name a new one"
        return None if os.access(file, os.W_OK) else "no permission to write it"
    if not file.parent.is_dir():
        return f"there is no folder {file.parent}"
    return None if os.access(file.parent, os.W_OK | os.X_OK) else f"no permission to write into {file.parent}"


@contextmanager
def _errors(files: dict[str, Path | None] | None = None, *, resumes: bool = False) -> Iterator[None]:
    """End with one line and an exit code; neither a mistake nor a warning shows Python's own words."""
    with warnings.catch_warnings():
        warnings.showwarning = _one_line_each()
        try:
            yield
        except Exception as error:
            if isinstance(error, ParityError) and error.report is not None:
                from normswap import delivery

                report = error.report
                _in_turn([lambda: _show(report), *delivery.writers(report, files or {}, None)], error.exit_code)
            sys.exit(_tell(error))
        except KeyboardInterrupt:
            kept = "what is finished is kept, and the same command goes on" if resumes else "nothing was saved"
            click.echo(f"normswap: interrupted; {kept}", err=True)
            sys.exit(130)


def _one_line_each() -> Callable[..., None]:
    told = set()

    def show(message: Warning | str, *_: Any) -> None:
        text = " ".join(str(message).split())
        if text not in told:
            told.add(text)
            _complain(f"normswap: warning: {text}")

    return show


def _tell(error: Exception) -> int:
    """Say in one line what went wrong, and return the exit code for it."""
    if isinstance(error, NormswapError):
        _complain(f"normswap: {' '.join(str(error).split())}")
        return error.exit_code
    hint = " (set NORMSWAP_DEBUG=1 for the traceback)"
    if os.environ.get("NORMSWAP_DEBUG"):
        _complain("".join(traceback.format_exception(error)).rstrip())
        hint = ""
    first = next(iter(str(error).strip().splitlines()), "")
    _complain(f"normswap: internal error: {type(error).__name__}{': ' if first else ''}{first}{hint}")
    return _INTERNAL


def _complain(text: str) -> None:
    # With stderr gone there is nowhere to say so.
    with suppress(OSError):
        click.echo(f"{_CLEAR if _is_terminal(sys.stderr) else ''}{text}", err=True)


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback that draws one line on stderr; None where stderr is no terminal."""
    if not _is_terminal(sys.stderr):
        yield None
        return

    line = ProgressLine()

    def draw(step: str, done: int, total: int) -> None:
        click.echo(f"{_CLEAR}{line.text(step, done, total)}", nl=False, err=True)

    try:
        yield draw
    finally:
        click.echo(_CLEAR, nl=False, err=True)
