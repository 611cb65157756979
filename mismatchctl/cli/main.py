"""Command-line app: commands, settings, and errors as sentences with exit codes."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from mismatchctl.cli.output import print_message
from mismatchctl.errors import (
    EXIT_CANNOT_JUDGE,
    EXIT_INTERRUPTED,
    EXIT_USAGE,
    ConfigError,
    MismatchctlError,
    messages_for,
    suggestion,
)
from mismatchctl.io import signals
from mismatchctl.io.version import __version__
from mismatchctl.io.yaml import read_data

Settings = dict[str, dict[str, Any]]
"""Defaults by verb and flag."""
VARIABLE_PREFIX = "MISMATCHCTL_"


def read_settings(group: Any) -> Settings:
    """Defaults of each verb of `group`, by the names of its flags.

    Raises:
        ConfigError: the file is not TOML, or names a verb or a flag that does not exist.
    """
    chosen = read_settings_with_origins(group)
    return {verb: {flag: value for flag, (value, _) in of_verb.items()} for verb, of_verb in chosen.items()}


def read_settings_with_origins(group: Any) -> dict[str, dict[str, tuple[Any, str]]]:
    """The same, each with where it comes from: a variable, or a file and the key in it."""
    flags = {verb: {param.name: param for param in command.params} for verb, command in group.commands.items()}
    settings: dict[str, dict[str, tuple[Any, str]]] = {verb: {} for verb in flags}
    for where, verbs, name, value in (*_entries_from_file(flags), *_entries_from_environment(flags)):
        known = {param for verb in verbs for param in flags[verb]}
        if name not in known:
            raise ConfigError(
                f"{where}: no such flag{suggestion(name, known if len(verbs) == 1 else known.union(verbs))}"
            )
        for verb in verbs:
            if name in flags[verb]:
                settings[verb][name] = _convert_value(value, flags[verb][name], where), where
    return settings


def has_settings() -> bool:
    """Whether a file or a variable sets anything, or may: one that cannot be read has an error to be told."""
    try:
        return any(name.startswith(VARIABLE_PREFIX) for name in os.environ) or bool(_find_settings_file()[1])
    except (MismatchctlError, OSError):
        return True


def find_unread_variables(group: Any) -> list[str]:
    """Variables that look like settings and name no verb, so that nothing reads them."""
    prefixes = tuple(f"{VARIABLE_PREFIX}{verb.upper()}_" for verb in group.commands)
    return sorted(name for name in os.environ if name.startswith(VARIABLE_PREFIX) and not name.startswith(prefixes))


SettingEntry = tuple[str, list[str], str, Any]
"""(where it stands, verbs, flag, value)."""


def _entries_from_file(flags: Mapping[str, Any]) -> Iterator[SettingEntry]:
    path, data = _find_settings_file()
    for key, value in data.items():  # general keys first, so that a verb's own prevail
        if not (key in flags and isinstance(value, dict)):
            yield f"{path}: {key}", list(flags), key.replace("-", "_"), value
    for verb in flags:
        table = data.get(verb)
        for key, value in table.items() if isinstance(table, dict) else ():
            yield f"{path}: {verb}.{key}", [verb], key.replace("-", "_"), value


def _entries_from_environment(flags: Mapping[str, Any]) -> Iterator[SettingEntry]:
    variables = sorted((name, text) for name, text in os.environ.items() if name.startswith(VARIABLE_PREFIX))
    for verb in flags:
        prefix = f"{VARIABLE_PREFIX}{verb.upper()}_"
        for variable, text in variables:
            if variable.startswith(prefix) and text:
                yield variable, [verb], variable.removeprefix(prefix).lower(), text


def _convert_value(value: Any, param: Any, where: str) -> Any:
    """A value as the flag takes it: several where it repeats, mappings as text."""
    if not getattr(param, "multiple", False):
        if isinstance(value, (list, dict)):
            raise ConfigError(f"{where}: takes one value, not several")
        return value
    if isinstance(value, str):
        return [value] if value.lstrip().startswith("{") else value.split()
    if isinstance(value, dict):  # columns = {train_log_probs = "old_log_probs"}
        return [f"{key}={name}" for key, name in value.items()]
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, list) for item in items):
        raise ConfigError(f"{where}: takes a list of values, not of lists")
    return [json.dumps(item) if isinstance(item, dict) else item for item in items]


def _find_settings_file() -> tuple[Path | None, dict[str, Any]]:
    """The first file from here upwards that has settings, and its tables."""
    try:
        here = Path.cwd()
    except OSError:  # the folder is gone
        return None, {}
    for folder in (here, *here.parents):
        own, project = folder / "mismatchctl.toml", folder / "pyproject.toml"
        if own.is_file():
            return own, read_data(own)
        tools = read_data(project).get("tool") if project.is_file() else None
        settings = tools.get("mismatchctl") if isinstance(tools, dict) else None
        if isinstance(settings, dict) and settings:
            return project, settings
    return None, {}


PROGRAM_NAME = "mismatchctl"
VERBS = (
    *("analyze", "diagnose", "sweep", "advise", "compare", "gate", "watch", "score"),
    *("convert", "report", "schema", "metrics", "lint", "doctor", "presets"),
)
"""Each in a module of its own, in the order of the help."""
EXIT_BROKEN_PIPE = 141
"""As a shell reports a process that a closed pipe has ended; 1 would say that there is a bug."""


_UsageError: Any = next(one for one in typer.BadParameter.__mro__ if one.__name__ == "UsageError")
"""Of a flag, a value or a verb that there is not; typer brings click along, whose class it is, under a private name."""
STDOUT_NAME = "stdout"


_LONG_WORD = re.compile(r"(\S{200})\S{300,}(\S{100})")
_MAX_ERROR_LENGTH = 1000
"""Characters of an error: it may repeat what was given."""


class _NamedStdout(io.FileIO):
    """Names itself in its errors, which tell them from those of files.

    Attributes:
        is_left: whether whoever read it has gone.
    """

    is_left = False

    def write(self, content: Any, /) -> int:
        try:
            return super().write(content) or 0
        except OSError as error:
            error.filename = STDOUT_NAME
            _NamedStdout.is_left |= isinstance(error, BrokenPipeError)
            raise


class _CommandGroup(TyperGroup):
    """Turns errors that a user can cause into one sentence on stderr and their exit code."""

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        parameters: list[Any] = [one for command in self.commands.values() for one in command.params]
        for parameter in parameters:
            parameter.type_descriptor.parameter_info.readable = False  # whoever opens a file says what is wrong with it

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        flags: list[Any] = [one for one in self.get_params(ctx) if one.default is None]
        for flag in flags:  # of help and completion: typer would load pydantic to validate None
            flag.default = False if flag.type_descriptor.annotation is bool else None
        try:
            return super().parse_args(ctx, args)
        except _UsageError as error:
            raise _report_usage_error(error) from None

    def invoke(self, ctx: Any) -> Any:
        try:
            with messages_for("command"):
                done = self._invoke(ctx)
            signals.raise_if_received()
        except KeyboardInterrupt:
            raise self._interrupted() from None
        except Exception:
            if (
                signals.signal_exit_code() is not None
            ):  # a callback of numba's compiler drops it and then fails otherwise
                raise self._interrupted() from None
            raise
        return done

    @staticmethod
    def _interrupted() -> typer.Exit:
        print_message("interrupted")
        return typer.Exit(signals.signal_exit_code() or EXIT_INTERRUPTED)

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
            _print_error("there is no memory left: use fewer --threads, or --memory-limit")
            raise typer.Exit(EXIT_USAGE) from None
        except RuntimeError as error:
            if type(error).__name__ != "OutOfMemoryError":  # torch's, which is loaded only where a device is used
                raise
            _print_error("the GPU has no memory left: use fewer --threads, or --device cpu")
            raise typer.Exit(EXIT_USAGE) from None
        except BrokenPipeError:  # the reader of the pipe has gone: nobody is left to tell
            _discard_stdout()
            raise typer.Exit(EXIT_BROKEN_PIPE) from None
        except OSError as error:
            raise typer.Exit(_report_os_error(error)) from None
        return done


_REMEDY_REPLACEMENTS = {
    "--on-bad": (r"with --on-bad skip", "with analyze --on-bad skip"),
    "--column": (r"name the right column with --column (\S+)=NAME", r"call the right column \1"),
}
"""What a remedy says to a verb that does not have its flag."""


def _adapt_remedy(command: Any, sentence: str) -> str:
    """A sentence whose remedy the verb has."""
    flags = {flag for parameter in getattr(command, "params", ()) for flag in parameter.opts}
    for flag, (said, otherwise) in _REMEDY_REPLACEMENTS.items():
        sentence = sentence if flag in flags else re.sub(said, otherwise, sentence)
    return sentence


def _print_error(sentence: str) -> None:
    """Say what went wrong; of a long word, and of a sentence that is still long, without the middle."""
    sentence = _LONG_WORD.sub(r"\1…\2", sentence)
    print_message(
        f"error: {sentence if len(sentence) <= _MAX_ERROR_LENGTH else f'{sentence[:700]} … {sentence[-200:]}'}"
    )


def _report_usage_error(error: Any) -> Exception:
    """Say what was not understood in one sentence, as all else; without any words, the help is the answer."""
    if type(error).__name__ == "NoArgsIsHelpError":
        return error  # type: ignore[no-any-return]
    words = " ".join(error.format_message().split()).rstrip(".").replace("Value error, ", "").replace(". Did", ": did")
    words = words.replace(": Input should", ": it should")
    _print_error(f"{words[:1].lower()}{words[1:]}; see {error.ctx.command_path if error.ctx else PROGRAM_NAME} -h")
    return typer.Exit(EXIT_USAGE)


def _report_os_error(error: OSError) -> int:
    """Say what could not be read or written; the exit code."""
    reason = error.strerror or str(error)
    if error.filename == STDOUT_NAME:
        _discard_stdout()
        _print_error(f"{STDOUT_NAME} cannot be written: {reason}")
        return EXIT_USAGE
    _print_error(f"{error.filename or 'a file'}: {reason}")
    return EXIT_CANNOT_JUDGE


def _discard_stdout() -> None:
    """Let what still waits to be printed go nowhere."""
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
    ctx.default_map = read_settings(ctx.command) if ctx.obj is None else ctx.obj


@cache
def build_app(*verbs: str) -> typer.Typer:
    """The app of these verbs, whose modules are loaded."""
    made = typer.Typer(
        name=PROGRAM_NAME,
        cls=_CommandGroup,
        help="The mismatch between rollout and training log-probs in RL for LLMs: measure it, see what corrections do.",
        epilog="Flags can be set in \\[tool.mismatchctl] of pyproject.toml, in mismatchctl.toml, "
        "or as MISMATCHCTL_<VERB>_<FLAG>.",
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    made.callback()(_load_settings)
    for verb in verbs:
        module = import_module(f"mismatchctl.cli.{verb}")
        if hasattr(module, "app"):
            made.add_typer(module.app, name=verb)
        else:
            made.command(verb)(getattr(module, verb))
    return made


def __getattr__(name: str) -> typer.Typer:
    """`app`, which has every verb."""
    if name == "app":
        return build_app(*VERBS)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def main() -> None:
    """The command."""
    signals.install_handlers()
    _reopen_closed_streams()
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # units already run in threads; small products only wait
    os.environ.setdefault("PYDANTIC_DISABLE_PLUGINS", "__all__")  # it would look through all installed packages
    try:
        verb = sys.argv[1:2]
        alone = verb and verb[0] in VERBS and not has_settings()  # which may name any verb
        build_app(*(verb if alone else VERBS))(obj={} if alone else None)  # the settings, as far as they are known
    except OSError as error:  # of what typer prints itself
        sys.exit(_report_os_error(error))
    except SystemExit:
        if _NamedStdout.is_left:  # rich, which prints the help, ends with 1
            sys.exit(EXIT_BROKEN_PIPE)
        raise


def _reopen_closed_streams() -> None:
    """Streams that were closed lead nowhere: a file that is opened must not take their place."""
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
