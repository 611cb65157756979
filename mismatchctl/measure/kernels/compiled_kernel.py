"""The kernel for large dumps, which calls compiled loops."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property, reduce
from operator import getitem
from typing import Any

import numpy as np

from mismatchctl.core.batch import TILE, Float64s, Floats, Ints, Segments, TokenBatch
from mismatchctl.core.bins import new_layer_table
from mismatchctl.core.machine_code import CompiledLoop, use_compiled_loops
from mismatchctl.core.ratios import INTERVALS, Ratios
from mismatchctl.measure.columns import TOKEN_MAXIMA, TOKEN_SUMS
from mismatchctl.measure.kernels.kernel import BUCKETS, Kernel, PairTables, RunTables, SequencePlaces

use_compiled_loops()
_LOOPS = "mismatchctl.measure.kernels.loops"
make_terms, reduce_sequences = CompiledLoop(_LOOPS, "make_terms"), CompiledLoop(_LOOPS, "reduce_sequences")
search_sequences = CompiledLoop(_LOOPS, "search_sequences")
_NO_PLACES, _NO_VALUES = np.zeros(0, np.int64), np.zeros(0)
_NO_RUN, _NO_PAIR = RunTables(new_layer_table(0)), PairTables(_NO_PLACES, _NO_PLACES)
_SEARCH_BUFFER_SIZE = 1 << 14
"""Number of tokens that `find_outside` can return at first. If it finds more, it searches again with more memory."""


def _row_property(name: str, *places: int) -> Any:
    """Return a property that reads one entry of the attribute `name`, such as `sums[0][3]`."""
    return property(lambda ratios: reduce(getitem, places, getattr(ratios, name)))


class CompiledRatios(Ratios):
    """Ratios with compiled loops. At first access, one loop computes several terms, such as log ratio and K3."""

    def __init__(self, policy: Floats, reference: Floats, segments: Segments) -> None:
        super().__init__(_to_loop_array(policy), _to_loop_array(reference), segments)

    @cached_property
    def sums(self) -> tuple[Float64s, Float64s]:
        """Return TOKEN_SUMS and TOKEN_MAXIMA per sequence. The valid tokens around masked tokens count as neighbors."""
        first = np.zeros(len(self.segments), np.int64)
        return COMPILED_KERNEL.reduce_tokens(self, None, SequencePlaces(first, first, first), _NO_PAIR)

    log_ratio_sum, absolute_sum, square_sum, k3_sum, excess_sum, squared_excess_sum = (
        _row_property("sums", 0, TOKEN_SUMS.index(name))
        for name in ("log_ratio", "abs", "square", "k3", "excess", "squared_excess")
    )
    max_log_ratio, _negated_minimum = (_row_property("sums", 1, index) for index in range(2))
    log_ratio, exp_minus_one, k3 = (_row_property("_terms", index) for index in range(3))
    policy_prob, reference_prob = (_row_property("_probabilities", index) for index in range(2))

    @cached_property
    def min_log_ratio(self) -> Float64s:
        lowest: Float64s = -self._negated_minimum
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


def _to_loop_array(values: Floats) -> Floats:
    return np.ascontiguousarray(values, None if values.dtype in (np.float32, np.float64) else np.float64)


class CompiledKernel(Kernel):
    """Computes sums over tokens in compiled loops."""

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
        """See `Kernel.reduce_tokens`. A `pair` with 0 rows is not changed."""
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
            pair.tokens.reshape(-1), pair.sums.reshape(-1), tables.breakdowns["surprisal"].reshape(BUCKETS, -1),
            tables.breakdowns["position"], joint, tables.layers.reshape(-1), outside,
            np.empty((5, TILE + 8)), np.empty((3, TILE), np.int32),
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
