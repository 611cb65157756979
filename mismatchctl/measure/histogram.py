"""Tokens by bucket of their cluster and size of their log ratio, and tokens and K3 by signed log ratio.

Only what holds a token is kept: small groups stay small.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints
from mismatchctl.measure.bins import MAGNITUDES, SIGNED, magnitude_of
from mismatchctl.measure.kernels.kernel import BUCKETS, PairTables

MOST_ROWS = 2 * BUCKETS
"""Rows of the tables that kernels count in, one for each cell and bucket: they stay in the cache beside the tokens."""
_FEW = 1 << 13
"""Places up to which histograms are added by sorting; beyond, in a table of all places."""


@dataclass(frozen=True)
class HistogramRows:
    """What the rows of a kernel's tables stand for.

    Attributes:
        cells: the cell of each row [R], ascending.
        buckets: the bucket of each row [R], ascending within a cell.
    """

    cells: Ints
    buckets: Ints


def _no_places() -> Ints:
    return np.zeros(0, np.int64)


@dataclass(frozen=True)
class Histogram:
    """Sums over tokens, by place.

    Attributes:
        places: bucket * MAGNITUDES + magnitude bin of those that hold a token [N], ascending.
        tokens: how many [N].
        bins: signed bins that hold a token [B], ascending.
        counts: how many [B].
        k3: the sum of their K3 [B].
    """

    places: Ints = field(default_factory=_no_places)
    tokens: NDArray[np.int64] = field(default_factory=_no_places)
    bins: Ints = field(default_factory=_no_places)
    counts: NDArray[np.int64] = field(default_factory=_no_places)
    k3: Float64s = field(default_factory=lambda: np.zeros(0))

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram.together([self, other])

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return 2 * len(self.places) + 3 * len(self.bins)

    @staticmethod
    def together(parts: Sequence[Histogram]) -> Histogram:
        """The sum of one or more, in their order."""
        filled = [own for own in parts if len(own.places)]
        if len(filled) < 2:
            return filled[0] if filled else parts[0]
        return Histogram(
            *_added([(own.places, own.tokens) for own in filled], BUCKETS * MAGNITUDES),
            *_added([(own.bins, own.counts, own.k3) for own in filled], SIGNED),
        )

    def by_bin(self) -> tuple[NDArray[np.int64], Float64s]:
        """Tokens and K3 by signed bin, [SIGNED] each."""
        tokens, k3 = np.zeros(SIGNED, np.int64), np.zeros(SIGNED)
        tokens[self.bins], k3[self.bins] = self.counts, self.k3
        return tokens, k3

    def by_bucket(self) -> tuple[Ints, Float64s]:
        """Magnitude bins that hold a token [M], and tokens by bucket that holds one and by those bins [B, M]."""
        starts = np.arange(BUCKETS + 1) * MAGNITUDES
        sizes = np.diff(np.searchsorted(self.places, starts))  # places ascend, so that nothing need be divided
        buckets, held = np.flatnonzero(sizes), np.zeros(MAGNITUDES, np.bool_)
        held[magnitude_of(self.bins)] = True
        filled, column = np.flatnonzero(held), np.cumsum(held) - 1
        first = np.repeat(starts[buckets], sizes[buckets])
        row = np.repeat(np.arange(len(buckets)) * len(filled), sizes[buckets])
        tokens = np.zeros((len(buckets), len(filled)))
        tokens.reshape(-1)[column[self.places - first] + row] = self.tokens
        return filled, tokens


def _added(parts: Sequence[tuple[NDArray[Any], ...]], size: int) -> list[NDArray[Any]]:
    """Parts are places, of so many in all, and columns there: the places that some part has, and the columns' sums."""
    if sum(len(places) for places, *_ in parts) <= _FEW:
        places, *columns = (np.concatenate(own) for own in zip(*parts, strict=True))
        order = np.argsort(places, kind="stable")
        places = places[order]
        starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
        return [places[starts], *(np.add.reduceat(column[order], starts) for column in columns)]
    tables = [np.zeros(size, column.dtype) for column in parts[0][1:]]
    for places, *columns in parts:
        for table, column in zip(tables, columns, strict=True):
            table[places] += column
    places = np.flatnonzero(tables[0])
    return [places, *(table[places] for table in tables)]


class _Buffers(threading.local):
    """Tables of this thread, all zero between two uses."""

    def __init__(self) -> None:
        self.free: list[tuple[NDArray[np.int32], Float64s]] = []


_BUFFERS = _Buffers()


def table_buffers(rows: HistogramRows) -> PairTables:
    """Tables of zeros with these rows; `histograms_of` gives them back to this thread."""
    cells = np.unique(rows.cells, return_inverse=True)[1]
    if len(cells) > MOST_ROWS:
        return PairTables(cells)
    if not _BUFFERS.free:
        whole = PairTables(np.arange(MOST_ROWS))
        _BUFFERS.free.append((whole.tokens, whole.sums))
    tokens, sums = _BUFFERS.free.pop()
    return PairTables(cells, tokens[: len(cells)], sums[: cells.max(initial=-1) + 1])


def histograms_of(tables: PairTables, rows: HistogramRows) -> dict[int, Histogram]:
    """The histogram of each cell whose rows these are; the tables are zero again afterwards, and lent to the next."""
    tokens, sums = tables.tokens.reshape(-1), tables.sums.reshape(-1, 2)
    places, signed = np.flatnonzero(tokens != 0), np.flatnonzero(sums[:, 0] != 0)  # of flags, in a fifth of the time
    number, (counts, k3) = tokens[places].astype(np.int64), sums.take(signed, axis=0).T
    tokens[places] = 0
    sums.view(np.complex128)[signed] = 0.0
    whole, beside = tables.tokens.base, tables.sums.base
    if whole is not None and beside is not None and len(whole) == MOST_ROWS:
        _BUFFERS.free.append((whole, beside))

    cells, last = np.unique(rows.cells), np.append(np.diff(rows.cells) != 0, True)
    by_row = np.searchsorted(places, np.arange(len(rows.cells) + 1) * MAGNITUDES)
    places += np.repeat((rows.buckets - np.arange(len(rows.cells))) * MAGNITUDES, np.diff(by_row))
    of_rows = np.append(0, by_row[1:][last])
    of_bins = np.searchsorted(signed, np.arange(len(cells) + 1) * SIGNED)
    signed -= np.repeat(np.arange(len(cells)) * SIGNED, np.diff(of_bins))
    counts = counts.astype(np.int64)
    found = {}
    for place, cell in enumerate(cells.tolist()):
        own, within = slice(*of_rows[place : place + 2]), slice(*of_bins[place : place + 2])
        found[cell] = Histogram(places[own], number[own], signed[within], counts[within], k3[within].copy())
    return found
