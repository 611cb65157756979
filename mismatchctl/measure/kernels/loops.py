"""The loops over tokens of `plain`, for numba to compile.

The pass walks through each sequence in tiles that stay in the processor's nearest cache: terms of the tile's tokens
first, in a loop without branches that becomes vector code (one polynomial serves exp, expm1 and K3), then everything
that is summed or counted over them. Tiles start with the sequence, so that its sums depend on its own tokens alone.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, uint64

from mismatchctl.measure import bins
from mismatchctl.measure.columns import TOKEN_SUMS
from mismatchctl.measure.kernels.compiling import (
    add_to_row,
    compiled,
    compiled_sums,
    compiled_terms,
    double,
    double_bits,
    float_bits,
    larger,
    smaller,
    widen,
)
from mismatchctl.measure.kernels.kernel import BREAKDOWNS, JOINT, LANES, TILE
from mismatchctl.measure.layers import BIN_OF_SURPRISAL, CAPS, FIRST, PROBABILITIES
from mismatchctl.ratios import INTERVALS, LOG_RATIO_BOUND

_COEFFICIENTS = tuple(1 / math.factorial(power) for power in range(14))
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2 to 33 more bits
_ROUND = 1.5 * 2.0**52  # adding it leaves the nearest integer in the low bits
SMALLEST, _LARGEST = -708.0, 709.4
"""Where exp is nearest to 0 and largest here; below and beyond, it counts as 0 and as overflow."""
_FAR = 700.0
"""Exp of what is farther from 0 may lose digits."""
_LOWEST_EXCESS, _HIGHEST_EXCESS = math.expm1(-LOG_RATIO_BOUND), math.expm1(LOG_RATIO_BOUND)


@compiled_terms
def split(x: float) -> tuple[float, float, float]:
    """x = n ln 2 + r with |r| <= ln 2 / 2: (exp(r) - 1 - r, r, 2^n)."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    c, s = _COEFFICIENTS, r * r  # pairs first, then pairs of these: each of a chain of products would wait for the last
    low = (c[2] + c[3] * r) + s * (c[4] + c[5] * r)
    middle = (c[6] + c[7] * r) + s * (c[8] + c[9] * r)
    high = (c[10] + c[11] * r) + s * (c[12] + c[13] * r)
    return s * (low + s * s * (middle + s * s * high)), r, double((double_bits(shifted) << 52) + 0x3FF0000000000000)


@compiled_terms
def _terms(x: float, x_within: float, q_within: float) -> tuple[float, float, float]:
    """expm1 and K3 of x, exp of q: of numbers that `split` can take, or of what is nearest to them."""
    k, r, scale = split(x_within)
    excess = scale * (k + r) + (scale - 1.0)
    whole = k if scale == 1.0 else excess - x
    k, r, scale = split(q_within)
    return excess, whole, scale * (1.0 + (r + k))


@compiled
def _farthest(policy: Any, reference: Any) -> Any:
    """The largest size of a log ratio or of a log-prob of the reference; 0 of none."""
    widen()
    farthest = float32(0.0)
    for j in range(len(policy)):
        apart, own = float32(policy[j] - reference[j]), float32(reference[j])
        farthest = larger(farthest, larger(abs(apart), abs(own)))
    return farthest


@compiled_terms
def make_terms(
    policy: Any, reference: Any, log_ratio: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any
) -> None:
    """Elementwise terms [T] of log-probs of policy and reference [T], as Ratios has them.

    Probabilities are left out where there is no room for them: a second exponential is half of the work.
    """
    widen()
    if not len(reference_prob):
        for j in range(len(policy)):
            x = float64(policy[j]) - float64(reference[j])
            log_ratio[j] = x
            exp_minus_one[j], k3[j], _ = _terms(x, x, 0.0)
    for j in range(len(reference_prob)):
        q = float64(reference[j])
        x = float64(policy[j]) - q
        excess, whole, probability = _terms(x, x, q)
        log_ratio[j] = x
        exp_minus_one[j] = excess
        k3[j] = whole
        reference_prob[j] = probability
        policy_prob[j] = probability + probability * excess
    if _farthest(policy, reference) > _FAR - 1.0:  # a float32 may be rounded
        _mend_far(policy, reference, log_ratio, exp_minus_one, k3, policy_prob, reference_prob)


@compiled_terms
def _mend_far(
    policy: Any, reference: Any, log_ratio: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any
) -> None:
    """The terms anew where exp overflows or loses digits, which is rare."""
    for j in range(len(policy)):
        x, q = log_ratio[j], float64(reference[j])
        if max(abs(x), abs(q)) > _FAR:
            within = min(max(x, SMALLEST), _LARGEST), min(max(q, SMALLEST), _LARGEST)
            excess, whole, probability = _terms(x, *within)
            over = x > _LARGEST
            exp_minus_one[j] = np.inf if over else excess
            k3[j] = np.inf if over else whole
            if len(reference_prob):
                reference_prob[j] = probability
                policy_prob[j] = math.exp(policy[j]) if q < -_FAR else probability + probability * exp_minus_one[j]


@compiled_sums
def _add_sums(
    policy: Any, reference: Any, x: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any,
    sums: Any, maxima: Any,
) -> tuple[float, float]:  # fmt: skip
    """Add to TOKEN_SUMS, but for the neighbours at their end, and raise TOKEN_MAXIMA; the extremes of x.

    In two loops: what one of them adds to would not fit into 16 registers.
    """
    widen()
    log_ratio = absolute = square = k3_sum = excess = squared_excess = identical = 0.0
    lowest = highest = x[0]
    for j in range(len(x)):
        lowest, highest = smaller(lowest, x[j]), larger(highest, x[j])
        log_ratio += x[j]
        absolute += abs(x[j])
        square += x[j] * x[j]
        k3_sum += k3[j]
        bounded = min(max(exp_minus_one[j], _LOWEST_EXCESS), _HIGHEST_EXCESS)
        excess += bounded
        squared_excess += bounded * bounded
        identical += 1.0 if x[j] == 0.0 else 0.0
    difference = squared_difference = p_sum = p_square = q_sum = q_square = policy_sum = reference_sum = 0.0
    farthest = 0.0
    for j in range(len(x)):
        p, q = policy_prob[j], reference_prob[j]
        apart = abs(p - q)
        farthest = larger(farthest, apart)
        difference += apart
        squared_difference += apart * apart
        p_sum += p
        p_square += p * p
        q_sum += q
        q_square += q * q
        policy_sum += policy[j]
        reference_sum += reference[j]
    found = (
        log_ratio, absolute, square, k3_sum, excess, squared_excess, identical, difference, squared_difference,
        p_sum, p_square, q_sum, q_square, policy_sum, reference_sum,
    )  # fmt: skip
    for index, value in enumerate(found):
        sums[index] += value
    maxima[0] = max(maxima[0], highest)
    maxima[1] = max(maxima[1], -lowest)
    maxima[2] = max(maxima[2], farthest)
    return lowest, highest


_LOW, _HIGH = INTERVALS


@compiled
def _add_outside(x: Any, lowest: float, highest: float, outside: Any) -> None:
    """Count tokens outside each of INTERVALS, of which those that hold the extremes need no look."""
    for place in range(len(outside)):
        low, high = _LOW[place], _HIGH[place]
        if lowest >= low and highest <= high:
            return
        count = 0
        for j in range(len(x)):
            count += (x[j] < low) | (x[j] > high)
        outside[place] += count


@compiled_sums
def _add_neighbours(x: Any, position: Any, out: Any) -> None:
    """Add number, product and sum of each log ratio and the one before it; an empty `position`: there are no gaps."""
    product = both = 0.0
    count = len(x) - 1
    if len(position):
        count = 0
        for j in range(1, len(x)):
            adjacent = position[j] - position[j - 1] == 1
            count += adjacent
            product += x[j] * x[j - 1] if adjacent else 0.0
            both += x[j] + x[j - 1] if adjacent else 0.0
    else:
        for j in range(1, len(x)):
            product += x[j] * x[j - 1]
            both += x[j] + x[j - 1]
    out[0] += count
    out[1] += product
    out[2] += both


@compiled
def _clamped(value: Any, most: int) -> int:
    """A number, cut off after the point, in 0 .. most: of 32 bits, of which vectors hold twice as many as of 64."""
    found: int = min(max(int32(value), int32(0)), int32(most))
    return found


@compiled
def _tally_ratios(x: Any, k3: Any, tokens: Any, sums: Any, places: Any) -> None:
    """Add tokens to those of their row by magnitude, and with K3 to the sums of their cell by signed bin."""
    magnitude, signed = places
    for j in range(len(x)):  # bins first, by themselves: that loop has no store to wait for
        bits = float_bits(float32(x[j]))
        place = ((bits & 0x7FFFFFFF) >> bins.SIGNED_SHIFT) - bins.FIRST_MAGNITUDE
        magnitude[j] = _clamped(place, bins.MAGNITUDES - 1)
        signed[j] = 2 * ((magnitude[j] ^ int32(bits >> 31)) + bins.MAGNITUDES)
    for j in range(len(x)):
        tokens[uint64(magnitude[j])] += int32(1)  # unsigned: none counts from the end
        add_to_row(sums, signed[j], (1.0, k3[j]))


_Bins = tuple[int, int, int]


def _parameters(kind: bins.OctaveBins) -> _Bins:
    return kind.shift, kind.first, kind.count - 1


_POSITION, _SURPRISAL = _parameters(BREAKDOWNS["position"]), _parameters(BREAKDOWNS["surprisal"])
_BEHIND = np.minimum(np.ceil(BREAKDOWNS["position"].edges()[1:]), 2.0**62).astype(np.int64)
"""The first position + 1 behind each bin."""


@compiled
def _bin(value: float, kind: _Bins) -> int:
    """As OctaveBins.of."""
    return _clamped((float_bits(float32(value)) >> kind[0]) - kind[1], kind[2])


@compiled
def _place_surprisal(reference: Any, x: Any, where: Any) -> None:
    """Where the row of `lanes` begins for the bin of the surprisal, the sign of the log ratio, and a lane."""
    for j in range(len(x)):
        row = 2 * _bin(-reference[j], _SURPRISAL) + (1 if x[j] < 0.0 else 0)
        where[j] = 4 * (LANES * row + j % LANES)


@compiled
def _close_surprisal(lanes: Any, table: Any) -> None:
    """Add what was tallied of a bucket to its table, and begin anew."""
    size = 4 * LANES
    for place in range(0, len(lanes), size):
        for number in range(4, size):
            lanes[place + number % 4] += lanes[place + number]
    for place, row in enumerate(table):
        start = 2 * size * place
        up, down = lanes[start : start + 4], lanes[start + size : start + size + 4]
        row[0] += up[0] + down[0]
        row[1] += up[1] - down[1]
        row[2] += up[2] + down[2]
        row[3] += up[1] + down[1]
        row[4] += up[3] + down[3]
    lanes[:] = 0.0


_MORE_LIKELY = tuple(int(np.count_nonzero(place < BIN_OF_SURPRISAL)) for place in range(len(PROBABILITIES)))
"""How many bins of surprisal lie above each bin of probability but the last; bins of surprisal begin at the certain."""
_CAPS = len(CAPS)
_LAYERS = 2 * (len(_MORE_LIKELY) + 1) * (_CAPS + 1)
"""Numbers of a cluster in the table of layers."""


@compiled
def _place_layers(k3: Any, surprisal: Any, where: Any) -> None:
    """Where the row of `layers` begins for the bin of the probability and the caps that K3 reaches.

    They are as `layers.caps_reached` has them; `surprisal` is a place in `lanes`.
    """
    for j in range(len(k3)):
        place = int32(0)
        for edge in _MORE_LIKELY:
            place = int32(place + (int32(1) if surprisal[j] < int32(8 * LANES * edge) else int32(0)))
        exponent = int32(uint64(double_bits(k3[j])) >> uint64(52))  # unsigned: vectors of AVX2 shift no sign
        reached = _clamped((exponent - (FIRST - 2)) >> 1, _CAPS)
        where[j] = 2 * (int32(place * (_CAPS + 1)) + reached)


@compiled
def _place_joint(policy_prob: Any, reference_prob: Any, where: Any) -> None:
    for j in range(len(policy_prob)):
        across, up = _clamped(reference_prob[j] * JOINT, JOINT - 1), _clamped(policy_prob[j] * JOINT, JOINT - 1)
        where[j] = across * JOINT + up


@compiled
def _tally_run(x: Any, k3: Any, reference_prob: Any, places: Any, lanes: Any, layers: Any, joint: Any) -> None:
    """Add tokens where they belong by surprisal, layer and probabilities: at once, as none waits for another.

    By surprisal and sign: tokens, log ratios, K3 and what certainty lacks. |log ratio| follows from these.
    """
    surprisal, layer, cell = places
    for j in range(len(x)):
        add_to_row(lanes, surprisal[j], (1.0, x[j], k3[j], 1.0 - reference_prob[j]))
        add_to_row(layers, layer[j], (1.0, k3[j]))
        joint[uint64(cell[j])] += 1


@compiled
def _sum_in_lanes(x: Any, k3: Any) -> tuple[float, float]:
    """Sums of |x| and of K3, in an order of their own: a loop this short, left to the compiler, may vary."""
    a0 = a1 = a2 = a3 = b0 = b1 = b2 = b3 = 0.0
    whole = len(x) // 4 * 4
    for j in range(0, whole, 4):
        a0 += abs(x[j])
        a1 += abs(x[j + 1])
        a2 += abs(x[j + 2])
        a3 += abs(x[j + 3])
        b0 += k3[j]
        b1 += k3[j + 1]
        b2 += k3[j + 2]
        b3 += k3[j + 3]
    for j in range(whole, len(x)):
        a0 += abs(x[j])
        b0 += k3[j]
    return (a0 + a1) + (a2 + a3), (b0 + b1) + (b2 + b3)


@compiled
def _tally_positions(x: Any, k3: Any, first: int, position: Any, table: Any) -> None:
    """Stretches of tokens that fall into one bin are summed first; without gaps, `first` is the place of x[0]."""
    start = 0
    while start < len(x):
        if len(position):
            where, stop = _bin(float64(position[start] + 1), _POSITION), start + 1
            while stop < len(x) and _bin(float64(position[stop] + 1), _POSITION) == where:
                stop += 1
        else:
            where = _bin(float64(first + start + 1), _POSITION)
            stop = min(len(x), _BEHIND[where] - first - 1)
        absolute, k3_sum = _sum_in_lanes(x[start:stop], k3[start:stop])
        table[where, 0] += stop - start
        table[where, 1] += absolute
        table[where, 2] += k3_sum
        start = stop


_FIRST_NEIGHBOUR = TOKEN_SUMS.index("neighbours")


@compiled
def reduce_sequences(
    policy: Any, reference: Any, position: Any, offsets: Any, order: Any, rows: Any, cells: Any, buckets: Any,
    clusters: Any, sums: Any, maxima: Any, tokens_by_row: Any, sums_by_cell: Any, by_surprisal: Any, by_position: Any,
    joint: Any, layers: Any, outside: Any, terms: Any, bins_of: Any, lanes: Any,
) -> None:  # fmt: skip
    """One pass over the tokens, in an `order` of sequences in which those of a row lie together.

    `x` and `position` start one token early, with the neighbour of the tile's first. Room to work in are `terms` [5,
    more than TILE] and `bins_of` [3, TILE], and `lanes` of zeros: LANES for each bin of surprisal, sign and sum.
    """
    x, exp_minus_one, k3, policy_prob, reference_prob = terms[0], terms[1], terms[2], terms[3], terms[4]
    where, layer, cell = bins_of[0], bins_of[1], bins_of[2]
    for turn, i in enumerate(order):
        bucket = buckets[i]
        for start in range(offsets[i], offsets[i + 1], TILE):
            stop = min(start + TILE, offsets[i + 1])
            n, early = stop - start, int(start > offsets[i])
            p, q, places = policy[start:stop], reference[start:stop], position[start:stop]
            own, k3_own, p_own, q_own = x[1 : n + 1], k3[:n], policy_prob[:n], reference_prob[:n]
            make_terms(p, q, own, exp_minus_one[:n], k3_own, p_own, q_own)
            extremes = _add_sums(p, q, own, exp_minus_one[:n], k3_own, p_own, q_own, sums[i], maxima[i])
            _add_neighbours(x[1 - early : n + 1], position[start - early : stop], sums[i, _FIRST_NEIGHBOUR:])
            if len(tokens_by_row):
                row, sums_of = rows[i] * bins.MAGNITUDES, 2 * cells[rows[i]] * bins.SIGNED
                _tally_ratios(own, k3_own, tokens_by_row[row:], sums_by_cell[sums_of:], (where, layer))
            if len(joint):
                _place_surprisal(q, own, where)
                _place_layers(k3_own, where, layer)
                _place_joint(p_own, q_own, cell)
                own_layers = layers[clusters[i] * _LAYERS :]
                _tally_run(own, k3_own, q_own, (where, layer, cell), lanes, own_layers, joint)
                _tally_positions(own, k3_own, start - offsets[i], places, by_position[bucket])
                _add_outside(own, *extremes, outside[i])
            x[0] = x[n]
        if len(joint) and (turn + 1 == len(order) or buckets[order[turn + 1]] != bucket):
            _close_surprisal(lanes, by_surprisal[bucket])
