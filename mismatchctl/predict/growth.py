"""What a sequence's log ratio adds up to over more tokens than it has: drift, a bias of its own, and noise.

The expected drift of a step is minus its K3 (as it must be where the rollout's log-probs are those that sampled, and
far less noisy than the mean log ratio) plus the part of the mean ratio's deviation from 1 that is no noise; it changes
along the response as far as later tokens differ from all beyond noise. What a sequence deviates from
that is scaled by what such deviations grow like: noise with the square root of the length, a bias of the sequence with
the length itself, both also with a share that grows along the response. How much of each there is shows in how the
parts of one response (its first 16 tokens, the next 16, the next 32, ...) go together over all responses.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.predict.sample import GRID, SequenceSample

_LARGEST_K3 = 1.0  # beyond it the mean ratio says nothing, and the drift is the mean log ratio
_CHANCE = 0.01  # of replicates without a growing bias, from which on the dump is taken to have none

NOISE, GROWING_NOISE, BIAS, GROWING_BIAS = range(4)


def sums_at(sample: SequenceSample, length: int, weights: Float64s) -> Float64s:
    """What each sequence's log ratio would add up to over `length` tokens, in each replicate [R, S]."""
    log_ratio, k3, excess = np.moveaxis(sample.sums[:, -1], 1, 0)
    tokens = sample.tokens.astype(np.float64)
    small = k3.sum() < _LARGEST_K3 * tokens.sum()
    trusted = -k3 if small else log_ratio
    bias = _beyond_noise(sample, (excess, tokens), weights) if small else 0.0
    drift = (_step_means(sample, trusted, weights) + bias) * length
    drift += _change(sample, 1 if small else 0, weights, length)
    own = log_ratio - _step_means(sample, log_ratio, weights) * sample.tokens
    parts = components(sample, weights)
    return np.asarray(drift + own * np.sqrt(_variance(parts, np.array([length])) / _variance(parts, tokens)))


def components(sample: SequenceSample, weights: Float64s) -> Float64s:
    """What deviations from the drift are made of, in each replicate [R, 4], none below 0.

    By index: variance a token of the noise, its growth with the position, variance of the bias of a sequence, variance
    of what the bias grows by with the position. Least squares of the products of the deviations of parts of a response
    on what each component adds to them (Rao's MINQUE with the weights of plain noise).
    """
    found = _fitted(sample, weights, (NOISE, GROWING_NOISE, BIAS, GROWING_BIAS))
    if (found[:, GROWING_BIAS] == 0).mean() >= _CHANCE:  # it grows fastest of all, and must not be noise's
        found = _fitted(sample, weights, (NOISE, GROWING_NOISE, BIAS))
    return found


def _variance(parts: Float64s, tokens: Float64s) -> Float64s:
    """Variance of what deviates over so many tokens, in each replicate [R, S]."""
    grown = np.stack([tokens, tokens**2 / 2, tokens**2, tokens**4 / 4])
    return np.maximum(parts @ grown, np.finfo(np.float64).tiny)


def _fitted(sample: SequenceSample, weights: Float64s, chosen: tuple[int, ...]) -> Float64s:
    """Least squares over all pairs of parts, none below 0: the best of all subsets of components."""
    products, expected, scale = _moments(sample)
    observed = (weights @ products) * scale
    design = np.tensordot(weights, expected[:, :, chosen], 1) * scale[:, None]
    size = np.sqrt((design[0] ** 2).sum(axis=0))
    design /= np.where(size > 0, size, 1.0)
    gram, inner = np.einsum("rpk,rpl->rkl", design, design), np.einsum("rpk,rp->rk", design, observed)
    best, gained = np.zeros((len(weights), len(chosen))), np.zeros(len(weights))
    for count in range(1, len(chosen) + 1):
        for subset in combinations(range(len(chosen)), count):
            own = gram[:, subset][:, :, subset] + _RIDGE * np.eye(count)
            solved = np.linalg.solve(own, inner[:, subset][:, :, None])[:, :, 0]
            gain = (solved * inner[:, subset]).sum(axis=1)  # what it takes off the sum of squares
            better = (solved >= 0).all(axis=1) & (gain > gained)
            gained = np.where(better, gain, gained)
            filled = np.zeros_like(best)
            filled[:, subset] = solved
            best = np.where(better[:, None], filled, best)
    found = np.zeros((len(weights), 4))
    found[:, chosen] = best / np.where(size > 0, size, 1.0)
    return found


_RIDGE = 1e-9


def _moments(sample: SequenceSample) -> tuple[Float64s, Float64s, Float64s]:
    """What pairs of parts show, and what they should, for each sequence.

    Returns:
        The products of their deviations [S, P], what a unit of each component adds to them [S, P, 4], and the scale
        that makes all pairs as uncertain as under plain noise [P].
    """
    ends = np.minimum(GRID[: sample.sums.shape[1]], sample.tokens[:, None]).astype(np.float64)
    ends[:, -1] = sample.tokens
    starts = np.concatenate([np.zeros((len(sample), 1)), ends[:, :-1]], axis=1)
    filled = (ends > starts).any(axis=0)
    starts, ends = starts[:, filled], ends[:, filled]
    tokens, places = ends - starts, (ends**2 - starts**2) / 2
    log_ratio = np.diff(sample.sums[:, :, 0], axis=1, prepend=0.0)[:, filled]
    mean = _step_means(sample, sample.sums[:, -1, 0], np.ones((1, len(sample))))[0]
    deviation = log_ratio - mean[:, None] * tokens
    deviation -= deviation.sum(axis=0) / tokens.sum(axis=0) * tokens
    first, second = np.triu_indices(tokens.shape[1])
    product, same = tokens[:, first] * tokens[:, second], first == second
    adds = [tokens[:, first] * same, places[:, first] * same, product, places[:, first] * places[:, second]]
    scale = 1 / np.sqrt(np.maximum(product.sum(axis=0) * (1 + same), 1.0))
    return deviation[:, first] * deviation[:, second], np.stack(adds, axis=2), scale


def _step_means(sample: SequenceSample, values: Float64s, weights: Float64s) -> Float64s:
    """Mean of `values` [S] a token in each sequence's step, in each replicate [R, S]."""
    steps, where = np.unique(sample.step, return_inverse=True)
    one_hot = np.eye(len(steps))[where]
    return (((weights * values) @ one_hot) / ((weights * sample.tokens) @ one_hot))[:, where]


Mean = tuple[Float64s, Float64s]
"""A numerator and a denominator of each sequence [S]."""


def _beyond_noise(sample: SequenceSample, mean: Mean, weights: Float64s, less: Mean | None = None) -> Float64s:
    """A mean (less another one), shrunk towards 0 by its noise over clusters (James and Stein, 1961) [R, 1]."""
    value, influence = _mean(mean, weights)
    if less is not None:
        other, other_influence = _mean(less, weights)
        value, influence = value - other, influence - other_influence
    _, where = np.unique(sample.cluster, return_inverse=True)
    error = np.sqrt((np.bincount(where, influence) ** 2).sum())
    with np.errstate(divide="ignore", invalid="ignore"):
        share = np.maximum(0.0, 1 - (error / value) ** 2)
    return np.where(value != 0, value * share, 0.0)[:, None]


def _mean(parts: Mean, weights: Float64s) -> tuple[Float64s, Float64s]:
    """The mean in each replicate [R], and what each sequence moves it by [S]."""
    top, bottom = parts
    return (weights @ top) / (weights @ bottom), (top - top.sum() / bottom.sum() * bottom) / bottom.sum()


def _change(sample: SequenceSample, column: int, weights: Float64s, length: int) -> Float64s:
    """What the drift's change along the response adds over `length` tokens, beyond the mean of the dump's [R, S].

    A K3 that grows goes on growing in proportion to the position; one that fades stays, after the dump's lengths, what
    it is for later tokens. Later tokens are those beyond the last length of GRID that lies within the sequence: half of
    it, or less.
    """
    tokens = sample.tokens.astype(np.float64)
    before = (GRID[: sample.sums.shape[1]] < sample.tokens[:, None]).sum(axis=1) - 1
    seen = np.where(before >= 0, GRID[before], tokens)
    first = sample.sums[np.arange(len(sample)), before, column]  # -1, the whole, where it is shorter than the grid
    whole, sign = sample.sums[:, -1, column], -1.0 if column else 1.0
    late = sign * (whole - first), tokens - seen
    if not late[1].any():
        return np.zeros((len(weights), 1))
    place = _mean((tokens**2 / 2, tokens), weights)[0][:, None]
    apart = _mean(((tokens**2 - seen**2) / 2, late[1]), weights)[0][:, None] - place
    with np.errstate(invalid="ignore", divide="ignore"):
        differ = np.nan_to_num(_beyond_noise(sample, late, weights, (sign * whole, tokens)))
        growing = differ / apart * (length**2 / 2 - place * length)
    grows = (differ < 0) & bool(column) & (apart > 0)
    return np.where(grows, growing, differ * np.maximum(length - tokens, 0))
