"""Sums of one group and of a run: cluster tables, histograms, tails and worst tokens. `+` merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints, TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS, magnitude_bin, new_layer_table, value_at_rank
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.cluster_table import ClusterTable, merge_parts
from mismatchctl.measure.columns import Columns
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    BUCKETS,
    JOINT_CELLS,
    Kernel,
    PairTables,
    RunTables,
    SequencePlaces,
)

TAIL_VALUES = 4097
"""Number of largest log ratios that are stored: a tail of 4,096 log ratios, and the next largest log ratio."""
WORST_COUNT = 50
"""Number of worst tokens and sequences that are stored with their position."""


def largest_values(values: Float64s, count: int = TAIL_VALUES) -> Float64s:
    return values if len(values) <= count else np.partition(values, len(values) - count)[-count:]


class LargestValues:
    """Collects the largest values of a stream of blocks. Values below the current threshold are dropped."""

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
    """The WORST_COUNT rows with the largest score. If scores are equal, the earlier position comes first."""

    score: Float64s = field(default_factory=lambda: np.zeros(0))  # ranking score [N], descending
    # file, row and position [N, 3]
    place: NDArray[np.int64] = field(default_factory=lambda: np.zeros((0, 3), np.int64))
    fields: dict[str, NDArray[Any]] = field(default_factory=dict)  # descriptive columns by name [N]

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
"""Maximum rows (cell and bucket) of the kernels' tables, so that they fit the cache with the tokens."""


@dataclass(frozen=True)
class Histogram:
    """Sums over tokens by bin, without empty bins."""

    # bucket * MAGNITUDE_BINS + magnitude bin with a token [N], ascending
    places: Ints
    tokens: NDArray[np.int64]  # token count [N]
    bins: Ints  # signed bins with a token [B], ascending
    counts: NDArray[np.int64]  # token count [B]
    k3: Float64s  # sum of K3 [B]

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
        """Return tokens and K3 by signed bin [SIGNED_BINS]."""
        tokens, k3 = np.zeros(SIGNED_BINS, np.int64), np.zeros(SIGNED_BINS)
        tokens[self.bins], k3[self.bins] = self.counts, self.k3
        return tokens, k3

    def by_bucket(self) -> tuple[Ints, Float64s]:
        """Return the magnitude bins with a token [M], and the tokens by bucket and bin [B, M]."""
        starts = np.arange(BUCKETS + 1) * MAGNITUDE_BINS
        sizes = np.diff(np.searchsorted(self.places, starts))  # sorted, so no division is needed
        buckets, held = np.flatnonzero(sizes), np.zeros(MAGNITUDE_BINS, np.bool_)
        held[magnitude_bin(self.bins)] = True
        filled, column = np.flatnonzero(held), np.cumsum(held) - 1
        first = np.repeat(starts[buckets], sizes[buckets])
        row = np.repeat(np.arange(len(buckets)) * len(filled), sizes[buckets])
        tokens = np.zeros((len(buckets), len(filled)))
        tokens.reshape(-1)[column[self.places - first] + row] = self.tokens
        return filled, tokens


def _add_parts(parts: Sequence[tuple[NDArray[Any], ...]]) -> list[NDArray[Any]]:
    """Add parts, which are pairs of positions and columns. Return all positions and the sums of the columns."""
    places, *columns = (np.concatenate(own) for own in zip(*parts, strict=True))
    order = np.argsort(places, kind="stable")
    places = places[order]
    starts = np.flatnonzero(np.append(True, places[1:] != places[:-1]))
    return [places[starts], *(np.add.reduceat(column[order], starts) for column in columns)]


def read_histograms(tables: PairTables) -> list[Histogram]:
    tokens, sums = tables.tokens.reshape(-1), tables.sums.reshape(-1, 2)
    places, signed = np.flatnonzero(tokens != 0), np.flatnonzero(sums[:, 0] != 0)  # five times as fast on flags
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
    """Histogram and tails of a pair of policies."""

    histogram: Histogram  # tokens by bucket of the cluster, tokens and K3 by signed log ratio
    token_tail: Float64s  # largest token log ratios
    sequence_tail: Float64s  # largest log ratios of whole sequences

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
    """Builds the PairSums of several groups block by block."""

    def __init__(self, kernel: Kernel, tables: PairTables) -> None:
        self._kernel, self._tables = kernel, tables
        self._tokens, self._sequences = ([LargestValues() for _ in tables.numbers] for _ in range(2))

    def reduce(
        self,
        ratios: Ratios,
        position: Ints | None,
        places: SequencePlaces,
        run: RunTables | None = None,
    ) -> tuple[Float64s, Float64s]:
        """Reduce a block to TOKEN_SUMS and TOKEN_MAXIMA, and collect its tokens, like `Kernel.reduce_tokens`."""
        sums, maxima = self._kernel.reduce_tokens(ratios, position, places, self._tables, run)
        cells = self._tables.cells[places.rows]
        ends = np.flatnonzero(np.append(cells[1:] != cells[:-1], True)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            self._add_tails(int(cells[start]), ratios, start, stop)
        return sums, maxima

    def _add_tails(self, cell: int, ratios: Ratios, start: int, stop: int) -> None:
        """Collect the largest log ratios of one group's sequences."""
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
    """Sums of one group: its cluster table, and the PairSums of each pair of policies."""

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
    """Sums that are stored per run only."""

    # breakdowns, joint: see RunTables
    breakdowns: dict[str, Float64s] = field(default_factory=dict)
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT_CELLS, JOINT_CELLS), np.int64))
    # tokens, sequences: the worst rows with their positions
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
    """Builds the RunSums of one run. The kernel adds to `tables`."""

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
        ):  # ten times as fast as sorting all columns together
            np.add.at(sums, where, values)

    def sums(self) -> RunSums:
        return RunSums(self.tables.breakdowns, self.tables.joint, self._tokens, self._sequences)


def _find_worst_tokens(kernel: Kernel, ratios: Ratios, batch: TokenBatch, threshold: float) -> WorstRows:
    peak = np.maximum(ratios.max_log_ratio, -ratios.min_log_ratio)
    needed = max(threshold, _lowest_worst_score(peak))  # each of these sequences has a token with this score
    candidates = np.flatnonzero((peak > 0) & (peak >= needed))
    found = kernel.find_outside(ratios, candidates, -needed, needed)
    log_ratio = ratios.log_ratio_at(found)
    size = np.abs(log_ratio)
    worst = (size > 0) & (size >= _lowest_worst_score(size))  # few sequences may have many more tokens than needed
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
    """Return the smallest of the WORST_COUNT largest scores, or 0 if there are fewer."""
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
