"""Terminal writer for documents and tables."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from typing import Any, Literal

from rich.box import Box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from mismatchctl.core.formatting import escape_terminal
from mismatchctl.report import document as doc

_ASCII = str.maketrans({
    "±": "+-", "−": "-", "–": "-", "→": "->", "…": "...", "×": "x", "▲": "up", "▼": "down", "≤": "<=", "≥": ">=",
    "⟨": "<", "⟩": ">",
})  # fmt: skip
_BAR_CHARACTERS, _ASCII_BAR_CHARACTERS = "▁▂▃▄▅▆▇█", "_.-~=+*#"
SPARKLINE_WIDTH = 40
MIN_NAME_WIDTH, MAX_NAME_WIDTH, MIN_FLEXIBLE_WIDTH, MAX_LINES, MAX_NOTES, MAX_NOTE_LINES = 24, 48, 20, 24, 4, 4
STYLES = {
    "OK": "bold green", "CHECK": "bold yellow", "FAIL": "bold red", "bad": "bold red", "failed": "bold red",
    "high": "bold red", "error": "bold red", "alarm": "yellow", "fair": "yellow", "medium": "yellow",
    "undecided": "yellow", "warning": "yellow", "low": "dim", "quiet": "dim", "unknown": "dim", "good": "green",
    "calm": "green", "passed": "green", "info": "cyan",
}  # fmt: skip
_COLUMN_GAP, _STATUS_WIDTH, _HEADING_LINE = 2, 5, 12
_UNICODE_BOX = Box("    \n    \n ── \n    \n    \n    \n    \n    \n")
_ASCII_BOX = Box("    \n    \n -- \n    \n    \n    \n    \n    \n", ascii=True)
_TRAILING_BLANKS = re.compile(r"(?: |\x1b\[[0-9;]*m)+$", re.MULTILINE)


def _lines_with_names(gap: int = 2, **names: Any) -> Grid:
    grid = Grid.grid(padding=(0, gap, 0, 0))
    grid.add_column(**names)
    grid.add_column(overflow="fold")
    return grid


def break_name(name: str, length: int) -> str:
    """Break a name after its separators into lines of about `length` characters."""
    lines = [""]
    for part in re.findall(rf"[^_\-./ ]{{0,{length - 1}}}(?:[_\-./ ]|.)|$", name):
        if lines[-1] and len(lines[-1]) + len(part) > length:
            lines.append("")
        lines[-1] += part
    return "\n".join(map(str.rstrip, lines))


@dataclass(frozen=True)
class _TerminalColumn:
    head: doc.Column
    texts: Sequence[str]
    brief: Sequence[str]  # shorter texts, for a narrow terminal

    @property
    def width(self) -> int:
        width = max(cell_len(line) for text in self.texts for line in text.split("\n"))
        return _COLUMN_GAP + (min(width, MIN_FLEXIBLE_WIDTH) if self.head.flexible else width)


def _fit_columns(columns: Sequence[_TerminalColumn], width: int) -> Sequence[_TerminalColumn]:
    """Choose the most important columns that fit into `width`, in their original order."""
    if sum(column.width for column in columns) <= width:
        return columns
    columns = [replace(column, texts=column.brief) for column in columns]
    chosen = [column for column in columns if not column.head.drop]
    for column in sorted(columns, key=lambda column: column.head.drop or 0):
        if column.head.drop and sum(one.width for one in [*chosen, column]) <= width:
            chosen.append(column)
    return [column for column in columns if column in chosen]


def print_document(document: doc.Document, console: Console, *, whole: bool = False) -> None:
    """Print a document. If it is too long for a screen, cut table cells, then leave out notes, then cut long text."""
    parts = (part for section in document.sections for part in section.parts)
    notes, sizes = sum(isinstance(part, doc.Note) and part.level == "alarm" for part in parts), [(0, True, 1 << 30)]
    if document.commands and not whole:
        fewer = range(min(notes, MAX_NOTES), min(notes, 2) - 1, -1)
        sizes = [(0, True, fewer[0]), *product((0, 2, 1), (False,), fewer), (1, False, 1)]
    for limit, wrap, most in sizes:
        writer = TerminalWriter(console, whole, limit, wrap)
        writer.notes, writer.hidden = most, notes - most + 1 if notes > most else 0
        with console.capture() as capture:
            writer.headline(document.headline)
            writer.parts(document.sections)
            writer.commands(document.commands)
        # remove trailing blanks, but not the style codes between them
        text = _TRAILING_BLANKS.sub(lambda blanks: blanks[0].replace(" ", ""), capture.get())
        if text.count("\n") <= MAX_LINES:
            break
    console.file.write(text.rstrip("\n") + "\n" if document.commands or document.headline.status else text)


class TerminalWriter:
    """Prints the parts of documents to one console: `table` prints a Table, `note` prints a Note, and so on."""

    def __init__(self, console: Console, whole: bool = False, limit: int = 0, wrap: bool = True) -> None:
        self.console, self.whole, self.limit, self.wrap = console, whole, limit, wrap
        self.notes, self.hidden = 1 << 30, 0  # notes that may still be printed, and notes that are left out
        self.plain = console.options.ascii_only
        self.dots = "..." if self.plain else "…"

    def text(self, text: str) -> str:
        """Escape control characters in text from dumps, and replace characters that the console cannot print."""
        shown = escape_terminal(text)
        return shown.translate(_ASCII).encode("ascii", "backslashreplace").decode() if self.plain else shown

    def shorten(self, text: str, length: int) -> str:
        """Shorten a name in the middle, because names tend to differ at their ends."""
        shown = self.text(text)
        if len(shown) <= length:
            return shown
        room = max(length - len(self.dots), 2)
        return f"{shown[: room - room // 2]}{self.dots}{shown[len(shown) - room // 2 :]}"

    def truncate(self, text: str, length: int) -> str:
        room = length - len(self.dots)
        return text if cell_len(text) <= length else f"{text[:room].rsplit(' ', 1)[0]}{self.dots}"

    def sparkline(self, values: Sequence[float | None], width: int = SPARKLINE_WIDTH) -> str:
        """Draw positive values as bars on a log scale. An undefined value becomes a space."""
        shares = doc.scale_sparkline(values, width)
        if not any(shares):
            return ""
        bars = _ASCII_BAR_CHARACTERS if self.plain else _BAR_CHARACTERS
        return "".join(" " if share is None else bars[min(int(share * len(bars)), len(bars) - 1)] for share in shares)

    def cut(self, text: str, indent: int = 0, least: int = 0) -> str:
        """Shorten long names in a text, and cut the text to `limit` lines."""
        if not self.limit:
            return self.text(text)
        limit = max(self.limit, least)
        shown = " ".join(self.shorten(word, MAX_NAME_WIDTH) for word in text.split(" "))
        return self.truncate(shown, limit * (self.console.width - indent) - 10 * (limit - 1))

    def headline(self, head: doc.Headline) -> None:
        if head.status:
            rows = _lines_with_names(width=_STATUS_WIDTH)
            rows.add_row(Text(head.status, STYLES[head.status]), Text(self.cut(head.title, _STATUS_WIDTH + 2), "bold"))
            self.console.print(rows, "")
        elif head.title:
            facts = f": {self.text(', '.join(head.facts))}" if head.facts else ""
            self.console.print(Text.assemble((self.cut(head.title), "bold"), (facts, "not bold")), "", sep="\n")

    def commands(self, commands: Sequence[tuple[str, str]]) -> None:
        """Print each command without line breaks, so that a copied command is complete."""
        shown = [f"{label}: {self.text(command)}" for label, command in commands]
        line = "   ".join(shown)
        for text in [line] if cell_len(line) <= self.console.width else ["   ".join(shown[:-1]), shown[-1]]:
            if text:
                self.console.print(Text(text, style="dim"), soft_wrap=True)

    def parts(self, parts: Sequence[doc.DocumentPart]) -> None:
        for kind, alike in groupby((part for part in parts if doc.is_shown(part, doc.TERMINAL_AND_PAGE)), type):
            if kind is doc.Card:
                self.cards([*alike])
            else:
                for part in alike:
                    getattr(self, part.kind)(part)

    def section(self, section: doc.Section) -> None:
        shown = [part for part in section.parts if doc.is_shown(part, doc.TERMINAL_AND_PAGE)]
        if section.title and not all(isinstance(part, doc.Table) for part in shown):
            note = f"  {self.text(section.note)}" if section.note else ""
            self.console.print(Text.assemble((self.text(section.title), "bold"), (note, "dim")))
        self.parts(shown)
        if isinstance(shown[-1], doc.Note) and section.title:
            self.console.print()

    def answers(self, part: doc.Answers) -> None:
        self.facts(doc.Facts([(line.question, line.text) for line in part.lines], {"since when": part.k3_series}))

    def table(self, table: doc.Table) -> None:
        title, rows = table.title or table.caption, table.rows
        if table.max_rows and len(rows) > table.max_rows:
            order = sorted(range(len(rows)), key=lambda at: -abs(float(rows[at][1].sort_key or 0)))[: table.max_rows]
            title += f" (top {table.max_rows} of {len(rows)} by {table.heads[1].text})"
            rows = [rows[place] for place in sorted(order)]
        if title:
            self.console.print(Text(self.text(title), style="bold"))
        box = _ASCII_BOX if self.plain else _UNICODE_BOX
        ruled = Grid(box=box, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
        if table.prose:
            for place, head in enumerate(table.heads):
                ruled.add_column(head.text, overflow="fold", no_wrap=place == 0)
            for row in rows:
                ruled.add_row(*(Text(self.text(cell.text)) for cell in row))
            self.console.print(ruled, "")
            return
        chosen = [place for place, head in enumerate(table.heads) if place == 0 or head.drop is not None]
        names, *columns = (self._column(table.heads[place], [row[place] for row in rows]) for place in chosen)
        longest = min(max(map(cell_len, names.texts)), MAX_NAME_WIDTH)
        width = self.console.width - min(longest, max(MIN_NAME_WIDTH, self.console.width // 5))
        shown = _fit_columns(columns, width)
        room = max(min(longest, self.console.width - sum(column.width for column in shown)), 8)
        spare = self.console.width - room - _COLUMN_GAP - sum(one.width for one in shown if not one.head.flexible)
        grid = Grid(box=None, pad_edge=False, padding=(0, 2, 0, 0)) if table.compact else ruled
        cut: Literal["crop", "ellipsis"] = "crop" if self.plain else "ellipsis"
        grid.add_column(Text(names.texts[0]), no_wrap=True, max_width=room, overflow=cut)
        cells = [[self.shorten(name, room) for name in (names.brief if longest > room else names.texts)[1:]]]
        for column in shown:
            justify: Literal["left", "right"] = "right" if column.head.numeric else "left"
            flexible, most = column.head.flexible, max(spare, MIN_FLEXIBLE_WIDTH)
            wrap: dict[str, Any] = {"no_wrap": True, "overflow": cut}
            wrap = {"max_width": most, "overflow": "fold"} if flexible and self.wrap else wrap
            grid.add_column(Text(column.texts[0], justify=justify), justify=justify, **wrap)
            cells.append([self.truncate(one, most) if flexible and not self.wrap else one for one in column.texts[1:]])
        for texts in zip(*cells, strict=True):
            grid.add_row(*map(Text, texts))
        self.console.print(grid, "")

    def _column(self, head: doc.Column, cells: Sequence[doc.TableCell]) -> _TerminalColumn:
        heading = head.short or self.text(head.text)
        heading = break_name(heading, _HEADING_LINE) if head.numeric else heading
        first = "\n".join(map(self.text, heading.split("\n")))

        def text(cell: doc.TableCell, width: int, shown: str) -> str:
            return self.sparkline(cell.series, width) if cell.series else self.text(shown)

        brief = [text(cell, 8, cell.brief or cell.text) for cell in cells]
        return _TerminalColumn(head, [first, *(text(cell, 16, cell.text) for cell in cells)], [first, *brief])

    def note(self, note: doc.Note) -> None:
        if note.level != "alarm":
            self.console.print(Text(self.cut(note.text), style=STYLES.get(note.level, "")))
            return
        self.notes -= 1
        if self.notes < 0:
            return
        text = f"{self.hidden} more notes: -v" if self.notes == 0 and self.hidden else note.text
        rows = _lines_with_names(1, style="yellow", width=1)
        rows.add_row("!", Text(self.cut(text, 2, MAX_NOTE_LINES)))
        self.console.print(rows)

    def facts(self, facts: doc.Facts) -> None:
        most = max(self.console.width * 2 // 5, 12)
        rows = _lines_with_names(style="dim", overflow="fold", min_width=_STATUS_WIDTH, max_width=most)
        named = min(max(_STATUS_WIDTH, *(len(name) for name, _ in facts.rows)), most) + 2
        for place, (name, text) in enumerate(facts.rows):
            series = facts.series.get(name, ())
            drawn = f"{self.sparkline(series)}  " if len(series) > 1 else ""
            style = STYLES["alarm"] if place in facts.wrong else ""
            rows.add_row(Text(self.text(name)), Text(self.cut(drawn + text, named), style=style))
        self.console.print(rows, "")

    def code(self, code: doc.Code) -> None:
        self.console.print(Text(self.text(code.name), style="dim"))
        for line in code.text.splitlines():
            self.console.print(Text(f"  {self.text(line)}"))
        self.console.print()

    def cards(self, cards: Sequence[Any]) -> None:
        marked = max(cell_len(card.mark) for card in cards)
        for place, card in enumerate(cards):
            rows = _lines_with_names(no_wrap=True, width=marked)
            below = (card.details if self.whole else ()) or card.lines
            title = self.cut(card.title, marked + 2)
            text = Text(title, style="bold" if card.text or card.lines else "")
            if card.tag:
                text.append(self.text(f"  {card.tag}"), style="not bold dim")
            if card.text and below is not card.details:  # the details begin with the same text
                text.append(self.text(f": {card.text}"), style="not bold")
            rows.add_row(Text(card.mark, style=STYLES.get(card.level, "")), text)
            named = max((cell_len(heading) for heading, _ in below), default=0)
            if below:
                lines = Grid.grid(padding=(0, 2, 0, 0))
                lines.add_column(style="dim", no_wrap=True, width=named) if named else None
                lines.add_column(overflow="fold")
                for heading, content in below:
                    shown = Text(self.cut(content, marked + named + 4), style="" if named else "dim")
                    lines.add_row(*([heading] if named else []), shown)
                rows.add_row("", lines)
            self.console.print(rows)
            if named and place < len(cards) - 1:
                self.console.print()
        self.console.print()
