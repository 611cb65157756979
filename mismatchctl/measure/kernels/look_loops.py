"""Compiled loops that look at log-probs while they are read: how far columns reach, and levels of each sequence."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import float64

from mismatchctl.measure.kernels.compiling import compiled, compiled_sums, widen
from mismatchctl.measure.kernels.kernel import TILE
from mismatchctl.measure.kernels.loops import SMALLEST, split


@compiled
def _add_reach(bits: Any, signed: Any, reach: Any, highest: Any) -> None:
    """Lower `reach[0]` to the smallest bits, raise `reach[1]` and `highest[0]` to the largest ones of each kind."""
    widen()
    least, most, top = bits[0], bits[0], signed[0]
    for j in range(len(bits)):
        least, most, top = min(least, bits[j]), max(most, bits[j]), max(top, signed[j])
    reach[0], reach[1], highest[0] = min(reach[0], least), max(reach[1], most), max(highest[0], top)


@compiled_sums
def _add_levels(policy: Any, reference: Any, valid: Any, cap: float, sums: Any) -> None:
    widen()
    tokens = size = certain = same = 0.0  # numbers of their own type would keep this from becoming vector code
    for j in range(len(policy)):
        p, q = float64(policy[j]), float64(reference[j])
        x = abs(p - q)
        used = valid[j] & (x < np.inf)
        k, r, scale = split(min(max(p, SMALLEST), 0.0))
        tokens += 1.0 if used else 0.0
        size += min(x, cap) if used else 0.0
        certain += scale * (1.0 + (r + k)) if used else 0.0
        same += 1.0 if valid[j] & (p == q) else 0.0
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
