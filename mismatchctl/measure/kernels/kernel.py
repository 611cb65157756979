"""The kernel that computes sums over tokens in numpy. Other kernels are subclasses that replace its slow parts."""

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
"""Number of buckets of clusters, assigned by hash. Differences between buckets give the intervals of quantiles."""
JOINT_CELLS = 128
"""The joint histogram of rollout and train probability has this number of cells along each axis."""
BREAKDOWNS = {"position": bins.POSITION_BINS, "surprisal": bins.SURPRISAL_BINS, "length": bins.LENGTH_BINS}
"""Breakdown of K3 -> its bins."""

BREAKDOWN_SUMS, SHIFTED_BREAKDOWNS = 3, ("surprisal", "length")
"""Number of sums per bin, and the breakdowns that have two more sums per bin (see `RunTables.breakdowns`)."""


class PairTables:
    """Tables of token counts and K3 by log ratio, for a pair of policies. Each row is for one group and one bucket."""

    def __init__(self, cells: Ints | None = None, buckets: Ints | None = None) -> None:
        cells = np.zeros(BUCKETS, np.int64) if cells is None else cells
        # group numbers, and the index of each row's group
        self.numbers, self.cells = np.unique(cells, return_inverse=True)
        self.buckets = np.arange(BUCKETS) if buckets is None else buckets
        self.tokens = np.zeros((len(cells), MAGNITUDE_BINS), np.int32)  # by row and magnitude of the log ratio
        self.sums = np.zeros((len(self.numbers), SIGNED_BINS, 2))  # tokens and their K3, by group and signed bin


@dataclass
class RunTables:
    """Sums over the tokens of a run for the pair train and rollout. The kernel updates them in place."""

    layers: Float64s  # tokens and K3 by cluster, from `new_layer_table`
    # by quantity, [BUCKETS, bins, sums]: tokens, |log ratio| and K3. SHIFTED_BREAKDOWNS also have the log ratio and 1
    # minus the rollout probability.
    breakdowns: dict[str, Float64s] = field(
        default_factory=lambda: {
            name: np.zeros((BUCKETS, kind.count, BREAKDOWN_SUMS + 2 * (name in SHIFTED_BREAKDOWNS)))
            for name, kind in BREAKDOWNS.items()
        }
    )
    # tokens by rollout and train probability in equal steps [JOINT_CELLS, JOINT_CELLS]
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT_CELLS, JOINT_CELLS), np.int64))


@dataclass(frozen=True)
class SequencePlaces:
    """For each sequence, the rows of the tables that receive its tokens."""

    rows: Ints  # row of the pair's tables [S]
    buckets: Ints  # bucket of the sequence's cluster [S], which is the row of the run's tables
    clusters: Ints  # row of the sequence's cluster in the cluster table [S]

    def part(self, start: int, stop: int) -> SequencePlaces:
        return SequencePlaces(self.rows[start:stop], self.buckets[start:stop], self.clusters[start:stop])


class Kernel:
    """Computes sums over tokens in numpy, for small dumps. Other kernels must give the same results."""

    device: str | None = None  # name of the device, if it is not the CPU
    evaluates_all_tokens = False  # True if selecting sequences costs more than it saves

    def compute_ratios(self, policy: Floats, reference: Floats, segments: Segments) -> Ratios:
        return Ratios(policy, reference, segments)

    def split_blocks(self, batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
        """Yield (index of the first sequence, block). The kernel chooses the size of the blocks."""
        return batch.blocks()

    def reduce_tokens(
        self,
        ratios: Ratios,  # ratios made by the same kernel
        # position of each token in its response [T]. None if no masked tokens are between valid tokens.
        position: Ints | None,
        places: SequencePlaces,
        pair: PairTables,
        run: RunTables | None = None,  # sums of the mismatch in the run. None for other pairs.
    ) -> tuple[Float64s, Float64s]:
        """Return the TOKEN_SUMS and TOKEN_MAXIMA of each sequence. Add all tokens to the tables `pair` and `run`."""
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
        """Add each token to the row `where`: 1 to the first column, its values in `columns` to the others."""
        for sums, values in zip(table.T, (None, *columns), strict=True):
            if len(sums) < len(where):
                sums += np.bincount(where, values, len(sums))
            else:
                np.add.at(sums, where, 1 if values is None else values)

    def find_outside(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """Return the indices of tokens in `sequences` with log ratio <= `low` or >= `high`, in order."""
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
        ratios.log_ratio_sum,
        ratios.absolute_sum,
        ratios.square_sum,
        ratios.k3_sum,
        ratios.excess_sum,
        ratios.squared_excess_sum,
        total(x == 0),
        total(difference),
        total(difference * difference),
        total(policy_prob),
        total(policy_prob * policy_prob),
        total(reference_prob),
        total(reference_prob * reference_prob),
        total(ratios.policy),
        total(ratios.reference),
        total(adjacent),
        total(np.where(adjacent, x * before, 0.0)),
        total(np.where(adjacent, x + before, 0.0)),
    ]
    largest = [ratios.max_log_ratio, -ratios.min_log_ratio, ratios.segments.max(difference)]
    return np.stack(sums), np.stack(largest)


NUMPY_KERNEL = Kernel()
