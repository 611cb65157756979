"""The document model that every page builds and every writer reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

from mismatchctl.io.version import __version__

if TYPE_CHECKING:
    from mismatchctl.measure.metrics.metric import Metric
    from mismatchctl.report.figures.figure import Figure
    from mismatchctl.results.model import Answer

EVERYWHERE, TERMINAL_AND_PAGE, PAGE_ONLY = 0, 1, 2
"""How far a part reaches: into every medium, into the terminal and the page, into the page alone."""
MIN_SPARKLINE_SPREAD = math.log(1.5)
"""Smallest range of a sparkline, in nats: a series that varies less does not fill the height."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class ColumnHeader:
    """A column header; `anchor` is its entry in the glossary, `about` the same in brief.

    `drop` says how early the column goes where there is little room, 0 never, None: it stands on the page alone;
    `short` is the heading there.
    """

    text: str
    unit: str = ""
    about: str = ""
    anchor: str = ""
    numeric: bool = True
    drop: int | None = None
    short: str = ""


@dataclass(frozen=True)
class TableCell:
    """One cell: `reason` stands below the table, `order` is what sorting goes by, `anchor` a link.

    `brief` is what stands in a narrow terminal, `kind` how it looks on a page; `place` is a K3 on its
    scale, `line` a series that is drawn.
    """

    text: str
    reason: str = ""
    order: str = ""
    kind: str = "number"
    anchor: str = ""
    brief: str = ""
    place: float | None = None
    line: tuple[float | None, ...] = ()


Item = TypeVar("Item")
TableColumns = Sequence[tuple["ColumnHeader | str", Callable[[Item], "TableCell | str"]]]


@dataclass
class DocumentPart:
    """Something in a section; how far it reaches is kept with it."""

    reach: int = field(default=EVERYWHERE, kw_only=True)

    @property
    def kind(self) -> str:
        """What media call it."""
        return type(self).__name__.lower()


@dataclass
class Table(DocumentPart):
    """A table with its caption; `title` is short.

    `matrix`: its columns are of equal rank, and stand in several tables where they do not fit; `prose`: its cells are
    sentences, and break where they do not fit. Of more than `most` rows a terminal shows those with the largest numbers
    in their first column, in order.
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
    most: int = 0
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    @classmethod
    def of(cls, caption: str, items: Iterable[Item], columns: TableColumns[Item], **more: Any) -> Table:
        """A row per item: `columns` are heads, or the text of one, each with what stands under it of an item."""
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
        """The letter of each reason, in order."""
        reasons = dict.fromkeys(cell.reason for row in self.rows for cell in row if cell.reason)
        return {reason: _LETTERS[n % 26] * (1 + n // 26) for n, reason in enumerate(reasons)}


@dataclass(frozen=True)
class Tile:
    """A number that is read first: what it is called, its value, what it means, and a judgement of it with its level.

    A terminal has room for those that come `first`, and for those of level `alarm`.
    """

    title: str
    anchor: str
    value: str
    meaning: str = ""
    verdict: str = ""
    level: str = "good"
    first: bool = True


@dataclass
class Tiles(DocumentPart):
    """Numbers side by side."""

    tiles: Sequence[Tile]
    reach: int = field(default=TERMINAL_AND_PAGE, kw_only=True)


@dataclass
class Answers(DocumentPart):
    """The four answers, with where K3 stands on its scale, and its way over the steps [S]."""

    lines: Sequence[Answer]
    k3: float | None = None
    over: Sequence[float | None] = ()


@dataclass
class Note(DocumentPart):
    """A sentence; `level` is "" plain, "quiet" an aside, "alarm" not to be overlooked, else that of an answer."""

    text: str
    level: str = ""


@dataclass
class Card(DocumentPart):
    """A finding, a check, a piece of advice: a mark with its level, a title and its text, and lines below.

    Lines are (heading, text, how many lines of a terminal it may take; 0: any). `details` stand folded on a page, and
    in a terminal where all is asked for. `tag` is what the title is filed under. Of title and text a terminal shows
    `most` lines; 0: all.
    """

    mark: str
    level: str
    title: str
    text: str = ""
    tag: str = ""
    lines: Sequence[tuple[str, str, int]] = ()
    details: Sequence[tuple[str, str]] = ()
    note: str = ""
    most: int = 0


def add_heading(heading: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Lines with a heading before the first."""
    for line in lines:
        yield heading, line
        heading = ""


@dataclass
class Facts(DocumentPart):
    """Names with what there is to say of each; a terminal draws `curves` from 0 to 1 and `series` above 0 before it.

    `wrong` are the places of rows that should be otherwise.
    """

    rows: Sequence[tuple[str, str]]
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    wrong: Collection[int] = ()
    reach: int = field(default=TERMINAL_AND_PAGE, kw_only=True)


@dataclass
class Code(DocumentPart):
    """Text as it is typed: a configuration, a command."""

    name: str
    text: str
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Figures(DocumentPart):
    """Figures side by side, those that are None left out: of the page alone.

    `axes` are (name, place of the axis) that a script finds each by.
    """

    figures: Sequence[Figure | None]
    axes: Sequence[tuple[str, str]] = ()
    reach: int = field(default=PAGE_ONLY, kw_only=True)

    def __post_init__(self) -> None:
        self.figures = [figure for figure in self.figures if figure is not None]


@dataclass
class Explorer(DocumentPart):
    """What the script of a page moves through, as data."""

    data: Any
    reach: int = field(default=PAGE_ONLY, kw_only=True)


@dataclass
class Section(DocumentPart):
    """A heading with what stands under it, sections among it; without a title its parts stand for themselves.

    `lead` explains, on a page; `folded` sections are opened by a click, with `note` beside their title; what is of the
    `terminal` alone stands on no page; anchors in it begin with `inside`.
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
    inside: str = ""

    def add(self, *parts: DocumentPart | None) -> Section:
        """The same with more parts; those that are None or hold nothing are left out."""
        self.parts += filter(_has_content, parts)
        return self


@dataclass
class DeferredSection(DocumentPart):
    """Parts of the page alone, which are not made before a page is."""

    make: Callable[[], Iterable[DocumentPart | None]]
    reach: int = field(default=PAGE_ONLY, kw_only=True)


def _has_content(part: DocumentPart | None) -> TypeGuard[DocumentPart]:
    """Whether there is something in it."""
    held = (getattr(part, name) for name in ("parts", "rows", "figures", "tiles") if hasattr(part, name))
    return part is not None and all(held)


@dataclass(frozen=True)
class GlossaryEntry:
    """A metric in the glossary."""

    anchor: str
    metric: Metric


@dataclass
class Headline:
    """What stands above everything: the page's title, its size in a few phrases, and a level where it is a verdict."""

    title: str
    facts: Sequence[str] = ()
    level: str = ""
    what: str = ""


@dataclass
class Document:
    """One page; `title` is that of the window, `glossary` explains what it shows, `version` made what is shown."""

    headline: Headline
    sections: list[DocumentPart] = field(default_factory=list)
    glossary: Callable[[], Sequence[tuple[str, Sequence[GlossaryEntry]]]] = tuple
    version: str = __version__

    @property
    def title(self) -> str:
        """What the window is called."""
        return " · ".join(filter(None, (self.headline.title, self.headline.what)))

    def add(self, *sections: Section | DeferredSection | None) -> Document:
        """The same with more sections, those that hold something."""
        self.sections += filter(_has_content, sections)
        return self

    def page(self) -> Document:
        """The same as a page has it: all is made, and what is of the terminal alone is gone."""
        return replace(self, sections=list(_resolve_parts(self.sections)))

    def terms(self) -> dict[str, list[GlossaryEntry]]:
        """What the glossary explains of a page that is made, each metric once, under its title."""
        found: dict[str, GlossaryEntry] = {}
        titles: dict[str, list[GlossaryEntry]] = {}
        for title, entries in self.glossary():
            titles[title] = [found.setdefault(entry.anchor, entry) for entry in entries if entry.anchor not in found]
        return {title: entries for title, entries in titles.items() if entries}

    def parts(self, kind: type[Any]) -> Iterator[Any]:
        """Every part of a kind on the page, wherever it stands, in order."""
        yield from (part for part in _flatten_parts(self.page().sections) if isinstance(part, kind))


def _resolve_parts(parts: Iterable[DocumentPart | None], prefix: str = "") -> Iterator[DocumentPart]:
    for part in filter(_has_content, parts):
        if isinstance(part, DeferredSection):
            yield from _resolve_parts(part.make(), prefix)
        elif not isinstance(part, Section):
            yield part
        elif not part.terminal:
            inner = list(_resolve_parts(part.parts, prefix + part.inside))
            yield from filter(_has_content, [replace(part, anchor=prefix + part.anchor, parts=inner)])


def _flatten_parts(parts: Iterable[DocumentPart]) -> Iterator[DocumentPart]:
    for part in parts:
        yield part
        yield from _flatten_parts(part.parts if isinstance(part, Section) else ())
