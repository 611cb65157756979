"""Figures of a sweep: curves over a threshold, maps over two, Pareto fronts, prediction checks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.predict import BackTest
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import escape_terminal, format_number, shorten
from mismatchctl.report.figures.figure import Figure, FigureData
from mismatchctl.report.figures.series import describe_lines
from mismatchctl.report.figures.svg import (
    INK,
    LEGEND_ROW_HEIGHT,
    LETTER_WIDTH,
    MUTED,
    RAMP,
    READABLE_SHADES,
    SERIES,
    SURFACE,
    Canvas,
    FigureLayout,
    TickFormatter,
    area_style,
    format_percent,
    format_plain,
    round_ticks,
)

BAND_STANDARD_ERRORS = 1.6448536269514722
"""Half width of a 90 % band, the level of targets and predictions."""
_NEAR_ONE = 0.8  # shares above this are drawn on an axis that does not start at 0
_MAX_ROUND_TICK_SPAN = 4.0  # log axes that span less have round ticks


@dataclass(frozen=True)
class Curve:
    """One line over an axis. NaN is undefined."""

    name: str
    values: Float64s
    errors: Float64s | None = None


@dataclass(frozen=True)
class ThresholdMarker:
    """A marked threshold: presets, or a solved target with its interval."""

    value: float
    text: str
    interval: tuple[float | None, float | None] | None = None
    solved: bool = False


@dataclass(frozen=True)
class CurveAxis:
    """The name and the rising values of an axis."""

    name: str
    values: Float64s
    log: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """Limits of the axis with a margin."""
        low, high = float(self.values[0]), float(self.values[-1])
        if self.log:
            factor = (high / low) ** 0.02
            return low / factor, high * factor
        return low - 0.02 * (high - low), high + 0.02 * (high - low)


@dataclass(frozen=True)
class CurveChart:
    """A chart over one threshold.

    Attributes:
        share: True if the values are fractions.
        reference: True to draw a reference line at 0.
    """

    subject: str
    unit: str
    axis: CurveAxis
    lines: tuple[Curve, ...]
    caption: str
    share: bool = False
    reference: bool = False
    markers: tuple[ThresholdMarker, ...] = ()


def curves_figure(curves: CurveChart, name: str) -> Figure | None:
    """Draw lines with bands over a threshold, if there are values."""
    if not any(np.isfinite(line.values).any() for line in curves.lines):
        return None
    axis, several = curves.axis, len(curves.lines) > 1
    layout = FigureLayout(below=LEGEND_ROW_HEIGHT if several else 0)

    def paint(canvas: Canvas) -> None:
        _add_horizontal_axis(canvas, axis)
        bottom, top = _add_vertical_axis(canvas, curves)
        for marker in curves.markers:
            if marker.solved:
                _draw_solved_target(canvas, marker, axis, bottom, top)
        _draw_preset_letters(canvas, curves)
        if curves.reference:
            canvas.reference_line(axis.ends, [0.0, 0.0])
        for index, line in enumerate(curves.lines):
            if line.errors is not None:
                reach = BAND_STANDARD_ERRORS * np.nan_to_num(line.errors)
                least, most = (np.clip(line.values + side * reach, bottom, top) for side in (-1, 1))
                canvas.band(axis.values, least, most, SERIES[index])
            canvas.series(index, axis.values, line.values, marked=False)
        canvas.axis_titles(axis.name, curves.unit)
        if several:
            canvas.series_legend([line.name for line in curves.lines], marked=False)

    names = [_format_threshold(value) for value in axis.values]
    lines = {line.name: line.values for line in curves.lines}
    banded = any(line.errors is not None for line in curves.lines)
    return Figure(
        name, _curves_message(curves), curves.subject,
        curves.caption + (" Bands are ± 1.645 standard errors (90 %)." if banded else ""),
        describe_lines(curves.unit, names, lines, axis.name),
        _curves_data(curves), paint, layout,
    )  # fmt: skip


def _curves_message(curves: CurveChart) -> str:
    """Return the values of the first line at the two ends of the axis."""
    line = curves.lines[0]
    known = np.flatnonzero(np.isfinite(line.values))
    first, last = (float(line.values[known[end]]) for end in (0, -1))
    unit = "fraction" if curves.share else ""
    label = f"{curves.subject} {line.name}" if curves.share and len(curves.lines) > 1 else line.name
    label = f"{label[:1].upper()}{label[1:]}"
    ends = [_format_threshold(float(curves.axis.values[known[end]])) for end in (0, -1)]
    if first == last:
        return f"{label}: {format_number(first, unit)} at {ends[0]} as at {ends[1]}"
    return f"{label}: from {format_number(first, unit)} at {ends[0]} to {format_number(last, unit)} at {ends[1]}"


def _format_threshold(value: float) -> str:
    """Format a threshold with six digits, so that 1.0005 differs from 1."""
    return f"{value:.6g}"


def _curves_data(curves: CurveChart) -> FigureData:
    heads, columns = [curves.axis.name], [curves.axis.values]
    for line in curves.lines:
        heads.append(f"{line.name} ({curves.unit})")
        columns.append(line.values)
        if line.errors is not None:
            heads.append("standard error")
            columns.append(line.errors)
    return FigureData.of(heads, *columns)


def _add_horizontal_axis(canvas: Canvas, axis: CurveAxis) -> None:
    low, high = axis.ends
    if not axis.log:
        canvas.linear("x", low, high)
    elif high / low > _MAX_ROUND_TICK_SPAN:
        canvas.log("x", low, high)
    else:  # 1-2-5 steps are too coarse between 1.0001 and 1.1
        canvas.axis("x").scale = "log"
        canvas.ticks("x", round_ticks(low, high), lambda value: f"{value:,.10g}", (low, high))


def _add_vertical_axis(canvas: Canvas, curves: CurveChart) -> tuple[float, float]:
    ends = [0.0] if curves.reference else []
    for line in curves.lines:
        reach = (
            BAND_STANDARD_ERRORS * np.nan_to_num(line.errors) if line.errors is not None else np.zeros_like(line.values)
        )
        for values in (line.values, line.values - reach, line.values + reach):
            ends += [float(value) for value in values[np.isfinite(values)]]
    low, high = min(ends), max(ends)
    if curves.share:
        low, high = low if high > low > _NEAR_ONE else 0.0, min(max(high, 1e-3), 1.0)
    room = (high - low) or abs(high) or 1.0
    bottom, top = low - (0.06 if low else 0.02) * room, high + 0.12 * room
    canvas.linear(
        "y", bottom, top, (lambda share: format_percent(share) if share <= 1 else "") if curves.share else format_plain
    )
    return bottom, top


def _draw_solved_target(canvas: Canvas, marker: ThresholdMarker, axis: CurveAxis, bottom: float, top: float) -> None:
    """Draw a solved threshold and its interval within the axis."""
    first, last = float(axis.values[0]), float(axis.values[-1])
    low, high = marker.interval or (marker.value, marker.value)
    low, high = max(first if low is None else low, first), min(last if high is None else high, last)
    if high > low:
        canvas.band([low, high], [bottom] * 2, [top] * 2, SERIES[3], 0.13)
    if first <= marker.value <= last:
        canvas.line([marker.value] * 2, [0, 1], color=SERIES[3], width=1.2, space="across")


def _draw_preset_letters(canvas: Canvas, curves: CurveChart) -> None:
    """Draw a dotted line and a letter per preset. Letters that would overlap are joined."""
    scale = math.log if curves.axis.log else float
    low, high = (scale(end) for end in curves.axis.ends)
    spots: list[tuple[float, list[str]]] = []
    for letter, marker in assign_letters(curves.markers):
        canvas.line([marker.value] * 2, [0, 0.93], color=MUTED, width=0.9, dash=":", space="across")
        place = (scale(marker.value) - low) / (high - low)
        if spots and place - spots[-1][0] < 0.05 * len(spots[-1][1]):
            spots[-1][1].append(letter)
        else:
            spots.append((place, [letter]))
    for place, letters in spots:
        canvas.write(place, 0.945, "".join(letters), base="bottom", color=MUTED, space="axes")


def assign_letters(markers: Sequence[ThresholdMarker]) -> list[tuple[str, ThresholdMarker]]:
    """Return the presets among the markers with their letters."""
    presets = sorted((marker for marker in markers if not marker.solved), key=lambda marker: marker.value)
    return [(chr(ord("a") + index % 26), marker) for index, marker in enumerate(presets)]


MAX_NUMBERED_CELLS = (9, 14)
"""Maximum columns and rows of a map that prints its numbers."""
_DARK_SHADE = 6
_CONTOUR_LEVELS = ((0.05, "-"), (0.5, "--"))


@dataclass(frozen=True)
class ThresholdMap:
    """A value over two axes [Y, X]. The first axis points up. NaN is undefined."""

    subject: str
    x: tuple[str, tuple[str, ...]]
    y: tuple[str, tuple[str, ...]]
    values: NDArray[np.float64]
    caption: str = ""


def map_figure(chart: ThresholdMap, name: str) -> Figure | None:
    """Draw a heat map of fractions, if there are values."""
    values = chart.values
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    levels = np.round((values - low) / ((high - low) or 1.0) * (len(READABLE_SHADES) - 1))
    numbered = values.shape[1] <= MAX_NUMBERED_CELLS[0] and values.shape[0] <= MAX_NUMBERED_CELLS[1]
    layout = FigureLayout(height=250, below=LEGEND_ROW_HEIGHT, left=24 + LETTER_WIDTH * max(map(len, chart.y[1])))
    contours = [] if numbered else [
        (level, dash) for level, dash in _CONTOUR_LEVELS if low < level < high and min(values.shape) > 1
    ]  # fmt: skip

    def paint(canvas: Canvas) -> None:
        cells = np.argwhere(np.isfinite(values))
        colors = [RAMP[READABLE_SHADES[int(levels[row, column])]] for row, column in cells]
        canvas.polygons(_cell_corners(cells), colors)
        _draw_cell_labels(canvas, "x", chart.x[1], 6)
        _draw_cell_labels(canvas, "y", chart.y[1], 9)
        if numbered:
            _draw_cell_numbers(canvas, values, levels)
        for level, dash in contours:
            canvas.contour(values, level, color=INK, width=1.3, dash=dash)
        canvas.axis_titles(chart.x[0], chart.y[0])
        steps = (0, len(READABLE_SHADES) // 2, len(READABLE_SHADES) - 1) if high > low else (0,)
        key = [
            (format_percent(float(f"{low + (high - low) * s / (len(READABLE_SHADES) - 1):.3g}")), READABLE_SHADES[s])
            for s in steps
        ]
        canvas.legend([(text, area_style(RAMP[shade])) for text, shade in key], columns=3)

    lines = [f"{'line' if dash == '-' else 'dashed line'}: {format_percent(level)}" for level, dash in contours]
    caption = " ".join(filter(None, [chart.caption, f"{'; '.join(lines).capitalize()}." if lines else ""]))
    return Figure(
        name, _map_message(chart, known), chart.subject, caption,
        f"Map over {chart.x[0]} and {chart.y[0]}. {_map_message(chart, known)}.",
        _map_data(chart), paint, layout,
    )  # fmt: skip


def _map_message(chart: ThresholdMap, known: Float64s) -> str:
    ends = [np.argwhere(chart.values == value)[0] for value in (known.min(), known.max())]
    places = [
        f"{format_number(float(chart.values[row, column]), 'fraction')} at {chart.x[1][column]}, {chart.y[1][row]}"
        for row, column in ends
    ]
    if known.min() < known.max():
        return f"{chart.subject}: from {places[0]} to {places[1]}"
    return f"{chart.subject}: {places[0].partition(' at ')[0]} everywhere"


def _map_data(chart: ThresholdMap) -> FigureData:
    rows = [
        (chart.y[1][row], chart.x[1][column], float(value)) for (row, column), value in np.ndenumerate(chart.values)
    ]
    return FigureData((chart.y[0], chart.x[0], f"{chart.subject} (share)"), tuple(rows))


def _cell_corners(cells: NDArray[np.int64]) -> Float64s:
    """Return corners [N, 4, 2] of cells (row, column)."""
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    return np.asarray(cells[:, None, ::-1] + corners, np.float64)


def _draw_cell_labels(canvas: Canvas, which: str, texts: Sequence[str], most: int) -> None:
    """Label at most `most` cells at equal distances."""
    where = range(0, len(texts), math.ceil(len(texts) / most))
    canvas.ticks(which, where, lambda place: texts[int(place)], (-0.5, len(texts) - 0.5))


def _draw_cell_numbers(canvas: Canvas, values: NDArray[np.float64], levels: NDArray[np.float64]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            dark = READABLE_SHADES[int(levels[row, column])] >= _DARK_SHADE
            text = f"{100 * value:.3g}" if value >= 0.001 or value == 0 else "<0.1"
            color = SURFACE if dark else INK
            canvas.write(column, row, text, base="center_baseline", color=color, size=9)


_BEST_STYLE: dict[str, Any] = {"dash": "", "mark": "o", "size": 6.5, "edge": 0.7, "order": 4, "clip": False}
_NAME_LETTER_WIDTH = 5.8
_MAX_NAMED, _MAX_TRIED = 6, 24  # names drawn on a front, and points tried
_NAME_OFFSETS = ((1, 0), (-1, 0), (1, 9), (-1, -9))  # side of the point, and points upwards


@dataclass(frozen=True)
class ParetoChart:
    """Points by two costs. `best` is True on the Pareto front, `shade` from 0 to 1 is the bias."""

    subject: str
    x: tuple[str, Float64s]
    y: tuple[str, Float64s]
    shade: Float64s
    best: Bools
    names: tuple[str, ...]
    caption: str
    shares: bool = True


def front_figure(front: ParetoChart, name: str) -> Figure | None:
    """Draw all points with the Pareto front filled, if there are two or more."""
    (across, x), (up, y) = front.x, front.y
    known = np.isfinite(x) & np.isfinite(y)
    if known.sum() < 2:
        return None
    best = np.flatnonzero(known & front.best)

    def paint(canvas: Canvas) -> None:
        for which, values, share in (("x", x[known], front.shares), ("y", y[known], True)):
            room = 0.08 * (values.max() - values.min()) or 0.01
            high = values.max() + (2 * room if which == "x" else room)
            canvas.linear(which, values.min() - room, high, _percent_ticks(values, high) if share else format_plain, 5)
        others = known & ~front.best
        canvas.line(x[others], y[others], dash="", mark="o", size=3, color=MUTED, opacity=0.45, clip=False)
        shades = 2 + np.round(6 * np.nan_to_num(front.shade[best])).astype(int)
        for shade in dict.fromkeys(shades.tolist()):
            these = best[shades == shade]
            canvas.line(x[these], y[these], color=INK, face=RAMP[shade], **_BEST_STYLE)
        label_points(canvas, x, y, best, front.names)
        canvas.axis_titles(across, up)

    rows = [
        (front.names[point], float(x[point]), float(y[point]), "yes" if front.best[point] else "no")
        for point in np.flatnonzero(known)
    ]
    count = f"{len(best):,} of {int(known.sum()):,} points"
    return Figure(
        name, f"No other point beats {count}", front.subject, front.caption,
        escape_terminal(f"Points by {across} and {up}; no other beats {count}."),
        FigureData(("point", across, up, "no other beats it"), tuple(rows)), paint,
    )  # fmt: skip


def _percent_ticks(values: Float64s, high: float) -> TickFormatter:
    """Return a percent format that drops ticks too close to the end of the axis."""
    span = float(np.ptp(values))
    text = (lambda value: f"{100 * value:.2f} %") if span < 0.01 else format_percent
    return lambda tick: text(tick) if tick < high - 0.05 * span else ""


def label_points(
    canvas: Canvas, x: Float64s, y: Float64s, best: NDArray[np.int64], names: Sequence[str], before: int = 1
) -> None:
    """Name some points far from each other, if there is space. The first `before` points are named first."""
    left, top, right, bottom = canvas.layout.box
    wide, high = right - left, bottom - top
    places = np.column_stack([wide * canvas.axis("x").shares(x), high * canvas.axis("y").shares(y)])
    boxes = [(across - 3, up - 3, across + 3, up + 3) for across, up in places[best].tolist()]
    distance = np.full(len(best), np.inf)
    named = 0
    for place in range(min(_MAX_TRIED, len(best))):
        index = place if place < before else int(distance.argmax())
        point, (across, up) = best[index], places[best[index]]
        distance = np.minimum(distance, np.hypot(*(places[best] - places[point]).T))
        text = shorten(names[point], 24)
        for side, lift in _NAME_OFFSETS:
            start = across + 8 if side > 0 else across - 8 - _NAME_LETTER_WIDTH * len(text)
            spot = (start, up + lift - 7, start + _NAME_LETTER_WIDTH * len(text), up + lift + 7)
            if (
                start >= 0
                and spot[2] <= wide
                and spot[3] <= high
                and not any(_boxes_overlap(spot, other) for other in boxes)
            ):
                boxes.append(spot)
                canvas.write(
                    x[point], y[point], text, lift=(8 * side, lift), side="left" if side > 0 else "right",
                    base="center_baseline", size=9.5,
                )  # fmt: skip
                named += 1
                break
        if named == _MAX_NAMED:
            return


def _boxes_overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    across = min(one[2], other[2]) - max(one[0], other[0])
    return across > -2 and min(one[3], other[3]) - max(one[1], other[1]) > -1


def checks_figure(checks: Sequence[BackTest], name: str) -> Figure | None:
    """Draw predicted against observed rejection of long responses, if there are checks."""
    if not checks:
        return None
    predicted, observed, noise = (
        np.concatenate([getattr(check, key) for check in checks]) for key in ("predicted", "observed", "noise")
    )
    low, high = (np.clip(observed + sign * BAND_STANDARD_ERRORS * noise, 0, 1) for sign in (-1, 1))
    top = min(1.0, 1.05 * float(max(predicted.max(), high.max(), 1e-3)))

    def paint(canvas: Canvas) -> None:
        canvas.linear("x", -0.02 * top, 1.04 * top, format_percent)
        canvas.linear("y", -0.02 * top, 1.04 * top, format_percent)
        canvas.reference_line([0, top], [0, top])
        canvas.bars(predicted, low, high, color=SERIES[0], width=1.4, opacity=0.55)
        canvas.line(predicted, observed, dash="", mark="o", size=5, color=SERIES[0], clip=False)
        canvas.axis_titles("rejection predicted from the first tokens", "rejection observed")

    inside = int(((low <= predicted) & (predicted <= high)).sum())
    title = f"{inside} of {len(predicted)} predictions are within 90 % of what was observed"
    return Figure(
        name, title, "Predictions tried on the dump",
        "On the dashed line a prediction is right. Bars are what the number of responses leaves open, "
        "± 1.645 standard errors (90 %).",
        f"Rejection observed against predicted, up to {format_percent(round(top, 3))}. {title}.",
        FigureData.of(("predicted (share)", "observed (share)", "standard error"), predicted, observed, noise),
        paint,
    )  # fmt: skip
