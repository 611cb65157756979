"""Statistical power: which rise of a metric does the gate detect, and how many clusters does a given rise need?"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from statistics import NormalDist

import numpy as np
from pydantic import BaseModel, ConfigDict

from mismatchctl.core.batch import Float64s
from mismatchctl.measure.metrics.metric import t_quantile
from mismatchctl.stats.comparison import (
    Allowance,
    count_lost_tokens,
    decisive_cluster_count,
    is_layered,
    k3_statistics,
    linear_statistic,
)
from mismatchctl.stats.resampling import count_relabelings
from mismatchctl.stats.samples import ClusterSample, K3Layers, TableMetric, compute_influence

MIN_CLUSTERS = 5
"""Minimum number of clusters for a test. If dump and baseline have the same 4 clusters, p < 0.05 is impossible."""
STATED_POWER, TARGET_POWER = 0.8, 0.9
"""The gate reports the smallest rise that makes 80% of dumps fail (STATED_POWER). Simulations overstate this share by
up to 0.1 for heavy tails, so the rise must make 90% of simulated dumps fail (TARGET_POWER)."""
_MAX_FACTOR = 100.0  # rises by a larger factor are not tried
_POWER_DRAWS = 1024
_MAX_EXACT_CLUSTERS = 64  # from 128 clusters on, clusters are merged to save time. This hardly changes means
_MIN_RESOLVED_LEVEL = 0.01  # smaller levels need more draws, so their critical p-value is scaled from this level
_SEED = 20251122  # fixed, so that equal data gives equal answers
_POWER_QUANTILE = NormalDist().inv_cdf(STATED_POWER)
_LOST_INDEX = 3  # index of the statistic "lost" in the list from `k3_statistics`


@dataclass(frozen=True)
class ClusterSizes:
    """Number of clusters in the new dump (`new`), in the baseline (`old`), and in both of them (`shared`)."""

    new: int
    old: int
    shared: int = 0

    def over(self, fold: int) -> ClusterSizes:
        shared = round(self.shared / fold)
        new, old = (shared + round((each - self.shared) / fold) for each in (self.new, self.old))
        return ClusterSizes(new, old, shared)

    @property
    def least_p(self) -> float:
        many = min(self.new, self.old) >= _MAX_EXACT_CLUSTERS
        return 0.0 if many else 1 / count_relabelings(self.new, self.old, self.shared)


class _SimulatedGate:
    """Applies the gate to simulated dumps, which consist of random clusters of the real dumps, with a higher metric.

    Without a `baseline`, simulated dumps and baselines are both drawn from `sample`, without common clusters.
    """

    def __init__(
        self, sample: ClusterSample, baseline: ClusterSample | None, sizes: ClusterSizes, metric: TableMetric,
        allowance: Allowance, level: float,
    ) -> None:  # fmt: skip
        known = len(sample) if baseline is None else min(len(sample), len(baseline))
        fold = max(min(sizes.new, sizes.old, known) // _MAX_EXACT_CLUSTERS, 1)  # number of clusters merged into one
        self._sizes, self._drawn, self._level, self._metric, self._allowance = (
            sizes, sizes.over(fold), level, metric, allowance,
        )  # fmt: skip
        if baseline is None:
            names, blocks = list(sample.names), [sample.sums[:0], _fold_rows(sample.sums, fold), sample.sums[:0]]
        else:
            names, blocks = [name for name in sample.names if name in baseline.columns], []
            _, *places = np.intersect1d(sample.keys, baseline.keys, assume_unique=True, return_indices=True)
            for each, place in zip((sample, baseline), places, strict=True):
                sums = each.sums[:, [each.columns[name] for name in names]]
                blocks += [_fold_rows(sums[place], fold), _fold_rows(np.delete(sums, place, axis=0), fold)]
        sums, self._shared = np.concatenate(blocks), len(blocks[0])  # the shared clusters come first
        self._second = 0 if baseline is None else len(blocks[0]) + len(blocks[1])  # the baseline's first row
        self._sample = ClusterSample(np.arange(len(sums), dtype=np.uint64), tuple(names), sums)
        self._layers = K3Layers.from_sample(self._sample) if is_layered(metric, lower=False) else None

    @property
    def is_possible(self) -> bool:
        """Return True if the metric is finite and above 0, and the number of clusters allows a significant result."""
        value = self._metric.of(self._sample)
        finite = self._layers is None or bool(np.isfinite(self._layers.k3).all())
        return self._sizes.least_p <= self._level and math.isfinite(value) and value > 0 and finite

    def detects(self, factor: float) -> bool:
        """Return True if a metric that rises by `factor` makes at least 90% of simulated dumps fail (TARGET_POWER)."""
        values, weights = self._plant(factor)
        pairs = np.arange(self._shared)
        ways = np.concatenate([pairs, pairs + self._second]), np.concatenate([pairs + self._second, pairs])
        new, old = values
        rows, mixed, apart = len(new), np.concatenate(values), new[ways[0]] - old[ways[1]]
        risen, plain = (tuple(np.repeat(chances, rows) / rows) for chances in ((1.0, 0.0), (0.0, 1.0)))
        drawn, least_p = self._drawn, self._sizes.least_p
        seen = _draw_scores(apart, mixed, drawn, risen, plain)
        chance = drawn.new / max(drawn.new + drawn.old, 1)
        either = tuple(np.repeat([chance / rows, (1 - chance) / rows], rows).tolist())
        null = _draw_scores(np.concatenate([apart, -apart]), mixed, drawn, either, either)
        shares, resolved = weights / weights.sum(), max(self._level, _MIN_RESOLVED_LEVEL)
        critical = _critical_p_value(null, shares, least_p, resolved) / resolved * self._level
        power = np.mean((seen >= _critical_scores(critical * shares, least_p)).any(axis=1))
        return bool(power >= TARGET_POWER)

    def _plant(self, factor: float) -> tuple[list[Float64s], Float64s]:
        """Simulate a rise by `factor`. Return statistics with and without it [clusters, tests], and test weights."""
        layers, sizes, sample = self._layers, self._sizes, self._sample
        if layers is None:
            statistics = [linear_statistic(sample, sample, self._metric, self._allowance, factor=factor)]
        else:
            risen = layers.scale(factor)
            statistics = k3_statistics(risen, layers, self._allowance, level=1.0)
        weights = np.array([statistic.weight for statistic in statistics])
        if layers is not None:
            first, second = (float(np.mean(each > 0)) for each in count_lost_tokens(risen, layers))
            holding = sizes.new * first + sizes.old * second
            weights[_LOST_INDEX] *= holding >= decisive_cluster_count(sizes.new, sizes.old, self._level)
        sides = zip(*((one.new, one.old) for one in statistics), strict=True)
        return [self._center(np.stack(each, axis=1)) for each in sides], weights

    def _center(self, values: Float64s) -> Float64s:
        """Give the values of the new dump the same mean as the baseline's values, so that they only differ by noise."""
        blocks = [each for each in (values[: self._second], values[self._second :]) if len(each)]
        return np.concatenate([blocks[-1].mean(axis=0) + _inflated_deviations(each) for each in blocks])


def _fold_rows(sums: Float64s, fold: int) -> Float64s:
    return np.add.reduceat(sums, np.arange(0, len(sums), fold), axis=0) if len(sums) else sums


def _inflated_deviations(values: Float64s) -> Float64s:
    """Return deviations from the mean, enlarged if a few clusters dominate, because a few clusters understate noise."""
    size, apart = len(values), values - values.mean(axis=0)
    with np.errstate(all="ignore"):
        effective = np.sum(apart**2, axis=0) ** 2 / np.sum(apart**4, axis=0)
    hidden = t_quantile(_POWER_QUANTILE, np.maximum(np.nan_to_num(effective) - 1, 1)) / _POWER_QUANTILE
    found: Float64s = apart * hidden * math.sqrt(size / max(size - 1, 1))
    return found


def _draw_scores(
    apart: Float64s, mixed: Float64s, sizes: ClusterSizes, new: tuple[float, ...], old: tuple[float, ...]
) -> Float64s:
    """Simulate dumps, and return the z-score of each of K test statistics in each dump, [_POWER_DRAWS, K]."""
    n, m = sizes.new - sizes.shared, sizes.old - sizes.shared
    total = spread = np.zeros((_POWER_DRAWS, mixed.shape[1]))
    degrees = sizes.shared - 1
    if sizes.shared:
        counts = _draw_counts(sizes.shared, (1 / len(apart),) * len(apart), 0)
        total, spread = counts @ apart / 2, counts @ apart**2 / 4
    if n and m:
        first, second = _draw_counts(n, new, 1), _draw_counts(m, old, 2)
        sums, square = (first @ mixed, second @ mixed), (first + second) @ mixed**2
        variance = (square - (sums[0] + sums[1]) ** 2 / (n + m)) / (n + m - 1)
        total = total + n * m / (n + m) * (sums[0] / n - sums[1] / m)
        spread = spread + n * m / (n + m) * variance
        degrees += n + m - 1
    with np.errstate(all="ignore"):
        share = np.minimum(np.nan_to_num(total**2 / np.maximum(spread, 0.0)) / (degrees + 1), 1 - 1e-12)
    bend = (8 * degrees + 1) / (8 * degrees + 3)  # converts Student's t to a z-score (Wallace 1959)
    found: Float64s = np.sign(total) * np.sqrt(-degrees * np.log1p(-share)) * bend
    return found


@lru_cache(maxsize=8)
def _draw_counts(size: int, chances: tuple[float, ...], salt: int) -> Float64s:
    """Draw simulated dumps of `size` clusters. Return each cluster's count in each dump [_POWER_DRAWS, clusters]."""
    return np.random.default_rng([_SEED, salt]).multinomial(size, chances, _POWER_DRAWS).astype(np.float64)


def _critical_scores(shares: Float64s, least_p: float) -> Float64s:
    normal = NormalDist()
    return np.array(
        [-normal.inv_cdf(min(share, 0.5)) if share > 0 and share >= least_p else math.inf for share in shares]
    )


def _critical_p_value(null: Float64s, shares: Float64s, least_p: float, level: float) -> float:
    """Return the p-value limit that makes the gate fail on a share `level` of unchanged dumps (z-scores: `null`)."""
    low, high = level, 1.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        failing = float(np.mean((null >= _critical_scores(middle * shares, least_p)).any(axis=1)))
        low, high = (middle, high) if failing <= level else (low, middle)
    return low


def detectable_factor(
    sample: ClusterSample, baseline: ClusterSample, metric: TableMetric, allowance: Allowance, level: float
) -> float | None:
    """Return the smallest rise that the gate detects as a factor, such as 2.0 for a doubled metric, or `None`."""
    sizes = ClusterSizes(len(sample), len(baseline), sample.count_common(baseline))
    simulated = _SimulatedGate(sample, baseline, sizes, metric, allowance, level)
    return _find_smallest(simulated.detects, _MAX_FACTOR) if simulated.is_possible else None


def _find_smallest(found: Callable[[float], bool], most: float) -> float | None:
    """Return the smallest number from 1 to `most` that `found` accepts, or `None`. The number may be 0.5% too large."""
    low, high = 1.0, 2.0
    while not found(high):
        if high >= most:
            return None
        low, high = high, min(2 * high, most)
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def min_clusters(level: float, baseline: int | None = None) -> int:
    """Return how many clusters make p <= `level` possible. The baseline has the same clusters, or `baseline` others."""
    size = 1
    while 1 / (1 << size if baseline is None else count_relabelings(size, baseline)) > level:
        size += 1
    return size


_MAX_CLUSTERS = 1 << 20


class SampleSizePlan(BaseModel):
    """Number of clusters that a dump needs so that the gate detects a regression, and the number it has (`have`)."""

    model_config = ConfigDict(extra="forbid")

    run: str
    metric: str
    regression: float
    clusters: int | None
    sequences: int | None
    paired: bool
    have: int
    status: str = "ok"


def required_sample_size(
    run: str, metric: TableMetric, sample: ClusterSample, baseline: ClusterSample | None, regression: float,
    allowance: Allowance, level: float,
) -> SampleSizePlan:  # fmt: skip
    """Estimate how many clusters the dump and its baseline each need to detect a rise by `regression` (0.1 is 10%)."""
    paired = baseline is not None and sample.count_common(baseline) == len(sample) == len(baseline)

    @cache
    def is_found(size: int) -> bool:
        sizes = ClusterSizes(size, size, size if paired else 0)
        simulated = _SimulatedGate(sample, baseline if paired else None, sizes, metric, allowance, level)
        return simulated.is_possible and simulated.detects(1.0 + regression)

    value = compute_influence(baseline if baseline is not None and paired else sample, metric)[0]
    clusters, status = None, "ok"
    if not (math.isfinite(value) and value > 0):
        status = f"{metric.metric.key} is not above 0"
    elif regression * value <= allowance.relative * value + allowance.absolute:
        status = f"the rule already allows a rise of {allowance}"
    elif len(sample) < 2:
        status = "one cluster is not enough to estimate the noise"
    else:
        least = _find_smallest(lambda size: is_found(math.ceil(size)), _MAX_CLUSTERS)
        clusters = None if least is None else math.ceil(least)
        status = "ok" if clusters is not None else f"more than {_MAX_CLUSTERS:,} clusters"
    each = float(sample.column("sequences").sum()) / max(len(sample), 1)
    return SampleSizePlan(
        run=run, metric=metric.metric.key, regression=regression, clusters=clusters,
        sequences=None if clusters is None else math.ceil(clusters * each), paired=paired, have=len(sample),
        status=status,
    )  # fmt: skip
