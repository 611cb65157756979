"""Percentile cluster bootstrap over random halves: in each replicate a cluster weighs 2 or 0, either with chance 1/2.

Such halves are exact for symmetric errors however few the clusters are (typical values, Hartigan 1969; of paired
differences it is the sign-flip test), where drawing with replacement fails too often. The weight comes from the
cluster's key and the number of the replicate. So the order of rows cannot matter, a cluster that two samples hold
weighs the same in both (they are paired, as far as they overlap), and no weight depends on a value: every replicate of
a mean is monotone in every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure.table import Hashes, mix
from mismatchctl.resample.samples import ClusterSample, TableMetric

REPLICATES = 1 << 15
"""Enough to resolve what a few hundred comparisons at once ask for."""
_BITS = 64  # one hash serves so many replicates
_BLOCK = 1 << 20  # weights drawn at once
_SALT = np.uint64(0x6D69736D61746368)


def weights(keys: Hashes, start: int, stop: int) -> Float64s:
    """Weights of clusters in replicates `start` to `stop` [stop - start, N]: 0 or 2."""
    first = start // _BITS
    words = mix(np.arange(first, -(-stop // _BITS), dtype=np.uint64), _SALT)
    hashes = mix(keys[None, :], words[:, None])
    bits = (hashes[:, None, :] >> np.arange(_BITS, dtype=np.uint64)[None, :, None]) & np.uint64(1)
    drawn: Float64s = bits.reshape(len(words) * _BITS, len(keys))[start - first * _BITS : stop - first * _BITS].astype(
        np.float64
    )
    return 2 * drawn


@dataclass(frozen=True)
class Draws:
    """A number, and what it becomes in each replicate [R]; arithmetic acts on all of them alike."""

    value: float
    resampled: Float64s

    def __add__(self, other: Draws | float) -> Draws:
        value, resampled = _operands(other)
        return Draws(self.value + value, self.resampled + resampled)

    def __sub__(self, other: Draws | float) -> Draws:
        value, resampled = _operands(other)
        return Draws(self.value - value, self.resampled - resampled)

    def __mul__(self, factor: float) -> Draws:
        return Draws(self.value * factor, self.resampled * factor)

    def __truediv__(self, other: Draws) -> Draws:
        with np.errstate(all="ignore"):
            return Draws(float(np.float64(self.value) / other.value), self.resampled / other.resampled)

    def __neg__(self) -> Draws:
        return self * -1.0

    def __abs__(self) -> Draws:
        return Draws(abs(self.value), np.abs(self.resampled))


def _operands(other: Draws | float) -> tuple[float, Float64s | float]:
    return (other.value, other.resampled) if isinstance(other, Draws) else (other, other)


def resample(
    samples: Sequence[ClusterSample], metrics: Sequence[TableMetric], replicates: int = REPLICATES
) -> list[list[Draws]]:
    """Each metric of each sample, all in the same replicates: `[sample][metric]`; NaN where it is undefined.

    Raises:
        DataError: a sample lacks a column of a metric.
    """
    every = np.unique(np.concatenate([sample.keys for sample in samples]))
    positions = [[metric.columns(sample) for metric in metrics] for sample in samples]
    wanted = [np.unique(np.concatenate([np.asarray(columns) for columns in rows])) for rows in positions]
    found = [[np.empty(replicates) for _ in metrics] for _ in samples]
    size = max(_BLOCK // max(len(every), 1) // _BITS, 1) * _BITS
    for start in range(0, replicates, size):
        stop = min(start + size, replicates)
        drawn = weights(every, start, stop)
        for sample, used, rows, outs in zip(samples, wanted, positions, found, strict=True):
            own = drawn if len(sample) == len(every) else drawn[:, np.searchsorted(every, sample.keys)]
            sums = _product(own, sample.sums[:, used])  # all at once: the weights are read once, not for every metric
            for metric, columns, out in zip(metrics, rows, outs, strict=True):
                out[start:stop] = metric.of(sums[:, np.searchsorted(used, columns)], sample, columns)
    return [
        [
            Draws(float(metric.of(sample.sums[:, columns].sum(axis=0), sample, columns)), out)
            for metric, columns, out in zip(metrics, rows, outs, strict=True)
        ]
        for sample, rows, outs in zip(samples, positions, found, strict=True)
    ]


def _product(drawn: Float64s, sums: Float64s) -> Float64s:
    with np.errstate(all="ignore"):
        product: Float64s = drawn @ sums
    return product


def interval(draws: Draws, level: float = 0.90) -> tuple[float, float] | None:
    """The percentile interval of that level; None where too few replicates are defined."""
    ordered = np.sort(draws.resampled)  # NaN last
    defined = int(np.count_nonzero(~np.isnan(ordered)))
    place = max(int(round((1 - level) / 2 * (len(ordered) + 1), 6)) - 1, 0)
    if defined < len(ordered) - place:
        return None
    return float(ordered[place]), float(ordered[defined - 1 - place])


def p_above_zero(draws: Draws) -> float:
    """One-sided p-value of a number above zero; replicates in which it is undefined count as not above."""
    count = len(draws.resampled)
    above = int(np.count_nonzero(draws.resampled > 0))
    return (count - above + 1) / (count + 1)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values adjusted so that one below a level means an error in all of them together below it (Holm 1979)."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted
