"""SVG drawing: theme, axes, shapes, and their SVG elements."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from markupsafe import escape
from rich.cells import cell_len

from mismatchctl.core.batch import Float64s

LIGHT = {
    "ink": "#1b2330", "muted": "#566172", "grid": "#e3e7ec", "surface": "#ffffff",
    "s0": "#2166ac", "s1": "#c4570f", "s2": "#1b7f5c", "s3": "#8e4aa8", "s4": "#9a6f05", "s5": "#c2366b",
    "s6": "#2f83ad", "s7": "#7a6a53", "s8": "#5f7d14", "s9": "#6565d0",
    "r0": "#dcebf7", "r1": "#c3dcf0", "r2": "#a5cae7", "r3": "#82b4da", "r4": "#5f9ccb", "r5": "#4184ba",
    "r6": "#2a6ba5", "r7": "#18528a", "r8": "#0a3767",
}  # fmt: skip
"""Text, secondary text, grid and background, then ten series colors and a ramp of nine shades."""
DARK = {
    "ink": "#e4e9f0", "muted": "#9fabba", "grid": "#2b333e", "surface": "#1a2028",
    "s0": "#6db0f2", "s1": "#f0955a", "s2": "#53c79c", "s3": "#c792e0", "s4": "#dcb24b", "s5": "#f07fa8",
    "s6": "#6fc3e6", "s7": "#bfae93", "s8": "#a9c653", "s9": "#a3a3f5",
    "r0": "#1f3247", "r1": "#24435f", "r2": "#2a567b", "r3": "#336b99", "r4": "#4183b6", "r5": "#599dd0",
    "r6": "#7fb8e4", "r7": "#add4f2", "r8": "#e3f1fc",
}  # fmt: skip
PRINT = LIGHT | {"ink": "#000000", "muted": "#444c58"}

INK, MUTED, GRID, SURFACE = (LIGHT[name] for name in ("ink", "muted", "grid", "surface"))
SERIES = tuple(LIGHT[f"s{index}"] for index in range(10))
RAMP = tuple(LIGHT[f"r{index}"] for index in range(9))
READABLE_SHADES = (0, 1, 2, 3, 6, 7, 8)
"""Shades of the ramp with readable text on top."""
DASHES = {"-": (), "--": (5.0, 2.0), "-.": (6.0, 1.6, 1.2, 1.6), ":": (1.2, 1.6)}
MARKS = ("o", "s", "^", "D")
"""Marks in order of use. Dashes and gaps in `DASHES` are multiples of the line width."""

_COLOR_NAMES = {color: name for name, color in LIGHT.items()}


def color_name(color: str) -> str:
    """Return the name of a theme color.

    Raises:
        KeyError: the color is not in the theme.
    """
    return _COLOR_NAMES[color]


def page_css() -> str:
    """Return CSS variables for light, dark and printed pages, and the classes that use them."""
    dark = f"@media (prefers-color-scheme: dark) {{ {_css_variables(DARK)} }}"
    printed = f"@media print {{ {_css_variables(PRINT)} }}"
    return "\n".join([_css_variables(LIGHT), dark, printed, _css_classes({name: f"var(--{name})" for name in LIGHT})])


def file_css() -> str:
    """Return CSS for a standalone file, with a dark variant."""
    return f"{_css_classes(LIGHT)}\n@media (prefers-color-scheme: dark) {{ {_css_classes(DARK)} }}"


def _css_variables(palette: dict[str, str]) -> str:
    return f":root {{ {' '.join(f'--{name}: {color};' for name, color in palette.items())} }}"


def _css_classes(colors: dict[str, str]) -> str:
    return " ".join(f".l-{name} {{ stroke: {color} }} .f-{name} {{ fill: {color} }}" for name, color in colors.items())


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def format_power(value: float) -> str:
    """Format a tick of a log axis: plain near 1, otherwise like 10⁻⁴ or 2·10⁻⁴."""
    if value == 0:
        return "0"
    sign, size = "−" if value < 0 else "", abs(value)
    if 0.01 <= size < 10_000:
        return f"{sign}{size:,.10g}"
    exponent = math.floor(math.log10(size) + 1e-9)
    mantissa = size / 10.0**exponent
    tens = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return f"{sign}{tens}" if abs(mantissa - 1) < 1e-6 else f"{sign}{mantissa:.3g}·{tens}"


def format_percent(value: float) -> str:
    """Format a tick of an axis of fractions."""
    return f"{100 * value:.10g} %"


def format_plain(value: float) -> str:
    """Format a tick of a linear axis."""
    return f"{value:,.10g}".replace("-", "−") if abs(value) >= 1e-4 or value == 0 else format_power(value)


def log_ticks(low: float, high: float) -> list[float]:
    """Return powers of ten inside the interval, or 1-2-5 steps if there are few. The fallback is round numbers."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        step = math.ceil((last - first + 1) / 7)
        return [10.0**exponent for exponent in range(last, first - 1, -step)][::-1]
    steps = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [tick for tick in steps if low <= tick <= high * (1 + 1e-9)] or round_ticks(low, high)


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """Return at most `most` round numbers inside the interval."""
    span = high - low
    if not span > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20) if span / (size * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def signed_ticks(low: float, high: float, bend: float) -> list[float]:
    """Return zero and powers of ten on either side."""
    ends = [max(-low, 0.0), max(high, 0.0)]
    decades = max(1, math.ceil(math.log10(max(*ends, bend) / bend)))
    step = math.ceil(decades / 4)
    sizes = [bend * 10.0**exponent for exponent in range(0, decades + 1, step)]
    return [-s for s in reversed(sizes) if s <= ends[0]] + [0.0] + [s for s in sizes if s <= ends[1]]


TickFormatter = Callable[[float], str]
TickValues = Sequence[float]
FIGURE_WIDTH, FIGURE_HEIGHT = 360.0, 224.0
"""Default size in points."""
LINEAR_SHARE = 0.6
"""Length of the linear part of a symlog axis, in decades."""
_MARGINS = {"left": 70.0, "right": 12.0, "top": 10.0, "bottom": 42.0}
_LOG_FLOOR = -1000.0
"""Stand-in for the logarithm of values up to 0."""

_TICK_TOLERANCE = 1e-9
_TICK_GAP = 6.5
"""Distance from an axis to its tick labels in points."""

CoordinateSpace = Literal["data", "across", "up", "axes", "figure"]
"""Coordinates: data, data in one direction (across is x, up is y), or fractions of the axes or figure."""


@dataclass(frozen=True)
class FigureLayout:
    """Height of a figure, and extra space on the left and below the axes, in points."""

    height: float = FIGURE_HEIGHT
    left: float = 0.0
    below: float = 0.0

    @property
    def box(self) -> tuple[float, float, float, float]:
        """Left, top, right and bottom of the axes in points from the upper left corner."""
        left = max(self.left, _MARGINS["left"])
        return left, _MARGINS["top"], FIGURE_WIDTH - _MARGINS["right"], self.height - _MARGINS["bottom"] - self.below


@dataclass
class FigureAxis:
    """One axis. `linear_to` is the end of the linear part of a symlog axis."""

    limits: tuple[float, float] = (0.0, 1.0)
    scale: Literal["linear", "log", "symlog"] = "linear"
    linear_to: float = 1.0
    ticks: Sequence[tuple[float, str]] = ()

    def shares(self, values: Any) -> Float64s:
        """Map values to positions from 0 to 1."""
        low, high = self._scaled(np.array(self.limits)).tolist()
        shares: Float64s = (self._scaled(np.asarray(values, np.float64)) - low) / (high - low)
        return shares

    @property
    def visible_ticks(self) -> list[tuple[float, str]]:
        """Labeled ticks within the limits."""
        return [
            tick for tick in self.ticks if tick[1] and -_TICK_TOLERANCE <= self.shares(tick[0]) <= 1 + _TICK_TOLERANCE
        ]

    def _scaled(self, values: Float64s) -> Float64s:
        if self.scale == "linear":
            return values
        if self.scale == "log":
            with np.errstate(divide="ignore", invalid="ignore"):
                return np.where(values <= 0, _LOG_FLOOR, np.log10(values))
        size, linear = np.abs(values) / self.linear_to, LINEAR_SHARE / 0.9
        return np.sign(values) * np.where(size <= 1, linear * size, linear + np.log10(np.maximum(size, 1)))


@dataclass(frozen=True)
class LineShape:
    """A line, marks at its points, or a line with marks. NaN is a gap.

    Attributes:
        dash: a key of `DASHES`, or empty for marks only.
        mark: one of `MARKS`, or empty.
        size: size of a mark in points.
        face: fill color of a mark, by default the line color.
        edge: outline width of a mark in points.
        order: drawing order, higher is in front.
        clip: True to end the line at the axes.
    """

    x: Any
    y: Any
    color: str
    width: float = 1.7
    dash: str = "-"
    opacity: float = 1.0
    mark: str = ""
    size: float = 4.0
    face: str = ""
    edge: float = 0.0
    space: CoordinateSpace = "data"
    order: float = 2.0
    clip: bool = True
    cap: Literal["butt", "projecting"] = "projecting"


@dataclass(frozen=True)
class AreaShape:
    """Filled polygons, each with its color."""

    corners: Sequence[Any]
    colors: Sequence[str]
    opacity: float = 1.0
    space: CoordinateSpace = "data"
    order: float = 1.0


@dataclass(frozen=True)
class TextShape:
    """A text. `lift` is an offset in points, `upright` text reads from bottom to top."""

    x: float
    y: float
    text: str
    color: str = INK
    size: float = 11.0
    side: Literal["left", "center", "right"] = "center"
    base: Literal["baseline", "center_baseline", "bottom", "top"] = "baseline"
    lift: tuple[float, float] = (0.0, 0.0)
    upright: bool = False
    space: CoordinateSpace = "data"
    order: float = 3.0


Shape = LineShape | AreaShape | TextShape


@dataclass
class Drawing:
    """The axes and shapes of one figure."""

    layout: FigureLayout
    x: FigureAxis = field(default_factory=FigureAxis)
    y: FigureAxis = field(default_factory=FigureAxis)
    shapes: list[Shape] = field(default_factory=list)

    def frame(self) -> list[Shape]:
        """Return the axis lines and tick labels."""
        words: list[Shape] = [
            TextShape(at, 0, text, size=10.5, base="top", lift=(0, -_TICK_GAP), space="across", order=0.5)
            for at, text in self.x.visible_ticks
        ]
        words += [
            TextShape(
                0, at, text, size=10.5, side="right", base="center_baseline", lift=(-_TICK_GAP, 0), space="up",
                order=0.5,
            )
            for at, text in self.y.visible_ticks
        ]  # fmt: skip
        edges = ([0, 0], [0, 1]), ([0, 1], [0, 0])
        return [*words, *(LineShape(x, y, MUTED, width=0.8, space="axes", order=2.5, clip=False) for x, y in edges)]


LEGEND_ROW_HEIGHT = 17.0
"""Height of a legend row in points."""
LETTER_WIDTH = 6.1
"""Width of a letter in points."""
_LEGEND_KEY_WIDTH, _LEGEND_TEXT_OFFSET, _LEGEND_COLUMN_GAP, _LEGEND_LINE_HEIGHT = 21.0, 29.4, 14.7, 14.9
_SMALL_LETTER_WIDTH = 5.9
"""Measures of a legend in points."""
_DIGIT_WIDTH, _MARGIN_DIGITS = 6.7, 6
"""Width of a digit in points, and the digits that fit the default left margin."""
_MAX_MARKED_POINTS = 40
"""Lines with more points have no marks."""


class Canvas:
    """Collects the shapes of a figure in `drawing`."""

    def __init__(self, layout: FigureLayout) -> None:
        self.layout = layout
        self.drawing = Drawing(layout)

    def axis(self, which: str) -> FigureAxis:
        """Return the axis "x" or "y"."""
        return self.drawing.x if which == "x" else self.drawing.y

    def log(self, which: str, low: float, high: float) -> None:
        """Set a log axis with ticks at powers of ten, or at 1, 2 and 5 times powers of ten."""
        self.axis(which).scale = "log"
        self.ticks(which, log_ticks(low, high), format_power, (low, high))

    def linear(self, which: str, low: float, high: float, text: TickFormatter = format_plain, most: int = 6) -> None:
        """Set a linear axis with at most `most` round ticks."""
        self.ticks(which, round_ticks(low, high, most), text, (low, high))

    def ticks(self, which: str, where: TickValues, text: TickFormatter, limits: tuple[float, float]) -> None:
        """Set the ticks and limits of an axis, and draw grid lines."""
        axis = self.axis(which)
        axis.limits, axis.ticks = limits, [(tick, text(tick)) for tick in where]
        places, ends = _join_with_gaps(where, where), np.tile([0.0, 1.0, np.nan], len(where))
        if which == "x":
            self.line(places, ends, color=GRID, width=0.7, space="across", order=0.4)
        else:
            self.line(ends, places, color=GRID, width=0.7, space="up", order=0.4)

    def axis_titles(self, x: str, y: str = "") -> None:
        """Draw the axis titles. Long tick labels move the axes to the right."""
        longest = max((cell_len(text) for _, text in self.drawing.y.ticks), default=0)
        if y and longest > _MARGIN_DIGITS:
            self.layout = self.drawing.layout = replace(
                self.layout, left=self.layout.box[0] + _DIGIT_WIDTH * (longest - _MARGIN_DIGITS)
            )
        left, top, right, bottom = self.layout.box
        self.write_outside((left + right) / 2, bottom + 34, x, color=MUTED)
        if y:
            self.write_outside(11, (top + bottom) / 2, y, color=MUTED, upright=True)

    def write_outside(self, x: float, down: float, text: str, **style: Any) -> None:
        """Draw a text at a position in points, outside the axes."""
        self.drawing.shapes.append(
            TextShape(x / FIGURE_WIDTH, 1 - down / self.layout.height, text, space="figure", **style)
        )

    def write(self, x: float, y: float, text: str, **style: Any) -> None:
        """Draw a text inside the axes."""
        self.drawing.shapes.append(TextShape(x, y, text, **style))

    def line(self, x: Any, y: Any, **style: Any) -> None:
        self.drawing.shapes.append(LineShape(x, y, **style))

    def series(self, index: int, x: Any, y: Any, *, marked: bool = True, **style: Any) -> None:
        """Draw one of several lines, with the color, dash and mark of its index."""
        self.line(x, y, **(line_style(index, marked=marked and len(x) <= _MAX_MARKED_POINTS) | style))

    def reference_line(self, x: Any, y: Any, **style: Any) -> None:
        """Draw a thin reference line."""
        self.line(x, y, **(_RULE_STYLE | style))

    def bars(self, x: Any, low: Any, high: Any, *, across: bool = False, **style: Any) -> None:
        """Draw vertical error bars at each x. With `across`, they are horizontal and `x` is their height."""
        places, ends = _join_with_gaps(x, x), _join_with_gaps(low, high)
        x, y = (ends, places) if across else (places, ends)
        self.line(x, y, cap="butt", **style)

    def stairs(self, values: Float64s, edges: Float64s, **style: Any) -> None:
        """Draw a step line with one level per bin."""
        self.line(np.repeat(edges, 2)[1:-1], np.repeat(values, 2), **({"order": 1.0, "cap": "butt"} | style))

    def band(self, x: Any, low: Any, high: Any, color: str, opacity: float = 0.17) -> None:
        """Fill the area between two lines. NaN is a gap."""
        x, low, high = (np.asarray(values, np.float64) for values in (x, low, high))
        breaks = np.flatnonzero(np.diff(np.isfinite(low + high), prepend=False, append=False))
        parts = [slice(start, end) for start, end in zip(breaks[::2], breaks[1::2], strict=True)]
        around = [
            np.column_stack([np.r_[x[part], x[part][::-1]], np.r_[low[part], high[part][::-1]]]) for part in parts
        ]
        self.drawing.shapes.append(AreaShape(around, [color] * len(around), opacity))

    def polygons(self, corners: Any, colors: Sequence[str], **style: Any) -> None:
        """Fill polygons [N, corners, 2]."""
        self.drawing.shapes.append(AreaShape(corners, colors, **style))

    def contour(self, values: Float64s, level: float, **style: Any) -> None:
        """Draw the contour of a value over columns and rows [Y, X] at a level."""
        from contourpy import contour_generator

        lines = contour_generator(z=np.ma.masked_invalid(values)).lines(level)
        points = [np.vstack([np.asarray(line), [np.nan, np.nan]]) for line in lines]
        if points:
            self.line(*np.concatenate(points).T, **style)

    def legend(self, entries: Sequence[tuple[str, dict[str, Any]]], columns: int = 2) -> None:
        """Draw a legend below the axes, column by column."""
        parts = [part.tolist() for part in np.array_split(np.arange(len(entries)), min(columns, len(entries)))]
        widths = [
            _LEGEND_TEXT_OFFSET + _SMALL_LETTER_WIDTH * max(cell_len(entries[index][0]) for index in part)
            for part in parts
        ]
        x = (FIGURE_WIDTH - sum(widths) - _LEGEND_COLUMN_GAP * (len(parts) - 1)) / 2
        for part, width in zip(parts, widths, strict=True):
            for row, index in enumerate(part):
                text, key = entries[index]
                up = 4.4 + _LEGEND_LINE_HEIGHT * (len(parts[0]) - 1 - row)
                self._legend_key(x, up + 3.7, key)
                self.write_outside(x + _LEGEND_TEXT_OFFSET, self.layout.height - up, text, size=10.5, side="left")
            x += width + _LEGEND_COLUMN_GAP

    def _legend_key(self, x: float, up: float, look: dict[str, Any]) -> None:
        """Draw a short line with its mark."""
        level, ends = up / self.layout.height, (x / FIGURE_WIDTH, (x + _LEGEND_KEY_WIDTH) / FIGURE_WIDTH)
        self.line(ends, [level] * 2, **(look | {"mark": "", "space": "figure"}))
        self.line([sum(ends) / 2], [level], **(look | {"dash": "", "space": "figure"}))

    def series_legend(self, texts: Sequence[str], *, marked: bool = True) -> None:
        """Draw a legend for the lines of `series`."""
        self.legend([(text, line_style(index, marked=marked)) for index, text in enumerate(texts)])


def _join_with_gaps(first: Any, second: Any) -> Float64s:
    """Interleave two arrays and NaN, as separate line segments."""
    return np.column_stack([first, second, np.full(len(first), np.nan)]).ravel().astype(np.float64)


_RULE_STYLE: dict[str, Any] = {"color": MUTED, "dash": "--", "width": 1.0}


def line_style(index: int, *, marked: bool = True) -> dict[str, Any]:
    """Return the color, dash and mark of a line by its index."""
    dashes, mark = list(DASHES), MARKS[index % len(MARKS)] if marked else ""
    return {"color": SERIES[index % len(SERIES)], "dash": dashes[index % len(dashes)], "mark": mark}


def rule_style(**style: Any) -> dict[str, Any]:
    """Return the legend style of a reference line."""
    return _RULE_STYLE | style


def area_style(color: str) -> dict[str, Any]:
    """Return the legend style of an area."""
    return {"color": color, "width": 7.4, "cap": "butt"}


def legend_height(entries: int, columns: int = 2) -> float:
    """Return the height of a legend in points, 0 for a single line."""
    return LEGEND_ROW_HEIGHT * -(-entries // columns) + 4 if entries > 1 else 0.0


_TEXT_ANCHORS = {"left": "", "center": ' text-anchor="middle"', "right": ' text-anchor="end"'}
_BASELINES = {"baseline": 0.0, "top": 0.9, "center_baseline": 0.45, "bottom": -0.22}
"""Distance from an anchor down to the baseline, as a fraction of the font size."""
_MAX_LINE_POINTS = 128
"""Lines with more points are thinned."""
_CLIP_MARGIN = np.array([-1.0, -1.0, 1.0, 1.0])
"""Lines are clipped one point outside the axes, which hides their ends."""
_TINY = 1e-300


def render_elements(drawing: Drawing) -> str:
    """Return the SVG elements of a figure, in points. Colors come from CSS classes."""
    pen = _SvgPen(drawing)
    shapes = sorted([*drawing.shapes, *drawing.frame()], key=lambda shape: (shape.space == "figure", shape.order))
    return f'<rect class="f-surface" width="100%" height="100%"/>{"".join(map(pen.draw, shapes))}'


class _SvgPen:
    def __init__(self, drawing: Drawing) -> None:
        self._drawing = drawing

    def draw(self, shape: Shape) -> str:
        if isinstance(shape, TextShape):
            return self._text(shape)
        return self._areas(shape) if isinstance(shape, AreaShape) else self._line(shape)

    def _places(self, x: Any, y: Any, space: CoordinateSpace) -> Float64s:
        """Convert coordinates to points [N, 2] from the upper left corner."""
        drawing = self._drawing
        across = drawing.x.shares(x) if space in ("data", "across") else np.asarray(x, np.float64)
        up = drawing.y.shares(y) if space in ("data", "up") else np.asarray(y, np.float64)
        left, top, right, bottom = (
            (0, 0, FIGURE_WIDTH, drawing.layout.height) if space == "figure" else drawing.layout.box
        )
        return np.stack([left + across * (right - left), bottom - up * (bottom - top)], axis=-1)

    def _line(self, line: LineShape) -> str:
        points, elements = self._places(line.x, line.y, line.space), ""
        if line.dash:
            box = np.array(self._drawing.layout.box) + _CLIP_MARGIN if line.clip and line.space != "figure" else None
            data = "".join(_path_data(_thin_points(part)) for part in _clip_line(points, box))
            elements += _svg_element(data, stroke=line.color, width=line.width, opacity=line.opacity, dash=line.dash)
        if line.mark:
            known = points[np.isfinite(points).all(axis=1)].tolist()
            data = "".join(_mark_path(line.mark, line.size / 2, x, y) for x, y in known)
            outline = line.color if line.edge else ""
            elements += _svg_element(data, line.face or line.color, outline, line.edge, line.opacity)
        return elements

    def _areas(self, areas: AreaShape) -> str:
        """Write one element per color."""
        data: dict[str, str] = {}
        for corners, color in zip(areas.corners, areas.colors, strict=True):
            x, y = np.asarray(corners).T
            data[color] = f"{data.get(color, '')}{_path_data(self._places(x, y, areas.space))}z"
        return "".join(_svg_element(path, color, opacity=areas.opacity) for color, path in data.items())

    def _text(self, words: TextShape) -> str:
        x, y = self._places(words.x, words.y, words.space).tolist()
        x, y = (
            _format_coordinate(x + words.lift[0]),
            _format_coordinate(y - words.lift[1] + _BASELINES[words.base] * words.size),
        )
        place = f'transform="translate({x} {y})rotate(-90)"' if words.upright else f'x="{x}" y="{y}"'
        size, anchor = _format_coordinate(words.size), _TEXT_ANCHORS[words.side]
        style = f'font-size="{size}"{anchor} class="f-{color_name(words.color)}"'
        return f"<text {place} {style}>{escape(words.text)}</text>"


def _clip_line(points: Float64s, box: Float64s | None) -> Iterator[Float64s]:
    """Yield the parts of a line inside a box, split at NaN."""
    if box is None or not ((points < box[:2]) | (points > box[2:])).any():
        gaps = np.flatnonzero(~np.isfinite(points).all(axis=1))
        for first, end in zip([0, *(gaps + 1)], [*gaps, len(points)], strict=True):
            if end - first > 1:
                yield points[first:end]
        return
    start, step = points[:-1], np.diff(points, axis=0)
    with np.errstate(all="ignore"):
        meets = (box.reshape(2, 1, 2) - start) / np.where(step == 0, _TINY, step)
        enters, leaves = meets.min(axis=0).max(axis=1).clip(0), meets.max(axis=0).min(axis=1).clip(max=1)
    seen = np.flatnonzero(enters <= leaves)
    breaks = np.flatnonzero((np.diff(seen) > 1) | (enters[seen[1:]] > 0)) + 1
    for run in np.split(seen, breaks) if len(seen) else ():
        first = start[run[:1]] + enters[run[:1], None] * step[run[:1]]
        yield np.concatenate([first, start[run] + leaves[run, None] * step[run]])


def _thin_points(points: Float64s) -> Float64s:
    """Keep the first, last, highest and lowest point of each half unit."""
    if len(points) < _MAX_LINE_POINTS:
        return points
    cell = np.floor(2 * points[:, 0])
    starts = np.flatnonzero(np.diff(cell, prepend=np.nan))
    sizes, up = np.diff(starts, append=len(points)), points[:, 1]
    kept = (up == np.repeat(np.minimum.reduceat(up, starts), sizes)) | (
        up == np.repeat(np.maximum.reduceat(up, starts), sizes)
    )
    kept[starts] = kept[starts + sizes - 1] = True
    shown: Float64s = points[kept]
    return shown


def _path_data(points: Float64s) -> str:
    """Return the path through points, to a tenth of a unit."""
    first, *others = (f"{x:g} {y:g}" for x, y in points.round(1).tolist())
    return f"M{first}L{' '.join(others)}"


def _mark_path(mark: str, half: float, x: float, y: float) -> str:
    if mark == "o":
        radius, right, left = (_format_coordinate(value) for value in (half, 2 * half, -2 * half))
        arc = f"a{radius} {radius} 0 1 0"
        return f"M{round(x - half, 1):g} {round(y, 1):g}{arc} {right} 0{arc} {left} 0z"
    return f"{_path_data(_MARK_CORNERS[mark] * half + (x, y))}z"


_MARK_CORNERS = {
    "s": np.array([(-1, 1), (1, 1), (1, -1), (-1, -1)]),
    "^": np.array([(0, -1), (-1, 1), (1, 1)]),
    "D": np.array([(0, 1), (1, 0), (0, -1), (-1, 0)]) * np.sqrt(2),
}
"""Corners of marks, with y pointing down."""


def _svg_element(
    data: str, fill: str = "", stroke: str = "", width: float = 0.0, opacity: float = 1.0, dash: str = "-"
) -> str:
    """Return a path element, filled, outlined, or filled with an outline."""
    if not data:
        return ""
    classes = [f"{kind}-{color_name(color)}" for kind, color in (("f", fill), ("l", stroke)) if color]
    look = f' class="{" ".join(classes)}"' + ("" if fill else ' fill="none"')
    if opacity < 1:
        look += "".join(
            f' {kind}-opacity="{opacity:.2g}"' for kind, color in (("fill", fill), ("stroke", stroke)) if color
        )
    if stroke:
        look += f' stroke-width="{_format_coordinate(width)}"'
    if DASHES[dash]:
        look += f' stroke-dasharray="{" ".join(_format_coordinate(width * length) for length in DASHES[dash])}"'
    return f'<path d="{data}"{look}/>'


def _format_coordinate(value: float) -> str:
    return f"{round(value, 2):g}"
