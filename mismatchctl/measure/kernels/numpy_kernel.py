"""Kernel for small dumps in numpy, the reference for the other kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatchctl.core.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS, add_layers, magnitude_bin, signed_bin
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    JOINT_CELLS,
    Kernel,
    PairTables,
    RunTables,
    SequencePlaces,
)


def reduce_tokens(
    ratios: Ratios,
    position: Ints | None,
    places: SequencePlaces,
    pair: PairTables,
    run: RunTables | None = None,
) -> tuple[Float64s, Float64s]:
    """See TokenReduction."""
    _tally_pair(pair, ratios, places.rows)
    if run is not None:
        _tally_run(run, ratios, position, places.buckets)
        add_layers(run.layers, ratios.reference, ratios.k3, ratios.segments.spread(places.clusters))
    return sum_tokens(ratios, _neighbour_sums(ratios.log_ratio, ratios.segments, position))


def sum_tokens(ratios: Ratios, neighbours: Sequence[Float64s]) -> tuple[Float64s, Float64s]:
    """Return TOKEN_SUMS and TOKEN_MAXIMA, given the sums over neighbours."""
    total = ratios.segments.sum
    x, difference = ratios.log_ratio, np.abs(ratios.prob_diff)
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
        *neighbours,
    ]
    largest = [ratios.max_log_ratio, -ratios.min_log_ratio, ratios.segments.max(difference)]
    return np.stack(sums), np.stack(largest)


def _neighbour_sums(x: Float64s, segments: Segments, position: Ints | None) -> list[Float64s]:
    """Return number, products and sums of adjacent log ratios."""
    length = len(x)
    product, both, count = np.zeros(length), np.zeros(length), np.zeros(length)
    if length > 1:
        adjacent = np.ones(length - 1, np.bool_) if position is None else np.diff(position) == 1
        starts = segments.offsets[1:-1]
        adjacent[starts[(starts > 0) & (starts < length)] - 1] = False
        np.multiply(x[1:], x[:-1], out=product[1:])
        np.add(x[1:], x[:-1], out=both[1:])
        product[1:] *= adjacent
        both[1:] *= adjacent
        count[1:] = adjacent
    return [segments.sum(values) for values in (count, product, both)]


def _tally_pair(tables: PairTables, ratios: Ratios, rows: Ints) -> None:
    spread, signed = ratios.segments.spread, signed_bin(ratios.log_ratio)
    np.add.at(tables.tokens.reshape(-1), spread(rows) * MAGNITUDE_BINS + magnitude_bin(signed), 1)
    tokens, k3 = tables.sums.reshape(-1, 2).T
    where = spread(tables.cells[rows]) * SIGNED_BINS + signed
    np.add.at(tokens, where, 1.0)
    np.add.at(k3, where, ratios.k3)


def _tally_run(tables: RunTables, ratios: Ratios, position: Ints | None, buckets: Ints) -> None:
    spread = ratios.segments.spread(buckets)
    places = ratios.segments.places if position is None else position
    quantities = {"position": places + 1, "surprisal": np.maximum(-ratios.reference, 0.0)}
    summed = (None, ratios.abs_log_ratio, ratios.k3, ratios.log_ratio, 1.0 - ratios.reference_prob)
    for name, values in quantities.items():
        kind, columns = BREAKDOWNS[name], tables.breakdowns[name].shape[-1]
        table = tables.breakdowns[name].reshape(-1, columns)
        where = spread * kind.count + kind.find_bins(values)
        for index, column in enumerate(summed[:columns]):
            table[:, index] += np.bincount(where, weights=column, minlength=len(table))
    across, up = (
        np.minimum((prob * JOINT_CELLS).astype(np.int64), JOINT_CELLS - 1)
        for prob in (ratios.reference_prob, ratios.policy_prob)
    )
    tables.joint += np.bincount(across * JOINT_CELLS + up, minlength=JOINT_CELLS * JOINT_CELLS).reshape(
        JOINT_CELLS, JOINT_CELLS
    )


def find_outside(ratios: Ratios, sequences: Ints, low: float, high: float) -> Ints:
    """See OutsideSearch."""
    tokens = ratios.segments.token_indices(sequences)
    x = ratios.log_ratio[tokens]
    return tokens[(x <= low) | (x >= high)]


NUMPY_KERNEL = Kernel(Ratios, reduce_tokens, find_outside, correction_columns, TokenBatch.blocks)
