"""From closed sums to estimates: values, standard errors over clusters, intervals, and reasons where undefined."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure import DRIFT, MISMATCH, CellSums, PairSums, Plan
from mismatchctl.measure.close import closed_columns
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.histograms import quantile_intervals, quantiles
from mismatchctl.measure.metrics.metric import Estimate, Metric, Tails
from mismatchctl.measure.metrics.mismatch import BASE, NO_TOKEN, PAIR, QUANTILES, RATIO_Z

Estimates = dict[str, Estimate]
STEP = 1e-100  # of the complex-step derivative: exact where it vanishes beside every total, x^2 of 1e-15 included


@dataclass(frozen=True)
class Section:
    """Metrics that share a prefix of columns and of keys: the mismatch, the drift, or one correction."""

    metrics: tuple[Metric, ...]
    prefix: str = ""
    pair: str | None = None


def drift_key(key: str) -> str:
    """The key of a pair metric when it is measured on the second drift."""
    return "ois" if key == "ratio_mean" else "ois_z" if key == "ratio_mean_z" else f"{DRIFT}_{key}"


def drift_metrics() -> tuple[Metric, ...]:
    """The pair metrics under the names they have for the second drift."""
    return tuple(
        replace(
            metric,
            key=drift_key(metric.key),
            title=f"drift: {metric.title}",
            definition=f"as {metric.key}, with x = current minus train (current in place of train, train of rollout)",
            meaning=f"As {metric.key}, but of how far the policy has moved since the trainer's recomputation.",
            measure=metric.measure and replace(metric.measure, basis="current/train"),
        )
        for metric in (*PAIR, RATIO_Z)
    )


class Evaluator:
    """Evaluates every metric of a plan on closed cells."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.columns = {name: position for position, name in enumerate(closed_columns(plan))}
        self.maxima = {name: position for position, name in enumerate(plan.columns[1])}

    @cached_property
    def sections(self) -> dict[str, Section]:
        """What is evaluated: `metrics`, `drift`, and each correction by its number."""
        sections = {MISMATCH: Section((*BASE, *PAIR), pair=MISMATCH)}
        if self.plan.drift:
            sections[DRIFT] = Section(PAIR, f"{DRIFT}_", DRIFT)
        for index, correction in enumerate(self.plan.corrections):
            sections[str(index)] = Section(correction_metrics(correction, self.plan.drift), f"{index}/")
        return sections

    def evaluate(self, cell: CellSums) -> tuple[Estimates, list[Estimates]]:
        """Estimates of all metrics, and of each correction in order."""
        done = {name: self._section(section, cell) for name, section in self.sections.items()}
        metrics = _with_z(done[MISMATCH])
        if self.plan.drift:
            metrics |= {drift_key(key): estimate for key, estimate in _with_z(done[DRIFT]).items()}
        corrections = []
        for index, correction in enumerate(self.plan.corrections):
            estimates = done[str(index)]
            if correction.weight is None or correction.weight.normalize == "none":
                estimates["normalization_factor"] = Estimate(None, status="weights are not normalized")
            corrections.append(estimates)
        return metrics, corrections

    def _section(self, section: Section, cell: CellSums) -> Estimates:
        table = cell.table
        totals = table.sums.sum(axis=0) if len(table) else np.zeros(len(self.columns))
        largest = table.maxima.max(axis=0) if len(table) else np.full(len(self.maxima), -np.inf)
        maxima = {
            name.removeprefix(section.prefix): float(largest[position])
            for name, position in self.maxima.items()
            if name.startswith(section.prefix)
        }
        pair = cell.pairs.get(section.pair) if section.pair else None
        reader = _Reader(totals, self.columns, section.prefix)
        tails = Tails(maxima, pair)
        with np.errstate(all="ignore"):
            values = {metric.key: _value(metric, reader, tails) for metric in section.metrics}
            errors = self._errors(section.metrics, reader, table.sums)
            intervals = _intervals(section.metrics, pair, maxima, values)
        empty = totals[reader.position("tokens")] == 0
        return {
            metric.key: _estimate(metric, values[metric.key], errors.get(metric.key), intervals.get(metric.key), empty)
            for metric in section.metrics
        }

    def _errors(self, metrics: Iterable[Metric], reader: _Reader, rows: Float64s) -> dict[str, float]:
        """Standard errors by the delta method, from the scatter of clusters about the total."""
        smooth = [metric for metric in metrics if metric.formula is not None and metric.uncertain]
        clusters = int(np.count_nonzero(rows[:, reader.position("tokens")])) if len(rows) else 0
        if clusters < 2 or not smooth:
            return {}
        gradients = np.stack([_gradient(metric, reader) for metric in smooth], axis=1)
        squares = ((rows @ gradients) ** 2).sum(axis=0)
        errors = np.sqrt(squares * clusters / (clusters - 1))
        return {metric.key: float(error) for metric, error in zip(smooth, errors, strict=True)}


class _Reader:
    """Totals by name, the section's own column before a shared one of that name; notes what was asked for."""

    def __init__(self, totals: Float64s, index: Mapping[str, int], prefix: str) -> None:
        self.totals, self.index, self.prefix = totals, index, prefix
        self.asked: dict[int, int] = {}

    def position(self, name: str) -> int:
        own = self.index.get(self.prefix + name)
        return self.index[name] if own is None else own

    def __getitem__(self, name: str) -> np.float64:
        position = self.position(name)
        self.asked.setdefault(position, len(self.asked))
        return np.float64(self.totals[position])


class _Perturbed:
    """Totals as complex arrays: entry i has the i-th of the asked columns moved along the imaginary axis."""

    def __init__(self, reader: _Reader) -> None:
        self.reader, self.steps = reader, 1j * STEP * np.eye(len(reader.asked))

    def __getitem__(self, name: str) -> Any:
        position = self.reader.position(name)
        return self.reader.totals[position] + self.steps[self.reader.asked[position]]


def _gradient(metric: Metric, reader: _Reader) -> Float64s:
    """Derivative of a formula by each column, [K]."""
    assert metric.formula is not None
    reader.asked = {}
    metric.formula(reader)
    gradient = np.zeros(len(reader.totals))
    gradient[list(reader.asked)] = np.imag(metric.formula(_Perturbed(reader))) / STEP
    return gradient


def _value(metric: Metric, reader: _Reader, tails: Tails) -> float:
    if metric.formula is not None:
        return float(metric.formula(reader))
    if metric.extreme is not None:
        return float(metric.extreme(tails.maxima))
    if metric.tail is not None:
        return float(metric.tail(reader, tails))
    if metric.quantile is not None and tails.pair is not None:
        return float(quantiles(tails.pair, (metric.quantile,), _largest_difference(tails.maxima))[0])
    return math.nan


def _intervals(
    metrics: Iterable[Metric], pair: PairSums | None, maxima: Mapping[str, float], values: Mapping[str, float]
) -> dict[str, tuple[float, float]]:
    wanted = {metric.quantile: metric.key for metric in metrics if metric.quantile is not None}
    if pair is None or not wanted:
        return {}
    shares = tuple(QUANTILES.values())
    found = quantile_intervals(pair, shares, _largest_difference(maxima))
    return {
        wanted[share]: (float(low), float(high))
        for share, (low, high) in zip(shares, found, strict=True)
        if math.isfinite(low) and math.isfinite(values[wanted[share]])
    }


def _largest_difference(maxima: Mapping[str, float]) -> float:
    return max(maxima["log_ratio"], maxima["-log_ratio"])


def _estimate(
    metric: Metric, value: float, error: float | None, interval: tuple[float, float] | None, empty: bool
) -> Estimate:
    if math.isfinite(value):
        known = error is not None and math.isfinite(error)
        return Estimate(value, error if known else None, interval)
    return Estimate(None, status=why_undefined(metric, value, empty=empty))


def why_undefined(metric: Metric, value: float, *, empty: bool) -> str:
    """The status of a value that is not finite, of a cell that holds no token if it is `empty`."""
    if empty:
        return NO_TOKEN
    return "overflow: not a finite number" if math.isinf(value) else metric.undefined


def _with_z(estimates: Estimates) -> Estimates:
    """Add the z-score of E[ratio] = 1."""
    mean = estimates["ratio_mean"]
    z = Estimate(None, status=RATIO_Z.undefined)
    if mean.value is not None and mean.se:
        z = Estimate((mean.value - 1) / mean.se)
    return estimates | {RATIO_Z.key: z}
