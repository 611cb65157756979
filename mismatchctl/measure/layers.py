"""K3 in layers: of each cluster, by the rollout's probability, with every token's K3 cut off at each of a row of caps.

A few tokens carry most of the K3 of a mixture of experts. With caps, what every token does is told from what a few do;
by probability, what was sampled is told from how it was scored. A cap is the K3 of a log ratio of 2^e nats.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Segments
from mismatchctl.measure.bins import SURPRISAL_BINS

PROBABILITIES = (0.05, 0.3, 0.6, 0.9, 0.99)
"""About where bins of the rollout's probability meet; their edges are those of the bins of surprisal next to these."""
EXPONENTS = tuple(range(-18, 2))
"""Of the caps, as powers of two of the log ratio."""
CAPS = np.ldexp(0.5, 2 * np.array(EXPONENTS))
"""K3 at most, of a token [caps]."""
BINS = len(PROBABILITIES) + 1
FIRST = 1023 + 2 * EXPONENTS[0] - 1
"""Exponent bits of the lowest cap as a float64; the next one's are two more."""


def _bin_of_surprisal() -> NDArray[np.int64]:
    middles = np.sqrt(np.maximum(SURPRISAL_BINS.edges()[:-1], 1e-9) * np.minimum(SURPRISAL_BINS.edges()[1:], 1e9))
    found: NDArray[np.int64] = np.searchsorted(PROBABILITIES, np.exp(-middles)).astype(np.int64)
    return found


BIN_OF_SURPRISAL = _bin_of_surprisal()
"""Bin of the rollout's probability by bin of its surprisal."""
TOKENS = tuple(f"tokens@{place}" for place in range(BINS))
"""Columns of tokens by bin of the rollout's probability."""
CAPPED = tuple(f"k3@{place}<{exponent}" for place in range(BINS) for exponent in EXPONENTS)
"""Columns of K3 by that bin, of no token more than at a log ratio of 2^exponent."""
LAYERS = (*TOKENS, *CAPPED)


def caps_reached(k3: Float64s) -> NDArray[np.int64]:
    """How many caps each K3 reaches, in 0 .. len(CAPS)."""
    found: NDArray[np.int64] = np.clip(((k3.view(np.int64) >> 52) - FIRST + 2) // 2, 0, len(CAPS))
    return found


def table_of(clusters: int) -> Float64s:
    """Zeros to add tokens and K3 to: by cluster, bin and how many caps the K3 reaches [clusters, BINS, caps + 1, 2]."""
    return np.zeros((clusters, BINS, len(CAPS) + 1, 2))


def add_layers(table: Float64s, reference: Float64s, k3: Float64s, clusters: NDArray[np.int64]) -> None:
    """Add tokens to a table.

    Args:
        table: as `table_of` makes it.
        reference: log-probs of the rollout [T], nats.
        k3: of each token [T].
        clusters: row of each token [T].
    """
    place = BIN_OF_SURPRISAL[SURPRISAL_BINS.of(np.maximum(-reference, 0.0))]
    where = (clusters * BINS + place) * table.shape[2] + caps_reached(k3)
    of_places = table.reshape(-1, 2)
    of_places[:, 0] += np.bincount(where, minlength=len(of_places))
    of_places[:, 1] += np.bincount(where, weights=k3, minlength=len(of_places))


def close_layers(table: Float64s) -> Float64s:
    """LAYERS of each cluster [clusters, len(LAYERS)] from such a table."""
    counts, sums = table[..., 0], table[..., 1]
    beyond = counts[..., ::-1].cumsum(axis=-1)[..., ::-1][..., 1:]
    capped = sums.cumsum(axis=-1)[..., :-1] + CAPS * beyond
    return np.concatenate([counts.sum(axis=-1), capped.reshape(len(counts), -1)], axis=1)


def layer_columns(reference: Float64s, k3: Float64s, segments: Segments) -> Float64s:
    """LAYERS of each sequence [len(LAYERS), S], given log-probs of the rollout and K3 of the tokens [T]."""
    table = table_of(len(segments.lengths))
    add_layers(table, reference, k3, np.repeat(np.arange(len(segments.lengths)), segments.lengths))
    return close_layers(table).T
