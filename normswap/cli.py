"""The command line: parse, call, print, exit code. torch is imported only by the commands that need it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from normswap._version import __version__
from normswap.errors import NormswapError, ParityError

if TYPE_CHECKING:
    from normswap.parity import ParityReport

CommandT = TypeVar("CommandT", bound=Callable[..., Any])

_BACKENDS = click.Choice(["auto", "triton", "cpu", "interpret"])
_DTYPES = click.Choice(["float32", "float16", "bfloat16"])
_NEW_FILE = click.Path(dir_okay=False, path_type=Path)
_TEXT = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="normswap")
def main() -> None:
    """Swap every RMSNorm and LayerNorm of a Hugging Face model for a fused kernel, with measured parity.

    MODEL is a Hub id or a folder. Exit codes: 0 done, 1 parity failed (nothing saved), 2 bad usage or bad input.
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
        click.option("--dtype", type=_DTYPES, help="What the model is served in.  [the checkpoint's]"),
        click.option("--device", help="Where it runs, such as cpu or cuda:0.  [a GPU if there is one]"),
        click.option("--text", type=_TEXT, help="UTF-8 text to verify on.  [built-in prompts]"),
        click.option("--json", "json_file", type=_NEW_FILE, help="Write the measurements there."),
        click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings along."),
    ):
        command = option(command)
    return command


def _selecting(command: CommandT) -> CommandT:
    for option in (
        click.option("--include", multiple=True, metavar="GLOB", help="Swap only norms of this name."),
        click.option("--exclude", multiple=True, metavar="GLOB", help="Leave norms of this name alone."),
        click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub id."),
    ):
        command = option(command)
    return command


@main.command("inspect")
@click.argument("model")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, one entry for each norm.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that the checkpoint brings along.")
@_selecting
def inspect_command(model: str, as_json: bool, **options: Any) -> None:
    """Show what norms MODEL has and what would be done with each. Reads no weights."""
    with _errors():
        from normswap import api, report

        found = api.inspect(model, **options)
        if as_json:
            click.echo(json.dumps(found.to_dict(), indent=2))
        else:
            click.echo(report.render_inspection(found.plan.rows()))


@main.command("patch")
@click.argument("model")
@click.option("-o", "--out", required=True, type=click.Path(path_type=Path), help="Folder to be written.")
@click.option("--overwrite", is_flag=True, help="Replace a checkpoint that is there.")
@click.option("--no-verify", is_flag=True, help="Save without measuring parity.")
@_selecting
@_running
def patch_command(model: str, out: Path, no_verify: bool, json_file: Path | None, **options: Any) -> None:
    """Swap the norms of MODEL, measure parity, and save to OUT if it holds."""
    with _errors(json_file), _progress() as progress:
        from normswap import api

        done = api.convert(model, out, verify=not no_verify, progress=progress, **options)
    if done.report is not None:
        _show(done.report, json_file)
    swapped, found = len(done.plan.swaps), len(done.plan.decisions)
    click.echo(f"{swapped} of {found} norms swapped; saved to {done.out}")
    for row in done.plan.rows():
        if row["action"] == "refuse":
            click.echo(f"  left alone: {row['count']} x {row['pattern']} ({row['class']}): {row['reason']}")
    if done.report is None:
        click.echo("parity was not measured (--no-verify)")


@main.command("verify")
@click.argument("checkpoint")
@click.option("--against", metavar="MODEL", help="The original.  [the source that the manifest names]")
@click.option("--revision", metavar="R", help="Branch, tag or commit of a Hub id.")
@_running
def verify_command(checkpoint: str, json_file: Path | None, **options: Any) -> None:
    """Measure whether CHECKPOINT computes what the original computes."""
    with _errors(), _progress() as progress:
        from normswap import api

        report = api.verify(checkpoint, progress=progress, **options)
    _show(report, json_file)
    if not report.passed:
        sys.exit(ParityError.exit_code)


def _show(report: ParityReport, json_file: Path | None) -> None:
    from normswap.report import render

    click.echo(render(report, color=sys.stdout.isatty()))
    if json_file is not None:
        with _errors():
            _write_json(report, json_file)


def _write_json(report: ParityReport, json_file: Path) -> None:
    try:
        json_file.write_text(json.dumps(report.to_dict(), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise NormswapError(f"--json: cannot write {json_file}: {error.strerror}") from None


@contextmanager
def _errors(json_file: Path | None = None) -> Iterator[None]:
    """End with one line and the error's exit code; a user's mistake shows no traceback."""
    try:
        yield
    except ParityError as error:
        if error.report is not None:
            _show(error.report, json_file)
        _fail(error)
    except NormswapError as error:
        _fail(error)
    except KeyboardInterrupt:
        click.echo("normswap: interrupted; nothing was saved", err=True)
        sys.exit(130)


def _fail(error: NormswapError) -> None:
    click.echo(f"normswap: {' '.join(str(error).split())}", err=True)
    sys.exit(error.exit_code)


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """Yield a callback that draws one line on stderr; None where stderr is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return

    def draw(step: str, done: int, total: int) -> None:
        click.echo(f"\r\x1b[2K{step}: {100 * done // max(total, 1)}%", nl=False, err=True)

    try:
        yield draw
    finally:
        click.echo("\r\x1b[2K", nl=False, err=True)
