"""Command-line app: loads commands, reports errors and sets exit codes."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from functools import cache
from importlib import import_module
from typing import Annotated, Any

import typer

from mismatchctl.cli.help import HelpCommand, HelpGroup, declare_options
from mismatchctl.cli.output import print_message
from mismatchctl.cli.settings import has_settings, read_settings
from mismatchctl.core.formatting import format_command
from mismatchctl.errors import EXIT_CANNOT_JUDGE, EXIT_INTERRUPTED, EXIT_USAGE, MismatchctlError, messages_for
from mismatchctl.io import __version__
from mismatchctl.io.process import install_handlers, raise_if_received, signal_exit_code

PROGRAM_NAME = "mismatchctl"
COMMANDS = {
    "demo": "mismatchctl.cli.start", "init": "mismatchctl.cli.start",
    "analyze": "mismatchctl.cli.analyze", "diagnose": "mismatchctl.cli.reports", "sweep": "mismatchctl.cli.sweep",
    "advise": "mismatchctl.cli.reports", "compare": "mismatchctl.cli.reports", "gate": "mismatchctl.cli.gate",
    "watch": "mismatchctl.cli.analyze", "score": "mismatchctl.cli.dumps", "convert": "mismatchctl.cli.dumps",
    "report": "mismatchctl.cli.reports", "schema": "mismatchctl.cli.reference", "metrics": "mismatchctl.cli.reference",
    "lint": "mismatchctl.cli.reference", "doctor": "mismatchctl.cli.reference", "presets": "mismatchctl.cli.reference",
}  # fmt: skip
"""Command -> its module, in the order in which `mismatchctl --help` lists the commands."""
EXIT_BROKEN_PIPE = 141
"""Exit code if a reader such as `head` closes stdout: 128 + SIGPIPE, as in shells. 1 would look like a bug."""

_UsageError: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "UsageError")
"""Base class of typer's errors about wrong options, values and commands. typer does not export it."""
STDOUT_NAME = "stdout"

_LONG_WORD = re.compile(r"(\S{200})\S{300,}(\S{100})")
_MAX_ERROR_LENGTH = 1000
"""Maximum number of characters of an error message. The middle of a longer message is left out."""


class _NamedStdout(io.FileIO):
    """Standard output that adds the name `stdout` to write errors, so that they differ from errors of other files."""

    reader_closed = False

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            error.filename = STDOUT_NAME
            _NamedStdout.reader_closed |= isinstance(error, BrokenPipeError)
            raise


class _CommandGroup(HelpGroup):
    """A command group that prints user errors on stderr and exits with the exit code of the error."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        parameters: list[Any] = [one for command in self.commands.values() for one in command.params]
        for parameter in parameters:
            parameter.type_descriptor.parameter_info.readable = False  # skip typer's check: readers report errors

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args[:1] == ["help"]:
            args = [*args[1:], "--help"]
        flags: list[Any] = [one for one in self.get_params(ctx) if one.default is None]
        for flag in flags:  # also for --help, typer would import pydantic to validate None
            flag.default = False if flag.type_descriptor.annotation is bool else None
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise _report_usage_error(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with messages_for("command"):
                done = self._invoke(ctx)
            raise_if_received()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except Exception:
            if signal_exit_code() is not None:  # numba can turn an interrupt into another error
                raise self._interrupted() from None
            raise
        return done

    @staticmethod
    def _interrupted() -> typer.Exit:
        print_message("interrupted")
        return typer.Exit(signal_exit_code() or EXIT_INTERRUPTED)

    def _invoke(self, ctx: Any) -> Any:
        try:
            done = super().invoke(ctx)
            sys.stdout.flush()
        except _UsageError as error:
            raise _report_usage_error(error) from None
        except MismatchctlError as error:
            _print_error(_adapt_remedy(self.commands.get(ctx.invoked_subcommand), str(error)))
            raise typer.Exit(error.exit_code) from None
        except MemoryError:
            _print_error("out of memory; use fewer --threads, or set --memory-limit")
            raise typer.Exit(EXIT_USAGE) from None
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's error. Importing torch is slow
                raise
            _print_error("out of GPU memory; use fewer --threads, or --device cpu")
            raise typer.Exit(EXIT_USAGE) from None
        except BrokenPipeError:  # the process that reads stdout closed the pipe
            _discard_stdout()
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except OSError as error:
            raise typer.Exit(_report_os_error(error)) from None
        return done


_REMEDY_REPLACEMENTS = {
    "--on-bad": (r"with (--on-bad \w+)", r"with `mismatchctl analyze \1`"),
    "--column": (r"choose the right column with --column (\S+)=NAME", r"rename the right column to \1"),
}
"""Option -> (pattern, replacement), to rewrite remedies for commands that do not have this option."""


def _adapt_remedy(command: Any, sentence: str) -> str:
    flags = {flag for parameter in getattr(command, "params", ()) for flag in parameter.opts}
    for flag, (pattern, replacement) in _REMEDY_REPLACEMENTS.items():
        sentence = sentence if flag in flags else re.sub(pattern, replacement, sentence)
    return sentence


def _print_error(sentence: str) -> None:
    sentence = _LONG_WORD.sub(r"\1…\2", sentence)
    print_message(
        f"error: {sentence if len(sentence) <= _MAX_ERROR_LENGTH else f'{sentence[:700]} … {sentence[-200:]}'}"
    )


def _report_usage_error(error: Any) -> Exception:
    """Print a usage error in one line, or the help if the command got no arguments."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.ctx.get_help())
        return typer.Exit(EXIT_USAGE)
    text = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "")
    for pattern, replacement in _USAGE_REPLACEMENTS:
        text = re.sub(pattern, replacement, text)
    if (word := re.match("unknown command '(.+?)'", text)) and os.path.exists(word[1]):
        _print_error(f"{word[0]}; to analyze this dump, type: {format_command('analyze', [word[1]])}")
        return typer.Exit(EXIT_USAGE)
    _print_error(f"{text[:1].lower()}{text[1:]}; see {error.ctx.command_path if error.ctx else PROGRAM_NAME} -h")
    return typer.Exit(EXIT_USAGE)


_USAGE_REPLACEMENTS = (
    (r"^No such command ", "unknown command "),
    (r"^Got unexpected extra argument(?:s|\(s\))? \((.*)\)", r"unexpected argument \1"),
    (r"^Invalid value for '(--\S+)':", r"\1:"),
    (r"^No such option:? ", "unknown option "),
    (r"[.:]? Did you mean (.*?)\?$", r" (did you mean \1?)"),
    (r" \(Possible options: (--\S+?)(,.*)?\)$", r" (did you mean \1?)"),
    (r": Input should be a valid integer.*", r": expected a whole number"),
    (r": Input should be a valid number.*", r": expected a number"),
    (r": Input should be greater than or equal to", r": expected at least"),
    (r": Input should be less than or equal to", r": expected at most"),
    (r": Input should", ": it should"),
)
"""Pairs: a pattern in a message of the command-line parser, and the text that replaces it."""


def _report_os_error(error: OSError) -> int:
    reason = error.strerror or str(error)
    if error.filename == STDOUT_NAME:
        _discard_stdout()
        _print_error(f"{STDOUT_NAME} cannot be written: {reason}")
        return EXIT_USAGE
    _print_error(f"{error.filename or 'a file'}: {reason}")
    return EXIT_CANNOT_JUDGE


def _discard_stdout() -> None:
    """Redirect standard output to the null device, so that flushing the buffered text cannot fail."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_version(wanted: bool) -> None:
    if wanted:
        from mismatchctl.results.model import FORMAT

        typer.echo(f"mismatchctl {__version__}, result format {FORMAT}")
        raise typer.Exit


def _load_settings(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    if ctx.obj is not None:
        ctx.default_map = ctx.obj
        return
    settings = read_settings(ctx.command)
    ctx.default_map = {verb: {flag: value for flag, (value, _) in own.items()} for verb, own in settings.items()}


@cache
def build_app(*verbs: str) -> typer.Typer:
    app = typer.Typer(
        name=PROGRAM_NAME,
        cls=_CommandGroup,
        help="Measure the mismatch between rollout and trainer log-probs in RL for LLMs, and find its cause.",
        epilog="A dump is a file or folder with the log-probs of the same tokens from rollout and trainer. "
        "`mismatchctl init NAME` prints the code that records a dump. You can set the defaults of options in "
        "[tool.mismatchctl] of pyproject.toml, in mismatchctl.toml, or in an environment variable such as "
        "MISMATCHCTL_ANALYZE_ON_BAD=skip. `mismatchctl COMMAND --help` explains a command.",
        add_completion=True,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(_load_settings)
    for verb in verbs:
        command = getattr(import_module(COMMANDS[verb]), verb)
        if isinstance(command, typer.Typer):
            for inner in command.registered_commands:
                inner.cls = HelpCommand
            app.add_typer(command, name=verb, cls=HelpGroup)
        else:
            app.command(verb, cls=HelpCommand)(declare_options(verb)(command))
    return app


def __getattr__(name: str) -> typer.Typer:
    """Build the app with all commands when the attribute `app` of this module is accessed."""
    if name == "app":
        return build_app(*COMMANDS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    install_handlers()
    _reopen_closed_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # reader threads already use all cores
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # pydantic would search all packages for plugins
    try:
        verb = sys.argv[1:2]
        alone = verb and verb[0] in COMMANDS and not has_settings()  # to check settings, load all commands
        build_app(*(verb if alone else COMMANDS))(obj={} if alone else None)
    except OSError as error:  # raised while typer prints, for example if the disk is full
        sys.exit(_report_os_error(error))
    except SystemExit:
        if _NamedStdout.reader_closed:  # rich exits with 1 if the pipe closes while it prints help
            sys.exit(EXIT_BROKEN_PIPE)
        raise


def _reopen_closed_streams() -> None:
    """Connect closed standard streams to the null device. Otherwise, an opened file would act as stdout or stderr."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    if isinstance(sys.stdout, io.TextIOWrapper):
        raw, text = io.BufferedWriter(_NamedStdout(sys.stdout.fileno(), "w", closefd=False)), sys.stdout
        sys.stdout = io.TextIOWrapper(raw, text.encoding, text.errors, line_buffering=text.line_buffering)
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
