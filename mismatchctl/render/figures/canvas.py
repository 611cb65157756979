"""What a figure is painted on: how all of them have axes, lines, bands, legends."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from rich.cells import cell_len

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.scales import Text, Ticks, log_ticks, plain, power, round_ticks
from mismatchctl.render.figures.shapes import WIDTH, Areas, Drawing, FigureAxis, FigureLayout, LineShape, Words
from mismatchctl.render.figures.theme import DASHES, GRID, MARKS, MUTED, SERIES

LEGEND_ROW = 17.0
"""Points of height that a line of the legend takes."""
LETTER = 6.1
"""Points that a letter takes."""
_KEY, _BEFORE, _BETWEEN, _LINE, _SMALL_LETTER = 21.0, 29.4, 14.7, 14.9, 5.9
"""Points of a legend: its keys, those and the space before a text, between columns, its lines, a narrow letter."""
_DIGIT, _ROOMY = 6.7, 6
"""Points that a digit of a tick takes, and how many of them the usual margin has room for."""
_POINTS = 40
"""Up to so many values of a line are marked."""


class Canvas:
    """Takes down what a figure consists of, as `drawing`."""

    def __init__(self, layout: FigureLayout) -> None:
        self.layout = layout
        self.drawing = Drawing(layout)

    def axis(self, which: str) -> FigureAxis:
        """The axis `x` or `y`."""
        return self.drawing.x if which == "x" else self.drawing.y

    def log(self, which: str, low: float, high: float) -> None:
        """A logarithmic axis from `low` to `high`, ticks at powers of ten (and at 2 and 5 where there are few)."""
        self.axis(which).scale = "log"
        self.ticks(which, log_ticks(low, high), power, (low, high))

    def linear(self, which: str, low: float, high: float, text: Text = plain, most: int = 6) -> None:
        """A linear axis with a handful of round ticks."""
        self.ticks(which, round_ticks(low, high, most), text, (low, high))

    def ticks(self, which: str, where: Ticks, text: Text, limits: tuple[float, float]) -> None:
        """Ticks at these places of an axis that runs between these limits, and its grid as one line."""
        axis = self.axis(which)
        axis.limits, axis.ticks = limits, [(tick, text(tick)) for tick in where]
        places, ends = _apart(where, where), np.tile([0.0, 1.0, np.nan], len(where))
        if which == "x":
            self.line(places, ends, color=GRID, width=0.7, space="across", order=0.4)
        else:
            self.line(ends, places, color=GRID, width=0.7, space="up", order=0.4)

    def labels(self, x: str, y: str = "") -> None:
        """What the axes measure, with units; the upright one beside the longest tick, for which the axes give way."""
        longest = max((cell_len(text) for _, text in self.drawing.y.ticks), default=0)
        if y and longest > _ROOMY:
            self.layout = self.drawing.layout = replace(
                self.layout, left=self.layout.box[0] + _DIGIT * (longest - _ROOMY)
            )
        left, top, right, bottom = self.layout.box
        self.words((left + right) / 2, bottom + 34, x, color=MUTED)
        if y:
            self.words(11, (top + bottom) / 2, y, color=MUTED, upright=True)

    def words(self, x: float, down: float, text: str, **style: Any) -> None:
        """A text beside the axes, its place in points."""
        self.drawing.shapes.append(Words(x / WIDTH, 1 - down / self.layout.height, text, space="figure", **style))

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """A text inside the axes."""
        self.drawing.shapes.append(Words(x, y, text, **style))

    def line(self, x: Any, y: Any, **style: Any) -> None:
        """A line, or marks."""
        self.drawing.shapes.append(LineShape(x, y, **style))

    def series(self, index: int, x: Any, y: Any, *, marked: bool = True, **style: Any) -> None:
        """One line of several: its colour, dash and mark are those of its number."""
        self.line(x, y, **(line_key(index, marked=marked and len(x) <= _POINTS) | style))

    def rule(self, x: Any, y: Any, **style: Any) -> None:
        """A thin line to compare with."""
        self.line(x, y, **(_RULE | style))

    def bars(self, x: Any, low: Any, high: Any, *, across: bool = False, **style: Any) -> None:
        """Upright lines at each place from `low` to `high`; or lines across, `x` then being their heights."""
        places, ends = _apart(x, x), _apart(low, high)
        x, y = (ends, places) if across else (places, ends)
        self.line(x, y, cap="butt", **style)

    def stairs(self, values: Float64s, edges: Float64s, **style: Any) -> None:
        """A line that is level over each bin."""
        self.line(np.repeat(edges, 2)[1:-1], np.repeat(values, 2), **({"order": 1.0, "cap": "butt"} | style))

    def band(self, x: Any, low: Any, high: Any, color: str, opacity: float = 0.17) -> None:
        """The area between two lines, as the uncertainty about one; interrupted where either is NaN."""
        x, low, high = (np.asarray(values, np.float64) for values in (x, low, high))
        breaks = np.flatnonzero(np.diff(np.isfinite(low + high), prepend=False, append=False))
        parts = [slice(start, end) for start, end in zip(breaks[::2], breaks[1::2], strict=True)]
        around = [
            np.column_stack([np.r_[x[part], x[part][::-1]], np.r_[low[part], high[part][::-1]]]) for part in parts
        ]
        self.drawing.shapes.append(Areas(around, [color] * len(around), opacity))

    def polygons(self, corners: Any, colors: Sequence[str], **style: Any) -> None:
        """Filled polygons [N, corners, 2], each in its colour."""
        self.drawing.shapes.append(Areas(corners, colors, **style))

    def contour(self, values: Float64s, level: float, **style: Any) -> None:
        """Where a value over columns and rows [Y, X] crosses a level."""
        from contourpy import contour_generator

        lines = contour_generator(z=np.ma.masked_invalid(values)).lines(level)
        points = [np.vstack([np.asarray(line), [np.nan, np.nan]]) for line in lines]
        if points:
            self.line(*np.concatenate(points).T, **style)

    def legend(self, entries: Sequence[tuple[str, dict[str, Any]]], columns: int = 2) -> None:
        """What looks of lines or marks stand for, below the axes, column by column."""
        parts = [part.tolist() for part in np.array_split(np.arange(len(entries)), min(columns, len(entries)))]
        widths = [_BEFORE + _SMALL_LETTER * max(cell_len(entries[index][0]) for index in part) for part in parts]
        x = (WIDTH - sum(widths) - _BETWEEN * (len(parts) - 1)) / 2
        for part, width in zip(parts, widths, strict=True):
            for row, index in enumerate(part):
                text, key = entries[index]
                up = 4.4 + _LINE * (len(parts[0]) - 1 - row)
                self._key(x, up + 3.7, key)
                self.words(x + _BEFORE, self.layout.height - up, text, size=10.5, side="left")
            x += width + _BETWEEN

    def _key(self, x: float, up: float, look: dict[str, Any]) -> None:
        """A short piece of a line, its mark in the middle."""
        level, ends = up / self.layout.height, (x / WIDTH, (x + _KEY) / WIDTH)
        self.line(ends, [level] * 2, **(look | {"mark": "", "space": "figure"}))
        self.line([sum(ends) / 2], [level], **(look | {"dash": "", "space": "figure"}))

    def names(self, texts: Sequence[str], *, marked: bool = True) -> None:
        """A legend of the lines of `series`, in their order."""
        self.legend([(text, line_key(index, marked=marked)) for index, text in enumerate(texts)])


def _apart(first: Any, second: Any) -> Float64s:
    """Pairs one after the other, each followed by NaN: lines that do not touch."""
    return np.column_stack([first, second, np.full(len(first), np.nan)]).ravel().astype(np.float64)


_RULE: dict[str, Any] = {"color": MUTED, "dash": "--", "width": 1.0}


def line_key(index: int, *, marked: bool = True) -> dict[str, Any]:
    """How the line of this number looks: its colour, dash and mark."""
    dashes, mark = list(DASHES), MARKS[index % len(MARKS)] if marked else ""
    return {"color": SERIES[index % len(SERIES)], "dash": dashes[index % len(dashes)], "mark": mark}


def rule_key(**style: Any) -> dict[str, Any]:
    """How a line to compare with looks, for a legend."""
    return _RULE | style


def area_key(color: str) -> dict[str, Any]:
    """How areas of this colour look, for a legend."""
    return {"color": color, "width": 7.4, "cap": "butt"}


def legend_height(entries: int, columns: int = 2) -> float:
    """Points that a legend takes; none for a single line."""
    return LEGEND_ROW * -(-entries // columns) + 4 if entries > 1 else 0.0
