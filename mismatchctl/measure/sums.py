"""Sums over tokens, per run and per group. A group contains the sequences with the same step and `--by` values."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from operator import add
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS, magnitude_bin, new_layer_table, value_at_rank
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.columns import MISMATCH_NAME, Columns
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    BUCKETS,
    JOINT_CELLS,
    Kernel,
    PairTables,
    RunTables,
    SequencePlaces,
)

Hashes = NDArray[np.uint64]
KeyT = TypeVar("KeyT")
PartT = TypeVar("PartT")

GROUP_CAP = 4096
"""Maximum number of clusters per group. If there are more, clusters with equal `hash % GROUP_CAP` are merged."""
OVERALL_CAP = 1024
"""Maximum number of rows in a run's cluster table (one row per cluster and step). If there are more, merge rows."""
DETAILED_CAP = 1 << 14
"""Maximum number of rows if `MeasurePlan.every_cluster` is set, as in `gate` and `compare`."""


class HashSettings(NamedTuple):
    """Settings of the hashes that identify equal sequences."""

    row_probes: int = 8  # number of tokens per sequence whose log-probs `hash_rows` reads
    probes: int = 16  # likewise for `hash_contents`, with the settings below
    bound: float = 1e4  # log-probs are clipped to +-bound
    # If at least `informative` of the rollout's probes are not near 0, log-probs are rounded to 1 / steps nats, so that
    # copies with other rounding have the same hash.
    informative: int = 6
    steps: float = 128.0
    most_surprised: float = -50.0  # a lower log-prob counts as this value in the surprise of a sequence


HASH = HashSettings()


def hash_values(values: NDArray[Any]) -> Hashes:
    """Hash each value to 64 bits, with the same result on all machines. The number 5 is hashed like the text "5"."""
    comparable = values if values.dtype.kind in "iu" else values.astype(str)
    distinct, codes = np.unique(comparable, return_inverse=True)
    digests = b"".join(hashlib.blake2b(str(value).encode(), digest_size=8).digest() for value in distinct.tolist())
    return np.frombuffer(digests, "<u8").astype(np.uint64)[codes]


def mix_hashes(hashes: Hashes, salt: np.uint64 | Hashes) -> Hashes:
    """Combine hashes with a salt (finalizer of splitmix64). Swapping the two arguments changes the result."""
    with np.errstate(over="ignore"):
        x = (hashes * np.uint64(0xD1342543DE82EF95) ^ salt) + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31))


def sort_by_hash(hashes: Hashes, file: Ints, row: Ints) -> Ints:
    """Return the order by hash, then by file and row. As hashes are rarely equal, this is faster than `lexsort`."""
    order = np.argsort(hashes)
    ascending = hashes[order]
    return np.lexsort((row, file, hashes)) if np.any(ascending[1:] == ascending[:-1]) else order


def hash_content(columns: list[Float64s]) -> Hashes:
    """Hash each row of the columns, to identify sequences without an id."""
    hashes = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        hashes = mix_hashes(hashes, (column + 0.0).view(np.uint64))
    return hashes


def merge_parts(
    some: Mapping[KeyT, PartT], more: Mapping[KeyT, PartT], add: Callable[[PartT, PartT], PartT] = add
) -> dict[KeyT, PartT]:
    """Merge two mappings. If a key is in the two mappings, combine its values with `add`."""
    return {**some, **more} | {key: add(some[key], part) for key, part in more.items() if key in some}


ColumnSubject = str | int
"""Owner of a column: a pair of policies (its name, such as `drift`) or a correction (its index)."""


@dataclass(frozen=True)
class TableAxis:
    """The names of the columns of a table."""

    names: tuple[tuple[ColumnSubject, str], ...]  # (owner, name) of each column

    @cached_property
    def _places(self) -> dict[tuple[ColumnSubject, str], int]:
        return {name: place for place, name in enumerate(self.names)}

    @cached_property
    def _joint_names(self) -> dict[str, int]:
        """Map names such as `drift_square` (the column `square` of the pair `drift`) to column indices."""
        return {f"{of}_{name}": place for (of, name), place in self._places.items() if isinstance(of, str)}

    def __len__(self) -> int:
        return len(self.names)

    def position(self, of: ColumnSubject, name: str) -> int:
        """Return the position of column `name` of `of`, or else of the mismatch. `drift_square`: `square` of drift."""
        for found in (self._places.get((of, name)), self._places.get((MISMATCH_NAME, name))):
            if found is not None:
                return found
        return self._joint_names[name]

    def owner_columns(self, of: ColumnSubject) -> dict[str, int]:
        return {name: place for (owner, name), place in self._places.items() if owner == of}


@dataclass(frozen=True)
class ClusterTable:
    """Sums per cluster and scope. The scope is the micro-batch in a step's table, and the step in a run's table."""

    clusters: Hashes  # hash of the cluster of each row [R]
    scopes: Hashes  # hash of the micro-batch or step of each row [R], 0 if rows are not separated by scope
    sums: Float64s  # additive columns [R, K]
    maxima: Float64s  # columns that contain maxima [R, E]. A minimum is stored as the maximum of negated values.
    is_folded: bool = False  # True if a row may contain several clusters

    @classmethod
    def from_rows(
        cls, clusters: Hashes, scopes: Hashes, sums: Float64s, maxima: Float64s, is_folded: bool = False
    ) -> ClusterTable:
        """Build a table. Rows with the same cluster and the same scope are added up in the given order."""
        if not len(clusters):
            return cls(clusters, scopes, sums, maxima, is_folded)
        order, first = _sort_rows(scopes, clusters)
        if first.all():  # the transposed copies keep each column contiguous in memory
            sums, maxima = sums.T.take(order, axis=1).T, maxima.T.take(order, axis=1).T
        else:
            place = np.empty(len(order), np.int64)
            place[order] = np.cumsum(first) - 1
            sums = np.stack([np.bincount(place, column) for column in sums.T], dtype=np.float64).T
            maxima = np.maximum.reduceat(maxima[order], np.flatnonzero(first), axis=0)
        firsts = order[first]
        return cls(clusters[firsts], scopes[firsts], sums, maxima, is_folded)

    @classmethod
    def combine(
        cls, tables: Sequence[ClusterTable], scopes: Hashes | None = None, cap: int = 0, *, by_prompt: bool = False
    ) -> ClusterTable:
        """Concatenate tables, and add up rows with equal cluster and scope. `scopes`: new scopes of all rows.

        If more than `cap` rows remain (0: no limit), call `fold_across_scopes`.
        """
        clusters, own, sums, maxima = (
            np.concatenate([getattr(table, name) for table in tables])
            for name in ("clusters", "scopes", "sums", "maxima")
        )
        scopes = own if scopes is None else scopes
        if cap and scopes.any() and len(clusters) > cap and len(np.unique(mix_hashes(clusters, scopes))) > cap:
            return cls(clusters, scopes, sums, maxima).fold_across_scopes(cap, by_prompt=by_prompt)
        return cls.from_rows(clusters, scopes, sums, maxima, any(table.is_folded for table in tables))

    def __add__(self, other: ClusterTable) -> ClusterTable:
        return ClusterTable.combine([self, other])

    def __len__(self) -> int:
        return len(self.clusters)

    @property
    def has_scopes(self) -> bool:
        return not len(self) or bool(self.scopes.any())

    def fold(self, cap: int) -> ClusterTable:
        """Return a table with at most `cap` clusters. In a larger table, merge clusters with equal `hash % cap`."""
        if not self.is_folded and (len(self) <= cap or len(np.unique(self.clusters)) <= cap):
            return self  # not for a folded table, because later additions may not be folded yet
        return ClusterTable.from_rows(self.clusters % np.uint64(cap), self.scopes, self.sums, self.maxima, True)

    def merge_scopes(self) -> ClusterTable:
        return self.with_scope(np.uint64(0)) if self.scopes.any() else self

    def with_scope(self, scope: np.uint64) -> ClusterTable:
        return ClusterTable.from_rows(
            self.clusters, np.full_like(self.scopes, scope), self.sums, self.maxima, self.is_folded
        )

    def fold_across_scopes(self, cap: int, *, by_prompt: bool) -> ClusterTable:
        """Merge rows whose cluster and scope (`by_prompt`: cluster) have an equal hash, to at most `cap` rows."""
        if not self.has_scopes:
            return self
        names = (self.clusters if by_prompt else mix_hashes(self.clusters, self.scopes)) % np.uint64(cap)
        return ClusterTable.from_rows(names, np.zeros_like(self.scopes), self.sums, self.maxima, True)


def _sort_rows(*keys: NDArray[Any]) -> tuple[Ints, Bools]:
    """Sort rows by `keys`. Return their order, and a mask of the sorted rows that differ from the row before."""
    order = np.lexsort(keys)
    new = np.zeros(len(order), np.bool_)
    new[:1] = True
    for key in keys:
        new[1:] |= key[order[1:]] != key[order[:-1]]
    return order, new


class BatchRows:
    """Assigns sequences to rows of a table. Sequences of one group, cluster and scope (micro-batch) share a row."""

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, cap: int = GROUP_CAP) -> None:
        order, new = _sort_rows(clusters, cells)
        self._folded = np.bincount(cells[order[new]], minlength=1) > cap
        if self._folded.any():
            clusters = np.where(self._folded[cells], clusters % np.uint64(cap), clusters)
        order, new = _sort_rows(scopes, clusters, cells)
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
    """The cluster tables of all groups in a batch. Pass the blocks of the batch to `add`, in their order."""

    def __init__(self, cells: Ints, clusters: Hashes, scopes: Hashes, sums: int, maxima: int) -> None:
        """`sums`, `maxima`: how many columns contain sums or maxima. `cells`: group index per sequence, ascending."""
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
            own = np.zeros(stop - first)  # a sum per block rounds less than adding each row to `total`
            np.add.at(own, place, values)
            total += own
        for largest, values in zip(self._maxima[:, first:stop], maxima, strict=True):
            np.maximum.at(largest, place, values)

    def tables(self, cells: int, layers: Float64s, position: int) -> Iterator[ClusterTable]:
        """Yield the table of each group. Insert the columns of `layers` before the column with index `position`."""
        sums = np.concatenate([self._sums[:position], layers, self._sums[position:]])
        return self.split(cells, sums.T, self._maxima.T)


class PromptCounter:
    """Counts each prompt of a run once, even if several steps contain it."""

    def __init__(self) -> None:
        self._known: Hashes = np.zeros(0, np.uint64)
        self._alive: NDArray[np.bool_] | None = None

    def add(self, clusters: Hashes, counted: Bools, emptied: Bools) -> tuple[Float64s, Float64s]:
        """Add a step. Return by how much each cluster's numbers of prompts and of prompts without kept tokens rise."""
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


def number_rows(keys: Sequence[NDArray[Any] | None], labels: Ints) -> Ints:
    """Number the rows in sorted order, so that rows with equal label and keys have equal numbers."""
    for values in keys:
        if values is not None and not _is_constant(values):
            if values.dtype == object:  # "\0" stands for None, because no name is "\0"
                values = np.array(["\0" if value is None else str(value) for value in values])
            codes = _number_texts(values)
            _, labels = np.unique(labels * (codes.max(initial=0) + 1) + codes, return_inverse=True)
    return labels


def _number_texts(values: NDArray[Any]) -> Ints:
    """Number the values in the order of their text. Equal values have equal numbers."""
    if values.dtype.kind not in "iu":
        return np.unique(values.astype(str), return_inverse=True)[1]
    distinct, codes = np.unique(values, return_inverse=True)
    return np.unique(distinct.astype(str), return_inverse=True)[1][codes]


def _is_constant(values: NDArray[Any]) -> bool:
    """Return True only if all values are equal. This quick check also returns False for some equal values."""
    if not len(values):
        return True
    if values.dtype == object:
        return len(set(map(id, values.tolist()))) == 1
    return values.dtype.kind in "iu" and bool((values == values[0]).all())


def to_plain_value(value: Any) -> LabelValue:
    """Convert a label to a JSON value: numpy scalars to Python, whole floats to integers, NaN to null."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, float):
        return None if np.isnan(value) else int(value) if value.is_integer() else value
    return value if value is None or isinstance(value, (str, int, bool)) else str(value)


def cluster_hashes(batch: TokenBatch) -> Hashes:
    """Hash each sequence's prompt id. If it is missing, hash its sequence id, or else its length and log-prob sums."""
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
    """Hash a step, to distinguish the rows that a cluster has in different steps."""
    hashed: np.uint64 = hash_values(np.array(["\0missing" if step is None else str(step)]))[0]
    return hashed


def step_hashes(batch: TokenBatch) -> Hashes:
    steps = batch.columns.get("step")
    if steps is None:
        return np.full(len(batch), step_hash(None))
    labels = number_rows([steps], np.zeros(len(batch), np.int64))
    _, firsts = np.unique(labels, return_index=True)
    return np.array([step_hash(to_plain_value(steps[row])) for row in firsts.tolist()], np.uint64)[labels]


TAIL_VALUES = 4097
"""Number of largest log ratios to store for k-hat: up to 4,096 in the tail, and one where the tail begins."""
WORST_COUNT = 50
"""Maximum length of the lists of the worst tokens and the worst sequences, which contain their places in the dump."""


def largest_values(values: Float64s, count: int = TAIL_VALUES) -> Float64s:
    return values if len(values) <= count else np.partition(values, len(values) - count)[-count:]


class LargestValues:
    """Collects the TAIL_VALUES largest values of many blocks. Values below `threshold` cannot be among them."""

    def __init__(self) -> None:
        self._blocks: list[Float64s] = []
        self._held = 0
        self.threshold = -np.inf

    def add(self, values: Float64s) -> None:
        above = values if self.threshold == -np.inf else values[values >= self.threshold]
        self._blocks.append(above.copy() if above is values else above)
        self._held += len(above)
        if self._held > 4 * TAIL_VALUES:
            kept = self.values()
            self._blocks, self._held, self.threshold = [kept], len(kept), float(kept.min())

    def values(self) -> Float64s:
        return largest_values(np.concatenate(self._blocks)) if self._blocks else np.zeros(0)


@dataclass(frozen=True)
class WorstRows:
    """The WORST_COUNT tokens or sequences with the largest scores. Equal scores keep the order of the dump."""

    score: Float64s = field(default_factory=lambda: np.zeros(0))  # |log ratio| of the token or sequence [N], descending
    # index of the file, row in the file, and token position [N, 3]
    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    fields: dict[str, NDArray[Any]] = field(default_factory=dict)  # columns to show in tables, such as `log_ratio` [N]

    @classmethod
    def rank(cls, score: Float64s, place: NDArray[np.int64], fields: dict[str, NDArray[Any]]) -> WorstRows:
        order = np.lexsort((place[:, 2], place[:, 1], place[:, 0], -score))[:WORST_COUNT]
        return cls(score[order], place[order], {name: values[order] for name, values in fields.items()})

    def __len__(self) -> int:
        return len(self.score)

    def __add__(self, other: WorstRows) -> WorstRows:
        if not len(self) or not len(other):
            return self if len(self) else other
        names = [*self.fields, *(name for name in other.fields if name not in self.fields)]
        fields = {name: np.concatenate([_worst_field(self, name), _worst_field(other, name)]) for name in names}
        return WorstRows.rank(
            np.concatenate([self.score, other.score]), np.concatenate([self.place, other.place]), fields
        )

    @property
    def threshold(self) -> float:
        return float(self.score[-1]) if len(self) == WORST_COUNT else 0.0


def _worst_field(worst: WorstRows, name: str) -> NDArray[Any]:
    return worst.fields.get(name, np.full(len(worst), None, object))


MAX_ROWS = 2 * BUCKETS
"""Maximum number of rows in PairTables (one per group and bucket of clusters). Larger tables exceed the CPU cache."""


@dataclass(frozen=True)
class Histogram:
    """The number of tokens and the sum of their K3 in each bin of the log ratio, without empty bins."""

    # bucket * MAGNITUDE_BINS + bin of |log ratio|, for each such pair that has tokens [N], ascending
    places: Ints
    tokens: NDArray[np.int64]  # number of tokens at each of `places` [N]
    bins: Ints  # bins of the log ratio that have tokens [B], ascending
    counts: NDArray[np.int64]  # number of tokens in each of `bins` [B]
    k3: Float64s  # sum of their K3 [B]

    def __add__(self, other: Histogram) -> Histogram:
        return Histogram.combine([self, other])

    @property
    def size(self) -> int:
        return 2 * len(self.places) + 3 * len(self.bins)

    @staticmethod
    def combine(parts: Sequence[Histogram]) -> Histogram:
        filled = [own for own in parts if len(own.places)]
        if len(filled) < 2:
            return filled[0] if filled else parts[0]
        return Histogram(
            *_add_parts([(own.places, own.tokens) for own in filled]),
            *_add_parts([(own.bins, own.counts, own.k3) for own in filled]),
        )

    def by_bin(self) -> tuple[NDArray[np.int64], Float64s]:
        """Return the token count and the sum of K3 of each bin of the log ratio [SIGNED_BINS]."""
        tokens, k3 = np.zeros(SIGNED_BINS, np.int64), np.zeros(SIGNED_BINS)
        tokens[self.bins], k3[self.bins] = self.counts, self.k3
        return tokens, k3

    def by_bucket(self) -> tuple[Ints, Float64s]:
        """Return the nonempty bins of |log ratio| [M], and their token counts in each nonempty bucket of clusters."""
        starts = np.arange(BUCKETS + 1) * MAGNITUDE_BINS
        sizes = np.diff(np.searchsorted(self.places, starts))  # a search in sorted places is faster than a division
        buckets, held = np.flatnonzero(sizes), np.zeros(MAGNITUDE_BINS, np.bool_)
        held[magnitude_bin(self.bins)] = True
        filled, column = np.flatnonzero(held), np.cumsum(held) - 1
        first = np.repeat(starts[buckets], sizes[buckets])
        row = np.repeat(np.arange(len(buckets)) * len(filled), sizes[buckets])
        tokens = np.zeros((len(buckets), len(filled)))
        tokens.reshape(-1)[column[self.places - first] + row] = self.tokens
        return filled, tokens


def _add_parts(parts: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]]:
    """Join tuples of arrays (positions, column, ...). At equal positions, add the values of each column."""
    places, *columns = (np.concatenate(own) for own in zip(*parts, strict=True))
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
    return [places[starts], *(np.add.reduceat(column[order], starts) for column in columns)]


def read_histograms(tables: PairTables) -> list[Histogram]:
    tokens, sums = tables.tokens.reshape(-1), tables.sums.reshape(-1, 2)
    places, signed = np.flatnonzero(tokens != 0), np.flatnonzero(sums[:, 0] != 0)  # `!= 0` makes it 5 times as fast
    number, (counts, k3) = tokens[places].astype(np.int64), sums.take(signed, axis=0).T
    cells, last = np.arange(len(tables.numbers)), np.append(np.diff(tables.cells) != 0, True)
    by_row = np.searchsorted(places, np.arange(len(tables.cells) + 1) * MAGNITUDE_BINS)
    places += np.repeat((tables.buckets - np.arange(len(tables.cells))) * MAGNITUDE_BINS, np.diff(by_row))
    of_rows = np.append(0, by_row[1:][last])
    of_bins = np.searchsorted(signed, np.arange(len(cells) + 1) * SIGNED_BINS)
    signed -= np.repeat(cells * SIGNED_BINS, np.diff(of_bins))
    found, counts = [], counts.astype(np.int64)
    for cell in cells.tolist():
        own, within = slice(*of_rows[cell : cell + 2]), slice(*of_bins[cell : cell + 2])
        found.append(Histogram(places[own], number[own], signed[within], counts[within], k3[within].copy()))
    return found


@dataclass(frozen=True)
class PairSums:
    """The histogram of log ratios between two policies, and the largest log ratios."""

    histogram: Histogram  # tokens by bucket and |log ratio|, tokens and K3 by log ratio
    token_tail: Float64s  # largest log ratios of tokens, at most TAIL_VALUES, ascending
    sequence_tail: Float64s  # largest log ratios of sequences (sums over tokens), likewise

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums.combine([self, other])

    @staticmethod
    def combine(parts: Sequence[PairSums]) -> PairSums:
        return PairSums(
            Histogram.combine([own.histogram for own in parts]),
            np.sort(largest_values(np.concatenate([own.token_tail for own in parts]))),
            np.sort(largest_values(np.concatenate([own.sequence_tail for own in parts]))),
        )


class PairCollector:
    """Collects the PairSums of each group (a histogram and the largest log ratios) while blocks are read."""

    def __init__(self, kernel: Kernel, tables: PairTables) -> None:
        self._kernel, self._tables = kernel, tables
        self._tokens, self._sequences = ([LargestValues() for _ in tables.numbers] for _ in range(2))

    def reduce(
        self, ratios: Ratios, position: Ints | None, places: SequencePlaces, run: RunTables | None = None
    ) -> tuple[Float64s, Float64s]:
        """Return sums and maxima from `Kernel.reduce_tokens`. Also collect the largest log ratios of each group."""
        sums, maxima = self._kernel.reduce_tokens(ratios, position, places, self._tables, run)
        cells = self._tables.cells[places.rows]
        ends = np.flatnonzero(np.append(cells[1:] != cells[:-1], True)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            self._add_tails(int(cells[start]), ratios, start, stop)
        return sums, maxima

    def _add_tails(self, cell: int, ratios: Ratios, start: int, stop: int) -> None:
        known, segments = self._tokens[cell], ratios.segments
        first, last = segments.offsets[start], segments.offsets[stop]
        threshold = known.threshold
        if threshold == -np.inf and last - first > TAIL_VALUES:  # the histogram gives a lower bound of the tail
            threshold = value_at_rank(self._tables.sums[cell, :, 0], TAIL_VALUES)
        if threshold == -np.inf:
            found = np.arange(first, last)
        else:
            candidates = start + np.flatnonzero(ratios.max_log_ratio[start:stop] >= threshold)
            found = self._kernel.find_outside(ratios, candidates, -np.inf, threshold)
        known.add(ratios.log_ratio_at(found))
        self._sequences[cell].add(ratios.log_ratio_sum[start:stop][segments.nonempty[start:stop]])

    def sums(self) -> dict[int, PairSums]:
        tails = zip(self._tokens, self._sequences, strict=True)
        found = [
            PairSums(histogram, np.sort(tokens.values()), np.sort(sequences.values()))
            for histogram, (tokens, sequences) in zip(read_histograms(self._tables), tails, strict=True)
        ]
        return dict(zip(self._tables.numbers.tolist(), found, strict=True))


@dataclass(frozen=True)
class CellSums:
    """Sums of one group of sequences: per cluster (`table`) and per pair of policies (`pairs`)."""

    table: ClusterTable
    pairs: dict[str, PairSums]

    def __add__(self, other: CellSums) -> CellSums:
        return CellSums(self.table + other.table, merge_parts(self.pairs, other.pairs))

    @property
    def size(self) -> int:
        return self.table.sums.size + sum(pair.histogram.size for pair in self.pairs.values())

    def fold(self, cap: int) -> CellSums:
        return CellSums(self.table.fold(cap), self.pairs)

    def fold_across_scopes(self, cap: int, by_prompt: bool) -> CellSums:
        return CellSums(self.table.fold_across_scopes(cap, by_prompt=by_prompt), self.pairs)

    def merge_scopes(self) -> CellSums:
        return CellSums(self.table.merge_scopes(), self.pairs)


@dataclass(frozen=True)
class RunSums:
    """Breakdowns, joint histogram and worst rows of a run, which are not stored per step."""

    # breakdowns and joint are the fields of RunTables
    breakdowns: dict[str, Float64s] = field(default_factory=dict)
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT_CELLS, JOINT_CELLS), np.int64))
    # the worst tokens and the worst sequences
    tokens: WorstRows = field(default_factory=WorstRows)
    sequences: WorstRows = field(default_factory=WorstRows)

    def __add__(self, other: RunSums) -> RunSums:
        return RunSums(
            merge_parts(self.breakdowns, other.breakdowns),
            self.joint + other.joint,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
        )


class RunCollector:
    """Computes the RunSums of one run. Kernels fill `tables` with its tokens."""

    def __init__(self, kernel: Kernel, clusters: int) -> None:
        self._kernel = kernel
        self.tables = RunTables(new_layer_table(clusters))
        self._tokens, self._sequences = WorstRows(), WorstRows()

    def add(self, ratios: Ratios, batch: TokenBatch, columns: Columns, buckets: Ints) -> None:
        self._tokens = self._tokens + _find_worst_tokens(self._kernel, ratios, batch, self._tokens.threshold)
        self._sequences = self._sequences + _find_worst_sequences(columns, batch, self._sequences.threshold)
        table = self.tables.breakdowns["length"]
        where = buckets * table.shape[1] + BREAKDOWNS["length"].find_bins(batch.segments.lengths)
        uncertain = columns["tokens"] - columns["reference_prob"]
        summed = [columns["tokens"], columns["abs"], columns["k3"], columns["log_ratio"], uncertain]
        for sums, values in zip(
            table.reshape(-1, len(summed)).T, summed, strict=True
        ):  # ten times as fast as all columns together
            np.add.at(sums, where, values)

    def sums(self) -> RunSums:
        return RunSums(self.tables.breakdowns, self.tables.joint, self._tokens, self._sequences)


def _find_worst_tokens(kernel: Kernel, ratios: Ratios, batch: TokenBatch, threshold: float) -> WorstRows:
    peak = np.maximum(ratios.max_log_ratio, -ratios.min_log_ratio)
    needed = max(threshold, _lowest_worst_score(peak))  # WORST_COUNT sequences have a token with at least this score
    candidates = np.flatnonzero((peak > 0) & (peak >= needed))
    found = kernel.find_outside(ratios, candidates, -needed, needed)
    log_ratio = ratios.log_ratio_at(found)
    size = np.abs(log_ratio)
    worst = (size > 0) & (size >= _lowest_worst_score(size))  # a sequence may contain many worst tokens
    found, log_ratio = found[worst], log_ratio[worst]
    sequence = np.searchsorted(batch.segments.offsets, found, side="right") - 1
    token = found - batch.segments.offsets[sequence]
    position = token if batch.position is None else batch.position[found]
    place = np.stack([batch.file[sequence], batch.rows[sequence], position], axis=1)
    policy, reference = ratios.log_probs
    fields: dict[str, NDArray[Any]] = {
        "token": token,
        "rollout_log_prob": reference[found].astype(np.float64),
        "train_log_prob": policy[found].astype(np.float64),
        "log_ratio": log_ratio,
    }
    return WorstRows.rank(np.abs(log_ratio), place, fields | _row_names(batch, sequence))


def _lowest_worst_score(scores: Float64s) -> float:
    """Return the WORST_COUNT-th largest score. If there are not more scores than WORST_COUNT, return 0."""
    return float(largest_values(scores, WORST_COUNT).min()) if len(scores) > WORST_COUNT else 0.0


def _find_worst_sequences(columns: Columns, batch: TokenBatch, threshold: float) -> WorstRows:
    score = np.abs(columns["log_ratio"])
    found = np.flatnonzero((score > 0) & (score >= max(threshold, _lowest_worst_score(score))))
    place = np.stack([batch.file[found], batch.rows[found], np.zeros(len(found), np.int64)], axis=1)
    length = np.maximum(columns["tokens"][found], 1)
    fields: dict[str, NDArray[Any]] = {
        "tokens": columns["tokens"][found].astype(np.int64),
        "log_ratio_sum": columns["log_ratio"][found],
        "k3": columns["k3"][found] / length,
        "abs_diff_mean": columns["abs"][found] / length,
    }
    return WorstRows.rank(score[found], place, fields | _row_names(batch, found))


def _row_names(batch: TokenBatch, rows: Ints) -> dict[str, NDArray[Any]]:
    names = ("step", "sequence_id", "prompt_id")
    return {name: batch.columns[name][rows].astype(object) for name in names if name in batch.columns}
