"""A Document in the terminal: what a person reads in ten seconds, in the width there is; tables that fit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from textwrap import wrap
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from mismatchctl.render.document import (
    USUAL,
    WHOLE,
    Answers,
    Card,
    Code,
    Document,
    Facts,
    Head,
    Note,
    Part,
    Section,
    Table,
    TableCell,
    Tiles,
)
from mismatchctl.render.glyphs import Glyphs

_UNICODE = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_GAP = 2
NAME_LEAST, NAME_MOST = 24, 48
"""Columns go before names become shorter than the first; names are never longer than the second."""


@dataclass(frozen=True)
class TerminalColumn:
    """A column: `drop` says how early it goes where there is no room (0 never); `brief` is shorter."""

    heading: str
    cells: Sequence[str]
    right: bool = True
    drop: int = 0
    brief: Sequence[str] = ()


def print_grid(console: Console, names: TerminalColumn, columns: Sequence[TerminalColumn]) -> list[str]:
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


def ruled_table(console: Console) -> Grid:
    """An empty table with a rule below its headings and no other line."""
    box = _ASCII if console.options.ascii_only else _UNICODE
    return Grid(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def matrix(
    console: Console, names: TerminalColumn, columns: Sequence[TerminalColumn]
) -> Iterator[Sequence[TerminalColumn]]:
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


def _fitting(columns: Sequence[TerminalColumn], width: int) -> Sequence[TerminalColumn]:
    """As many columns as there is room for, those that matter most first, in their order."""
    if _width(columns) <= width:
        return columns
    columns = [replace(column, cells=column.brief or column.cells) for column in columns]
    chosen = [column for column in columns if not column.drop]
    for column in sorted(columns, key=lambda column: column.drop):
        if column.drop and _width([*chosen, column]) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def _width(columns: Iterable[TerminalColumn]) -> int:
    """What the columns take up, each with the gap before it."""
    return sum(_GAP + max(map(cell_len, [*column.heading.split("\n"), *column.cells]), default=0) for column in columns)


STYLES = {
    "bad": "bold red", "failed": "bold red", "high": "bold red", "error": "bold red", "alarm": "yellow",
    "fair": "yellow", "medium": "yellow", "undecided": "yellow", "warning": "yellow", "low": "dim", "quiet": "dim",
    "unknown": "dim", "good": "green", "calm": "green", "passed": "green", "advice": "green", "info": "cyan",
}  # fmt: skip
_SCALE_WIDTH = 73
_HEADING = 12
_LEAST_TEXT = 20
_BROKEN = 12


def show(document: Document, console: Console, *, whole: bool = False) -> None:
    """Print a document; `whole` with the details of its cards, however long."""
    Terminal(console, whole).show(document)


class Terminal:
    """One console, and how much of a document it is to hold."""

    def __init__(self, console: Console, whole: bool = False) -> None:
        self.console, self.glyphs, self.whole = console, Glyphs(console), whole

    def show(self, document: Document) -> None:
        """Print it."""
        head = document.headline
        title = Text(self.glyphs.text(head.title), style=STYLES.get(head.level, "bold"))
        if head.facts:
            title.append(f": {self.glyphs.text(', '.join(head.facts))}", style="not bold")
        if head.title:
            self.console.print(title, "", sep="\n")
        self._parts(document.sections)

    def _parts(self, parts: Sequence[Part]) -> None:
        """Parts in order; cards that follow each other stand in one grid."""
        for kind, alike in groupby((part for part in parts if part.reach < WHOLE), type):
            if kind is Card:
                self._cards([*alike])
            else:
                for part in alike:
                    getattr(self, f"_{part.kind}")(part)

    def _section(self, section: Section) -> None:
        shown = [part for part in section.parts if part.reach <= USUAL]
        if not shown:
            return
        if section.heading and section.title and not all(isinstance(part, Table) for part in shown):
            note = f"  {section.note}" if section.note else ""
            self.console.print(
                Text.assemble((self.glyphs.text(section.title), "bold"), (self.glyphs.text(note), "dim"))
            )
        self._parts(shown)
        if isinstance(shown[-1], Note) and section.title:
            self.console.print()

    def _answers(self, part: Answers) -> None:
        rows = self._rows()
        for line in part.lines:
            style = STYLES[line.level]
            rows.add_row(Text(line.question, style=style), Text(self.glyphs.text(line.text)))
            if line.question == "how bad" and part.k3 is not None:
                rows.add_row("", self.glyphs.scale(part.k3, max(min(self.console.width - 14, _SCALE_WIDTH), 1)))
            if line.question == "since when" and len(part.over) > 1:
                rows.add_row("", self.glyphs.sparkline(part.over, max(min(self.console.width - 14, 40), 8)))
        self.console.print(rows, "")

    def _tiles(self, part: Tiles) -> None:
        rows = self._rows()
        for tile in part.tiles:
            if not (tile.first or tile.level == "alarm"):
                continue
            text = Text(self.glyphs.text(tile.value))
            style = STYLES["alarm"] if tile.level in ("alarm", "fair") else "dim"
            if tile.verdict:
                text.append(self.glyphs.text(f"  {tile.verdict}"), style=style)
            rows.add_row(Text(self.glyphs.text(tile.title)), text)
        self.console.print(rows, "")

    def _table(self, table: Table) -> None:
        chosen = [place for place, head in enumerate(table.heads) if place == 0 or head.drop is not None]
        title, rows = table.title or table.caption, table.rows
        if table.most and len(rows) > table.most:
            order = sorted(range(len(rows)), key=lambda place: -float(rows[place][1].order or 0))[: table.most]
            title += f" ({table.most} of {len(rows)}, those with most {table.heads[1].text})"
            rows = [rows[place] for place in sorted(order)]
        if title:
            self.console.print(Text(self.glyphs.text(title), style="bold"))
        if table.prose:
            self._prose(table)
            return
        names, *columns = (self._column(table.heads[place], [row[place] for row in rows]) for place in chosen)
        for part in matrix(self.console, names, columns) if table.matrix else [columns]:
            print_grid(self.console, names, part)

    def _prose(self, table: Table) -> None:
        """Cells that break where they do not fit, but for the names that they are found by."""
        rows = ruled_table(self.console)
        for place, head in enumerate(table.heads):
            rows.add_column(head.text, overflow="fold", no_wrap=place == 0)
        for row in table.rows:
            rows.add_row(*(Text(self.glyphs.text(cell.text)) for cell in row))
        self.console.print(rows, "")

    def _column(self, head: Head, cells: Sequence[TableCell]) -> TerminalColumn:
        text = self.glyphs.text
        heading = head.short or (broken(text(head.text), _BROKEN) if head.numeric else head.text)
        return TerminalColumn(
            "\n".join(map(text, heading.split("\n"))), [self._cell(cell, 16, cell.text) for cell in cells],
            head.numeric, head.drop or 0, [self._cell(cell, 8, cell.brief or cell.text) for cell in cells],
        )  # fmt: skip

    def _cell(self, cell: TableCell, width: int, text: str) -> str:
        return self.glyphs.sparkline(cell.line, width) if cell.line else self.glyphs.text(text)

    def _note(self, note: Note) -> None:
        if note.level != "alarm":
            self.console.print(Text(self.glyphs.text(note.text), style=STYLES.get(note.level, "")))
            return
        rows = Grid.grid(padding=(0, 1, 0, 0))
        rows.add_column(style="yellow", width=1)
        rows.add_column(overflow="fold")
        rows.add_row("!", Text(self.glyphs.text(note.text)))
        self.console.print(rows)

    def _facts(self, facts: Facts) -> None:
        rows = self._rows()
        for place, (name, text) in enumerate(facts.rows):
            curve, series = facts.curves.get(name), facts.series.get(name)
            drawn = f"{self.glyphs.shares(curve)}  " if curve else ""
            drawn += f"{self.glyphs.sparkline(series)}  " if series else ""
            style = STYLES["alarm"] if place in facts.wrong else ""
            rows.add_row(Text(self.glyphs.text(name)), Text(drawn + self.glyphs.text(text), style=style))
        self.console.print(rows, "")

    def _code(self, code: Code) -> None:
        self.console.print(Text(self.glyphs.text(code.name), style="dim"))
        for line in code.text.splitlines():
            self.console.print(Text(f"  {self.glyphs.text(line)}"))
        self.console.print()

    def _cards(self, cards: Sequence[Any]) -> None:
        """Mark, title and text; below each its lines, cut to what they may take."""
        marked = max(cell_len(card.mark) for card in cards)
        for place, card in enumerate(cards):
            rows = Grid.grid(padding=(0, 2, 0, 0))
            rows.add_column(no_wrap=True, width=marked)
            rows.add_column(overflow="fold")
            text = Text(self.glyphs.text(card.title), style="bold" if card.text or card.lines else "")
            if card.tag:
                text.append(self.glyphs.text(f"  {card.tag}"), style="not bold dim")
            if card.text:
                text.append(self.glyphs.text(f": {card.text}"), style="not bold")
            if card.most and not self.whole:
                text = self._cut(text, self.console.width - marked - 4, card.most)
            rows.add_row(Text(card.mark, style=STYLES.get(card.level, "")), text)
            lines = [(heading, said, 0) for heading, said in card.details] if self.whole else []
            below = lines or card.lines
            if below:
                rows.add_row("", self._lines(below, marked))
            self.console.print(rows)
            if below and any(heading for heading, _, _ in below) and place < len(cards) - 1:
                self.console.print()
        self.console.print()

    def _cut(self, text: Text, room: int, most: int) -> Text:
        """So many lines of a text, with a sign where there is more."""
        more = self.glyphs.text(" …")
        kept = "\n".join(wrap(text.plain, max(room, _LEAST_TEXT), max_lines=most, placeholder=more))
        return text if kept == text.plain else text[: len(kept) - len(more)] + more

    def _lines(self, lines: Sequence[tuple[str, str, int]], marked: int) -> Grid:
        rows = Grid.grid(padding=(0, 2, 0, 0))
        named = max(cell_len(heading) for heading, _, _ in lines)
        if named:
            rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        room = max(self.console.width - marked - named - 6, _LEAST_TEXT)
        for heading, said, most in lines:
            text = self.glyphs.text(said)
            if most:
                text = "\n".join(wrap(text, room, max_lines=most, placeholder=self.glyphs.text(" …")) or [""])
            rows.add_row(*([heading] if named else []), Text(text, style="" if named else "dim"))
        return rows

    def _rows(self) -> Grid:
        rows = Grid.grid(padding=(0, 2, 0, 0))
        rows.add_column(style="dim", overflow="fold", max_width=max(self.console.width * 2 // 5, _HEADING))
        rows.add_column(overflow="fold")
        return rows
