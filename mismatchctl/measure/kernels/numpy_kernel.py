"""Kernel for small dumps in numpy, the reference for the other kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints, Segments, TokenBatch
from mismatchctl.core.bins import MAGNITUDE_BINS, SIGNED_BINS, add_layers, magnitude_bin, signed_bin
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.kernels.kernel import (
    BREAKDOWNS,
    JOINT_CELLS,
    Kernel,
    NestedItems,
    NestedValues,
    PairTables,
    RunTables,
    SequencePlaces,
    bound_factors,
    nested_part_sums,
    sum_past_bound,
    sum_up_to_bound,
)


def reduce_tokens(
    ratios: Ratios,
    position: Ints | None,
    places: SequencePlaces,
    pair: PairTables,
    run: RunTables | None = None,
) -> tuple[Float64s, Float64s]:
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
    tokens = ratios.segments.token_indices(sequences)
    x = ratios.log_ratio[tokens]
    return tokens[(x <= low) | (x >= high)]


def truncate_weights(
    weights: tuple[Float64s, Float64s | None],
    kept: Bools | None,
    segments: Segments,
    parts: tuple[Ints, int],
    edges: Float64s,
    bounds: Float64s,
    floor: tuple[float, float],
) -> Float64s:
    excess = weights[0]
    weight, below = excess + 1.0 if weights[1] is None else weights[1], excess + 1.0 < floor[0]
    if below.any():
        excess, weight = np.where(below, floor[1] - 1.0, excess), np.where(below, floor[1], weight)
    rank, width = np.searchsorted(edges, excess + 1.0, side="right"), len(edges) + 1
    share, left = (
        segments.spread(1 / np.maximum(segments.sizes, 1.0)),
        None if kept is None else kept.astype(np.float64),
    )

    def at(of: Ints, count: int, inside: Float64s, outside: Float64s | None, factor: Float64s) -> Float64s:
        where = segments.spread(of) * width + rank
        below, above = (np.bincount(where, values, count * width).reshape(count, width) for values in (inside, outside))
        beyond = np.cumsum(above[:, :0:-1], axis=1)[:, ::-1] * factor
        return np.cumsum(below[:, :-1], axis=1) + beyond

    moved, squared, finite, finite_squared = bound_factors(bounds)
    own, own_share = (excess, share) if left is None else (excess * left, share * left)
    kept_weight = weight if left is None else weight * left
    every = at(np.arange(len(segments)), len(segments), kept_weight, left, finite)
    every /= np.maximum(segments.sizes, 1.0)[:, None]
    every *= every
    squares = np.zeros((parts[1], len(edges)))
    for part, row in zip(parts[0].tolist(), every, strict=True):
        squares[part] += row
    made = [
        at(*parts, excess, None, moved),
        at(*parts, excess * excess, None, squared),
        at(*parts, excess * share, share, moved),
        at(*parts, own, left, moved),
        at(*parts, weight * kept_weight, left, finite_squared),
        at(*parts, kept_weight * share, own_share, finite),
        at(*parts, np.zeros_like(excess), None, np.ones_like(bounds)),
        squares,
    ]
    return np.stack(made, axis=1)


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
    every, width = np.arange(len(items)), entries.count + 1
    bins, of = np.searchsorted(entries.edges, values, side="right"), items.spread(every)
    low, high = entries.low[bins], entries.high[bins]
    kept = np.ones(len(values)) if brought[0] is None else brought[0]
    rank = np.where(kept > 0, np.maximum(low, high), entries.count)
    first, last, last_low, last_high = (
        ends.astype(np.int64) for ends in (items.min(rank), items.max(rank), items.max(low), items.max(high))
    )
    size, inside = (sizes / items.sizes)[of], rank < entries.count
    sequence, entered = of[inside], rank[inside]
    kept, k3, excess, square = (each[inside] for each in (kept, *brought[1:]))
    weight, left = (kept + excess) / sizes[sequence], sizes - np.bincount(sequence, kept, len(items))

    keys, at = np.unique(sequence * width + entered, return_inverse=True)  # entries of a sequence with the same rank
    by, of_key = np.divmod(keys, width)
    together: Float64s = np.bincount(at, weight, len(keys)).astype(np.float64, copy=False)
    squares = together * (2 * _prefix_sums(together, by) - together)

    def written(among: tuple[Ints, int], of: Ints, rank: Ints, values: Float64s | None) -> Float64s:
        where, count = among
        found = np.bincount(where[of] * width + rank, values, count * width).reshape(count, width)
        return found.astype(np.float64, copy=False)

    rows = [sum_up_to_bound(written(clusters, sequence, entered, each)) for each in (kept, excess, square, weight)]
    rows.append(sum_up_to_bound(written(clusters, by, of_key, squares)))
    rows.append(sum_past_bound(written(clusters, every, np.where(left > 0, entries.count, last), None)))
    sums = [written(parts, sequence, entered, k3), written(parts, of, low, size), written(parts, of, high, size)]
    sums += [written(parts, every, ends, None) for ends in (last_low, last_high, first)]
    with_rest, at_end = np.append(sequence, every), np.append(entered, np.full(len(items), entries.count))
    for gain in gains.T:
        sums.append(written(parts, with_rest, at_end, np.append(kept * gain[sequence], left * gain)))
    return np.stack(rows), nested_part_sums(sums)


def _prefix_sums(values: Float64s, sequence: Ints) -> Float64s:
    """Return the sums of values [N] up to each value within its sequence, without mixing sequences."""
    sums, step = values, 1
    longest = int(np.bincount(sequence).max(initial=0))
    while step < longest:
        more = np.where(sequence[step:] == sequence[:-step], sums[:-step], 0.0)
        sums = np.concatenate([sums[:step], sums[step:] + more])
        step *= 2
    return sums


NUMPY_KERNEL = Kernel(
    Ratios, reduce_tokens, find_outside, truncate_weights, sum_nested, correction_columns, TokenBatch.blocks
)
