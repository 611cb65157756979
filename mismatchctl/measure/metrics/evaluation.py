"""Evaluation of metrics on closed sums: values, standard errors, intervals, and the reasons for undefined values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.measure.cluster_table import ColumnSubject, TableAxis
from mismatchctl.measure.columns import MISMATCH_NAME, PAIRS, Pair
from mismatchctl.measure.facets import SPREAD
from mismatchctl.measure.groups import ClosedSums, closed_axis
from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS, SPLITS
from mismatchctl.measure.metrics.metric import (
    NO_QUANTILE,
    Estimate,
    Metric,
    MetricTails,
    Quantile,
    compute_intervals,
    compute_quantiles,
    value_status,
)
from mismatchctl.measure.metrics.mismatch import BASE_METRICS, PAIR_METRICS, RATIO_Z
from mismatchctl.measure.reduction import MeasurePlan

Estimates = dict[str, Estimate]
IMAGINARY_STEP = 1e-100
"""Step of the complex-step derivative: exact because it vanishes next to every total, even 1e-15 squared."""


@dataclass(frozen=True)
class MetricSelection:
    """Selection of metrics for some cells."""

    excluded: frozenset[str] = frozenset()  # metrics of facets and other pairs that are left out
    without_errors: frozenset[str] = frozenset()  # metrics without errors and intervals
    corrections_with_errors: frozenset[str] | None = None  # metrics of corrections with errors. Default: all.


ALL_METRICS = MetricSelection()


@dataclass(frozen=True)
class MetricSection:
    """Metrics of one pair of policies, or of one correction by its number."""

    metrics: tuple[Metric, ...]
    owner: ColumnSubject
    without_errors: frozenset[str]


def pair_metrics(pair: Pair) -> tuple[Metric, ...]:
    """List the metrics of a pair under their names for the pair, and the metrics of its split into two other pairs."""
    own = tuple(
        replace(
            metric,
            key=pair.key(metric.key),
            title=f"{pair.title}: {metric.title}",
            definition=f"{metric.key} with x = {pair.policy} minus {pair.reference} "
            f"({pair.policy} for train, {pair.reference} for rollout)",
            meaning=f"{metric.key} of {pair.meaning}.",
            measure=metric.measure and replace(metric.measure, basis=pair.source),
        )
        for metric in (*PAIR_METRICS, RATIO_Z)
    )
    return own + SPLITS.get(pair.name, ())


def other_metrics() -> tuple[Metric, ...]:
    return sum((*map(pair_metrics, PAIRS[1:]), *FACET_METRICS.values()), ())


@dataclass(frozen=True)
class EstimateRow:
    """Estimates of all metrics in several cells, and of each correction in order."""

    metrics: Estimates
    corrections: list[Estimates]

    @classmethod
    def concatenate(cls, parts: Sequence[EstimateRow]) -> EstimateRow:
        return cls(
            _join_estimates([part.metrics for part in parts]),
            [_join_estimates(own) for own in zip(*(part.corrections for part in parts), strict=True)],
        )


def _join_estimates(parts: Sequence[Estimates]) -> Estimates:
    return {key: Estimate.concatenate([part[key] for part in parts]) for key in parts[0]}


class Evaluator:
    """Evaluates every metric of a plan on closed cells, each formula once for all cells."""

    def __init__(self, plan: MeasurePlan) -> None:
        self.plan = plan
        self.columns = closed_axis(plan)

    def sections(self, kept: MetricSelection) -> Iterator[MetricSection]:
        facets = (metric for facet in self.plan.facets for metric in FACET_METRICS[facet.name])
        own = (*BASE_METRICS, *PAIR_METRICS, *(metric for metric in facets if metric.key not in kept.excluded))
        yield MetricSection(own, MISMATCH_NAME, kept.without_errors)
        for pair in self.plan.pairs[1:]:
            own = (
                *(metric for metric in PAIR_METRICS if pair.key(metric.key) not in kept.excluded),
                *SPLITS.get(pair.name, ()),
            )
            unsure = (metric.key for metric in own if kept.without_errors & {metric.key, pair.key(metric.key)})
            yield MetricSection(own, pair.name, frozenset(unsure))
        for index, correction in enumerate(self.plan.corrections):
            own = tuple(correction_metrics(correction, self.plan.has_losses))
            unsure = (
                metric.key
                for metric in own
                if kept.corrections_with_errors is not None and metric.key not in kept.corrections_with_errors
            )
            yield MetricSection(own, index, frozenset(unsure))

    def evaluate(self, cells: ClosedSums, kept: MetricSelection = ALL_METRICS) -> EstimateRow:
        totals = np.add.reduceat(cells.sums, cells.starts, axis=0)
        largest = np.maximum.reduceat(cells.maxima, cells.starts, axis=0)
        done = {section.owner: self._section(section, cells, totals, largest) for section in self.sections(kept)}
        metrics = _add_z(done[MISMATCH_NAME])
        for pair in self.plan.pairs[1:]:
            shares = {metric.key for metric in SPLITS.get(pair.name, ())}
            found = _add_z(done[pair.name])
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
        maxima = {
            name: largest[:, position] for name, position in self.plan.maxima.owner_columns(section.owner).items()
        }
        reader = _TotalsReader(totals, self.columns, section.owner)
        smooth = [metric for metric in section.metrics if metric.formula is not None or metric.extreme is not None]
        others = [metric for metric in section.metrics if metric.formula is None and metric.extreme is None]
        with np.errstate(all="ignore"):
            values = {metric.key: _evaluate_metric(metric, reader, maxima) for metric in smooth}
            uncertain = [m for m in smooth if m.formula and m.has_error and m.key not in section.without_errors]
            errors = _estimate_errors(uncertain, reader, cells, values)
            found = [self._by_cell(others, section, cells, reader, maxima, cell) for cell in range(len(cells))]
        for index, metric in enumerate(others):
            values[metric.key] = np.array([own[index].value for own in found])
        nothing = _Uncertainty(None, None, None)
        for index, metric in enumerate(others):
            if metric.quantile is not None and metric.key not in section.without_errors:
                ends, covers = (np.array([getattr(own[index], of) for own in found]) for of in ("interval", "covers"))
                errors[metric.key] = _Uncertainty(None, ends, covers)
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
        reader: _TotalsReader,
        maxima: Mapping[str, Float64s],
        cell: int,
    ) -> list[Quantile]:
        """Evaluate the metrics from histograms and tails in one cell."""
        if not metrics:
            return []
        pair = cells.pairs[cell].get(str(section.owner))
        own = MetricTails({name: float(values[cell]) for name, values in maxima.items()}, pair)
        totals = _TotalsReader(reader.totals[cell], reader.axis, reader.owner)
        asked = [metric for metric in metrics if metric.quantile is not None]
        shares = tuple(metric.quantile for metric in asked if metric.quantile is not None)
        sure = any(metric.key not in section.without_errors for metric in asked)
        read = (
            compute_quantiles(pair, shares, _largest_difference(own.maxima), with_intervals=sure)
            if pair is not None
            else []
        )
        found = iter(read)
        return [
            next(found, NO_QUANTILE)
            if metric.tail is None
            else NO_QUANTILE._replace(value=float(metric.tail(totals, own)))
            for metric in metrics
        ]


class _TotalsReader:
    """Totals [..., K] by name for a pair or correction. Records the columns that were read."""

    def __init__(self, totals: Float64s, axis: TableAxis, of: ColumnSubject) -> None:
        self.totals, self.axis, self.owner = totals, axis, of
        self.columns_read: dict[int, int] = {}

    def position(self, name: str) -> int:
        return self.axis.position(self.owner, name)

    def __getitem__(self, name: str) -> Any:
        position = self.position(name)
        self.columns_read.setdefault(position, len(self.columns_read))
        return self.totals[..., position]


class _PerturbedTotals:
    """Totals as complex arrays [A, G]: row i has the i-th of the read columns moved along the imaginary axis."""

    def __init__(self, reader: _TotalsReader) -> None:
        self.reader, self.steps = reader, 1j * IMAGINARY_STEP * np.eye(len(reader.columns_read))

    def __getitem__(self, name: str) -> Any:
        position = self.reader.position(name)
        return self.reader.totals[:, position] + self.steps[self.reader.columns_read[position]][:, None]


def _evaluate_metric(metric: Metric, reader: _TotalsReader, maxima: Mapping[str, Float64s]) -> Float64s:
    found = metric.formula(reader) if metric.formula is not None else metric.extreme and metric.extreme(maxima)
    return np.broadcast_to(np.asarray(found, np.float64), len(reader.totals))


class _Uncertainty(NamedTuple):
    se: Float64s | None
    interval: Float64s | None
    covers: Float64s | None


def _estimate_errors(
    metrics: Sequence[Metric], reader: _TotalsReader, cells: ClosedSums, values: Mapping[str, Float64s]
) -> dict[str, _Uncertainty]:
    """Compute errors by the delta method from the scatter of clusters, NaN if unknown."""
    of_row = np.repeat(np.arange(len(cells)), cells.sizes)
    filled = (cells.sums[:, reader.position("tokens")] != 0).astype(np.float64)
    clusters = np.add.reduceat(filled, cells.starts)
    correction = np.where(clusters < 2, np.nan, clusters / (clusters - 1))
    errors: dict[str, _Uncertainty] = {}
    for metric in metrics:
        assert metric.formula is not None
        reader.columns_read = {}
        metric.formula(reader)
        gradient = np.imag(metric.formula(_PerturbedTotals(reader))) / IMAGINARY_STEP
        influence = np.zeros(len(of_row))
        slopes = np.broadcast_to(gradient, (len(reader.columns_read), len(cells)))
        for slope, position in zip(slopes, reader.columns_read, strict=True):
            influence += cells.sums[:, position] * slope[of_row]
        influence *= influence
        squares = np.add.reduceat(influence, cells.starts)
        effective = squares**2 / np.add.reduceat(influence * influence, cells.starts)
        se = np.sqrt(squares * correction)
        errors[metric.key] = _Uncertainty(
            se, *compute_intervals(metric.scale, values[metric.key], se, effective, clusters)
        )
    return errors


def _largest_difference(maxima: Mapping[str, float]) -> float:
    return max(maxima["log_ratio"], maxima["-log_ratio"])


def _add_z(estimates: Estimates) -> Estimates:
    mean = estimates["ratio_mean"]
    assert mean.se is not None
    with np.errstate(all="ignore"):
        z = np.where(mean.se > 0, (mean.value - 1) / mean.se, np.nan)
    return estimates | {RATIO_Z.key: Estimate(z, RATIO_Z.undefined, np.zeros(len(z), np.bool_))}


def undefined_reason(metric: Metric, value: float, *, empty: bool) -> str:
    return value_status(value, metric.undefined, empty=empty)


REPEATED_METRICS = frozenset(
    pair.key(key)
    for pair in PAIRS[1:]
    for key in (
        *(f"khat_{level}_{what}" for level in ("token", "sequence") for what in ("limit", "tail")),
        *(f"{side}_{ppl}" for side in ("train", "rollout") for ppl in ("log_ppl", "ppl")),
        *("ppl_ratio", "log_ppl_diff_min", "log_ppl_diff_max", "khat_token", "khat_sequence"),
    )
)
"""Metrics of other pairs that are only kept overall: per step they repeat others, or need more tokens."""
_SPREAD_KEYS = frozenset(metric.key for metric in FACET_METRICS[SPREAD])
METRICS_NOT_BY_STEP = (
    REPEATED_METRICS
    | frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("autocorr_lag1", "inflation", "k3_worst_share"))
    | _SPREAD_KEYS - {"beyond_2", "parity_tokens"}
)
"""Those, and more that are left out per step, since there may be a thousand steps."""
OTHER_PAIR_METRICS = frozenset(metric.key for pair in PAIRS[1:] for metric in pair_metrics(pair)) | _SPREAD_KEYS
"""Metrics of other pairs, and of the spread of ratios."""
METRICS_WITH_GROUP_ERRORS = frozenset(
    ("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean")
)
"""Metrics of corrections with standard errors per group."""
OTHER_METRICS_WITH_ERRORS = frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("k3", "ratio_mean"))
"""Metrics of other pairs with standard errors per group."""
STEP_METRICS = MetricSelection(
    METRICS_NOT_BY_STEP, OTHER_PAIR_METRICS - OTHER_METRICS_WITH_ERRORS, METRICS_WITH_GROUP_ERRORS
)
VALUE_METRICS = MetricSelection(
    REPEATED_METRICS, OTHER_PAIR_METRICS - OTHER_METRICS_WITH_ERRORS, METRICS_WITH_GROUP_ERRORS
)
"""Metrics by value of a `--by` column."""
