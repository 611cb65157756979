"""Figures of a run and of several runs over their steps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.formatting import escape_terminal, format_label, shorten
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.report.figures.bars import SELECTION_PLOTS, corrections_figure, dots_figure
from mismatchctl.report.figures.distributions import breakdown_figure, distribution_figure, joint_figure
from mismatchctl.report.figures.figure import MUTED, Axis, Figure, Marks, ReferenceLine
from mismatchctl.report.figures.series import StepAxis, read_column, to_floats
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import Groups, RunResult
from mismatchctl.results.summary import get_summary

K3_AXIS = "K3 (nats/token)"


@dataclass(frozen=True)
class TrendChart:
    """A figure over the steps. Each line is (metric, label, metric with its limit)."""

    key: str
    subject: str
    axis: str
    lines: tuple[tuple[str, str, str], ...]
    log: bool = True
    percent: bool = False
    expected: float | None = None
    caption: str = ""


CHARTS = (
    TrendChart(
        "abs", "Log-prob difference", "|log-prob difference| (nats)",
        (("abs_diff_mean", "mean", ""), ("abs_diff_p99", "p99", ""), ("abs_diff_max", "largest", "")),
        caption="If only the largest rises, a few tokens are wrong. If the mean rises, all of them drift.",
    ),
    TrendChart(
        "ratio", "Mean ratio", "mean ratio", (("ratio_mean", "mean ratio", ""),), log=False, expected=1.0,
        caption="Stays at 1 if the recorded log-probs are those of the sampling distribution.",
    ),
    TrendChart(
        "chi2", "Chi-square", "chi-square", (("chi2_token", "tokens", ""), ("chi2_sequence", "sequences", "")),
        caption="The variance that importance sampling adds, per token and per whole sequence.",
    ),
    TrendChart(
        "ess", "Effective sample size without correction", "effective sample size",
        (("ess_token", "tokens", ""), ("ess_sequence", "sequences", "")), log=False, percent=True,
        caption="The data that remains if raw ratios weight it. Sequences collapse first.",
    ),
    TrendChart(
        "ppl", "Perplexity", "perplexity", (("train_ppl", "trainer", ""), ("rollout_ppl", "rollout", "")),
        caption="If the lines separate, one side has another distribution.",
    ),
    TrendChart(
        "entropy", "Entropy", "entropy (nats)", (("entropy_mean", "entropy", ""),), log=False,
        caption="Entropy of the trainer's distribution, as recorded.",
    ),
    TrendChart(
        "khat", "Pareto k-hat", "k-hat",
        (("khat_token", "tokens", "khat_token_limit"), ("khat_sequence", "sequences", "khat_sequence_limit")),
        log=False,
        caption="Above its limit (dotted), a mean of ratios is not reliable at this sample size.",
    ),
    TrendChart(
        "reward", "Reward", "mean reward", (("reward_mean", "reward", ""),), log=False,
        caption="Mean reward of the responses.",
    ),
)  # fmt: skip
"""Figures of the mismatch over the steps, after K3."""

DRIFT_CHARTS = (
    TrendChart(
        "drift-k3", "K3 of both drifts", K3_AXIS,
        (("k3", "rollout to train", ""), ("drift_k3", "train to current", "")),
        caption="The distance of the update after the trainer's recomputation, compared with the mismatch.",
    ),
    TrendChart(
        "drift-ois", "Mean ratio of the current policy to the trainer's", "mean ratio", (("ois", "mean ratio", ""),),
        log=False, expected=1.0, caption="1 before the first update. PPO's clipping acts on this ratio.",
    ),
)  # fmt: skip
"""Figures of the drift from the trainer's recomputation to the current policy."""

CORRECTION_TRENDS = (
    TrendChart("rejected_tokens", "Rejected tokens", "share of tokens", (), log=False, percent=True,
               caption="A correction that rejects more and more sees a growing mismatch."),
    TrendChart("ess_token", "Effective sample size with correction", "effective sample size", (), log=False,
               percent=True, caption="The data that remains after weights and rejection."),
    TrendChart("weight_mean", "Mean weight", "mean weight", (), log=False, expected=1.0,
               caption="1 is unbiased. Below 1, bounds cut more than they add."),
    TrendChart("loss_scale", "Loss scale", "loss scale", (), log=False, expected=1.0,
               caption="The factor by which weights and rejection scale the loss."),
    TrendChart("k3_kept", "K3 of the kept tokens", K3_AXIS, (), caption="The mismatch that remains in training."),
)  # fmt: skip
"""Figures of one metric of every correction over the steps."""


_BRIEF_CHARTS = ("abs", "ratio", "ess", "reward", "rejected_tokens", "k3_kept", "loss_scale")
"""Figures of each run on a page with many."""
MAX_CORRECTIONS = 12
"""Maximum corrections in one figure."""


def k3_figure(
    runs: Mapping[str, RunResult], name: str, attention: Sequence[bool] = (), *, bands: bool = True
) -> Figure | None:
    """Draw K3 over the steps with its onset, its interval and the usual ranges.

    Args:
        runs: the runs. Steps of several runs must be numbers.
        name: name of the figure.
        attention: per run, True to draw it in a color. By default, all of them.
        bands: True to draw the interval of K3 for up to three runs.
    """
    axes = {run: StepAxis(found.groups.labels) for run, found in runs.items() if found.groups.labels}
    columns = {run: read_column(runs[run].groups.metrics, "k3", len(axis.places)) for run, axis in axes.items()}
    columns = {run: column for run, column in columns.items() if (column.values > 0).any()}
    several = len(runs) > 1
    if not columns or (several and not all(axes[run].numeric for run in columns)):
        return None
    if max(len(axes[run].places) for run in columns) < 2:
        return None
    marks: list[Marks] = []
    rules: list[ReferenceLine] = []
    color = 0
    for place, (run, found) in enumerate(runs.items()):
        if run not in columns:
            continue
        colored = not attention or attention[place]
        shade = color if colored else MUTED
        color += colored
        column = columns[run].positive()
        label = shorten(run, 24) if several else "K3"
        marks.append(
            column.marks(label, axes[run], shade, band=bands and len(runs) <= 3, run=place if several else None)
        )
        growth = get_summary(found).growth
        if colored:
            rules += _onset_rules(growth, axes[run], shade, place if several else None)
    rules += [
        ReferenceLine("y", None, "usual, dense models", DENSE_RANGE, "usual", 0),
        ReferenceLine("y", None, "usual, MoE", MOE_RANGE, "usual", 1),
    ]  # fmt: skip
    wide = max((axes[run] for run in columns), key=lambda axis: axis.places[-1])
    low = min(axes[run].places[0] for run in columns)
    axis = wide.axis if not several else Axis("step", limits=(float(low), float(wide.places[-1])))
    caption = "Shaded: usual values of dense models and of mixtures of experts. "
    if any(rule.axis == "x" for rule in rules):
        caption += "Dashed lines or diamonds: the onset of growth with its 95% interval."
    title = "K3 by step" if several else f"K3 {get_summary(next(iter(runs.values()))).growth.brief}"
    return Figure(
        name, title, "K3 over the steps (nats/token)", caption, axis, Axis(K3_AXIS, "log"),
        tuple(marks), tuple(rules), "wide",
    )  # fmt: skip


def _onset_rules(growth: Growth, steps: StepAxis, color: int, run: int | None) -> Iterator[ReferenceLine]:
    """Yield the onset of a growth, drawn with its interval."""
    at = None if growth.onset is None or not growth.changed else steps.place(growth.onset)
    if at is None:
        return
    ends = [steps.place(end) for end in growth.onset_interval or ()]
    known = [end for end in ends if end is not None]
    interval = (known[0], known[1]) if len(known) == 2 else None
    yield ReferenceLine("x", at, f"onset {format_label(growth.onset)}", interval, "mark", color, run)


def trend_figure(chart: TrendChart, groups: Groups, name: str, *, bands: bool = True) -> Figure | None:
    """Draw metrics over the steps, if there are values."""
    steps = StepAxis(groups.labels)
    count = len(groups.labels)
    columns = {
        key: read_column(groups.metrics, key, count) for line in chart.lines for key in (line[0], line[2]) if key
    }
    marks: list[Marks] = []
    above: list[str] = []
    for color, (key, label, limit) in enumerate(chart.lines):
        column = columns[key].positive() if chart.log else columns[key]
        if not column.known:
            continue
        marks.append(column.marks(label, steps, color, band=bands))
        if limit and columns[limit].known:
            bound = columns[limit].values
            marks.append(Marks("line", f"limit, {label}", steps.places, bound.tolist(), color=color, dashed=True))
            exceeded = int((column.values > bound).sum())
            above += [f"{exceeded} of {count} steps by {label}"] if exceeded else []
    title = f"{chart.subject} is above its limit in {' and '.join(above)}" if above else chart.subject
    return _build_trend(chart, steps, marks, name, title)


def correction_trend(chart: TrendChart, groups: Groups, name: str) -> Figure | None:
    """Draw one metric of every correction over the steps, if there are values."""
    steps, marks = StepAxis(groups.labels), []
    for color, (correction, found) in enumerate(list(groups.corrections.items())[:MAX_CORRECTIONS]):
        column = read_column(found, chart.key, len(groups.labels))
        column = column.positive() if chart.log else column
        if column.known:
            marks.append(column.marks(shorten(correction, 28), steps, color, band=False))
    more = len(groups.corrections) - MAX_CORRECTIONS
    title = f"{chart.subject} (first {MAX_CORRECTIONS} corrections)" if more > 0 else chart.subject
    return _build_trend(chart, steps, marks, name, title)


def _build_trend(chart: TrendChart, steps: StepAxis, marks: list[Marks], name: str, title: str) -> Figure | None:
    if not marks:
        return None
    rules = () if chart.expected is None else (ReferenceLine("y", chart.expected, "", None, "limit"),)
    y = Axis(chart.axis, "log" if chart.log else "linear", percent=chart.percent)
    return Figure(name, title, f"{chart.subject} over the steps", chart.caption, steps.axis, y, tuple(marks), rules)


MAX_LOGGED = 24
"""Maximum figures of a run's own log."""
_IMPORTANT_NAMES = ("kl", "k3", "grad", "reward", "score", "entropy", "ppl", "loss", "length", "clip", "ess", "reject")


def log_figures(run: RunResult, prefix: str) -> Iterator[Figure]:
    """Yield the response length, and the scalars of the run's log."""
    steps = StepAxis(run.groups.labels)
    tokens, sequences = (to_floats(run.groups.series(key).value) for key in ("tokens", "sequences"))
    with np.errstate(all="ignore"):
        lengths = np.where(sequences > 0, tokens / sequences, np.nan)
    series: list[tuple[str, str, str, Float64s]] = [("length", "Response length", "tokens per response", lengths)]
    for place, key in enumerate(_select_log_names(run)):
        lag = run.lags.get(key)
        title = f"{shorten(key, 60)}, as logged"
        title += f": K3 {lag.text}" if lag is not None and lag.steps is not None else ""
        series.append((f"log-{place}", title, shorten(key, 28), to_floats(run.log[key])))
    for key, title, label, values in series:
        if np.isfinite(values).sum() > 1:
            marks = (Marks("line", label, steps.places, values.tolist()),)
            yield Figure(f"{prefix}-{key}", escape_terminal(title), title, "", steps.axis, Axis(label), marks)


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


@dataclass
class RunFigures:
    """The figures of one run by section."""

    trends: list[Figure] = field(default_factory=list)
    distributions: list[Figure] = field(default_factory=list)
    drift: list[Figure] = field(default_factory=list)
    corrections: list[Figure] = field(default_factory=list)
    selection: list[Figure] = field(default_factory=list)

    def __iter__(self) -> Iterator[Figure]:
        return (figure for section in fields(self) for figure in getattr(self, section.name))


def run_figures(run: RunResult, prefix: str, *, brief: bool = False) -> RunFigures:
    """Describe the figures of a run. `brief` leaves out some, for pages with many runs."""
    groups, found = run.groups, RunFigures()
    if len(groups.labels) > 1:
        charts = [chart for chart in CHARTS if not brief or chart.key in _BRIEF_CHARTS]
        found.trends = drop_missing([
            k3_figure({"": run}, f"{prefix}-k3", bands=not brief),
            *(trend_figure(chart, groups, f"{prefix}-{chart.key}", bands=not brief) for chart in charts),
            *(() if brief else log_figures(run, prefix)),
        ])  # fmt: skip
        if not brief and any(key.startswith("drift_") for key in groups.metrics):
            found.drift = drop_missing(trend_figure(c, groups, f"{prefix}-{c.key}") for c in DRIFT_CHARTS)
    shown = run.breakdowns.items()
    found.distributions = drop_missing([
        distribution_figure(run.distribution, f"{prefix}-distribution"),
        None if brief else joint_figure(run.joint, f"{prefix}-joint"),
        *(breakdown_figure(breakdown, f"{prefix}-k3_by_{name}") for name, breakdown in shown),
    ])  # fmt: skip
    corrections = run.overall.corrections
    if not corrections:
        return found
    rejecting = {
        name: values
        for name, values in corrections.items()
        if (rejected := values.get("rejected_tokens")) and rejected.value
    }
    found.corrections = drop_missing([corrections_figure({"": corrections}, f"{prefix}-corrections")])
    if len(groups.labels) > 1:
        found.corrections += drop_missing(
            correction_trend(chart, groups, f"{prefix}-over-{chart.key}")
            for chart in CORRECTION_TRENDS
            if not brief or chart.key in _BRIEF_CHARTS
        )
    if not brief:
        found.selection = drop_missing(
            dots_figure(plot, rejecting, f"{prefix}-{plot.name}") for plot in SELECTION_PLOTS
        )
    return found


def drop_missing(figures: Sequence[Figure | None] | Iterator[Figure | None]) -> list[Figure]:
    """Return the figures that have something to draw."""
    return [figure for figure in figures if figure is not None]


def overview_figure(runs: Mapping[str, RunResult]) -> Figure | None:
    """Draw K3 of several runs together, if their steps are numbers."""
    return k3_figure(runs, "all-k3") if len(runs) > 1 else None
