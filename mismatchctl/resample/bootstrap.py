"""Percentile cluster bootstrap: weights are fixed, drawn from the cluster's key and the number of the replicate.

So the order of rows cannot matter, a cluster that two samples hold weighs the same in both (they are paired, as far as
they common), and no weight depends on a value: every replicate of a mean is monotone in every value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.resample.samples import Sample, TableMetric
from mismatchctl.sums.clusters import Hashes, mix

REPLICATES = 1 << 15
"""Enough to resolve what a few hundred comparisons at once ask for."""
_BLOCK = 1 << 20  # weights drawn at once
_SALT = np.uint64(0x6D69736D61746368)
_NORMAL = NormalDist()


def weights(keys: Hashes, start: int, stop: int) -> Float64s:
    """Weights of clusters in replicates `start` to `stop` [stop - start, N]: exponential, of mean 1 (Rubin 1981)."""
    replicates = mix(np.arange(start, stop, dtype=np.uint64), _SALT)
    drawn = mix(keys[None, :], replicates[:, None]) >> np.uint64(11)
    weighed: Float64s = -np.log((drawn.astype(np.float64) + 0.5) * 2.0**-53)
    return weighed


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
    samples: Sequence[Sample], metrics: Sequence[TableMetric], replicates: int = REPLICATES
) -> list[list[Draws]]:
    """Each metric of each sample, all in the same replicates: `[sample][metric]`; NaN where it is undefined.

    Raises:
        DataError: a sample lacks a column of a metric.
    """
    every = np.unique(np.concatenate([sample.keys for sample in samples]))
    positions = [[metric.columns(sample) for metric in metrics] for sample in samples]
    found = [[np.empty(replicates) for _ in metrics] for _ in samples]
    size = max(_BLOCK // max(len(every), 1), 1)
    for start in range(0, replicates, size):
        stop = min(start + size, replicates)
        drawn = weights(every, start, stop)
        for sample, rows, outs in zip(samples, positions, found, strict=True):
            own = drawn if len(sample) == len(every) else drawn[:, np.searchsorted(every, sample.keys)]
            for metric, columns, out in zip(metrics, rows, outs, strict=True):
                out[start:stop] = metric.of(_product(own, sample.sums[:, columns]), sample, columns)
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


@dataclass(frozen=True)
class Design:
    """How far clusters are few: what their number alone says of a comparison, never their values.

    A percentile interval of few clusters is too short: replicates spread less than samples do, and their spread is
    itself uncertain. The level is widened as Hesterberg (2015) proposes, by Student's t and by the lost variance.

    Attributes:
        degrees: degrees of freedom.
        inflation: standard deviation of samples over that of replicates.
    """

    degrees: float
    inflation: float

    @classmethod
    def of(cls, samples: Sequence[Sample]) -> Design:
        """Of a comparison of samples: paired where all hold the same clusters."""
        counts = [len(sample) for sample in samples]
        paired = all(np.array_equal(samples[0].keys, sample.keys) for sample in samples[1:])
        common = len(np.unique(np.concatenate([sample.keys for sample in samples]))) < sum(counts)
        return cls.of_counts(counts[:1] if paired else [min(counts)] if common else counts)

    @classmethod
    def of_counts(cls, counts: Sequence[int]) -> Design:
        """Of independent samples of so many clusters each, alike in their spread (Welch, Satterthwaite)."""
        n = np.maximum(np.asarray(counts, np.float64), 2.0)
        degrees = np.sum(1 / n) ** 2 / np.sum(1 / (n * n * (n - 1)))
        inflation = np.sqrt(np.sum(1 / n) / np.sum((n - 1) / (n * (n + 1))))
        return cls(float(degrees), float(inflation))

    def share(self, tail: float) -> float:
        """The share of replicates to leave out so that `tail` of samples are left out; both below 1/2."""
        z = -_NORMAL.inv_cdf(tail)
        factor = (8 * self.degrees + 3) / (8 * self.degrees + 1)  # Wallace 1959: normal to t
        t = np.sqrt(self.degrees * np.expm1((factor * z) ** 2 / self.degrees))
        return _NORMAL.cdf(-float(t) * self.inflation)

    def tail(self, share: float) -> float:
        """The inverse of `share`, for any share between 0 and 1: a p-value."""
        t = _NORMAL.inv_cdf(share) / self.inflation
        factor = (8 * self.degrees + 1) / (8 * self.degrees + 3)
        z = factor * np.sqrt(self.degrees * np.log1p(t * t / self.degrees))
        return _NORMAL.cdf(float(np.copysign(z, t)))
