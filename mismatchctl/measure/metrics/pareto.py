"""Pareto k-hat of importance ratios: how heavy their upper tail is (Vehtari et al. 2024, PSIS)."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure.tails import TAIL_VALUES

_WITHIN = 40.0
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
    if not (np.abs(np.log(1 - slopes * excess[-1])) < _WITHIN).all():
        return np.log1p(-slopes[:, None] * excess).mean(axis=1)  # type: ignore[no-any-return]
    apart = np.append(excess, np.zeros(-len(excess) % 16)).reshape(16, -1)
    product, factor = 1 - slopes[:, None] * apart[0], np.empty((len(slopes), apart.shape[1]))
    for own in apart[1:]:
        np.multiply(slopes[:, None], own, out=factor)
        np.subtract(1, factor, out=factor)
        product *= factor
    means: Float64s = np.log(product).sum(axis=1) / len(excess)
    return means
