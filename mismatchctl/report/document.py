"""The document model. Pages build documents, and the HTML, terminal and Markdown writers read them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from mismatchctl.io import __version__

if TYPE_CHECKING:
    from mismatchctl.measure.metrics.metric import Metric
    from mismatchctl.report.figures.figure import Figure
    from mismatchctl.results.model import Answer

EVERYWHERE, TERMINAL_AND_PAGE, PAGE_ONLY = 0, 1, 2
"""The media that show a part: all of them, all but Markdown, or HTML alone."""
MIN_SPARKLINE_SPREAD = math.log(1.5)
"""Smallest range of a sparkline, in nats: a series that varies less does not fill the height."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ColumnHeader:
    """A column header.

    Attributes:
        description: explanation of the column.
        anchor: the column's entry in the glossary, if it has one.
        drop: priority in the terminal, which drops the highest first. 0 always stays, without one it is HTML only.
        short: heading in the terminal and in Markdown.
        flexible: True if the terminal cuts the cells to the width that other columns leave.
    """

    text: str
    unit: str = ""
    description: str = ""
    anchor: str = ""
    numeric: bool = True
    drop: int | None = None
    short: str = ""
    flexible: bool = False


@dataclass(frozen=True)
class TableCell:
    """One cell of a table.

    Attributes:
        reason: footnote.
        sort_key: key for sorting, by default the text.
        kind: CSS class.
        anchor: link target.
        brief: text for a narrow terminal.
        k3: a K3, drawn on the K3 scale.
        series: a series, drawn as a sparkline.
    """

    text: str
    reason: str = ""
    sort_key: str = ""
    kind: str = "number"
    anchor: str = ""
    brief: str = ""
    k3: float | None = None
    series: tuple[float | None, ...] = ()


Item = TypeVar("Item")
TableColumns = Sequence[tuple["ColumnHeader | str", Callable[[Item], "TableCell | str"]]]


@dataclass
class DocumentPart:
    """Base class of the parts of a section. `reach` limits the media that show the part."""

    reach: int = field(default=EVERYWHERE, kw_only=True)

    @property
    def kind(self) -> str:
        """Name of the part, used by the writers to choose a macro or a method."""
        return type(self).__name__.lower()


@dataclass
class Table(DocumentPart):
    """A table.

    Attributes:
        left_out: remark about rows that are not shown.
        folded: True if the page opens the table on a click.
        matrix: True if the terminal splits columns that do not fit into further tables.
        prose: True if long cells wrap.
        max_rows: maximum rows in a terminal, chosen by the largest first number. 0 is unlimited.
        runs: position of the run of each row, on a page with several.
        compact: True if the terminal draws no rule below the headings.
    """

    caption: str
    heads: list[ColumnHeader]
    rows: list[list[TableCell]] = field(default_factory=list)
    left_out: str = ""
    sortable: bool = False
    title: str = ""
    folded: bool = False
    matrix: bool = False
    prose: bool = False
    max_rows: int = 0
    runs: Sequence[int] = ()
    compact: bool = False
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    @classmethod
    def of(cls, caption: str, items: Iterable[Item], columns: TableColumns[Item], **more: Any) -> Table:
        """Build a table with one row per item. Each column is a head and a function from an item to its cell."""
        heads = [head if isinstance(head, ColumnHeader) else ColumnHeader(head, numeric=False) for head, _ in columns]
        plain = ["number" if head.numeric else "text" for head in heads]
        rows = []
        for item in items:
            cells = [make(item) for _, make in columns]
            rows.append(
                [c if isinstance(c, TableCell) else TableCell(c, kind=k) for c, k in zip(cells, plain, strict=True)]
            )
        return cls(caption, heads, rows, **more)

    @property
    def notes(self) -> dict[str, str]:
        """The footnotes, each with its letter."""
        reasons = dict.fromkeys(cell.reason for row in self.rows for cell in row if cell.reason)
        return {reason: _LETTERS[n % 26] * (1 + n // 26) for n, reason in enumerate(reasons)}


@dataclass(frozen=True)
class Tile:
    """A number with its meaning and a judgement. The terminal shows tiles that are `first` or have level `alarm`."""

    title: str
    anchor: str
    value: str
    meaning: str = ""
    verdict: str = ""
    level: str = "good"
    first: bool = True


@dataclass
class Tiles(DocumentPart):
    """A row of tiles."""

    tiles: Sequence[Tile]
    reach: int = field(default=TERMINAL_AND_PAGE, kw_only=True)


@dataclass
class Answers(DocumentPart):
    """The answers of the summary, with K3, its series over the steps [S], and a command to copy."""

    lines: Sequence[Answer]
    k3: float | None = None
    k3_series: Sequence[float | None] = ()
    command: str = ""


@dataclass(frozen=True)
class RunCard:
    """The answer of one run on a page with several.

    `status` is OK, CHECK or FAIL, `anchor` the section with its details, `index` the position among the runs.
    """

    index: int
    name: str
    status: str
    text: str
    action: str
    answers: Answers
    anchor: str


@dataclass
class RunCards(DocumentPart):
    """The answers of several runs, most severe first. Only `shown` of them are visible at first."""

    cards: Sequence[RunCard]
    shown: int
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Note(DocumentPart):
    """A remark. `level` is empty, "quiet", "alarm" or the level of an answer."""

    text: str
    level: str = ""


@dataclass
class Card(DocumentPart):
    """A finding, a check or a piece of advice.

    Attributes:
        mark: label in front of the title, such as a confidence or an outcome.
        level: color of the mark.
        tag: category after the title.
        lines: (heading, text, maximum lines in a terminal) each. 0 lines is unlimited.
        details: (heading, text) each, folded on a page. The terminal shows them with `--verbose`.
        max_lines: maximum lines of title and text in a terminal. 0 is unlimited.
    """

    mark: str
    level: str
    title: str
    text: str = ""
    tag: str = ""
    lines: Sequence[tuple[str, str, int]] = ()
    details: Sequence[tuple[str, str]] = ()
    note: str = ""
    max_lines: int = 0


def add_heading(heading: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Pair the first line with the heading and the others with an empty one."""
    for line in lines:
        yield heading, line
        heading = ""


@dataclass
class Facts(DocumentPart):
    """Pairs of a name and a text.

    Attributes:
        curves: series from 0 to 1 by name. The terminal draws them before the text.
        series: positive series by name, drawn on a log scale.
        wrong: indices of rows that need attention.
    """

    rows: Sequence[tuple[str, str]]
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    wrong: Collection[int] = ()
    reach: int = field(default=TERMINAL_AND_PAGE, kw_only=True)


@dataclass
class Code(DocumentPart):
    """A configuration or a command, verbatim."""

    name: str
    text: str
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Figures(DocumentPart):
    """Figures side by side. Missing figures are dropped.

    `axes` has the name of the threshold of each figure, for the script of a sweep. `runs` is True if the reader can
    choose runs. `height` is in pixels, 0 for the default.
    """

    figures: Sequence[Figure | None]
    axes: Sequence[str] = ()
    runs: bool = False
    height: int = 0
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    def __post_init__(self) -> None:
        self.figures = [figure for figure in self.figures if figure is not None]


@dataclass
class Explorer(DocumentPart):
    """Data for the script that explores thresholds."""

    data: Any
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Section(DocumentPart):
    """A section with its parts, which may be sections. Without a title, no heading is printed.

    Attributes:
        lead: introduction on the page.
        note: remark after the title.
        folded: True if the page opens the section on a click.
        opened: True if a folded section starts open.
        terminal: True if only the terminal shows the section.
        level: FAIL, CHECK or OK if the section has a status.
        series: a series in the heading, drawn as a sparkline.
        run: position of the run that the section is about, on a page with several.
        anchor_prefix: prefix of the anchors inside the section.
    """

    title: str
    anchor: str
    parts: list[Any] = field(default_factory=list)
    lead: str = ""
    note: str = ""
    folded: bool = False
    opened: bool = False
    heading: bool = True
    terminal: bool = False
    anchor_prefix: str = ""
    level: str = ""
    series: Sequence[float | None] = ()
    run: int | None = None

    def add(self, *parts: DocumentPart | None) -> Section:
        """Append the parts that have content and return the section."""
        self.parts += filter(_has_content, parts)
        return self


@dataclass
class DeferredSection(DocumentPart):
    """Parts of the page that are only built when a page is rendered."""

    make: Callable[[], Iterable[DocumentPart | None]]
    reach: int = field(default=PAGE_ONLY, kw_only=True)


def _has_content(part: DocumentPart | None) -> TypeGuard[DocumentPart]:
    """Return True if the part exists and is not empty."""
    contents = (getattr(part, name) for name in ("parts", "rows", "figures", "tiles", "cards") if hasattr(part, name))
    return part is not None and all(contents)


@dataclass(frozen=True)
class GlossaryEntry:
    """A metric in the glossary."""

    anchor: str
    metric: Metric


@dataclass
class Headline:
    """The page title, the size of the data in a few phrases, and the level of a verdict.

    Attributes:
        status: OK, CHECK or FAIL in front of the title of a screen.
    """

    title: str
    facts: Sequence[str] = ()
    level: str = ""
    subtitle: str = ""
    status: str = ""


@dataclass
class Document:
    """A document: headline, sections and the metric glossary of its tables.

    `commands` are (label, command) each, in the last line of a screen. `page_title` is the title of a page, if it
    differs.
    """

    headline: Headline
    sections: list[DocumentPart] = field(default_factory=list)
    glossary: Callable[[], Sequence[tuple[str, Sequence[GlossaryEntry]]]] = tuple
    version: str = __version__
    commands: Sequence[tuple[str, str]] = ()
    page_title: Callable[[], str] | None = None

    @property
    def title(self) -> str:
        """Title of the browser window."""
        return " · ".join(filter(None, (self.headline.title, self.headline.subtitle)))

    def add(self, *sections: Section | DeferredSection | None) -> Document:
        """Append sections that are not empty, and return the document."""
        self.sections += filter(_has_content, sections)
        return self

    def page(self) -> Document:
        """Return the document for a page: deferred parts are built, terminal-only sections are removed."""
        head = self.headline if self.page_title is None else replace(self.headline, title=self.page_title())
        return replace(self, headline=head, page_title=None, sections=list(_resolve_parts(self.sections)))

    def terms(self) -> dict[str, list[GlossaryEntry]]:
        """Return the glossary entries by title. A metric appears under its first title only."""
        found: dict[str, GlossaryEntry] = {}
        titles: dict[str, list[GlossaryEntry]] = {}
        for title, entries in self.glossary():
            titles[title] = [found.setdefault(entry.anchor, entry) for entry in entries if entry.anchor not in found]
        return {title: entries for title, entries in titles.items() if entries}

    def parts(self, kind: type[Any]) -> Iterator[Any]:
        """Yield the parts of one type, in the order of the page."""
        yield from (part for part in _flatten_parts(self.page().sections) if isinstance(part, kind))


def _resolve_parts(parts: Iterable[DocumentPart | None], prefix: str = "") -> Iterator[DocumentPart]:
    for part in filter(_has_content, parts):
        if isinstance(part, DeferredSection):
            yield from _resolve_parts(part.make(), prefix)
        elif not isinstance(part, Section):
            yield part
        elif not part.terminal:
            inner = list(_resolve_parts(part.parts, prefix + part.anchor_prefix))
            yield from filter(_has_content, [replace(part, anchor=prefix + part.anchor, parts=inner)])


def _flatten_parts(parts: Iterable[DocumentPart]) -> Iterator[DocumentPart]:
    for part in parts:
        yield part
        yield from _flatten_parts(part.parts if isinstance(part, Section) else ())
