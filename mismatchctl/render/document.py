"""What a page is made of, whatever it is written to: every verb makes a Document, every medium writes one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from mismatchctl import __version__
from mismatchctl.numbers import DASH, estimate, heavy_tail

if TYPE_CHECKING:
    from mismatchctl.render.figures import Figure
    from mismatchctl.render.tables import Entry
    from mismatchctl.result import Answer, Value

BRIEF, USUAL, WHOLE = 0, 1, 2
"""How far a part reaches: into every medium, into the terminal and the page, into the page alone."""
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True)
class Head:
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
class Cell:
    """One cell: `mark` refers to a note below the table, `order` is what sorting goes by, `anchor` a link.

    `brief` is what stands in a narrow terminal, `kind` how it looks on a page; `place` is a K3 on its
    scale, `line` a series that is drawn.
    """

    text: str
    mark: str = ""
    order: str = ""
    kind: str = "number"
    anchor: str = ""
    brief: str = ""
    place: float | None = None
    line: tuple[float | None, ...] = ()


Item = TypeVar("Item")
Columns = Sequence[tuple["Head | str", Callable[[Item], "Cell | str"]]]


@dataclass
class Part:
    """Something in a section; how far it reaches is kept with it."""

    kind: ClassVar[str] = ""
    reach: int = field(default=BRIEF, kw_only=True)


@dataclass
class Table(Part):
    """A table with its caption; `notes` collects the reasons of empty cells, lettered; `title` is short.

    `matrix`: its columns are of equal rank, and stand in several tables where they do not fit; `prose`: its cells are
    sentences, and break where they do not fit. Of more than `most` rows a terminal shows those with the largest numbers
    in their first column, in order.
    """

    kind = "table"
    caption: str
    heads: list[Head]
    rows: list[list[Cell]] = field(default_factory=list)
    notes: dict[str, str] = field(default_factory=dict)
    left_out: str = ""
    sortable: bool = False
    title: str = ""
    folded: bool = False
    matrix: bool = False
    prose: bool = False
    most: int = 0
    reach: int = field(default=WHOLE, kw_only=True)

    @classmethod
    def of(cls, caption: str, items: Iterable[Item], columns: Columns[Item], **more: Any) -> Table:
        """A row per item: `columns` are heads, or the text of one, each with what stands under it of an item."""
        heads = [head if isinstance(head, Head) else Head(head, numeric=False) for head, _ in columns]
        table = cls(caption, heads, **more)
        for item in items:
            found = [make(item) for _, make in columns]
            table.rows.append(
                [
                    cell if isinstance(cell, Cell) else Cell(cell, kind="number" if head.numeric else "text")
                    for head, cell in zip(heads, found, strict=True)
                ]
            )
        return table

    def value(self, value: Value, unit: str, *, errors: bool = True) -> Cell:
        """A cell for a value: with ± where known and a mark where that is too little, or a dash with the reason's."""
        if value.value is None:
            return Cell(DASH, self.note(value.status))
        order = f"{value.value:.6g}" if self.sortable else ""
        brief = estimate(value.value, None, unit)
        mark = self.note(heavy_tail(value.covers)) if errors and value.tail else ""
        return Cell(estimate(value.value, value.se if errors else None, unit), mark, order=order, brief=brief)

    def note(self, reason: str) -> str:
        """The letter of a reason."""
        if reason not in self.notes:
            index = len(self.notes)
            self.notes[reason] = _LETTERS[index % 26] * (1 + index // 26)
        return self.notes[reason]


@dataclass(frozen=True)
class Tile:
    """A number that is read first: what it is called, its value, what it means, and a judgement of it.

    A terminal has room for those that come `first`, and for those that are beyond a limit.
    """

    title: str
    anchor: str
    value: str
    meaning: str = ""
    verdict: str = ""
    alarm: bool = False
    undefined: bool = False
    first: bool = True


@dataclass
class Tiles(Part):
    """Numbers side by side."""

    kind = "tiles"
    tiles: Sequence[Tile]
    reach: int = field(default=USUAL, kw_only=True)


@dataclass
class Answers(Part):
    """The four answers, with where K3 stands on its scale, and its way over the steps [S]."""

    kind = "answers"
    lines: Sequence[Answer]
    k3: float | None = None
    over: Sequence[float | None] = ()


@dataclass
class Note(Part):
    """A sentence; `level` is "" plain, "quiet" an aside, "alarm" not to be overlooked, else that of an answer."""

    kind = "note"
    text: str
    level: str = ""


@dataclass
class Card(Part):
    """A finding, a check, a piece of advice: a mark with its level, a title and its text, and lines below.

    Lines are (heading, text, how many lines of a terminal it may take; 0: any). `details` stand folded on a page, and
    in a terminal where all is asked for. `tag` is what the title is filed under. Of title and text a terminal shows
    `most` lines; 0: all.
    """

    kind = "card"
    mark: str
    level: str
    title: str
    text: str = ""
    tag: str = ""
    lines: Sequence[tuple[str, str, int]] = ()
    details: Sequence[tuple[str, str]] = ()
    note: str = ""
    most: int = 0


def under(heading: str, lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Lines with a heading before the first."""
    for line in lines:
        yield heading, line
        heading = ""


@dataclass
class Facts(Part):
    """Names with what there is to say of each; a terminal draws `curves` from 0 to 1 and `series` above 0 before it.

    `wrong` are the places of rows that should be otherwise.
    """

    kind = "facts"
    rows: Sequence[tuple[str, str]]
    curves: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    wrong: Collection[int] = ()
    reach: int = field(default=USUAL, kw_only=True)


@dataclass
class Code(Part):
    """Text as it is typed: a configuration, a command."""

    kind = "code"
    name: str
    text: str
    reach: int = field(default=WHOLE, kw_only=True)


@dataclass
class Figures(Part):
    """Figures side by side: of the page alone. `axes` are (name, place of the axis) that a script finds each by."""

    kind = "figures"
    figures: Sequence[Figure]
    axes: Sequence[tuple[str, str]] = ()
    reach: int = field(default=WHOLE, kw_only=True)


@dataclass
class Explorer(Part):
    """What the script of a page moves through, as data."""

    kind = "explorer"
    data: Any
    reach: int = field(default=WHOLE, kw_only=True)


@dataclass
class Section(Part):
    """A heading with what stands under it, sections among it; without a title its parts stand for themselves.

    `lead` explains, on a page; `folded` sections are opened by a click, with `note` beside their title; what is of the
    `terminal` alone stands on no page.
    """

    kind = "section"
    title: str
    anchor: str
    parts: list[Any] = field(default_factory=list)
    lead: str = ""
    note: str = ""
    folded: bool = False
    opened: bool = False
    heading: bool = True
    terminal: bool = False

    def add(self, *parts: Part | None) -> Section:
        """The same with more parts; those that are None or hold nothing are left out."""
        self.parts += [part for part in parts if part is not None and not _is_empty(part)]
        return self


def _is_empty(part: Part) -> bool:
    if isinstance(part, Section):
        return not part.parts
    for name in ("rows", "figures", "tiles"):
        if hasattr(part, name):
            return not getattr(part, name)
    return False


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
    sections: list[Section] = field(default_factory=list)
    glossary: Sequence[tuple[str, Sequence[Entry]]] = ()
    version: str = __version__

    @property
    def title(self) -> str:
        """What the window is called."""
        return " · ".join(filter(None, (self.headline.title, self.headline.what)))

    def add(self, *sections: Section | None) -> Document:
        """The same with more sections, those that hold something."""
        self.sections += [section for section in sections if section is not None and section.parts]
        return self

    def parts(self, kind: type[Any]) -> Iterator[Any]:
        """Every part of a kind, wherever it stands, in order."""
        yield from _parts(self.sections, lambda part: isinstance(part, kind))


def _parts(parts: Sequence[Any], wanted: Callable[[Any], bool]) -> Iterator[Any]:
    for part in parts:
        if wanted(part):
            yield part
        if isinstance(part, Section):
            yield from _parts(part.parts, wanted)
