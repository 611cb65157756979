"""What is read from histograms: quantiles with a cluster-bootstrap interval, and the share of the worst tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.sums import PairSums
from mismatchctl.sums.bins import magnitude_edges

RESAMPLES = 400
INTERVAL = 0.90
"""Coverage of the intervals of quantiles."""
_SEED = 20251027  # fixed: the same sums give the same interval


@lru_cache(maxsize=1)
def _middles() -> Float64s:
    edges = magnitude_edges()
    middles = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = 0.0, edges[-2]
    return middles


def quantiles(pair: PairSums, shares: tuple[float, ...], largest: float) -> Float64s:
    """Quantiles of |log ratio| over tokens, within 0.8 % of their value; none exceeds the `largest`.

    Returns:
        [len(shares)]; NaN when there is no token.
    """
    return _read(pair.counts.sum(axis=0)[None, :].astype(np.float64), shares, largest)[0]


def quantile_intervals(pair: PairSums, shares: tuple[float, ...], largest: float) -> Float64s:
    """Interval of each quantile by resampling buckets of clusters, [len(shares), 2]; NaN with fewer than two."""
    filled = pair.counts.any(axis=0)
    occupied = np.flatnonzero(pair.counts.any(axis=1))
    if len(occupied) < 2:
        return np.full((len(shares), 2), np.nan)
    drawn = np.random.default_rng(_SEED).multinomial(
        len(occupied), np.full(len(occupied), 1 / len(occupied)), RESAMPLES
    )
    counts = np.zeros((RESAMPLES, len(filled)))
    counts[:, filled] = drawn.astype(np.float64) @ pair.counts[np.ix_(occupied, filled)].astype(np.float64)
    resampled = _read(counts, shares, largest)
    tail = (1 - INTERVAL) / 2
    interval: Float64s = np.nanquantile(resampled, [tail, 1 - tail], axis=0).T
    return interval


def _read(counts: Float64s, shares: tuple[float, ...], largest: float) -> Float64s:
    filled = np.flatnonzero(counts.any(axis=0))
    if not len(filled):
        return np.full((len(counts), len(shares)), np.nan)
    cumulative = np.cumsum(counts[:, filled], axis=1)
    total = cumulative[:, -1:]
    middles = np.minimum(_middles()[filled], largest)
    found = np.stack([(cumulative < share * total).sum(axis=1) for share in shares], axis=1)
    values: Float64s = np.where(total > 0, middles[np.minimum(found, len(filled) - 1)], np.nan)
    return values


def worst_share(pair: PairSums, tokens: float) -> float:
    """Share of all K3 that the `tokens` share of tokens with the largest K3 holds; NaN when K3 is 0 or overflows."""
    total = pair.k3.sum()
    if not 0 < total < np.inf:
        return float("nan")
    filled = np.flatnonzero(pair.signed)
    counts, k3 = pair.signed[filled].astype(np.float64), pair.k3[filled]
    order = np.argsort(-k3 / counts, kind="stable")
    counts, k3 = counts[order], k3[order]
    before = np.cumsum(counts) - counts
    part = np.clip((tokens * counts.sum() - before) / counts, 0, 1)
    return float((k3 * part).sum() / total)


