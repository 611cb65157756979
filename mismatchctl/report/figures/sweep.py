"""Figures of a sweep: curves over a threshold, maps over two, Pareto fronts, and checks of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.predict import BackTest
from mismatchctl.core.batch import Bools, Float64s
from mismatchctl.core.formatting import shorten
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine
from mismatchctl.report.figures.series import INTERVAL_Z

_MAX_NAMED = 6
"""Named points of a Pareto front."""


@dataclass(frozen=True)
class Curve:
    """One line over an axis. NaN is undefined."""

    name: str
    values: Float64s
    errors: Float64s | None = None


@dataclass(frozen=True)
class CurveChart:
    """A figure over one threshold: presets and solved targets are rules."""

    subject: str
    unit: str
    axis: str
    values: Float64s
    log: bool
    lines: tuple[Curve, ...]
    caption: str
    percent: bool = False
    expected: float | None = None
    rules: tuple[ReferenceLine, ...] = ()


def curves_figure(chart: CurveChart, name: str) -> Figure | None:
    """Draw lines with bands over a threshold, if there are values."""
    if not any(np.isfinite(line.values).any() for line in chart.lines):
        return None
    marks = []
    for color, line in enumerate(chart.lines):
        mark = Marks("line", line.name, chart.values.tolist(), line.values.tolist(), color=color)
        if line.errors is not None:
            reach = INTERVAL_Z * np.nan_to_num(line.errors)
            ends = [np.clip(end, 0, 1) if chart.percent else end for end in (line.values - reach, line.values + reach)]
            mark = replace(mark, low=ends[0].tolist(), high=ends[1].tolist())
        marks.append(mark)
    expected = () if chart.expected is None else (ReferenceLine("y", chart.expected, "", None, "limit"),)
    limits = float(chart.values[0]), float(chart.values[-1])
    return Figure(
        name, chart.subject, f"{chart.subject} by {chart.axis}", chart.caption,
        Axis(chart.axis, "log" if chart.log else "linear", limits), Axis(chart.unit, percent=chart.percent),
        tuple(marks), (*chart.rules, *expected),
    )  # fmt: skip


@dataclass(frozen=True)
class ThresholdMap:
    """A fraction over two axes [Y, X] with their labels. NaN is undefined."""

    subject: str
    x: tuple[str, tuple[str, ...]]
    y: tuple[str, tuple[str, ...]]
    values: NDArray[np.float64]


def map_figure(chart: ThresholdMap, name: str) -> Figure | None:
    """Draw a heat map, if there are values."""
    known = np.argwhere(np.isfinite(chart.values))
    if not len(known):
        return None
    mark = Marks(
        "cells", chart.subject, [chart.x[1][column] for _, column in known], [chart.y[1][row] for row, _ in known],
        values=[float(chart.values[row, column]) for row, column in known],
    )  # fmt: skip
    caption = "In percent. A darker color is more."
    return Figure(
        name, chart.subject, f"{chart.subject} by two thresholds", caption, Axis(chart.x[0], "band"),
        Axis(chart.y[0], "band", percent=True), (mark,),
    )  # fmt: skip


@dataclass(frozen=True)
class ParetoChart:
    """Points by two costs. `best` is True on the Pareto front."""

    x: Axis
    y: Axis
    across: Float64s
    up: Float64s
    best: Bools
    names: tuple[str, ...]
    caption: str


def front_figure(front: ParetoChart, name: str, presets: Sequence[tuple[str, float, float]] = ()) -> Figure | None:
    """Draw all points with the Pareto front in color and the presets named, if there are two or more points."""
    known = np.isfinite(front.across) & np.isfinite(front.up)
    if known.sum() < 2:
        return None
    best, others = np.flatnonzero(known & front.best), np.flatnonzero(known & ~front.best)
    best = best[np.argsort(front.across[best], kind="stable")]
    named = set(best[np.linspace(0, len(best) - 1, min(_MAX_NAMED, len(best))).astype(int)].tolist())
    names = [front.names[point] if point in named else "" for point in best.tolist()]
    marks = [
        Marks(
            "dots", "other points", front.across[others].tolist(), front.up[others].tolist(), color=MUTED, hollow=True
        )
    ]
    marks.append(Marks("dots", "Pareto front", front.across[best].tolist(), front.up[best].tolist(), labels=names))
    if presets:
        texts, x, y = zip(*((shorten(text, 30), x, y) for text, x, y in presets), strict=True)
        marks.append(Marks("dots", "presets", x, y, color=1, labels=texts))
    return Figure(
        name, f"Pareto front ({len(best):,} of {int(known.sum()):,} points)", "points of the sweep", front.caption,
        front.x, front.y, tuple(mark for mark in marks if len(mark.x)), size="wide",
    )  # fmt: skip


def checks_figure(checks: Sequence[BackTest], name: str) -> Figure | None:
    """Draw predicted against observed rejection of long responses, if there are checks."""
    if not checks:
        return None
    predicted, observed, noise = (
        np.concatenate([getattr(check, key) for check in checks]) for key in ("predicted", "observed", "noise")
    )
    low, high = (np.clip(observed + sign * INTERVAL_Z * noise, 0, 1) for sign in (-1, 1))
    inside = int(((low <= predicted) & (predicted <= high)).sum())
    top = min(1.0, 1.05 * float(max(predicted.max(), high.max(), 1e-3)))
    marks = (
        Marks("line", "prediction is right", [0.0, top], [0.0, top], color=MUTED, dashed=True),
        Marks("dots", "predictions", predicted.tolist(), observed.tolist(), low.tolist(), high.tolist()),
    )
    return Figure(
        name, f"{inside} of {len(predicted)} predictions are within the 90% interval of the observation",
        "rejection predicted from the first tokens against the observed rejection",
        "Bars are the uncertainty of the observation.",
        Axis("predicted rejection", limits=(0.0, top), percent=True),
        Axis("observed rejection", limits=(0.0, top), percent=True), marks, size="square",
    )  # fmt: skip
