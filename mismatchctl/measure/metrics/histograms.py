"""What is read from histograms: quantiles with a cluster-bootstrap interval, and the share of the worst tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.measure import PairSums
from mismatchctl.measure.bins import fold_signs, magnitude_edges
from mismatchctl.measure.metrics.intervals import rests_on_few

RESAMPLES = 200
INTERVAL = 0.90
"""Coverage of the intervals of quantiles."""
COVERS, COVERS_LEAST = 0.85, 0.65
"""What the intervals of quantiles with the status `heavy_tail` were seen to cover, and of those with next to nothing
beyond them: docs/gate.md, Intervals."""
_BEYOND, _NOTHING = 10, 3  # tokens beyond a quantile: with fewer, it is hardly known, or not at all
_REACH = 8  # bins on either side of a quantile in which those of resamples are looked for first
_SEED = 20251027  # fixed: the same sums give the same interval


class Quantile(NamedTuple):
    """A quantile, its interval, and what that covers instead where the tail is heavy; NaN for what there is not."""

    value: float
    interval: tuple[float, float]
    covers: float


NO_QUANTILE = Quantile(np.nan, (np.nan, np.nan), np.nan)


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


def quantiles_of(pair: PairSums, shares: Sequence[float], largest: float, *, sure: bool = True) -> list[Quantile]:
    """Quantiles of |log ratio| over tokens, and the interval of each by resampling buckets of clusters.

    Args:
        pair: whose histogram is read.
        shares: of the tokens, below each quantile.
        largest: the largest |log ratio|, which no quantile exceeds.
        sure: whether intervals are wanted.

    Returns:
        For each share the quantile, within 0.8 % of its value (NaN when there is no token), and its interval (NaN with
        fewer than two buckets), which has a heavy tail where few tokens or few clusters lie beyond the quantile.
    """
    filled, counts = pair.histogram.by_bucket() if sure else _in_one(pair)
    if not len(filled):
        return [NO_QUANTILE] * len(shares)
    middles = np.minimum(_middles()[filled], largest)
    together = np.cumsum(counts.sum(axis=0))
    reached = np.searchsorted(together, np.ceil(together[-1] * np.array(shares)))
    values = middles[reached]
    low = high = covers = np.full(len(shares), np.nan)
    if len(counts) >= 2:
        sizes = counts.sum(axis=1)
        found = [_resampled(counts, sizes, share, own) for share, own in zip(shares, reached.tolist(), strict=True)]
        resampled = np.sort(middles[np.stack(found, axis=1)], axis=0)
        outside = int((1 - INTERVAL) / 2 * RESAMPLES)
        low, high = resampled[outside], resampled[RESAMPLES - 1 - outside]
        below = np.stack([counts[:, : own + 1].sum(axis=1) for own in reached.tolist()])
        covers = np.where(low < high, _covers(below, sizes, shares), np.nan)
    quantiles = zip(*(each.tolist() for each in (values, low, high, covers)), strict=True)
    return [Quantile(value, (lower, upper), covered) for value, lower, upper, covered in quantiles]


def _covers(below: Float64s, sizes: Float64s, shares: Sequence[float]) -> Float64s:
    """What intervals cover where few tokens lie beyond a quantile, or few buckets count; else NaN [shares].

    Args:
        below: tokens of each bucket up to each quantile [shares, buckets].
        sizes: tokens of each bucket [buckets].
        shares: of the tokens.
    """
    left = 1 - np.array(shares)
    apart = (sizes - below - left[:, None] * sizes) ** 2
    with np.errstate(all="ignore"):
        effective = apart.sum(axis=1) ** 2 / (apart**2).sum(axis=1)
    tokens = sizes.sum() * left
    few = rests_on_few(effective, len(sizes)) | (tokens < _BEYOND)
    return np.select([tokens < _NOTHING, few], [COVERS_LEAST, COVERS], np.nan)


def _in_one(pair: PairSums) -> tuple[Ints, Float64s]:
    """As `Histogram.by_bucket`, with all buckets as one."""
    tokens = fold_signs(pair.histogram.by_bin()[0])
    filled = np.flatnonzero(tokens)
    return filled, tokens[None, filled].astype(np.float64)


def _resampled(counts: Float64s, sizes: Float64s, share: float, near: int) -> Ints:
    """The first bin at which each resample has a share of its tokens [RESAMPLES], looked for about that of the whole.

    Args:
        counts: tokens by bucket and bin [buckets, bins].
        sizes: tokens of each bucket [buckets].
        share: of the tokens.
        near: the first bin at which all buckets together have it.
    """
    draws = _draws(len(counts))
    wanted = np.ceil(draws @ sizes * share)  # counts are whole: those that reach it reach the next whole number
    reach = _REACH
    while True:
        first, stop = max(near - reach, 0), min(near + reach + 1, counts.shape[1])
        before = draws @ counts[:, :first].sum(axis=1)
        enough = before[:, None] + np.cumsum(draws @ counts[:, first:stop], axis=1) >= wanted[:, None]
        if (enough[:, -1] & ((before < wanted) | (first == 0))).all():
            found: Ints = first + enough.argmax(axis=1)
            return found
        reach *= 8


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
