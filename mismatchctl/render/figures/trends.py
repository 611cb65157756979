"""Figures over the steps: one metric or a few of a kind, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.canvas import MUTED, SERIES, Canvas, Figure, percent, power, round_ticks
from mismatchctl.render.series import Column, column
from mismatchctl.render.text import label, short
from mismatchctl.result import Groups, Series

BAND = "The band is ± 2 standard errors, or the 90 % interval of a quantile."
_SMALLEST_SPAN = 1e-12
_POINTS = 40  # up to so many steps each value is marked


@dataclass(frozen=True)
class Line:
    """One line of a figure: the metric's key, its name in the legend."""

    key: str
    name: str
    dashed: bool = False


@dataclass(frozen=True)
class Chart:
    """What one figure over the steps shows."""

    key: str
    title: str
    axis: str
    lines: tuple[Line, ...]
    scale: str = "log"
    about: float = 0.0
    caption: str = ""


CHARTS = (
    Chart("k3", "K3 over the steps", "K3 (nats/token)", (Line("k3", "K3"),), caption="The headline of the mismatch."),
    Chart(
        "abs", "Size of the log-prob difference", "|log-prob difference| (nats)",
        (Line("abs_diff_mean", "mean"), Line("abs_diff_p99", "p99"), Line("abs_diff_max", "largest", True)),
        caption="If only the largest rises, a few tokens are wrong; if the mean rises, all of them drift.",
    ),
    Chart(
        "ratio", "Mean ratio", "mean ratio − 1", (Line("ratio_mean", "mean ratio"),), "linear", 1.0,
        "Must stay at 0 within its error if the recorded log-probs are those that sampled.",
    ),
    Chart(
        "chi2", "Chi-square", "chi-square", (Line("chi2_token", "tokens"), Line("chi2_sequence", "sequences")),
        caption="What importance sampling pays in variance, by token and by whole sequence.",
    ),
    Chart(
        "ess", "Effective sample size of the raw ratios", "share left, in effect",
        (Line("ess_token", "tokens"), Line("ess_sequence", "sequences")), "share",
        caption="What is left of the data when raw ratios weigh it; sequences collapse first.",
    ),
    Chart(
        "khat", "Pareto k-hat", "k-hat",
        (Line("khat_token", "tokens"), Line("khat_sequence", "sequences"), Line("khat_sequence_limit", "limit", True)),
        "linear", caption="Above the limit, means of ratios cannot be trusted at this sample size.",
    ),
)  # fmt: skip
"""Figures of the mismatch over the steps."""

DRIFT_CHARTS = (
    Chart(
        "drift-k3", "K3 of both drifts", "K3 (nats/token)",
        (Line("k3", "rollout to train"), Line("drift_k3", "train to current")),
        caption="How far the policy has moved since the trainer's recomputation, beside the mismatch.",
    ),
    Chart(
        "drift-ois", "Mean ratio of current to train", "mean ratio − 1", (Line("ois", "ois"),),
        "linear", 1.0, "0 before the first update; PPO's clipping acts on this ratio.",
    ),
)  # fmt: skip
"""Figures of the second drift over the steps."""


class Steps:
    """The horizontal axis: numeric steps to scale, others side by side."""

    def __init__(self, groups: Groups) -> None:
        labels = groups.labels
        numbers = [float(x) for x in labels if isinstance(x, (int, float)) and not isinstance(x, bool)]
        self.numeric = len(numbers) == len(labels) and all(a < b for a, b in pairwise(numbers))
        self.places = np.array(numbers if self.numeric else range(len(labels)), np.float64)
        self._names = [short(label(value), 10) for value in labels]

    def draw(self, canvas: Canvas) -> None:
        """Ticks and limits of the axis."""
        low, high = float(self.places[0]), float(self.places[-1])
        margin = 0.03 * (high - low) or 0.5
        canvas.axes.set_xlim(low - margin, high + margin)
        ticks = [tick for tick in round_ticks(low, high, 8) if tick == int(tick)] or [low]
        if self.numeric:
            canvas.ticks(
                "x", ticks, lambda value: f"{value:,.10g}".replace(",", "") if abs(value) < 1e9 else power(value)
            )
        else:
            canvas.ticks("x", ticks[:: math.ceil(len(ticks) / 6)], lambda value: self._names[int(value)])


def trend_figure(chart: Chart, groups: Groups, name: str) -> Figure | None:
    """One chart of a run; None where it has nothing to show."""
    columns = {line: column(groups.metrics, line.key, len(groups.labels)) for line in chart.lines}
    columns = {line: found.about(chart.about) for line, found in columns.items() if found.known}
    if all(line.name == "limit" for line in columns) or (
        chart.scale == "log" and not any(map(_positive, columns.values()))
    ):
        return None
    canvas, steps = Canvas(name), Steps(groups)
    steps.draw(canvas)
    low, high = _vertical(canvas, chart, list(columns.values()))
    if chart.about:
        canvas.line(canvas.axes.get_xlim(), [0.0, 0.0], MUTED, dashed=True, width=1.0)
    for index, (line, found) in enumerate(columns.items()):
        color = MUTED if line.name == "limit" else SERIES[index]
        canvas.band(steps.places, np.clip(found.low, low, high), np.clip(found.high, low, high), color)
        points = len(steps.places) <= _POINTS and line.name != "limit"
        values = np.where(found.values > 0, found.values, np.nan) if chart.scale == "log" else found.values
        canvas.line(steps.places, values, color, dashed=line.dashed, points=points)
    if len(columns) > 1:
        colors = [MUTED if line.name == "limit" else SERIES[index] for index, line in enumerate(columns)]
        canvas.legend([(line.name, color, line.dashed) for line, color in zip(columns, colors, strict=True)])
    canvas.labels("step", chart.axis)
    below = chart.scale == "log" and any((found.values <= 0).any() for found in columns.values())
    left_out = " Steps at or below 0 are left out." if below else ""
    return canvas.finish(chart.title, f"{chart.caption}{left_out} {BAND}")


def _positive(found: Column) -> bool:
    return bool((found.values > 0).any())


def _vertical(canvas: Canvas, chart: Chart, columns: Sequence[Column]) -> tuple[float, float]:
    """Set the vertical axis to hold all values, and bands as far as that is sensible; gives its limits."""
    values = np.concatenate([found.values for found in columns])
    values = values[np.isfinite(values)]
    positive = values[values > 0]
    if chart.scale == "log" and len(positive):
        highs = np.concatenate([found.high for found in columns])
        top = min(float(np.nanmax(highs)), 10 * float(values.max()))
        limits = float(positive.min()) / 1.6, max(top, float(values.max())) * 1.6
        canvas.log("y", *limits)
        return limits
    if chart.scale == "share":
        canvas.linear("y", 0.0, 1.04, percent)
        return 0.0, 1.04
    limits = _padded(columns, values, chart.about != 0)
    canvas.linear("y", *limits)
    return limits


def _padded(columns: Sequence[Column], values: Float64s, with_zero: bool) -> tuple[float, float]:
    span = float(np.ptp(values)) or abs(float(values[0])) * 0.1 or 1e-6
    low = max(float(np.nanmin([np.nanmin(found.low) for found in columns])), float(values.min()) - 2 * span)
    high = min(float(np.nanmax([np.nanmax(found.high) for found in columns])), float(values.max()) + 2 * span)
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) if high - low > _SMALLEST_SPAN else 0.01
    return low - margin, high + margin


def correction_trend(key: str, title: str, axis: str, caption: str, groups: Groups, name: str) -> Figure | None:
    """One metric of all corrections over the steps, one line each."""
    series: Mapping[str, Mapping[str, Series]] = groups.corrections
    columns = {correction: column(found, key, len(groups.labels)) for correction, found in series.items()}
    columns = {correction: found for correction, found in columns.items() if found.known}
    if not columns:
        return None
    rows = math.ceil(len(columns) / 2)
    canvas = Canvas(name, height=3.3 + 0.22 * rows, bottom=14.0 * rows + 4)
    steps = Steps(groups)
    steps.draw(canvas)
    values = np.concatenate([found.values for found in columns.values()])
    top = float(np.nanmax(values))
    share = top <= 1.0
    canvas.linear("y", -0.02 * (top or 1.0), 1.06 * (top or 1.0), percent if share else None)
    for index, found in enumerate(columns.values()):
        color = SERIES[index % len(SERIES)]
        canvas.line(steps.places, found.values, color, dashed=index >= len(SERIES), points=len(steps.places) <= _POINTS)
    entries = [
        (short(correction, 26), SERIES[index % len(SERIES)], index >= len(SERIES))
        for index, correction in enumerate(columns)
    ]
    canvas.legend(entries, columns=2 if len(columns) > 1 else 1, below=True)
    canvas.labels("step", axis)
    return canvas.finish(title, caption)


def runs_figure(runs: Mapping[str, Groups], name: str) -> Figure | None:
    """K3 of several runs over their steps, in one figure; only where all their steps are numbers."""
    known = {run: (Steps(groups), column(groups.metrics, "k3", len(groups.labels))) for run, groups in runs.items()}
    if not all(steps.numeric for steps, _ in known.values()):
        return None
    positive = [value for _, found in known.values() for value in found.values if value > 0]
    if not positive:
        return None
    rows = math.ceil(len(known) / 2)
    canvas = Canvas(name, height=3.6 + 0.22 * rows, bottom=14.0 * rows + 4)
    everywhere = np.unique(np.concatenate([steps.places for steps, _ in known.values()]))
    Steps(Groups(labels=[*everywhere.tolist()], metrics={}, corrections={})).draw(canvas)
    limits = min(positive) / 1.6, max(positive) * 1.6
    canvas.log("y", *limits)
    for index, (steps, found) in enumerate(known.values()):
        color = SERIES[index % len(SERIES)]
        canvas.band(steps.places, np.clip(found.low, *limits), np.clip(found.high, *limits), color, 0.12)
        canvas.line(steps.places, found.values, color, points=len(steps.places) <= _POINTS)
    entries = [(short(run, 26), SERIES[index % len(SERIES)], False) for index, run in enumerate(known)]
    canvas.legend(entries, columns=2, below=True)
    canvas.labels("step", "K3 (nats/token)")
    return canvas.finish("K3 of all runs", f"The same axis for every run. {BAND}")
