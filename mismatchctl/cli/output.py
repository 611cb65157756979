"""Outputs of commands: check their paths, write files, and print JSON, pages, messages and progress."""

from __future__ import annotations

import contextlib
import errno
import glob
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.errors import ConfigError
from mismatchctl.io.files import is_baseline, is_own_output

if TYPE_CHECKING:
    from rich.console import Console

    from mismatchctl.report.document import Document

PIPED_WIDTH, MIN_WIDTH = 140, 40
"""Width in characters if stdout is not a terminal, and minimum width, even if the variable COLUMNS is smaller."""


@contextlib.contextmanager
def write_together(quiet: bool) -> Iterator[None]:
    """Write all output files together at the end of the `with` block. If an error occurs, change no file."""
    from mismatchctl.io.files import replace_together

    with replace_together() as places:
        yield
    for place in places:
        print_message(f"wrote {place}", quiet)


def write_files(files: Iterable[tuple[Path, bytes]]) -> None:
    from mismatchctl.io.files import write_atomically

    for place, content in files:
        write_atomically(place, content)


def render_page_files(
    page: Callable[[], Document], html: Path | None, markdown: Path | None = None
) -> Iterator[tuple[Path, bytes]]:
    if html is not None:
        from mismatchctl.report.html import render_html

        yield html, render_html(page()).encode()
    if markdown is not None:
        from mismatchctl.report.markdown import render_markdown

        yield markdown, render_markdown(page()).encode()


def open_page(html: Path) -> None:
    import webbrowser

    if not webbrowser.open(html.resolve().as_uri()):
        print_message(f"warning: no browser could be started; the page is {html}")


def print_message(text: str, quiet: bool = False) -> None:
    if not quiet:
        with contextlib.suppress(OSError):  # stderr may be closed
            typer.echo(escape_text(text), err=True)


def escape_text(text: str) -> str:
    """Escape characters that could manipulate the terminal, such as control characters and text-direction marks."""
    return escape_terminal("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def print_json(data: Any) -> None:
    from mismatchctl.results.views import json_text

    typer.echo(json_text(data), nl=False)


def print_json_or_page(data: Any, page: Callable[[], Document], *, as_json: bool, quiet: bool = False) -> None:
    if as_json:
        print_json(data)
    elif not quiet:
        print_page(page())


def print_page(page: Document, *, whole: bool = False) -> None:
    from mismatchctl.report.terminal import print_document

    print_document(page, _make_console(), whole=whole)


def print_warnings(sentences: Iterable[str], quiet: bool) -> None:
    for sentence in sentences:
        print_message(f"warning: {sentence}", quiet)


def _make_console() -> Console:
    """Return the console of stdout. Its width is `COLUMNS`, or else the terminal's width, or 140 in a pipe."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # handled in cli/main.py

    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdecimal() else 0
    width = max(given, MIN_WIDTH) if given else None if sys.stdout.isatty() else PIPED_WIDTH
    return _Console(width=width, highlight=False, emoji=False, markup=False)


@contextlib.contextmanager
def progress_bar(quiet: bool, unit: str = "tokens") -> Iterator[Callable[[int, int], None] | None]:
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.fields[done]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", done="", total=None)

        def update(done: int, expected: int) -> None:
            total = max(done, expected)
            bar.update(task, completed=done, total=total, done=f"{done:,} of {total:,} {unit}")

        yield update


_DUMP_SUFFIXES = (".parquet", ".pq", ".arrow", ".arrows", ".feather", ".ipc", ".jsonl", ".pt", ".pkl", ".npz")


def check_output_paths(
    *named: Path | None, force: bool, inputs: Iterable[str | Path | None] = (), baseline: Path | None = None
) -> None:
    """Check that outputs can be written, and that they only replace files that mismatchctl wrote.

    The only baseline that may be replaced is `baseline`. With `force`, any file may be replaced, except an input.
    """
    places = [place for place in named if place is not None]
    for place in places:
        _check_output_path(place)
        if place.exists() and not (force or is_own_output(place) or (place == baseline and is_baseline(place))):
            raise ConfigError(f"{place}: this file already exists; choose another file, or overwrite with --force")
    names = [os.path.realpath(place) for place in places]
    twice = next((place for place, name in zip(places, names, strict=True) if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"{twice}: two options write to this file; choose different files")
    given = [str(path) for path in inputs if path is not None]
    read = next((place for place in places if any(_reads_file(text, place) for text in given)), None)
    if read is not None and read.exists():
        raise ConfigError(f"{read}: this file is an input; choose another output file")
    if read is not None:
        raise ConfigError(f"{read}: this file would be inside the input dump; choose another folder")


def _reads_file(text: str, place: Path) -> bool:
    for path in _named_paths(text):
        if path.is_dir():
            inside = Path(os.path.realpath(place)).is_relative_to(os.path.realpath(path))
            if inside and place.suffix in _DUMP_SUFFIXES:
                return True
        elif path.exists() and place.exists() and os.path.samefile(path, place):
            return True
    return False


def _named_paths(text: str) -> list[Path]:
    return [Path(text)] if os.path.exists(text) else [Path(found) for found in glob.glob(text, recursive=True)]


def contains_dump(folder: Path, inputs: Iterable[str | Path | None]) -> bool:
    for path in (path for text in inputs if text is not None for path in _named_paths(str(text))):
        input_folder = path if path.is_dir() else path.parent
        is_read = path.is_dir() or path.suffix in _DUMP_SUFFIXES
        if is_read and os.path.realpath(input_folder) == os.path.realpath(folder):
            return True
    return False


def require_local_path(place: Path) -> Path:
    """Return the path, or raise an error if it is remote or its name is too long."""
    from mismatchctl.io.stores import is_remote, normalize_path

    named = f"{place}/"  # Path("s3://") is "s3:", without the slash that marks it as remote
    if is_remote(named):
        raise ConfigError(f"{normalize_path(named)}: mismatchctl cannot write to an object store; choose a local path")
    try:
        os.lstat(place)
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise ConfigError(f"{place}: the name is too long; choose a shorter one") from None
    return place


def make_folder(folder: Path) -> None:
    require_local_path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise ConfigError(f"{folder}: this is a file; choose a folder") from None
    except OSError as error:
        raise ConfigError(f"{folder}: the folder cannot be created: {error.strerror or error}") from None


def _check_output_path(place: Path) -> None:
    if str(place) == "-":
        raise ConfigError("this output cannot be written to stdout (-); choose a file")
    require_local_path(place)
    if not os.path.isdir(place.parent):  # Path.is_dir may raise if a parent folder is not accessible
        raise ConfigError(f"{place}: the folder {place.parent} does not exist; create it first")
    if not os.access(place.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{place}: no permission to write to the folder {place.parent}; choose another folder")
    if place.is_dir():
        raise ConfigError(f"{place}: this is a folder; write the name of a file")
    if place.exists() and not place.is_file():
        raise ConfigError(f"{place}: this is not a regular file; choose another file, or write to stdout with -o -")
