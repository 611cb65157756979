"""Kernel for large dumps: the arithmetic of the numpy kernel in compiled loops."""

from __future__ import annotations

from functools import cached_property, partial
from typing import Any

import numpy as np

from mismatchctl.core.batch import TILE, Bools, Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.core.bins import new_layer_table
from mismatchctl.core.machine_code import CompiledLoop, use_compiled_loops
from mismatchctl.core.ratios import INTERVALS, Ratios
from mismatchctl.measure.columns import TOKEN_MAXIMA, TOKEN_SUMS, correction_columns
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    LANES,
    NESTED_CLUSTER_COLUMNS,
    NESTED_PART_COLUMNS,
    TRUNCATED_COLUMNS,
    WRITTEN_SUMS,
    Kernel,
    NestedItems,
    NestedValues,
    PairTables,
    RunTables,
    SequencePlaces,
    bound_factors,
    build_edge_cells,
    nested_part_sums,
)

use_compiled_loops()
_LOOPS = "mismatchctl.measure.kernels.loops"
make_terms, reduce_sequences = CompiledLoop(_LOOPS, "make_terms"), CompiledLoop(_LOOPS, "reduce_sequences")
search_sequences = CompiledLoop(_LOOPS, "search_sequences")
truncate_sequences, sum_nested_sequences = (
    CompiledLoop(_LOOPS, "truncate_sequences"),
    CompiledLoop(_LOOPS, "sum_nested_sequences"),
)
_NO_PLACES = np.zeros(0, np.int64)
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
        return reduce_tokens(self, None, SequencePlaces(first, first, first), _NO_PAIR)

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
        """Return the ratios of some sequences with their known sums."""
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


def reduce_tokens(
    ratios: Ratios,
    position: Ints | None,
    places: SequencePlaces,
    pair: PairTables,
    run: RunTables | None = None,
) -> tuple[Float64s, Float64s]:
    """See TokenReduction. Tables without rows are not changed."""
    assert isinstance(ratios, CompiledRatios)
    sums = np.zeros((len(ratios.segments), len(TOKEN_SUMS)))
    maxima = np.full((len(ratios.segments), len(TOKEN_MAXIMA)), -np.inf)
    if run is None:
        tables, joint, outside = _NO_RUN, _NO_PLACES, _NO_VALUES.reshape(0, 0)
    else:
        tables, joint, outside = run, run.joint.reshape(-1), np.zeros((len(sums), INTERVALS.shape[1]))
        ratios.outside_counts = outside.T
    reduce_sequences(
        *ratios.log_probs, _NO_PLACES if position is None else np.ascontiguousarray(position), ratios.segments.offsets,
        np.argsort(places.rows, kind="stable"), places.rows, pair.cells, places.buckets, places.clusters, sums, maxima,
        pair.tokens.reshape(-1), pair.sums.reshape(-1), tables.breakdowns["surprisal"], tables.breakdowns["position"],
        joint, tables.layers.reshape(-1), outside,
        np.empty((5, TILE + 8)), np.empty((3, TILE), np.int32), np.zeros(LANES * BREAKDOWNS["surprisal"].count * 2 * 4),
    )  # fmt: skip
    ratios.sums = sums.T, maxima.T
    return ratios.sums


def find_outside(ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
    found, marks = np.empty(_SEARCH_BUFFER_SIZE, np.int64), np.zeros(TILE, np.bool_)
    count = search_sequences(*ratios.log_probs, ratios.segments.offsets, sequences, low, high, marks, found)
    if count > len(found):
        found = np.empty(count, np.int64)
        search_sequences(*ratios.log_probs, ratios.segments.offsets, sequences, low, high, marks, found)
    return found[:count]


def truncate_weights(
    weights: tuple[Float64s, Float64s | None],
    kept: Bools | None,
    segments: Segments,
    parts: tuple[Ints, int],
    edges: Float64s,
    bounds: Float64s,
    floor: tuple[float, float],
) -> Float64s:
    of, count = parts
    excess, weight = weights
    found = np.zeros((count, len(TRUNCATED_COLUMNS), len(edges)))
    order = np.argsort(of, kind="stable")
    all_kept = _ALL_KEPT if kept is None else kept
    table, ranks = np.zeros((len(edges) + 1, WRITTEN_SUMS)), np.zeros((3, len(edges) + 1))
    truncate_sequences(
        excess, _NO_VALUES if weight is None else weight, all_kept, segments.offsets, order, of, edges,
        build_edge_cells(edges), bound_factors(bounds), floor, found, table, ranks,
    )  # fmt: skip
    return found


def sum_nested(
    values: Float64s,
    brought: NestedValues,
    items: Segments,
    sizes: Float64s,
    gains: Float64s,
    clusters: tuple[Ints, int],
    parts: tuple[Ints, int],
    entries: NestedItems,
) -> tuple[Float64s, Float64s]:
    of, count = clusters
    rows = np.zeros((len(NESTED_CLUSTER_COLUMNS), count, entries.count))
    sums = np.zeros((parts[1], entries.count + 1, len(NESTED_PART_COLUMNS) + gains.shape[1]))
    sum_nested_sequences(
        values, _NO_VALUES if brought[0] is None else brought[0], *brought[1:], items.offsets, sizes, gains,
        np.argsort(of, kind="stable"), of, parts[0], entries.edges, entries.cells, entries.always, entries.low,
        entries.high, rows, sums, np.zeros((entries.count + 1, 6)), np.zeros((entries.count, 2)),
    )  # fmt: skip
    return rows, nested_part_sums(np.moveaxis(sums, -1, 0))


_NO_VALUES = np.zeros(0)
_ALL_KEPT = np.zeros(0, np.bool_)
_NO_RUN, _NO_PAIR = RunTables(new_layer_table(0)), PairTables(_NO_PLACES)
COMPILED_KERNEL = Kernel(
    CompiledRatios,
    reduce_tokens,
    find_outside,
    truncate_weights,
    sum_nested,
    correction_columns,
    partial(TokenBatch.blocks, tokens=3 << 20),
)
