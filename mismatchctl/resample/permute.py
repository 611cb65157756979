"""Permutation tests of clusters: which of them are the new ones, were nothing new about them?

Clusters that one side alone holds change sides, as many as before on either; of a cluster that both hold, the two rows
change places; where the samples overlap in part, both at once. So the level holds whatever the two sizes. Few clusters
are enumerated; of more, who changes sides follows from a hash of the cluster's key and of the replicate's number, so
that neither the order of rows nor any value matters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s
from mismatchctl.measure.table import Hashes, mix

LEAST, MOST = 1 << 12, 1 << 16
"""Relabelings that are drawn: the fewest, and of many checks at once the most."""
_PER_LEVEL = 5  # relabelings beyond what fails, at least
_BLOCK = 1 << 20  # labels drawn at once
_SALT = np.uint64(0x7065726D75746564)
_ROUNDING = 1e-9  # totals that differ by less, of the sum of all sizes, are equal
Labels = NDArray[np.float64]


@dataclass(frozen=True)
class Exchange:
    """Who can change sides between a new and an old sample.

    Attributes:
        new, old: keys of the clusters of either.
        level: what a p-value is to be told from.
    """

    new: Hashes
    old: Hashes
    level: float = 0.05

    @property
    def shared(self) -> int:
        """Clusters that both hold."""
        return len(np.intersect1d(self.new, self.old, assume_unique=True))

    @property
    def possible(self) -> int:
        """How many relabelings there are, the one that was seen included."""
        return relabelings(len(self.new), len(self.old), self.shared)

    @property
    def least_p(self) -> float:
        """The smallest p-value that any data could have."""
        return 1 / min(self.possible, self._drawn + 1)

    @property
    def _drawn(self) -> int:
        return int(min(max(_PER_LEVEL / self.level, LEAST), MOST))

    def totals(self, new: Float64s, old: Float64s) -> Float64s:
        """What the rows that are called new come to [1 + R, K], first as it was seen.

        Args:
            new: values of the clusters of the new sample [n, K].
            old: the same of the old one [m, K].
        """
        seen = new.sum(axis=0, keepdims=True)
        found = [labels @ np.concatenate([new, old]) for labels in self.labels()]
        return np.concatenate([seen, *found])

    def labels(self) -> Iterator[Labels]:
        """Weights of the rows, new ones first [R, n + m]: 1 for those called new."""
        paired, first, second = np.intersect1d(self.new, self.old, assume_unique=True, return_indices=True)
        every = np.arange(len(self.new) + len(self.old))
        rows = np.delete(every, np.concatenate([first, len(self.new) + second]))
        single = np.concatenate([self.new, self.old])[rows]
        chosen = len(self.new) - len(paired)
        parts = _enumerated if self.possible <= self._drawn else self._hashed
        for swapped, called in parts(paired, single, chosen):
            labels = np.zeros((len(swapped), len(self.new) + len(self.old)))
            labels[:, first], labels[:, len(self.new) + second] = 1.0 - swapped, swapped
            labels[:, rows] = called
            yield labels

    def _hashed(self, paired: Hashes, single: Hashes, chosen: int) -> Iterator[tuple[Labels, Labels]]:
        size = max(_BLOCK // max(len(paired) + len(single), 1), 1)
        for start in range(0, self._drawn, size):
            words = mix(np.arange(start, min(start + size, self._drawn), dtype=np.uint64), _SALT)
            swapped = (mix(paired[None, :], words[:, None]) >> np.uint64(63)).astype(np.float64)
            called = np.zeros((len(words), len(single)))
            if 0 < chosen < len(single):
                places = np.argpartition(mix(single[None, :], words[:, None]), chosen - 1, axis=1)[:, :chosen]
                np.put_along_axis(called, places, 1.0, axis=1)
            elif chosen:
                called[:] = 1.0
            yield swapped, called


def _enumerated(paired: Hashes, single: Hashes, chosen: int) -> Iterator[tuple[Labels, Labels]]:
    """Every relabeling but the one that was seen, which comes first of all."""
    swaps = (np.arange(1 << len(paired))[:, None] >> np.arange(len(paired))) & 1
    listed = list(itertools.combinations(range(len(single)), chosen))
    choices, called = np.array(listed, np.int64).reshape(len(listed), chosen), np.zeros((len(listed), len(single)))
    np.put_along_axis(called, choices, 1.0, axis=1)
    both = np.repeat(swaps, len(called), axis=0).astype(np.float64), np.tile(called, (len(swaps), 1))
    yield both[0][1:], both[1][1:]


def relabelings(new: int, old: int, shared: int = 0) -> int:
    """How many ways there are to call so many clusters new and old, given how many both samples hold."""
    return math.comb(new + old - 2 * shared, new - shared) << shared


def shares_above(totals: Float64s) -> Float64s:
    """For each relabeling and statistic, the share of relabelings that come to as much or more [1 + R, K]."""
    shares = np.empty_like(totals)
    for column, out in zip(totals.T, shares.T, strict=True):
        ordered, size = np.sort(column), np.abs(column[np.isfinite(column)]).max(initial=0.0)
        out[:] = 1.0 - np.searchsorted(ordered, column - _ROUNDING * size, side="left") / len(column)
    return shares


def smallest_of_family(shares: Float64s, weights: Sequence[float]) -> Float64s:
    """The smallest weighted p-value of several statistics in each relabeling [1 + R] (Westfall and Young 1993).

    How many of them are at most the first, which was seen, is the p-value of all statistics together. Where one's own
    p-value is at most its share of the weights times a level, that is at most the level.

    Args:
        shares: of each relabeling and statistic [1 + R, K].
        weights: what share of the level each statistic is given.
    """
    smallest: Float64s = (shares / (np.asarray(weights) / sum(weights))).min(axis=1)
    return smallest
