"""Fixed bins by the bit pattern of a float32: no logarithm, no data-dependent edge, so that counts add.

Log ratios: 64 bins an octave, 2^-40 .. 2^14, mirrored for negative ones, with one bin below and above.
A quantile read from them is off by at most half a bin, 0.8 % of its value.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints

BINS_PER_OCTAVE = 64
LOWEST_OCTAVE, HIGHEST_OCTAVE = -40, 14
MAGNITUDES = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 2
"""Bins of a magnitude: one below 2^-40 (zero included), the octaves, one from 2^14 up."""
SIGNED = 2 * MAGNITUDES
"""Bins of a signed value, ascending: magnitudes of negative values mirrored, then those of the rest."""

SIGNED_SHIFT = 17
"""Bits of a float32 below those that tell its bin."""
FIRST_MAGNITUDE = (127 + LOWEST_OCTAVE) * BINS_PER_OCTAVE - 1
"""What the remaining bits are counted from."""


def signed_bin(values: Float64s) -> NDArray[np.int32]:
    """Bin of each signed value, in 0 .. SIGNED - 1, ascending with the value."""
    bits = values.astype(np.float32).view(np.int32)
    magnitude = (bits & 0x7FFFFFFF) >> SIGNED_SHIFT
    np.subtract(magnitude, FIRST_MAGNITUDE, out=magnitude)
    np.clip(magnitude, 0, MAGNITUDES - 1, out=magnitude)
    return (magnitude ^ (bits >> 31)) + np.int32(MAGNITUDES)


def magnitude_of(signed: NDArray[Any]) -> NDArray[Any]:
    """The magnitude bin of each signed one."""
    own = signed - MAGNITUDES
    return np.where(own < 0, -1 - own, own)


def reached_by(counts: NDArray[Any], number: int) -> float:
    """A value that at least `number` values reach, given counts by signed bin; -inf where it would be negative."""
    from_top = np.cumsum(counts[: MAGNITUDES - 1 : -1])
    magnitude = MAGNITUDES - 1 - int(np.searchsorted(from_top, number))
    if magnitude < 0:
        return -np.inf
    return float(magnitude_edges()[magnitude]) * (1 - 2.0**-20)  # bins are those of the value rounded to float32


@cache
def magnitude_edges() -> Float64s:
    """Lower edges of the magnitude bins followed by the last one's upper edge, [MAGNITUDES + 1]; ends 0 and inf."""
    octaves = np.arange(LOWEST_OCTAVE, HIGHEST_OCTAVE)
    within = 1 + np.arange(BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    inner = np.ldexp(within, octaves[:, None]).ravel()
    return np.concatenate([[0.0], inner, [np.ldexp(1.0, HIGHEST_OCTAVE), np.inf]])


def fold_signs(counts: NDArray[Any]) -> NDArray[Any]:
    """Counts by signed bin (last axis SIGNED) as counts by magnitude (last axis MAGNITUDES)."""
    folded: NDArray[Any] = counts[..., MAGNITUDES:] + counts[..., MAGNITUDES - 1 :: -1]
    return folded


class OctaveBins:
    """`per_octave` (1, 2 or 4) bins an octave from `lowest` to `highest` (powers of two), open at both ends."""

    def __init__(self, lowest: int, highest: int, per_octave: int = 2) -> None:
        self.shift = 23 - {1: 0, 2: 1, 4: 2}[per_octave]
        self.per_octave, self.lowest, self.highest = per_octave, lowest, highest
        self.first = (127 + lowest) * per_octave - 1
        self.count = (highest - lowest) * per_octave + 2

    def of(self, values: NDArray[Any]) -> Ints:
        """Bin of each non-negative value, in 0 .. count - 1."""
        bins = (values.astype(np.float32).view(np.int32) >> self.shift).astype(np.int64)
        np.subtract(bins, self.first, out=bins)
        return np.clip(bins, 0, self.count - 1, out=bins)

    def edges(self) -> Float64s:
        """Lower edges of all bins followed by the upper edge of the last, [count + 1]; 0 and inf at the ends."""
        octaves = np.arange(self.lowest, self.highest)
        inner = (2.0 ** octaves[:, None] * (1 + np.arange(self.per_octave) / self.per_octave)).ravel()
        return np.concatenate([[0.0], inner, [2.0**self.highest, np.inf]])


POSITION_BINS = OctaveBins(0, 20)
"""Bins of position + 1, two an octave."""
SURPRISAL_BINS = OctaveBins(-10, 5)
"""Bins of minus the rollout log-prob (nats), two an octave: probability 0.999 .. 1e-14."""
LENGTH_BINS = OctaveBins(0, 20)
"""Bins of the response length in valid tokens, two an octave."""
