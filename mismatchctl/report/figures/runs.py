"""Figures of a run and of several runs over their steps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import format_label, shorten
from mismatchctl.report.figures.bars import CORRECTION_PLOTS, SELECTION_PLOTS, dots_figure
from mismatchctl.report.figures.distributions import breakdown_figure, distribution_figure, joint_figure
from mismatchctl.report.figures.figure import Figure, FigureData
from mismatchctl.report.figures.series import (
    DenseSeries,
    describe_band_misses,
    describe_extremes,
    describe_lines,
    read_column,
    to_floats,
)
from mismatchctl.report.figures.svg import (
    SERIES,
    Canvas,
    FigureLayout,
    format_percent,
    format_plain,
    format_power,
    legend_height,
    line_style,
    round_ticks,
    rule_style,
)
from mismatchctl.results.model import Groups, RunResult, Series, Value
from mismatchctl.results.summary import get_summary

_BAND_NOTE = " The band is ± 2 standard errors, or the 90 % interval of a quantile."
_MIN_SPAN = 1e-12
_LIMIT_STYLE: dict[str, Any] = {"dash": ":", "width": 1.3}
_TICK_WIDTH = 46.0
"""Width of a step label in points."""


@dataclass(frozen=True)
class TrendLine:
    """One line: the metric, its label, and the metric with its limit."""

    key: str
    name: str
    limit: str = ""


@dataclass(frozen=True)
class TrendChart:
    """A chart over the steps. `reference` is subtracted from the values."""

    key: str
    subject: str
    axis: str
    lines: tuple[TrendLine, ...]
    scale: str = "log"
    reference: float = 0.0
    caption: str = ""


CHARTS = (
    TrendChart(
        "k3", "K3 over the steps", "K3 (nats/token)", (TrendLine("k3", "K3"),),
        caption="The headline of the mismatch.",
    ),
    TrendChart(
        "abs", "Size of the log-prob difference", "|log-prob difference| (nats)",
        (TrendLine("abs_diff_mean", "mean"), TrendLine("abs_diff_p99", "p99"), TrendLine("abs_diff_max", "largest")),
        caption="If only the largest rises, a few tokens are wrong; if the mean rises, all of them drift.",
    ),
    TrendChart(
        "ratio", "Mean ratio", "mean ratio − 1", (TrendLine("ratio_mean", "mean ratio"),), "linear", 1.0,
        "Must stay at 0 within its error if the recorded log-probs are those that sampled.",
    ),
    TrendChart(
        "chi2", "Chi-square", "chi-square",
        (TrendLine("chi2_token", "tokens"), TrendLine("chi2_sequence", "sequences")),
        caption="What importance sampling pays in variance, by token and by whole sequence.",
    ),
    TrendChart(
        "ess", "Effective sample size of the raw ratios", "share left, in effect",
        (TrendLine("ess_token", "tokens"), TrendLine("ess_sequence", "sequences")), "share",
        caption="What is left of the data when raw ratios weigh it; sequences collapse first.",
    ),
    TrendChart(
        "ppl", "Perplexity of both sides", "perplexity",
        (TrendLine("train_ppl", "trainer"), TrendLine("rollout_ppl", "rollout")),
        caption="How sure each side is of what was sampled; apart, one of them has another distribution.",
    ),
    TrendChart(
        "entropy", "Entropy", "entropy (nats)", (TrendLine("entropy_mean", "entropy"),), "linear",
        caption="Of the trainer's distribution, as recorded; a policy that collapses loses it.",
    ),
    TrendChart(
        "khat", "Pareto k-hat", "k-hat",
        (
            TrendLine("khat_token", "tokens", "khat_token_limit"),
            TrendLine("khat_sequence", "sequences", "khat_sequence_limit"),
        ),
        "linear",
        caption="Above its limit, dotted in its colour, the mean of a ratio cannot be trusted at this sample size.",
    ),
)  # fmt: skip
"""Charts of the mismatch."""

DRIFT_CHARTS = (
    TrendChart(
        "drift-k3", "K3 of both drifts", "K3 (nats/token)",
        (TrendLine("k3", "rollout to train"), TrendLine("drift_k3", "train to current")),
        caption="How far the policy has moved since the trainer's recomputation, beside the mismatch.",
    ),
    TrendChart(
        "drift-ois", "Mean ratio of the current policy to the trainer's", "mean ratio − 1", (TrendLine("ois", "ois"),),
        "linear", 1.0, "0 before the first update; PPO's clipping acts on this ratio.",
    ),
)  # fmt: skip
"""Charts of the drift from the trainer's recomputation to the current policy."""


class StepAxis:
    """The step axis. Numeric steps are drawn to scale, other labels at equal distances."""

    def __init__(self, labels: Sequence[str | int | float | bool | None]) -> None:
        numbers = [float(x) for x in labels if isinstance(x, (int, float)) and not isinstance(x, bool)]
        self._labels = labels
        self.numeric = len(numbers) == len(labels) and all(a < b for a, b in pairwise(numbers))
        self.places = np.array(numbers if self.numeric else range(len(labels)), np.float64)
        self.names = [shorten(format_label(value), 10) for value in labels]

    @property
    def limits(self) -> tuple[float, float]:
        low, high = float(self.places[0]), float(self.places[-1])
        margin = 0.03 * (high - low) or 0.5
        return low - margin, high + margin

    @property
    def cells(self) -> list[str | int | float]:
        """Step labels for the figure's data."""
        return [format_label(value) if not isinstance(value, (int, float)) else value for value in self._labels]

    def draw(self, canvas: Canvas) -> None:
        low, high, limits = float(self.places[0]), float(self.places[-1]), self.limits
        ticks = [tick for tick in round_ticks(low, high, 8) if tick == int(tick)] or [low]
        if self.numeric:
            canvas.ticks("x", ticks, _format_step, limits)
        else:
            left, _, right, _ = canvas.layout.box
            most = max(1, int((right - left) / _TICK_WIDTH))
            canvas.ticks("x", ticks[:: math.ceil(len(ticks) / most)], lambda at: self.names[int(at)], limits)


def _format_step(value: float) -> str:
    return f"{value:.10g}" if abs(value) < 1e9 else format_power(value)


def trend_figure(chart: TrendChart, groups: Groups, name: str, message: str = "") -> Figure | None:
    """Draw one chart of a run, if it has values. The title is `message` or the range of the first line."""
    columns = {line: read_column(groups.metrics, line.key, len(groups.labels)) for line in chart.lines}
    columns = {line: found.minus(chart.reference) for line, found in columns.items() if found.known}
    if not columns or (chart.scale == "log" and not any((found.values > 0).any() for found in columns.values())):
        return None
    limits = {line: read_column(groups.metrics, line.limit, len(groups.labels)) for line in columns if line.limit}
    steps = StepAxis(groups.labels)

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        low, high = _add_vertical_axis(canvas, chart, [*columns.values(), *limits.values()])
        if chart.reference:
            canvas.reference_line([steps.places[0], steps.places[-1]], [0.0, 0.0])
        for index, (line, found) in enumerate(columns.items()):
            if line in limits:
                canvas.reference_line(steps.places, limits[line].values, color=SERIES[index], **_LIMIT_STYLE)
            values = np.where(found.values > 0, found.values, np.nan) if chart.scale == "log" else found.values
            canvas.band(steps.places, np.clip(found.low, low, high), np.clip(found.high, low, high), SERIES[index])
            canvas.series(index, steps.places, values)
        canvas.axis_titles("step", chart.axis)
        if len(columns) > 1:
            keys = [(line.name, line_style(index)) for index, line in enumerate(columns)]
            canvas.legend([*keys, *([("limit", rule_style(**_LIMIT_STYLE))] if limits else [])], columns=3)

    below = chart.scale == "log" and any((found.values <= 0).any() for found in columns.values())
    left_out = " Steps at or below 0 are left out." if below else ""
    band = _BAND_NOTE if any(found.has_band for found in columns.values()) else ""
    shown = {line.name: found for line, found in columns.items()}
    known = shown | {f"limit of {line.name}": found for line, found in limits.items()}
    return Figure(
        name=name,
        title=message or _trend_message(chart, shown, {line.name: found for line, found in limits.items()}, steps),
        subject=f"{chart.subject}, {chart.axis}" if chart.axis.startswith("share") else chart.subject,
        caption=f"{chart.caption}{left_out}{band}",
        alt=describe_lines(chart.axis, steps.names, {name: found.values for name, found in known.items()}),
        data=_trend_data(steps, known, chart.axis),
        paint=paint,
        layout=FigureLayout(below=legend_height(len(columns) + bool(limits), 3)),
        steps=steps.limits,
    )


def _trend_message(
    chart: TrendChart, shown: Mapping[str, DenseSeries], limits: Mapping[str, DenseSeries], steps: StepAxis
) -> str:
    """Describe the extremes, the limits or the distance from the reference."""
    if chart.reference:
        (found,) = shown.values()
        return describe_band_misses(f"{chart.subject} off 1", found.values, found.low, found.high, steps.names)
    first = {name: found.values for name, found in shown.items()}
    if limits:
        above = {name: int((first[name] > limit.values).sum()) for name, limit in limits.items()}
        exceeded = " and ".join(
            f"{count} of {len(steps.names)} steps by {name}" for name, count in above.items() if count
        )
        return f"Above the limit at {exceeded}" if exceeded else "Below the limit at every step"
    name = (
        next(iter(first))
        if chart.scale != "share"
        else min(first, key=lambda key: float(np.nanmin(first[key], initial=np.inf)))
    )
    label = (
        chart.axis.partition(" (")[0]
        if len(first) == 1
        else f"{_MESSAGE_PREFIXES.get(chart.key, chart.subject)} {name}"
    )
    return describe_extremes(
        label, first[name], steps.names, lowest=chart.scale == "share", share=chart.scale == "share"
    )


_MESSAGE_PREFIXES = {
    "abs": "Log-prob difference,", "chi2": "Chi-square of", "ess": "Effective sample size of", "drift-k3": "K3 of",
    "ppl": "Perplexity of",
}  # fmt: skip


def _trend_data(steps: StepAxis, shown: Mapping[str, DenseSeries], axis: str) -> FigureData:
    """Return one row per step with each line and its band."""
    heads, columns = ["step"], []
    for name, found in shown.items():
        heads.append(f"{name} ({axis})" if name not in axis else axis)
        columns.append(found.values)
        if found.has_band:
            heads += [f"{name} from", f"{name} to"]
            columns += [found.low, found.high]
    return FigureData.of(heads, steps.cells, *columns)


def _add_vertical_axis(canvas: Canvas, chart: TrendChart, columns: Sequence[DenseSeries]) -> tuple[float, float]:
    """Fit the vertical axis to the values, and to the bands within reason. Return its limits."""
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
        canvas.linear("y", 0.0, 1.04, format_percent)
        return 0.0, 1.04
    limits = _padded_limits(columns, values, chart.reference != 0)
    canvas.linear("y", *limits)
    return limits


def _padded_limits(columns: Sequence[DenseSeries], values: Float64s, with_zero: bool) -> tuple[float, float]:
    span = float(np.ptp(values)) or abs(float(values[0])) * 0.1 or 1e-6
    low = max(float(np.nanmin([np.nanmin(found.low) for found in columns])), float(values.min()) - 2 * span)
    high = min(float(np.nanmax([np.nanmax(found.high) for found in columns])), float(values.max()) + 2 * span)
    if with_zero:
        low, high = min(low, 0.0), max(high, 0.0)
    margin = 0.06 * (high - low) if high - low > _MIN_SPAN else 0.01
    return low - margin, high + margin


@dataclass(frozen=True)
class CorrectionChart:
    """One metric of all corrections over the steps."""

    key: str
    subject: str
    axis: str
    caption: str
    lowest: bool = False


def correction_trend(chart: CorrectionChart, groups: Groups, name: str) -> Figure | None:
    """Draw one line per correction, if there are values."""
    series: Mapping[str, Mapping[str, Series]] = groups.corrections
    columns = {correction: read_column(found, chart.key, len(groups.labels)) for correction, found in series.items()}
    columns = {correction: found for correction, found in columns.items() if found.known}
    if not columns:
        return None
    steps, names = StepAxis(groups.labels), [shorten(correction, 22) for correction in columns]
    top = float(np.nanmax([np.nanmax(found.values) for found in columns.values()]))

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        canvas.linear("y", -0.02 * (top or 1.0), 1.06 * (top or 1.0), format_percent if top <= 1.0 else format_plain)
        for index, found in enumerate(columns.values()):
            canvas.series(index, steps.places, found.values)
        canvas.series_legend(names)
        canvas.axis_titles("step", chart.axis)

    pick, best = (np.nanmin, min) if chart.lowest else (np.nanmax, max)
    chosen = best(columns, key=lambda correction: float(pick(columns[correction].values)))
    values = {correction: found.values for correction, found in columns.items()}
    title = describe_extremes(shorten(chosen, 40), values[chosen], steps.names, lowest=chart.lowest, share=True)
    below = legend_height(max(len(names), 2))
    heads = ["step", *(f"{correction} ({chart.axis})" for correction in columns)]
    return Figure(
        name, title, chart.subject, chart.caption, describe_lines(chart.axis, steps.names, values),
        FigureData.of(heads, steps.cells, *values.values()), paint,
        FigureLayout(height=236 + below, below=below), steps.limits,
    )  # fmt: skip


def runs_figure(runs: Mapping[str, Groups]) -> Figure | None:
    """Draw K3 of several runs, if all steps are numbers."""
    known = {
        run: (StepAxis(groups.labels), read_column(groups.metrics, "k3", len(groups.labels)))
        for run, groups in runs.items()
    }
    if not all(steps.numeric for steps, _ in known.values()):
        return None
    positive = [value for _, found in known.values() for value in found.values if value > 0]
    if not positive:
        return None
    everywhere = np.unique(np.concatenate([steps.places for steps, _ in known.values()]))
    limits = min(positive) / 1.6, max(positive) * 1.6

    def paint(canvas: Canvas) -> None:
        StepAxis(everywhere.tolist()).draw(canvas)
        canvas.log("y", *limits)
        for index, (steps, found) in enumerate(known.values()):
            band = np.clip(found.low, *limits), np.clip(found.high, *limits)
            canvas.band(steps.places, *band, SERIES[index % len(SERIES)], 0.12)
            canvas.series(index, steps.places, found.values)
        canvas.series_legend([shorten(run, 22) for run in known])
        canvas.axis_titles("step", "K3 (nats/token)")

    names = [_format_step(step) for step in everywhere]
    values = {run: _interpolate(steps.places, found.values, everywhere) for run, (steps, found) in known.items()}
    worst = max(values, key=lambda run: float(np.nanmax(values[run], initial=-np.inf)))
    below = legend_height(max(len(known), 2))
    return Figure(
        "all-k3", describe_extremes(f"K3 of {shorten(worst, 40)}", values[worst], names), "K3 of all runs",
        f"The same axis for every run.{_BAND_NOTE}", describe_lines("K3 (nats/token)", names, values),
        FigureData.of(["step", *(f"{run} (nats/token)" for run in values)], everywhere, *values.values()),
        paint, FigureLayout(height=250 + below, below=below),
    )  # fmt: skip


def _interpolate(places: Float64s, values: Float64s, everywhere: Float64s) -> Float64s:
    spread = np.full(len(everywhere), np.nan)
    spread[np.searchsorted(everywhere, places)] = values
    return spread


MAX_LOGGED = 24
"""Maximum figures of a run's own log."""
_IMPORTANT_NAMES = ("kl", "k3", "grad", "reward", "score", "entropy", "ppl", "loss", "length", "clip", "ess", "reject")


def log_figures(run: RunResult, prefix: str) -> list[Figure]:
    """Draw response length, reward, and the scalars of the run's log."""
    labels = run.groups.labels
    found = [
        _series_figure(
            labels, "length", "Response length", "tokens per response", _mean_lengths(run), f"{prefix}-length"
        ),
        _series_figure(labels, "reward", "Reward", "mean reward", _mean_rewards(run), f"{prefix}-reward"),
    ]
    for place, name in enumerate(_select_log_names(run)):
        lag, values = run.lags.get(name), to_floats(run.log[name])
        message = "" if lag is None or lag.steps is None else lag.text
        subject = f"{shorten(name, 60)}, as logged"
        found.append(_series_figure(labels, name, subject, shorten(name, 28), values, f"{prefix}-log-{place}", message))
    return [figure for figure in found if figure is not None]


def _select_log_names(run: RunResult) -> list[str]:
    """Return the names in the log with values, most informative first."""

    def rank(name: str) -> tuple[bool, int, str]:
        lag = run.lags.get(name)
        word = next(
            (place for place, part in enumerate(_IMPORTANT_NAMES) if part in name.lower()), len(_IMPORTANT_NAMES)
        )
        return lag is None or lag.steps is None, word, name

    known = [name for name, values in run.log.items() if sum(value is not None for value in values) > 1]
    return sorted(known, key=rank)[:MAX_LOGGED]


def _mean_lengths(run: RunResult) -> Float64s:
    tokens, sequences = (to_floats(run.groups.series(key).value) for key in ("tokens", "sequences"))
    with np.errstate(all="ignore"):
        lengths: Float64s = np.where(sequences > 0, tokens / sequences, np.nan)
    return lengths


def _mean_rewards(run: RunResult) -> Float64s:
    """Return the mean reward per step, from a correction that rejects no tokens."""
    for found in run.groups.corrections.values():
        rejected, kept = found.get("rejected_tokens"), found.get("kept_reward")
        if kept is not None and rejected is not None and not any(rejected.value):
            return to_floats(kept.value)
    return np.full(len(run.groups.labels), np.nan)


def _series_figure(
    labels: Sequence[str | int | float | bool | None], key: str, subject: str, axis: str, values: Float64s, name: str,
    message: str = "",
) -> Figure | None:  # fmt: skip
    """Draw one line without errors, if it has two or more values."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return None
    steps = StepAxis(labels)
    low, high = float(known.min()), float(known.max())
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        canvas.linear("y", low - margin, high + margin, format_plain)
        canvas.series(0, steps.places, values)
        canvas.axis_titles("step", axis)

    title = f"K3 {message}" if message else describe_extremes(f"{subject.partition(', as')[0]}", values, steps.names)
    return Figure(
        name, title, subject, "As the run logged it." if "as logged" in subject else "Over all valid responses.",
        describe_lines(axis, steps.names, {key: values}), FigureData.of(["step", axis], steps.cells, values), paint,
        steps=steps.limits,
    )  # fmt: skip


CORRECTION_TRENDS = (
    CorrectionChart(
        "rejected_tokens", "Rejected tokens over the steps", "share of tokens",
        "A correction that starts to reject more sees a growing mismatch.",
    ),
    CorrectionChart(
        "ess_token", "Effective sample size after, over the steps", "share left, in effect",
        "What each correction leaves of the tokens.", lowest=True,
    ),
)  # fmt: skip


@dataclass
class RunFigures:
    """The figures of one run by section."""

    trends: list[Figure] = field(default_factory=list)
    distributions: list[Figure] = field(default_factory=list)
    breakdowns: list[Figure] = field(default_factory=list)
    drift: list[Figure] = field(default_factory=list)
    corrections: list[Figure] = field(default_factory=list)
    selection: list[Figure] = field(default_factory=list)

    def __iter__(self) -> Iterator[Figure]:
        return (figure for section in fields(self) for figure in getattr(self, section.name))


def run_figures(run: RunResult, prefix: str, *, brief: bool = False) -> RunFigures:
    """Draw the figures of a run. `brief` draws the main ones, for pages with many runs."""
    several = len(run.groups.labels) > 1
    charts = CHARTS[:1] if brief else CHARTS
    drift = () if brief else DRIFT_CHARTS
    dots = CORRECTION_PLOTS[:1] if brief else CORRECTION_PLOTS
    found = RunFigures()
    if several:
        messages = {"k3": f"K3 {get_summary(run).growth.text}"}
        found.trends = _drop_missing(
            trend_figure(c, run.groups, f"{prefix}-{c.key}", messages.get(c.key, "")) for c in charts
        )
        if not brief:
            found.trends += log_figures(run, prefix)
        if any(key.startswith("drift_") for key in run.groups.metrics):
            found.drift = _drop_missing(trend_figure(c, run.groups, f"{prefix}-{c.key}") for c in drift)
    parts = distribution_figure(run.distribution, f"{prefix}-distribution"), joint_figure(run.joint, f"{prefix}-joint")
    found.distributions = _drop_missing(iter(parts))
    chosen = {name: b for name, b in run.breakdowns.items() if not brief or name != "length"}
    found.breakdowns = _drop_missing(breakdown_figure(b, f"{prefix}-k3_by_{name}") for name, b in chosen.items())
    if not run.overall.corrections:
        return found
    found.corrections = _drop_missing(dots_figure(d, run.overall.corrections, f"{prefix}-{d.name}") for d in dots)
    if several and not brief:
        found.corrections += _drop_missing(
            correction_trend(chart, run.groups, f"{prefix}-over-{chart.key}") for chart in CORRECTION_TRENDS
        )
    if not brief:
        rejecting = {name: v for name, v in run.overall.corrections.items() if _rejects_tokens(v)}
        found.selection = _drop_missing(dots_figure(d, rejecting, f"{prefix}-{d.name}") for d in SELECTION_PLOTS)
    return found


def overview_figure(runs: dict[str, RunResult]) -> Figure | None:
    """Draw K3 of two to ten runs with several steps."""
    if not 2 <= len(runs) <= 10 or max(len(run.groups.labels) for run in runs.values()) < 2:
        return None
    return runs_figure({name: run.groups for name, run in runs.items()})


def _rejects_tokens(values: dict[str, Value]) -> bool:
    rejected = values.get("rejected_tokens")
    return rejected is not None and bool(rejected.value)


def _drop_missing(figures: Iterator[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]
