"""Terminal writer for documents and tables."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from textwrap import wrap
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.core.ratios import DENSE_RANGE, K3_SCALE, MOE_RANGE, k3_scale_position
from mismatchctl.report.document import (
    MIN_SPARKLINE_SPREAD,
    PAGE_ONLY,
    TERMINAL_AND_PAGE,
    Answers,
    Card,
    Code,
    ColumnHeader,
    Document,
    DocumentPart,
    Facts,
    Headline,
    Note,
    Section,
    Table,
    TableCell,
    Tiles,
)

_ASCII_REPLACEMENTS = str.maketrans(
    {"±": "+-", "−": "-", "–": "-", "→": "->", "…": "...", "×": "x", "▲": "up", "▼": "down", "⟨": "<", "⟩": ">"}
)
_BAR_CHARACTERS, _ASCII_BAR_CHARACTERS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
SPARKLINE_WIDTH = 40
"""Maximum characters of a sparkline."""
_SCALE_LABELS = (
    (K3_SCALE[0], "1e-8"),
    (DENSE_RANGE[0], "1e-5 dense"),
    (MOE_RANGE[0], "1e-3 MoE"),
    (MOE_RANGE[1], "1e-1"),
)


class TerminalGlyphs:
    """Text, sparklines and scales for one console, with ASCII fallbacks."""

    def __init__(self, console: Console) -> None:
        self.plain = console.options.ascii_only

    def text(self, text: str) -> str:
        """Escape text from a dump, and replace characters that the console cannot encode."""
        shown = escape_terminal(text)
        return (
            shown.translate(_ASCII_REPLACEMENTS).encode("ascii", "backslashreplace").decode() if self.plain else shown
        )

    def shorten(self, text: str, length: int) -> str:
        """Shorten a name by removing its middle, because names tend to differ at their ends."""
        shown, dots = self.text(text), "..." if self.plain else "…"
        if len(shown) <= length:
            return shown
        room = max(length - len(dots), 2)
        return f"{shown[: room - room // 2]}{dots}{shown[len(shown) - room // 2 :]}"

    def truncate(self, text: str, length: int) -> str:
        """Cut the end of a text."""
        dots = "..." if self.plain else "…"
        return text if cell_len(text) <= length else f"{text[: length - len(dots)].rstrip()}{dots}"

    def sparkline(self, values: Sequence[float | None], width: int = SPARKLINE_WIDTH) -> str:
        """Draw a positive series on a log scale, averaged to `width`. Undefined values are blank."""
        heights = [None if value is None else math.log(value) if value > 0 else -math.inf for value in values]
        if len(heights) > width:
            cuts = [round(i * len(heights) / width) for i in range(width + 1)]
            heights = [_mean_height(heights[start:end]) for start, end in pairwise(cuts)]
        known = [height for height in heights if height is not None and math.isfinite(height)]
        if not known:
            return ""
        spread = max(max(known) - min(known), MIN_SPARKLINE_SPREAD)
        low = (max(known) + min(known) - spread) / 2
        return "".join(self._bar(height, low, spread) for height in heights)

    def shares(self, values: Sequence[float | None]) -> str:
        """Draw fractions as bars from 0 to 1. Long series are thinned."""
        count = min(len(values), SPARKLINE_WIDTH)
        places = [round(i * (len(values) - 1) / max(count - 1, 1)) for i in range(count)]
        return "".join(self._bar(values[place], 0.0, 1.0) for place in places)

    def _bar(self, height: float | None, low: float, spread: float) -> str:
        if height is None:
            return " "
        bars = _ASCII_BAR_CHARACTERS if self.plain else _BAR_CHARACTERS
        share = 0.0 if height == -math.inf else (height - low) / spread
        return bars[min(int(share * len(bars)), len(bars) - 1)]

    def scale(self, k3: float, width: int) -> Text:
        """Draw the K3 scale with the usual ranges, a mark at `k3`, and labels below."""
        rule, dense, moe, mark = "-=#X" if self.plain else "─━═●"
        cells = [rule] * width
        for (start, end), fill in ((DENSE_RANGE, dense), (MOE_RANGE, moe)):
            for index in range(_scale_position(start, width), _scale_position(end, width)):
                cells[index] = fill
        here = _scale_position(k3, width)
        outside = (self.text("<"), self.text(">")) if self.plain else ("◂", "▸")
        cells[here] = outside[0] if k3 < K3_SCALE[0] else outside[1] if k3 > K3_SCALE[1] else mark
        line = Text("".join(cells), style="dim")
        line.stylize("not dim bold", here, here + 1)
        return Text.assemble(line, "\n", (_format_scale_labels(width), "dim"))


def _mean_height(heights: Sequence[float | None]) -> float | None:
    known = [height for height in heights if height is not None]
    return sum(known) / len(known) if known else None


def _scale_position(k3: float, width: int) -> int:
    return round(k3_scale_position(k3) * (width - 1))


def _format_scale_labels(width: int) -> str:
    line = ""
    for start, name in _SCALE_LABELS:
        here = _scale_position(start, width)
        if len(line) < here or not line:
            line = line.ljust(here) + name
    return line[:width]


_UNICODE_BOX = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII_BOX = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_COLUMN_GAP = 2
MIN_NAME_WIDTH, MAX_NAME_WIDTH = 24, 48
"""The name column shrinks to the minimum before other columns are dropped."""
MIN_FLEXIBLE_WIDTH = 20
"""Minimum width of a flexible column, whose cells are cut."""


@dataclass(frozen=True)
class TerminalColumn:
    """A column. `drop` and `flexible` are those of its ColumnHeader, `brief` has shorter cells."""

    heading: str
    cells: Sequence[str]
    right: bool = True
    drop: int = 0
    brief: Sequence[str] = ()
    flexible: bool = False


def print_grid(
    console: Console, names: TerminalColumn, columns: Sequence[TerminalColumn], *, compact: bool = False
) -> list[str]:
    """Print a name column and further columns that fit the console, and return the printed headings."""
    glyphs = TerminalGlyphs(console)
    longest = min(max(map(cell_len, [names.heading, *names.cells]), default=0), MAX_NAME_WIDTH)
    shown = _fit_columns(columns, console.width - min(longest, max(MIN_NAME_WIDTH, console.width // 5)))
    room = max(min(longest, console.width - _total_width(shown)), 8)
    table = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0)) if compact else ruled_table(console)
    cut: Literal["crop", "ellipsis"] = "crop" if glyphs.plain else "ellipsis"
    table.add_column(Text(names.heading), no_wrap=True, max_width=room, overflow=cut)
    for column in shown:
        justify: Literal["left", "right"] = "right" if column.right else "left"
        table.add_column(Text(column.heading, justify=justify), justify=justify, no_wrap=True, overflow=cut)
    named = names.brief or names.cells if longest > room else names.cells
    spare = console.width - room - _total_width(column for column in shown if not column.flexible) - _COLUMN_GAP
    cells_of = (
        [glyphs.truncate(cell, max(spare, MIN_FLEXIBLE_WIDTH)) for cell in column.cells]
        if column.flexible else column.cells
        for column in shown
    )  # fmt: skip
    for name, *cells in zip(named, *cells_of, strict=True):
        table.add_row(Text(glyphs.shorten(name, room)), *map(Text, cells))
    console.print(table, "")
    return [column.heading for column in shown]


def ruled_table(console: Console) -> Grid:
    """Return an empty table with a rule below its headings."""
    box = _ASCII_BOX if console.options.ascii_only else _UNICODE_BOX
    return Grid(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))


def split_matrix(
    console: Console, names: TerminalColumn, columns: Sequence[TerminalColumn]
) -> Iterator[Sequence[TerminalColumn]]:
    """Yield groups of columns that each fit the console."""
    room = console.width - min(max(map(cell_len, names.cells), default=0), MIN_NAME_WIDTH)
    while columns:
        count = next((n for n in range(len(columns), 1, -1) if _total_width(columns[:n]) <= room), 1)
        yield columns[:count]
        columns = columns[count:]


def break_name(name: str, length: int) -> str:
    """Break a name after its separators into lines of about `length` characters."""
    lines = [""]
    for part in re.findall(rf"[^_\-./ ]{{0,{length - 1}}}(?:[_\-./ ]|.)|$", name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def _fit_columns(columns: Sequence[TerminalColumn], width: int) -> Sequence[TerminalColumn]:
    """Return the columns that fit, most important first to stay, in their original order."""
    if _total_width(columns) <= width:
        return columns
    columns = [replace(column, cells=column.brief or column.cells) for column in columns]
    chosen = [column for column in columns if not column.drop]
    for column in sorted(columns, key=lambda column: column.drop):
        if column.drop and _total_width([*chosen, column]) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def _total_width(columns: Iterable[TerminalColumn]) -> int:
    """Return the width of the columns including gaps."""
    return sum(_COLUMN_GAP + _column_width(column) for column in columns)


def _column_width(column: TerminalColumn) -> int:
    width = max(map(cell_len, [*column.heading.split("\n"), *column.cells]), default=0)
    return min(width, MIN_FLEXIBLE_WIDTH) if column.flexible else width


STYLES = {
    "OK": "bold green", "CHECK": "bold yellow", "FAIL": "bold red", "bad": "bold red", "failed": "bold red",
    "high": "bold red", "error": "bold red", "alarm": "yellow", "fair": "yellow", "medium": "yellow",
    "undecided": "yellow", "warning": "yellow", "low": "dim", "quiet": "dim", "unknown": "dim", "good": "green",
    "calm": "green", "passed": "green", "advice": "green", "info": "cyan",
}  # fmt: skip
_STATUS_WIDTH = 5
_TRAILING_BLANKS = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)
_SCALE_WIDTH = 73
_MAX_HEADING = 12
_MIN_TEXT_WIDTH = 20
_HEADING_LINE = 12


def _keep_styles(blanks: re.Match[str]) -> str:
    """Return the codes of styles without the blanks between them."""
    return blanks[0].replace(" ", "")


def print_document(document: Document, console: Console, *, whole: bool = False) -> None:
    """Print a document. `whole` includes all details of its cards."""
    TerminalWriter(console, whole).show(document)


class TerminalWriter:
    """Prints documents to one console."""

    def __init__(self, console: Console, whole: bool = False) -> None:
        self.console, self.glyphs, self.whole = console, TerminalGlyphs(console), whole

    def show(self, document: Document) -> None:
        """Print a document without trailing blanks."""
        with self.console.capture() as capture:
            self._headline(document.headline)
            self._parts(document.sections)
            self._commands(document.commands)
        text = _TRAILING_BLANKS.sub(_keep_styles, capture.get())
        self.console.file.write(text.rstrip("\n") + "\n" if document.commands or document.headline.status else text)

    def _headline(self, head: Headline) -> None:
        if head.status:
            rows = Grid.grid(padding=(0, 2, 0, 0))
            rows.add_column(width=_STATUS_WIDTH)
            rows.add_column(overflow="fold")
            title = Text(self.glyphs.text(head.title), style="bold")
            rows.add_row(Text(head.status, style=STYLES[head.status]), title)
            self.console.print(rows, "")
            return
        title = Text(self.glyphs.text(head.title), style=STYLES.get(head.level, "bold"))
        if head.facts:
            title.append(f": {self.glyphs.text(', '.join(head.facts))}", style="not bold")
        if head.title:
            self.console.print(title, "", sep="\n")

    def _commands(self, commands: Sequence[tuple[str, str]]) -> None:
        """Print the commands in one line if they fit, otherwise the last one in a line of its own."""
        shown = [f"{label}: {self.glyphs.text(command)}" for label, command in commands]
        line = "   ".join(shown)
        for text in [line] if cell_len(line) <= self.console.width else ["   ".join(shown[:-1]), shown[-1]]:
            if text:
                self.console.print(Text(text, style="dim"), overflow="fold")

    def _parts(self, parts: Sequence[DocumentPart]) -> None:
        """Print parts in order. Consecutive cards share a grid."""
        for kind, alike in groupby((part for part in parts if part.reach < PAGE_ONLY), type):
            if kind is Card:
                self._cards([*alike])
            else:
                for part in alike:
                    getattr(self, f"_{part.kind}")(part)

    def _section(self, section: Section) -> None:
        shown = [part for part in section.parts if part.reach <= TERMINAL_AND_PAGE]
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
            if line.question == "since when" and len(part.k3_series) > 1:
                rows.add_row("", self.glyphs.sparkline(part.k3_series, max(min(self.console.width - 14, 40), 8)))
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
        if table.max_rows and len(rows) > table.max_rows:
            order = sorted(range(len(rows)), key=lambda place: -float(rows[place][1].sort_key or 0))[: table.max_rows]
            title += f" ({table.max_rows} of {len(rows)}, those with most {table.heads[1].text})"
            rows = [rows[place] for place in sorted(order)]
        if title:
            self.console.print(Text(self.glyphs.text(title), style="bold"))
        if table.prose:
            self._prose(table)
            return
        names, *columns = (self._column(table.heads[place], [row[place] for row in rows]) for place in chosen)
        for part in split_matrix(self.console, names, columns) if table.matrix else [columns]:
            print_grid(self.console, names, part, compact=table.compact)

    def _prose(self, table: Table) -> None:
        """Print a table whose cells wrap, except in the first column."""
        rows = ruled_table(self.console)
        for place, head in enumerate(table.heads):
            rows.add_column(head.text, overflow="fold", no_wrap=place == 0)
        for row in table.rows:
            rows.add_row(*(Text(self.glyphs.text(cell.text)) for cell in row))
        self.console.print(rows, "")

    def _column(self, head: ColumnHeader, cells: Sequence[TableCell]) -> TerminalColumn:
        text = self.glyphs.text
        heading = head.short or (break_name(text(head.text), _HEADING_LINE) if head.numeric else head.text)
        return TerminalColumn(
            "\n".join(map(text, heading.split("\n"))), [self._cell(cell, 16, cell.text) for cell in cells],
            head.numeric, head.drop or 0, [self._cell(cell, 8, cell.brief or cell.text) for cell in cells],
            head.flexible,
        )  # fmt: skip

    def _cell(self, cell: TableCell, width: int, text: str) -> str:
        return self.glyphs.sparkline(cell.series, width) if cell.series else self.glyphs.text(text)

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
        """Print each card's mark, title and text, and its lines below."""
        marked = max(cell_len(card.mark) for card in cards)
        for place, card in enumerate(cards):
            rows = Grid.grid(padding=(0, 2, 0, 0))
            rows.add_column(no_wrap=True, width=marked)
            rows.add_column(overflow="fold")
            text = Text(self.glyphs.text(card.title), style="bold" if card.text or card.lines else "")
            if card.tag:
                text.append(self.glyphs.text(f"  {card.tag}"), style="not bold dim")
            if card.text and not (self.whole and card.details):  # the details begin with the same text
                text.append(self.glyphs.text(f": {card.text}"), style="not bold")
            if card.max_lines and not self.whole:
                text = self._cut(text, self.console.width - marked - 4, card.max_lines)
            rows.add_row(Text(card.mark, style=STYLES.get(card.level, "")), text)
            lines = [(heading, detail, 0) for heading, detail in card.details] if self.whole else []
            below = lines or card.lines
            if below:
                rows.add_row("", self._lines(below, marked))
            self.console.print(rows)
            if below and any(heading for heading, _, _ in below) and place < len(cards) - 1:
                self.console.print()
        self.console.print()

    def _cut(self, text: Text, room: int, most: int) -> Text:
        """Cut a text to at most `most` lines and mark the cut."""
        more = self.glyphs.text(" …")
        kept = "\n".join(wrap(text.plain, max(room, _MIN_TEXT_WIDTH), max_lines=most, placeholder=more))
        return text if kept == text.plain else text[: len(kept) - len(more)] + more

    def _lines(self, lines: Sequence[tuple[str, str, int]], marked: int) -> Grid:
        rows = Grid.grid(padding=(0, 2, 0, 0))
        named = max(cell_len(heading) for heading, _, _ in lines)
        if named:
            rows.add_column(style="dim", no_wrap=True)
        rows.add_column(overflow="fold")
        room = max(self.console.width - marked - named - 6, _MIN_TEXT_WIDTH)
        for heading, content, most in lines:
            text = self.glyphs.text(content)
            if most:
                text = "\n".join(wrap(text, room, max_lines=most, placeholder=self.glyphs.text(" …")) or [""])
            rows.add_row(*([heading] if named else []), Text(text, style="" if named else "dim"))
        return rows

    def _rows(self) -> Grid:
        rows = Grid.grid(padding=(0, 2, 0, 0))
        most = max(self.console.width * 2 // 5, _MAX_HEADING)
        rows.add_column(style="dim", overflow="fold", min_width=_STATUS_WIDTH, max_width=most)
        rows.add_column(overflow="fold")
        return rows
