"""Figures as data: axes, marks and reference lines. Observable Plot draws them on pages, and matplotlib in files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, zip_longest
from typing import Any, Literal

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import INTERVAL_Z, escape_csv, escape_terminal, format_label, shorten
from mismatchctl.core.validation import cap_sum
from mismatchctl.results.model import Series

Number = float | int | None
Cell = Number | str
Scale = Literal["linear", "log", "symlog", "band"]
MarkKind = Literal["line", "stairs", "dots", "hexagons"]
MUTED = -1  # color number of gray, which is not one of the ten series colors
MAX_SCREEN_POINTS = 480  # maximum points of a line on a page, see `_thin_line`
_FEW_DIGITS, _DIGITS, _PLACE_DIGITS = 3, 4, 9
_COLUMNS = ("x", "y", "low", "high", "labels", "values")
MANY_FIGURES = 100  # if a page has more figures, its numbers are rounded to three digits


@dataclass(frozen=True)
class Axis:
    """An axis. `ticks` are (position, label), or (index, name) if `named`. Symlog axes are linear up to `linear_to`."""

    label: str = ""
    scale: Scale = "linear"
    limits: tuple[float, float] | None = None
    percent: bool = False
    linear_to: float = 1.0
    ticks: tuple[tuple[float, str], ...] = ()
    named: bool = False


@dataclass(frozen=True)
class Marks:
    """One series of a figure."""

    kind: MarkKind
    name: str
    x: Sequence[Cell]  # positions. Stairs have one more x than y, because x contains edges.
    y: Sequence[Cell]  # positions, or names on a band axis
    low: Sequence[Number] = ()  # low end of the interval of y, or if `across`, of x
    high: Sequence[Number] = ()
    across: bool = False
    color: int = 0
    dashed: bool = False
    hollow: bool = False
    labels: Sequence[str] = ()
    values: Sequence[Number] = ()  # numbers of tokens, drawn as colors of hexagons
    shift: float = 0.0  # in a band: vertical offset, in points. For hexagons: their width.
    run: int | None = None  # index of the run, on a page with several runs


@dataclass(frozen=True)
class ReferenceLine:
    """A line across the figure at the value `at` of one axis, with a shaded `interval`. A `limit` line is dotted."""

    axis: Literal["x", "y"]
    at: float | None
    text: str = ""
    interval: tuple[float, float] | None = None
    style: Literal["mark", "limit", "usual"] = "mark"
    color: int = MUTED
    run: int | None = None


@dataclass(frozen=True)
class Figure:
    """One figure. `name` is unique on its page, and `title` states the main result."""

    name: str
    title: str
    caption: str
    x: Axis
    y: Axis
    marks: tuple[Marks, ...]
    rules: tuple[ReferenceLine, ...] = ()
    size: Literal["normal", "wide", "square"] = "normal"

    @property
    def alt(self) -> str:
        names = ", ".join(mark.name for mark in self.marks[:8] if mark.name)
        axes = " by ".join(filter(None, (self.y.label, self.x.label)))
        return escape_terminal(f"{self.title}: {axes}{f' for {names}' if names else ''}.")

    def table(self) -> tuple[list[str], list[list[Cell]]]:
        """Return the column headings, and a row per point. Columns without any value are left out."""
        ticks = dict(self.x.ticks) if self.x.named else {}
        unlike = bool(self.x.ticks) and self.x.scale == "linear" and not self.x.named  # positions are not values
        heads = ["series", "name", self.x.label or "x", self.y.label or "y", "from", "to", "value"]
        rows: list[list[Cell]] = []
        for mark in self.marks:
            places = [place if isinstance(place, str) else ticks.get(place or 0, place) for place in mark.x]
            names = ((), mark.labels) if unlike else (mark.labels, places)
            columns = (*names, mark.y, mark.low, mark.high, mark.values)
            series = mark.name if len(self.marks) > 1 else ""
            for index in range(len(mark.y)):
                rows.append([series, *(column[index] if index < len(column) else None for column in columns)])
        used = [place for place in range(len(heads)) if any(row[place] not in (None, "") for row in rows)]
        return [heads[place] for place in used], [[row[place] for place in used] for row in rows]

    def csv(self) -> str:
        """Return the numbers as CSV. Text that a spreadsheet could run as a formula is quoted."""
        heads, rows = self.table()
        return _csv_line(heads) + "".join(map(_csv_line, rows))


def _csv_line(cells: Sequence[Cell]) -> str:
    stream = io.StringIO()
    csv.writer(stream).writerow(map(_csv_cell, cells))  # its line end CR LF makes it quote cells with CR or LF
    return stream.getvalue().removesuffix("\r\n") + "\n"


def _csv_cell(cell: Cell) -> int | str:
    if isinstance(cell, str):
        return escape_csv(cell)
    if cell is None or not math.isfinite(cell):
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else cell


def _thin_line(mark: Marks) -> Marks:
    """Shorten a long line: split it into equal parts, and keep its ends and each part's minimum and maximum."""
    if mark.kind != "line" or len(mark.y) <= MAX_SCREEN_POINTS:
        return mark
    values = np.array([math.nan if y is None else y for y in mark.y], np.float64)
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), MAX_SCREEN_POINTS // 2):
        known = part[np.isfinite(values[part])]
        kept |= {int(known[pick(values[known])]) for pick in (np.argmin, np.argmax)} if len(known) else {int(part[0])}
    columns: dict[str, Any] = {key: getattr(mark, key) for key in _COLUMNS}
    for key, own in columns.items():
        columns[key] = [own[at] for at in sorted(kept)] if len(own) else ()
    return replace(mark, **columns)


def page_data(figures: Sequence[Figure]) -> dict[str, Any]:
    """Return figures as data for the script of a page. Leave out default values, and store equal columns once."""
    columns: dict[tuple[Cell, ...], int] = {}
    captions: dict[str, int] = {}
    digits = _FEW_DIGITS if len(figures) > MANY_FIGURES else _DIGITS

    def changed(part: Any, default: Any) -> dict[str, Any]:
        return {key: value for key, value in vars(part).items() if value != vars(default)[key]}

    def mark_data(mark: Marks) -> dict[str, Any]:
        data = changed(mark, Marks("line", "", (), ()))
        for key in filter(data.__contains__, _COLUMNS):
            column = tuple(round_number(value, _PLACE_DIGITS if key == "x" else digits) for value in data[key])
            data[key] = columns.setdefault(column, len(columns))
        return data

    described = [
        vars(figure) | {
            "caption": captions.setdefault(figure.caption, len(captions)),
            "x": changed(figure.x, Axis()), "y": changed(figure.y, Axis()),
            "rules": [changed(rule, ReferenceLine("x", None)) | {"axis": rule.axis} for rule in figure.rules],
            "marks": [mark_data(_thin_line(mark)) for mark in figure.marks],
        }
        for figure in figures
    ]  # fmt: skip
    return {"columns": list(columns), "captions": list(captions), "figures": described}


def round_number(value: Cell, digits: int) -> Cell:
    if not isinstance(value, float):
        return value
    rounded = float(f"{value:.{digits}g}") if math.isfinite(value) else None
    return int(rounded) if rounded is not None and rounded.is_integer() and abs(rounded) < 1e9 else rounded


MAX_NAME = 30  # maximum characters of a label. Row names at the left may have twice this length.
Interval = tuple[Number, Number, Number]


def interval_of(
    value: Number, se: Number = None, ends: tuple[float, float] | None = None, *, log: bool = False
) -> Interval:
    """Return a value with its 95% interval. On a log axis, cut the interval at value / 10 and value * 10."""
    if value is None or (log and value <= 0):
        return None, None, None
    low, high = ends or (value - INTERVAL_Z * (se or 0), value + INTERVAL_Z * (se or 0))
    return (value, max(low, value / 10), min(high, value * 10)) if log else (value, low, high)


def change_axis(label: str, series: Mapping[str, Mapping[str, Interval]]) -> Axis:
    """Return an axis for relative changes: in percent, or as factors such as 6x if a change exceeds a factor of 5."""
    ends = [end for values in series.values() for ends in values.values() for end in ends if end is not None]
    low, high = cap_sum(min([*ends, 0.0])), cap_sum(max([*ends, 0.0]))
    if max(-low, high) <= 4:
        return Axis(label, percent=True)
    sizes = [(10.0**digits - 1, f"{10**digits:,}x") for digits in range(1, 8)]
    ticks = [(-size, f"-{text}") for size, text in reversed(sizes)] + [(0.0, "0%"), (1.0, "+100%"), *sizes]
    inside = tuple(tick for tick in ticks if low <= tick[0] <= high)
    return Axis(label, "symlog", (1.3 * low - 0.2, 1.3 * high + 0.2), percent=True, ticks=inside)


def rows_figure(
    name: str, title: str, caption: str, x: Axis, series: Mapping[str, Mapping[str, Interval]], *,
    noun: str = "", rule: tuple[float, str] | None = None, size: Literal["normal", "wide"] = "normal",
) -> Figure | None:  # fmt: skip
    """Draw one row per name, with a point and an interval for each series, and a dotted line at `rule`."""
    rows: dict[str, str] = {}
    for row in (row for values in series.values() for row in values if row not in rows):
        text = shorten(row, 2 * MAX_NAME)
        rows[row] = text if text not in rows.values() else f"{text} ({len(rows) + 1})"
    marks = []
    for place, (label, values) in enumerate(series.items()):
        if values:
            x_values, low, high = (list(column) for column in zip(*values.values(), strict=True))
            shift, names = 7.0 * (place - (len(series) - 1) / 2), [rows[row] for row in values]
            marks.append(Marks("dots", label, x_values, names, low, high, True, place, hollow=place > 0, shift=shift))
    rules = () if rule is None else (ReferenceLine("x", *rule, None, "limit"),)
    return Figure(name, title, caption, x, Axis(noun, "band"), tuple(marks), rules, size) if marks else None


StepLabel = str | int | float | bool | None


def line_marks(
    series: Mapping[str, Series], key: str, name: str, steps: StepAxis, color: int = 0, *, log: bool = False,
    band: bool = True, run: int | None = None,
) -> Marks | None:  # fmt: skip
    if (found := series.get(key)) is None:
        return None
    se, ends = (found.se, found.interval) if band else (None, None)
    made = interval_line(name, steps.places, found.value, se, ends, log=log, color=color, run=run)
    return made if any(value is not None for value in made.y) else None


def interval_line(
    name: str, x: Sequence[Cell], y: Sequence[float | None], se: Sequence[float | None] | None = None,
    intervals: Sequence[tuple[float, float] | None] | None = None, *, log: bool = False, **more: Any,
) -> Marks:  # fmt: skip
    points = (interval_of(*each, log=log) for each in zip_longest(y, se or (), intervals or ()))
    values, low, high = map(list, zip(*points, strict=True))
    return Marks("line", name, x, values, *((low, high) if low != high else ()), **more)


def to_floats(values: Sequence[Cell]) -> Float64s:
    return np.array([math.nan if value is None else value for value in values], np.float64)


class StepAxis:
    """The step axis. Ascending step numbers are drawn to scale, other labels at equal distances."""

    def __init__(self, labels: Sequence[StepLabel]) -> None:
        numbers = [x for x in labels if isinstance(x, (int, float)) and not isinstance(x, bool) and math.isfinite(x)]
        self.numeric = len(numbers) == len(labels) and all(a < b for a, b in pairwise(numbers))
        self.places: list[float | int] = list(numbers) if self.numeric else list(range(len(labels)))
        self.names = [shorten(format_label(value), 14) for value in labels]
        self.place_of = dict(zip(map(format_label, labels), self.places, strict=True))

    @property
    def axis(self) -> Axis:
        ticks = () if self.numeric else tuple((float(place), name) for place, name in enumerate(self.names))
        low, high = self.places[0], self.places[-1]
        limits = (float(low), float(high)) if high > low else (low - 0.5, high + 0.5)
        return Axis("step", limits=limits, ticks=ticks, named=not self.numeric)
