"""Sums of one cell (a run, a group, and one value of every `--by` column) and of a whole run; `+` merges them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.ratios import Ratios
from mismatchctl.sums import bins
from mismatchctl.sums.clusters import ClusterTable
from mismatchctl.sums.tails import LargestSoFar, Worst, largest

BUCKETS = 64
"""Clusters are also counted in this many buckets by their hash: enough to resample histograms from."""


@dataclass(frozen=True)
class PairSums:
    """What a pair of policies needs beside the cluster table: histograms and tails.

    Attributes:
        counts: tokens by bucket of their cluster and by magnitude of the log ratio [BUCKETS, MAGNITUDES].
        signed: tokens by signed log ratio [SIGNED].
        k3: K3 by signed log ratio [SIGNED].
        token_tail: largest token log ratios.
        sequence_tail: largest log ratios of whole sequences.
    """

    counts: NDArray[np.int64]
    signed: NDArray[np.int64]
    k3: Float64s
    token_tail: Float64s
    sequence_tail: Float64s

    def __add__(self, other: PairSums) -> PairSums:
        return PairSums(
            self.counts + other.counts,
            self.signed + other.signed,
            self.k3 + other.k3,
            np.sort(largest(np.concatenate([self.token_tail, other.token_tail]))),
            np.sort(largest(np.concatenate([self.sequence_tail, other.sequence_tail]))),
        )


class PairCollector:
    """Builds PairSums from blocks of one cell."""

    def __init__(self) -> None:
        self._bins: list[NDArray[np.int32]] = []
        self._buckets: list[NDArray[np.int64]] = []
        self._k3 = np.zeros(bins.SIGNED)
        self._tokens, self._sequences = LargestSoFar(), LargestSoFar()

    def add(self, ratios: Ratios, buckets: Ints) -> None:
        """Take note of a block; `buckets` gives each sequence's bucket [S]."""
        binned = bins.signed_bin(ratios.log_ratio)
        self._k3 += np.bincount(binned, weights=ratios.k3, minlength=bins.SIGNED)
        self._bins.append(binned)
        self._buckets.append(ratios.segments.spread(buckets))
        self._tokens.add(ratios.log_ratio)
        self._sequences.add(ratios.log_ratio_sum[ratios.segments.nonempty])

    def sums(self) -> PairSums:
        """Everything so far."""
        binned = np.concatenate([np.zeros(0, np.int32), *self._bins])
        buckets = np.concatenate([np.zeros(0, np.int64), *self._buckets])
        counts = np.bincount(buckets * bins.SIGNED + binned, minlength=BUCKETS * bins.SIGNED)
        by_bucket = counts.reshape(BUCKETS, bins.SIGNED)
        return PairSums(
            bins.fold_signs(by_bucket),
            by_bucket.sum(axis=0),
            self._k3,
            np.sort(self._tokens.values()),
            np.sort(self._sequences.values()),
        )


@dataclass(frozen=True)
class CellSums:
    """The sums of one cell: its cluster table, and one PairSums per pair of policies."""

    table: ClusterTable
    pairs: dict[str, PairSums]

    def __add__(self, other: CellSums) -> CellSums:
        pairs = {
            name: self.pairs[name] + other.pairs[name] if name in other.pairs else self.pairs[name]
            for name in self.pairs
        }
        pairs |= {name: sums for name, sums in other.pairs.items() if name not in self.pairs}
        return CellSums(self.table + other.table, pairs)


JOINT = 128
"""Cells along each side of the grid of rollout probability against train probability."""


BREAKDOWNS = {"position": bins.POSITION_BINS, "surprisal": bins.SURPRISAL_BINS, "length": bins.LENGTH_BINS}
"""Quantities that K3 is broken down by, with their bins."""


@dataclass(frozen=True)
class RunSums:
    """What is kept per run only.

    Attributes:
        breakdowns: by quantity, [bins, BUCKETS, 3]: tokens, |log ratio| and K3.
        joint: tokens by rollout and train probability, in JOINT equal steps each [JOINT, JOINT].
        tokens, sequences: the worst, with their places.
    """

    breakdowns: dict[str, Float64s] = field(default_factory=dict)
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT, JOINT), np.int64))
    tokens: Worst = field(default_factory=Worst)
    sequences: Worst = field(default_factory=Worst)

    def __add__(self, other: RunSums) -> RunSums:
        breakdowns = dict(self.breakdowns)
        for name, breakdown in other.breakdowns.items():
            breakdowns[name] = breakdowns[name] + breakdown if name in breakdowns else breakdown
        return RunSums(
            breakdowns, self.joint + other.joint, self.tokens + other.tokens, self.sequences + other.sequences
        )


class RunCollector:
    """Builds RunSums from blocks of the mismatch."""

    def __init__(self) -> None:
        self._breakdowns = {name: np.zeros((kind.count * BUCKETS, 3)) for name, kind in BREAKDOWNS.items()}
        self._joint = np.zeros(JOINT * JOINT, np.int64)
        self._tokens, self._sequences = Worst(), Worst()

    def add(self, ratios: Ratios, columns: dict[str, Float64s], batch: TokenBatch, buckets: Ints) -> None:
        """Take note of a block; `columns` are the mismatch's per-sequence sums, `buckets` each sequence's bucket."""
        spread = batch.segments.spread(buckets)
        per_token = (None, ratios.absolute, ratios.k3)
        self._break_down("position", batch.positions + 1, spread, per_token)
        self._break_down("surprisal", np.maximum(-ratios.reference, 0.0), spread, per_token)
        per_sequence = (columns["tokens"], columns["abs"], columns["k3"])
        self._break_down("length", batch.segments.lengths, buckets, per_sequence)
        across, up = (
            np.minimum((prob * JOINT).astype(np.int64), JOINT - 1)
            for prob in (ratios.reference_prob, ratios.policy_prob)
        )
        self._joint += np.bincount(across * JOINT + up, minlength=JOINT * JOINT)
        self._tokens = self._tokens + _worst_tokens(ratios, batch, self._tokens.threshold)
        self._sequences = self._sequences + _worst_sequences(columns, batch)

    def _break_down(self, name: str, values: NDArray[Any], buckets: Ints, columns: tuple[Float64s | None, ...]) -> None:
        sums = self._breakdowns[name]
        where = BREAKDOWNS[name].of(values) * BUCKETS + buckets
        for index, column in enumerate(columns):
            sums[:, index] += np.bincount(where, weights=column, minlength=len(sums))

    def sums(self) -> RunSums:
        """Everything so far."""
        breakdowns = {name: sums.reshape(-1, BUCKETS, 3) for name, sums in self._breakdowns.items()}
        return RunSums(breakdowns, self._joint.reshape(JOINT, JOINT), self._tokens, self._sequences)


def _worst_tokens(ratios: Ratios, batch: TokenBatch, threshold: float) -> Worst:
    found = np.flatnonzero((ratios.absolute >= threshold) & (ratios.absolute > 0))
    if len(found) > 4096:  # keep ties at the cut
        cut = largest(ratios.absolute[found], 50).min()
        found = found[ratios.absolute[found] >= cut]
    sequence = np.searchsorted(batch.segments.offsets, found, side="right") - 1
    place = np.stack([np.full(len(found), batch.file), batch.rows[sequence], batch.positions[found]], axis=1)
    fields: dict[str, NDArray[Any]] = {
        "token": found - batch.segments.offsets[sequence],
        "rollout_log_prob": ratios.reference[found],
        "train_log_prob": ratios.policy[found],
        "log_ratio": ratios.log_ratio[found],
    }
    return Worst.of(ratios.absolute[found], place, fields | _names(batch, sequence))


def _worst_sequences(columns: dict[str, Float64s], batch: TokenBatch) -> Worst:
    score = np.abs(columns["log_ratio"])
    found = np.flatnonzero(score > 0)
    place = np.stack([np.full(len(found), batch.file), batch.rows[found], np.zeros(len(found), np.int64)], axis=1)
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
