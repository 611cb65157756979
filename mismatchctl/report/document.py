"""The document model. Writers render documents as HTML, text or Markdown, and escape strings from dumps."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from mismatchctl.core.formatting import DASH, format_label, format_number, shorten_for_cell
from mismatchctl.io import __version__

if TYPE_CHECKING:
    from mismatchctl.results.model import Answer

EVERYWHERE, TERMINAL_AND_PAGE, PAGE_ONLY = 0, 1, 2
"""Values of `reach`: where a part is shown. EVERYWHERE includes Markdown. A page is an HTML page."""
MIN_SPARKLINE_SPREAD = math.log(1.5)  # minimum range of the log axis of a sparkline
PartT = TypeVar("PartT", bound="DocumentPart")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class TableCell:
    """A table cell. `reason` becomes a footnote, `series` a sparkline. `brief` replaces `text` in narrow terminals."""

    text: str = ""
    reason: str = ""
    sort_key: str = ""
    kind: str = ""
    anchor: str = ""
    brief: str = ""
    series: Sequence[float | None] = ()


def number_cell(value: float | None, unit: str = "", form: Callable[[Any], str] | None = None) -> TableCell:
    text = format_number(value, unit) if form is None else form(value)
    return TableCell(text, sort_key="" if value is None else f"{value:.6g}")


@dataclass(frozen=True)
class Column:
    """A table column. `text` is the heading, `make` turns an item into a cell, and `kind` is the style of the cells."""

    text: str
    make: Callable[[Any], TableCell | str | float | None] | str = str  # a function, or the name of an attribute
    kind: str = "number"
    drop: int | None = None  # narrow terminals drop columns with high numbers first, never 0. None: only for HTML
    unit: str = ""
    description: str = ""
    anchor: str = ""  # glossary entry to which the heading links
    short: str = ""  # shorter heading for terminal and Markdown
    flexible: bool = False  # in the terminal, the cells get the remaining width

    @property
    def numeric(self) -> bool:
        return self.kind == "number"

    def cell(self, item: Any) -> TableCell:
        made = getattr(item, self.make) if isinstance(self.make, str) else self.make(item)
        if not isinstance(made, TableCell | str) and self.numeric:
            made = number_cell(made, "rows" if isinstance(made, int) else "")
        elif not isinstance(made, TableCell):
            made = TableCell(DASH if made is None else shorten_for_cell(format_label(made)))
        return made if made.kind else replace(made, kind=self.kind)


@dataclass
class DocumentPart:
    """Base class of the parts of a section. `reach` selects the outputs: EVERYWHERE, TERMINAL_AND_PAGE or PAGE_ONLY."""

    reach: int = field(default=EVERYWHERE, kw_only=True)

    @property
    def kind(self) -> str:
        return type(self).__name__.lower()


@dataclass
class Table(DocumentPart):
    """A table: its columns, and its rows of cells."""

    caption: str
    heads: Sequence[Column]
    rows: list[list[TableCell]] = field(default_factory=list)
    left_out: str = ""
    sortable: bool = False
    title: str = ""
    folded: bool = False
    prose: bool = False  # long cells wrap
    max_rows: int = 0  # if not 0, the terminal shows only this number of rows, with the largest first numbers
    runs: Sequence[int] = ()  # index of the run to which each row belongs
    compact: bool = False  # in the terminal, without a line below the headings
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    @classmethod
    def of(cls, caption: str, items: Iterable[Any], columns: Sequence[Column], **more: Any) -> Table:
        return cls(caption, columns, [[column.cell(item) for column in columns] for item in items], **more)

    @property
    def notes(self) -> dict[str, str]:
        reasons = dict.fromkeys(cell.reason for row in self.rows for cell in row if cell.reason)
        return {reason: _LETTERS[n % 26] * (1 + n // 26) for n, reason in enumerate(reasons)}


@dataclass
class Answers(DocumentPart):
    """The summary of a run, with its K3 at each step and a command to copy."""

    lines: Sequence[Answer]
    k3: float | None = None
    k3_series: Sequence[float | None] = ()
    command: str = ""


@dataclass(frozen=True)
class RunCard:
    """The summary of the run at position `index`, one of several runs. `anchor` is the section with its details."""

    index: int
    name: str
    status: str
    text: str
    action: str
    answers: Answers
    anchor: str


@dataclass
class RunCards(DocumentPart):
    """The cards of several runs, most severe first. The first `shown` cards are visible. A click shows the others."""

    cards: Sequence[RunCard]
    shown: int
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Note(DocumentPart):
    """A remark. `level` sets its style: "", "quiet", "alarm" or the level of an answer, such as "bad"."""

    text: str
    level: str = ""


def alarms(notes: Iterable[str]) -> Iterator[Note]:
    return (Note(note, "alarm") for note in notes)


@dataclass
class Card(DocumentPart):
    """A finding, a check or a piece of advice. `lines` and `details` contain pairs (heading, text)."""

    mark: str  # word before the title, such as a confidence, in the color of `level`
    level: str
    title: str
    text: str = ""
    tag: str = ""
    lines: Sequence[tuple[str, str]] = ()
    details: Sequence[tuple[str, str]] = ()  # a page folds them, --verbose shows them instead of `lines`


def add_heading(heading: str, lines: Iterable[str]) -> list[tuple[str, str]]:
    return [("" if place else heading, line) for place, line in enumerate(lines)]


@dataclass
class Facts(DocumentPart):
    """A list of pairs (name, text)."""

    rows: Sequence[tuple[str, str]]
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)  # name -> sparkline before its text
    wrong: Collection[int] = ()  # indices of rows that need attention
    reach: int = field(default=TERMINAL_AND_PAGE, kw_only=True)


@dataclass
class Code(DocumentPart):
    """A configuration or a command."""

    name: str
    text: str
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Figures(DocumentPart):
    """Figures side by side. Missing figures are left out."""

    figures: Any
    axes: Sequence[str] = ()  # per figure: key of the threshold on its x-axis, for the script of a sweep
    runs: bool = False  # True if readers of the page can choose which runs are drawn
    height: int = 0  # in pixels; 0 means the default
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    def __post_init__(self) -> None:
        self.figures = [figure for figure in self.figures if figure is not None]


@dataclass
class Explorer(DocumentPart):
    """The interactive threshold explorer of a sweep. `data` computes its content, `anchors` are its glossary links."""

    data: Callable[[], Any]
    anchors: Collection[str]
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Section(DocumentPart):
    """A section. Its parts can also be sections. If the title is empty, the heading is omitted."""

    title: str
    anchor: str
    parts: list[Any] = field(default_factory=list)
    lead: str = ""
    note: str = ""
    folded: bool = False  # on a page, shown after a click
    opened: bool = False  # for a folded section: open at first
    terminal: bool = False  # only in the terminal
    level: str = ""  # FAIL, CHECK or OK
    series: Sequence[float | None] = ()  # sparkline in the heading
    run: int | None = None  # index of the run that it shows

    def add(self, *parts: DocumentPart | None) -> Section:
        self.parts += filter(_has_content, parts)
        return self


def scale_sparkline(values: Sequence[float | None], width: int) -> list[float | None]:
    """Average a positive series to at most `width` points, and return their heights (0 to 1) on a log axis."""
    heights = [None if value is None else math.log(value) if value > 0 else -math.inf for value in values]
    if len(heights) > width:
        cuts = [round(i * len(heights) / width) for i in range(width + 1)]
        parts = ([height for height in heights[a:b] if height is not None] for a, b in pairwise(cuts))
        heights = [sum(part) / len(part) if part else None for part in parts]
    known = [height for height in heights if height is not None and math.isfinite(height)]
    if not known:
        return []
    spread = max(max(known) - min(known), MIN_SPARKLINE_SPREAD)
    low = (max(known) + min(known) - spread) / 2
    return [None if height is None else max((height - low) / spread, 0.0) for height in heights]


def is_shown(part: DocumentPart, reach: int) -> bool:
    return part.reach <= reach and (not isinstance(part, Section) or any(is_shown(one, reach) for one in part.parts))


def _has_content(part: PartT | None) -> TypeGuard[PartT]:
    return part is not None and all(getattr(part, name, True) for name in ("parts", "rows", "cards", "figures"))


@dataclass
class Headline:
    """The top of a document: its title, and a status (OK, CHECK or FAIL, or "" without a status)."""

    title: str
    facts: Sequence[str] = ()
    subtitle: str = ""
    status: str = ""


@dataclass
class Document:
    """A document. `commands` are pairs (label, command), shown in the last line of the terminal output."""

    headline: Headline
    sections: list[Section] = field(default_factory=list)
    version: str = __version__
    commands: Sequence[tuple[str, str]] = ()

    @property
    def title(self) -> str:
        return " · ".join(filter(None, (self.headline.title, self.headline.subtitle)))

    def add(self, *sections: Section | None) -> Document:
        self.sections += [section for section in sections if _has_content(section)]
        return self

    def parts(self, kind: type[Any]) -> Iterator[Any]:
        waiting: list[Any] = self.sections[::-1]
        while waiting:
            part = waiting.pop()
            waiting += part.parts[::-1] if isinstance(part, Section) else ()
            if isinstance(part, kind):
                yield part
