"""The interface of the kernels, and the tables that they add to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.core.bins import LENGTH_BINS, MAGNITUDE_BINS, POSITION_BINS, SIGNED_BINS, SURPRISAL_BINS
from mismatchctl.core.ratios import Ratios
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.columns import Columns, TokenLoss

BUCKETS = 64
"""Clusters are also counted in this number of buckets by hash, to resample histograms."""
LANES = 4
"""Consecutive tokens of one bin are added to this number of sums in turn, so that no addition waits for another."""
JOINT_CELLS = 128
"""Cells along each side of the grid of rollout and train probability."""
BREAKDOWNS = {"position": POSITION_BINS, "surprisal": SURPRISAL_BINS, "length": LENGTH_BINS}
"""Quantities that K3 is broken down by, with their bins."""

BREAKDOWN_SUMS, SHIFTED_BREAKDOWNS = 3, ("surprisal", "length")
"""Sums of each breakdown, and the breakdowns with two more sums."""


class PairTables:
    """Sums over tokens of a pair of policies, updated in place. Each sequence has a row, each row a cell.

    Attributes:
        cells: cell of each row [rows]. Default: one cell.
        tokens: by row and magnitude of the log ratio [rows, MAGNITUDE_BINS].
        sums: tokens and their K3, by cell and signed bin [cells, SIGNED_BINS, 2].
    """

    def __init__(
        self,
        cells: Ints | None = None,
        tokens: NDArray[np.int32] | None = None,
        sums: Float64s | None = None,
    ) -> None:
        self.cells = np.zeros(BUCKETS, np.int64) if cells is None else cells
        rows, number = len(self.cells), int(self.cells.max(initial=-1)) + 1
        self.tokens = np.zeros((rows, MAGNITUDE_BINS), np.int32) if tokens is None else tokens
        self.sums = np.zeros((number, SIGNED_BINS, 2)) if sums is None else sums


@dataclass
class RunTables:
    """Sums over tokens of the mismatch, updated in place.

    Attributes:
        layers: tokens and K3 by cluster, from `new_layer_table`.
        breakdowns: by quantity, [BUCKETS, bins, sums]: tokens, |log ratio| and K3. SHIFTED_BREAKDOWNS also have the log
            ratio and 1 minus the rollout probability.
        joint: tokens by rollout and train probability in equal steps [JOINT_CELLS, JOINT_CELLS].
    """

    layers: Float64s
    breakdowns: dict[str, Float64s] = field(
        default_factory=lambda: {
            name: np.zeros((BUCKETS, kind.count, BREAKDOWN_SUMS + 2 * (name in SHIFTED_BREAKDOWNS)))
            for name, kind in BREAKDOWNS.items()
        }
    )
    joint: NDArray[np.int64] = field(default_factory=lambda: np.zeros((JOINT_CELLS, JOINT_CELLS), np.int64))


@dataclass(frozen=True)
class SequencePlaces:
    """Table rows of each sequence.

    Attributes:
        rows: row of the pair's tables [S].
        buckets: bucket of its cluster [S], the row of the run's tables.
        clusters: row of its cluster in the cluster table [S].
    """

    rows: Ints
    buckets: Ints
    clusters: Ints

    def part(self, start: int, stop: int) -> SequencePlaces:
        """Return the sequences `start:stop`."""
        return SequencePlaces(self.rows[start:stop], self.buckets[start:stop], self.clusters[start:stop])


class TokenReduction(Protocol):
    """The pass over the tokens of a block."""

    def __call__(
        self,
        ratios: Ratios,
        position: Ints | None,
        places: SequencePlaces,
        pair: PairTables,
        run: RunTables | None = None,
    ) -> tuple[Float64s, Float64s]:
        """Return TOKEN_SUMS [len, S] and TOKEN_MAXIMA [len, S] of a block, and add its tokens to the tables.

        Args:
            ratios: made by the same kernel.
            position: position of each token in its response [T]. Null if no tokens are masked between valid ones.
            places: table rows of its sequences.
            pair: sums of this pair of policies.
            run: sums of the mismatch in the run. Null for other pairs.
        """


class OutsideSearch(Protocol):
    """Search for tokens in the tails of the distribution."""

    def __call__(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """Return the tokens [N] of some sequences with a log ratio <= `low` or >= `high`, in order."""


class CorrectionReduction(Protocol):
    """Application of a correction to each sequence."""

    def __call__(
        self,
        correction: Correction,
        ratios: Mapping[str, Ratios],
        k3: Float64s,
        batch: TokenBatch,
        plain: TokenLoss | None = None,
        *,
        losses: bool = False,
    ) -> tuple[Columns, Columns]:
        """Return sum columns and maximum columns before normalization, like `correction_columns`."""


@dataclass(frozen=True)
class Kernel:
    """The arithmetic over tokens.

    Attributes:
        compute_ratios: makes Ratios from policy and reference log-probs [T] and their segments.
        reduce_tokens: the pass over the tokens.
        find_outside: search for tokens in the tails of the distribution.
        correction_columns: application of a correction.
        split_blocks: yields (index of the first sequence, block) with blocks of a suitable size in the right memory.
        device: name of the device, if it is not the CPU.
    """

    compute_ratios: Callable[[Floats, Floats, Segments], Ratios]
    reduce_tokens: TokenReduction
    find_outside: OutsideSearch
    correction_columns: CorrectionReduction
    split_blocks: Callable[[TokenBatch], Iterator[tuple[int, TokenBatch]]]
    device: str | None = None
