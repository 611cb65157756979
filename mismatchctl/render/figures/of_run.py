"""The figures of a Result, run by run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.breakdowns import breakdown_figure
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.distributions import distribution_figure, joint_figure
from mismatchctl.render.figures.dots import COMPARED, KEPT_AGAINST_REJECTED, dots_figure
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import plain
from mismatchctl.render.figures.series import floats
from mismatchctl.render.figures.trends import (
    CHARTS,
    DRIFT_CHARTS,
    Steps,
    Taken,
    correction_trend,
    runs_figure,
    trend_figure,
)
from mismatchctl.render.figures.words import described, extremes
from mismatchctl.render.text import short
from mismatchctl.result import RunResult, Value
from mismatchctl.result.story import story_of

MOST_LOGGED = 24
"""Figures of a run's own log; names that speak of what goes wrong come first."""
_TELLING = ("kl", "k3", "grad", "reward", "score", "entropy", "ppl", "loss", "length", "clip", "ess", "reject")


def beside_figures(run: RunResult, prefix: str) -> list[Figure]:
    """Length and reward of the responses, then the log's scalars with how K3 follows them."""
    labels = run.groups.labels
    found = [
        _figure(labels, "length", "Response length", "tokens per response", _lengths(run), f"{prefix}-length"),
        _figure(labels, "reward", "Reward", "mean reward", _rewards(run), f"{prefix}-reward"),
    ]
    for place, name in enumerate(_chosen(run)):
        lag, values = run.lags.get(name), floats(run.log[name])
        told = "" if lag is None or lag.steps is None else lag.text
        subject = f"{short(name, 60)}, as logged"
        found.append(_figure(labels, name, subject, short(name, 28), values, f"{prefix}-log-{place}", told))
    return [figure for figure in found if figure is not None]


def _chosen(run: RunResult) -> list[str]:
    """Names of the log with values, those with a lag and telling ones first."""

    def rank(name: str) -> tuple[bool, int, str]:
        lag = run.lags.get(name)
        word = next((place for place, part in enumerate(_TELLING) if part in name.lower()), len(_TELLING))
        return lag is None or lag.steps is None, word, name

    known = [name for name, values in run.log.items() if sum(value is not None for value in values) > 1]
    return sorted(known, key=rank)[:MOST_LOGGED]


def _lengths(run: RunResult) -> Float64s:
    tokens, sequences = (floats(run.groups.series(key).value) for key in ("tokens", "sequences"))
    with np.errstate(all="ignore"):
        lengths: Float64s = np.where(sequences > 0, tokens / sequences, np.nan)
    return lengths


def _rewards(run: RunResult) -> Float64s:
    """The mean over all sequences: what a correction keeps that rejects none."""
    for found in run.groups.corrections.values():
        rejected, kept = found.get("rejected_tokens"), found.get("kept_reward")
        if kept is not None and rejected is not None and not any(rejected.value):
            return floats(kept.value)
    return np.full(len(run.groups.labels), np.nan)


def _figure(
    labels: Sequence[str | int | float | bool | None], key: str, subject: str, axis: str, values: Float64s, name: str,
    message: str = "",
) -> Figure | None:  # fmt: skip
    """One line without errors; None where fewer than two values are known."""
    known = values[np.isfinite(values)]
    if len(known) < 2:
        return None
    steps = Steps(labels)
    low, high = float(known.min()), float(known.max())
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 0.5

    def paint(canvas: Canvas) -> None:
        steps.draw(canvas)
        canvas.linear("y", low - margin, high + margin, plain)
        canvas.series(0, steps.places, values)
        canvas.labels("step", axis)

    said = f"K3 {message}" if message else extremes(f"{subject.partition(', as')[0]}", values, steps.names)
    return Figure(
        name, said, subject, "As the run logged it." if "as logged" in subject else "Over all valid responses.",
        described(axis, steps.names, {key: values}), Data.of(["step", axis], steps.cells, values), paint,
        steps=steps.limits,
    )  # fmt: skip


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
