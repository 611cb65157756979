"""Compiled loops along a ladder of bounds: each token is written once, and running sums answer for every bound."""

from __future__ import annotations

from typing import Any

from mismatchctl.measure.kernels.compiling import add_to_row, compiled
from mismatchctl.measure.kernels.kernel import WRITTEN


@compiled
def _edges_upto(edges: Any, cells: Any, value: float) -> int:
    """How many ascending edges a value does not lie below; those of its cell, few as a rule, are all that it meets."""
    starts, first, scale = cells
    if not value < edges[-1]:
        return len(edges)
    cell = (value - first) * scale
    place = int(min(cell, len(starts) - 2.0)) if cell > 0 else 0
    low, stop = int(starts[place]), int(starts[place + 1])
    while low < stop:
        middle = (low + stop) >> 1
        if value < edges[middle]:
            stop = middle
        else:
            low = middle + 1
    return low


@compiled
def _square(weight: Any, beyond: Any, top: int, bounds: Any, share: float, made: Any, squares: Any) -> float:
    """Add the square of a sequence's weight at each bound below the rung `top`, and clear what was written of it.

    Returns:
        The square at all others.
    """
    count = total = 0.0
    below = min(top, len(bounds))
    for bound in range(below - 1, -1, -1):
        count += beyond[bound + 1]
        made[bound] = count * bounds[bound]
    for bound in range(below):
        total += weight[bound]
        mean = (total + made[bound]) * share
        squares[bound] += mean * mean
    total += weight[top]
    weight[: top + 1] = 0.0
    beyond[: top + 1] = 0.0
    last: float = total * share
    return last * last


@compiled
def _close(table: Any, top: int, moved: Any, squared: Any, bounds: Any, bounds_squared: Any, found: Any) -> None:
    """Running sums of a part, downward of what lies beyond each bound and upward of the rest; `table` is cleared."""
    count = left = share = share_left = 0.0
    for bound in range(min(top, len(bounds)) - 1, -1, -1):
        row = table[bound + 1]
        count += row[6]
        left += row[7]
        share += row[8]
        share_left += row[9]
        found[0, bound] = count * moved[bound]
        found[1, bound] = count * squared[bound]
        found[2, bound] = share * moved[bound]
        found[3, bound] = left * moved[bound]
        found[4, bound] = left * bounds_squared[bound]
        found[5, bound] = share_left * bounds[bound]
        found[6, bound] = count
    a = b = c = d = e = f = g = 0.0
    for bound in range(min(top + 1, len(bounds))):
        row = table[bound]
        a += row[0]
        b += row[1]
        c += row[2]
        d += row[3]
        e += row[4]
        f += row[5]
        g += row[10]
        found[0, bound] += a
        found[1, bound] += b
        found[2, bound] += c
        found[3, bound] += d
        found[4, bound] += e
        found[5, bound] += f
        found[7, bound] += g
    for place, value in enumerate((a, b, c, d, e, f, 0.0, g)):
        found[place, top + 1 :] = value
    table[: top + 1] = 0.0


@compiled
def truncate_sequences(
    excess: Any, weight: Any, kept: Any, offsets: Any, order: Any, of: Any, edges: Any, cells: Any, factors: Any,
    floor: Any, found: Any, table: Any, rungs: Any,
) -> None:  # fmt: skip
    """Write to `found` [parts, TRUNCATED, bounds] what `plain.truncate` gives, in an `order` by part.

    `cells` are those of `kernel.cells_of`; `factors` are what the bounds make of a token, in each column that asks; an
    empty `kept`: all are; an empty `weight`: 1 plus the excess. To work in there are zeros: `table` [bounds + 1,
    WRITTEN] and `rungs` [3, bounds + 1].
    """
    moved, squared, bounds, bounds_squared = factors[0], factors[1], factors[2], factors[3]
    own, beyond, made = rungs[0], rungs[1], rungs[2]
    top = 0
    for turn, i in enumerate(order):
        share = 1.0 / max(offsets[i + 1] - offsets[i], 1)
        own_top = 0
        all_sum = square = kept_sum = kept_square = kept_weight = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            e = excess[j]
            w = weight[j] if len(weight) else e + 1.0
            if e + 1.0 < floor[0]:
                e, w = floor[1] - 1.0, floor[1]
            k = 1.0 if not len(kept) or kept[j] else 0.0
            if e + 1.0 >= edges[0]:
                rung = _edges_upto(edges, cells, e + 1.0)
                own_top = max(own_top, rung)
                own[rung] += k * w
                beyond[rung] += k
                written = (e, e * e, e * share, k * e, k * w * w, k * w * share, 1.0, k, share, k * share, 0.0)
                add_to_row(table, rung * WRITTEN, written)
            else:
                all_sum += e
                square += e * e
                kept_sum += k * e
                kept_square += k * w * w
                kept_weight += k * w
        own[0] += kept_weight
        base = (all_sum, square, all_sum * share, kept_sum, kept_square, kept_weight * share, 0.0, 0.0, 0.0, 0.0, 0.0)
        add_to_row(table, 0, base)
        table[own_top, 10] += _square(own, beyond, own_top, bounds, share, made, found[of[i], 7])
        top = max(top, own_top)
        if turn + 1 == len(order) or of[order[turn + 1]] != of[i]:
            _close(table, top, moved, squared, bounds, bounds_squared, found[of[i]])
            top = 0


@compiled
def _follow(table: Any, cluster: int, rows: Any) -> None:
    """Running sums of a cluster: downward of what was touched, upward of the rest; `table` is cleared."""
    a = b = c = d = e = f = 0.0
    for rung in range(rows.shape[2]):
        a += table[rung, 0]
        b += table[rung, 1]
        c += table[rung, 2]
        d += table[rung, 3]
        e += table[rung, 4]
        rows[0, cluster, rung] = a
        rows[1, cluster, rung] = b
        rows[2, cluster, rung] = c
        rows[3, cluster, rung] = d
        rows[4, cluster, rung] = e
    for rung in range(rows.shape[2] - 1, -1, -1):
        f += table[rung + 1, 5]
        rows[5, cluster, rung] = f
    table[:] = 0.0


@compiled
def climb_sequences(
    values: Any, kept: Any, k3: Any, excess: Any, square: Any, offsets: Any, sizes: Any, gains: Any, order: Any,
    clusters: Any, parts: Any, edges: Any, cells: Any, always: Any, low: Any, high: Any, rows: Any, sums: Any,
    table: Any, own: Any,
) -> None:  # fmt: skip
    """Write CLIMBED to `rows` [len, clusters, rungs], as `plain.climb` gives them; an empty `kept`: all are.

    And add what parts are told of to `sums` [parts, rungs + 1, ...], where it is written. Sequences have an `order` by
    cluster. To work in there are zeros: `table` [rungs + 1, 6] and `own` [rungs, 2].
    """
    never, lowest, highest = rows.shape[2], always[0], always[1]
    for turn, i in enumerate(order):
        whole, share, left = sums[parts[i]], 1.0 / sizes[i], sizes[i]
        size = sizes[i] / (offsets[i + 1] - offsets[i])
        first, last, last_low, last_high = never, 0, 0, 0
        all_kept = all_k3 = all_excess = all_square = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            k = kept[j] if len(kept) else 1.0
            if lowest <= values[j] < highest:
                all_kept += k
                all_k3 += k3[j]
                all_excess += excess[j]
                all_square += square[j]
                continue
            place = _edges_upto(edges, cells, values[j])
            if low[place] > 0:
                last_low = max(last_low, low[place])
                whole[low[place], 1] += size
            if high[place] > 0:
                last_high = max(last_high, high[place])
                whole[high[place], 2] += size
            rung = max(low[place], high[place])
            if k > 0 and rung < never:
                weight = (k + excess[j]) * share
                add_to_row(table, rung * 6, (k, excess[j], square[j], weight))
                whole[rung, 0] += k3[j]
                own[rung, 0] += k
                own[rung, 1] += weight
                first, last, left = min(first, rung), max(last, rung), left - k
        if all_kept > 0:
            weight = (all_kept + all_excess) * share
            add_to_row(table, 0, (all_kept, all_excess, all_square, weight))
            whole[0, 0] += all_k3
            own[0, 0] += all_kept
            own[0, 1] += weight
            first, left = 0, left - all_kept
        upto = 0.0
        for rung in range(first, last + 1):
            if own[rung, 0] > 0:
                table[rung, 4] += own[rung, 1] * (2 * upto + own[rung, 1])
                upto += own[rung, 1]
                for place in range(gains.shape[1]):
                    whole[rung, 6 + place] += own[rung, 0] * gains[i, place]
                own[rung] = 0.0
        for place in range(gains.shape[1]):
            whole[never, 6 + place] += left * gains[i, place]
        table[never if left > 0 else last, 5] += 1.0
        whole[last_low, 3] += 1.0
        whole[last_high, 4] += 1.0
        whole[first, 5] += 1.0
        if turn + 1 == len(order) or clusters[order[turn + 1]] != clusters[i]:
            _follow(table, clusters[i], rows)
