"""The numpy kernel, the base class of other kernels, and the tables that kernels fill."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core import bins
from mismatchctl.core.batch import Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS
from mismatchctl.core.ratios import Ratios

BUCKETS = 64
"""Clusters are hashed into this number of buckets. Intervals of quantiles come from differences between buckets."""
JOINT_CELLS = 128
"""Number of cells per axis of the joint histogram of rollout probability and train probability."""
BREAKDOWNS = {"position": bins.POSITION_BINS, "surprisal": bins.SURPRISAL_BINS, "length": bins.LENGTH_BINS}
"""Quantity -> its bins, for the quantities that K3 is broken down by."""

BREAKDOWN_SUMS, SHIFTED_BREAKDOWNS = 3, ("surprisal", "length")
"""Number of sums in each bin of a breakdown, and the breakdowns whose bins have 2 more (`RunTables.breakdowns`)."""


class PairTables:
    """Token counts and K3 by log ratio of two policies. Row i is for the group `cells[i]` and bucket `buckets[i]`."""

    def __init__(self, cells: Ints | None = None, buckets: Ints | None = None) -> None:
        cells = np.zeros(BUCKETS, np.int64) if cells is None else cells
        # from here on, `self.cells` contains indices into the group numbers `self.numbers`
        self.numbers, self.cells = np.unique(cells, return_inverse=True)
        self.buckets = np.arange(BUCKETS) if buckets is None else buckets
        self.tokens = np.zeros((len(cells), MAGNITUDE_BINS), np.int32)  # token counts by row and |log ratio|
        self.sums = np.zeros((len(self.numbers), SIGNED_BINS, 2))  # token counts and K3 by group and log ratio


@dataclass
class RunTables:
    """Sums over the tokens of a run for the pair train and rollout. Kernels add tokens to these arrays."""

    layers: Float64s  # token counts and K3 by cluster, rollout probability and K3, from `new_layer_table`
    # by quantity: [BUCKETS, bins, sums]. The sums are the number of tokens, |log ratio| and K3. SHIFTED_BREAKDOWNS also
    # have sums of the log ratio and of 1 - p, where p is the rollout probability.
    breakdowns: dict[str, Float64s] = field(
        default_factory=lambda: {
            name: np.zeros((BUCKETS, kind.count, BREAKDOWN_SUMS + 2 * (name in SHIFTED_BREAKDOWNS)))
            for name, kind in BREAKDOWNS.items()
        }
    )
    # token counts by rollout probability and train probability, in cells of equal size
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT_CELLS, JOINT_CELLS), np.int64))


@dataclass(frozen=True)
class SequencePlaces:
    """For each sequence, the rows of the tables that receive its tokens."""

    rows: Ints  # row in PairTables [S]
    buckets: Ints  # bucket of the sequence's cluster [S], the first index in `RunTables.breakdowns`
    clusters: Ints  # row of the sequence's cluster in the cluster table [S], the first index in `RunTables.layers`

    def part(self, start: int, stop: int) -> SequencePlaces:
        return SequencePlaces(self.rows[start:stop], self.buckets[start:stop], self.clusters[start:stop])


class Kernel:
    """Computes sums over tokens in numpy, for small dumps. Subclasses must give the same results."""

    device: str | None = None  # names of the GPUs, None for the CPU
    evaluates_all_tokens = False  # True if it is faster to read all tokens than to select sequences first

    def compute_ratios(self, policy: Floats, reference: Floats, segments: Segments) -> Ratios:
        return Ratios(policy, reference, segments)

    def split_blocks(self, batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
        """Split a batch into blocks of a good size for this kernel. Yield (index of the first sequence, block)."""
        return batch.blocks()

    def reduce_tokens(
        self,
        ratios: Ratios,  # from `compute_ratios` of this kernel
        # position of each token in its response [T], or None if no masked token is between valid tokens
        position: Ints | None,
        places: SequencePlaces,
        pair: PairTables,
        run: RunTables | None = None,  # only for the mismatch, None for other pairs
    ) -> tuple[Float64s, Float64s]:
        """Add all tokens to the tables `pair` and `run`. Return the TOKEN_SUMS and TOKEN_MAXIMA of each sequence."""
        spread, signed, k3 = ratios.segments.spread, bins.signed_bin(ratios.log_ratio), ratios.k3
        rows, cells = spread(places.rows), spread(pair.cells[places.rows])
        self.add_by_bin(pair.tokens.reshape(-1, 1), rows * MAGNITUDE_BINS + bins.magnitude_bin(signed))
        self.add_by_bin(pair.sums.reshape(-1, 2), cells * SIGNED_BINS + signed, k3)
        at = ratios.segments.places if position is None else position
        if run is not None:
            summed, buckets = (ratios.abs_log_ratio, k3, ratios.log_ratio, 1.0 - ratios.reference_prob), places.buckets
            for name, values in (("position", at + 1), ("surprisal", np.maximum(-ratios.reference, 0.0))):
                kind, table = BREAKDOWNS[name], run.breakdowns[name]
                where = spread(buckets) * kind.count + kind.find_bins(values)
                self.add_by_bin(table.reshape(-1, table.shape[-1]), where, *summed[: table.shape[-1] - 1])
            across, up = (
                np.minimum((prob * JOINT_CELLS).astype(np.int64), JOINT_CELLS - 1)
                for prob in (ratios.reference_prob, ratios.policy_prob)
            )
            self.add_by_bin(run.joint.reshape(-1, 1), across * JOINT_CELLS + up)
            layers = spread(places.clusters) * math.prod(run.layers.shape[1:3])
            layers = layers + bins.layer_bin(ratios.reference, k3, ratios.segments)
            self.add_by_bin(run.layers.reshape(-1, 2), layers, k3)
        return _sum_tokens(ratios, at)

    def add_by_bin(self, table: NDArray[Any], where: NDArray[Any], *columns: Float64s) -> None:
        """For each token i, add 1 to `table[where[i], 0]` and `columns[k][i]` to `table[where[i], k + 1]`."""
        for sums, values in zip(table.T, (None, *columns), strict=True):
            if len(sums) < len(where):
                sums += np.bincount(where, values, len(sums))
            else:
                np.add.at(sums, where, 1 if values is None else values)

    def find_outside(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """Return the indices of the tokens in `sequences` with log ratio <= `low` or >= `high`, ascending."""
        tokens = ratios.segments.token_indices(sequences)
        x = ratios.log_ratio[tokens]
        return tokens[(x <= low) | (x >= high)]


def _sum_tokens(ratios: Ratios, position: Ints) -> tuple[Float64s, Float64s]:
    total = ratios.segments.sum
    x, difference = ratios.log_ratio, np.abs(ratios.prob_diff)
    before = np.roll(x, 1)
    adjacent = (ratios.segments.places > 0) & (position - np.roll(position, 1) == 1)
    policy_prob, reference_prob = ratios.policy_prob, ratios.reference_prob
    sums = [
        ratios.log_ratio_sum, ratios.absolute_sum, ratios.square_sum, ratios.k3_sum, ratios.excess_sum,
        ratios.squared_excess_sum, total(x == 0), total(difference), total(difference * difference),
        total(policy_prob), total(policy_prob * policy_prob), total(reference_prob),
        total(reference_prob * reference_prob), total(ratios.policy), total(ratios.reference), total(adjacent),
        total(np.where(adjacent, x * before, 0.0)), total(np.where(adjacent, x + before, 0.0)),
    ]  # fmt: skip
    largest = [ratios.max_log_ratio, -ratios.min_log_ratio, ratios.segments.max(difference)]
    return np.stack(sums), np.stack(largest)


NUMPY_KERNEL = Kernel()
