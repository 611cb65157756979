"""A value over two thresholds: a map with numbers where its cells are large enough, else with contours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.numbers import number
from mismatchctl.render.figures.canvas import LEGEND_ROW, LETTER, Canvas, area_key
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import percent
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import INK, RAMP, SHADES, SURFACE

MOST_NUMBERED = (9, 14)
"""Up to so many columns and rows, each cell of a map shows its number."""
_DARK = 6
_CONTOURS = ((0.05, "-"), (0.5, "--"))


@dataclass(frozen=True)
class Map:
    """A value over two axes [Y, X], the first of the axes upwards; NaN where undefined."""

    subject: str
    across: tuple[str, tuple[str, ...]]
    up: tuple[str, tuple[str, ...]]
    values: NDArray[np.float64]
    caption: str = ""


def map_figure(shown: Map, name: str) -> Figure | None:
    """A heat map of fractions."""
    values = shown.values
    known = values[np.isfinite(values)]
    if not len(known):
        return None
    low, high = float(known.min()), float(known.max())
    levels = np.round((values - low) / ((high - low) or 1.0) * (len(SHADES) - 1))
    numbered = values.shape[1] <= MOST_NUMBERED[0] and values.shape[0] <= MOST_NUMBERED[1]
    layout = FigureLayout(height=250, below=LEGEND_ROW, left=24 + LETTER * max(map(len, shown.up[1])))
    contours = [] if numbered else [
        (level, dash) for level, dash in _CONTOURS if low < level < high and min(values.shape) > 1
    ]  # fmt: skip

    def paint(canvas: Canvas) -> None:
        cells = np.argwhere(np.isfinite(values))
        colors = [RAMP[SHADES[int(levels[row, column])]] for row, column in cells]
        canvas.polygons(_squares(cells), colors)
        _places(canvas, "x", shown.across[1], 6)
        _places(canvas, "y", shown.up[1], 9)
        if numbered:
            _numbers(canvas, values, levels)
        for level, dash in contours:
            canvas.contour(values, level, color=INK, width=1.3, dash=dash)
        canvas.labels(shown.across[0], shown.up[0])
        steps = (0, len(SHADES) // 2, len(SHADES) - 1) if high > low else (0,)
        key = [(percent(float(f"{low + (high - low) * s / (len(SHADES) - 1):.3g}")), SHADES[s]) for s in steps]
        canvas.legend([(text, area_key(RAMP[shade])) for text, shade in key], columns=3)

    lines = [f"{'line' if dash == '-' else 'dashed line'}: {percent(level)}" for level, dash in contours]
    caption = " ".join(filter(None, [shown.caption, f"{'; '.join(lines).capitalize()}." if lines else ""]))
    return Figure(
        name, _message(shown, known), shown.subject, caption,
        f"Map over {shown.across[0]} and {shown.up[0]}. {_message(shown, known)}.",
        _data(shown), paint, layout,
    )  # fmt: skip


def _message(shown: Map, known: Float64s) -> str:
    ends = [np.argwhere(shown.values == value)[0] for value in (known.min(), known.max())]
    said = [
        f"{number(float(shown.values[row, column]), 'fraction')} at {shown.across[1][column]}, {shown.up[1][row]}"
        for row, column in ends
    ]
    course = (
        f"from {said[0]} to {said[1]}" if known.min() < known.max() else f"{said[0].partition(' at ')[0]} everywhere"
    )
    return f"{shown.subject}: {course}"


def _data(shown: Map) -> Data:
    rows = [
        (shown.up[1][row], shown.across[1][column], float(value))
        for (row, column), value in np.ndenumerate(shown.values)
    ]
    return Data((shown.up[0], shown.across[0], f"{shown.subject} (share)"), tuple(rows))


def _squares(cells: NDArray[np.int64]) -> Float64s:
    """Corners [N, 4, 2] of cells (row, column)."""
    corners = np.array([(-0.5, -0.5), (0.5, -0.5), (0.5, 0.5), (-0.5, 0.5)])
    return np.asarray(cells[:, None, ::-1] + corners, np.float64)


def _places(canvas: Canvas, which: str, texts: Sequence[str], most: int) -> None:
    """A text at each cell, or at every second, third, ... one."""
    where = range(0, len(texts), math.ceil(len(texts) / most))
    canvas.ticks(which, where, lambda place: texts[int(place)], (-0.5, len(texts) - 0.5))


def _numbers(canvas: Canvas, values: NDArray[np.float64], levels: NDArray[np.float64]) -> None:
    for (row, column), value in np.ndenumerate(values):
        if math.isfinite(value):
            dark = SHADES[int(levels[row, column])] >= _DARK
            text = f"{100 * value:.3g}" if value >= 0.001 or value == 0 else "<0.1"
            color = SURFACE if dark else INK
            canvas.write(column, row, text, base="center_baseline", color=color, size=9)
