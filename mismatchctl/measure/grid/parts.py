"""What the sequences of a block are told apart by, and sums and extremes of each part."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Ints
from mismatchctl.measure.table import add_rows

Arrays = dict[str, NDArray[Any]]
_WIDE = 64
"""Points from which rows are wide."""


@dataclass(frozen=True)
class BlockParts:
    """Parts of a block: micro-batches of its cells, or clusters.

    Attributes:
        of: the part of each sequence [S].
        count: how many there are; each has a sequence.
    """

    of: Ints
    count: int

    @classmethod
    def among(cls, rows: Ints) -> tuple[BlockParts, Ints]:
        """Those of sequences that belong to some rows of a table [S], and the row of each [count]."""
        if (rows == rows[0]).all():
            return cls(np.zeros(len(rows), np.int64), 1), rows[:1]
        found, of = np.unique(rows, return_inverse=True)
        return cls(of, len(found)), found

    @cached_property
    def order(self) -> Ints:
        """The sequences, part after part [S]."""
        return np.argsort(self.of, kind="stable")

    @cached_property
    def firsts(self) -> Ints:
        """Where each part begins in that order [count]."""
        return np.searchsorted(self.of[self.order], np.arange(self.count))

    @cached_property
    def members(self) -> list[slice | Ints]:
        """The sequences of each part."""
        if np.all(self.of[1:] >= self.of[:-1]):  # they lie together: nothing need be copied
            ends = [*self.firsts[1:].tolist(), len(self.of)]
            return [slice(*bounds) for bounds in zip(self.firsts.tolist(), ends, strict=True)]
        return [*np.split(self.order, self.firsts[1:])]

    @cached_property
    def alike(self) -> list[tuple[Ints, Ints | slice]]:
        """Parts of as many sequences each together: which parts, and their sequences, part after part."""
        sizes = np.diff(self.firsts, append=len(self.of))
        found = [(np.flatnonzero(sizes == size), np.arange(size)) for size in np.unique(sizes)]
        return [(own, as_slice(self.order[self.firsts[own, None] + places].ravel())) for own, places in found]

    def sum(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values [S, ...] summed over each part [count, ...]."""
        if self.count > 1 and (values[0].size < _WIDE or self.count == len(values)):
            return add_rows(values[self.order], self.firsts)
        found: NDArray[Any] = np.empty((self.count, *values.shape[1:]))
        for row, own in zip(found, self.members, strict=True):  # wide rows stay in the cache
            np.add.reduce(values[own], axis=0, out=row)
        return found

    def largest(self, values: NDArray[Any]) -> NDArray[Any]:
        """The largest of values [S, ...] in each part [count, ...]."""
        return np.maximum.reduceat(values[self.order], self.firsts, axis=0)

    def at(self, sequences: Ints) -> Ints:
        """The part of each of some sequences."""
        return np.zeros(len(sequences), np.int64) if self.count == 1 else self.of[sequences]


def as_slice(places: Ints) -> Ints | slice:
    """Adjacent places as a slice, which copies nothing."""
    adjacent = len(places) > 0 and bool((np.diff(places) == 1).all())
    return slice(int(places[0]), int(places[-1]) + 1) if adjacent else places
