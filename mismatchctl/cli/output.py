"""What verbs share in writing: what is said, printed and written, progress, consoles."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mismatchctl import __version__
from mismatchctl.errors import ConfigError
from mismatchctl.escape import terminal

if TYPE_CHECKING:
    from rich.console import Console

    from mismatchctl.render.document import Document

PIPED_WIDTH = 140
"""Columns where the width of the terminal is not known."""
LEAST_WIDTH = 40
"""Narrower than this, nothing can be read."""


@contextlib.contextmanager
def outputs(quiet: bool) -> Iterator[None]:
    """Whatever is written in this block appears at its end, all of it or nothing; then say so on stderr."""
    from mismatchctl.files import together

    with together() as places:
        yield
    for place in places:
        say(f"wrote {place}", quiet)


def write(files: Iterable[tuple[Path, bytes]]) -> None:
    """Write files, each whole or not at all."""
    from mismatchctl.files import write_atomically

    for place, content in files:
        write_atomically(place, content)


def page_files(
    page: Callable[[], Document], html: Path | None, markdown: Path | None = None
) -> Iterator[tuple[Path, bytes]]:
    """A document in the files that are asked for."""
    if html is not None:
        from mismatchctl.render.to import html as to

        yield html, to.html(page()).encode()
    if markdown is not None:
        from mismatchctl.render.to.markdown import markdown as as_markdown

        yield markdown, as_markdown(page()).encode()


def page_of(verb: str, *told: Any, **more: Any) -> Document:
    """The page that a verb has of what it found; what makes it is loaded where one is asked for."""
    page: Document = import_module(f"mismatchctl.render.pages.{verb}").document(*told, **more)
    return page


def open_page(html: Path | None, *, wanted: bool) -> Callable[[], None]:
    """What opens a page in the browser once it is written; nothing where that is not wanted.

    Raises:
        ConfigError: it is wanted, and no page is written.
    """
    if wanted and html is None:
        raise ConfigError("--open opens the page of --html: name a file for it")

    def done() -> None:
        if wanted and html is not None:
            import webbrowser

            if not webbrowser.open(html.resolve().as_uri()):
                say(f"warning: no browser could be started; the page is {html}")

    return done


def say(text: str, quiet: bool = False) -> None:
    """Talk to the user, on stderr; strings from outside may be part of it."""
    if not quiet:
        with contextlib.suppress(OSError):  # a stderr that is full or gone: there is nowhere to say so
            typer.echo(visible(text), err=True)


def visible(text: str) -> str:
    """The same with control characters, direction marks and the like escaped."""
    return terminal("".join(char if char.isprintable() else repr(char)[1:-1] for char in text))


def signed(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a verb writes as JSON, with its format and who wrote it first."""
    return {"format": 1, "tool": "mismatchctl", "version": __version__} | {**data}


def json_text(data: Any) -> str:
    """Data as JSON, as files and stdout have it."""
    import json

    return json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n"


def print_json(data: Any) -> None:
    """Print data as JSON on stdout."""
    typer.echo(json_text(data), nl=False)


def print_or_show(data: Any, page: Callable[[], Document], *, as_json: bool, quiet: bool = False) -> None:
    """Print what was found: as JSON, or as a person reads it; a quiet verb prints the JSON alone."""
    if as_json:
        print_json(data)
    elif not quiet:
        show(page())


def show(page: Document, *, whole: bool = False) -> None:
    """Print a document as a person reads it; `whole` with the details of its cards, however long."""
    from mismatchctl.render.to import terminal as to

    to.show(page, _console(), whole=whole)


def print_markdown(page: Document) -> None:
    """Print a document as Markdown."""
    from mismatchctl.render.to.markdown import markdown

    typer.echo(markdown(page), nl=False)


def warn(sentences: Iterable[str], quiet: bool) -> None:
    """Say what a person has to know of what was printed for a machine."""
    for sentence in sentences:
        say(f"warning: {sentence}", quiet)


def _console() -> Console:
    """The console of stdout: the terminal's width, `COLUMNS`, or 140 columns when piped."""
    from rich.console import Console

    class _Console(Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError  # dealt with in one place

    _degrade_gracefully()
    columns = os.environ.get("COLUMNS", "")
    given = int(columns) if columns.isdecimal() else 0
    width = max(given, LEAST_WIDTH) if given else None if sys.stdout.isatty() else PIPED_WIDTH
    return _Console(width=width, highlight=False, emoji=False, markup=False)


_PLAIN = {"±": "+-", "−": "-", "–": "-", "→": "->", "…": "...", "×": "x", "▲": "up", "▼": "down"}


def _degrade_gracefully() -> None:
    """Where stdout cannot encode a character, print a plain one in its place, not a traceback."""

    def plain(error: UnicodeError) -> tuple[str, int]:
        if not isinstance(error, UnicodeEncodeError):
            raise error
        return "".join(_PLAIN.get(char, "?") for char in error.object[error.start : error.end]), error.end

    codecs.register_error("mismatchctl-plain", plain)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="mismatchctl-plain")


@contextlib.contextmanager
def progress_bar(quiet: bool, unit: str = "tokens") -> Iterator[Callable[[int, int], None] | None]:
    """A bar over tokens, or what else is counted, on stderr, only on a terminal."""
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
