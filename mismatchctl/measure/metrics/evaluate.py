"""From closed sums to estimates: values, standard errors over clusters, intervals, and reasons where undefined."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure import MISMATCH, PAIRS, MeasurePlan, Pair
from mismatchctl.measure.close import ClosedSums, closed_axis
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS
from mismatchctl.measure.metrics.histograms import NO_QUANTILE, Quantile, quantiles_of
from mismatchctl.measure.metrics.intervals import intervals
from mismatchctl.measure.metrics.metric import Estimate, Metric, Tails, status_of
from mismatchctl.measure.metrics.mismatch import BASE, PAIR, RATIO_Z
from mismatchctl.measure.metrics.split import SPLITS
from mismatchctl.measure.table import Of, TableAxis

Estimates = dict[str, Estimate]
STEP = 1e-100  # of the complex-step derivative: exact where it vanishes beside every total, x^2 of 1e-15 included


@dataclass(frozen=True)
class Kept:
    """What is wanted of some cells: all, but for metrics of facets and other pairs that are left out, or go unsure.

    Attributes:
        without: metrics that are left out.
        unsure: metrics that go without errors and intervals.
        sure: metrics of corrections that have errors; None: all.
    """

    without: frozenset[str] = frozenset()
    unsure: frozenset[str] = frozenset()
    sure: frozenset[str] | None = None


EVERYTHING = Kept()


@dataclass(frozen=True)
class MetricSection:
    """Metrics of one pair of policies, or of one correction by its number; some without errors and intervals."""

    metrics: tuple[Metric, ...]
    of: Of
    unsure: frozenset[str]


def pair_metrics(pair: Pair) -> tuple[Metric, ...]:
    """The metrics of a pair of policies under the names that they have for it, and how it splits into its parts."""
    own = tuple(
        replace(
            metric,
            key=pair.key(metric.key),
            title=f"{pair.title}: {metric.title}",
            definition=f"as {metric.key}, with x = {pair.policy} minus {pair.reference} "
            f"({pair.policy} in place of train, {pair.reference} of rollout)",
            meaning=f"As {metric.key}, but of {pair.meaning}.",
            measure=metric.measure and replace(metric.measure, basis=pair.source),
        )
        for metric in (*PAIR, RATIO_Z)
    )
    return own + SPLITS.get(pair.name, ())


def other_metrics() -> tuple[Metric, ...]:
    """The metrics of what only some dumps hold: those of the other pairs, and of facets."""
    return sum((*map(pair_metrics, PAIRS[1:]), *FACET_METRICS.values()), ())


@dataclass(frozen=True)
class EstimateRow:
    """Estimates of all metrics in some cells, and of each correction in order."""

    metrics: Estimates
    corrections: list[Estimates]

    @classmethod
    def joined(cls, parts: Sequence[EstimateRow]) -> EstimateRow:
        """The cells of all parts, one after the other."""
        return cls(
            _joined([part.metrics for part in parts]),
            [_joined(own) for own in zip(*(part.corrections for part in parts), strict=True)],
        )


def _joined(parts: Sequence[Estimates]) -> Estimates:
    return {key: Estimate.joined([part[key] for part in parts]) for key in parts[0]}


class Evaluator:
    """Evaluates every metric of a plan on closed cells: each formula once for all of them."""

    def __init__(self, plan: MeasurePlan) -> None:
        self.plan = plan
        self.columns = closed_axis(plan)

    def sections(self, kept: Kept) -> Iterator[MetricSection]:
        """What is evaluated."""
        facets = (metric for facet in self.plan.facets for metric in FACET_METRICS[facet.name])
        own = (*BASE, *PAIR, *(metric for metric in facets if metric.key not in kept.without))
        yield MetricSection(own, MISMATCH, kept.unsure)
        for pair in self.plan.pairs[1:]:
            own = (*(metric for metric in PAIR if pair.key(metric.key) not in kept.without), *SPLITS.get(pair.name, ()))
            unsure = (metric.key for metric in own if kept.unsure & {metric.key, pair.key(metric.key)})
            yield MetricSection(own, pair.name, frozenset(unsure))
        for index, correction in enumerate(self.plan.corrections):
            own = tuple(correction_metrics(correction, self.plan.losses))
            unsure = (metric.key for metric in own if kept.sure is not None and metric.key not in kept.sure)
            yield MetricSection(own, index, frozenset(unsure))

    def evaluate(self, cells: ClosedSums, kept: Kept = EVERYTHING) -> EstimateRow:
        """Estimates of all metrics that are kept, and of each correction in order."""
        totals = np.add.reduceat(cells.sums, cells.starts, axis=0)
        largest = np.maximum.reduceat(cells.maxima, cells.starts, axis=0)
        done = {section.of: self._section(section, cells, totals, largest) for section in self.sections(kept)}
        metrics = _with_z(done[MISMATCH])
        for pair in self.plan.pairs[1:]:
            shares = {metric.key for metric in SPLITS.get(pair.name, ())}
            found = _with_z(done[pair.name])
            metrics |= {key if key in shares else pair.key(key): estimate for key, estimate in found.items()}
        corrections = []
        for index, correction in enumerate(self.plan.corrections):
            estimates = done[index]
            if correction.weight is None or correction.weight.normalize == "none":
                known = estimates["normalization_factor"]
                undefined = np.full(len(cells), np.nan)
                estimates["normalization_factor"] = Estimate(undefined, known.undefined, np.zeros(len(cells), np.bool_))
            corrections.append(estimates)
        return EstimateRow(metrics, corrections)

    def _section(self, section: MetricSection, cells: ClosedSums, totals: Float64s, largest: Float64s) -> Estimates:
        maxima = {name: largest[:, position] for name, position in self.plan.maxima.own(section.of).items()}
        reader = _Reader(totals, self.columns, section.of)
        smooth = [metric for metric in section.metrics if metric.formula is not None or metric.extreme is not None]
        others = [metric for metric in section.metrics if metric.formula is None and metric.extreme is None]
        with np.errstate(all="ignore"):
            values = {metric.key: _values(metric, reader, maxima) for metric in smooth}
            uncertain = [m for m in smooth if m.formula and m.uncertain and m.key not in section.unsure]
            errors = _errors(uncertain, reader, cells, values)
            found = [self._by_cell(others, section, cells, reader, maxima, cell) for cell in range(len(cells))]
        for index, metric in enumerate(others):
            values[metric.key] = np.array([own[index].value for own in found])
        nothing = _Error(None, None, None)
        for index, metric in enumerate(others):
            if metric.quantile is not None and metric.key not in section.unsure:
                ends, covers = (np.array([getattr(own[index], of) for own in found]) for of in ("interval", "covers"))
                errors[metric.key] = _Error(None, ends, covers)
        empty = totals[:, reader.position("tokens")] == 0
        return {
            metric.key: Estimate(values[metric.key], metric.undefined, empty, *errors.get(metric.key, nothing))
            for metric in section.metrics
        }

    def _by_cell(
        self,
        metrics: Sequence[Metric],
        section: MetricSection,
        cells: ClosedSums,
        reader: _Reader,
        maxima: Mapping[str, Float64s],
        cell: int,
    ) -> list[Quantile]:
        """Values and intervals of metrics that are read from histograms and tails, in one cell."""
        if not metrics:
            return []
        pair = cells.pairs[cell].get(str(section.of))
        own = Tails({name: float(values[cell]) for name, values in maxima.items()}, pair)
        totals = _Reader(reader.totals[cell], reader.axis, reader.of)
        asked = [metric for metric in metrics if metric.quantile is not None]
        shares = tuple(metric.quantile for metric in asked if metric.quantile is not None)
        sure = any(metric.key not in section.unsure for metric in asked)
        read = quantiles_of(pair, shares, _largest_difference(own.maxima), sure=sure) if pair is not None else []
        found = iter(read)
        return [
            next(found, NO_QUANTILE)
            if metric.tail is None
            else NO_QUANTILE._replace(value=float(metric.tail(totals, own)))
            for metric in metrics
        ]


class _Reader:
    """Totals [..., K] by name, as a pair or correction has them; notes what was asked for."""

    def __init__(self, totals: Float64s, axis: TableAxis, of: Of) -> None:
        self.totals, self.axis, self.of = totals, axis, of
        self.asked: dict[int, int] = {}

    def position(self, name: str) -> int:
        return self.axis.place(self.of, name)

    def __getitem__(self, name: str) -> Any:
        position = self.position(name)
        self.asked.setdefault(position, len(self.asked))
        return self.totals[..., position]


class _PerturbedTotals:
    """Totals as complex arrays [A, G]: row i has the i-th of the asked columns moved along the imaginary axis."""

    def __init__(self, reader: _Reader) -> None:
        self.reader, self.steps = reader, 1j * STEP * np.eye(len(reader.asked))

    def __getitem__(self, name: str) -> Any:
        position = self.reader.position(name)
        return self.reader.totals[:, position] + self.steps[self.reader.asked[position]][:, None]


def _values(metric: Metric, reader: _Reader, maxima: Mapping[str, Float64s]) -> Float64s:
    found = metric.formula(reader) if metric.formula is not None else metric.extreme and metric.extreme(maxima)
    return np.broadcast_to(np.asarray(found, np.float64), len(reader.totals))


class _Error(NamedTuple):
    """How sure values are: standard errors [G], intervals [G, 2], and what those of a heavy tail cover [G]."""

    se: Float64s | None
    interval: Float64s | None
    covers: Float64s | None


def _errors(
    metrics: Sequence[Metric], reader: _Reader, cells: ClosedSums, values: Mapping[str, Float64s]
) -> dict[str, _Error]:
    """By the delta method, from the scatter of clusters about the total; NaN where unknown."""
    of_row = np.repeat(np.arange(len(cells)), cells.sizes)
    filled = (cells.sums[:, reader.position("tokens")] != 0).astype(np.float64)
    clusters = np.add.reduceat(filled, cells.starts)
    correction = np.where(clusters < 2, np.nan, clusters / (clusters - 1))
    errors: dict[str, _Error] = {}
    for metric in metrics:
        assert metric.formula is not None
        reader.asked = {}
        metric.formula(reader)
        gradient = np.imag(metric.formula(_PerturbedTotals(reader))) / STEP
        influence = np.zeros(len(of_row))
        slopes = np.broadcast_to(gradient, (len(reader.asked), len(cells)))
        for slope, position in zip(slopes, reader.asked, strict=True):
            influence += cells.sums[:, position] * slope[of_row]
        influence *= influence
        squares = np.add.reduceat(influence, cells.starts)
        effective = squares**2 / np.add.reduceat(influence * influence, cells.starts)
        se = np.sqrt(squares * correction)
        errors[metric.key] = _Error(se, *intervals(metric.scale, values[metric.key], se, effective, clusters))
    return errors


def _largest_difference(maxima: Mapping[str, float]) -> float:
    return max(maxima["log_ratio"], maxima["-log_ratio"])


def _with_z(estimates: Estimates) -> Estimates:
    """Add the z-score of E[ratio] = 1."""
    mean = estimates["ratio_mean"]
    assert mean.se is not None
    with np.errstate(all="ignore"):
        z = np.where(mean.se > 0, (mean.value - 1) / mean.se, np.nan)
    return estimates | {RATIO_Z.key: Estimate(z, RATIO_Z.undefined, np.zeros(len(z), np.bool_))}


def why_undefined(metric: Metric, value: float, *, empty: bool) -> str:
    """The status of a value that is not finite, of a cell that holds no token if it is `empty`."""
    return status_of(value, metric.undefined, empty=empty)
