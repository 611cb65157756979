"""The policy gradient of a correction, as far as a dump shows it: its bias, and its variance from batch to batch.

The true gradient lives in the space of parameters, which a dump does not hold. What it holds are the sampled tokens,
their probabilities and advantages, and that is enough for a surrogate: a policy that is a table of logits by (previous
token, token), whose score is (1 - p)(e_y - 1/V) at the block of its context. Errors of gradients in that space rank
corrections as errors in parameter space do (docs/advise.md: how well, on models whose true gradient is known). Without
token ids, ranks of probabilities stand for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.advise.sample import Corrected, Sample
from mismatchctl.batch import Bools, Float64s, Ints

MOST_FEATURES = 1 << 15
"""Pairs of (previous token, token) beyond which they are hashed into so many."""


PROBABILITY_BINS = 8
"""What stands for token ids where there are none: as many equal parts of the trainer's log-probs."""


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


@dataclass(frozen=True)
class Products:
    """Inner products [batches, batches] of the gradients of batches: all that moments need, whatever the features.

    Attributes:
        own: of a correction's gradients with each other.
        across: of a correction's with those of the reference.
        apart: of the differences between the two with each other, as often as their bias counts.
        reference: of the reference's with each other.
    """

    own: Float64s
    across: Float64s
    apart: Float64s
    reference: Float64s

    @classmethod
    def of(cls, gradients: Float64s, reference: Float64s, counts: float = 1.0) -> Products:
        """From gradients [batches, features]; the squared bias counts so many times."""
        apart = gradients - reference
        return cls(gradients @ gradients.T, gradients @ reference.T, counts * apart @ apart.T, reference @ reference.T)

    def __len__(self) -> int:
        return len(self.own)

    def part(self, batches: Ints) -> Products:
        """Of some of the batches alone."""
        rows = np.ix_(batches, batches)
        return Products(self.own[rows], self.across[rows], self.apart[rows], self.reference[rows])

    def moments(self) -> Moments:
        """Bias and variance against the reference."""
        bias2, error = _squared_mean(self.apart)
        count, squares = len(self), np.diag(self.own)
        variance = (squares.sum() - self.own.sum() / count) / (count - 1)
        errors = squares - 2 * self.across.mean(axis=1) + self.reference.mean()
        return Moments(bias2, error, float(variance), errors)


class Surrogate:
    """Gradients of a sample's batches under any weights."""

    def __init__(self, sample: Sample, batch: Ints) -> None:
        """Lay out the features; `batch` [S] says which batch each sequence is in, from 0."""
        tokens = sample.batch.segments
        self._batch: Ints = tokens.spread(batch)
        self._batches = int(batch.max()) + 1
        if sample.advantages is None:
            raise ValueError("a gradient needs advantages")
        ids = sample.token_ids if sample.token_ids is not None else _ranks(sample.batch.train)
        self._coefficient = sample.advantages * -np.expm1(np.minimum(sample.batch.train.astype(np.float64), 0.0))
        self._contexts, self._choices, self._feature = _features(ids, tokens.places == 0)

    @cached_property
    def _index(self) -> Ints:
        return self._batch * (self._contexts * self._choices) + self._feature

    def gradients(self, applied: Corrected) -> Float64s:
        """The gradient of each batch [batches, features]: sum of weight x advantage x score over counted tokens."""
        tokens = np.bincount(self._batch, applied.counted, self._batches)
        each = np.where(applied.kept, applied.weights * self._coefficient, 0.0) / np.maximum(tokens, 1)[self._batch]
        found = np.bincount(self._index, each, self._batches * self._contexts * self._choices)
        table = found.reshape(self._batches, self._contexts, self._choices)
        centred: Float64s = table - table.mean(axis=2, keepdims=True)
        return centred.reshape(self._batches, -1)


def _squared_mean(products: Float64s) -> tuple[float, float]:
    """Squared norm of the mean of rows, from inner products of different rows alone, and its standard error."""
    count = len(products)
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


def _ranks(log_probs: NDArray[np.floating[Any]]) -> Ints:
    """The part of all tokens, by log-prob, that each is in [T]."""
    bounds = np.quantile(log_probs, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
    return np.searchsorted(bounds, log_probs).astype(np.int64)


def paired(first: Sequence[float] | Float64s, second: Sequence[float] | Float64s) -> tuple[float, float]:
    """Mean of first - second over batches, and its standard error."""
    difference = np.asarray(first) - np.asarray(second)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))
