"""Compiled loops that look at log-probs while they are read: how far columns reach, and levels of each sequence."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import float32, int32

from mismatchctl.measure.kernels.compiling import compiled, compiled_sums, compiled_terms, float_bits, single, widen
from mismatchctl.measure.kernels.kernel import TILE

_COEFFICIENTS = tuple(np.float32(1 / math.factorial(power)) for power in range(7))
_LOG2_E, _LN2 = np.float32(1 / math.log(2)), np.float32(math.log(2))
_ROUND = np.float32(1.5 * 2.0**23)  # adding it leaves the nearest integer in the low bits
_SMALLEST, _ZERO = np.float32(-87.0), np.float32(0.0)
"""Of what is below, exp is no normal float32, and nothing in a sum of probabilities."""


@compiled
def _add_reach(bits: Any, signed: Any, reach: Any, highest: Any) -> None:
    """Lower `reach[0]` to the smallest bits, raise `reach[1]` and `highest[0]` to the largest ones of each kind."""
    widen()
    least, most, top = bits[0], bits[0], signed[0]
    for j in range(len(bits)):
        least, most, top = min(least, bits[j]), max(most, bits[j]), max(top, signed[j])
    reach[0], reach[1], highest[0] = min(reach[0], least), max(reach[1], most), max(highest[0], top)


@compiled_terms
def _exp(x: Any) -> Any:
    """Exp of a float32 from _SMALLEST to 0, off by 2e-7 at most."""
    shifted = x * _LOG2_E + _ROUND
    r = x - (shifted - _ROUND) * _LN2
    c, s = _COEFFICIENTS, r * r
    value = (c[0] + c[1] * r) + s * ((c[2] + c[3] * r) + s * ((c[4] + c[5] * r) + s * c[6]))
    return value * single((float_bits(shifted) << int32(23)) + int32(0x3F800000))


@compiled_sums
def _add_levels(policy: Any, reference: Any, valid: Any, cap: float, sums: Any) -> None:
    """In float32 and weights of 0 and 1, which fill the lanes of a vector; of `min` and `max`, the first if one is NaN.

    A tile's sums are off by 1e-6 at most, as they are where numpy looks.
    """
    widen()
    most, tokens, size, certain, same = float32(cap), _ZERO, _ZERO, _ZERO, _ZERO
    for j in range(len(policy)):
        given, x = float32(valid[j]), abs(policy[j] - reference[j])
        used = given if x < np.inf else _ZERO
        tokens += used
        size += used * min(most, float32(x))
        certain += used * _exp(min(max(_SMALLEST, float32(policy[j])), _ZERO))
        same += given if policy[j] == reference[j] else _ZERO
    for index, value in enumerate((tokens, size, certain, same)):
        sums[index] += value


@compiled
def look_at_sequences(
    columns: Any, bits: Any, signed: Any, valid: Any, offsets: Any, cap: float, reach: Any, highest: Any, sums: Any
) -> None:
    """Add to `sums` [S, 4] what a Look has of the valid tokens of each sequence; the extremes of the bits of all.

    `bits` and `signed` are both columns, policy first, read as integers: these compare in vector code, and NaN among
    them.
    """
    for i in range(len(offsets) - 1):
        for start in range(offsets[i], offsets[i + 1], TILE):
            tokens = slice(start, min(start + TILE, offsets[i + 1]))
            for side in range(2):
                _add_reach(bits[side][tokens], signed[side][tokens], reach[side], highest[side : side + 1])
            _add_levels(columns[0][tokens], columns[1][tokens], valid[tokens], cap, sums[i])
