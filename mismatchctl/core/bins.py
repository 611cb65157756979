"""Histogram bins, which are the same for every dump, and tables of K3 by rollout probability."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s, Ints, Segments

BINS_PER_OCTAVE = 64
LOWEST_OCTAVE, HIGHEST_OCTAVE = -40, 14
MAGNITUDE_BINS = (HIGHEST_OCTAVE - LOWEST_OCTAVE) * BINS_PER_OCTAVE + 2
"""Number of bins of absolute values: one below 2^-40, 64 per doubling up to 2^14, and one for larger values."""
SIGNED_BINS = 2 * MAGNITUDE_BINS
"""Number of bins of signed values in ascending order: the lower half for negative values, the upper half for others."""

SIGNED_SHIFT = 17
"""The bits of a float32 are shifted right by this number to find its bin."""
FIRST_MAGNITUDE = (127 + LOWEST_OCTAVE) * BINS_PER_OCTAVE - 1
"""Subtract this from the shifted bits (without the sign) to get the bin of an absolute value."""


def signed_bin(values: Float64s) -> NDArray[np.int32]:
    """Return the histogram bin of each value, such as a log ratio. Bin 0 contains the most negative values."""
    bits = values.astype(np.float32).view(np.int32)
    magnitude = np.clip(((bits & 0x7FFFFFFF) >> SIGNED_SHIFT) - FIRST_MAGNITUDE, 0, MAGNITUDE_BINS - 1)
    return (magnitude ^ (bits >> 31)) + MAGNITUDE_BINS  # type: ignore[no-any-return, unused-ignore]


def magnitude_bin(signed: NDArray[Any]) -> NDArray[Any]:
    """Convert bins of signed values to the bins of their absolute values."""
    own = signed - MAGNITUDE_BINS
    return np.where(own < 0, -1 - own, own)


def value_at_rank(counts: NDArray[Any], number: int) -> float:
    """Return a lower bound of the `number`-th largest value in a histogram [SIGNED_BINS], or -inf if it is negative."""
    from_top = np.cumsum(counts[: MAGNITUDE_BINS - 1 : -1])
    magnitude = MAGNITUDE_BINS - 1 - int(np.searchsorted(from_top, number))
    if magnitude < 0:
        return -np.inf
    return float(magnitude_edges()[magnitude]) * (1 - 2.0**-20)  # values are rounded to float32 before they are binned


@cache
def magnitude_edges() -> Float64s:
    """Return the edges of the magnitude bins. The last edge is infinity."""
    octaves = np.arange(LOWEST_OCTAVE, HIGHEST_OCTAVE)
    within = 1 + np.arange(BINS_PER_OCTAVE) / BINS_PER_OCTAVE
    inner = np.ldexp(within, octaves[:, None]).ravel()
    return np.concatenate([[0.0], inner, [np.ldexp(1.0, HIGHEST_OCTAVE), np.inf]])


def fold_signs(counts: NDArray[Any]) -> NDArray[Any]:
    """Add the counts of negative values to the bins of their absolute values."""
    folded: NDArray[Any] = counts[..., MAGNITUDE_BINS:] + counts[..., MAGNITUDE_BINS - 1 :: -1]
    return folded


class OctaveBins:
    """Bins from 2^lowest to 2^highest, with 1, 2 or 4 bins per factor of 2, and two bins for values outside."""

    def __init__(self, lowest: int, highest: int, per_octave: int = 2) -> None:
        self.shift = 23 - {1: 0, 2: 1, 4: 2}[per_octave]
        self.per_octave, self.lowest, self.highest = per_octave, lowest, highest
        self.first = (127 + lowest) * per_octave - 1
        self.count = (highest - lowest) * per_octave + 2

    def find_bins(self, values: NDArray[Any]) -> Ints:
        """Return the bin of each value. Values must not be negative."""
        bins = (values.astype(np.float32).view(np.int32) >> self.shift).astype(np.int64)
        return np.clip(bins - self.first, 0, self.count - 1)

    def edges(self) -> Float64s:
        """Return the edges of the bins. The last edge is infinity."""
        octaves = np.arange(self.lowest, self.highest)
        inner = (2.0 ** octaves[:, None] * (1 + np.arange(self.per_octave) / self.per_octave)).ravel()
        return np.concatenate([[0.0], inner, [2.0**self.highest, np.inf]])


POSITION_BINS = OctaveBins(0, 20)
"""Bins of the position in a response, counted from 1. Each factor of 2 has two bins."""
SURPRISAL_BINS = OctaveBins(-10, 5)
"""Bins of the negative rollout log-prob (nats) for probabilities from 0.999 to 1e-14. Each factor of 2 has two bins."""
LENGTH_BINS = OctaveBins(0, 20)
"""Bins of the response length in valid tokens. Each factor of 2 has two bins."""
PROBABILITY_EDGES = (0.05, 0.3, 0.6, 0.9, 0.99)
"""Approximate bin edges of the rollout probability. Each is moved to the nearest edge of SURPRISAL_BINS."""
CAP_EXPONENTS = tuple(range(-18, 2))
"""Exponents e of the caps on a token's K3. A cap is (2^e)^2 / 2, about the K3 of a token with a log ratio of 2^e."""
K3_CAPS = np.ldexp(0.5, 2 * np.array(CAP_EXPONENTS))
PROBABILITY_BINS = len(PROBABILITY_EDGES) + 1
FIRST_CAP_BITS = 1023 + 2 * CAP_EXPONENTS[0] - 1
"""The exponent bits of K3_CAPS[0] as a float64. They grow by 2 per cap, because each cap is 4 times the previous."""


def _probability_bin_by_surprisal() -> NDArray[np.int64]:
    middles = np.sqrt(np.maximum(SURPRISAL_BINS.edges()[:-1], 1e-9) * np.minimum(SURPRISAL_BINS.edges()[1:], 1e9))
    found: NDArray[np.int64] = np.searchsorted(PROBABILITY_EDGES, np.exp(-middles)).astype(np.int64)
    return found


PROBABILITY_BIN_BY_SURPRISAL = _probability_bin_by_surprisal()
"""Table that converts the bin of a token's surprisal to the bin of its rollout probability."""
LAYER_TOKENS = tuple(f"tokens@{place}" for place in range(PROBABILITY_BINS))
"""Names of columns with token counts by bin of the rollout probability, such as `tokens@5`."""
LAYER_K3 = tuple(f"k3@{place}<{exponent}" for place in range(PROBABILITY_BINS) for exponent in CAP_EXPONENTS)
"""Names of columns with sums of min(K3, cap). `k3@5<-2`: bin 5 of the rollout probability, cap 1/32 (exponent -2)."""
LAYER_COLUMNS = (*LAYER_TOKENS, *LAYER_K3)


def new_layer_table(clusters: int) -> Float64s:
    """Return an empty table of token counts and K3 sums: zeros [clusters, probability bins, K3 bins, 2]."""
    return np.zeros((clusters, PROBABILITY_BINS, len(K3_CAPS) + 1, 2))


def layer_bin(reference: Float64s, k3: Float64s, segments: Segments) -> Ints:
    """Return each token's cell in a flattened table [probability bins, K3 bins]. `reference`: rollout log-probs."""
    surprisal = SURPRISAL_BINS.find_bins(np.maximum(-reference, 0.0))
    reached: Ints = np.clip(((k3.view(np.int64) >> 52) - FIRST_CAP_BITS + 2) >> 1, 0, len(K3_CAPS))
    place: Ints = segments.from_host(PROBABILITY_BIN_BY_SURPRISAL)[surprisal]
    return place * (len(K3_CAPS) + 1) + reached


def close_layers(table: Float64s) -> Float64s:
    """Return the LAYER_COLUMNS [columns, clusters] of a filled table of `new_layer_table`."""
    caps, clusters = len(K3_CAPS), len(table)
    counts, sums = table.transpose(3, 2, 1, 0).reshape(2, caps + 1, -1)  # much faster than `cumsum` over short rows
    capped, beyond, below = np.empty((caps, counts.shape[1])), counts[caps].copy(), np.zeros(counts.shape[1])
    for cap in reversed(range(caps)):
        np.multiply(beyond, K3_CAPS[cap], out=capped[cap])
        beyond += counts[cap]
    for cap in range(caps):
        below += sums[cap]
        capped[cap] += below
    by_column = capped.reshape(caps, -1, clusters).transpose(1, 0, 2).reshape(-1, clusters)
    return np.concatenate([beyond.reshape(-1, clusters), by_column])
