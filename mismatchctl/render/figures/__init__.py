"""Figures of a Result as inline SVG."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from mismatchctl.render.figures.canvas import Figure, drawing
from mismatchctl.render.figures.comparisons import COMPARED, KEPT_AGAINST_REJECTED, dots_figure
from mismatchctl.render.figures.distributions import breakdown_figure, distribution_figure, joint_figure
from mismatchctl.render.figures.trends import CHARTS, DRIFT_CHARTS, correction_trend, runs_figure, trend_figure
from mismatchctl.result import RunResult, Value

OVER_STEPS = (
    (
        "rejected_tokens", "Rejected tokens over the steps", "share of tokens",
        "A correction that starts to reject more sees a growing mismatch.",
    ),
    (
        "ess_token", "Effective sample size after, over the steps", "share left, in effect",
        "What each correction leaves of the tokens.",
    ),
)  # fmt: skip


@dataclass
class RunFigures:
    """The figures of one run, by the section that they stand in."""

    trends: list[Figure] = field(default_factory=list)
    distributions: list[Figure] = field(default_factory=list)
    breakdowns: list[Figure] = field(default_factory=list)
    drift: list[Figure] = field(default_factory=list)
    corrections: list[Figure] = field(default_factory=list)
    selection: list[Figure] = field(default_factory=list)


def run_figures(run: RunResult, prefix: str, *, brief: bool = False) -> RunFigures:
    """Draw a run; `brief` leaves only the main figures, for pages with many runs. `prefix` is unique on the page."""
    several = len(run.groups.labels) > 1
    charts = CHARTS[:1] if brief else CHARTS
    drift = () if brief else DRIFT_CHARTS
    dots = COMPARED[:1] if brief else COMPARED
    found = RunFigures()
    with drawing():
        if several:
            found.trends = _drawn(trend_figure(c, run.groups, f"{prefix}-{c.key}") for c in charts)
            if any(key.startswith("drift_") for key in run.groups.metrics):
                found.drift = _drawn(trend_figure(c, run.groups, f"{prefix}-{c.key}") for c in drift)
        found.distributions = _drawn(iter((
            distribution_figure(run.distribution, f"{prefix}-x"), joint_figure(run.joint, f"{prefix}-xy"),
        )))  # fmt: skip
        chosen = [b for name, b in run.breakdowns.items() if not brief or name != "length"]
        found.breakdowns = _drawn(breakdown_figure(b, f"{prefix}-b{i}") for i, b in enumerate(chosen))
        if not run.overall.corrections:
            return found
        found.corrections = _drawn(dots_figure(d, run.overall.corrections, f"{prefix}-{d.name}") for d in dots)
        if several and not brief:
            found.corrections += _drawn(
                correction_trend(*words, run.groups, f"{prefix}-over-{words[0]}") for words in OVER_STEPS
            )
        if not brief:
            rejecting = {name: v for name, v in run.overall.corrections.items() if _rejects(v)}
            found.selection = _drawn(dots_figure(d, rejecting, f"{prefix}-{d.name}") for d in KEPT_AGAINST_REJECTED)
    return found


def overview_figure(runs: dict[str, RunResult]) -> Figure | None:
    """K3 of all runs over their steps; None where there are too many to tell apart, or no steps."""
    if not 2 <= len(runs) <= 10 or max(len(run.groups.labels) for run in runs.values()) < 2:
        return None
    with drawing():
        return runs_figure({name: run.groups for name, run in runs.items()}, "all-k3")


def _rejects(values: dict[str, Value]) -> bool:
    rejected = values.get("rejected_tokens")
    return rejected is not None and bool(rejected.value)


def _drawn(figures: Iterator[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]


__all__ = ["Figure", "RunFigures", "overview_figure", "run_figures"]
