"""Sums of one cell (a run, a group, and one value of every `--by` column) and of a whole run; `+` merges them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.measure import bins
from mismatchctl.measure.histogram import Histogram, HistogramRows, histograms_of, table_buffers
from mismatchctl.measure.kernels.kernel import BREAKDOWNS, JOINT, Kernel, Places, RunTables
from mismatchctl.measure.layers import table_of
from mismatchctl.measure.losses import Columns
from mismatchctl.measure.table import ClusterTable, both
from mismatchctl.measure.tails import TAIL_VALUES, WORST, LargestSoFar, Worst, largest
from mismatchctl.ratios import Ratios


@dataclass(frozen=True)
class PairSums:
    """What a pair of policies needs beside the cluster table: histogram and tails.

    Attributes:
        histogram: tokens by bucket of the cluster, tokens and K3 by signed log ratio.
        token_tail: largest token log ratios.
        sequence_tail: largest log ratios of whole sequences.
    """

    histogram: Histogram
    token_tail: Float64s
    sequence_tail: Float64s

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums.together([self, other])

    @staticmethod
    def together(parts: Sequence[PairSums]) -> PairSums:
        """The sum of one or more, in their order."""
        return PairSums(
            Histogram.together([own.histogram for own in parts]),
            np.sort(largest(np.concatenate([own.token_tail for own in parts]))),
            np.sort(largest(np.concatenate([own.sequence_tail for own in parts]))),
        )


class PairCollector:
    """Builds PairSums of some cells, block by block.

    Rows of its tables are one for each cell and bucket that occurs, so that a block may hold many cells.
    """

    def __init__(self, kernel: Kernel, rows: HistogramRows) -> None:
        self._kernel, self._rows = kernel, rows
        self._tables = table_buffers(rows)
        cells = np.unique(rows.cells).tolist()
        self._place = {cell: place for place, cell in enumerate(cells)}
        self._tokens = {cell: LargestSoFar() for cell in cells}
        self._sequences = {cell: LargestSoFar() for cell in cells}

    def reduce(
        self,
        ratios: Ratios,
        position: Ints | None,
        places: Places,
        run: RunTables | None = None,
    ) -> tuple[Float64s, Float64s]:
        """TOKEN_SUMS and TOKEN_MAXIMA of a block, which is taken note of; arguments as of Reduce."""
        sums, maxima = self._kernel.reduce(ratios, position, places, self._tables, run)
        cells = self._rows.cells[places.rows]
        ends = np.flatnonzero(np.append(cells[1:] != cells[:-1], True)) + 1
        for start, stop in zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True):
            self._add_tails(int(cells[start]), ratios, start, stop)
        return sums, maxima

    def _add_tails(self, cell: int, ratios: Ratios, start: int, stop: int) -> None:
        """Take note of the largest of the sequences `start:stop`, which are all of one cell."""
        known, segments = self._tokens[cell], ratios.segments
        first, last = segments.offsets[start], segments.offsets[stop]
        threshold = known.threshold
        if threshold == -np.inf and last - first > TAIL_VALUES:  # its histogram says where its tail begins
            threshold = bins.reached_by(self._tables.sums[self._place[cell], :, 0], TAIL_VALUES)
        if threshold == -np.inf:
            found = np.arange(first, last)
        else:
            candidates = start + np.flatnonzero(ratios.highest[start:stop] >= threshold)
            found = self._kernel.beyond(ratios, candidates, -np.inf, threshold)
        known.add(ratios.log_ratio_at(found))
        self._sequences[cell].add(ratios.log_ratio_sum[start:stop][segments.nonempty[start:stop]])

    def sums(self) -> dict[int, PairSums]:
        """Everything so far, by cell; the tables are empty afterwards."""
        histograms = histograms_of(self._tables, self._rows)
        return {
            cell: PairSums(histogram, np.sort(self._tokens[cell].values()), np.sort(self._sequences[cell].values()))
            for cell, histogram in histograms.items()
        }


@dataclass(frozen=True)
class CellSums:
    """The sums of one cell: its cluster table, and one PairSums per pair of policies."""

    table: ClusterTable
    pairs: dict[str, PairSums]

    def __add__(self, other: CellSums) -> CellSums:
        return CellSums(self.table + other.table, both(self.pairs, other.pairs))

    @property
    def size(self) -> int:
        """How many numbers it holds, about."""
        return self.table.sums.size + sum(pair.histogram.size for pair in self.pairs.values())

    def folded(self, cap: int) -> CellSums:
        """The same with at most `cap` clusters in each scope."""
        return CellSums(self.table.folded(cap), self.pairs)


@dataclass(frozen=True)
class RunSums:
    """What is kept per run only.

    Attributes:
        breakdowns, joint: as in RunTables.
        tokens, sequences: the worst, with their places.
    """

    breakdowns: dict[str, Float64s] = field(default_factory=dict)
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT, JOINT), np.int64))
    tokens: Worst = field(default_factory=Worst)
    sequences: Worst = field(default_factory=Worst)

    def __add__(self, other: RunSums) -> RunSums:
        return RunSums(
            both(self.breakdowns, other.breakdowns),
            self.joint + other.joint,
            self.tokens + other.tokens,
            self.sequences + other.sequences,
        )

    def moved(self, by: int) -> RunSums:
        """The same sums of files that lie so many places further on in the dump."""
        return replace(self, tokens=self.tokens.moved(by), sequences=self.sequences.moved(by))


class RunCollector:
    """Builds RunSums of the mismatch in so many clusters of one run; the kernel adds to `tables`."""

    def __init__(self, kernel: Kernel, clusters: int) -> None:
        self._kernel = kernel
        self.tables = RunTables(table_of(clusters))
        self._tokens, self._sequences = Worst(), Worst()

    def add(self, ratios: Ratios, batch: TokenBatch, columns: Columns, buckets: Ints) -> None:
        """Take note of a block, of whose sequences these are the mismatch's columns."""
        self._tokens = self._tokens + _worst_tokens(self._kernel, ratios, batch, self._tokens.threshold)
        self._sequences = self._sequences + _worst_sequences(columns, batch, self._sequences.threshold)
        table = self.tables.breakdowns["length"]
        where = buckets * table.shape[1] + BREAKDOWNS["length"].of(batch.segments.lengths)
        uncertain = columns["tokens"] - columns["reference_prob"]
        summed = [columns["tokens"], columns["abs"], columns["k3"], columns["log_ratio"], uncertain]
        for sums, values in zip(
            table.reshape(-1, len(summed)).T, summed, strict=True
        ):  # one by one is ten times as fast
            np.add.at(sums, where, values)

    def sums(self) -> RunSums:
        """Everything so far."""
        return RunSums(self.tables.breakdowns, self.tables.joint, self._tokens, self._sequences)


def _worst_tokens(kernel: Kernel, ratios: Ratios, batch: TokenBatch, threshold: float) -> Worst:
    peak = np.maximum(ratios.highest, -ratios.lowest)
    needed = max(threshold, _least_of_worst(peak))  # a sequence whose peak reaches it has a token that does
    candidates = np.flatnonzero((peak > 0) & (peak >= needed))
    found = kernel.beyond(ratios, candidates, -needed, needed)
    log_ratio = ratios.log_ratio_at(found)
    size = np.abs(log_ratio)
    worst = (size > 0) & (size >= _least_of_worst(size))  # of few sequences, far more tokens than that were found
    found, log_ratio = found[worst], log_ratio[worst]
    sequence = np.searchsorted(batch.segments.offsets, found, side="right") - 1
    token = found - batch.segments.offsets[sequence]
    position = token if batch.position is None else batch.position[found]
    place = np.stack([batch.file[sequence], batch.rows[sequence], position], axis=1)
    policy, reference = ratios.given
    fields: dict[str, NDArray[Any]] = {
        "token": token,
        "rollout_log_prob": reference[found].astype(np.float64),
        "train_log_prob": policy[found].astype(np.float64),
        "log_ratio": log_ratio,
    }
    return Worst.of(np.abs(log_ratio), place, fields | _names(batch, sequence))


def _least_of_worst(scores: Float64s) -> float:
    """The smallest of the WORST largest scores; 0 where there are fewer."""
    return float(largest(scores, WORST).min()) if len(scores) > WORST else 0.0


def _worst_sequences(columns: Columns, batch: TokenBatch, threshold: float) -> Worst:
    score = np.abs(columns["log_ratio"])
    found = np.flatnonzero((score > 0) & (score >= max(threshold, _least_of_worst(score))))
    place = np.stack([batch.file[found], batch.rows[found], np.zeros(len(found), np.int64)], axis=1)
    length = np.maximum(columns["tokens"][found], 1)
    fields: dict[str, NDArray[Any]] = {
        "tokens": columns["tokens"][found].astype(np.int64),
        "log_ratio_sum": columns["log_ratio"][found],
        "k3": columns["k3"][found] / length,
        "abs_diff_mean": columns["abs"][found] / length,
    }
    return Worst.of(score[found], place, fields | _names(batch, found))


def _names(batch: TokenBatch, rows: Ints) -> dict[str, NDArray[Any]]:
    names = ("step", "sequence_id", "prompt_id")
    return {name: batch.columns[name][rows].astype(object) for name in names if name in batch.columns}
