"""What a dump could have found, and how large one must be to find a given rise: from the null distribution that judges.

A rise is planted as the K3 of every token so many times as large, or any other metric so many times. It counts as found
where one statistic's expected total lies so far beyond its critical one that four of five dumps fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.batch import Float64s
from mismatchctl.gate.comparison import Statistic, layers_of, linear, of_k3
from mismatchctl.gate.rules import Allowance
from mismatchctl.measure.metrics.intervals import t_quantile
from mismatchctl.resample import Exchange, Layers, Sample, TableMetric, relabelings

LEAST_CLUSTERS = 5
"""Of fewer clusters, no random half can say anything at the usual level."""
POWER = 0.8
"""A regression counts as found when so many of such dumps would have failed."""
_MOST_CLUSTERS = 1 << 20
_HOPELESS = 1e6  # a factor that nobody would call a regression to be found
_UNLUCKY = NormalDist().inv_cdf(POWER)


class Need(BaseModel):
    """What it takes to find a regression.

    Attributes:
        run: whose noise was looked at.
        metric: its key.
        regression: how much larger the metric is made, relatively.
        clusters: needed in each of the two dumps; None where no number is enough, or the metric is no positive mean.
        sequences: the same in sequences of this dump's clusters.
        paired: whether both dumps are to hold the same clusters, as these do.
        have: clusters of this dump.
    """

    model_config = ConfigDict(extra="forbid")

    run: str
    metric: str
    regression: float
    clusters: int | None
    sequences: int | None
    paired: bool
    have: int


Planted = Callable[[float], Sequence[Statistic]]
"""The statistics of a sample whose metric is a factor times the baseline's."""


def planted(sample: Sample, baseline: Sample, metric: TableMetric, allowance: Allowance) -> Planted | None:
    """Statistics by what the baseline's value is multiplied with; None where it is not positive."""
    layers = layers_of(sample, baseline, metric, lower=False)
    if layers is not None:
        return planted_k3(*layers, allowance)
    columns = metric.columns(baseline)
    value = float(metric.of(baseline.sums[:, columns].sum(axis=0), baseline, columns))
    if not (math.isfinite(value) and value > 0):
        return None
    seen = [linear(sample, baseline, metric, allowance)]
    return lambda factor: _moved(seen, [linear(baseline, baseline, metric, allowance, planted=factor)], factor)


def planted_k3(new: Layers, old: Layers, allowance: Allowance) -> Planted | None:
    """The same of K3."""
    if not (np.isfinite(old.k3).all() and old.k3.sum() > 0 and np.isfinite(new.k3).all()):
        return None
    seen = of_k3(new, old, allowance)
    return lambda factor: _moved(seen, of_k3(old.scaled(factor), old, allowance), factor)


def _moved(seen: Sequence[Statistic], risen: Sequence[Statistic], factor: float) -> list[Statistic]:
    """What was seen, without what it rose by, and with what the baseline rises by; noise grows with what is noisy."""
    return [
        Statistic((each.new - each.new.mean()) * factor + other.new.mean(), each.old, each.weight)
        for each, other in zip(seen, risen, strict=True)
    ]


def detectable(made: Planted, exchange: Exchange, critical: float) -> float | None:
    """The smallest factor on the baseline's value that four of five such dumps fail at; None where none does.

    Args:
        made: the statistics by factor.
        exchange: the clusters of both.
        critical: the weighted p-value at which a statistic fails.
    """
    if exchange.least_p > critical:
        return None
    shared = exchange.shared

    def found(factor: float) -> bool:
        return any(
            _is_found(each, exchange, len(exchange.new), len(exchange.old), shared, critical)
            for each in _weighted(made(factor))
        )

    return _first(found, 1.0, _HOPELESS)


def _first(found: Callable[[float], bool], low: float, most: float) -> float | None:
    """The smallest number that something holds for, to a part in a thousand; it holds for all that are larger."""
    high = low * 2
    while not found(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high / low > 1.001:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def _weighted(statistics: Sequence[Statistic]) -> list[tuple[Float64s, Float64s, float]]:
    whole = sum(statistic.weight for statistic in statistics)
    return [(each.new, each.old, each.weight / whole) for each in statistics]


def _is_found(
    statistic: tuple[Float64s, Float64s, float], exchange: Exchange, n: int, m: int, shared: int, critical: float
) -> bool:
    """Whether four of five samples of n clusters fail against m of the baseline, of which both hold so many."""
    new, old, weight = statistic
    normal = -NormalDist().inv_cdf(min(critical * weight, 0.5))
    if shared:  # pairs: others hardly say more
        _, first, second = np.intersect1d(exchange.new, exchange.old, assume_unique=True, return_indices=True)
        difference = new[first] - old[second]
        error = drawn = float(difference.std(ddof=1)) / math.sqrt(shared) if len(difference) > 1 else math.inf
        rise, degrees = float(difference.mean()), shared - 1
    else:
        spread = [float(np.var(each, ddof=1)) if len(each) > 1 else math.inf for each in (new, old)]
        drawn = math.sqrt(spread[0] / n + spread[1] / m)
        pooled = (spread[0] * (n - 1) + spread[1] * (m - 1)) / max(n + m - 2, 1)
        error = math.sqrt(pooled * (1 / n + 1 / m))
        rise, degrees = float(new.mean() - old.mean()), n + m - 2
    return bool(new.sum() > 0 and rise >= t_quantile(normal, degrees) * error + _UNLUCKY * drawn)


def least_clusters(level: float, baseline: int | None = None) -> int:
    """How many clusters it takes that some data could fail: pairs, or against so many others of a baseline."""
    size = 1
    while 1 / (1 << size if baseline is None else relabelings(size, baseline)) > level:
        size += 1
    return size


def needed(
    run: str,
    metric: TableMetric,
    sample: Sample,
    baseline: Sample | None,
    regression: float,
    tolerance: float,
    critical: float,
) -> Need:
    """How many clusters and sequences it takes to find a relative regression beyond a relative tolerance.

    Without a baseline of the same clusters, both dumps are taken to have as many of their own.

    Args:
        run: whose noise is looked at.
        metric: what is to be found to have risen.
        sample: a dump.
        baseline: what it is compared with, if anything.
        regression: the rise, relative.
        tolerance: how much it may rise, relative.
        critical: the weighted p-value at which a statistic fails.
    """
    paired = baseline is not None and sample.shared(baseline) == len(sample) == len(baseline)
    other = baseline if baseline is not None and paired else sample
    made = planted(sample, other, metric, Allowance(relative=tolerance)) if len(sample) > 1 else None
    clusters = None
    if made is not None:
        statistics, exchange = _weighted(made(1.0 + regression)), Exchange(sample.keys, other.keys)

        def found(size: int) -> bool:
            possible = 1 << size if paired else relabelings(size, size) if size < 64 else math.inf
            return 1 / possible <= critical and any(
                _is_found(each, exchange, size, size, size if paired else 0, critical) for each in statistics
            )

        clusters = _least(found)
    each = float(sample.column("sequences").sum()) / max(len(sample), 1)
    return Need(
        run=run,
        metric=metric.metric.key,
        regression=regression,
        clusters=clusters,
        sequences=None if clusters is None else math.ceil(clusters * each),
        paired=paired,
        have=len(sample),
    )


def _least(found: Callable[[int], bool]) -> int | None:
    """The least number that something holds for, and with it for all that are larger."""
    high = 2
    while not found(high):
        high *= 2
        if high > _MOST_CLUSTERS:
            return None
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if found(middle) else (middle, high)
    return high
