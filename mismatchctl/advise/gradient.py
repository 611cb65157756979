"""The policy gradient of a correction, as far as a dump shows it: its bias, and its variance from batch to batch.

The true gradient lives in the space of parameters, which a dump does not hold. What it holds are the sampled tokens,
their probabilities and advantages, and that is enough for a surrogate: a policy that is a table of logits by (previous
token, token), whose score is (1 - p)(e_y - 1/V) at the block of its context. Errors of gradients in that space rank
corrections as errors in parameter space do (docs/advise.md: how well, on models whose true gradient is known).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatchctl.advise.sample import Sample
from mismatchctl.batch import Bools, Float64s, Ints

MOST_FEATURES = 1 << 15
"""Pairs of (previous token, token) beyond which they are hashed into so many."""


@dataclass(frozen=True)
class Moments:
    """What the gradients of batches say of one correction against a reference, in the units of the surrogate.

    Attributes:
        bias2: squared norm of the difference of the means, without bias of its own (it may be slightly negative).
        bias2_se: its standard error, by leaving out one batch at a time.
        variance: trace of the covariance of the gradient of one batch.
        errors: squared distance of each batch's gradient to the reference's mean [batches], for paired comparisons.
    """

    bias2: float
    bias2_se: float
    variance: float
    errors: Float64s


class Surrogate:
    """Gradients of a sample's batches under any weights."""

    def __init__(self, sample: Sample, batch: Ints) -> None:
        """Lay out the features; `batch` [S] says which batch each sequence is in, from 0."""
        tokens = sample.batch.segments
        self._batch: Ints = tokens.spread(batch)
        self._batches = int(batch.max()) + 1
        if sample.token_ids is None or sample.advantages is None:
            raise ValueError("a gradient needs token ids and advantages")
        self._coefficient = sample.advantages * -np.expm1(np.minimum(sample.batch.train.astype(np.float64), 0.0))
        self._contexts, self._choices, self._feature = _features(sample.token_ids, tokens.places == 0)

    @cached_property
    def _index(self) -> Ints:
        return self._batch * (self._contexts * self._choices) + self._feature

    def gradients(self, weights: Float64s, kept: Bools, counted: Bools) -> Float64s:
        """The gradient of each batch [batches, features]: sum of weight x advantage x score over counted tokens."""
        tokens = np.bincount(self._batch, counted, self._batches)
        each = np.where(kept, weights * self._coefficient, 0.0) / np.maximum(tokens, 1)[self._batch]
        found = np.bincount(self._index, each, self._batches * self._contexts * self._choices)
        table = found.reshape(self._batches, self._contexts, self._choices)
        centred: Float64s = table - table.mean(axis=2, keepdims=True)
        return centred.reshape(self._batches, -1)


def moments(gradients: Float64s, reference: Float64s) -> Moments:
    """Bias and variance of the gradients of batches [batches, features] against those of the reference."""
    bias2, error = _squared_mean(gradients - reference)
    count = len(gradients)
    total = np.square(gradients).sum()
    variance = (total - np.square(gradients.sum(axis=0)).sum() / count) / (count - 1)
    errors = np.square(gradients - reference.mean(axis=0)).sum(axis=1)
    return Moments(bias2, error, float(variance), errors)


def _squared_mean(values: Float64s) -> tuple[float, float]:
    """Squared norm of the mean of rows, from products of different rows alone, and its standard error."""
    count = len(values)
    products = values @ values.T
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    error = np.sqrt((count - 1) / count * np.square(without - without.mean()).sum())
    return float(off / (count * (count - 1))), float(error)


def _features(ids: Ints, first: Bools) -> tuple[int, int, Ints]:
    """Contexts, choices within each, and the feature of each token [T]: its (previous token, token), hashed if many."""
    known, code = np.unique(ids, return_inverse=True)
    size = len(known)
    before = np.where(first, size, np.roll(code, 1))
    if (size + 1) * size <= MOST_FEATURES:
        return size + 1, size, before * size + code
    mixed = (before.astype(np.uint64) * np.uint64(size) + code.astype(np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
    return 1, MOST_FEATURES, (mixed >> np.uint64(64 - 15)).astype(np.int64)


def paired(first: Sequence[float] | Float64s, second: Sequence[float] | Float64s) -> tuple[float, float]:
    """Mean of first - second over batches, and its standard error."""
    difference = np.asarray(first) - np.asarray(second)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))
