"""Cluster tables: one row of sums and extremes per cluster, and the hashes that identify clusters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.measure.columns import MISMATCH_NAME

Hashes = NDArray[np.uint64]
KeyT = TypeVar("KeyT")
PartT = TypeVar("PartT")

GROUP_CAP = 4096
"""Clusters of a group that are kept apart; beyond, they are folded by their hash."""
OVERALL_CAP = 1024
"""Rows, one per cluster and group, that are kept apart of a whole run."""
DETAILED_CAP = 1 << 14
"""The same where every cluster is wanted."""

_WIDE = 512  # columns beyond which `reduceat`, which goes along each, is slower than adding whole rows
_SHORT = 32  # rows of a sum up to which it is faster to add the first of each, then the second, ...


def hash_values(values: NDArray[Any]) -> Hashes:
    """A 64-bit hash of each value, the same on every machine; 5 and "5" hash alike."""
    texts, codes = find_distinct(values)
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts.tolist())
    return np.frombuffer(digests, "<u8").astype(np.uint64)[codes]


def find_distinct(values: NDArray[Any]) -> tuple[NDArray[np.str_], Ints]:
    """The distinct values as text, ascending, and which of them each is [S]; few numbers are turned into text."""
    if values.dtype.kind not in "iu":
        texts, codes = np.unique(values.astype(str), return_inverse=True)
        return texts, codes
    distinct, numbers = np.unique(values, return_inverse=True)
    texts, codes = np.unique(distinct.astype(str), return_inverse=True)
    return texts, codes[numbers]


def mix_hashes(hashes: Hashes, salt: np.uint64 | Hashes) -> Hashes:
    """Combine hashes with a salt (splitmix64 finalizer); the two are not interchangeable."""
    with np.errstate(over="ignore"):
        x = (hashes * np.uint64(0xD1342543DE82EF95) ^ salt) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def hash_content(columns: list[Float64s]) -> Hashes:
    """A hash of each row of float columns, for sequences that nothing names."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = mix_hashes(hashes, (column + 0.0).view(np.uint64))
    return hashes


def add_rows(rows: Float64s, starts: Ints) -> Float64s:
    """Sums of `rows` [S, ...] from each start to the next, [len(starts), ...]."""
    if len(starts) == len(rows):
        return rows
    sizes = np.diff(np.append(starts, len(rows)))
    if sizes.max() <= _SHORT:
        sums = rows[starts]
        for place in range(1, int(sizes.max())):
            more = np.flatnonzero(sizes > place)
            sums[more] += rows[starts[more] + place]
        return sums
    if rows[0].size < _WIDE:
        return np.add.reduceat(rows, starts, axis=0)
    result, stops = np.empty((len(starts), *rows.shape[1:])), [*starts[1:].tolist(), len(rows)]
    for row, start, stop in zip(result, starts.tolist(), stops, strict=True):
        np.add.reduce(rows[start:stop], axis=0, out=row)
    return result


def take_rows(table: Float64s, order: Ints) -> Float64s:
    """Rows of a table [R, K] in an order, each column in one piece."""
    return table.T.take(order, axis=1).T


def merge_rows(sums: Float64s, maxima: Float64s, order: Ints, first: Bools) -> tuple[Float64s, Float64s]:
    """Rows [R, ...] in an order, from each marked as a first [R] to the next: their sums, and the largest of them.

    Of a table with more rows than columns each column is in one piece, and no row is moved before it is added.
    """
    starts = np.flatnonzero(first)
    if len(sums) <= sums.shape[1]:
        return add_rows(sums[order], starts), np.maximum.reduceat(maxima[order], starts, axis=0)
    if len(starts) == len(first):
        return take_rows(sums, order), take_rows(maxima, order)
    added, largest = np.empty((sums.shape[1], len(starts))), np.empty((maxima.shape[1], len(starts)))
    where = np.cumsum(first) - 1
    few = np.bincount(where).max() <= _SHORT or sums.shape[1] >= _WIDE  # one by one, as `add_rows` adds them
    for column, result in zip(sums.T, added, strict=True):
        result[:] = np.bincount(where, column[order]) if few else np.add.reduceat(column[order], starts)
    for column, result in zip(maxima.T, largest, strict=True):
        np.maximum.reduceat(column[order], starts, out=result)
    return added.T, largest.T


def merge_parts(
    some: Mapping[KeyT, PartT], more: Mapping[KeyT, PartT], add: Callable[[PartT, PartT], PartT] = add
) -> dict[KeyT, PartT]:
    """What two parts have by key, added up where both have it; keys in the order in which they first occur."""
    return {**some, **more} | {key: add(some[key], part) for key, part in more.items() if key in some}


ColumnSubject = str | int
"""What a column is of: a pair of policies, or a correction by its number."""


@dataclass(frozen=True)
class TableAxis:
    """The names along the columns of a table.

    Attributes:
        names: what each is of, and its own name there.
    """

    names: tuple[tuple[ColumnSubject, str], ...]

    @cached_property
    def _places(self) -> dict[tuple[ColumnSubject, str], int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _titled(self) -> dict[str, int]:
        """Columns of pairs as others name them: drift_square."""
        return {f"{of}_{name}": place for (of, name), place in self._places.items() if isinstance(of, str)}

    def __len__(self) -> int:
        return len(self.names)

    def place(self, of: ColumnSubject, name: str) -> int:
        """The place of a column of a pair or correction; else of the mismatch's, else of the pair that it begins with.

        Raises:
            KeyError: none has it.
        """
        for found in (self._places.get((of, name)), self._places.get((MISMATCH_NAME, name))):
            if found is not None:
                return found
        return self._titled[name]

    def own(self, of: ColumnSubject) -> dict[str, int]:
        """The columns of a pair or correction alone: name -> place."""
        return {name: place for (owner, name), place in self._places.items() if owner == of}


@dataclass(frozen=True)
class ClusterTable:
    """Rows of sums by (cluster, scope), sorted; a scope is a micro-batch where weights are normalized within one.

    Every formula goes along columns: each lies in one piece.

    Attributes:
        clusters: hash of the cluster of each row [R].
        scopes: hash of the micro-batch of each row [R]; 0 where that does not matter.
        sums: additive columns [R, K].
        maxima: columns of which the largest counts [R, E]; a minimum is the maximum of the negative.
        is_folded: whether a row may stand for several clusters.
    """

    clusters: Hashes
    scopes: Hashes
    sums: Float64s
    maxima: Float64s
    is_folded: bool = False

    @classmethod
    def of(
        cls, clusters: Hashes, scopes: Hashes, sums: Float64s, maxima: Float64s, is_folded: bool = False
    ) -> ClusterTable:
        """Add up rows of the same cluster and scope, in the order given."""
        if not len(clusters):
            return cls(clusters, scopes, sums, maxima, is_folded)
        order, first = _sorted(scopes, clusters)
        firsts = order[first]
        sums, maxima = merge_rows(sums, maxima, order, first)
        return cls(clusters[firsts], scopes[firsts], sums, maxima, is_folded)

    def __add__(self, other: ClusterTable) -> ClusterTable:
        return ClusterTable.of(
            np.concatenate([self.clusters, other.clusters]),
            np.concatenate([self.scopes, other.scopes]),
            np.concatenate([self.sums, other.sums]),
            np.concatenate([self.maxima, other.maxima]),
            self.is_folded or other.is_folded,
        )

    def __len__(self) -> int:
        return len(self.clusters)

    def folded(self, cap: int) -> ClusterTable:
        """The table itself up to `cap` clusters; beyond, with clusters folded into `cap` by their hash."""
        if not self.is_folded and (len(self) <= cap or len(np.unique(self.clusters)) <= cap):
            return self  # once folded, always folded: what comes later must meet what was folded before
        return ClusterTable.of(self.clusters % np.uint64(cap), self.scopes, self.sums, self.maxima, True)

    def of_scope(self, scope: np.uint64) -> ClusterTable:
        """One row per cluster, in one scope: they stay apart from the rows of other scopes."""
        return ClusterTable.of(self.clusters, np.full_like(self.scopes, scope), self.sums, self.maxima, self.is_folded)

    def folded_across_scopes(self, cap: int, *, by_prompt: bool) -> ClusterTable:
        """The clusters of every scope folded into `cap` by their hash: prompts are the same in all, others are not."""
        names = (self.clusters if by_prompt else mix_hashes(self.clusters, self.scopes)) % np.uint64(cap)
        return ClusterTable.of(names, np.zeros_like(self.scopes), self.sums, self.maxima, True)


def _sorted(*keys: NDArray[Any]) -> tuple[Ints, Bools]:
    """The order of rows [S] by their keys, the last one first, and which of them begin one that differs."""
    order = np.lexsort(keys)
    new = np.zeros(len(order), np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    return order, new


class BatchRows:
    """The rows of a batch's cluster tables: one for each cell, cluster and scope that occurs, in that order.

    A cell of more than `cap` clusters is folded at once: a batch of short sequences would take too much memory.

    Attributes:
        rows: the row of each sequence [S].
    """

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, cap: int = GROUP_CAP) -> None:
        """Those of the clusters of each cell [S]."""
        order, new = _sorted(clusters, cells)
        self._folded = np.bincount(cells[order[new]], minlength=1) > cap
        if self._folded.any():
            clusters = np.where(self._folded[cells], clusters % np.uint64(cap), clusters)
        order, new = _sorted(scopes, clusters, cells)
        self.rows = np.empty(len(order), np.int64)
        self.rows[order] = np.cumsum(new) - 1
        firsts = order[new]
        self._cells, self._clusters, self._scopes = cells[firsts], clusters[firsts], scopes[firsts]

    def __len__(self) -> int:
        return len(self._cells)

    def cut(self, cells: int, sums: Float64s, maxima: Float64s) -> Iterator[ClusterTable]:
        """Columns [rows, ...] as the table of each cell."""
        for cell, (start, stop) in enumerate(pairwise(np.searchsorted(self._cells, np.arange(cells + 1)).tolist())):
            own, folded = slice(start, stop), bool(self._folded[cell]) if cell < len(self._folded) else False
            yield ClusterTable(self._clusters[own], self._scopes[own], sums[own], maxima[own], folded)


class BatchTable(BatchRows):
    """The cluster tables of the cells of a batch, added to block by block, in the order of its sequences."""

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, sums: int, maxima: int) -> None:
        """Rows of zeros for the clusters of each cell [S], which lie one after the other."""
        super().__init__(cells, clusters, scopes)
        self._sums = np.zeros((sums, len(self)))
        self._maxima = np.full((maxima, len(self)), -np.inf)
        self._done = 0

    def add(self, sums: Sequence[Float64s], maxima: Sequence[Float64s]) -> None:
        """Add the columns of the next sequences, [S] each."""
        rows = self.rows[self._done : self._done + len(sums[0])]
        self._done += len(rows)
        first, stop = int(rows.min()), int(rows.max()) + 1
        place = rows - first
        for total, values in zip(self._sums[:, first:stop], sums, strict=True):
            total += np.bincount(place, values, stop - first)
        order = np.argsort(rows, kind="stable")
        starts = np.flatnonzero(np.append(True, np.diff(rows[order]) != 0))
        where = rows[order[starts]]
        for largest, values in zip(self._maxima, maxima, strict=True):
            largest[where] = np.maximum(largest[where], np.maximum.reduceat(values[order], starts))

    def tables(self, cells: int, layers: Float64s, before: int) -> Iterator[ClusterTable]:
        """The table of each cell, with `layers` [rows, ...] behind so many of the columns that add."""
        sums = np.concatenate([self._sums[:before], layers.T, self._sums[before:]])
        return self.cut(cells, sums.T, self._maxima.T)


class PromptCounter:
    """The prompts of a run so far, each counted once in whatever steps it occurs."""

    def __init__(self) -> None:
        self._known: Hashes = np.zeros(0, np.uint64)
        self._alive: NDArray[np.bool_] | None = None

    def add(self, clusters: Hashes, counted: Bools, emptied: Bools) -> tuple[Float64s, Float64s]:
        """Take in the clusters of one more step.

        Args:
            clusters: each once [R].
            counted: whether it holds a token [R]; others are passed over.
            emptied: whether nothing is left of it, by rule [R, ...].

        Returns:
            What it adds to the number of prompts [R], and to the number of prompts that are left empty [R, ...].
        """
        if self._alive is None:
            self._alive = np.zeros((0, *emptied.shape[1:]), np.bool_)
        at = np.minimum(np.searchsorted(self._known, clusters), max(len(self._known) - 1, 0))
        found = counted & (self._known[at] == clusters if len(self._known) else np.zeros(len(clusters), np.bool_))
        fresh = counted & ~found
        before, after = np.zeros(emptied.shape, np.bool_), np.zeros(emptied.shape, np.bool_)
        before[found] = ~self._alive[at[found]]
        self._alive[at[found]] |= ~emptied[found]
        after[found] = ~self._alive[at[found]]
        after[fresh] = emptied[fresh]
        known = np.concatenate([self._known, clusters[fresh]])
        order = np.argsort(known, kind="stable")
        self._known, self._alive = known[order], np.concatenate([self._alive, ~emptied[fresh]])[order]
        return fresh.astype(np.float64), after.astype(np.float64) - before


LabelValue = str | int | float | bool | None
"""The name of a group."""


def number_rows(keys: Sequence[NDArray[Any] | None], labels: Ints) -> Ints:
    """A number for each row [S], from 0 on, in the order of what it had and then of the keys."""
    for values in keys:
        if values is not None and not _is_constant(values):
            _, codes = find_distinct(_mark_missing(values))
            _, labels = np.unique(labels * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return labels


def _is_constant(values: NDArray[Any]) -> bool:
    """Whether all values are plainly one, as the runs of most batches are: nothing need be told apart then."""
    if not len(values):
        return True
    if values.dtype == object:
        return len(set(map(id, values.tolist()))) == 1
    return values.dtype.kind in "iu" and bool((values == values[0]).all())


def _mark_missing(values: NDArray[Any]) -> NDArray[Any]:
    """Values of which a missing one is unlike the text "None"."""
    if values.dtype != object:
        return values
    return np.array(["\0" if value is None else str(value) for value in values])


def to_plain_value(value: Any) -> LabelValue:
    """A group's name as JSON can hold it: numpy scalars become Python's, NaN (a missing number) None."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value.is_integer() else value
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def cluster_hashes(batch: TokenBatch) -> Hashes:
    """Hash of each sequence's prompt, else of its own id, else of what it holds."""
    hashes, named = np.zeros(len(batch), np.uint64), np.zeros(len(batch), np.bool_)
    for name in ("prompt_id", "sequence_id"):
        values = batch.columns.get(name)
        if values is None or named.all():
            continue
        given = (
            np.array([to_plain_value(value) is not None for value in values]) if values.dtype.kind in "fO" else ~named
        )
        own = mix_hashes(hash_values(values), hash_values(np.array([name])))
        hashes = np.where(given & ~named, own, hashes)
        named |= given
    if named.all():
        return hashes
    held = [batch.segments.lengths.astype(np.float64), *map(batch.segments.sum, (batch.rollout, batch.train))]
    return np.where(named, hashes, hash_content(held))


def step_hash(step: LabelValue) -> np.uint64:
    """What tells the clusters of a step from those of others."""
    hashed: np.uint64 = hash_values(np.array(["\0missing" if step is None else str(step)]))[0]
    return hashed


def step_hashes(batch: TokenBatch) -> Hashes:
    """The same of the step of each sequence [S]."""
    steps = batch.columns.get("step")
    if steps is None:
        return np.full(len(batch), step_hash(None))
    labels = number_rows([steps], np.zeros(len(batch), np.int64))
    _, firsts = np.unique(labels, return_index=True)
    return np.array([step_hash(to_plain_value(steps[row])) for row in firsts.tolist()], np.uint64)[labels]
