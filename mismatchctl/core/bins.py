"""Fixed bins: of magnitudes by the bit pattern of a float32, and of K3 by probability and cap."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints, Segments

BINS_PER_OCTAVE = 64
LOWEST_OCTAVE, HIGHEST_OCTAVE = -40, 14
MAGNITUDE_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 2
"""Bins of a magnitude: one below 2^-40 (zero included), the octaves, one from 2^14 up."""
SIGNED_BINS = 2 * MAGNITUDE_BINS
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
    np.clip(magnitude, 0, MAGNITUDE_BINS - 1, out=magnitude)
    return (magnitude ^ (bits >> 31)) + np.int32(MAGNITUDE_BINS)


def magnitude_bin(signed: NDArray[Any]) -> NDArray[Any]:
    """The magnitude bin of each signed one."""
    own = signed - MAGNITUDE_BINS
    return np.where(own < 0, -1 - own, own)


def value_at_rank(counts: NDArray[Any], number: int) -> float:
    """A value that at least `number` values reach, given counts by signed bin; -inf where it would be negative."""
    from_top = np.cumsum(counts[: MAGNITUDE_BINS - 1 : -1])
    magnitude = MAGNITUDE_BINS - 1 - int(np.searchsorted(from_top, number))
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
    folded: NDArray[Any] = counts[..., MAGNITUDE_BINS:] + counts[..., MAGNITUDE_BINS - 1 :: -1]
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
PROBABILITY_EDGES = (0.05, 0.3, 0.6, 0.9, 0.99)
"""About where bins of the rollout's probability meet; their edges are those of the bins of surprisal next to these."""
CAP_EXPONENTS = tuple(range(-18, 2))
"""Of the caps, as powers of two of the log ratio."""
K3_CAPS = np.ldexp(0.5, 2 * np.array(CAP_EXPONENTS))
"""K3 at most, of a token [caps]."""
PROBABILITY_BINS = len(PROBABILITY_EDGES) + 1
FIRST_CAP_BITS = 1023 + 2 * CAP_EXPONENTS[0] - 1
"""Exponent bits of the lowest cap as a float64; the next one's are two more."""


def _probability_bin_by_surprisal() -> NDArray[np.int64]:
    middles = np.sqrt(np.maximum(SURPRISAL_BINS.edges()[:-1], 1e-9) * np.minimum(SURPRISAL_BINS.edges()[1:], 1e9))
    found: NDArray[np.int64] = np.searchsorted(PROBABILITY_EDGES, np.exp(-middles)).astype(np.int64)
    return found


PROBABILITY_BIN_BY_SURPRISAL = _probability_bin_by_surprisal()
"""Bin of the rollout's probability by bin of its surprisal."""
LAYER_TOKENS = tuple(f"tokens@{place}" for place in range(PROBABILITY_BINS))
"""Columns of tokens by bin of the rollout's probability."""
LAYER_K3 = tuple(f"k3@{place}<{exponent}" for place in range(PROBABILITY_BINS) for exponent in CAP_EXPONENTS)
"""Columns of K3 by that bin, of no token more than at a log ratio of 2^exponent."""
LAYER_COLUMNS = (*LAYER_TOKENS, *LAYER_K3)


def count_caps_reached(k3: Float64s) -> NDArray[np.int64]:
    """How many caps each K3 reaches, in 0 .. len(CAPS)."""
    found: NDArray[np.int64] = np.clip(((k3.view(np.int64) >> 52) - FIRST_CAP_BITS + 2) // 2, 0, len(K3_CAPS))
    return found


def new_layer_table(clusters: int) -> Float64s:
    """Zeros to add tokens and K3 to: by cluster, bin and how many caps the K3 reaches [clusters, BINS, caps + 1, 2]."""
    return np.zeros((clusters, PROBABILITY_BINS, len(K3_CAPS) + 1, 2))


def add_layers(table: Float64s, reference: Float64s, k3: Float64s, clusters: NDArray[np.int64]) -> None:
    """Add tokens to a table.

    Args:
        table: as `table_of` makes it.
        reference: log-probs of the rollout [T], nats.
        k3: of each token [T].
        clusters: row of each token [T].
    """
    place = PROBABILITY_BIN_BY_SURPRISAL[SURPRISAL_BINS.of(np.maximum(-reference, 0.0))]
    where = (clusters * PROBABILITY_BINS + place) * table.shape[2] + count_caps_reached(k3)
    of_places = table.reshape(-1, 2)
    of_places[:, 0] += np.bincount(where, minlength=len(of_places))
    of_places[:, 1] += np.bincount(where, weights=k3, minlength=len(of_places))


def close_layers(table: Float64s) -> Float64s:
    """LAYERS of each cluster [clusters, len(LAYERS)] from such a table."""
    counts, sums = table[..., 0], table[..., 1]
    beyond = counts[..., ::-1].cumsum(axis=-1)[..., ::-1][..., 1:]
    capped = sums.cumsum(axis=-1)[..., :-1] + K3_CAPS * beyond
    return np.concatenate([counts.sum(axis=-1), capped.reshape(len(counts), -1)], axis=1)


def layer_columns(reference: Float64s, k3: Float64s, segments: Segments) -> Float64s:
    """LAYERS of each sequence [len(LAYERS), S], given log-probs of the rollout and K3 of the tokens [T]."""
    table = new_layer_table(len(segments.lengths))
    add_layers(table, reference, k3, np.repeat(np.arange(len(segments.lengths)), segments.lengths))
    return close_layers(table).T
