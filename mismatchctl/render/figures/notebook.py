"""Figures of a run by name, as matplotlib has them: for notebooks."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from mismatchctl.errors import ConfigError, suggestion
from mismatchctl.result import RunResult


def figure_of(run: RunResult, name: str) -> Figure:
    """`distribution`, `steps`, or `k3_by_` a quantity that the run is broken down by.

    Raises:
        ConfigError: there is no such figure.
    """
    known = ["distribution", "steps", *(f"k3_by_{quantity}" for quantity in run.breakdowns)]
    if name not in known:
        raise ConfigError(f"there is no figure {name!r}{suggestion(name, known)}: there are {', '.join(known)}")
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    {"distribution": _distribution, "steps": _steps}.get(name, _breakdown)(axes, run, name)
    return figure


def _distribution(axes: Any, run: RunResult, name: str) -> None:
    found = run.distribution
    axes.stairs(found.tokens, found.edges)
    axes.set(xlabel="log ratio (train minus rollout)", ylabel="tokens", yscale="log")


def _steps(axes: Any, run: RunResult, name: str) -> None:
    series = run.groups.metrics["k3"]
    axes.errorbar(range(len(series.value)), _floats(series.value), yerr=_floats(series.se or []) or None)
    axes.set_xticks(range(len(series.value)), [str(label) for label in run.groups.labels])
    axes.set(xlabel="step", ylabel="K3")


def _breakdown(axes: Any, run: RunResult, name: str) -> None:
    found = run.breakdowns[name.removeprefix("k3_by_")]
    axes.errorbar(range(len(found.low)), _floats(found.k3), yerr=_floats(found.k3_se), marker="o")
    labels = [
        f"{low:g} to {high:g}" if high is not None else f"{low:g} +"
        for low, high in zip(found.low, found.high, strict=True)
    ]
    axes.set_xticks(range(len(labels)), labels, rotation=45, ha="right")
    axes.set(xlabel=found.quantity, ylabel="K3")


def _floats(values: Any) -> list[float]:
    return [float("nan") if value is None else float(value) for value in values]
