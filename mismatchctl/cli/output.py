"""What verbs share in writing: checking places before any work, saying what was written, progress, consoles."""

from __future__ import annotations

import codecs
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from mismatchctl.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

PIPED_WIDTH = 140
"""Columns where the width of the terminal is not known."""


def check_places(*places: Path | None, force: bool) -> None:
    """Refuse, before any work, to write where it cannot be done, or over a file without `--force`."""
    for place in places:
        if place is None or str(place) == "-":
            continue
        if place.is_dir():
            raise ConfigError(f"{place}: is a folder; name a file in it")
        if not place.parent.is_dir():
            raise ConfigError(f"{place}: the folder {place.parent} does not exist; create it first")
        if not os.access(place.parent, os.W_OK):
            raise ConfigError(f"{place}: the folder {place.parent} cannot be written")
        if place.exists() and not force:
            raise ConfigError(f"{place}: exists already; name another file, or overwrite it with --force")


def wrote(place: Path, quiet: bool) -> None:
    """Say on stderr what was written."""
    if not quiet:
        typer.echo(f"wrote {place}", err=True)


def console() -> Console:
    """The console of stdout: the terminal's width, `COLUMNS`, or 140 columns when piped."""
    from rich.console import Console

    _degrade_gracefully()
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPED_WIDTH
    return Console(width=width, highlight=False, emoji=False, markup=False)


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
def progress_bar(quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """A bar over tokens on stderr, only on a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), TextColumn("{task.fields[tokens]}"), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("reading", tokens="", total=None)

        def update(done: int, expected: int) -> None:
            total = max(done, expected)
            bar.update(task, completed=done, total=total, tokens=f"{done:,} of {total:,} tokens")

        yield update
