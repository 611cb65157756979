"""The figures of a Result, run by run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from mismatchctl.render.figures.beside import beside_figures
from mismatchctl.render.figures.breakdowns import breakdown_figure
from mismatchctl.render.figures.distributions import distribution_figure, joint_figure
from mismatchctl.render.figures.dots import COMPARED, KEPT_AGAINST_REJECTED, dots_figure
from mismatchctl.render.figures.figure import Figure
from mismatchctl.render.figures.trends import (
    CHARTS,
    DRIFT_CHARTS,
    Taken,
    correction_trend,
    runs_figure,
    trend_figure,
)
from mismatchctl.result import RunResult, Value
from mismatchctl.result.story import story_of

OVER_STEPS = (
    Taken(
        "rejected_tokens", "Rejected tokens over the steps", "share of tokens",
        "A correction that starts to reject more sees a growing mismatch.",
    ),
    Taken(
        "ess_token", "Effective sample size after, over the steps", "share left, in effect",
        "What each correction leaves of the tokens.", lowest=True,
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

    def __iter__(self) -> Iterator[Figure]:
        return (figure for section in fields(self) for figure in getattr(self, section.name))


def run_figures(run: RunResult, prefix: str, *, brief: bool = False) -> RunFigures:
    """The figures of a run; `brief` leaves only the main ones, for pages with many runs; `prefix` begins names."""
    several = len(run.groups.labels) > 1
    charts = CHARTS[:1] if brief else CHARTS
    drift = () if brief else DRIFT_CHARTS
    dots = COMPARED[:1] if brief else COMPARED
    found = RunFigures()
    if several:
        told = {"k3": f"K3 {story_of(run).growth.text}"}
        found.trends = _found(trend_figure(c, run.groups, f"{prefix}-{c.key}", told.get(c.key, "")) for c in charts)
        if not brief:
            found.trends += beside_figures(run, prefix)
        if any(key.startswith("drift_") for key in run.groups.metrics):
            found.drift = _found(trend_figure(c, run.groups, f"{prefix}-{c.key}") for c in drift)
    parts = distribution_figure(run.distribution, f"{prefix}-distribution"), joint_figure(run.joint, f"{prefix}-joint")
    found.distributions = _found(iter(parts))
    chosen = {name: b for name, b in run.breakdowns.items() if not brief or name != "length"}
    found.breakdowns = _found(breakdown_figure(b, f"{prefix}-k3_by_{name}") for name, b in chosen.items())
    if not run.overall.corrections:
        return found
    found.corrections = _found(dots_figure(d, run.overall.corrections, f"{prefix}-{d.name}") for d in dots)
    if several and not brief:
        found.corrections += _found(
            correction_trend(taken, run.groups, f"{prefix}-over-{taken.key}") for taken in OVER_STEPS
        )
    if not brief:
        rejecting = {name: v for name, v in run.overall.corrections.items() if _rejects(v)}
        found.selection = _found(dots_figure(d, rejecting, f"{prefix}-{d.name}") for d in KEPT_AGAINST_REJECTED)
    return found


def overview_figure(runs: dict[str, RunResult]) -> Figure | None:
    """K3 of all runs over their steps; None where there are too many to tell apart, or no steps."""
    if not 2 <= len(runs) <= 10 or max(len(run.groups.labels) for run in runs.values()) < 2:
        return None
    return runs_figure({name: run.groups for name, run in runs.items()}, "all-k3")


def _rejects(values: dict[str, Value]) -> bool:
    rejected = values.get("rejected_tokens")
    return rejected is not None and bool(rejected.value)


def _found(figures: Iterator[Figure | None]) -> list[Figure]:
    return [figure for figure in figures if figure is not None]
