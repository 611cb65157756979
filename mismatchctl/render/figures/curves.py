"""Curves over a threshold, with presets and solved targets marked on them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import LEGEND_ROW, Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import percent, plain, round_ticks
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import MUTED, SERIES
from mismatchctl.render.figures.words import described

REACH = 1.6448536269514722
"""Standard errors to either side of a band: 90 %, as the intervals of targets and predictions have it."""
_NEAR_ALL = 0.8  # shares that are all above this are drawn without the rest of their scale
_MOST_ROUND = 4.0  # logarithmic axes that span less have round numbers for ticks


@dataclass(frozen=True)
class Curve:
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
class CurveAxis:
    """What lies along a figure's side: the places in rising order and their name."""

    name: str
    values: Float64s
    log: bool = False

    @property
    def ends(self) -> tuple[float, float]:
        """From where to where it is drawn, with a margin at both ends."""
        low, high = float(self.values[0]), float(self.values[-1])
        if self.log:
            factor = (high / low) ** 0.02
            return low / factor, high * factor
        return low - 0.02 * (high - low), high + 0.02 * (high - low)


@dataclass(frozen=True)
class Curves:
    """What one figure over a threshold shows.

    Attributes:
        share: whether the values are fractions.
        reference: whether 0 is a line to compare with.
    """

    subject: str
    unit: str
    axis: CurveAxis
    lines: tuple[Curve, ...]
    caption: str
    share: bool = False
    reference: bool = False
    markers: tuple[Marker, ...] = ()


def curves_figure(curves: Curves, name: str) -> Figure | None:
    """Lines with their bands over a threshold; None where no value is known."""
    if not any(np.isfinite(line.values).any() for line in curves.lines):
        return None
    axis, several = curves.axis, len(curves.lines) > 1
    layout = FigureLayout(below=LEGEND_ROW if several else 0)

    def paint(canvas: Canvas) -> None:
        _across(canvas, axis)
        bottom, top = _upwards(canvas, curves)
        for marker in curves.markers:
            if marker.solved:
                _mark(canvas, marker, axis, bottom, top)
        _letters(canvas, curves)
        if curves.reference:
            canvas.rule(axis.ends, [0.0, 0.0])
        for index, line in enumerate(curves.lines):
            if line.errors is not None:
                reach = REACH * np.nan_to_num(line.errors)
                least, most = (np.clip(line.values + side * reach, bottom, top) for side in (-1, 1))
                canvas.band(axis.values, least, most, SERIES[index])
            canvas.series(index, axis.values, line.values, marked=False)
        canvas.labels(axis.name, curves.unit)
        if several:
            canvas.names([line.name for line in curves.lines], marked=False)

    names, lines = [_precise(value) for value in axis.values], {line.name: line.values for line in curves.lines}
    banded = any(line.errors is not None for line in curves.lines)
    return Figure(
        name, _message(curves), curves.subject,
        curves.caption + (" Bands are ± 1.645 standard errors (90 %)." if banded else ""),
        described(curves.unit, names, lines, axis.name),
        _data(curves), paint, layout,
    )  # fmt: skip


def _message(curves: Curves) -> str:
    """The first line from one end of the axis to the other."""
    line = curves.lines[0]
    known = np.flatnonzero(np.isfinite(line.values))
    first, last = (float(line.values[known[end]]) for end in (0, -1))
    unit = "fraction" if curves.share else ""
    called = f"{curves.subject} {line.name}" if curves.share and len(curves.lines) > 1 else line.name
    called = f"{called[:1].upper()}{called[1:]}"
    ends = [_precise(float(curves.axis.values[known[end]])) for end in (0, -1)]
    if first == last:
        return f"{called}: {number(first, unit)} at {ends[0]} as at {ends[1]}"
    return f"{called}: from {number(first, unit)} at {ends[0]} to {number(last, unit)} at {ends[1]}"


def _precise(value: float) -> str:
    """A threshold: 1.0005 is not 1."""
    return f"{value:.6g}"


def _data(curves: Curves) -> Data:
    heads, columns = [curves.axis.name], [curves.axis.values]
    for line in curves.lines:
        heads.append(f"{line.name} ({curves.unit})")
        columns.append(line.values)
        if line.errors is not None:
            heads.append("standard error")
            columns.append(line.errors)
    return Data.of(heads, *columns)


def _across(canvas: Canvas, axis: CurveAxis) -> None:
    low, high = axis.ends
    if not axis.log:
        canvas.linear("x", low, high)
    elif high / low > _MOST_ROUND:
        canvas.log("x", low, high)
    else:  # 1, 2 and 5 times powers of ten would not tell 1.0001 from 1.1
        canvas.axis("x").scale = "log"
        canvas.ticks("x", round_ticks(low, high), lambda value: f"{value:,.10g}", (low, high))


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
    canvas.linear("y", bottom, top, (lambda share: percent(share) if share <= 1 else "") if curves.share else plain)
    return bottom, top


def _mark(canvas: Canvas, marker: Marker, axis: CurveAxis, bottom: float, top: float) -> None:
    """A solved threshold with its interval, as far as the axis reaches."""
    first, last = float(axis.values[0]), float(axis.values[-1])
    low, high = marker.interval or (marker.value, marker.value)
    low, high = max(first if low is None else low, first), min(last if high is None else high, last)
    if high > low:
        canvas.band([low, high], [bottom] * 2, [top] * 2, SERIES[3], 0.13)
    if first <= marker.value <= last:
        canvas.line([marker.value] * 2, [0, 1], color=SERIES[3], width=1.2, space="across")


def _letters(canvas: Canvas, curves: Curves) -> None:
    """Presets as dotted upright lines with a letter above; letters that would touch stand as one."""
    scale = math.log if curves.axis.log else float
    low, high = (scale(end) for end in curves.axis.ends)
    spots: list[tuple[float, list[str]]] = []
    for letter, marker in lettered(curves.markers):
        canvas.line([marker.value] * 2, [0, 0.93], color=MUTED, width=0.9, dash=":", space="across")
        place = (scale(marker.value) - low) / (high - low)
        if spots and place - spots[-1][0] < 0.05 * len(spots[-1][1]):
            spots[-1][1].append(letter)
        else:
            spots.append((place, [letter]))
    for place, letters in spots:
        canvas.write(place, 0.945, "".join(letters), base="bottom", color=MUTED, space="axes")


def lettered(markers: Sequence[Marker]) -> list[tuple[str, Marker]]:
    """The presets among markers by the letter that stands for each."""
    presets = sorted((marker for marker in markers if not marker.solved), key=lambda marker: marker.value)
    return [(chr(ord("a") + index % 26), marker) for index, marker in enumerate(presets)]
