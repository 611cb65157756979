"""The interface of the kernels, and the tables that they add to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Floats, Ints, Segments, TokenBatch
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
    """Sums over tokens of a pair of policies, updated in place. Each sequence has a row, each row a cell."""

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
    """Sums over tokens of the mismatch, updated in place."""

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
    """Table rows of each sequence."""

    rows: Ints  # row of the pair's tables [S]
    buckets: Ints  # bucket of its cluster [S], the row of the run's tables
    clusters: Ints  # row of its cluster in the cluster table [S]

    def part(self, start: int, stop: int) -> SequencePlaces:
        return SequencePlaces(self.rows[start:stop], self.buckets[start:stop], self.clusters[start:stop])


class TokenReduction(Protocol):
    """The pass over the tokens of a block."""

    def __call__(
        self,
        ratios: Ratios,  # made by the same kernel
        # position of each token in its response [T]. Null if no tokens are masked between valid ones.
        position: Ints | None,
        places: SequencePlaces,  # table rows of its sequences
        pair: PairTables,  # sums of this pair of policies
        run: RunTables | None = None,  # sums of the mismatch in the run. Null for other pairs.
    ) -> tuple[Float64s, Float64s]:
        """Return TOKEN_SUMS [len, S] and TOKEN_MAXIMA [len, S] of a block, and add its tokens to the tables."""


class OutsideSearch(Protocol):
    """Search for tokens in the tails of the distribution."""

    def __call__(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """Return the tokens [N] of some sequences with a log ratio <= `low` or >= `high`, in order."""


TRUNCATED_COLUMNS = (
    "weight_excess",
    "squared_weight_excess",
    "mean_excess",
    "kept_excess",
    "squared_kept_weight",
    "sequence_weight",
    "weight_high",
    "squared_sequence_weight",
)
"""Columns that an upper bound of token weights changes."""


WRITTEN_SUMS = 11
"""Number of sums that a loop writes per bound: six of unchanged tokens, four of bounded tokens, one squared sum of
sequences."""


class WeightTruncation(Protocol):
    """Token weights under nested upper bounds."""

    def __call__(
        self,
        # minus 1, and as they are [T] each, before these bounds. Null for the second if the first is exact.
        weights: tuple[Float64s, Float64s | None],
        kept: Bools | None,  # tokens that gates keep [T]. Default: all.
        segments: Segments,  # the sequences
        parts: tuple[Ints, int],  # part of each sequence [S], and number of parts
        edges: Float64s,  # smallest weight that each bound changes, ascending [bounds]
        bounds: Float64s,  # result for such weights [bounds]
        floor: tuple[float, float],  # lower bound of the weights, and the result below it
    ) -> Float64s:
        """Return TRUNCATED_COLUMNS summed over each part at each bound [parts, len, bounds].

        Each is a sum over unchanged weights, accumulated upward along the bounds, plus a sum over bounded weights,
        accumulated downward. So values are never subtracted.
        """


@dataclass(frozen=True)
class NestedItems:
    """Entry rank of values under nested bounds."""

    edges: Float64s  # ascending edges of the bins of the value
    # low, high: first rank whose lower, or upper, bound admits each bin [edges + 1], else `count`
    low: Ints
    high: Ints
    count: int  # number of ranks

    @cached_property
    def always(self) -> tuple[float, float]:
        """Interval of the values that every rank admits, excluding the upper end."""
        inside = np.flatnonzero(np.maximum(self.low, self.high) == 0)
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return (float(ends[inside[0]]), float(ends[inside[-1] + 1])) if len(inside) else (np.inf, np.inf)

    @cached_property
    def cells(self) -> EdgeCells:
        return build_edge_cells(self.edges)


NESTED_CLUSTER_COLUMNS = (
    "kept",
    "kept_excess",
    "squared_kept_weight",
    "sequence_weight",
    "squared_sequence_weight",
    "touched",
)
"""Columns that a bound of a gate changes, stored by cluster."""
NESTED_PART_COLUMNS = ("kept_k3", "tokens_low", "tokens_high", "sequences_low", "sequences_high", "emptied")
"""Columns that a bound of a gate changes, stored by part. Four belong to the gate."""
NestedValues = tuple[Float64s | None, Float64s, Float64s, Float64s]
"""Per item [I]: tokens that other gates keep (null: one each), their K3, weights minus 1 and squared weights."""


class NestedSummation(Protocol):
    """Tokens or sequences that nested bounds of a gate keep."""

    def __call__(
        self,
        values: Float64s,  # statistic of each item, a token or a whole sequence [I]
        brought: NestedValues,  # values of each item, 0 if other gates reject it
        items: Segments,  # items of each sequence, at least one
        sizes: Float64s,  # tokens per sequence [S]
        gains: Float64s,  # values per token of further columns [S, G]
        clusters: tuple[Ints, int],  # cluster of each sequence [S], and number of clusters
        parts: tuple[Ints, int],  # part of each sequence [S], and number of parts
        entries: NestedItems,  # the nested bounds
    ) -> tuple[Float64s, Float64s]:
        """Return NESTED_CLUSTER_COLUMNS [len, clusters, ranks], and NESTED_PART_COLUMNS with gains [..., parts, ranks].

        Gains are summed over kept, then over rejected items. Sums over kept items accumulate upward along the ranks,
        sums over rejected items downward. So values are never subtracted.
        """


def sum_up_to_bound(written: Float64s) -> Float64s:
    """Sum the entries up to each rank: [R, ranks + 1] to [R, ranks]."""
    found: Float64s = np.cumsum(written[:, :-1], axis=1)
    return found


def sum_past_bound(written: Float64s) -> Float64s:
    """Sum the entries after each rank: [R, ranks + 1] to [R, ranks]."""
    found: Float64s = np.cumsum(written[:, :0:-1], axis=1)[:, ::-1]
    return found


def nested_part_sums(written: Iterable[Float64s]) -> Float64s:
    """Accumulate the entries of parts [NESTED_PART_COLUMNS + G, parts, ranks + 1] along the ranks."""
    k3, *others = written
    over, gains = others[: len(NESTED_PART_COLUMNS) - 1], others[len(NESTED_PART_COLUMNS) - 1 :]
    kept, rejected = ([along(each) for each in gains] for along in (sum_up_to_bound, sum_past_bound))
    return np.stack([sum_up_to_bound(k3), *map(sum_past_bound, over), *kept, *rejected])


EdgeCells = tuple[Ints, float, float]
_CELLS_PER_EDGE = 4
"""So that most edges have their own cell."""


def build_edge_cells(edges: Float64s) -> EdgeCells:
    """Divide the range of ascending edges [N] into equal cells, so that a value is compared with few edges.

    Returns:
        Number of edges before each cell [1 + cells], start of the first cell, and 1 / width.
    """
    finite = edges[np.isfinite(edges)]
    first, last = (float(finite[0]), float(finite[-1])) if len(finite) else (0.0, 0.0)
    count = _CELLS_PER_EDGE * len(edges)
    width = (last - first) / count
    scale = 1 / width if 0 < width < np.inf else 0.0
    with np.errstate(all="ignore"):
        at = (edges - first) * scale  # same formula as in the loops, so that rounding is equal
    places = np.minimum(np.where(at > 0, at, 0.0), count - 1).astype(np.int64)
    return np.searchsorted(places, np.arange(count + 1)), first, scale


def bound_factors(bounds: Float64s) -> Float64s:
    """Return bounds minus 1, its square, bounds and their square [4, bounds]. 0 for infinite bounds."""
    finite = np.where(np.isfinite(bounds), bounds, 0.0)
    with np.errstate(over="ignore"):
        made = np.stack([bounds - 1.0, (bounds - 1.0) ** 2, finite, finite**2])
    return np.where(np.isfinite(made), made, 0.0)


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
    """The arithmetic over tokens."""

    # makes Ratios from policy and reference log-probs [T] and their segments
    compute_ratios: Callable[[Floats, Floats, Segments], Ratios]
    reduce_tokens: TokenReduction  # the pass over the tokens
    find_outside: OutsideSearch  # search for tokens in the tails of the distribution
    truncate_weights: WeightTruncation  # token weights under nested upper bounds
    sum_nested: NestedSummation  # sums under nested bounds of a gate
    correction_columns: CorrectionReduction  # application of a correction
    # yields (index of the first sequence, block) with blocks of a suitable size in the right memory
    split_blocks: Callable[[TokenBatch], Iterator[tuple[int, TokenBatch]]]
    device: str | None = None  # name of the device, if it is not the CPU
