"""Cluster tables, with one row of sums and extremes per cluster, and hashes of clusters."""

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
"""Maximum number of exact clusters per group. Further clusters are merged by their hash."""
OVERALL_CAP = 1024
"""Maximum number of exact rows (one per cluster and group) of a whole run."""
DETAILED_CAP = 1 << 14
"""Maximum number of exact rows of a run if all clusters are needed."""


def hash_values(values: NDArray[Any]) -> Hashes:
    """Hash each value to 64 bits, equally on every machine. The number 5 and the string "5" have the same hash."""
    texts, codes = find_distinct(values)
    digests = b"".join(hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts.tolist())
    return np.frombuffer(digests, "<u8").astype(np.uint64)[codes]


def find_distinct(values: NDArray[Any]) -> tuple[NDArray[np.str_], Ints]:
    if values.dtype.kind not in "iu":
        texts, codes = np.unique(values.astype(str), return_inverse=True)
        return texts, codes
    distinct, numbers = np.unique(values, return_inverse=True)
    texts, codes = np.unique(distinct.astype(str), return_inverse=True)
    return texts, codes[numbers]


def mix_hashes(hashes: Hashes, salt: np.uint64 | Hashes) -> Hashes:
    """Combine hashes with a salt (finalizer of splitmix64). The order of the arguments matters."""
    with np.errstate(over="ignore"):
        x = (hashes * np.uint64(0xD1342543DE82EF95) ^ salt) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def hash_content(columns: list[Float64s]) -> Hashes:
    """Hash each row of float columns, to identify sequences without an id."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = mix_hashes(hashes, (column + 0.0).view(np.uint64))
    return hashes


def merge_parts(
    some: Mapping[KeyT, PartT], more: Mapping[KeyT, PartT], add: Callable[[PartT, PartT], PartT] = add
) -> dict[KeyT, PartT]:
    """Merge two mappings. Values with the same key are added, and keys keep their order."""
    return {**some, **more} | {key: add(some[key], part) for key, part in more.items() if key in some}


ColumnSubject = str | int
"""The owner of a column: the name of a pair of policies, or the number of a correction."""


@dataclass(frozen=True)
class TableAxis:
    """Column names of a table."""

    names: tuple[tuple[ColumnSubject, str], ...]  # (owner, name) of each column

    @cached_property
    def _places(self) -> dict[tuple[ColumnSubject, str], int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _joint_names(self) -> dict[str, int]:
        """Map joint names of columns, such as drift_square, by pair of policies and name."""
        return {f"{of}_{name}": place for (of, name), place in self._places.items() if isinstance(of, str)}

    def __len__(self) -> int:
        return len(self.names)

    def position(self, of: ColumnSubject, name: str) -> int:
        """Return the position of a column: of the owner, else of the mismatch, else by its joint name."""
        for found in (self._places.get((of, name)), self._places.get((MISMATCH_NAME, name))):
            if found is not None:
                return found
        return self._joint_names[name]

    def owner_columns(self, of: ColumnSubject) -> dict[str, int]:
        return {name: place for (owner, name), place in self._places.items() if owner == of}


@dataclass(frozen=True)
class ClusterTable:
    """Sums by cluster and scope (the micro-batch if it matters for normalization, else 0), in sorted order."""

    clusters: Hashes  # hash of the cluster of each row [R]
    scopes: Hashes  # hash of the micro-batch of each row [R], 0 if it does not matter
    sums: Float64s  # additive columns [R, K]
    maxima: Float64s  # columns that merge by maximum [R, E]. A minimum is stored negated.
    is_folded: bool = False  # True if a row may contain several clusters

    @classmethod
    def from_rows(
        cls, clusters: Hashes, scopes: Hashes, sums: Float64s, maxima: Float64s, is_folded: bool = False
    ) -> ClusterTable:
        """Build a table. Rows of the same cluster and scope are added in the given order."""
        if not len(clusters):
            return cls(clusters, scopes, sums, maxima, is_folded)
        order, first = _sorted(scopes, clusters)
        if first.all():  # columns become contiguous
            sums, maxima = sums.T.take(order, axis=1).T, maxima.T.take(order, axis=1).T
        else:
            starts = np.flatnonzero(first)
            sums = np.add.reduceat(sums[order], starts, axis=0)
            maxima = np.maximum.reduceat(maxima[order], starts, axis=0)
        firsts = order[first]
        return cls(clusters[firsts], scopes[firsts], sums, maxima, is_folded)

    @classmethod
    def combine(cls, tables: Sequence[ClusterTable], scopes: Hashes | None = None) -> ClusterTable:
        """Merge tables in order. `scopes`, if given, replace the scopes of all rows."""
        clusters, own, sums, maxima = (
            np.concatenate([getattr(table, name) for table in tables])
            for name in ("clusters", "scopes", "sums", "maxima")
        )
        folded = any(table.is_folded for table in tables)
        return cls.from_rows(clusters, own if scopes is None else scopes, sums, maxima, folded)

    def __add__(self, other: ClusterTable) -> ClusterTable:
        return ClusterTable.combine([self, other])

    def __len__(self) -> int:
        return len(self.clusters)

    def fold(self, cap: int) -> ClusterTable:
        """Return the table with at most `cap` rows. If there are more clusters, clusters are merged by their hash."""
        if not self.is_folded and (len(self) <= cap or len(np.unique(self.clusters)) <= cap):
            return self  # a folded table stays folded, so that equal clusters share a row
        return ClusterTable.from_rows(self.clusters % np.uint64(cap), self.scopes, self.sums, self.maxima, True)

    def merge_scopes(self) -> ClusterTable:
        return self.with_scope(np.uint64(0)) if self.scopes.any() else self

    def with_scope(self, scope: np.uint64) -> ClusterTable:
        return ClusterTable.from_rows(
            self.clusters, np.full_like(self.scopes, scope), self.sums, self.maxima, self.is_folded
        )

    def fold_across_scopes(self, cap: int, *, by_prompt: bool) -> ClusterTable:
        """Merge the clusters of all scopes into `cap` rows by their hash. The same prompts occur in several scopes."""
        names = (self.clusters if by_prompt else mix_hashes(self.clusters, self.scopes)) % np.uint64(cap)
        return ClusterTable.from_rows(names, np.zeros_like(self.scopes), self.sums, self.maxima, True)


def _sorted(*keys: NDArray[Any]) -> tuple[Ints, Bools]:
    """Return the order of rows [S] by their keys, and flags of rows that start a new key."""
    order = np.lexsort(keys)
    new = np.zeros(len(order), np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    return order, new


class BatchRows:
    """Rows of a batch's cluster tables: one per group, cluster and scope. Above `cap`, clusters are merged."""

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, cap: int = GROUP_CAP) -> None:
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

    def split(self, cells: int, sums: Float64s, maxima: Float64s) -> Iterator[ClusterTable]:
        for cell, (start, stop) in enumerate(pairwise(np.searchsorted(self._cells, np.arange(cells + 1)).tolist())):
            own, folded = slice(start, stop), bool(self._folded[cell]) if cell < len(self._folded) else False
            yield ClusterTable(self._clusters[own], self._scopes[own], sums[own], maxima[own], folded)


class BatchTable(BatchRows):
    """Cluster tables for the groups of a batch, which are filled block by block."""

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, sums: int, maxima: int) -> None:
        """Create tables of zeros. The groups of the sequences [S] must be sorted."""
        super().__init__(cells, clusters, scopes)
        self._sums = np.zeros((sums, len(self)))
        self._maxima = np.full((maxima, len(self)), -np.inf)
        self._done = 0

    def add(self, sums: Sequence[Float64s], maxima: Sequence[Float64s]) -> None:
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

    def tables(self, cells: int, layers: Float64s, position: int) -> Iterator[ClusterTable]:
        """Yield the table of each group. `layers` [rows, ...] are inserted after the first `position` columns."""
        sums = np.concatenate([self._sums[:position], layers.T, self._sums[position:]])
        return self.split(cells, sums.T, self._maxima.T)


class PromptCounter:
    """The prompts of a run that were already counted. A prompt is counted once over all steps."""

    def __init__(self) -> None:
        self._known: Hashes = np.zeros(0, np.uint64)
        self._alive: NDArray[np.bool_] | None = None

    def add(self, clusters: Hashes, counted: Bools, emptied: Bools) -> tuple[Float64s, Float64s]:
        """Add the clusters of another step [R].

        Return the change of the number of prompts [R] and of empty prompts [R, ...].

        Clusters with a token are `counted`. If a correction rejects all tokens of a cluster, it is `emptied` [R, ...].
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
"""Label of a group."""


def number_rows(keys: Sequence[NDArray[Any] | None], labels: Ints) -> Ints:
    """Number the rows [S] from 0 by their previous number and then by their keys. Equal rows get equal numbers."""
    for values in keys:
        if values is not None and not _is_constant(values):
            if values.dtype == object:  # the marker of a missing value cannot be a name
                values = np.array(["\0" if value is None else str(value) for value in values])
            _, codes = find_distinct(values)
            _, labels = np.unique(labels * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return labels


def _is_constant(values: NDArray[Any]) -> bool:
    """Return True if all values are equal, which is the usual case for runs."""
    if not len(values):
        return True
    if values.dtype == object:
        return len(set(map(id, values.tolist()))) == 1
    return values.dtype.kind in "iu" and bool((values == values[0]).all())


def to_plain_value(value: Any) -> LabelValue:
    """Convert a label to a JSON value: numpy scalars to Python, NaN to null."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value.is_integer() else value
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def cluster_hashes(batch: TokenBatch) -> Hashes:
    """Hash the prompt id of each sequence, or its sequence id, or its content."""
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
    """Hash a step. The hash separates the clusters of different steps."""
    hashed: np.uint64 = hash_values(np.array(["\0missing" if step is None else str(step)]))[0]
    return hashed


def step_hashes(batch: TokenBatch) -> Hashes:
    steps = batch.columns.get("step")
    if steps is None:
        return np.full(len(batch), step_hash(None))
    labels = number_rows([steps], np.zeros(len(batch), np.int64))
    _, firsts = np.unique(labels, return_index=True)
    return np.array([step_hash(to_plain_value(steps[row])) for row in firsts.tolist()], np.uint64)[labels]
