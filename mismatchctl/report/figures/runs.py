"""Figures over the steps of a run, or of several runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mismatchctl.core.formatting import format_label, shorten
from mismatchctl.core.ratios import DENSE_RANGE, MOE_RANGE
from mismatchctl.report.figures import figure as fig
from mismatchctl.report.figures.distributions import breakdowns_figure, distribution_figure, joint_figure
from mismatchctl.report.figures.figure import Axis, Figure, Marks, ReferenceLine
from mismatchctl.results.growth import Growth
from mismatchctl.results.model import NOT_RECORDED, Groups, RunResult, Series, Value
from mismatchctl.results.summary import get_summary

K3_AXIS = "K3 (nats/token)"
MAX_CORRECTIONS, MAX_PRESET_RUNS = 12, 3  # maximum corrections in a figure, and maximum runs with presets


@dataclass(frozen=True)
class TrendChart:
    """Description of a figure with lines over the steps, or over the values of a threshold."""

    key: str
    subject: str
    y: Axis
    caption: str
    lines: tuple[tuple[str, str], ...] = ()  # (metric, label) per line. If empty: a line per correction
    rules: tuple[ReferenceLine, ...] = ()


def tokens_and_sequences(metric: str) -> tuple[tuple[str, str], ...]:
    return ((f"{metric}_token", "tokens"), (f"{metric}_sequence", "sequences"))


UNBIASED = (ReferenceLine("y", 1.0, "", None, "limit"),)
CHARTS = (
    TrendChart("abs", "Log-prob difference", Axis("|log-prob difference| (nats)", "log"),
               "If only the largest difference rises, a few tokens are affected. If the mean rises, most tokens are.",
               (("abs_diff_mean", "mean"), ("abs_diff_p99", "p99"), ("abs_diff_max", "largest"))),
    TrendChart("ratio", "Mean ratio", Axis("mean ratio"),
               "The mean ratio stays at 1 if the engine sampled the tokens with the recorded probabilities.",
               (("ratio_mean", "mean ratio"),), UNBIASED),
    TrendChart("chi2", "Chi-square", Axis("chi-square", "log"),
               "Importance weights add variance to the gradient. Chi-square is the variance of these weights.",
               tokens_and_sequences("chi2")),
    TrendChart("ess", "Effective sample size without correction", Axis("effective sample size", percent=True),
               "With untruncated importance weights, the data contains the same information as this share of "
               "unweighted data. Weights per sequence cost more than weights per token.",
               tokens_and_sequences("ess")),
    TrendChart("ppl", "Perplexity", Axis("perplexity", "log"),
               "If the two lines move apart, the two sides have different distributions.",
               (("train_ppl", "trainer"), ("rollout_ppl", "rollout"))),
    TrendChart("entropy", "Entropy", Axis("entropy (nats)"),
               "Entropy of the trainer's distribution, as recorded in the dump.", (("entropy_mean", "entropy"),)),
    TrendChart("khat", "Pareto k-hat", Axis("k-hat"),
               "If k-hat is above its limit, the mean of the ratios is not reliable at this sample size.",
               tokens_and_sequences("khat")),
    TrendChart("reward", "Reward", Axis("mean reward"), "Mean reward of the responses.",
               (("reward_mean", "reward"),)),
)  # fmt: skip
DRIFT_CHARTS = (
    TrendChart("drift-k3", "K3 of the mismatch and of the policy drift", Axis(K3_AXIS, "log"),
               "K3 of the mismatch compares rollout and trainer. K3 of the drift compares the trainer before and after "
               "the update.",
               (("k3", "rollout to train"), ("drift_k3", "train to current"))),
    TrendChart("drift-ois", "Mean PPO ratio (current policy / trainer)", Axis("mean ratio"),
               "The mean ratio is 1 before the first update. PPO's clipping acts on this ratio.",
               (("ois", "mean ratio"),), UNBIASED),
)  # fmt: skip
CORRECTION_TRENDS = (
    TrendChart("rejected_tokens", "Rejected tokens", Axis("share of tokens", percent=True),
               "If the rejected share rises over the steps, the mismatch grows."),
    TrendChart("ess_token", "Effective sample size with correction", Axis("effective sample size", percent=True),
               "The corrected data contains the same information as this share of uncorrected data."),
    TrendChart("weight_mean", "Mean weight", Axis("mean weight"),
               "A mean weight of 1 is unbiased. Truncation of large weights lowers the mean.", rules=UNBIASED),
    TrendChart("loss_scale", "Loss scale", Axis("loss scale"),
               "The factor by which weights and rejection scale the loss.", rules=UNBIASED),
    TrendChart("k3_kept", "K3 of the kept tokens", Axis(K3_AXIS, "log"),
               "The mismatch of the tokens that the correction keeps."),
)  # fmt: skip
SELECTION_AXES = {"reward": "mean reward", "advantage": "mean advantage", "length": "mean length (tokens)"}
_BRIEF_CHARTS = ("abs", "ratio", "ess", "reward", "rejected_tokens", "k3_kept", "loss_scale")


def k3_figure(
    runs: Mapping[str, RunResult], name: str, attention: Sequence[bool] = (), *, bands: bool = True
) -> Figure | None:
    """Draw K3 over the steps, and mark the start of its growth. Runs with False in `attention` are gray."""
    several = len(runs) > 1
    marks: list[Marks] = []
    rules: list[ReferenceLine] = []
    shown: list[fig.StepAxis] = []
    for place, (run, found) in enumerate(runs.items()):
        steps = fig.StepAxis(found.groups.labels)
        color = len({mark.color for mark in marks} - {fig.MUTED}) if not attention or attention[place] else fig.MUTED
        label, index = (shorten(run, 24), place) if several else ("K3", None)
        banded = bands and len(runs) <= 3
        line = fig.line_marks(found.groups.metrics, "k3", label, steps, color, log=True, band=banded, run=index)
        if line:
            marks.append(line)
            shown.append(steps)
            rules += _onset_rules(get_summary(found).growth, steps, color, index) if color != fig.MUTED else ()
    if max((len(steps.places) for steps in shown), default=0) < 2:
        return None
    if several and not all(steps.numeric for steps in shown):
        return None
    caption = "The shaded bands show the usual K3 of dense models and of mixtures of experts. "
    if rules:
        caption += "A dashed line or a diamond marks the start of the growth, with its 95% interval."
    rules += [
        ReferenceLine("y", None, "usual, dense models", DENSE_RANGE, "usual", 0),
        ReferenceLine("y", None, "usual, MoE", MOE_RANGE, "usual", 1),
    ]  # fmt: skip
    limits = float(min(steps.places[0] for steps in shown)), float(max(steps.places[-1] for steps in shown))
    axis = Axis("step", limits=limits) if several else shown[0].axis
    title = "K3 by step" if several else f"K3 {get_summary(next(iter(runs.values()))).growth.brief}"
    return Figure(name, title, caption, axis, Axis(K3_AXIS, "log"), tuple(marks), tuple(rules), "wide")


def _onset_rules(growth: Growth, steps: fig.StepAxis, color: int, run: int | None) -> Iterator[ReferenceLine]:
    onset = format_label(growth.onset)
    if growth.changed and onset in steps.place_of:
        low, high = (steps.place_of.get(format_label(end)) for end in growth.onset_interval or (onset, onset))
        interval = None if low is None or high is None else (low, high)
        yield ReferenceLine("x", steps.place_of[onset], f"onset {onset}", interval, "mark", color, run)


def trend_figure(chart: TrendChart, groups: Groups, name: str, *, bands: bool = True) -> Figure | None:
    steps, log = fig.StepAxis(groups.labels), chart.y.scale == "log"
    lines: list[tuple[str, Mapping[str, Series], str]] = [(key, groups.metrics, label) for key, label in chart.lines]
    if not lines:
        every = list(groups.corrections.items())[:MAX_CORRECTIONS]
        lines = [(chart.key, found, shorten(correction, 28)) for correction, found in every]
    marks: list[Marks] = []
    above: list[str] = []
    for color, (key, series, label) in enumerate(lines):
        line = fig.line_marks(series, key, label, steps, color, log=log, band=bands and bool(chart.lines))
        limit = fig.line_marks(series, f"{key}_limit", f"limit, {label}", steps, color, band=False)
        marks += [line] if line else []
        if line and limit:
            marks.append(replace(limit, dashed=True))
            exceeded = int((fig.to_floats(line.y) > fig.to_floats(limit.y)).sum())
            above += [f"{exceeded} of {len(steps.places)} steps ({label})"] if exceeded else []
    title = f"{chart.subject} is above its limit in {' and '.join(above)}" if above else chart.subject
    if not chart.lines and len(groups.corrections) > MAX_CORRECTIONS:
        title += f" (first {MAX_CORRECTIONS} corrections)"
    return Figure(name, title, chart.caption, steps.axis, chart.y, tuple(marks), chart.rules) if marks else None


REJECTED_AXIS = Axis(
    "tokens rejected", "symlog", (0.0, 1.0), percent=True, linear_to=0.005,
    ticks=tuple((share, f"{100 * share:g}%") for share in (0.0, 1.0, 0.1, 0.01, 0.5, 0.2, 0.05, 0.02, 0.005)),
)  # fmt: skip
_Point = tuple[float, float, str]


def corrections_figure(runs: Mapping[str, RunResult], name: str, front: Sequence[_Point] = ()) -> Figure | None:
    """Draw the remaining K3 of each correction against its rejected share. `None`: no correction rejects tokens."""
    alone, crowded = len(runs) == 1, False
    marks = [_point_marks("line", "Pareto front of the sweep", sorted(front), fig.MUTED)] if front else []
    for place, (run, result) in enumerate(runs.items()):
        places: dict[tuple[Any, ...], list[str]] = {}
        for key, values in result.overall.corrections.items():
            share, k3 = (values.get(metric, NOT_RECORDED) for metric in ("rejected_tokens", "k3_kept"))
            if share.value is not None and (k3.value or 0) > 0:
                point = (share.value, *fig.interval_of(k3.value, k3.se, k3.interval, log=True))
                places.setdefault(point, []).append(shorten(key, fig.MAX_NAME))
        found = [(_join_names(names), *point) for point, names in places.items()]
        label, index, of = ("corrections", None, "") if alone else (shorten(run, 24), place, f", {shorten(run, 24)}")
        if len(runs) <= MAX_PRESET_RUNS and (own := _preset_points(result)):
            crowded = True
            best = _pareto_front([*own, *((x, y, text) for text, x, y, *_ in found if x is not None and y is not None)])
            color = fig.MUTED if alone else place
            marks.append(replace(_point_marks("line", f"Pareto front{of}", best, color), dashed=True, run=index))
            others = [point for point in own if point not in best or not alone]
            marks.append(replace(_point_marks("dots", f"presets{of}", others, color), hollow=True, run=index))
            if alone:
                marks.append(_point_marks("dots", "", [point for point in own if point in best], color))
        if found:
            labels, x, y, low, high = (list(column) for column in zip(*found, strict=True))
            marks.append(Marks("dots", label, x, y, low, high, labels=labels, color=place, run=index))
    if len(rejected := [x for mark in marks for x in mark.x]) < 2 or not any(rejected):
        return None
    caption = "Corrections on the left reject fewer tokens. Corrections further down leave less mismatch."
    if crowded:
        caption += " The small points are the presets. No correction both rejects less and leaves less K3 than a "
        caption += "correction on the Pareto front."
    y_axis = Axis("K3 of the kept tokens (nats/token)", "log")
    return Figure(
        name, "Rejected data and remaining mismatch", caption, REJECTED_AXIS, y_axis, tuple(marks), (), "wide"
    )


def _point_marks(kind: fig.MarkKind, name: str, points: Sequence[_Point], color: int) -> Marks:
    x, y, labels = (list(column) for column in zip(*points, strict=True)) if points else ([], [], [])
    return Marks(kind, name, x, y, color=color, labels=labels)


def _preset_points(run: RunResult) -> list[_Point]:
    """Return a labeled point for each preset. Presets with equal values share one point and one label."""
    names: dict[tuple[float, float], list[str]] = {}
    for name, point in run.presets.items():
        if point.k3_kept:
            names.setdefault((point.rejected_tokens, point.k3_kept), []).append(name)
    return [(*point, _join_names(own)) for point, own in names.items()]


def _join_names(names: Sequence[str]) -> str:
    return f"{', '.join(names[:2])}{f' and {len(names) - 2} more' if len(names) > 2 else ''}"


def _pareto_front(points: Iterable[_Point]) -> list[_Point]:
    front: list[_Point] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def selection_figure(
    corrections: Mapping[str, Mapping[str, Value]], metric: str, axis: str, name: str
) -> Figure | None:
    chosen = {row: values for row, values in corrections.items() if values.get("rejected_tokens", NOT_RECORDED).value}
    series: dict[str, dict[str, fig.Interval]] = {"kept": {}, "rejected": {}}
    for row, values in chosen.items():
        for side, rows in series.items():
            mean = values.get(f"{side}_{metric}", NOT_RECORDED)
            rows[row] = fig.interval_of(mean.value, mean.se, mean.interval)
    if not any(all(series[side][row][0] is not None for side in series) for row in chosen):
        return None
    caption = f"If kept and rejected responses differ in {metric}, rejection changes the mean {metric} in training."
    return fig.rows_figure(name, f"Mean {metric}, kept and rejected", caption, Axis(axis), series)


def run_figures(run: RunResult, prefix: str = "", *, brief: bool = False) -> dict[str, list[Figure]]:
    """Return the figures of each section. Names of figures start with `prefix`. `brief` leaves out minor figures."""
    groups, corrections, several = run.groups, run.overall.corrections, len(run.groups.labels) > 1

    def trends(charts: Iterable[TrendChart], stem: str) -> Iterator[Figure | None]:
        for chart in charts if several else ():
            if not brief or chart.key in _BRIEF_CHARTS:
                yield trend_figure(chart, groups, f"{stem}{chart.key}", bands=not brief)

    drift = any(key.startswith("drift_") for key in groups.metrics)
    found: dict[str, Iterable[Figure | None]] = {
        "k3": [k3_figure({"": run}, f"{prefix}k3", bands=not brief)],
        "trends": trends(CHARTS, prefix),
        "distributions": [
            distribution_figure(run.distribution, f"{prefix}distribution"),
            None if brief else joint_figure(run.joint, f"{prefix}joint"),
            *(breakdowns_figure({"K3": each}, f"{prefix}k3_by_{name}") for name, each in run.breakdowns.items()),
        ],
        "drift": trends(DRIFT_CHARTS, prefix) if drift else (),
        "tradeoff": [corrections_figure({"": run}, f"{prefix}corrections")],
        "corrections": trends(CORRECTION_TRENDS, f"{prefix}over-") if corrections else (),
        "selection": [
            selection_figure(corrections, metric, axis, f"{prefix}kept-{metric}")
            for metric, axis in SELECTION_AXES.items()
            if not brief
        ],
    }
    return {section: [figure for figure in each if figure is not None] for section, each in found.items()}
