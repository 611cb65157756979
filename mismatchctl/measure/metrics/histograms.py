"""What is read from histograms: quantiles with a cluster-bootstrap interval, and the share of the worst tokens."""

from __future__ import annotations

from collections.abc import Sequence
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


def quantiles_with_intervals(
    pair: PairSums, shares: Sequence[float], largest: float
) -> list[tuple[float, tuple[float, float]]]:
    """Quantiles of |log ratio| over tokens, and the interval of each by resampling buckets of clusters.

    Args:
        pair: whose histogram is read.
        shares: of the tokens, below each quantile.
        largest: the largest |log ratio|, which no quantile exceeds.

    Returns:
        For each share the quantile, within 0.8 % of its value (NaN when there is no token), and its interval (NaN with
        fewer than two buckets).
    """
    buckets, filled, counts = pair.histogram.magnitudes()
    cumulative, middles = np.cumsum(counts, axis=1), _middles()[filled]
    values = _read(cumulative.sum(axis=0)[None], middles, shares, largest)[0]
    low = high = np.full(len(shares), np.nan)
    if len(buckets) >= 2:
        resampled = np.sort(_read(_draws(len(buckets)) @ cumulative, middles, shares, largest), axis=0)
        outside = int((1 - INTERVAL) / 2 * RESAMPLES)
        low, high = resampled[outside], resampled[RESAMPLES - 1 - outside]
    ends = zip(low.tolist(), high.tolist(), strict=True)
    return list(zip(values.tolist(), ends, strict=True))


def _read(cumulative: Float64s, middles: Float64s, shares: Sequence[float], largest: float) -> Float64s:
    """Quantiles of each row of cumulative counts [N, bins]; NaN for a row without tokens."""
    if not len(middles):
        return np.full((len(cumulative), len(shares)), np.nan)
    total = cumulative[:, -1:]
    wanted = np.ceil(total * np.array(shares))  # counts are whole: those that reach a share reach the next whole number
    row = np.arange(len(cumulative))[:, None]
    apart = (total.max() + 1) * row  # so that one search does for all rows
    found = np.searchsorted((cumulative + apart).ravel(), (wanted + apart).ravel()).reshape(wanted.shape)
    found -= len(middles) * row
    values = np.minimum(middles, largest)[np.minimum(found, len(middles) - 1)]
    return np.where(total > 0, values, np.nan)


def worst_share(pair: PairSums, tokens: float) -> float:
    """Share of all K3 that the `tokens` share of tokens with the largest K3 holds; NaN when K3 is 0 or overflows."""
    tokens_of, k3 = pair.histogram.by_bin()
    total = k3.sum()
    if not 0 < total < np.inf:
        return float("nan")
    filled = np.flatnonzero(tokens_of)
    counts, k3 = tokens_of[filled].astype(np.float64), k3[filled]
    order = np.argsort(-k3 / counts, kind="stable")
    counts, k3 = counts[order], k3[order]
    before = np.cumsum(counts) - counts
    part = np.clip((tokens * counts.sum() - before) / counts, 0, 1)
    return float((k3 * part).sum() / total)
