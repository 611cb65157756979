"""The app, its settings, and the one place where errors become sentences and exit codes."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from types import FrameType
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mismatchctl import __version__
from mismatchctl.cli import (
    advise,
    analyze,
    compare,
    convert,
    diagnose,
    gate,
    lint,
    metrics,
    presets,
    report,
    schema,
    sweep,
)
from mismatchctl.cli.output import say
from mismatchctl.cli.settings import read_settings
from mismatchctl.errors import EXIT_USAGE, MismatchctlError

EXIT_BROKEN_PIPE = 141
"""As a shell reports a process that a closed pipe has ended; 1 would say that there is a bug."""

_interrupted = threading.Event()


def _interrupt(number: int, frame: FrameType | None) -> None:
    _interrupted.set()
    signal.default_int_handler(number, frame)


class _Group(TyperGroup):
    """Turns errors that a user can cause into one sentence on stderr and their exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return self._invoke(ctx)
        except Exception:
            if _interrupted.is_set():  # in a callback of numba's compiler, which drops it and then fails otherwise
                raise KeyboardInterrupt from None
            raise

    def _invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
        except MismatchctlError as error:
            say(f"error: {error}")
            raise typer.Exit(error.exit_code) from None
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is loaded only where a device is used
                raise
            say("error: the GPU has no memory left: use fewer --threads, or --device cpu")
            raise typer.Exit(EXIT_USAGE) from None
        except BrokenPipeError:  # the reader of the pipe has gone: nobody is left to tell
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        return done


app = typer.Typer(
    name="mismatchctl",
    cls=_Group,
    help="The mismatch between rollout and training log-probs in RL for LLMs: measure it, see what corrections do.",
    epilog="Flags can be set in \\[tool.mismatchctl] of pyproject.toml, in mismatchctl.toml, "
    "or as MISMATCHCTL_<VERB>_<FLAG>.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("analyze")(analyze.analyze)
app.command("diagnose")(diagnose.diagnose)
app.command("sweep")(sweep.sweep)
app.command("advise")(advise.advise)
app.command("compare")(compare.compare)
app.command("gate")(gate.gate)
app.command("convert")(convert.convert)
app.command("report")(report.report)
app.command("schema")(schema.schema)
app.command("metrics")(metrics.metrics)
app.command("lint")(lint.lint)
app.add_typer(presets.app, name="presets")


def _version(wanted: bool) -> None:
    if wanted:
        from mismatchctl.result import FORMAT

        typer.echo(f"mismatchctl {__version__}, result format {FORMAT}")
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
    signal.signal(signal.SIGINT, _interrupt)
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # units already run in threads; small products only wait
    app()
