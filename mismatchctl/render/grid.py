"""Tables that fit: numbers are never cut; columns that matter less go, then names lose their middle."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from mismatchctl.render.glyphs import Glyphs

_UNICODE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_GAP = 2
NAME_LEAST, NAME_MOST = 24, 48
"""Columns go before names become shorter than the first; names are never longer than the second."""


@dataclass(frozen=True)
class Column:
    """A column: `drop` says how early it goes where there is no room (0 never); `brief` is shorter."""

    heading: str
    cells: Sequence[str]
    right: bool = True
    drop: int = 0
    brief: Sequence[str] = ()


def print_grid(console: Console, names: Column, columns: Sequence[Column]) -> list[str]:
    """Print a table with a column of names and columns of figures, no wider than the console.

    Returns:
        The headings of the columns that there was room for.
    """
    glyphs = Glyphs(console)
    longest = min(max(map(cell_len, [names.heading, *names.cells]), default=0), NAME_MOST)
    shown = _fitting(columns, console.width - min(longest, max(NAME_LEAST, console.width // 5)))
    room = max(min(longest, console.width - _width(shown)), 8)
    table = ruled_table(console)
    cut: Literal["crop", "ellipsis"] = "crop" if glyphs.plain else "ellipsis"
    table.add_column(Text(names.heading), no_wrap=True, max_width=room, overflow=cut)
    for column in shown:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.heading, justify=justify), justify=justify, no_wrap=True, overflow=cut)
    named = names.brief or names.cells if longest > room else names.cells
    for name, *cells in zip(named, *(column.cells for column in shown), strict=True):
        table.add_row(Text(glyphs.short(name, room)), *map(Text, cells))
    console.print(table, "")
    return [column.heading for column in shown]


def ruled_table(console: Console) -> Table:
    """An empty table with a rule below its headings and no other line."""
    box = _ASCII if console.options.ascii_only else _UNICODE
    return Table(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def matrix(console: Console, names: Column, columns: Sequence[Column]) -> Iterator[Sequence[Column]]:
    """Columns of equal rank in as many tables as it takes to show them all."""
    room = console.width - min(max(map(cell_len, names.cells), default=0), NAME_LEAST)
    while columns:
        count = next((n for n in range(len(columns), 1, -1) if _width(columns[:n]) <= room), 1)
        yield columns[:count]
        columns = columns[count:]


def broken(name: str, length: int) -> str:
    """A name over several lines of about `length`, broken after its separators, for use as a heading."""
    lines = [""]
    for part in re.findall(rf"[^_\-./ ]{{0,{length - 1}}}(?:[_\-./ ]|.)|$", name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _fitting(columns: Sequence[Column], width: int) -> Sequence[Column]:
    """As many columns as there is room for, those that matter most first, in their order."""
    if _width(columns) <= width:
        return columns
    columns = [replace(column, cells=column.brief or column.cells) for column in columns]
    chosen = [column for column in columns if not column.drop]
    for column in sorted(columns, key=lambda column: column.drop):
        if column.drop and _width([*chosen, column]) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def _width(columns: Iterable[Column]) -> int:
    """What the columns take up, each with the gap before it."""
    return sum(_GAP + max(map(cell_len, [*column.heading.split("\n"), *column.cells]), default=0) for column in columns)
