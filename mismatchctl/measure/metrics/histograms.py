"""What is read from histograms: quantiles with an interval, and the share of the worst tokens.

The interval of a quantile is that of the share of tokens beyond it, read from the histogram (Woodruff 1952).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.measure import PairSums
from mismatchctl.measure.bins import fold_signs, magnitude_edges
from mismatchctl.measure.metrics.intervals import ODDS, intervals

INTERVAL = 0.90
"""Coverage of the intervals of quantiles."""
COVERS, COVERS_LEAST = 0.85, 0.65
"""What the intervals of quantiles with the status `heavy_tail` were seen to cover, and of those with next to nothing
beyond them: docs/gate.md, Intervals."""
_BEYOND, _NOTHING = 10, 3  # tokens beyond a quantile: with fewer, it is hardly known, or not at all
_ROUNDING = 1e-9  # of a number of tokens


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


def quantiles_of(pair: PairSums, shares: Sequence[float], largest: float, *, sure: bool = True) -> list[Quantile]:
    """Quantiles of |log ratio| over tokens, and the interval of each from how its share scatters over clusters.

    Args:
        pair: whose histogram is read.
        shares: of the tokens, below each quantile.
        largest: the largest |log ratio|, which no quantile exceeds.
        sure: whether intervals are wanted.

    Returns:
        For each share the quantile, within 0.8 % of its value (NaN when there is no token), and its interval (NaN with
        fewer than two buckets of clusters), which has a heavy tail where few tokens or clusters lie beyond it.
    """
    filled, counts = pair.histogram.by_bucket() if sure else _in_one(pair)
    if not len(filled):
        return [NO_QUANTILE] * len(shares)
    middles, together = np.minimum(_middles()[filled], largest), np.cumsum(counts.sum(axis=0))
    reached = _reached(together, np.array(shares))
    low = high = covers = np.full(len(shares), np.nan)
    if len(counts) >= 2:
        ends, covers = _beyond(counts, reached, 1 - np.array(shares))
        low, high = (middles[_reached(together, 1 - tail)] for tail in (ends[:, 1], ends[:, 0]))
        covers = np.where(low < high, covers, np.nan)
    found = zip(*(each.tolist() for each in (middles[reached], low, high, covers)), strict=True)
    return [Quantile(value, (lower, upper), covered) for value, lower, upper, covered in found]


def _reached(together: Float64s, shares: Float64s) -> Ints:
    """The first bin at which so many of the tokens are reached [shares], given how many are up to each bin."""
    wanted = np.ceil(together[-1] * shares * (1 - _ROUNDING))  # counts are whole
    found: Ints = np.minimum(np.searchsorted(together, wanted), len(together) - 1)
    return found


def _beyond(counts: Float64s, reached: Ints, tails: Float64s) -> tuple[Float64s, Float64s]:
    """Intervals of the shares beyond quantiles [shares, 2], and what they cover where few tokens or buckets count.

    Args:
        counts: tokens by bucket and bin [buckets, bins].
        reached: bin of each quantile [shares].
        tails: share of the tokens beyond each [shares].
    """
    sizes = counts.sum(axis=1)
    total, clusters = sizes.sum(), np.full(len(tails), float(len(sizes)))
    above = np.stack([counts[:, own + 1 :].sum(axis=1) for own in reached.tolist()])
    inside = counts[:, reached].T
    part = (tails * total - above.sum(axis=1)) / inside.sum(axis=1)  # of the bin, what counts as beyond
    apart = (above + np.clip(part, 0.0, 1.0)[:, None] * inside - tails[:, None] * sizes) / total
    squares = np.sum(apart**2, axis=1)
    with np.errstate(all="ignore"):
        effective = squares**2 / np.sum(apart**4, axis=1)
    ends, covers = intervals(ODDS, tails, np.sqrt(squares * clusters / (clusters - 1)), effective, clusters)
    ends = np.where(np.isfinite(ends), ends, tails[:, None])  # nothing scatters
    few = np.isfinite(covers) | (total * tails < _BEYOND)
    return ends, np.select([total * tails < _NOTHING, few], [COVERS_LEAST, COVERS], np.nan)


def _in_one(pair: PairSums) -> tuple[Ints, Float64s]:
    """As `Histogram.by_bucket`, with all buckets as one."""
    tokens = fold_signs(pair.histogram.by_bin()[0])
    filled = np.flatnonzero(tokens)
    return filled, tokens[None, filled].astype(np.float64)


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
