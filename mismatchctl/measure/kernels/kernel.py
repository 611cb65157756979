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
"""Clusters are also counted in this many buckets by their hash: enough to resample histograms from."""
LANES = 4
"""Tokens in a row that fall into one bin are added in turn to so many sums, so that none waits for the one before."""
JOINT_CELLS = 128
"""Cells along each side of the grid of rollout probability against train probability."""
BREAKDOWNS = {"position": POSITION_BINS, "surprisal": SURPRISAL_BINS, "length": LENGTH_BINS}
"""Quantities that K3 is broken down by, with their bins."""

BREAKDOWN_SUMS, SHIFTED_BREAKDOWNS = 3, ("surprisal", "length")
"""Sums that each of these has, and those that have two more."""


class PairTables:
    """Sums over tokens of a pair of policies, added to in place; each sequence is given a row, each row is of a cell.

    Attributes:
        cells: of each row [rows]; all of one where nothing else is said.
        tokens: by row and magnitude of the log ratio [rows, MAGNITUDES].
        sums: tokens, and their K3, by cell and signed bin [cells, SIGNED, 2].
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
    """Counts over tokens of the mismatch, added to in place.

    Attributes:
        layers: tokens and K3 by cluster, as `layers.table_of` makes them.
        breakdowns: by quantity, [BUCKETS, bins, SUMMED]: tokens, |log ratio| and K3; of SHIFTED ones also the log
            ratio and 1 minus the rollout's probability.
        joint: tokens by rollout and train probability, in JOINT equal steps each [JOINT, JOINT].
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
    """Where each sequence is counted.

    Attributes:
        rows: the row of the pair's tables [S].
        buckets: bucket of its cluster [S], the row of the run's tables.
        clusters: the row of its cluster in the cluster table [S].
    """

    rows: Ints
    buckets: Ints
    clusters: Ints

    def part(self, start: int, stop: int) -> SequencePlaces:
        """Those of the sequences `start:stop`."""
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
        """TOKEN_SUMS [len, S] and TOKEN_MAXIMA [len, S] of a block; adds its tokens to the tables.

        Args:
            ratios: of the kernel's own kind.
            position: place of each token in its response [T]; None where nothing is masked in between.
            places: where its sequences are counted.
            pair: sums of this pair of policies.
            run: sums of the mismatch in the run; None for another pair.
        """


class OutsideSearch(Protocol):
    """The search for tokens at the ends of the distribution."""

    def __call__(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        """Tokens [N] of some sequences whose log ratio is at or below `low`, or at or above `high`; in order."""


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
"""Columns that an upper bound of token weights moves."""


WRITTEN_SUMS = 11
"""What a loop writes at a rung: what six sums hold of a token, what it counts for in the others, and what a sequence is
squared from there on."""


class WeightTruncation(Protocol):
    """What each of a long row of upper bounds makes of token weights."""

    def __call__(
        self,
        weights: tuple[Float64s, Float64s | None],
        kept: Bools | None,
        segments: Segments,
        parts: tuple[Ints, int],
        edges: Float64s,
        bounds: Float64s,
        floor: tuple[float, float],
    ) -> Float64s:
        """TRUNCATED summed over each part at each bound [parts, len, bounds].

        Each is the sum of what a bound leaves as it is, and of what it makes of the rest: both are added up from the
        tokens, one upward along the bounds and one downward, so that nothing is subtracted.

        Args:
            weights: minus 1, and as they are [T] each, before these bounds; None: the first holds every digit.
            kept: tokens that gates leave [T]; None: all.
            segments: the sequences.
            parts: the part of each sequence [S], and how many there are.
            edges: where the weights begin that a bound does not leave as they are, ascending [bounds].
            bounds: what it makes of those [bounds].
            floor: a weight below which all are the same under every bound, and what they are.
        """


@dataclass(frozen=True)
class NestedItems:
    """Where values enter along a ladder of bounds.

    Attributes:
        edges: of bins of the value, ascending.
        low, high: the first rung whose lower, or upper, bound lets each bin in [edges + 1]; where none does, `count`.
        count: how many rungs there are.
    """

    edges: Float64s
    low: Ints
    high: Ints
    count: int

    @cached_property
    def always(self) -> tuple[float, float]:
        """The values that every rung lets in, the second excluded."""
        inside = np.flatnonzero(np.maximum(self.low, self.high) == 0)
        ends = np.concatenate([[-np.inf], self.edges, [np.inf]])
        return (float(ends[inside[0]]), float(ends[inside[-1] + 1])) if len(inside) else (np.inf, np.inf)

    @cached_property
    def cells(self) -> EdgeCells:
        """Where among its edges a value is looked for."""
        return build_edge_cells(self.edges)


NESTED_CLUSTER_COLUMNS = (
    "kept",
    "kept_excess",
    "squared_kept_weight",
    "sequence_weight",
    "squared_sequence_weight",
    "touched",
)
"""Columns that a bound of a gate moves, of which clusters are told."""
NESTED_PART_COLUMNS = ("kept_k3", "tokens_low", "tokens_high", "sequences_low", "sequences_high", "emptied")
"""Others; four are the gate's own."""
NestedValues = tuple[Float64s | None, Float64s, Float64s, Float64s]
"""Of items: tokens that other gates keep (None: one each), their K3, their weights minus 1 and squared weights [I]."""


class NestedSummation(Protocol):
    """What each of a long row of bounds of a gate keeps, where each keeps all that the one before it does."""

    def __call__(
        self,
        values: Float64s,
        brought: NestedValues,
        items: Segments,
        sizes: Float64s,
        gains: Float64s,
        clusters: tuple[Ints, int],
        parts: tuple[Ints, int],
        rungs: NestedItems,
    ) -> tuple[Float64s, Float64s]:
        """CLIMBED [len, clusters, rungs]; CLIMBED_BY_ALL, gains of what is kept, and of the rest [..., parts, rungs].

        All are added up from what is written where it enters: what tells of kept tokens upward along the rungs, what
        tells of rejected ones downward, so that nothing is subtracted.

        Args:
            values: what the gate compares, of each item: a token, or a sequence as a whole [I].
            brought: by each item; nothing but 0 by one that other gates reject.
            items: those of each sequence, which has one.
            sizes: its tokens [S].
            gains: what each of its tokens brings to further columns [S, G].
            clusters: the cluster of each sequence [S], and how many there are.
            parts: as much of what the clusters lie in.
            rungs: the ladder.
        """


def sum_up_to_bound(written: Float64s) -> Float64s:
    """Sums of what is written up to each rung [R, rungs + 1]: [R, rungs]."""
    found: Float64s = np.cumsum(written[:, :-1], axis=1)
    return found


def sum_past_bound(written: Float64s) -> Float64s:
    """Sums of what is written beyond each rung."""
    found: Float64s = np.cumsum(written[:, :0:-1], axis=1)[:, ::-1]
    return found


def nested_part_sums(written: Iterable[Float64s]) -> Float64s:
    """What parts are told of at each rung, of what is written [CLIMBED_BY_ALL + G, parts, rungs + 1]."""
    k3, *others = written
    over, gains = others[: len(NESTED_PART_COLUMNS) - 1], others[len(NESTED_PART_COLUMNS) - 1 :]
    kept, rejected = ([along(each) for each in gains] for along in (sum_up_to_bound, sum_past_bound))
    return np.stack([sum_up_to_bound(k3), *map(sum_past_bound, over), *kept, *rejected])


EdgeCells = tuple[Ints, float, float]
_CELLS_PER_EDGE = 4
"""For each edge: so that most have one of their own."""


def build_edge_cells(edges: Float64s) -> EdgeCells:
    """Cells of equal width, in which a value meets the few of the ascending edges [N] that it must be compared with.

    Returns:
        How many edges lie before each cell [1 + cells]; where the first begins, and what one is divided by its width.
    """
    finite = edges[np.isfinite(edges)]
    first, last = (float(finite[0]), float(finite[-1])) if len(finite) else (0.0, 0.0)
    count = _CELLS_PER_EDGE * len(edges)
    width = (last - first) / count
    scale = 1 / width if 0 < width < np.inf else 0.0
    with np.errstate(all="ignore"):
        at = (edges - first) * scale  # as the loops compute it, so that no rounding tells a value from its edges
    places = np.minimum(np.where(at > 0, at, 0.0), count - 1).astype(np.int64)
    return np.searchsorted(places, np.arange(count + 1)), first, scale


def bound_factors(bounds: Float64s) -> Float64s:
    """Bounds minus 1, the square of that, bounds and their square [4, bounds]; 0 for bounds that nothing exceeds."""
    finite = np.where(np.isfinite(bounds), bounds, 0.0)
    with np.errstate(over="ignore"):
        made = np.stack([bounds - 1.0, (bounds - 1.0) ** 2, finite, finite**2])
    return np.where(np.isfinite(made), made, 0.0)


class CorrectionReduction(Protocol):
    """What a correction does to each sequence."""

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
        """Columns that add, before normalization, and those of which the largest counts: as `correction_columns`."""


@dataclass(frozen=True)
class Kernel:
    """The arithmetic over tokens.

    Attributes:
        ratios: makes Ratios from policy and reference log-probs [T] and their segments.
        reduce: the pass over the tokens.
        beyond: the search for tokens at the ends of the distribution.
        truncate: what a long row of upper bounds makes of token weights.
        climb: what a long row of bounds of a gate keeps.
        correct: what a correction does.
        blocks: cuts a batch into blocks of the size that it likes and puts them where it works: (index of the first
            sequence, block).
        device: what it works on, where that is not the CPU.
    """

    ratios: Callable[[Floats, Floats, Segments], Ratios]
    reduce: TokenReduction
    beyond: OutsideSearch
    truncate: WeightTruncation
    climb: NestedSummation
    correct: CorrectionReduction
    blocks: Callable[[TokenBatch], Iterator[tuple[int, TokenBatch]]]
    device: str | None = None
