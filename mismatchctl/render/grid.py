"""Tables that fit: numbers are never cut; columns that matter less go, then names lose their middle."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.render.glyphs import Glyphs

_UNICODE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_GAP = 2
NAME_LEAST, NAME_MOST = 20, 48
"""A name is cut below the first length only when no column is left that may go, and always above the second."""


@dataclass(frozen=True)
class Column:
    """A column: `drop` says how early it goes where there is no room; 0 never."""

    heading: str
    cells: Sequence[str]
    right: bool = True
    drop: int = 0


def print_grid(console: Console, title: str, names: Column, columns: Iterable[Column]) -> None:
    """Print a table with a column of names and columns of figures, no wider than the console."""
    glyphs = Glyphs(console)
    names, *shown = (_shown(column, glyphs) for column in (names, *columns))
    longest = min(max(map(cell_len, [names.heading, *names.cells]), default=0), NAME_MOST)
    shown = _fitting(shown, console.width - min(longest, NAME_LEAST))
    room = max(min(longest, console.width - _width(shown)), 8)
    table = Table(box=_ASCII if glyphs.plain else _UNICODE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column(Text(names.heading), no_wrap=True, max_width=room, vertical="bottom")
    for column in shown:
        justify = "right" if column.right else "left"
        table.add_column(Text(column.heading, justify=justify), justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for index, name in enumerate(names.cells):
        table.add_row(Text(glyphs.short(name, room)), *(Text(column.cells[index]) for column in shown))
    if title:
        console.print(Text(glyphs.text(title), style="bold"))
    console.print(table, "")


def print_matrix(console: Console, title: str, names: Column, columns: Sequence[Column]) -> None:
    """Print columns of equal rank, in as many tables as it takes to show them all."""
    least = min(max(map(cell_len, names.cells), default=0), NAME_LEAST)
    left = list(columns)
    while left:
        count = len(left)
        while count > 1 and _width(left[:count]) > console.width - least:
            count -= 1
        print_grid(console, title, names, left[:count])
        left, title = left[count:], ""


def broken(name: str, length: int) -> str:
    """A name over several lines of about `length`, broken after its separators, for use as a heading."""
    lines = [""]
    for part in _parts(name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _parts(name: str) -> list[str]:
    parts = [""]
    for character in name:
        parts[-1] += character
        if character in "_-./ ":
            parts.append("")
    return parts


def _shown(column: Column, glyphs: Glyphs) -> Column:
    heading = "\n".join(glyphs.text(line) for line in column.heading.split("\n"))
    return Column(heading, [glyphs.text(cell) for cell in column.cells], column.right, column.drop)


def _fitting(columns: list[Column], width: int) -> list[Column]:
    while _width(columns) > width and any(column.drop for column in columns):
        columns.remove(max(columns, key=lambda column: column.drop))
    return columns


def _width(columns: Iterable[Column]) -> int:
    """What the columns take up, each with the gap before it."""
    return sum(
        _GAP + max(map(cell_len, [*column.heading.split("\n"), *column.cells]), default=0) for column in columns
    )
