"""Bootstrap intervals and permutation tests over clusters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.core.formatting import INTERVAL_LEVEL
from mismatchctl.measure.sums import Hashes, mix_hashes
from mismatchctl.stats.samples import ClusterSample, TableMetric

REPLICATES = 1 << 15
"""Number of bootstrap replicates. The smallest p-value, 3e-5, allows a few hundred simultaneous comparisons."""
_BITS = 64  # replicates that one 64-bit hash serves
_BLOCK = 1 << 20  # number of weights to draw at once
_SALT = np.uint64(0x6D69736D61746368)


def bootstrap_weights(keys: Hashes, start: int, stop: int) -> Float64s:
    """Draw a weight (0 or 2) per cluster in `keys` for each of the bootstrap replicates `start` to `stop` - 1."""
    first = start // _BITS
    words = mix_hashes(np.arange(first, -(-stop // _BITS), dtype=np.uint64), _SALT)
    hashes = mix_hashes(keys[None, :], words[:, None])
    bits = (hashes[:, None, :] >> np.arange(_BITS, dtype=np.uint64)[None, :, None]) & np.uint64(1)
    drawn = bits.reshape(len(words) * _BITS, len(keys))[start - first * _BITS : stop - first * _BITS]
    return 2 * drawn.astype(np.float64)


def resample_metrics(
    samples: Sequence[ClusterSample], metrics: Sequence[TableMetric], replicates: int = REPLICATES
) -> list[list[Float64s]]:
    """Return bootstrap replicates of each metric in each sample. A cluster has the same random weights in all."""
    every = np.unique(np.concatenate([sample.keys for sample in samples]))
    positions = [[metric.columns(sample) for metric in metrics] for sample in samples]
    wanted = [np.unique(np.concatenate([np.asarray(columns) for columns in rows])) for rows in positions]
    found: list[list[Float64s]] = [[np.empty(replicates) for _ in metrics] for _ in samples]
    size = max(_BLOCK // max(len(every), 1) // _BITS, 1) * _BITS
    for start in range(0, replicates, size):
        stop = min(start + size, replicates)
        drawn = bootstrap_weights(every, start, stop)
        for sample, used, rows, outs in zip(samples, wanted, positions, found, strict=True):
            own = drawn if len(sample) == len(every) else drawn[:, np.searchsorted(every, sample.keys)]
            with np.errstate(all="ignore"):
                sums = own @ sample.sums[:, used]  # all columns at once, because this reads the weights only once
            for metric, columns, out in zip(metrics, rows, outs, strict=True):
                out[start:stop] = metric.evaluate(sums[:, np.searchsorted(used, columns)], sample, columns)
    return found


def percentile_interval(draws: Float64s) -> tuple[float, float] | None:
    """Return the 95% percentile interval of bootstrap replicates, or `None` if more than about 2.5% of them are NaN."""
    ordered = np.sort(draws)  # NaN last
    defined = int(np.count_nonzero(~np.isnan(ordered)))
    place = max(int(round((1 - INTERVAL_LEVEL) / 2 * (len(ordered) + 1), 6)) - 1, 0)
    if defined < len(ordered) - place:
        return None
    return float(ordered[place]), float(ordered[defined - 1 - place])


def p_above_zero(draws: Float64s, flipped: Float64s | None = None) -> float:
    """Test if a number is above 0: return the one-sided p-value from its replicates `draws`. NaN counts as 0."""
    count = len(draws)
    missing = count - int(np.count_nonzero(draws > 0))
    p = (missing + 1) / (count + 1)
    if flipped is None or missing >= _PER_LEVEL or not np.isfinite(flipped).all():
        return p
    return min(p, relabeling_tail(2 * flipped, np.zeros(0), 0, float(flipped.sum())))  # from parts of clusters


def adjust_holm(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the family-wise error rate is controlled (Holm 1979)."""
    values, adjusted, count = np.array(p_values, np.float64), np.zeros(len(p_values)), len(p_values)
    order = np.argsort(values, kind="stable")
    adjusted[order] = np.maximum.accumulate(np.minimum(values[order] * np.arange(count, 0, -1), 1.0))
    return adjusted.tolist()


def adjust_fdr(p_values: Sequence[float]) -> list[float]:
    """Adjust p-values so that the false-discovery rate is controlled (Benjamini and Hochberg 1995)."""
    values, adjusted, count = np.array(p_values, np.float64), np.zeros(len(p_values)), len(p_values)
    order = np.argsort(-values, kind="stable")
    adjusted[order] = np.minimum.accumulate(np.minimum(values[order] * count / np.arange(count, 0, -1), 1.0))
    return adjusted.tolist()


LEAST_RELABELINGS, MOST_RELABELINGS = 1 << 12, 1 << 16
_PER_LEVEL = 5  # draw enough relabelings to expect this number in a tail with probability `level`
_PERMUTATION_BLOCK = 1 << 20  # number of labels to draw at once
_PERMUTATION_SALT = np.uint64(0x7065726D75746564)
_ROUNDING = 1e-9  # totals whose relative difference is smaller count as equal
Labels = NDArray[np.float64]


@dataclass(frozen=True)
class SampleExchange:
    """Permutation test of two samples. Each relabeling is another way to label the clusters "new" and "old"."""

    new: Hashes
    old: Hashes
    level: float = 0.05

    @cached_property
    def pairs(self) -> tuple[Hashes, Ints, Ints]:
        """Return the hashes of common clusters, their indices in `new`, and their indices in `old`."""
        found: tuple[Hashes, Ints, Ints] = np.intersect1d(self.new, self.old, assume_unique=True, return_indices=True)
        return found

    @property
    def common(self) -> int:
        return len(self.pairs[0])

    @property
    def relabelings(self) -> int:
        return count_relabelings(len(self.new), len(self.old), self.common)

    @property
    def least_p(self) -> float:
        return 1 / self.relabelings

    @property
    def _drawn(self) -> int:
        return int(min(max(_PER_LEVEL / self.level, LEAST_RELABELINGS), MOST_RELABELINGS))

    def totals(self, new: Float64s, old: Float64s) -> Float64s:
        """Return sums [1 + R, K] of the new clusters (row 0), and of the clusters that R relabelings call new."""
        seen = new.sum(axis=0, keepdims=True)
        found = [labels @ np.concatenate([new, old]) for labels in self.labels()]
        return np.concatenate([seen, *found])

    def resolve_tails(self, new: Float64s, old: Float64s, shares: Float64s) -> Float64s:
        """Return one-sided p-values: the `shares` of drawn relabelings, or an approximation if they are tiny."""
        found = shares.copy()
        if self.relabelings <= self._drawn:
            return found
        _, first, second = self.pairs
        differences = new[first] - old[second]
        single = np.concatenate([np.delete(new, first, axis=0), np.delete(old, second, axis=0)])
        chosen = len(self.new) - len(first)
        for column in np.flatnonzero(shares * (self._drawn + 1) < _PER_LEVEL).tolist():
            total = differences[:, column].sum() / 2 + single[:chosen, column].sum()
            tail = relabeling_tail(differences[:, column], single[:, column], chosen, float(total))
            found[column] = min(found[column], tail)
        return found

    def two_sided_p_values(self, new: Float64s, old: Float64s) -> Float64s:
        totals = self.totals(new, old)
        tails = [self.resolve_tails(x * new, x * old, shares_above(x * totals)[0]) for x in (1.0, -1.0)]
        found: Float64s = np.minimum(2 * np.minimum(*tails), 1.0)
        return found

    def labels(self) -> Iterator[Labels]:
        """Yield blocks of R relabelings [R, n + m]: 1 (new) or 0 (old) for n clusters of `new` and m of `old`."""
        paired, first, second = self.pairs
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
    """Yield (swaps of `paired`, labels of `single`) of all relabelings except the observed labels."""
    swaps = (np.arange(1 << len(paired))[:, None] >> np.arange(len(paired))) & 1
    listed = list(itertools.combinations(range(len(single)), chosen))
    choices, called = np.array(listed, np.int64).reshape(len(listed), chosen), np.zeros((len(listed), len(single)))
    np.put_along_axis(called, choices, 1.0, axis=1)
    both = np.repeat(swaps, len(called), axis=0).astype(np.float64), np.tile(called, (len(swaps), 1))
    yield both[0][1:], both[1][1:]


def count_relabelings(new: int, old: int, shared: int = 0) -> int:
    """Return how many ways there are to label clusters as new and old. `shared`: number of common clusters."""
    return math.comb(new + old - 2 * shared, new - shared) << shared


_NEWTON_STEPS, _CONVERGED = 60, 1e-10
_TAIL_MARGIN = 3.0  # with ties or few clusters, the approximation is too small by up to this factor


def relabeling_tail(differences: Float64s, single: Float64s, chosen: int, total: float) -> float:
    """Estimate a permutation test's p-value without draws: the share of relabelings with a total of at least `total`.

    A relabeling flips signs of `differences` (new minus old, shared clusters) and labels `chosen` values of `single` as
    new. Total: half the sum of differences plus the new values. Method: saddlepoint approximation (Skovgaard 1987).
    """
    largest = max(np.abs(differences).max(initial=0.0), np.abs(single).max(initial=0.0))
    if not 0 < largest < math.inf:  # also true for NaN
        return 1.0
    half, single, total, size = differences / largest / 2, single / largest, total / largest, len(single)
    log_ways, log_chance, share = len(half) * math.log(2), 0.0, chosen / max(size, 1)
    if not 0 < chosen < size:
        total, single, size = total - (single.sum() if chosen else 0.0), single[:0], 0
    else:
        choices = math.lgamma(size + 1) - math.lgamma(chosen + 1) - math.lgamma(size - chosen + 1)
        log_ways += choices
        log_chance = choices + chosen * math.log(share) + (size - chosen) * math.log1p(-share)
        total, single = total - chosen * single.mean(), single - single.mean()
    spread = math.sqrt(float(half @ half) + share * (1 - share) * float(single @ single))
    if total <= _ROUNDING or spread == 0:
        return 1.0
    exponent, slope, curvature = _find_saddlepoint(
        half / spread, single / spread, chosen if size else 0, total / spread
    )
    bound, w = min(-exponent - log_chance, 0.0), math.sqrt(max(2 * exponent, 0.0))
    if w < _ROUNDING:
        return 1.0
    score = w + math.log(slope * math.sqrt(max(curvature, 1e-300)) / w) / w
    approximate = _TAIL_MARGIN * 0.5 * math.erfc(score / math.sqrt(2))
    return min(1.0, max(min(approximate, math.exp(bound)), math.exp(-log_ways)))  # at most the Chernoff bound


def _find_saddlepoint(half: Float64s, single: Float64s, chosen: int, total: float) -> tuple[float, float, float]:
    """Find the saddlepoint for `relabeling_tail` by Newton's method. Return its exponent, slope and curvature."""
    share = chosen / len(single) if len(single) else 0.5
    logit, unlabelled = math.log(share / (1 - share)), len(single) * math.log1p(-share)

    def derivatives(level: float, slope: float) -> tuple[float, Float64s, Float64s]:
        x, y = slope * half, logit + level + slope * single
        log_odds = np.logaddexp(0.0, y)
        labelled, signs = np.exp(y - log_odds), np.tanh(x)
        either, flips = labelled * (1 - labelled), 1 - signs**2
        generating = log_odds.sum() + unlabelled + (np.logaddexp(x, -x) - math.log(2)).sum()
        gradient = np.array([chosen - labelled.sum(), total - labelled @ single - signs @ half])
        cross = either @ single
        second = np.array([[either.sum(), cross], [cross, either @ single**2 + flips @ half**2]])
        return float(level * chosen + slope * total - generating), gradient, second

    at = np.array([0.0, total])
    exponent, gradient, second = derivatives(*at)
    first = share * (1 - share) * len(single)
    for _ in range(_NEWTON_STEPS):
        if not len(single):
            second[0, 0] = 1.0
        if np.linalg.det(second) < 1e-12 * max(first, 1.0):
            break
        step = np.linalg.solve(second, gradient)
        gain = float(gradient @ step)
        while gain > _CONVERGED:
            tried = at + step
            following = derivatives(*tried)
            if tried[1] > 0 and following[0] > exponent:
                break
            step, gain = step / 2, gain / 2
        else:
            break
        at, (exponent, gradient, second) = tried, following
    determinant = float(np.linalg.det(second))
    return exponent, float(at[1]), determinant / first if first else float(second[1, 1])


def shares_above(totals: Float64s) -> Float64s:
    """For each of the totals [1 + R, K], return the share of its column that is at least as large."""
    shares = np.empty_like(totals)
    for column, out in zip(totals.T, shares.T, strict=True):
        ordered, size = np.sort(column), np.abs(column[np.isfinite(column)]).max(initial=0.0)
        out[:] = 1.0 - np.searchsorted(ordered, column - _ROUNDING * size, side="left") / len(column)
    return shares


def smallest_p_values(shares: Float64s, weights: Sequence[float] | Float64s) -> Float64s:
    """Divide p-values (`shares`) by the weights of their tests. Return each row's minimum (Westfall-Young 1993)."""
    smallest: Float64s = (shares / (np.asarray(weights) / np.sum(weights))).min(axis=1)
    return smallest
