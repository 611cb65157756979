"""What is read from histograms: quantiles with a cluster-bootstrap interval, and the share of the worst tokens."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure import PairSums
from mismatchctl.measure.bins import magnitude_edges

RESAMPLES = 200
INTERVAL = 0.90
"""Coverage of the intervals of quantiles."""
_SEED = 20251027  # fixed: the same sums give the same interval


@lru_cache(maxsize=1)
def _middles() -> Float64s:
    edges: Float64s = magnitude_edges()
    middles: Float64s = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = 0.0, edges[-2]
    return middles


@lru_cache(maxsize=8)
def _draws(buckets: int) -> Float64s:
    """How often each of some buckets is drawn in each resample, [RESAMPLES, buckets]."""
    drawn = np.random.default_rng(_SEED).multinomial(buckets, np.full(buckets, 1 / buckets), RESAMPLES)
    return drawn.astype(np.float64)


def quantiles(pair: PairSums, shares: tuple[float, ...], largest: float) -> Float64s:
    """Quantiles of |log ratio| over tokens, within 0.8 % of their value; none exceeds the `largest`.

    Returns:
        [len(shares)]; NaN when there is no token.
    """
    counts = pair.counts.sum(axis=0)
    filled = np.flatnonzero(counts)
    cumulative = np.cumsum(counts[None, filled].astype(np.float64), axis=1)
    values: Float64s = _read(cumulative, _middles()[filled], shares, largest)[0]
    return values


def quantile_intervals(pair: PairSums, shares: tuple[float, ...], largest: float) -> Float64s:
    """Interval of each quantile by resampling buckets of clusters, [len(shares), 2]; NaN with fewer than two."""
    filled = np.flatnonzero(pair.counts.any(axis=0))
    occupied = np.flatnonzero(pair.counts.any(axis=1))
    buckets = len(occupied)
    if buckets < 2:
        return np.full((len(shares), 2), np.nan)
    cumulative = np.cumsum(pair.counts[np.ix_(occupied, filled)].astype(np.float64), axis=1)
    resampled = np.sort(_read(_draws(buckets) @ cumulative, _middles()[filled], shares, largest), axis=0)
    low = int((1 - INTERVAL) / 2 * RESAMPLES)
    return np.stack([resampled[low], resampled[RESAMPLES - 1 - low]], axis=1)


def _read(cumulative: Float64s, middles: Float64s, shares: tuple[float, ...], largest: float) -> Float64s:
    """Quantiles of each row of cumulative counts [N, bins]; NaN for a row without tokens."""
    if not len(middles):
        return np.full((len(cumulative), len(shares)), np.nan)
    total = cumulative[:, -1:]
    found = np.stack([np.searchsorted(row, row[-1] * np.array(shares)) for row in cumulative])
    values = np.minimum(middles, largest)[np.minimum(found, len(middles) - 1)]
    return np.where(total > 0, values, np.nan)


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
