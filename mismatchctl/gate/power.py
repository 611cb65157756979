"""What a dump could have found: from the null distribution that judges.

Were nothing new about the dump, it would be chance which clusters are the new ones. So dumps that could have been are
drawn from the clusters of both samples; the new ones' K3 of every token is made so many times as large, or any other
metric; and they are judged as the gate judges, by all statistics at once. A rise counts as found where four of five
fail. Relabelings are stood for by Student's t of each statistic, their family by draws in which who is new is chance.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.gate.comparison import (
    BULK,
    Statistic,
    enough_to_decide,
    is_layered,
    layers_of,
    linear,
    lost_counts,
    of_k3,
    rise_within_bins,
)
from mismatchctl.gate.rules import Allowance
from mismatchctl.measure.layers import CAPPED
from mismatchctl.measure.metrics.intervals import t_quantile
from mismatchctl.resample import ClusterSample, Layers, TableMetric, relabelings

LEAST_CLUSTERS = 5
"""Of fewer clusters, no random half can say anything at the usual level."""
POWER = 0.8
"""A regression counts as found when so many of such dumps would have failed."""
_HOPELESS = 100.0  # a factor that nobody would call a regression to be found
_DRAWS = 1024
_FEW = 64  # clusters on a side; of more, neighbours by hash are added up, which means hardly feel
_RESOLVED = 0.01  # level that the draws tell; at a stricter one, the family's share of it is taken to be the same
_SEED = 20251122  # fixed: the same sums give the same answer
_UNLUCKY = NormalDist().inv_cdf(POWER)
_LOST = 3  # place of lost tokens among the statistics


@dataclass(frozen=True)
class Sizes:
    """Clusters of two dumps, of which both hold some."""

    new: int
    old: int
    shared: int = 0

    def over(self, fold: int) -> Sizes:
        """So many clusters of each as one."""
        shared = round(self.shared / fold)
        singles = (round((each - self.shared) / fold) for each in (self.new, self.old))
        new, old = (shared + each for each in singles)
        return Sizes(new, old, shared)

    def fold(self, known: int) -> int:
        """How many clusters can be added up, given how many are known of the smaller side."""
        return max(min(self.new, self.old, known) // _FEW, 1)

    @property
    def least_p(self) -> float:
        """The smallest p-value that any data could have."""
        return 0.0 if min(self.new, self.old) >= _FEW else 1 / relabelings(self.new, self.old, self.shared)


@dataclass(frozen=True)
class Population:
    """Clusters of both samples, whichever dump they came from; those that both hold first, in the same order.

    Attributes:
        sample: of all [P].
        shared: how many both hold: the first so many, and their counterparts from `second` on.
        second: where those of the baseline begin.
        fold: how many clusters each of these stands for.
    """

    sample: ClusterSample
    shared: int = 0
    second: int = 0
    fold: int = 1

    @classmethod
    def of(cls, sample: ClusterSample, baseline: ClusterSample | None = None, fold: int = 1) -> Population:
        """Without a baseline, of one sample alone; so many clusters of each added up."""
        if baseline is None:
            return cls(_sample(sample.names, _folded(sample.sums, fold)), fold=fold)
        names = [name for name in sample.names if name in baseline.columns]
        _, *places = np.intersect1d(sample.keys, baseline.keys, assume_unique=True, return_indices=True)
        blocks = []
        for each, place in zip((sample, baseline), places, strict=True):
            sums = each.sums[:, [each.columns[name] for name in names]]
            blocks += [_folded(sums[place], fold), _folded(np.delete(sums, place, axis=0), fold)]
        return cls(_sample(names, np.concatenate(blocks)), len(blocks[0]), len(blocks[0]) + len(blocks[1]), fold)


def _sample(names: Sequence[str], sums: Float64s) -> ClusterSample:
    return ClusterSample(np.arange(len(sums), dtype=np.uint64), tuple(names), sums)


def _folded(sums: Float64s, fold: int) -> Float64s:
    starts = np.arange(0, len(sums), fold)
    return np.add.reduceat(sums, starts, axis=0) if len(sums) else sums


@dataclass(frozen=True)
class _ClusterValues:
    """What each cluster has in each statistic [P, K], were it new and its metric a factor as large, or were it old."""

    new: Float64s
    old: Float64s
    shares: Float64s
    lost: tuple[Float64s, Float64s] | None = None


Planted = Callable[[float], _ClusterValues]


def planted(population: Population, metric: TableMetric, allowance: Allowance) -> Planted | None:
    """The values by what the metric is multiplied with; None where it is not positive."""
    sample = population.sample
    layers = Layers.of(sample) if is_layered(metric, lower=False) else None
    columns = metric.columns(sample)
    value = float(metric.of(sample.sums[:, columns].sum(axis=0), sample, columns))
    if not (math.isfinite(value) and value > 0):
        return None
    of_new = population.second
    if layers is None:
        return lambda factor: _values([linear(sample, sample, metric, allowance, planted=factor)], of_new)
    known = layers
    if not np.isfinite(known.k3).all():
        return None

    def of(factor: float) -> _ClusterValues:
        risen = known.scaled(factor)
        first, second = (np.minimum(each, 1.0) for each in lost_counts(risen, known))
        return _values(of_k3(risen, known, allowance, level=1.0), of_new, (first, second))

    return of


def _values(
    statistics: Sequence[Statistic], of_new: int, lost: tuple[Float64s, Float64s] | None = None
) -> _ClusterValues:
    new, old = (np.stack(each, axis=1) for each in zip(*((one.new, one.old) for one in statistics), strict=True))
    weights = np.array([statistic.weight for statistic in statistics])
    return _ClusterValues(_level(new, of_new), _level(old, of_new), weights / weights.sum(), lost)


def _level(values: Float64s, of_new: int) -> Float64s:
    """Without what the new sample has risen by: as noisy as they are, but about what the baseline's come to."""
    blocks = [each for each in (values[:of_new], values[of_new:]) if len(each)]
    middle = blocks[-1].mean(axis=0)
    return np.concatenate([middle + _noise(each) for each in blocks])


def _noise(values: Float64s) -> Float64s:
    """Deviations from the mean, larger by what so few clusters as count in effect are likely to hide of them."""
    size, apart = len(values), values - values.mean(axis=0)
    with np.errstate(all="ignore"):
        effective = np.sum(apart**2, axis=0) ** 2 / np.sum(apart**4, axis=0)
    hidden = t_quantile(_UNLUCKY, np.maximum(np.nan_to_num(effective) - 1, 1)) / _UNLUCKY
    found: Float64s = apart * hidden * math.sqrt(size / max(size - 1, 1))
    return found


def power(values: _ClusterValues, population: Population, sizes: Sizes, level: float) -> float:
    """The share of dumps of such sizes that fail."""
    drawn = sizes.over(population.fold)
    rows, pairs = len(values.new), np.arange(population.shared)
    ways = np.concatenate([pairs, pairs + population.second]), np.concatenate([pairs + population.second, pairs])
    mixed = np.concatenate([values.new, values.old])
    held = None if values.lost is None else np.concatenate(values.lost)
    apart = values.new[ways[0]] - values.old[ways[1]]
    both = None if values.lost is None else values.lost[0][ways[0]] + values.lost[1][ways[1]]
    risen, plain = np.arange(rows), rows + np.arange(rows)
    chance = drawn.new / max(drawn.new + drawn.old, 1)
    seen = _told(apart, both, mixed, held, drawn, level, _uniform(rows, risen), _uniform(rows, plain))
    either = tuple(np.repeat([chance / rows, (1 - chance) / rows], rows).tolist())
    back = None if both is None else np.tile(both, 2)
    null = _told(np.concatenate([apart, -apart]), back, mixed, held, drawn, level, either, either)
    critical = _critical(null, values.shares, sizes.least_p, max(level, _RESOLVED)) / max(level, _RESOLVED) * level
    return float(np.mean((seen >= _limits(critical * values.shares, sizes.least_p)).any(axis=1)))


def _uniform(rows: int, places: np.ndarray) -> tuple[float, ...]:
    found = np.zeros(2 * rows)
    found[places] = 1 / rows
    return tuple(found.tolist())


def _told(
    apart: Float64s, both: Float64s | None, mixed: Float64s, held: Float64s | None, sizes: Sizes, level: float,
    new: tuple[float, ...], old: tuple[float, ...],
) -> Float64s:  # fmt: skip
    """How far each statistic is from chance, as a normal number, in each draw [_DRAWS, K].

    Args:
        apart: of what both hold, how far the one is from the other [W, K].
        both: how many of the two hold lost tokens [W].
        mixed: clusters as new ones, then as old ones [2 P, K].
        held: which of those hold lost tokens [2 P].
        sizes: how many are drawn.
        level: at which lost tokens have to decide.
        new: chance of each of `mixed` to be drawn as a new one.
        old: the same as an old one.
    """
    n, m = sizes.new - sizes.shared, sizes.old - sizes.shared
    total = spread = np.zeros((_DRAWS, mixed.shape[1]))
    holding, degrees = np.zeros(_DRAWS), sizes.shared - 1
    if sizes.shared:
        counts = _counts(sizes.shared, (1 / len(apart),) * len(apart), 0)
        total, spread = counts @ apart / 2, counts @ apart**2 / 4
        holding = holding if both is None else counts @ both
    if n and m:
        first, second = _counts(n, new, 1), _counts(m, old, 2)
        sums, square = (first @ mixed, second @ mixed), (first + second) @ mixed**2
        variance = (square - (sums[0] + sums[1]) ** 2 / (n + m)) / (n + m - 1)
        total = total + n * m / (n + m) * (sums[0] / n - sums[1] / m)
        spread = spread + n * m / (n + m) * variance
        holding = holding if held is None else holding + (first + second) @ held
        degrees += n + m - 1
    with np.errstate(all="ignore"):
        share = np.minimum(np.nan_to_num(total**2 / spread) / (degrees + 1), 1 - 1e-12)
    bend = (8 * degrees + 1) / (8 * degrees + 3)  # Student's t as a normal number: Wallace 1959
    found: Float64s = np.sign(total) * np.sqrt(-degrees * np.log1p(-share)) * bend
    if held is not None:
        found[np.rint(holding) < enough_to_decide(sizes.new, sizes.old, level), _LOST] = -np.inf
    return found


@lru_cache(maxsize=8)
def _counts(size: int, chances: tuple[float, ...], salt: int) -> Float64s:
    """How often each is drawn [_DRAWS, len(chances)]."""
    return np.random.default_rng([_SEED, salt]).multinomial(size, chances, _DRAWS).astype(np.float64)


def _limits(shares: Float64s, least_p: float) -> Float64s:
    """From where on each statistic fails, given its share of the level."""
    normal = NormalDist()
    return np.array([-normal.inv_cdf(min(share, 0.5)) if share >= least_p else math.inf for share in shares])


def _critical(null: Float64s, shares: Float64s, least_p: float, level: float) -> float:
    """The weighted p-value at which a statistic fails, that the family may in so many of the null's draws."""
    low, high = level, 1.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        failing = float(np.mean((null >= _limits(middle * shares, least_p)).any(axis=1)))
        low, high = (middle, high) if failing <= level else (low, middle)
    return low


def detectable(
    sample: ClusterSample,
    baseline: ClusterSample,
    metric: TableMetric,
    allowance: Allowance,
    level: float,
    *,
    risen: bool = False,
) -> float | None:
    """The smallest factor on the baseline's value that four of five such dumps fail at; None where none does.

    Args:
        sample: a dump.
        baseline: what it is compared with.
        metric: what of them.
        allowance: how much it may rise.
        level: of the check.
        risen: whether it is known to have risen: what made its K3 larger made it scatter more, and is taken back.
    """
    sample = _calmed(sample, baseline, metric) if risen else sample
    sizes = Sizes(len(sample), len(baseline), sample.shared(baseline))
    population = Population.of(sample, baseline, sizes.fold(min(len(sample), len(baseline))))
    made = planted(population, metric, allowance)
    if made is None or sizes.least_p > level:
        return None
    of = made
    return _first(lambda factor: power(of(factor), population, sizes, level) >= POWER, 1.0, _HOPELESS)


def _calmed(sample: ClusterSample, baseline: ClusterSample, metric: TableMetric) -> ClusterSample:
    """The sample with the K3 of every token divided by what that of most tokens (the bulk) has risen by."""
    layers = layers_of(sample, baseline, metric, lower=False)
    if layers is None:
        return sample
    new, old = layers

    def is_calm(by: float) -> bool:
        return not rise_within_bins(new.scaled(1 / by), old, old.cap(BULK)) > 1

    rise = None if is_calm(1.0) else _first(is_calm, 1.0, _HOPELESS)
    if rise is None:
        return sample
    calm, sums = new.scaled(1 / rise), sample.sums.copy()
    sums[:, sample.columns["k3"]] = calm.k3
    sums[:, [sample.columns[name] for name in CAPPED]] = calm.capped.reshape(len(sample), -1)
    return replace(sample, sums=sums)


def _first(found: Callable[[float], bool], low: float, most: float) -> float | None:
    """The smallest number that something holds for, to a part in two hundred; it holds for all that are larger."""
    high = low * 2
    while not found(high):
        low, high = high, high * 2
        if high > most:
            return None
    while high / low > 1.005:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if found(middle) else (middle, high)
    return high


def least_clusters(level: float, baseline: int | None = None) -> int:
    """How many clusters it takes that some data could fail: pairs, or against so many others of a baseline."""
    size = 1
    while 1 / (1 << size if baseline is None else relabelings(size, baseline)) > level:
        size += 1
    return size
