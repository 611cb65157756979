"""One pair of axes on which every figure is painted, one after the other, and how it becomes a page's or a file's."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib import rcParams
from matplotlib.artist import Artist
from rich.cells import cell_len

from mismatchctl.render.figures.artists import Figure as MatplotlibFigure
from mismatchctl.render.figures.artists import Line2D, PolyCollection
from mismatchctl.render.figures.scales import Text, Ticks, log_ticks, percent, plain, power, round_ticks
from mismatchctl.render.figures.theme import DASHES, GRID, MARKS, MUTED, SERIES, settings

WIDTH, HEIGHT = 360.0, 224.0
"""Points that a figure measures before it is scaled to its column."""
LEGEND_ROW = 17.0
"""Points of height that a line of the legend takes."""
LETTER = 6.1
"""Points that a letter takes."""
_KEY, _BEFORE, _BETWEEN, _LINE, _SMALL_LETTER = 21.0, 29.4, 14.7, 14.9, 5.9
"""Points of a legend: its keys, those and the space before a text, between columns, its lines, a narrow letter."""
_MARGINS = {"left": 70.0, "right": 12.0, "top": 10.0, "bottom": 42.0}
_RULE: dict[str, Any] = {"color": MUTED, "linestyle": "--", "linewidth": 1.0}
_GRID: dict[str, Any] = {"color": GRID, "linestyle": "-", "linewidth": 0.7, "marker": ""}
_POINTS = 40
"""Up to so many values of a line are marked."""


@dataclass(frozen=True)
class Layout:
    """How high a figure is and what its axes leave free at the left and below, in points beside the usual."""

    height: float = HEIGHT
    left: float = 0.0
    below: float = 0.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the axes, downwards."""
        left = max(self.left, _MARGINS["left"])
        return left, _MARGINS["top"], WIDTH - _MARGINS["right"], self.height - _MARGINS["bottom"] - self.below


class Canvas:
    """What a figure is painted on: `axes` are matplotlib's, the rest is how all figures do it."""

    def __init__(self, *, again: bool = False) -> None:
        self._again = again
        self.figure = MatplotlibFigure()
        self.axes: Any = self.figure.add_axes((0, 0, 1, 1))
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_label_coords(0.5, 0.5)  # matplotlib's own labels stay empty: finding their place takes time
        self.layout = Layout()

    def clear(self, layout: Layout) -> None:
        """Make room for another figure: what was painted goes, axes and ticks stay."""
        self.layout = layout
        left, top, right, bottom = layout.box
        high = layout.height
        self.figure.set_size_inches(WIDTH / 72, high / 72)
        self.axes.set_position((left / WIDTH, 1 - bottom / high, (right - left) / WIDTH, (bottom - top) / high))
        for artist in [*self.axes.get_children(), *self.figure.texts, *self.figure.artists]:
            if isinstance(artist, Artist) and artist not in self._fixed:
                artist.remove()
        for which in ("x", "y"):
            if getattr(self.axes, f"get_{which}scale")() != "linear":
                getattr(self.axes, f"set_{which}scale")("linear")

    @property
    def _fixed(self) -> list[Any]:
        axes = self.axes
        titles = [axes.title, axes._left_title, axes._right_title]
        return [*axes.spines.values(), axes.xaxis, axes.yaxis, axes.patch, *titles]

    def log(self, which: str, low: float, high: float) -> None:
        """A logarithmic axis from `low` to `high`, ticks at powers of ten (and at 2 and 5 where there are few)."""
        getattr(self.axes, f"set_{which}scale")("log")
        self.ticks(which, log_ticks(low, high), power, (low, high))

    def linear(self, which: str, low: float, high: float, text: Text = plain, most: int = 6) -> None:
        """A linear axis with a handful of round ticks."""
        self.ticks(which, round_ticks(low, high, most), text, (low, high))

    def ticks(self, which: str, where: Ticks, text: Text, limits: tuple[float, float]) -> None:
        """Ticks at these places of an axis that runs between these limits."""
        axis = getattr(self.axes, f"{which}axis")
        axis.set_ticks(list(where), [text(tick) for tick in where])
        axis.set_ticks([], minor=True)
        if self._again:  # nobody lays such a figure out anew: where its labels end need not be known
            for tick in axis.get_major_ticks():
                tick.label1.set_in_layout(False)
        getattr(self.axes, f"set_{which}lim")(*limits)
        self._grid(which, list(where))

    def _grid(self, which: str, where: Sequence[float]) -> None:
        """The grid lines of an axis, drawn as one line."""
        places, ends = np.repeat(where, 3), np.tile([0.0, 1.0, np.nan], len(where))
        across = which == "x"
        x, y = (places, ends) if across else (ends, places)
        transform = self.axes.get_xaxis_transform() if across else self.axes.get_yaxis_transform()
        self.axes.add_artist(Line2D(x, y, transform=transform, zorder=0.4, **_GRID))

    def labels(self, x: str, y: str = "") -> None:
        """What the axes measure, with units."""
        left, top, right, bottom = self.layout.box
        high = self.layout.height
        text: dict[str, Any] = {"color": MUTED, "ha": "center"}
        self.figure.text((left + right) / 2 / WIDTH, 1 - (bottom + 34) / high, x, va="baseline", **text)
        if y:
            middle = 1 - (top + bottom) / 2 / high
            self.figure.text(11 / WIDTH, middle, y, rotation=90, rotation_mode="anchor", va="baseline", **text)

    def series(self, index: int, x: Any, y: Any, *, marked: bool = True, color: str = "", **style: Any) -> None:
        """One line of several: its colour, dash and mark are those of its number."""
        cycle: dict[str, Any] = {
            "color": color or SERIES[index % len(SERIES)],
            "linestyle": DASHES[index % len(DASHES)],
        }
        mark = MARKS[index % len(MARKS)] if marked and len(x) <= _POINTS else ""
        self.axes.add_artist(Line2D(x, y, marker=mark, **(cycle | style)))

    def rule(self, x: Any, y: Any, **style: Any) -> None:
        """A thin line to compare with."""
        self.axes.add_artist(Line2D(x, y, **(_RULE | style)))

    def band(self, x: Any, low: Any, high: Any, color: str, opacity: float = 0.17) -> None:
        """The uncertainty about a line."""
        self.axes.fill_between(x, low, high, color=color, alpha=opacity, linewidth=0)

    def polygons(self, corners: Any, colors: Sequence[str]) -> None:
        """Filled polygons [N, corners, 2], each in its colour."""
        if len(corners):
            self.axes.add_collection(PolyCollection(corners, facecolors=colors, linewidths=0), autolim=False)

    def legend(self, entries: Sequence[tuple[str, Line2D]], columns: int = 2) -> None:
        """What lines or marks stand for, below the axes, column by column."""
        parts = [part.tolist() for part in np.array_split(np.arange(len(entries)), min(columns, len(entries)))]
        widths = [_BEFORE + _SMALL_LETTER * max(cell_len(entries[index][0]) for index in part) for part in parts]
        x = (WIDTH - sum(widths) - _BETWEEN * (len(parts) - 1)) / 2
        for part, width in zip(parts, widths, strict=True):
            for row, index in enumerate(part):
                text, key = entries[index]
                up = (4.4 + _LINE * (len(parts[0]) - 1 - row)) / self.layout.height
                places, level = [(x + at) / WIDTH for at in (0.0, _KEY / 2, _KEY)], up + 3.7 / self.layout.height
                key.set(xdata=places, ydata=[level] * 3, markevery=[1], transform=self.figure.transFigure)
                self.figure.add_artist(key)
                self.figure.text((x + _BEFORE) / WIDTH, up, text, fontsize=10.5, va="baseline")
            x += width + _BETWEEN

    def names(self, texts: Sequence[str], *, marked: bool = True) -> None:
        """A legend of the lines of `series`, in their order."""
        self.legend([(text, line_key(index, marked=marked)) for index, text in enumerate(texts)])


def line_key(index: int, *, marked: bool = True, color: str = "") -> Line2D:
    """The handle of a legend for the line of this number."""
    style: dict[str, Any] = {"color": color or SERIES[index % len(SERIES)], "linestyle": DASHES[index % len(DASHES)]}
    return Line2D([], [], marker=MARKS[index % len(MARKS)] if marked else "", **style)


def rule_key(**style: Any) -> Line2D:
    """The handle of a legend for a line to compare with."""
    return Line2D([], [], **(_RULE | style))


def area_key(color: str) -> Line2D:
    """The handle of a legend for areas of this colour."""
    return Line2D([], [], color=color, linewidth=7.4, solid_capstyle="butt")


def legend_height(entries: int, columns: int = 2) -> float:
    """Points that a legend takes; none for a single line."""
    return LEGEND_ROW * -(-entries // columns) + 4 if entries > 1 else 0.0


Paint = Callable[[Canvas], None]
_stages = threading.local()


@contextlib.contextmanager
def painted(paint: Paint, layout: Layout, *, keep: bool = False) -> Iterator[Canvas]:
    """A canvas with a figure on it, in the theme: the thread's own, used again, or one to `keep`."""
    values: Any = rcParams
    before = dict(dict.items(values))  # as they stand: asked for its backend, matplotlib loads one
    dict.update(values, settings())
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            canvas = Canvas() if keep else getattr(_stages, "canvas", None) or Canvas(again=True)
            if not keep:
                _stages.canvas = canvas
            canvas.clear(layout)
            paint(canvas)
            yield canvas
    finally:
        dict.update(values, before)


__all__ = [
    "HEIGHT", "LEGEND_ROW", "LETTER", "WIDTH", "Canvas", "Layout", "Paint", "area_key", "legend_height", "line_key",
    "painted", "percent", "rule_key",
]  # fmt: skip
