"""Figures as data: axes, marks and rules. Pages draw them with Observable Plot, files with matplotlib."""

from __future__ import annotations

import csv
import io
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from mismatchctl.core.formatting import escape_csv, escape_terminal

Number = float | int | None
Cell = Number | str
Scale = Literal["linear", "log", "symlog", "band"]
MarkKind = Literal["line", "stairs", "dots", "cells", "hexagons"]
MUTED, ACCENT = -1, -2
"""Colors other than the ten series colors: gray, and the color of findings."""
MAX_SCREEN_POINTS = 480
"""Maximum points of a line on a page. Longer series keep the smallest and the largest value of each interval."""
_BAND_DIGITS, _DIGITS, _PLACE_DIGITS = 3, 4, 9
MANY_FIGURES = 100
"""Figures on a page from which numbers have three digits."""


@dataclass(frozen=True)
class Axis:
    """An axis.

    Attributes:
        ticks: (position, label) each, if the library's own ticks do not fit.
        named: True if positions are indices of ticks, for labels that are not numbers.
        linear_to: end of the linear part of a symlog axis.
    """

    label: str = ""
    scale: Scale = "linear"
    limits: tuple[float, float] | None = None
    percent: bool = False
    linear_to: float = 1.0
    ticks: tuple[tuple[float, str], ...] = ()
    named: bool = False


@dataclass(frozen=True)
class Marks:
    """One series of a figure.

    Attributes:
        x, y: positions; names on a band axis. Stairs have one more x than y.
        low, high: ends of the 90% interval of y, or of x if it is `across`.
        color: index of a series color, `MUTED` or `ACCENT`.
        labels: name of each point.
        values: number of each cell or hexagon, which sets its color.
        shift: offset in a band, in points.
        run: index of the run on a page with several.
    """

    kind: MarkKind
    name: str
    x: Sequence[Cell]
    y: Sequence[Cell]
    low: Sequence[Number] = ()
    high: Sequence[Number] = ()
    across: bool = False
    color: int = 0
    dashed: bool = False
    hollow: bool = False
    labels: Sequence[str] = ()
    values: Sequence[Number] = ()
    shift: float = 0.0
    run: int | None = None


@dataclass(frozen=True)
class ReferenceLine:
    """A line across the figure at a value of one axis, with an interval shaded.

    `style` is "mark" for a line, "limit" for a dotted one, "usual" for a range of usual values without a line.
    """

    axis: Literal["x", "y"]
    at: float | None
    text: str = ""
    interval: tuple[float, float] | None = None
    style: Literal["mark", "limit", "usual"] = "mark"
    color: int = MUTED
    run: int | None = None


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        name: unique on its page, also the file name.
        title: the subject, or a message that the data support.
        subject: the quantity with its units, for captions.
        caption: how to read it.
        size: "wide" fills the page, "square" has equal axes.
    """

    name: str
    title: str
    subject: str
    caption: str
    x: Axis
    y: Axis
    marks: tuple[Marks, ...]
    rules: tuple[ReferenceLine, ...] = ()
    size: Literal["normal", "wide", "square"] = "normal"

    @property
    def alt(self) -> str:
        """Alternative text. The table of the numbers has the rest."""
        names = ", ".join(mark.name for mark in self.marks[:8] if mark.name)
        axes = " by ".join(filter(None, (self.y.label, self.x.label)))
        return escape_terminal(f"{self.title}: {axes}{f' for {names}' if names else ''}.")

    def table(self) -> tuple[list[str], list[list[Cell]]]:
        """Return the heads and rows of the numbers: a row per x for lines, otherwise a row per point."""
        lines = [mark for mark in self.marks if mark.kind in ("line", "stairs")]
        if lines and len(lines) == len(self.marks):
            return self._line_table(lines)
        heads = ["series", "name", self.x.label or "x", self.y.label or "y", "from", "to", "value"]
        rows: list[list[Cell]] = []
        for mark in self.marks:
            columns = [getattr(mark, key) for key in ("labels", "x", "y", "low", "high", "values")]
            for index in range(len(mark.y)):
                rows.append([mark.name, *(column[index] if index < len(column) else None for column in columns)])
        used = [place for place in range(len(heads)) if any(row[place] not in (None, "") for row in rows)]
        return [heads[place] for place in used], [[row[place] for place in used] for row in rows]

    def _line_table(self, lines: Sequence[Marks]) -> tuple[list[str], list[list[Cell]]]:
        heads = [self.x.label]
        columns: list[tuple[Marks, Sequence[Cell]]] = []
        for mark in lines:
            heads.append(f"{mark.name} ({self.y.label})" if len(lines) > 1 else self.y.label)
            columns.append((mark, mark.y))
            if len(mark.low):
                heads += [f"{mark.name or self.y.label} from", f"{mark.name or self.y.label} to"]
                columns += [(mark, mark.low), (mark, mark.high)]
        named = {id(mark): mark.labels if len(mark.labels) == len(mark.y) else mark.x for mark in lines}
        places = list(dict.fromkeys(x for mark in lines for x in named[id(mark)]))
        if all(isinstance(x, (int, float)) for x in places):
            places.sort(key=lambda x: float(x or 0))
        found = [dict(zip(named[id(mark)], values, strict=False)) for mark, values in columns]
        ticks = dict(self.x.ticks) if self.x.named else {}
        rows = [[ticks.get(x, x) if isinstance(x, (int, float)) else x, *(own.get(x) for own in found)] for x in places]
        return heads, rows

    def csv(self) -> str:
        """Return the numbers as CSV. Text that a spreadsheet could run as a formula is quoted."""
        heads, rows = self.table()
        return _csv_line(heads) + "".join(map(_csv_line, rows))

    def thin(self) -> Figure:
        """Return the figure with at most `MAX_SCREEN_POINTS` points per line, about."""
        return replace(self, marks=tuple(map(_thin_line, self.marks)))


def _csv_line(cells: Sequence[Cell]) -> str:
    stream = io.StringIO()
    csv.writer(stream).writerow(map(_csv_cell, cells))  # quotes the characters of its line end, CR and LF
    return stream.getvalue().removesuffix("\r\n") + "\n"


def _csv_cell(cell: Cell) -> int | str:
    if isinstance(cell, str):
        return escape_csv(cell)
    if cell is None or not math.isfinite(cell):
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else cell


def _thin_line(mark: Marks) -> Marks:
    """Keep the first, the smallest and the largest point of each interval of a long line."""
    if mark.kind != "line" or len(mark.y) <= MAX_SCREEN_POINTS:
        return mark
    values = np.array([math.nan if y is None else y for y in mark.y], np.float64)
    kept = {0, len(values) - 1}
    for part in np.array_split(np.arange(len(values)), MAX_SCREEN_POINTS // 2):
        known = part[np.isfinite(values[part])]
        kept |= (
            {int(known[values[known].argmin()]), int(known[values[known].argmax()])} if len(known) else {int(part[0])}
        )
    order = sorted(kept)

    def keep(column: Sequence[Any]) -> Sequence[Any]:
        return [column[place] for place in order] if len(column) else ()

    return replace(
        mark, x=keep(mark.x), y=keep(mark.y), low=keep(mark.low), high=keep(mark.high), labels=keep(mark.labels)
    )  # fmt: skip


def page_json(figures: Sequence[Figure]) -> str:
    """Return the figures of a page as JSON for its script. Columns and captions that figures share are stored once.

    Numbers have four significant digits, three on a page with many figures. Ends of intervals have three. Undefined
    values are null. Default values are left out, because the script knows them.
    """
    columns: dict[str, int] = {}
    captions: dict[str, int] = {}
    described, digits = [], _BAND_DIGITS if len(figures) > MANY_FIGURES else _DIGITS
    for figure in figures:
        data = _figure_data(figure.thin(), columns, digits)
        data["caption"] = captions.setdefault(escape_terminal(figure.caption), len(captions))
        described.append(data)
    texts = [_json_text(each) for each in (described, list(captions))]
    return f'{{"columns":[{",".join(columns)}],"figures":{texts[0]},"captions":{texts[1]}}}'


def _json_text(data: Any) -> str:
    return json.dumps(data, separators=(",", ":"), ensure_ascii=False, allow_nan=False)


def _figure_data(figure: Figure, columns: dict[str, int], digits: int) -> dict[str, Any]:
    data = {
        "name": figure.name, "title": escape_terminal(figure.title), "alt": figure.alt,
        "x": _changed(figure.x, _AXIS), "y": _changed(figure.y, _AXIS),
        "rules": [_changed(rule, _RULE) for rule in figure.rules],
        "marks": [_mark_data(mark, columns, digits) for mark in figure.marks],
    }  # fmt: skip
    return data if figure.size == "normal" else data | {"size": figure.size}


_AXIS, _RULE = Axis(), ReferenceLine("x", None)
_MARKS = Marks("line", "", (), ())


def _changed(part: Any, default: Any) -> dict[str, Any]:
    """Return the fields that differ from the default."""
    known = vars(default)
    return {key: _escape(value) for key, value in vars(part).items() if value != known[key] or key == "axis"}


def _mark_data(mark: Marks, columns: dict[str, int], digits: int) -> dict[str, Any]:
    places = _PLACE_DIGITS if mark.kind in ("line", "stairs") else _DIGITS
    known = {"low": _BAND_DIGITS, "high": _BAND_DIGITS, "x": places}
    data = {
        key: value for key, value in _changed(replace(mark, **_NO_COLUMNS), _MARKS).items() if key not in _NO_COLUMNS
    }
    for key in _NO_COLUMNS:
        column = getattr(mark, key)
        if len(column):
            data[key] = columns.setdefault(_column_json(column, known.get(key, digits)), len(columns))
    return data


_NO_COLUMNS: dict[str, Any] = dict.fromkeys(("x", "y", "low", "high", "labels", "values"), ())


def _escape(value: Any) -> Any:
    return escape_terminal(value) if isinstance(value, str) else value


def _column_json(values: Sequence[Cell], digits: int) -> str:
    return f"[{','.join(_number_json(value, digits) for value in values)}]"


def _number_json(value: Cell, digits: int) -> str:
    """Return a number in its shortest form."""
    if isinstance(value, str):
        return json.dumps(escape_terminal(value), ensure_ascii=False)
    if value is None or not math.isfinite(value):
        return "null"
    if float(value).is_integer() and abs(value) < 10**digits:
        return str(int(value))
    plain, scientific = f"{value:.{digits}g}", f"{value:.{digits - 1}e}"
    mantissa, _, exponent = scientific.partition("e")
    return min(f"{float(mantissa):g}e{int(exponent)}", plain, key=len)
