"""Exceptions with exit codes, and functions that adapt messages to users of Python or of the command line."""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

EXIT_OK, EXIT_BUG, EXIT_USAGE, EXIT_CHECK_FAILED, EXIT_CANNOT_JUDGE, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 130


class MismatchctlError(Exception):
    """Base class of the errors that a user can cause. `exit_code` is the exit code of a command that fails with it."""

    exit_code = EXIT_BUG


class ConfigError(MismatchctlError):
    """An invalid option, preset, correction file or framework configuration."""

    exit_code = EXIT_USAGE


class DataError(MismatchctlError):
    """A dump that cannot be used. The message names the file, row, column and a remedy, as far as they are known."""

    exit_code = EXIT_CANNOT_JUDGE

    def __init__(
        self,
        problem: str,
        *,
        file: str | None = None,
        row: int | None = None,
        column: str | None = None,
        remedy: str | None = None,
    ) -> None:
        self.problem, self.file, self.row, self.column, self.remedy = problem, file, row, column, remedy
        row_text = None if row is None else f"row {row}"
        column_text = None if column is None else f"column {column}"
        place = ", ".join(part for part in (file, row_text, column_text) if part is not None)
        sentence = f"{place}: {problem}" if place else problem
        super().__init__(f"{sentence}; {remedy}" if remedy else sentence)


def kind_of(value: object) -> str:
    """Return the type of a value with its article, such as "an int". For `None`, return "None"."""
    name = type(value).__name__
    return "None" if value is None else f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


_OS_PROBLEMS = {
    errno.ENOENT: "the file does not exist", errno.EISDIR: "this is a folder, not a file",
    errno.EACCES: "you have no permission to read this file; change its permissions",
}  # fmt: skip


def describe_os_error(error: OSError) -> str:
    """Return the reason why a file cannot be read, as text for an error message."""
    return _OS_PROBLEMS.get(error.errno or 0) or error.strerror or str(error)


def suggestion(word: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return " (did you mean X?)" with the word in `known` that is most like `word`, or "" if no word is similar."""
    names = list(known)
    longer = [name for name in names if word and name.startswith((f"{word}_", f"{word}-"))]
    close = longer or difflib.get_close_matches(word, names, n=1, cutoff=cutoff)
    return f" (did you mean {close[0]!r}?)" if close else ""


_FLAGS = {"columns": "--column", "corrections": "--correction", "rules": "--rule"}
"""Flags that are not named like the argument of the Python API, such as `--column` for `columns`."""
_interface = "python"


def interface() -> str:
    """Return `python` if users of the Python API read the messages, or `command` for users of the command line."""
    return _interface


@contextmanager
def messages_for(reader: str) -> Iterator[None]:
    """In this block, messages of all threads show options for `reader`: "python" (`by=`) or "command" (`--by`)."""
    global _interface
    before, _interface = _interface, reader
    try:
        yield
    finally:
        _interface = before


def option(name: str, value: object = None) -> str:
    """Return an option as the user writes it: `by='worker'` in Python, `--by worker` on the command line.

    If `value` is `None`, return only the name. If `value` is the type `int`, write `N` as a placeholder: `--batch N`.
    """
    if _interface == "python":
        return name if value is None else f"{name}={'N' if value is int else repr(value)}"
    flag = _FLAGS.get(name, f"--{name.replace('_', '-')}")
    pairs = value.items() if isinstance(value, Mapping) else ()
    text = " ".join(f"{key}={item}" for key, item in pairs) or ("N" if value is int else str(value))
    return flag if value is None else f"{flag} {text}"


def wording(*, python: str, command: str) -> str:
    """Return `python` if users of the Python API read the message, and `command` if users of the command line do."""
    return python if _interface == "python" else command
