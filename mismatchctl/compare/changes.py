"""Every metric of one side against the reference: difference, interval, significance; and how both grow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.compare.model import CONFIDENCE, Change, GrowthContrast, Interval
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError, DataError
from mismatchctl.finite import finite
from mismatchctl.gate.comparison import compare, layers_of, linear
from mismatchctl.gate.rules import Allowance
from mismatchctl.measure.metrics import Metric
from mismatchctl.resample import (
    ClusterSample,
    Draws,
    Exchange,
    TableMetric,
    find_metric,
    holm,
    interval,
    resample,
    shares_above,
)
from mismatchctl.result import Growth, RunResult, Value, growth_of
from mismatchctl.result.growth import Label
from mismatchctl.result.story import growth_of_run

HEADLINE = "k3"
"""Judged as a family of its own, so that the many others do not drown it."""
NOT_RESAMPLED = "no interval: a maximum, a quantile, a count or a tail index does not follow from sums by cluster"
FEW = "no interval: too few clusters"
_RELATIVE_UNITS = ("nats", "nats/token")
_SAME = 1e-12
"""Relative difference up to which the same rows in another order, or split otherwise, may differ."""


@dataclass(frozen=True)
class Tested:
    """A change before its p-value is adjusted."""

    change: Change
    p: float | None


def metric_changes(
    reference: Mapping[str, Value],
    other: Mapping[str, Value],
    samples: tuple[ClusterSample, ClusterSample],
    correction: Correction | None = None,
) -> dict[str, Tested]:
    """Each metric (of a correction) that both sides have, in the order of the reference; the p-values are raw."""
    keys = [key for key in reference if key in other]
    metrics = {key: metric for key in keys if (metric := _known(key, correction)) is not None}
    smooth = {key: metric for key, metric in metrics.items() if metric.is_resampled and _has_columns(metric, samples)}
    draws = resample(samples, list(smooth.values())) if smooth else [[], []]
    pairs = dict(zip(smooth, zip(*draws, strict=True), strict=True))
    with np.errstate(all="ignore"):  # what overflows has no p-value
        p = {key: value for key, value in _p_values(smooth, samples).items() if np.isfinite(value)}
    return {key: _change(metrics.get(key), reference[key], other[key], pairs.get(key), p.get(key)) for key in keys}


def _p_values(metrics: Mapping[str, TableMetric], samples: tuple[ClusterSample, ClusterSample]) -> dict[str, float]:
    """Two-sided, by relabeling clusters as the gate does: each metric by itself, K3 by layers where both have them."""
    reference, other = samples
    if not metrics or not all(map(len, samples)):
        return {}
    either = [linear(other, reference, metric, Allowance()) for metric in metrics.values()]
    totals = Exchange(other.keys, reference.keys).totals(
        np.stack([each.new for each in either], axis=1), np.stack([each.old for each in either], axis=1)
    )
    tails = np.minimum(shares_above(totals)[0], shares_above(-totals)[0])
    found = dict(zip(metrics, np.minimum(2 * tails, 1.0).tolist(), strict=True))
    for (key, metric), plain in zip(metrics.items(), either, strict=True):
        if layers_of(other, reference, metric, lower=False) is not None:  # only what went the way that K3 went counts
            sides = (other, reference) if plain.exceeds else (reference, other)
            found[key] = min(1.0, 2 * compare(*sides, metric, Allowance()).p)
    return found


def adjusted(families: Sequence[Mapping[str, Tested]]) -> list[dict[str, Change]]:
    """Changes of every contrast with p-values by Holm: K3 of all contrasts is one family, the rest another."""
    adjusted_p: dict[tuple[int, str], float] = {}
    for headline in (True, False):
        places = [
            (index, key, tested.p)
            for index, changes in enumerate(families)
            for key, tested in changes.items()
            if (key == HEADLINE) == headline and tested.p is not None
        ]
        corrected = holm([p for _, _, p in places])
        adjusted_p |= {(index, key): p for (index, key, _), p in zip(places, corrected, strict=True)}
    return [
        {
            key: tested.change.model_copy(
                update={"p": (p := adjusted_p.get((index, key))), "significant": p is not None and p < 1 - CONFIDENCE}
            )
            for key, tested in changes.items()
        }
        for index, changes in enumerate(families)
    ]


def _known(key: str, correction: Correction | None) -> TableMetric | None:
    try:
        return find_metric(key, correction)
    except ConfigError:
        return None  # of another version


def _has_columns(metric: TableMetric, samples: Sequence[ClusterSample]) -> bool:
    try:
        for sample in samples:
            metric.columns(sample)
    except DataError:
        return False
    return True


def _change(
    metric: TableMetric | None, reference: Value, other: Value, draws: tuple[Draws, Draws] | None, p: float | None
) -> Tested:
    if reference.value is None or other.value is None:
        status = reference.status if reference.value is None else other.status
        return Tested(Change(reference=reference, other=other, status=status), None)
    same = math.isclose(reference.value, other.value, rel_tol=_SAME)
    difference = 0.0 if same else other.value - reference.value
    change = Change(reference=reference, other=other, difference=difference, status=NOT_RESAMPLED)
    if metric is None:
        return Tested(change, None)
    change.better = None if same else _is_better(metric.metric, reference.value, other.value)
    sized = metric.metric.unit in _RELATIVE_UNITS and metric.metric.better == "low"
    if sized and reference.value > 0:
        change.relative = finite(difference / reference.value)
    if draws is None:
        if metric.is_resampled:
            change.status = "no interval: the Result's cluster table does not hold what this metric needs"
        return Tested(change, None)
    first, second = draws
    moved = second - first
    change.interval = _interval(moved)
    change.status = "ok" if change.interval is not None else FEW
    if change.relative is not None:
        change.relative_interval = _interval(second / first - 1.0)
    return Tested(change, p if change.interval is not None else None)


def _is_better(metric: Metric, reference: float, other: float) -> bool | None:
    """Whether the other value is nearer to what is good; None where neither way is."""
    if not metric.better:
        return None
    if metric.better == "one":
        return abs(other - 1) < abs(reference - 1)
    return (other < reference) == (metric.better == "low")


def _interval(draws: Draws) -> Interval | None:
    found = interval(draws, CONFIDENCE)
    return found if found is not None and all(map(math.isfinite, found)) else None


_Step = tuple[float, float]
"""K3 at a step, and its standard error over it."""


def growth(reference: RunResult, other: RunResult) -> GrowthContrast:
    """The growth of K3 on both sides, and of the other's over the reference's at the steps that both have."""
    sides = [growth_of_run(run) for run in (reference, other)]
    before, after = (_steps(run) for run in (reference, other))
    common = [label for label in before if label in after]
    pairs = [(before[label], after[label]) for label in common]
    quotients = [value / base for (base, _), (value, _) in pairs]
    errors = [
        quotient * math.hypot(first, second)
        for quotient, ((_, first), (_, second)) in zip(quotients, pairs, strict=True)
    ]
    return GrowthContrast(
        reference=sides[0], other=sides[1], quotient=growth_of(common, quotients, errors),
        onsets_differ=_apart(*sides),
    )  # fmt: skip


def _steps(run: RunResult) -> dict[Label, _Step]:
    """The steps at which K3 is above 0."""
    series = run.groups.metrics.get("k3")
    if series is None:
        return {}
    errors = series.se or [None] * len(series.value)
    found = zip(run.groups.labels, series.value, errors, strict=True)
    return {label: (value, (error or 0.0) / value) for label, value, error in found if value is not None and value > 0}


def _apart(first: Growth, second: Growth) -> bool | None:
    """Whether no step may be the onset of both; None where one does not grow, or steps have no numbers."""
    ends = [growth.onset_interval for growth in (first, second) if growth.verdict == "grew"]
    known = [(low, high) for low, high in filter(None, ends) if not isinstance(low, str) and not isinstance(high, str)]
    if len(known) < 2:
        return None
    return max(low for low, _ in known) > min(high for _, high in known)
