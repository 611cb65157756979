"""Tail statistics: quantiles from histograms, the share of the worst tokens, and the Pareto k-hat."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.core.bins import fold_signs, magnitude_edges
from mismatchctl.measure.metrics.metric import ODDS_SCALE, compute_intervals
from mismatchctl.measure.sums import TAIL_VALUES, PairSums

INTERVAL_LEVEL = 0.90
"""Coverage of the intervals of quantiles."""
COVERAGE, LOWEST_COVERAGE = 0.85, 0.65
"""What the intervals of quantiles with the status `heavy_tail` were seen to cover, and of those with next to nothing
beyond them: docs/gate.md, Intervals."""
_FEW_TAIL_TOKENS, _NO_TAIL_TOKENS = 10, 3  # tokens beyond a quantile: with fewer, it is hardly known, or not at all
_ROUNDING = 1e-9  # of a number of tokens


class Quantile(NamedTuple):
    """A quantile, its interval, and what that covers instead where the tail is heavy; NaN for what there is not."""

    value: float
    interval: tuple[float, float]
    covers: float


NO_QUANTILE = Quantile(np.nan, (np.nan, np.nan), np.nan)


@lru_cache(maxsize=1)
def _bin_middles() -> Float64s:
    edges: Float64s = magnitude_edges()
    middles: Float64s = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = 0.0, edges[-2]
    return middles


def compute_quantiles(pair: PairSums, shares: Sequence[float], largest: float, *, sure: bool = True) -> list[Quantile]:
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
    filled, counts = pair.histogram.by_bucket() if sure else _merge_buckets(pair)
    if not len(filled):
        return [NO_QUANTILE] * len(shares)
    middles, together = np.minimum(_bin_middles()[filled], largest), np.cumsum(counts.sum(axis=0))
    reached = _first_bin_reached(together, np.array(shares))
    low = high = covers = np.full(len(shares), np.nan)
    if len(counts) >= 2:
        ends, covers = _tail_intervals(counts, reached, 1 - np.array(shares))
        low, high = (middles[_first_bin_reached(together, 1 - tail)] for tail in (ends[:, 1], ends[:, 0]))
        covers = np.where(low < high, covers, np.nan)
    found = zip(*(each.tolist() for each in (middles[reached], low, high, covers)), strict=True)
    return [Quantile(value, (lower, upper), covered) for value, lower, upper, covered in found]


def _first_bin_reached(together: Float64s, shares: Float64s) -> Ints:
    """The first bin at which so many of the tokens are reached [shares], given how many are up to each bin."""
    wanted = np.ceil(together[-1] * shares * (1 - _ROUNDING))  # counts are whole
    found: Ints = np.minimum(np.searchsorted(together, wanted), len(together) - 1)
    return found


def _tail_intervals(counts: Float64s, reached: Ints, tails: Float64s) -> tuple[Float64s, Float64s]:
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
    ends, covers = compute_intervals(
        ODDS_SCALE, tails, np.sqrt(squares * clusters / (clusters - 1)), effective, clusters
    )
    ends = np.where(np.isfinite(ends), ends, tails[:, None])  # nothing scatters
    few = np.isfinite(covers) | (total * tails < _FEW_TAIL_TOKENS)
    return ends, np.select([total * tails < _NO_TAIL_TOKENS, few], [LOWEST_COVERAGE, COVERAGE], np.nan)


def _merge_buckets(pair: PairSums) -> tuple[Ints, Float64s]:
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


_SAFE_LOG_FACTOR = 40.0
"""Log of a factor of which 16 still multiply to a normal float."""


def tail_length(count: int) -> int:
    """How many of `count` ratios form the tail: min(0.2 S, 3 sqrt S), and no more than are kept."""
    return min(math.ceil(min(count / 5, 3 * math.sqrt(count))), TAIL_VALUES - 1)


def khat_limit(count: int) -> float:
    """The k-hat up to which a mean of `count` ratios can be trusted: min(1 - 1/log10 S, 0.7)."""
    return min(1 - 1 / math.log10(count), 0.7) if count > 1 else math.nan


def khat(largest_log_ratios: Float64s, count: int) -> float:
    """Shape of the generalized Pareto distribution fitted to the largest ratios.

    Args:
        largest_log_ratios: ascending; at least the `tail_length(count) + 1` largest of all.
        count: how many ratios there are in all.

    Returns:
        k-hat; NaN where fewer than five ratios lie above the cut (too few, or all equal).

    Source: Zhang and Stephens 2009 for the fit, PSIS for the tail and the weak prior on k.
    """
    length = tail_length(count)
    if len(largest_log_ratios) <= length or length < 5:
        return math.nan
    shifted = largest_log_ratios - largest_log_ratios[-1]
    cut = max(shifted[-length - 1], math.log(np.finfo(np.float64).tiny))
    tail = shifted[-length:]
    tail = tail[tail > cut]
    if len(tail) < 5:
        return math.nan
    return _generalized_pareto_shape(np.exp(cut) * np.expm1(tail - cut))


def _generalized_pareto_shape(excess: Float64s) -> float:
    """Shape of a generalized Pareto distribution from its ascending excesses, with the prior of PSIS."""
    n = len(excess)
    m = 30 + int(math.sqrt(n))
    grid = 1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))
    grid = grid / (3 * excess[int(n / 4 + 0.5) - 1]) + 1 / excess[-1]
    with np.errstate(all="ignore"):
        shape = _mean_logs(grid, excess)
        likelihood = n * (np.log(-grid / shape) - shape - 1)
        weight = 1 / np.exp(likelihood - likelihood[:, None]).sum(axis=1)
    usable = weight >= 10 * np.finfo(np.float64).eps
    weight, grid = weight[usable] / weight[usable].sum(), grid[usable]
    posterior = float(np.log1p(-np.sum(grid * weight) * excess).mean())
    return (n * posterior + 10 * 0.5) / (n + 10)


def _mean_logs(slopes: Float64s, excess: Float64s) -> Float64s:
    """Mean of log(1 - slope * excess) over the excesses, for each slope: a logarithm takes longer than 16 products.

    The largest excess is furthest from a factor of 1; where 16 like it would leave the range of floats,
    each has a logarithm of its own.
    """
    if not (np.abs(np.log(1 - slopes * excess[-1])) < _SAFE_LOG_FACTOR).all():
        return np.log1p(-slopes[:, None] * excess).mean(axis=1)  # type: ignore[no-any-return]
    apart = np.append(excess, np.zeros(-len(excess) % 16)).reshape(16, -1)
    product, factor = 1 - slopes[:, None] * apart[0], np.empty((len(slopes), apart.shape[1]))
    for own in apart[1:]:
        np.multiply(slopes[:, None], own, out=factor)
        np.subtract(1, factor, out=factor)
        product *= factor
    means: Float64s = np.log(product).sum(axis=1) / len(excess)
    return means
