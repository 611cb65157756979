"""Loops over tokens, compiled by numba: they compute sums per sequence and find tokens with large log ratios."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, float64, int32, uint64

from mismatchctl.core.batch import TILE
from mismatchctl.core.bins import (
    FIRST_CAP_BITS,
    FIRST_MAGNITUDE,
    K3_CAPS,
    MAGNITUDE_BINS,
    PROBABILITY_BIN_BY_SURPRISAL,
    PROBABILITY_EDGES,
    SIGNED_BINS,
    SIGNED_SHIFT,
    OctaveBins,
)
from mismatchctl.core.compiler import (
    add_to_row,
    bits_to_double,
    compile_loop,
    compile_sums,
    compile_terms,
    double_to_bits,
    float_to_bits,
    max_float,
    min_float,
)
from mismatchctl.core.ratios import INTERVALS, LOG_RATIO_BOUND
from mismatchctl.measure.columns import TOKEN_SUMS
from mismatchctl.measure.kernels.kernel import BREAKDOWN_SUMS, BREAKDOWNS, JOINT_CELLS
from mismatchctl.measure.sums import HASH

_COEFFICIENTS = tuple(1 / math.factorial(power) for power in range(14))
_LOG2_E = 1 / math.log(2)
_LN2_HIGH, _LN2_LOW = 6.93147180369123816490e-01, 1.90821492927058770002e-10  # their sum is ln 2 with 86 bits
_ROUND = 1.5 * 2.0**52  # x + _ROUND contains the integer nearest to x in its low bits
SMALLEST_EXPONENT, _LARGEST_EXPONENT = -708.0, 709.4
"""Range of x for the fast exp(x). Below it, the result is almost 0. Above it, the result is set to infinity."""
_FAR_LIMIT = 700.0  # for |x| above this limit, the fast exp(x) may lose digits
_LOWEST_EXCESS, _HIGHEST_EXCESS = math.expm1(-LOG_RATIO_BOUND), math.expm1(LOG_RATIO_BOUND)


@compile_terms
def split_exponent(x: float) -> tuple[float, float, float]:
    """Split exp(x) into 2^n exp(r) with |r| <= ln 2 / 2. Return (exp(r) - 1 - r, r, 2^n)."""
    shifted = x * _LOG2_E + _ROUND
    n = shifted - _ROUND
    r = (x - n * _LN2_HIGH) - n * _LN2_LOW
    c, s = _COEFFICIENTS, r * r  # terms in pairs, because each step of Horner's scheme would wait for the step before
    low = (c[2] + c[3] * r) + s * (c[4] + c[5] * r)
    middle = (c[6] + c[7] * r) + s * (c[8] + c[9] * r)
    high = (c[10] + c[11] * r) + s * (c[12] + c[13] * r)
    return (
        s * (low + s * s * (middle + s * s * high)),
        r,
        bits_to_double((double_to_bits(shifted) << 52) + 0x3FF0000000000000),
    )


@compile_terms
def _token_terms(x: float, x_within: float, q_within: float) -> tuple[float, float, float]:
    """Return exp(x) - 1, K3 and exp(q) for log ratio x and log-prob q. `*_within`: x and q within the range of exp."""
    k, r, scale = split_exponent(x_within)
    excess = scale * (k + r) + (scale - 1.0)
    whole = k if scale == 1.0 else excess - x
    k, r, scale = split_exponent(q_within)
    return excess, whole, scale * (1.0 + (r + k))


@compile_loop
def _largest_magnitude(policy: Any, reference: Any) -> Any:
    """Return the largest absolute value of all log ratios and reference log-probs, or 0 without tokens."""
    farthest = float32(0.0)
    for j in range(len(policy)):
        apart, own = float32(policy[j] - reference[j]), float32(reference[j])
        farthest = max_float(farthest, max_float(abs(apart), abs(own)))
    return farthest


@compile_terms
def make_terms(
    policy: Any, reference: Any, log_ratio: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any
) -> None:
    """Write the terms of each token to the last five arrays. Skip both arrays of probabilities if they are empty."""
    if not len(reference_prob):
        for j in range(len(policy)):
            x = float64(policy[j]) - float64(reference[j])
            log_ratio[j] = x
            exp_minus_one[j], k3[j], _ = _token_terms(x, x, 0.0)
    for j in range(len(reference_prob)):
        q = float64(reference[j])
        x = float64(policy[j]) - q
        excess, whole, probability = _token_terms(x, x, q)
        log_ratio[j] = x
        exp_minus_one[j] = excess
        k3[j] = whole
        reference_prob[j] = probability
        policy_prob[j] = probability + probability * excess
    if _largest_magnitude(policy, reference) > _FAR_LIMIT - 1.0:  # - 1.0, because float32 rounds the magnitude
        _recompute_far_terms(policy, reference, log_ratio, exp_minus_one, k3, policy_prob, reference_prob)


@compile_terms
def _recompute_far_terms(
    policy: Any, reference: Any, log_ratio: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any
) -> None:
    """Recompute the terms of tokens with a very large log-prob or log ratio, because their `exp` loses digits."""
    for j in range(len(policy)):
        x, q = log_ratio[j], float64(reference[j])
        if max(abs(x), abs(q)) > _FAR_LIMIT:
            within = (
                min(max(x, SMALLEST_EXPONENT), _LARGEST_EXPONENT),
                min(max(q, SMALLEST_EXPONENT), _LARGEST_EXPONENT),
            )
            excess, whole, probability = _token_terms(x, *within)
            over = x > _LARGEST_EXPONENT
            exp_minus_one[j] = np.inf if over else excess
            k3[j] = np.inf if over else whole
            if len(reference_prob) and q < -_FAR_LIMIT:  # this way, equal log-probs have equal probabilities
                reference_prob[j], policy_prob[j] = math.exp(q), math.exp(float64(policy[j]))
            elif len(reference_prob):
                reference_prob[j], policy_prob[j] = probability, probability + probability * exp_minus_one[j]


@compile_sums
def _add_sums(
    policy: Any, reference: Any, x: Any, exp_minus_one: Any, k3: Any, policy_prob: Any, reference_prob: Any,
    sums: Any, maxima: Any,
) -> tuple[float, float]:  # fmt: skip
    """Add tokens to TOKEN_SUMS (except sums of neighbors) and TOKEN_MAXIMA. Return lowest and highest log ratio."""
    # two loops, because the sums of a loop must fit in 16 registers
    log_ratio = absolute = square = k3_sum = excess = squared_excess = identical = 0.0
    lowest = highest = x[0]
    for j in range(len(x)):
        lowest, highest = min_float(lowest, x[j]), max_float(highest, x[j])
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
        farthest = max_float(farthest, apart)
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


_LOW_BOUNDS, _HIGH_BOUNDS = INTERVALS


@compile_loop
def _add_outside(x: Any, lowest: float, highest: float, outside: Any) -> None:
    """Count the tokens outside of each of the INTERVALS, from narrow to wide, until one contains all tokens."""
    for place in range(len(outside)):
        low, high = _LOW_BOUNDS[place], _HIGH_BOUNDS[place]
        if lowest >= low and highest <= high:
            return
        count = 0
        for j in range(len(x)):
            count += (x[j] < low) | (x[j] > high)
        outside[place] += count


@compile_sums
def _add_neighbours(x: Any, position: Any, out: Any) -> None:
    """Count pairs of adjacent tokens, and sum their products and log ratios, in `out`. No `position` means no gaps."""
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


@compile_loop
def _clamp(value: Any, most: int) -> int:
    """Clip a number to an integer from 0 to `most`. An int32 makes vector code faster than an int64."""
    found: int = min(max(int32(value), int32(0)), int32(most))
    return found


@compile_loop
def _tally_ratios(x: Any, k3: Any, tokens: Any, sums: Any, places: Any) -> None:
    """Update two histograms: `tokens` counts tokens by |log ratio|, `sums` adds counts and K3 by log ratio."""
    magnitude, signed = places
    for j in range(len(x)):  # the compiler can vectorize this loop, but not the next
        bits = float_to_bits(float32(x[j]))
        place = ((bits & 0x7FFFFFFF) >> SIGNED_SHIFT) - FIRST_MAGNITUDE
        magnitude[j] = _clamp(place, MAGNITUDE_BINS - 1)
        signed[j] = 2 * ((magnitude[j] ^ int32(bits >> 31)) + MAGNITUDE_BINS)
    for j in range(len(x)):
        tokens[uint64(magnitude[j])] += int32(1)  # an unsigned index avoids code for negative indices
        add_to_row(sums, signed[j], (1.0, k3[j]))


_BinParameters = tuple[int, int, int]


def _bin_parameters(kind: OctaveBins) -> _BinParameters:
    return kind.shift, kind.first, kind.count - 1


_POSITION, _SURPRISAL = _bin_parameters(BREAKDOWNS["position"]), _bin_parameters(BREAKDOWNS["surprisal"])
_POSITION_ENDS = np.minimum(np.ceil(BREAKDOWNS["position"].edges()[1:]), 2.0**62).astype(np.int64)
"""Upper end of each position bin, for positions counted from 1. The end itself belongs to the next bin."""


@compile_loop
def _octave_bin(value: float, kind: _BinParameters) -> int:
    return _clamp((float_to_bits(float32(value)) >> kind[0]) - kind[1], kind[2])


_SURPRISAL_SUMS = BREAKDOWN_SUMS + 2


@compile_loop
def _place_surprisal(reference: Any, where: Any) -> None:
    for j in range(len(reference)):
        where[j] = _SURPRISAL_SUMS * _octave_bin(-reference[j], _SURPRISAL)


_SURPRISAL_BINS_ABOVE = tuple(
    int(np.count_nonzero(place < PROBABILITY_BIN_BY_SURPRISAL)) for place in range(len(PROBABILITY_EDGES))
)
"""For each of the PROBABILITY_EDGES, the number of surprisal bins whose probability is higher."""
_CAP_COUNT = len(K3_CAPS)
_LAYER_COUNT = 2 * (len(_SURPRISAL_BINS_ABOVE) + 1) * (_CAP_COUNT + 1)


@compile_loop
def _place_layers(k3: Any, surprisal: Any, where: Any) -> None:
    """Write each token's index in the flat table `layers` to `where`. K3 and surprisal of the token determine it."""
    for j in range(len(k3)):
        place = int32(0)
        for edge in _SURPRISAL_BINS_ABOVE:
            place = int32(place + (int32(1) if surprisal[j] < int32(_SURPRISAL_SUMS * edge) else int32(0)))
        exponent = int32(uint64(double_to_bits(k3[j])) >> uint64(52))  # unsigned: AVX2 cannot shift signed 64 bits
        reached = _clamp((exponent - (FIRST_CAP_BITS - 2)) >> 1, _CAP_COUNT)
        where[j] = 2 * (int32(place * (_CAP_COUNT + 1)) + reached)


@compile_loop
def _place_joint(policy_prob: Any, reference_prob: Any, where: Any) -> None:
    for j in range(len(policy_prob)):
        across, up = (
            _clamp(reference_prob[j] * JOINT_CELLS, JOINT_CELLS - 1),
            _clamp(policy_prob[j] * JOINT_CELLS, JOINT_CELLS - 1),
        )
        where[j] = across * JOINT_CELLS + up


@compile_loop
def _tally_run(x: Any, k3: Any, reference_prob: Any, places: Any, by_surprisal: Any, layers: Any, joint: Any) -> None:
    surprisal, layer, cell = places
    for j in range(len(x)):
        add_to_row(by_surprisal, surprisal[j], (1.0, abs(x[j]), k3[j], x[j], 1.0 - reference_prob[j]))
        add_to_row(layers, layer[j], (1.0, k3[j]))
        joint[uint64(cell[j])] += 1


@compile_sums
def _sum_sizes(x: Any, k3: Any) -> tuple[float, float]:
    absolute = k3_sum = 0.0
    for j in range(len(x)):
        absolute += abs(x[j])
        k3_sum += k3[j]
    return absolute, k3_sum


@compile_loop
def _tally_positions(x: Any, k3: Any, first: int, position: Any, table: Any) -> None:
    """Add tokens to the bins of their positions. If `position` is empty, the positions are first, first + 1, ..."""
    start = 0
    while start < len(x):
        if len(position):
            where, stop = _octave_bin(float64(position[start] + 1), _POSITION), start + 1
            while stop < len(x) and _octave_bin(float64(position[stop] + 1), _POSITION) == where:
                stop += 1
        else:
            where = _octave_bin(float64(first + start + 1), _POSITION)
            stop = min(len(x), _POSITION_ENDS[where] - first - 1)
        absolute, k3_sum = _sum_sizes(x[start:stop], k3[start:stop])
        table[where, 0] += stop - start
        table[where, 1] += absolute
        table[where, 2] += k3_sum
        start = stop


_FIRST_NEIGHBOUR = TOKEN_SUMS.index("neighbours")


@compile_loop
def reduce_sequences(
    policy: Any, reference: Any, position: Any, offsets: Any, order: Any, rows: Any, cells: Any, buckets: Any,
    clusters: Any, sums: Any, maxima: Any, tokens_by_row: Any, sums_by_cell: Any, by_surprisal: Any, by_position: Any,
    joint: Any, layers: Any, outside: Any, terms: Any, bins_of: Any,
) -> None:  # fmt: skip
    """Compute all sums and histograms of a batch. `order` contains sequence indices, sorted by their entry in `rows`.

    `terms` and `bins_of` are buffers for TILE tokens. `terms[0, 0]` is the log ratio of the token before a tile.
    """
    x, exp_minus_one, k3, policy_prob, reference_prob = terms[0], terms[1], terms[2], terms[3], terms[4]
    where, layer, cell = bins_of[0], bins_of[1], bins_of[2]
    for i in order:
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
                row, sums_of = rows[i] * MAGNITUDE_BINS, 2 * cells[rows[i]] * SIGNED_BINS
                _tally_ratios(own, k3_own, tokens_by_row[row:], sums_by_cell[sums_of:], (where, layer))
            if len(joint):
                _place_surprisal(q, where)
                _place_layers(k3_own, where, layer)
                _place_joint(p_own, q_own, cell)
                own_layers = layers[clusters[i] * _LAYER_COUNT :]
                _tally_run(own, k3_own, q_own, (where, layer, cell), by_surprisal[bucket], own_layers, joint)
                _tally_positions(own, k3_own, start - offsets[i], places, by_position[bucket])
                _add_outside(own, *extremes, outside[i])
            x[0] = x[n]


@compile_loop
def _mark_outside(policy: Any, reference: Any, low: float, high: float, marks: Any) -> None:
    """Set marks[j] to True if the log ratio of token j is <= `low` or >= `high`, else to False."""
    for j in range(len(policy)):
        x = np.float64(policy[j]) - np.float64(reference[j])  # the compiler can vectorize marks, but not indices
        marks[j] = (x <= low) | (x >= high)


@compile_loop
def search_sequences(
    policy: Any, reference: Any, offsets: Any, sequences: Any, low: float, high: float, marks: Any, found: Any
) -> int:
    """Return the number of tokens with log ratio <= `low` or >= `high`. Write indices to `found` until it is full."""
    count, eights = 0, marks.view(np.uint64)
    for i in sequences:
        for start in range(offsets[i], offsets[i + 1], TILE):
            stop = min(start + TILE, offsets[i + 1])
            _mark_outside(policy[start:stop], reference[start:stop], low, high, marks[: stop - start])
            marks[stop - start :] = False
            for eight in range((stop - start + 7) >> 3):
                if eights[eight]:
                    for place in range(8 * eight, 8 * eight + 8):
                        if marks[place]:
                            if count < len(found):
                                found[count] = start + place
                            count += 1
    return count


@compile_sums
def _add_level_terms(rollout: Any, train: Any, valid: Any, cap: float, sums: Any) -> None:
    """Write the LevelTerms of one sequence to `sums`. A constant must be the first argument of `min` to ignore NaN."""
    finite = identical = size = certain = 0.0
    for j in range(len(train)):
        x = abs(float64(train[j]) - float64(rollout[j]))
        used = float64(valid[j]) if x < np.inf else 0.0
        k, r, scale = split_exponent(min(0.0, max(SMALLEST_EXPONENT, float64(train[j]))))
        finite += used
        identical += float64(valid[j]) if train[j] == rollout[j] else 0.0
        size += used * min(cap, x)
        certain += used * (scale * (1.0 + (r + k)))
    sums[0], sums[1], sums[2], sums[3] = finite, identical, size, certain


@compile_loop
def _mix_hash(hashed: Any, salt: Any) -> Any:
    """Compute `mix_hashes` of one hash."""
    x = ((hashed * uint64(0xD1342543DE82EF95)) ^ salt) + uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> uint64(27))) * uint64(0x94D049BB133111EB)
    return x ^ (x >> uint64(31))


@compile_loop
def _float_bits(value: float) -> Any:
    return uint64(double_to_bits(value + 0.0))  # -0.0 becomes 0.0


@compile_loop
def _hash_row(rollout: Any, train: Any) -> Any:
    """Compute the hash of `hash_rows` for one sequence."""
    found, last = uint64(len(rollout)), len(rollout) - 1
    for place in range(HASH.row_probes if last >= 0 else 0):
        token = last * place // (HASH.row_probes - 1)
        found = _mix_hash(found, _float_bits(float64(rollout[token])))
        found = _mix_hash(found, _float_bits(float64(train[token])))
    return found


@compile_loop
def _clip_log_prob(value: float) -> float:
    return min(max(value, -HASH.bound), HASH.bound) if value == value else 0.0


@compile_loop
def _hash_content(rollout: Any, train: Any, index: Any, start: int, size: int, probed: Any) -> tuple[Any, float]:
    """Compute the hash and the surprise of `hash_contents` for a sequence of `size` valid tokens."""
    informative, before, total = 0, -1, 0.0
    for probe in range(HASH.probes):
        place = (size - 1) * probe // (HASH.probes - 1)
        token = index[start + place] if len(index) else start + place
        own, other = _clip_log_prob(float64(rollout[token])), _clip_log_prob(float64(train[token]))
        probed[probe], probed[HASH.probes + probe] = own, other
        informative += (abs(np.rint(own * HASH.steps)) > 1.0) & (place > before)
        before, total = place, total + max(own, HASH.most_surprised)
    found, scale = uint64(0), HASH.steps if informative >= HASH.informative else 0.0
    for probe in range(2 * HASH.probes):
        value = np.rint(probed[probe] * scale) if scale else probed[probe]
        found += _mix_hash(_float_bits(value), uint64(probe))
    return _mix_hash(found, uint64(size)), -total / HASH.probes * size


@compile_loop
def scan_sequences(
    rollout: Any, train: Any, valid: Any, offsets: Any, cap: float, index: Any, bounds: Any, probed: Any,
    sums: Any, rows: Any, contents: Any, surprise: Any,
) -> None:  # fmt: skip
    """Write the SequenceTerms of each sequence while its tokens are in the CPU cache."""
    for i in range(len(offsets) - 1):
        tokens = slice(offsets[i], offsets[i + 1])
        _add_level_terms(rollout[tokens], train[tokens], valid[tokens], cap, sums[i])
        rows[i] = _hash_row(rollout[tokens], train[tokens])
        if bounds[i + 1] > bounds[i]:
            size = bounds[i + 1] - bounds[i]
            contents[i], surprise[i] = _hash_content(rollout, train, index, bounds[i], size, probed)
