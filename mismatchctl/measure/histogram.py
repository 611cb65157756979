"""Tokens and K3 by bucket of their cluster and by signed log ratio, of what holds a token: small groups stay small."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints
from mismatchctl.measure.bins import MAGNITUDES, SIGNED
from mismatchctl.measure.kernels.kernel import BUCKETS, PairTables

MOST_ROWS = 2 * BUCKETS
"""Rows of the tables that kernels count in, one for each cell and bucket: they stay in the cache beside the tokens."""
_FEW = 1 << 13
"""Places up to which histograms are added by sorting; beyond, in a table of all places."""


@dataclass(frozen=True)
class Rows:
    """What the rows of a kernel's tables stand for.

    Attributes:
        cells: the cell of each row [R], ascending.
        buckets: the bucket of each row [R], ascending within a cell.
    """

    cells: Ints
    buckets: Ints


@dataclass(frozen=True)
class Histogram:
    """Sums over tokens, by place.

    Attributes:
        places: bucket * SIGNED + signed bin of those that hold a token [N], ascending.
        tokens: how many [N].
        k3: the sum of their K3 [N].
    """

    places: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    tokens: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    k3: Float64s = field(default_factory=lambda: np.zeros(0))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram.together([self, other])

    @staticmethod
    def together(parts: Sequence[Histogram]) -> Histogram:
        """The sum of one or more, in their order."""
        filled = [own for own in parts if len(own.places)]
        if len(filled) < 2:
            return filled[0] if filled else parts[0]
        if sum(len(own.places) for own in filled) <= _FEW:
            places, tokens, k3 = (
                np.concatenate(values) for values in zip(*((o.places, o.tokens, o.k3) for o in filled), strict=True)
            )
            order = np.argsort(places, kind="stable")
            places = places[order]
            starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
            return Histogram(places[starts], np.add.reduceat(tokens[order], starts), np.add.reduceat(k3[order], starts))
        tables = table_buffers(BUCKETS)
        sums = tables.sums.view(np.complex128).reshape(-1)
        for own in filled:
            added = np.empty(len(own.places), np.complex128)
            added.real, added.imag = own.tokens, own.k3
            sums[own.places] += added
        return _emptied(tables)

    def _told_apart(self) -> tuple[Ints, Ints]:
        """The bucket and the signed bin of each place [N]; they ascend, so nothing need be divided."""
        starts = np.arange(BUCKETS + 1) * SIGNED
        bucket = np.repeat(np.arange(BUCKETS), np.diff(np.searchsorted(self.places, starts)))
        return bucket, self.places - starts[bucket]

    def by_bin(self) -> tuple[NDArray[np.int64], Float64s]:
        """Tokens and K3 by signed bin, [SIGNED] each."""
        _, where = self._told_apart()
        tokens = np.bincount(where, self.tokens, SIGNED).astype(np.int64)
        return tokens, np.bincount(where, self.k3, SIGNED).astype(np.float64)

    def magnitudes(self) -> tuple[Ints, Ints, Float64s]:
        """Buckets [B] and magnitude bins [M] that hold a token, and tokens by both [B, M]."""
        bucket, signed = self._told_apart()
        signed -= MAGNITUDES
        buckets, row = _numbered(bucket, BUCKETS)
        filled, column = _numbered(np.where(signed < 0, -1 - signed, signed), MAGNITUDES)
        where, tokens = row * len(filled) + column, self.tokens.astype(np.float64)
        counts: Float64s = np.bincount(where, tokens, len(buckets) * len(filled)).astype(np.float64)
        return buckets, filled, counts.reshape(len(buckets), len(filled))


def _numbered(values: Ints, size: int) -> tuple[Ints, Ints]:
    """Which of 0 .. size - 1 occur, ascending, and the place of each value among them: np.unique without sorting."""
    occurs = np.zeros(size, np.bool_)
    occurs[values] = True
    return np.flatnonzero(occurs), (np.cumsum(occurs) - 1)[values]


class _Buffers(threading.local):
    """Tables of this thread, all zero between two uses."""

    def __init__(self) -> None:
        self.free: list[PairTables] = []


_BUFFERS = _Buffers()


def table_buffers(rows: int) -> PairTables:
    """Tables of zeros with so many rows; `_emptied` gives them back to this thread."""
    if rows > MOST_ROWS:
        return PairTables(rows)
    whole = _BUFFERS.free.pop() if _BUFFERS.free else PairTables(MOST_ROWS)
    return PairTables(rows, whole.sums[:rows])


def _emptied(tables: PairTables) -> Histogram:
    """What the tables hold, with rows for buckets; they are zero again afterwards, and lent to the next who asks."""
    sums = tables.sums.reshape(-1, 2)
    places = np.flatnonzero(sums[:, 0] != 0)  # of flags, it takes a fifth of the time
    tokens, k3 = sums.take(places, axis=0).T  # a seventh of what indexing rows takes, which is why they are zeroed so
    found = Histogram(places, tokens.astype(np.int64), k3.copy())
    sums.view(np.complex128)[places] = 0.0
    whole = tables.sums.base
    if whole is not None and len(whole) == MOST_ROWS:
        _BUFFERS.free.append(PairTables(MOST_ROWS, whole))
    return found


def histograms_of(tables: PairTables, rows: Rows) -> dict[int, Histogram]:
    """The histogram of each cell whose rows these are; the tables are given back."""
    found = _emptied(tables)
    count = len(rows.cells)
    bounds = np.searchsorted(found.places, np.arange(count + 1) * SIGNED)  # of each row
    places = found.places + np.repeat((rows.buckets - np.arange(count)) * SIGNED, np.diff(bounds))
    cells = np.unique(rows.cells)
    ends = bounds[np.searchsorted(rows.cells, cells, side="right")].tolist()
    return {
        cell: Histogram(places[start:end], found.tokens[start:end], found.k3[start:end])
        for cell, start, end in zip(cells.tolist(), [0, *ends[:-1]], ends, strict=True)
    }
