"""Bootstrap intervals and permutation tests over the cluster table."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s
from mismatchctl.measure.cluster_table import Hashes, mix_hashes
from mismatchctl.stats.samples import ClusterSample, TableMetric

REPLICATES = 1 << 15
"""Number of replicates: enough for a few hundred simultaneous comparisons."""
_BITS = 64  # replicates per hash
_BLOCK = 1 << 20  # weights drawn at once
_SALT = np.uint64(0x6D69736D61746368)


def bootstrap_weights(keys: Hashes, start: int, stop: int) -> Float64s:
    """Return weights 0 or 2 of clusters in replicates `start` to `stop` [stop - start, N]."""
    first = start // _BITS
    words = mix_hashes(np.arange(first, -(-stop // _BITS), dtype=np.uint64), _SALT)
    hashes = mix_hashes(keys[None, :], words[:, None])
    bits = (hashes[:, None, :] >> np.arange(_BITS, dtype=np.uint64)[None, :, None]) & np.uint64(1)
    drawn: Float64s = bits.reshape(len(words) * _BITS, len(keys))[start - first * _BITS : stop - first * _BITS].astype(
        np.float64
    )
    return 2 * drawn


@dataclass(frozen=True)
class BootstrapDraws:
    """A number and its value in each replicate [R], with arithmetic on all of them."""

    value: float
    resampled: Float64s

    def __add__(self, other: BootstrapDraws | float) -> BootstrapDraws:
        value, resampled = _operands(other)
        return BootstrapDraws(self.value + value, self.resampled + resampled)

    def __sub__(self, other: BootstrapDraws | float) -> BootstrapDraws:
        value, resampled = _operands(other)
        return BootstrapDraws(self.value - value, self.resampled - resampled)

    def __mul__(self, factor: float) -> BootstrapDraws:
        return BootstrapDraws(self.value * factor, self.resampled * factor)

    def __truediv__(self, other: BootstrapDraws) -> BootstrapDraws:
        with np.errstate(all="ignore"):
            return BootstrapDraws(float(np.float64(self.value) / other.value), self.resampled / other.resampled)

    def __neg__(self) -> BootstrapDraws:
        return self * -1.0

    def __abs__(self) -> BootstrapDraws:
        return BootstrapDraws(abs(self.value), np.abs(self.resampled))


def _operands(other: BootstrapDraws | float) -> tuple[float, Float64s | float]:
    return (other.value, other.resampled) if isinstance(other, BootstrapDraws) else (other, other)


def resample_metrics(
    samples: Sequence[ClusterSample], metrics: Sequence[TableMetric], replicates: int = REPLICATES
) -> list[list[BootstrapDraws]]:
    """Evaluate metrics on samples in the same replicates: `[sample][metric]`, NaN if undefined.

    Raises:
        DataError: A sample lacks a column of a metric.
    """
    every = np.unique(np.concatenate([sample.keys for sample in samples]))
    positions = [[metric.columns(sample) for metric in metrics] for sample in samples]
    wanted = [np.unique(np.concatenate([np.asarray(columns) for columns in rows])) for rows in positions]
    found = [[np.empty(replicates) for _ in metrics] for _ in samples]
    size = max(_BLOCK // max(len(every), 1) // _BITS, 1) * _BITS
    for start in range(0, replicates, size):
        stop = min(start + size, replicates)
        drawn = bootstrap_weights(every, start, stop)
        for sample, used, rows, outs in zip(samples, wanted, positions, found, strict=True):
            own = drawn if len(sample) == len(every) else drawn[:, np.searchsorted(every, sample.keys)]
            sums = _replicate_sums(own, sample.sums[:, used])  # all columns together, so that weights are read once
            for metric, columns, out in zip(metrics, rows, outs, strict=True):
                out[start:stop] = metric.evaluate(sums[:, np.searchsorted(used, columns)], sample, columns)
    return [
        [
            BootstrapDraws(float(metric.evaluate(sample.sums[:, columns].sum(axis=0), sample, columns)), out)
            for metric, columns, out in zip(metrics, rows, outs, strict=True)
        ]
        for sample, rows, outs in zip(samples, positions, found, strict=True)
    ]


def _replicate_sums(drawn: Float64s, sums: Float64s) -> Float64s:
    with np.errstate(all="ignore"):
        product: Float64s = drawn @ sums
    return product


def percentile_interval(draws: BootstrapDraws, level: float = 0.90) -> tuple[float, float] | None:
    """Return the percentile interval at this level, if enough replicates are defined."""
    ordered = np.sort(draws.resampled)  # NaN last
    defined = int(np.count_nonzero(~np.isnan(ordered)))
    place = max(int(round((1 - level) / 2 * (len(ordered) + 1), 6)) - 1, 0)
    if defined < len(ordered) - place:
        return None
    return float(ordered[place]), float(ordered[defined - 1 - place])


def p_above_zero(draws: BootstrapDraws) -> float:
    """Return the one-sided p-value of a number above zero. Undefined replicates count as not above."""
    count = len(draws.resampled)
    above = int(np.count_nonzero(draws.resampled > 0))
    return (count - above + 1) / (count + 1)


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the family-wise error rate is controlled (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


LEAST_RELABELINGS, MOST_RELABELINGS = 1 << 12, 1 << 16
"""Minimum and maximum number of relabelings."""
_PER_LEVEL = 5  # minimum number of more extreme relabelings at the level
_PERMUTATION_BLOCK = 1 << 20  # labels drawn at once
_PERMUTATION_SALT = np.uint64(0x7065726D75746564)
_ROUNDING = 1e-9  # relative difference of totals that count as equal
Labels = NDArray[np.float64]


@dataclass(frozen=True)
class SampleExchange:
    """Exchangeable clusters of a new and an old sample.

    Attributes:
        new, old: keys of the clusters of each sample.
        level: significance level, which sets the resolution of the p-value.
    """

    new: Hashes
    old: Hashes
    level: float = 0.05

    @property
    def common(self) -> int:
        """Number of clusters in the intersection."""
        return len(np.intersect1d(self.new, self.old, assume_unique=True))

    @property
    def relabelings(self) -> int:
        """Number of relabelings, including the observed one."""
        return count_relabelings(len(self.new), len(self.old), self.common)

    @property
    def least_p(self) -> float:
        """Smallest possible p-value."""
        return 1 / min(self.relabelings, self._drawn + 1)

    @property
    def _drawn(self) -> int:
        return int(min(max(_PER_LEVEL / self.level, LEAST_RELABELINGS), MOST_RELABELINGS))

    def totals(self, new: Float64s, old: Float64s) -> Float64s:
        """Return the totals of the rows labelled new [1 + R, K], observed labels first.

        Args:
            new: values of the clusters of the new sample [n, K].
            old: values of the clusters of the old sample [m, K].
        """
        seen = new.sum(axis=0, keepdims=True)
        found = [labels @ np.concatenate([new, old]) for labels in self.labels()]
        return np.concatenate([seen, *found])

    def labels(self) -> Iterator[Labels]:
        """Yield labels of the rows, new ones first [R, n + m]: 1 for rows labelled new."""
        paired, first, second = np.intersect1d(self.new, self.old, assume_unique=True, return_indices=True)
        every = np.arange(len(self.new) + len(self.old))
        rows = np.delete(every, np.concatenate([first, len(self.new) + second]))
        single = np.concatenate([self.new, self.old])[rows]
        chosen = len(self.new) - len(paired)
        parts = _enumerate_relabelings if self.relabelings <= self._drawn else self._draw
        for swapped, called in parts(paired, single, chosen):
            labels = np.zeros((len(swapped), len(self.new) + len(self.old)))
            labels[:, first], labels[:, len(self.new) + second] = 1.0 - swapped, swapped
            labels[:, rows] = called
            yield labels

    def _draw(self, paired: Hashes, single: Hashes, chosen: int) -> Iterator[tuple[Labels, Labels]]:
        size = max(_PERMUTATION_BLOCK // max(len(paired) + len(single), 1), 1)
        for start in range(0, self._drawn, size):
            words = mix_hashes(np.arange(start, min(start + size, self._drawn), dtype=np.uint64), _PERMUTATION_SALT)
            swapped = (mix_hashes(paired[None, :], words[:, None]) >> np.uint64(63)).astype(np.float64)
            called = np.zeros((len(words), len(single)))
            if 0 < chosen < len(single):
                places = np.argpartition(mix_hashes(single[None, :], words[:, None]), chosen - 1, axis=1)[:, :chosen]
                np.put_along_axis(called, places, 1.0, axis=1)
            elif chosen:
                called[:] = 1.0
            yield swapped, called


def _enumerate_relabelings(paired: Hashes, single: Hashes, chosen: int) -> Iterator[tuple[Labels, Labels]]:
    """Yield every relabeling except the first, which is the observed one."""
    swaps = (np.arange(1 << len(paired))[:, None] >> np.arange(len(paired))) & 1
    listed = list(itertools.combinations(range(len(single)), chosen))
    choices, called = np.array(listed, np.int64).reshape(len(listed), chosen), np.zeros((len(listed), len(single)))
    np.put_along_axis(called, choices, 1.0, axis=1)
    both = np.repeat(swaps, len(called), axis=0).astype(np.float64), np.tile(called, (len(swaps), 1))
    yield both[0][1:], both[1][1:]


def count_relabelings(new: int, old: int, shared: int = 0) -> int:
    """Return the number of ways to label clusters new and old, given the number of common clusters."""
    return math.comb(new + old - 2 * shared, new - shared) << shared


def shares_above(totals: Float64s) -> Float64s:
    """Return for each relabeling and statistic the share of relabelings with at least its total [1 + R, K]."""
    shares = np.empty_like(totals)
    for column, out in zip(totals.T, shares.T, strict=True):
        ordered, size = np.sort(column), np.abs(column[np.isfinite(column)]).max(initial=0.0)
        out[:] = 1.0 - np.searchsorted(ordered, column - _ROUNDING * size, side="left") / len(column)
    return shares


def smallest_p_values(shares: Float64s, weights: Sequence[float]) -> Float64s:
    """Return the smallest weighted p-value of several statistics in each relabeling [1 + R] (Westfall and Young 1993).

    The share of relabelings with at most the first value, which is the observed one, is the joint p-value. If a single
    statistic has a p-value of at most its share of the weights times a level, the joint p-value is at most that level.

    Args:
        shares: of each relabeling and statistic [1 + R, K].
        weights: share of the level for each statistic.
    """
    smallest: Float64s = (shares / (np.asarray(weights) / sum(weights))).min(axis=1)
    return smallest
