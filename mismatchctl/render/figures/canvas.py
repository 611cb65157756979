"""The only place that knows matplotlib: axes drawn for reading, and SVG fit to stand inside a page.

Colours are names until the page is shown: figures are drawn in sentinel colours that become CSS variables,
so that one drawing serves light, dark and print.
"""

from __future__ import annotations

import contextlib
import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import matplotlib.lines
import matplotlib.patches
import matplotlib.path
from markupsafe import Markup, escape
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure as MatplotlibFigure

INK, MUTED, GRID, SURFACE = "#fe0100", "#fe0200", "#fe0300", "#fe0500"
SERIES = tuple(f"#fe00{index:02x}" for index in range(10))
RAMP = tuple(f"#fe04{index:02x}" for index in range(9))
"""Sentinels: text, secondary text, grid lines, the page; lines; a sequence from little to much."""
SHADES = (0, 1, 2, 3, 6, 7, 8)
"""Steps of the ramp on which text can be read, little to much."""

WIDTH, HEIGHT = 5.4, 3.25
"""Inches of 72 units: what a figure measures before it is scaled to its column."""
_FONT = 10.5
_MARGINS = {"left": 68.0, "right": 12.0, "top": 10.0, "bottom": 42.0}
_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Figure:
    """One finished figure: inline SVG, a title, and what it shows in words."""

    title: str
    caption: str
    svg: Markup


class Canvas:
    """One figure with one pair of axes; `name` is unique on the page."""

    def __init__(self, name: str, *, height: float = HEIGHT, left: float = 0.0, bottom: float = 0.0) -> None:
        self.name = name
        self.figure = MatplotlibFigure(figsize=(WIDTH, height))
        FigureCanvasSVG(self.figure)
        self.wide, self.high = 72 * WIDTH, 72 * height
        below, beside = _MARGINS["bottom"] + bottom, max(left, _MARGINS["left"])
        self._across, self._up = self.wide - beside - _MARGINS["right"], self.high - below - _MARGINS["top"]
        self._beside, self._below = beside, below
        self.box = (beside, _MARGINS["top"], beside + self._across, _MARGINS["top"] + self._up)
        """Left, top, right and bottom of the axes in the units of the drawing, downwards."""
        place = (beside / self.wide, below / self.high, self._across / self.wide, self._up / self.high)
        self.axes: Any = self.figure.add_axes(place)
        for side in ("top", "right"):
            self.axes.spines[side].set_visible(False)
        for axis in (self.axes.xaxis, self.axes.yaxis):
            axis.set_visible(False)  # grid and ticks are drawn here: matplotlib's take most of the time

    def log(self, which: str, low: float, high: float) -> None:
        """A logarithmic axis from `low` to `high`, ticks at powers of ten (and at 2 and 5 where there are few)."""
        getattr(self.axes, f"set_{which}scale")("log")
        getattr(self.axes, f"set_{which}lim")(low, high)
        self.ticks(which, log_ticks(low, high), power)

    def linear(self, which: str, low: float, high: float, text: Callable[[float], str] | None = None) -> None:
        """A linear axis with a handful of round ticks."""
        getattr(self.axes, f"set_{which}lim")(low, high)
        ticks = round_ticks(low, high)
        self.ticks(which, ticks, text or _plain(ticks))

    def ticks(self, which: str, where: Sequence[float], text: Callable[[float], str]) -> None:
        """A grid line and a text at each of these places."""
        axes = self.axes
        if which == "x":
            axes.vlines(where, 0, 1, transform=axes.get_xaxis_transform(), color=GRID, linewidth=0.7, zorder=0)
            for tick in where:
                axes.text(tick, -7 / self._up, text(tick), transform=axes.get_xaxis_transform(), ha="center", va="top")
        else:
            axes.hlines(where, 0, 1, transform=axes.get_yaxis_transform(), color=GRID, linewidth=0.7, zorder=0)
            for tick in where:
                axes.text(
                    -6 / self._across,
                    tick,
                    text(tick),
                    transform=axes.get_yaxis_transform(),
                    ha="right",
                    va="center_baseline",
                )

    def labels(self, x: str, y: str = "") -> None:
        """What the axes measure, with units."""
        middle = (self._beside + self._across / 2) / self.wide
        self.figure.text(middle, (self._below - 24) / self.high, x, ha="center", va="top", color=MUTED)
        if y:
            height = (self._below + self._up / 2) / self.high
            self.figure.text(2 / self.wide, height, y, rotation=90, ha="left", va="center", color=MUTED)

    def line(
        self, x: Any, y: Any, color: str, *, dashed: bool = False, points: bool = False, width: float = 1.6
    ) -> None:
        """A line; `points` marks each value."""
        style = {"linestyle": (0, (4, 3))} if dashed else {}
        marker = {"marker": "o", "markersize": 3.6, "markeredgewidth": 0} if points else {}
        self.axes.plot(x, y, color=color, linewidth=width, **style, **marker)

    def band(self, x: Any, low: Any, high: Any, color: str, opacity: float = 0.18) -> None:
        """The uncertainty about a line."""
        self.axes.fill_between(x, low, high, color=color, alpha=opacity, linewidth=0)

    def polygons(self, corners: Any, color: str) -> None:
        """Filled polygons [N, corners, 2] in one colour, as one path."""
        if len(corners):
            path = matplotlib.path.Path.make_compound_path_from_polys(corners)
            self.axes.add_patch(matplotlib.patches.PathPatch(path, facecolor=color, linewidth=0))

    def mark(self, x: float, y: float, color: str, face: str) -> None:
        """A dot outside the axes, for a key; x and y are shares of the figure."""
        self.figure.add_artist(
            matplotlib.lines.Line2D(
                [x], [y], marker="o", markersize=5.5, color=color, markerfacecolor=face, markeredgewidth=1.5
            )
        )

    def legend(self, entries: Sequence[tuple[str, str, bool]], *, columns: int = 1, below: bool = False) -> None:
        """Names of lines: (text, colour, dashed), in a corner or below the axes."""
        styles: dict[bool, Any] = {False: "-", True: (0, (2, 1.2))}
        handles = [
            matplotlib.lines.Line2D([], [], color=color, linewidth=2.2, linestyle=styles[dashed])
            for _, color, dashed in entries
        ]
        place: dict[str, Any] = {"loc": "best"}
        if below:
            place = {"loc": "lower center", "bbox_to_anchor": (0.5, 0.0), "bbox_transform": self.figure.transFigure}
        found = self.axes.legend(
            handles, [text for text, _, _ in entries], ncols=columns, frameon=not below, handlelength=1.4,
            columnspacing=1.4, labelspacing=0.3, borderaxespad=0.4, facecolor=SURFACE, edgecolor=SURFACE,
            framealpha=0.8, **place,
        )  # fmt: skip
        for text in found.get_texts():
            text.set_parse_math(False)

    def finish(self, title: str, caption: str) -> Figure:
        """Draw it."""
        stream = io.StringIO()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            self.figure.savefig(stream, format="svg", metadata={"Date": None}, transparent=True)
        return Figure(title, caption, _inline(stream.getvalue(), self.name, title))


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """The settings under which all figures are made; nobody's matplotlibrc changes them."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        settings: Any = matplotlib.rcParams
        settings.update(_SETTINGS)
        yield


_SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "mismatchctl",
    "font.family": "DejaVu Sans",
    "font.size": _FONT,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "text.color": INK,
    "text.parse_math": False,
    "legend.fontsize": _FONT - 0.5,
    "legend.labelcolor": INK,
    "path.simplify": True,
}


def power(value: float) -> str:
    """Text of a tick on a logarithmic axis: plain near 1, else 10⁻⁴ or 2·10⁻⁴."""
    if value == 0:
        return "0"
    sign, size = "−" if value < 0 else "", abs(value)
    if 0.01 <= size < 10_000:
        return f"{sign}{size:,.10g}"
    exponent = math.floor(math.log10(size) + 1e-9)
    mantissa = size / 10.0**exponent
    tens = f"10{str(exponent).translate(_SUPERSCRIPTS)}"
    return f"{sign}{tens}" if abs(mantissa - 1) < 1e-6 else f"{sign}{mantissa:.3g}·{tens}"


def percent(value: float) -> str:
    """Text of a tick on an axis of fractions."""
    return f"{100 * value:.10g} %"


def log_ticks(low: float, high: float) -> list[float]:
    """Powers of ten inside the interval, every second or third if there are many; 1-2-5 steps if there are few."""
    first, last = math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9)
    if last - first >= 2:
        step = math.ceil((last - first + 1) / 7)
        return [10.0**exponent for exponent in range(last, first - 1, -step)][::-1]
    steps = [m * 10.0**e for e in range(first - 1, last + 1) for m in (1, 2, 5)]
    return [tick for tick in steps if low <= tick <= high * (1 + 1e-9)] or [low, high]


def round_ticks(low: float, high: float, most: int = 6) -> list[float]:
    """At most `most` round numbers inside the interval."""
    span = high - low
    if not span > 0:
        return [low]
    size = 10.0 ** math.floor(math.log10(span / most))
    step = next(size * m for m in (1, 2, 2.5, 5, 10, 20) if span / (size * m) <= most)
    first = math.ceil(low / step - 1e-9)
    return [round(index * step, 12) for index in range(first, math.floor(high / step + 1e-9) + 1)]


def _plain(ticks: Sequence[float]) -> Callable[[float], str]:
    def text(value: float) -> str:
        return f"{value:,.10g}".replace("-", "−") if abs(value) >= 1e-4 or value == 0 else power(value)

    return text


_ROLE = {"01": "ink", "02": "muted", "03": "grid", "05": "surface"}
_SENTINEL = re.compile(r"#fe(0[0-5])([0-9a-f]{2})")
_PLACES = re.compile(r' (?:d|x|y|transform)="[^"]*"')
_FLOAT = re.compile(r"-?\d+\.\d{2,}")
_TEXT_STYLE = re.compile(
    r'<text style="font-size: ([\d.]+)px; font-family: [^;"]*(?:; text-anchor: (\w+))?(; fill: [^"]*)?"'
)


def _inline(svg: str, name: str, title: str) -> Markup:
    """The SVG element alone, its ids made unique by `name`, its colours variables, its numbers short."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r" *<metadata>.*?</metadata>\n?", "", body, flags=re.S)
    body = re.sub(r" *<defs>\s*<style.*?</style>\s*</defs>\n?", "", body, flags=re.S)
    body = re.sub(r"<!--.*?-->\n?", "", body, flags=re.S)
    body = re.sub(r'<g id="[^"]*"', "<g", body)
    body = re.sub(r'(id="|url\(#|href="#)', rf"\g<1>{name}-", body)
    body = _TEXT_STYLE.sub(_text_attributes, body)
    body = re.sub(r' transform="rotate\(-?0 [^"]*\)"', "", body)
    body = _PLACES.sub(_shortened, body)
    body = _SENTINEL.sub(_variable, body)
    body = re.sub(r">\s+<", "><", body)
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', body)[0]
    opening = f'<svg viewBox="0 0 {width} {height}" role="img" aria-label="{escape(title)}">'
    return Markup(re.sub(r"^<svg[^>]*>", lambda _: opening, body).strip())


def _shortened(found: re.Match[str]) -> str:
    """Coordinates to a tenth of a point, on one line."""
    short = _FLOAT.sub(lambda number: f"{float(number[0]):.1f}".removesuffix(".0"), found[0])
    return " " + " ".join(short.split()).replace(' "', '"')


def _text_attributes(found: re.Match[str]) -> str:
    anchor = f' text-anchor="{found[2]}"' if found[2] and found[2] != "start" else ""
    style = f' style="{found[3][2:]}"' if found[3] else ""
    return f'<text font-size="{found[1]}"{anchor}{style}'


def _variable(found: re.Match[str]) -> str:
    kind, index = found[1], int(found[2], 16)
    return f"var(--s{index})" if kind == "00" else f"var(--r{index})" if kind == "04" else f"var(--{_ROLE[kind]})"
