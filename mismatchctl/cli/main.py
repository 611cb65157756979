"""The app, its settings, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mismatchctl import __version__
from mismatchctl.cli import analyze, metrics, presets, report, schema
from mismatchctl.cli.settings import read_settings
from mismatchctl.errors import MismatchctlError


class _Group(TyperGroup):
    """Turns errors that a user can cause into one sentence on stderr and their exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except MismatchctlError as error:
            sentence = "".join(char if char.isprintable() else repr(char)[1:-1] for char in str(error))
            typer.echo(f"error: {sentence}", err=True)
            raise typer.Exit(error.exit_code) from None


app = typer.Typer(
    name="mismatchctl",
    cls=_Group,
    help="The mismatch between rollout and training log-probs in RL for LLMs: measure it, see what corrections do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("report")(report.report)
app.command("schema")(schema.schema)
app.command("metrics")(metrics.metrics)
app.add_typer(presets.app, name="presets")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"mismatchctl {__version__}")
        raise typer.Exit


@app.callback()
def _settings(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    ctx.default_map = read_settings(ctx.command)


def main() -> None:
    """Entry point of the command."""
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # units already run in threads; small products only wait
    try:
        app()
    except BrokenPipeError:  # the reader of a pipe has gone: nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
