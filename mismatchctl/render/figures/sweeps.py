"""Figures of a sweep: curves over a threshold, maps over two of them, the Pareto front, predictions tried out."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s
from mismatchctl.predict.prediction import Check
from mismatchctl.render.figures.canvas import (
    INK,
    MUTED,
    RAMP,
    SERIES,
    SHADES,
    SURFACE,
    Canvas,
    Figure,
    drawing,
    percent,
    round_ticks,
)
from mismatchctl.render.text import short

REACH = 1.6448536269514722
"""Standard errors to either side of a band: 90 %, as the intervals of targets and predictions have it."""
_DARK = 6
MOST_NUMBERED = (9, 14)
"""Up to so many columns and rows, each cell of a map shows its number."""
_CONTOURS = ((0.05, "solid"), (0.5, "dashed"))
_NEAR_ALL = 0.8  # shares that are all above this are drawn without the rest of their scale
_MOST_ROUND = 4.0  # logarithmic axes that span less have round numbers for ticks
_LEGEND = 18.0
_LETTER = 6.3
_NAMED, _TRIED = 6, 24  # points named on a front, and how many are tried for room
_OFFSETS = ((1, 0), (-1, 0), (1, 9), (-1, -9))  # sides of a point on which its name may stand, and how much higher


@dataclass(frozen=True)
class Line:
    """One line over an axis; NaN where undefined, `errors` None where unknown."""

    name: str
    values: Float64s
    errors: Float64s | None = None


@dataclass(frozen=True)
class Marker:
    """A place on the axis: presets that stand there, or a solved target with its interval."""

    value: float
    text: str
    interval: tuple[float | None, float | None] | None = None
    solved: bool = False


@dataclass(frozen=True)
class Axis:
    """What lies along a figure's side: the places in rising order and their name."""

    name: str
    values: Float64s
    log: bool = False


@dataclass(frozen=True)
class Curves:
    """What one figure over a threshold shows.

    Attributes:
        share: whether the values are fractions.
        reference: whether 0 is a line to compare with.
    """

    title: str
    unit: str
    axis: Axis
    lines: tuple[Line, ...]
    caption: str
    share: bool = False
    reference: bool = False
    markers: tuple[Marker, ...] = ()


@dataclass(frozen=True)
class Place:
    """Where in a drawing the axes lie, in its units, and what they run from and to: for a cross-hair."""

    box: tuple[float, float, float, float]
    low: float
    high: float
    log: bool


@dataclass(frozen=True)
class Drawn:
    """A figure over an axis, and the place of that axis in it."""

    figure: Figure
    place: Place


def curves_figure(curves: Curves, name: str) -> Drawn | None:
    """Lines with their bands over a threshold; None where no value is known."""
    known = np.concatenate([line.values[np.isfinite(line.values)] for line in curves.lines] or [np.zeros(0)])
    if not len(known):
        return None
    with drawing():
        canvas = Canvas(name, bottom=_LEGEND if len(curves.lines) > 1 else 0)
        low, high = _across(canvas, curves.axis)
        bottom, top = _upwards(canvas, curves)
        for marker in curves.markers:
            if marker.solved:
                _mark(canvas, marker, curves.axis, bottom, top)
        _letters(canvas, curves, (low, high))
        if curves.reference:
            canvas.line([low, high], [0.0, 0.0], MUTED, dashed=True, width=1.0)
        for index, line in enumerate(curves.lines):
            if line.errors is not None:
                reach = REACH * np.nan_to_num(line.errors)
                least, most = (np.clip(line.values + side * reach, bottom, top) for side in (-1, 1))
                canvas.band(curves.axis.values, least, most, SERIES[index])
            canvas.line(curves.axis.values, line.values, SERIES[index], dashed=index > 0)
        canvas.labels(curves.axis.name, curves.unit)
        if len(curves.lines) > 1:
            entries = [(line.name, SERIES[index], index > 0) for index, line in enumerate(curves.lines)]
            canvas.legend(entries, columns=len(entries), below=True)
        banded = any(line.errors is not None for line in curves.lines)
        bands = " Bands are ± 1.645 standard errors (90 %)." if banded else ""
        figure = canvas.finish(curves.title, curves.caption + bands)
        return Drawn(figure, Place(canvas.box, low, high, curves.axis.log))


def _across(canvas: Canvas, axis: Axis) -> tuple[float, float]:
    """The horizontal axis, with a margin at both ends."""
    low, high = float(axis.values[0]), float(axis.values[-1])
    if not axis.log:
        margin = 0.02 * (high - low)
        low, high = low - margin, high + margin
        canvas.linear("x", low, high)
        return low, high
    margin = (high / low) ** 0.02
    low, high = low / margin, high * margin
    if high / low > _MOST_ROUND:
        canvas.log("x", low, high)
    else:  # 1, 2 and 5 times powers of ten would not tell 1.0001 from 1.1
        canvas.axes.set_xscale("log")
        canvas.axes.set_xlim(low, high)
        canvas.ticks("x", round_ticks(low, high), lambda value: f"{value:,.10g}")
    return low, high


def _upwards(canvas: Canvas, curves: Curves) -> tuple[float, float]:
    ends = [0.0] if curves.reference else []
    for line in curves.lines:
        reach = REACH * np.nan_to_num(line.errors) if line.errors is not None else np.zeros_like(line.values)
        for values in (line.values, line.values - reach, line.values + reach):
            ends += [float(value) for value in values[np.isfinite(values)]]
    low, high = min(ends), max(ends)
    if curves.share:
        low, high = low if high > low > _NEAR_ALL else 0.0, min(max(high, 1e-3), 1.0)
    room = (high - low) or abs(high) or 1.0
    bottom, top = low - (0.06 if low else 0.02) * room, high + 0.12 * room
    canvas.linear("y", bottom, top, _at_most_all if curves.share else None)
    return bottom, top


def _at_most_all(share: float) -> str:
    return percent(share) if share <= 1 else ""


def _mark(canvas: Canvas, marker: Marker, axis: Axis, bottom: float, top: float) -> None:
    """A solved threshold with its interval, as far as the axis reaches."""
    first, last = float(axis.values[0]), float(axis.values[-1])
    low, high = marker.interval or (marker.value, marker.value)
    low, high = max(first if low is None else low, first), min(last if high is None else high, last)
    if high > low:
        canvas.band([low, high], [bottom] * 2, [top] * 2, SERIES[3], 0.13)
    if first <= marker.value <= last:
        canvas.axes.axvline(marker.value, color=SERIES[3], linewidth=1.2)


def _letters(canvas: Canvas, curves: Curves, ends: tuple[float, float]) -> None:
    """Presets as dashed upright lines with a letter above; letters that would touch stand as one."""
    scale = math.log if curves.axis.log else float
    low, high = (scale(end) for end in ends)
    spots: list[tuple[float, list[str]]] = []
    for letter, marker in lettered(curves.markers):
        canvas.axes.axvline(marker.value, ymax=0.93, color=MUTED, linewidth=0.9, linestyle=(0, (2, 2)))
        place = (scale(marker.value) - low) / (high - low)
        if spots and place - spots[-1][0] < 0.05 * len(spots[-1][1]):
            spots[-1][1].append(letter)
        else:
            spots.append((place, [letter]))
    for place, letters in spots:
        canvas.axes.text(
            place, 0.945, "".join(letters), transform=canvas.axes.transAxes, ha="center", va="bottom", color=MUTED
        )


def lettered(markers: Sequence[Marker]) -> list[tuple[str, Marker]]:
    """The presets among markers by the letter that stands for each."""
    presets = sorted((marker for marker in markers if not marker.solved), key=lambda marker: marker.value)
    return [(chr(ord("a") + index % 26), marker) for index, marker in enumerate(presets)]


@dataclass(frozen=True)
class Map:
    """A value over two axes [Y, X], the first of the axes upwards; NaN where undefined."""

    title: str
    across: tuple[str, tuple[str, ...]]
    up: tuple[str, tuple[str, ...]]
    values: NDArray[np.float64]
    caption: str = ""


def map_figure(shown: Map, name: str) -> Figure | None:
    """A heat map of fractions; numbers where the cells are large enough, else contours."""
    known = shown.values[np.isfinite(shown.values)]
    if not len(known):
        return None
    rows, columns = shown.values.shape
    low, high = float(known.min()), float(known.max())
    levels = np.round((shown.values - low) / ((high - low) or 1.0) * (len(SHADES) - 1))
    with drawing():
        canvas = Canvas(name, height=3.6, bottom=_LEGEND, left=26 + _LETTER * max(map(len, shown.up[1])))
        canvas.axes.set_xlim(-0.5, columns - 0.5)
        canvas.axes.set_ylim(-0.5, rows - 0.5)
        for index, shade in enumerate(SHADES):
            canvas.polygons(_bars(levels == index), RAMP[shade])
        _places(canvas, "x", shown.across[1], 6)
        _places(canvas, "y", shown.up[1], 9)
        caption = [shown.caption]
        if columns <= MOST_NUMBERED[0] and rows <= MOST_NUMBERED[1]:
            _numbers(canvas, shown.values, levels)
        else:
            caption += _contours(canvas, shown.values)
        canvas.labels(shown.across[0], shown.up[0])
        steps = (0, len(SHADES) // 2, len(SHADES) - 1)
        key = [(percent(_brief(low + (high - low) * s / (len(SHADES) - 1))), RAMP[SHADES[s]], False) for s in steps]
        canvas.legend(key if high > low else key[:1], columns=3, below=True)
        return canvas.finish(shown.title, " ".join(filter(None, caption)))


def _places(canvas: Canvas, which: str, texts: Sequence[str], most: int) -> None:
    """A text at each cell, or at every second, third, ... one."""
    canvas.ticks(which, range(0, len(texts), math.ceil(len(texts) / most)), lambda place: texts[int(place)])


def _brief(share: float) -> float:
    return float(f"{share:.3g}")


def _bars(cells: Bools) -> Float64s:
    """Rectangles [N, 4, 2] over neighbouring cells of a row that are set."""
    found = []
    for row, line in enumerate(cells):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], line.astype(np.int8), [0]])))
        for start, stop in edges.reshape(-1, 2) - 0.5:
            found.append([(start, row - 0.5), (stop, row - 0.5), (stop, row + 0.5), (start, row + 0.5)])
    return np.array(found, np.float64)


def _numbers(canvas: Canvas, values: NDArray[np.float64], levels: NDArray[np.float64]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            dark = SHADES[int(levels[row, column])] >= _DARK
            text = f"{100 * value:.3g}" if value >= 0.001 or value == 0 else "<0.1"
            color = SURFACE if dark else INK
            canvas.axes.text(column, row, text, ha="center", va="center_baseline", color=color, fontsize=9)


def _contours(canvas: Canvas, values: NDArray[np.float64]) -> list[str]:
    known, drawn = values[np.isfinite(values)], []
    for level, style in _CONTOURS:
        if known.min() < level < known.max() and min(values.shape) > 1:
            canvas.axes.contour(values, levels=[level], colors=[INK], linewidths=1.3, linestyles=[style])
            drawn.append(f"{'line' if style == 'solid' else 'dashed line'}: {percent(level)}")
    return [f"{'; '.join(drawn).capitalize()}."] if drawn else []


@dataclass(frozen=True)
class Front:
    """Points in two costs, and which of them no other beats; `shade` from 0 to 1 is the bias."""

    title: str
    across: tuple[str, Float64s]
    up: tuple[str, Float64s]
    shade: Float64s
    best: Bools
    names: tuple[str, ...]
    caption: str
    shares: bool = True


def front_figure(front: Front, name: str) -> Figure | None:
    """All points, the best ones filled and some of them named; None where fewer than two are known."""
    (across, x), (up, y) = front.across, front.up
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 2:
        return None
    with drawing():
        canvas = Canvas(name)
        for which, values, share in (("x", x[known], front.shares), ("y", y[known], True)):
            room = 0.08 * (values.max() - values.min()) or 0.01
            high = values.max() + (2 * room if which == "x" else room)
            canvas.linear(which, values.min() - room, high, _percents(values, high) if share else None)
        others = known & ~front.best
        style: dict[str, Any] = {"linestyle": "none", "marker": "o", "clip_on": False}
        canvas.axes.plot(x[others], y[others], markersize=3, color=MUTED, alpha=0.45, markeredgewidth=0, **style)
        best = np.flatnonzero(known & front.best)
        for point in best:
            shade = RAMP[2 + round(6 * float(np.nan_to_num(front.shade[point])))]
            face = {"markerfacecolor": shade, "markeredgecolor": INK, "markeredgewidth": 0.7}
            canvas.axes.plot([x[point]], [y[point]], markersize=6.5, zorder=4, **face, **style)
        _name(canvas, x, y, best, front.names)
        canvas.labels(across, up)
        return canvas.finish(front.title, front.caption)


def _percents(values: Float64s, high: float) -> Callable[[float], str]:
    """Ticks as percentages; none that would be cut at the end of the axis."""
    span = float(np.ptp(values))
    text = (lambda value: f"{100 * value:.2f} %") if span < 0.01 else percent
    return lambda tick: text(tick) if tick < high - 0.05 * span else ""


def _name(canvas: Canvas, x: Float64s, y: Float64s, best: NDArray[np.int64], names: Sequence[str]) -> None:
    """Some of the best points named, far from each other and where there is room."""
    (left, right), (bottom, top) = canvas.axes.get_xlim(), canvas.axes.get_ylim()
    wide, high = canvas.box[2] - canvas.box[0], canvas.box[3] - canvas.box[1]
    places = np.column_stack([(x - left) / (right - left) * wide, (y - bottom) / (top - bottom) * high])
    taken = [(across - 3, up - 3, across + 3, up + 3) for across, up in places[best].tolist()]
    distance = np.full(len(best), np.inf)
    named = 0
    for _ in range(min(_TRIED, len(best))):
        index = int(distance.argmax())
        point, (across, up) = best[index], places[best[index]]
        distance = np.minimum(distance, np.hypot(*(places[best] - places[point]).T))
        text = short(names[point], 24)
        for side, lift in _OFFSETS:
            start = across + 8 if side > 0 else across - 8 - _LETTER * len(text)
            box = (start, up + lift - 7, start + _LETTER * len(text), up + lift + 7)
            if start >= 0 and box[2] <= wide and box[3] <= high and not any(_touch(box, other) for other in taken):
                taken.append(box)
                canvas.axes.annotate(
                    text, (x[point], y[point]), (8 * side, lift), textcoords="offset points",
                    ha="left" if side > 0 else "right", va="center_baseline", fontsize=9.5,
                )  # fmt: skip
                named += 1
                break
        if named == _NAMED:
            return


def _touch(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    across = min(one[2], other[2]) - max(one[0], other[0])
    return across > -2 and min(one[3], other[3]) - max(one[1], other[1]) > -1


def checks_figure(checks: Sequence[Check], name: str) -> Figure | None:
    """Rejection predicted for long responses against what they show; None without a check."""
    if not checks:
        return None
    predicted, observed, noise = (
        np.concatenate([getattr(check, key) for check in checks]) for key in ("predicted", "observed", "noise")
    )
    low, high = np.clip(observed - REACH * noise, 0, 1), np.clip(observed + REACH * noise, 0, 1)
    top = min(1.0, 1.05 * float(max(predicted.max(), high.max(), 1e-3)))
    with drawing():
        canvas = Canvas(name)
        canvas.linear("x", -0.02 * top, 1.04 * top, percent)
        canvas.linear("y", -0.02 * top, 1.04 * top, percent)
        canvas.line([0, top], [0, top], MUTED, dashed=True, width=1.0)
        canvas.axes.vlines(predicted, low, high, color=SERIES[0], linewidth=1.4, alpha=0.55)
        canvas.axes.plot(predicted, observed, "o", markersize=5, color=SERIES[0], markeredgewidth=0, clip_on=False)
        canvas.labels("rejection predicted from the first tokens", "rejection observed")
        return canvas.finish(
            "Predictions tried on the dump",
            "On the dashed line a prediction is right. Bars are what the number of responses leaves open, "
            "± 1.645 standard errors (90 %).",
        )
