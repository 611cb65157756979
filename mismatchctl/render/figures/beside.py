"""Figures over the steps of what stands beside the mismatch: lengths, rewards, and what the run itself logged."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.render.figures.canvas import Canvas
from mismatchctl.render.figures.figure import Data, Figure
from mismatchctl.render.figures.scales import plain
from mismatchctl.render.figures.series import floats
from mismatchctl.render.figures.trends import Steps
from mismatchctl.render.figures.words import described, extremes
from mismatchctl.render.text import short
from mismatchctl.result import RunResult

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
