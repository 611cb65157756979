"""Kernel for large dumps: the arithmetic of the numpy kernel in compiled loops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.core.batch import TILE, Bools, Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.core.bins import new_layer_table
from mismatchctl.core.machine_code import CompiledLoop, use_compiled_loops
from mismatchctl.core.ratios import INTERVALS, Ratios
from mismatchctl.measure.columns import TOKEN_MAXIMA, TOKEN_SUMS
from mismatchctl.measure.grid.thresholds import NestedGates, NestedWeights
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    LANES,
    WRITTEN_SUMS,
    Kernel,
    PairTables,
    RunTables,
    SequencePlaces,
)

use_compiled_loops()
_LOOPS = "mismatchctl.measure.kernels.loops"
make_terms, reduce_sequences = CompiledLoop(_LOOPS, "make_terms"), CompiledLoop(_LOOPS, "reduce_sequences")
search_sequences = CompiledLoop(_LOOPS, "search_sequences")
truncate_sequences = CompiledLoop(_LOOPS, "truncate_sequences")
sum_nested_sequences = CompiledLoop(_LOOPS, "sum_nested_sequences")
_NO_PLACES, _NO_VALUES, _ALL_KEPT = np.zeros(0, np.int64), np.zeros(0), np.zeros(0, np.bool_)
_NO_RUN, _NO_PAIR = RunTables(new_layer_table(0)), PairTables(_NO_PLACES, _NO_PLACES)
_SEARCH_BUFFER_SIZE = 1 << 14
"""Usual maximum of tokens in a search. A buffer for all tokens would be newly allocated each time, in huge pages."""


def _sum_property(name: str) -> Any:
    index = TOKEN_SUMS.index(name)
    return property(lambda ratios: ratios.sums[0][index])


class CompiledRatios(Ratios):
    """Ratios that compute all elementwise terms together on first use."""

    def __init__(self, policy: Floats, reference: Floats, segments: Segments) -> None:
        super().__init__(_to_loop_array(policy), _to_loop_array(reference), segments)

    @cached_property
    def sums(self) -> tuple[Float64s, Float64s]:
        """TOKEN_SUMS [len, S] and TOKEN_MAXIMA [len, S], with neighbours as if tokens had no gaps."""
        first = np.zeros(len(self.segments), np.int64)
        return COMPILED_KERNEL.reduce_tokens(self, None, SequencePlaces(first, first, first), _NO_PAIR)

    log_ratio_sum, absolute_sum, square_sum = _sum_property("log_ratio"), _sum_property("abs"), _sum_property("square")
    k3_sum, excess_sum, squared_excess_sum = (
        _sum_property("k3"),
        _sum_property("excess"),
        _sum_property("squared_excess"),
    )

    @cached_property
    def max_log_ratio(self) -> Float64s:
        highest: Float64s = self.sums[1][0]
        return highest

    @cached_property
    def min_log_ratio(self) -> Float64s:
        lowest: Float64s = -self.sums[1][1]
        return lowest

    def take(self, chosen: Ints) -> CompiledRatios:
        policy, reference = map(self.segments.token_selector(chosen), self.log_probs)
        taken = CompiledRatios(policy, reference, self.segments.take(chosen))
        taken.sums = self.sums[0][:, chosen], self.sums[1][:, chosen]
        return taken

    @cached_property
    def _terms(self) -> tuple[Float64s, ...]:
        made = np.empty((3, self.segments.tokens))
        make_terms(*self.log_probs, *made, _NO_VALUES, _NO_VALUES)
        return tuple(made)

    @cached_property
    def _probabilities(self) -> tuple[Float64s, ...]:
        made = np.empty((5, self.segments.tokens))
        make_terms(*self.log_probs, *made)
        return tuple(made[3:])

    @cached_property
    def log_ratio(self) -> Float64s:
        return self._terms[0]

    @cached_property
    def exp_minus_one(self) -> Float64s:
        return self._terms[1]

    @cached_property
    def k3(self) -> Float64s:
        return self._terms[2]

    @cached_property
    def policy_prob(self) -> Float64s:
        return self._probabilities[0]

    @cached_property
    def reference_prob(self) -> Float64s:
        return self._probabilities[1]


def _to_loop_array(values: Floats) -> Floats:
    """Convert values to a type that the loops are compiled for."""
    return np.ascontiguousarray(values, None if values.dtype in (np.float32, np.float64) else np.float64)


class CompiledKernel(Kernel):
    """The arithmetic in compiled loops."""

    has_nested_loops = True

    def compute_ratios(self, policy: Floats, reference: Floats, segments: Segments) -> Ratios:
        return CompiledRatios(policy, reference, segments)

    def split_blocks(self, batch: TokenBatch) -> Iterator[tuple[int, TokenBatch]]:
        return batch.blocks(tokens=3 << 20)

    def reduce_tokens(
        self,
        ratios: Ratios,
        position: Ints | None,
        places: SequencePlaces,
        pair: PairTables,
        run: RunTables | None = None,
    ) -> tuple[Float64s, Float64s]:
        """See Kernel. Tables without rows are not changed."""
        assert isinstance(ratios, CompiledRatios)
        sums = np.zeros((len(ratios.segments), len(TOKEN_SUMS)))
        maxima = np.full((len(ratios.segments), len(TOKEN_MAXIMA)), -np.inf)
        if run is None:
            tables, joint, outside = _NO_RUN, _NO_PLACES, _NO_VALUES.reshape(0, 0)
        else:
            tables, joint, outside = run, run.joint.reshape(-1), np.zeros((len(sums), INTERVALS.shape[1]))
            ratios.outside_counts = outside.T
        order = np.argsort(places.rows, kind="stable")
        reduce_sequences(
            *ratios.log_probs, _NO_PLACES if position is None else np.ascontiguousarray(position),
            ratios.segments.offsets, order, places.rows, pair.cells, places.buckets, places.clusters, sums, maxima,
            pair.tokens.reshape(-1), pair.sums.reshape(-1), tables.breakdowns["surprisal"],
            tables.breakdowns["position"], joint, tables.layers.reshape(-1), outside,
            np.empty((5, TILE + 8)), np.empty((3, TILE), np.int32),
            np.zeros(LANES * BREAKDOWNS["surprisal"].count * 2 * 4),
        )  # fmt: skip
        ratios.sums = sums.T, maxima.T
        return ratios.sums

    def find_outside(self, ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
        found, marks = np.empty(_SEARCH_BUFFER_SIZE, np.int64), np.zeros(TILE, np.bool_)
        count = search_sequences(*ratios.log_probs, ratios.segments.offsets, sequences, low, high, marks, found)
        if count > len(found):
            found = np.empty(count, np.int64)
            search_sequences(*ratios.log_probs, ratios.segments.offsets, sequences, low, high, marks, found)
        return found[:count]


COMPILED_KERNEL = CompiledKernel()


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


def truncate_weights(
    # minus 1, and as they are [T] each, before the bounds. Null for the second if the first is exact.
    weights: tuple[Float64s, Float64s | None],
    kept: Bools | None,  # tokens that gates keep [T]. Default: all.
    segments: Segments,
    parts: tuple[Ints, int],  # part of each sequence [S], and number of parts
    nested: NestedWeights,
) -> Float64s:
    """Return TRUNCATED_COLUMNS summed over each part at each bound [parts, len, bounds].

    Each is a sum over unchanged weights, accumulated upward along the bounds, plus a sum over bounded weights,
    accumulated downward. So values are never subtracted.
    """
    of, count = parts
    excess, weight = weights
    edges, floor = nested.edges, (nested.low, 0.0 if nested.zeroes else nested.low)
    found = np.zeros((count, len(TRUNCATED_COLUMNS), len(edges)))
    table, ranks = np.zeros((len(edges) + 1, WRITTEN_SUMS)), np.zeros((3, len(edges) + 1))
    truncate_sequences(
        excess, _NO_VALUES if weight is None else weight, _ALL_KEPT if kept is None else kept, segments.offsets,
        np.argsort(of, kind="stable"), of, edges, _build_edge_cells(edges), _bound_factors(nested.high), floor, found,
        table, ranks,
    )  # fmt: skip
    return found


def _bound_factors(bounds: Float64s) -> Float64s:
    """Return bounds minus 1, its square, bounds and their square [4, bounds]. 0 for infinite bounds."""
    finite = np.where(np.isfinite(bounds), bounds, 0.0)
    with np.errstate(over="ignore"):
        made = np.stack([bounds - 1.0, (bounds - 1.0) ** 2, finite, finite**2])
    return np.where(np.isfinite(made), made, 0.0)


_CELLS_PER_EDGE = 4
"""Number of cells per edge, so that most edges have their own cell."""


def _build_edge_cells(edges: Float64s) -> tuple[Ints, float, float]:
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


def sum_nested(
    values: Float64s,  # statistic of each item, a token or a whole sequence [I]
    brought: NestedValues,  # values of each item, 0 if other gates reject it
    items: Segments,  # items of each sequence, at least one
    sizes: Float64s,  # tokens per sequence [S]
    gains: Float64s,  # values per token of further columns [S, G]
    clusters: tuple[Ints, int],  # cluster of each sequence [S], and number of clusters
    parts: tuple[Ints, int],  # part of each sequence [S], and number of parts
    nested: NestedGates,
) -> tuple[Float64s, Float64s]:
    """Return NESTED_CLUSTER_COLUMNS [len, clusters, ranks], and NESTED_PART_COLUMNS with gains [..., parts, ranks].

    Gains are summed over kept, then over rejected items. Sums over kept items accumulate upward along the ranks, sums
    over rejected items downward. So values are never subtracted.
    """
    of, count = clusters
    ranks = len(nested.ranks)
    rows = np.zeros((len(NESTED_CLUSTER_COLUMNS), count, ranks))
    sums = np.zeros((parts[1], ranks + 1, len(NESTED_PART_COLUMNS) + gains.shape[1]))
    sum_nested_sequences(
        values, _NO_VALUES if brought[0] is None else brought[0], *brought[1:], items.offsets, sizes, gains,
        np.argsort(of, kind="stable"), of, parts[0], nested.edges, _build_edge_cells(nested.edges), nested.always,
        nested.low, nested.high, rows, sums, np.zeros((ranks + 1, 6)), np.zeros((ranks, 2)),
    )  # fmt: skip
    k3, *others = np.moveaxis(sums, -1, 0)
    over, more = others[: len(NESTED_PART_COLUMNS) - 1], others[len(NESTED_PART_COLUMNS) - 1 :]
    kept, rejected = ([along(each) for each in more] for along in (_sum_up_to_rank, _sum_past_rank))
    return rows, np.stack([_sum_up_to_rank(k3), *map(_sum_past_rank, over), *kept, *rejected])


def _sum_up_to_rank(written: Float64s) -> Float64s:
    return np.cumsum(written[:, :-1], axis=1)


def _sum_past_rank(written: Float64s) -> Float64s:
    return np.cumsum(written[:, :0:-1], axis=1)[:, ::-1]
