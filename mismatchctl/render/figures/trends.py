"""Figures over the steps: one metric or a few of a kind, with their uncertainty."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.canvas import Canvas, legend_height, line_key, rule_key
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import percent, plain, power, round_ticks
from mismatchctl.render.figures.series import DenseSeries, column
from mismatchctl.render.figures.shapes import FigureLayout
from mismatchctl.render.figures.theme import SERIES
from mismatchctl.render.figures.words import described, extremes, outside
from mismatchctl.render.text import label, short
from mismatchctl.result import Groups, Series

_BAND = " The band is ± 2 standard errors, or the 90 % interval of a quantile."
_SMALLEST_SPAN = 1e-12
_LIMIT: dict[str, Any] = {"dash": ":", "width": 1.3}
_TICK = 46.0
"""Points that the name of a step takes."""


@dataclass(frozen=True)
class TrendLine:
    """One line of a figure: the metric's key, its name in the legend, the key of its limit if it has one."""

    key: str
    name: str
    limit: str = ""


@dataclass(frozen=True)
class Chart:
    """What one figure over the steps shows; `scale` is log, linear or share, `about` what is taken off the values."""

    key: str
    subject: str
    axis: str
    lines: tuple[TrendLine, ...]
    scale: str = "log"
    about: float = 0.0
    caption: str = ""


CHARTS = (
    Chart(
        "k3", "K3 over the steps", "K3 (nats/token)", (TrendLine("k3", "K3"),),
        caption="The headline of the mismatch.",
    ),
    Chart(
        "abs", "Size of the log-prob difference", "|log-prob difference| (nats)",
        (TrendLine("abs_diff_mean", "mean"), TrendLine("abs_diff_p99", "p99"), TrendLine("abs_diff_max", "largest")),
        caption="If only the largest rises, a few tokens are wrong; if the mean rises, all of them drift.",
    ),
    Chart(
        "ratio", "Mean ratio", "mean ratio − 1", (TrendLine("ratio_mean", "mean ratio"),), "linear", 1.0,
        "Must stay at 0 within its error if the recorded log-probs are those that sampled.",
    ),
    Chart(
        "chi2", "Chi-square", "chi-square",
        (TrendLine("chi2_token", "tokens"), TrendLine("chi2_sequence", "sequences")),
        caption="What importance sampling pays in variance, by token and by whole sequence.",
    ),
    Chart(
        "ess", "Effective sample size of the raw ratios", "share left, in effect",
        (TrendLine("ess_token", "tokens"), TrendLine("ess_sequence", "sequences")), "share",
        caption="What is left of the data when raw ratios weigh it; sequences collapse first.",
    ),
    Chart(
        "ppl", "Perplexity of both sides", "perplexity",
        (TrendLine("train_ppl", "trainer"), TrendLine("rollout_ppl", "rollout")),
        caption="How sure each side is of what was sampled; apart, one of them has another distribution.",
    ),
    Chart(
        "entropy", "Entropy", "entropy (nats)", (TrendLine("entropy_mean", "entropy"),), "linear",
        caption="Of the trainer's distribution, as recorded; a policy that collapses loses it.",
    ),
    Chart(
        "khat", "Pareto k-hat", "k-hat",
        (
            TrendLine("khat_token", "tokens", "khat_token_limit"),
            TrendLine("khat_sequence", "sequences", "khat_sequence_limit"),
        ),
        "linear",
        caption="Above its limit, dotted in its colour, the mean of a ratio cannot be trusted at this sample size.",
    ),
)  # fmt: skip
"""Figures of the mismatch over the steps."""

DRIFT_CHARTS = (
    Chart(
        "drift-k3", "K3 of both drifts", "K3 (nats/token)",
        (TrendLine("k3", "rollout to train"), TrendLine("drift_k3", "train to current")),
        caption="How far the policy has moved since the trainer's recomputation, beside the mismatch.",
    ),
    Chart(
        "drift-ois", "Mean ratio of the current policy to the trainer's", "mean ratio − 1", (TrendLine("ois", "ois"),),
        "linear", 1.0, "0 before the first update; PPO's clipping acts on this ratio.",
    ),
)  # fmt: skip
"""Figures of the second drift over the steps."""


class Steps:
    """The horizontal axis: numeric steps to scale, others side by side."""

    def __init__(self, labels: Sequence[str | int | float | bool | None]) -> None:
        numbers = [float(x) for x in labels if isinstance(x, (int, float)) and not isinstance(x, bool)]
        self._labels = labels
        self.numeric = len(numbers) == len(labels) and all(a < b for a, b in pairwise(numbers))
        self.places = np.array(numbers if self.numeric else range(len(labels)), np.float64)
        self.names = [short(label(value), 10) for value in labels]

    @property
    def limits(self) -> tuple[float, float]:
        """From where to where the axis runs."""
        low, high = float(self.places[0]), float(self.places[-1])
        margin = 0.03 * (high - low) or 0.5
        return low - margin, high + margin

    @property
    def cells(self) -> list[str | int | float]:
        """The steps as the data behind a figure has them."""
        return [label(value) if not isinstance(value, (int, float)) else value for value in self._labels]

    def draw(self, canvas: Canvas) -> None:
        """Ticks and limits of the axis."""
        low, high, limits = float(self.places[0]), float(self.places[-1]), self.limits
        ticks = [tick for tick in round_ticks(low, high, 8) if tick == int(tick)] or [low]
        if self.numeric:
            canvas.ticks("x", ticks, _step_text, limits)
        else:
            left, _, right, _ = canvas.layout.box
            most = max(1, int((right - left) / _TICK))
            canvas.ticks("x", ticks[:: math.ceil(len(ticks) / most)], lambda at: self.names[int(at)], limits)


def _step_text(value: float) -> str:
    return f"{value:.10g}" if abs(value) < 1e9 else power(value)


def trend_figure(chart: Chart, groups: Groups, name: str, message: str = "") -> Figure | None:
    """One chart of a run; None where it has nothing to show. `message`: its title, else what lines run between."""
    columns = {line: column(groups.metrics, line.key, len(groups.labels)) for line in chart.lines}
    columns = {line: found.about(chart.about) for line, found in columns.items() if found.known}
    if not columns or (chart.scale == "log" and not any((found.values > 0).any() for found in columns.values())):
        return None
    limits = {line: column(groups.metrics, line.limit, len(groups.labels)) for line in columns if line.limit}
    steps = Steps(groups.labels)

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        low, high = _vertical(canvas, chart, [*columns.values(), *limits.values()])
        if chart.about:
            canvas.rule([steps.places[0], steps.places[-1]], [0.0, 0.0])
        for index, (line, found) in enumerate(columns.items()):
            if line in limits:
                canvas.rule(steps.places, limits[line].values, color=SERIES[index], **_LIMIT)
            values = np.where(found.values > 0, found.values, np.nan) if chart.scale == "log" else found.values
            canvas.band(steps.places, np.clip(found.low, low, high), np.clip(found.high, low, high), SERIES[index])
            canvas.series(index, steps.places, values)
        canvas.labels("step", chart.axis)
        if len(columns) > 1:
            keys = [(line.name, line_key(index)) for index, line in enumerate(columns)]
            canvas.legend([*keys, *([("limit", rule_key(**_LIMIT))] if limits else [])], columns=3)

    below = chart.scale == "log" and any((found.values <= 0).any() for found in columns.values())
    left_out = " Steps at or below 0 are left out." if below else ""
    band = _BAND if any(found.has_band for found in columns.values()) else ""
    shown = {line.name: found for line, found in columns.items()}
    known = shown | {f"limit of {line.name}": found for line, found in limits.items()}
    return Figure(
        name=name,
        title=message or _message(chart, shown, {line.name: found for line, found in limits.items()}, steps),
        subject=f"{chart.subject}, {chart.axis}" if chart.axis.startswith("share") else chart.subject,
        caption=f"{chart.caption}{left_out}{band}",
        alt=described(chart.axis, steps.names, {name: found.values for name, found in known.items()}),
        data=_data(steps, known, chart.axis),
        paint=paint,
        layout=FigureLayout(below=legend_height(len(columns) + bool(limits), 3)),
        steps=steps.limits,
    )


def _message(chart: Chart, shown: Mapping[str, DenseSeries], limits: Mapping[str, DenseSeries], steps: Steps) -> str:
    """What the values say by themselves, without a model of them."""
    if chart.about:
        (found,) = shown.values()
        return outside(f"{chart.subject} off 1", found.values, found.low, found.high, steps.names)
    first = {name: found.values for name, found in shown.items()}
    if limits:
        above = {name: int((first[name] > limit.values).sum()) for name, limit in limits.items()}
        said = " and ".join(f"{count} of {len(steps.names)} steps by {name}" for name, count in above.items() if count)
        return f"Above the limit at {said}" if said else "Below the limit at every step"
    name = (
        next(iter(first))
        if chart.scale != "share"
        else min(first, key=lambda key: float(np.nanmin(first[key], initial=np.inf)))
    )
    called = chart.axis.partition(" (")[0] if len(first) == 1 else f"{_UNDER.get(chart.key, chart.subject)} {name}"
    return extremes(called, first[name], steps.names, lowest=chart.scale == "share", share=chart.scale == "share")


_UNDER = {
    "abs": "Log-prob difference,", "chi2": "Chi-square of", "ess": "Effective sample size of", "drift-k3": "K3 of",
    "ppl": "Perplexity of",
}  # fmt: skip


def _data(steps: Steps, shown: Mapping[str, DenseSeries], axis: str) -> Data:
    """A row per step: each line, and its band where it has one."""
    heads, columns = ["step"], []
    for name, found in shown.items():
        heads.append(f"{name} ({axis})" if name not in axis else axis)
        columns.append(found.values)
        if found.has_band:
            heads += [f"{name} from", f"{name} to"]
            columns += [found.low, found.high]
    return Data.of(heads, steps.cells, *columns)


def _vertical(canvas: Canvas, chart: Chart, columns: Sequence[DenseSeries]) -> tuple[float, float]:
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


def _padded(columns: Sequence[DenseSeries], values: Float64s, with_zero: bool) -> tuple[float, float]:
    span = float(np.ptp(values)) or abs(float(values[0])) * 0.1 or 1e-6
    low = max(float(np.nanmin([np.nanmin(found.low) for found in columns])), float(values.min()) - 2 * span)
    high = min(float(np.nanmax([np.nanmax(found.high) for found in columns])), float(values.max()) + 2 * span)
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) if high - low > _SMALLEST_SPAN else 0.01
    return low - margin, high + margin


@dataclass(frozen=True)
class Taken:
    """One metric of all corrections over the steps."""

    key: str
    subject: str
    axis: str
    caption: str
    lowest: bool = False


def correction_trend(taken: Taken, groups: Groups, name: str) -> Figure | None:
    """One line for each correction; None where none has a value."""
    series: Mapping[str, Mapping[str, Series]] = groups.corrections
    columns = {correction: column(found, taken.key, len(groups.labels)) for correction, found in series.items()}
    columns = {correction: found for correction, found in columns.items() if found.known}
    if not columns:
        return None
    steps, names = Steps(groups.labels), [short(correction, 22) for correction in columns]
    top = float(np.nanmax([np.nanmax(found.values) for found in columns.values()]))

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        canvas.linear("y", -0.02 * (top or 1.0), 1.06 * (top or 1.0), percent if top <= 1.0 else plain)
        for index, found in enumerate(columns.values()):
            canvas.series(index, steps.places, found.values)
        canvas.names(names)
        canvas.labels("step", taken.axis)

    pick, best = (np.nanmin, min) if taken.lowest else (np.nanmax, max)
    chosen = best(columns, key=lambda correction: float(pick(columns[correction].values)))
    values = {correction: found.values for correction, found in columns.items()}
    said = extremes(short(chosen, 40), values[chosen], steps.names, lowest=taken.lowest, share=True)
    below = legend_height(max(len(names), 2))
    heads = ["step", *(f"{correction} ({taken.axis})" for correction in columns)]
    return Figure(
        name, said, taken.subject, taken.caption, described(taken.axis, steps.names, values),
        Data.of(heads, steps.cells, *values.values()), paint,
        FigureLayout(height=236 + below, below=below), steps.limits,
    )  # fmt: skip


def runs_figure(runs: Mapping[str, Groups], name: str) -> Figure | None:
    """K3 of several runs over their steps, in one figure; only where all their steps are numbers."""
    known = {
        run: (Steps(groups.labels), column(groups.metrics, "k3", len(groups.labels))) for run, groups in runs.items()
    }
    if not all(steps.numeric for steps, _ in known.values()):
        return None
    positive = [value for _, found in known.values() for value in found.values if value > 0]
    if not positive:
        return None
    everywhere = np.unique(np.concatenate([steps.places for steps, _ in known.values()]))
    limits = min(positive) / 1.6, max(positive) * 1.6

    def paint(canvas: Canvas) -> None:
        Steps(everywhere.tolist()).draw(canvas)
        canvas.log("y", *limits)
        for index, (steps, found) in enumerate(known.values()):
            band = np.clip(found.low, *limits), np.clip(found.high, *limits)
            canvas.band(steps.places, *band, SERIES[index % len(SERIES)], 0.12)
            canvas.series(index, steps.places, found.values)
        canvas.names([short(run, 22) for run in known])
        canvas.labels("step", "K3 (nats/token)")

    names = [_step_text(step) for step in everywhere]
    values = {run: _spread(steps.places, found.values, everywhere) for run, (steps, found) in known.items()}
    worst = max(values, key=lambda run: float(np.nanmax(values[run], initial=-np.inf)))
    below = legend_height(max(len(known), 2))
    return Figure(
        name, extremes(f"K3 of {short(worst, 40)}", values[worst], names), "K3 of all runs",
        f"The same axis for every run.{_BAND}", described("K3 (nats/token)", names, values),
        Data.of(["step", *(f"{run} (nats/token)" for run in values)], everywhere, *values.values()),
        paint, FigureLayout(height=250 + below, below=below),
    )  # fmt: skip


def _spread(places: Float64s, values: Float64s, everywhere: Float64s) -> Float64s:
    spread = np.full(len(everywhere), np.nan)
    spread[np.searchsorted(everywhere, places)] = values
    return spread
