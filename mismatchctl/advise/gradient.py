"""The policy gradient of a correction, as far as a dump shows it: its bias, and its variance from batch to batch.

The true gradient lives in the space of parameters, which a dump does not hold. What it holds are the sampled tokens,
their probabilities and advantages, and that is enough for a surrogate: a policy that is a table of logits by (previous
token, token), whose score is (1 - p)(e_y - 1/V) at the block of its context. Errors of gradients in that space rank
corrections as errors in parameter space do (docs/advise.md: how well, on models whose true gradient is known). Without
token ids, ranks of probabilities stand for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.advise.applied import CorrectedSample
from mismatchctl.advise.sample import RunSample
from mismatchctl.batch import Float64s, Ints, Segments

MOST_FEATURES = 1 << 15
"""Pairs of (previous token, token) beyond which they are hashed into so many."""


PROBABILITY_BINS = 8
"""What stands for token ids where there are none: as many equal parts of the trainer's log-probs."""


@dataclass(frozen=True)
class Moments:
    """What the gradients of batches say of one correction against a reference, in the units of the surrogate.

    Attributes:
        bias2: squared norm of the difference of the means, without bias of its own (it may be slightly negative).
        variance: trace of the covariance of the gradient of one batch.
        bias2_without: the first [batches] without each of the batches.
        variance_without: the second [batches] likewise.
        errors: squared distance of each batch's gradient to the reference's mean [batches], for paired comparisons.
    """

    bias2: float
    variance: float
    bias2_without: Float64s
    variance_without: Float64s
    errors: Float64s

    @property
    def bias2_se(self) -> float:
        """Standard error of the squared bias, by leaving out one batch at a time."""
        return float(np.sqrt((len(self.bias2_without) - 1) * self.bias2_without.var()))

    @property
    def bias2_counted(self) -> float:
        """What of the squared bias counts: as much as is beyond its standard error.

        Of long responses an estimate is mostly its own noise, which grows with the variance of their weights: counted
        whole, it sets back whatever rejects, by chance (docs/advise.md: what that costs, and what else was tried).
        """
        return max(self.bias2 - self.bias2_se, 0.0)


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

    def __len__(self) -> int:
        return len(self.own)

    def part(self, batches: Ints) -> Products:
        """Of some of the batches alone."""
        rows = np.ix_(batches, batches)
        return Products(self.own[rows], self.across[rows], self.apart[rows], self.reference[rows])

    def moments(self) -> Moments:
        """Bias and variance against the reference."""
        bias2, bias2_without = _squared_mean(self.apart)
        variance, variance_without = _trace(self.own)
        errors = np.diag(self.own) - 2 * self.across.mean(axis=1) + self.reference.mean()
        return Moments(bias2, variance, bias2_without, variance_without, errors)


@dataclass(frozen=True)
class Standard:
    """What gradients are held against: those [batches, features] of the least biased correction.

    Attributes:
        gradients: of each batch.
        counts: times that a squared bias against them counts.
        squares: their inner products.
    """

    gradients: Float64s
    counts: float
    squares: Float64s

    @classmethod
    def of(cls, gradients: Float64s, counts: float = 1.0) -> Standard:
        """From gradients."""
        return cls(gradients, counts, gradients @ gradients.T)

    def against(self, gradients: Float64s) -> Products:
        """The inner products of a correction's gradients, all from their difference: where it is small, it is exact."""
        difference = gradients - self.gradients
        apart, across = difference @ difference.T, difference @ self.gradients.T
        own = apart + across + across.T + self.squares
        return Products(own, across + self.squares, self.counts * apart, self.squares)


@dataclass(frozen=True)
class SampleLayout:
    """A sample's tokens, batch after batch.

    Attributes:
        batch: of each sequence [S].
        picker: what takes values per token to this order; None: they are in it.
        feature: of each token [T], in this order.
        bounds: the tokens of each batch, from and to.
    """

    batch: Ints
    picker: Callable[[NDArray[Any]], NDArray[Any]] | None
    feature: NDArray[np.int32]
    bounds: list[tuple[int, int]]


class Surrogate:
    """Gradients of a sample's batches under any weights."""

    def __init__(self, sample: RunSample) -> None:
        """Lay out the features."""
        if sample.advantages is None:
            raise ValueError("a gradient needs advantages")
        segments, train = sample.batch.segments, sample.batch.train
        ids = sample.token_ids if sample.token_ids is not None else _ranks(train)
        self._segments = segments
        self._coefficient = sample.advantages * -np.expm1(np.minimum(train.astype(np.float64), 0.0))
        self._contexts, self._choices, self._feature = _features(ids, segments)

    def layout(self, batch: Ints) -> SampleLayout:
        """The tokens by the batch of each sequence [S], from 0."""
        order = np.argsort(batch, kind="stable")
        picker = None if (order[1:] > order[:-1]).all() else self._segments.picker(order)
        feature = self._feature if picker is None else picker(self._feature)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(batch, self._segments.lengths))]).astype(np.int64)
        return SampleLayout(batch, picker, feature, list(pairwise(bounds.tolist())))

    def gradients(self, applied: CorrectedSample, layouts: Sequence[SampleLayout]) -> Iterator[Float64s]:
        """By layout, the gradient of each batch [batches, features]: weight x advantage x score per counted token."""
        terms, size = applied.weights * self._coefficient, self._contexts * self._choices
        for layout in layouts:
            own = terms if layout.picker is None else layout.picker(terms)
            found = np.empty((len(layout.bounds), size))
            for row, (start, stop) in enumerate(layout.bounds):
                found[row] = np.bincount(layout.feature[start:stop], own[start:stop], size)
            found /= np.maximum(np.bincount(layout.batch, applied.counted), 1)[:, None]
            table = found.reshape(-1, self._contexts, self._choices)
            table -= table.mean(axis=2, keepdims=True)
            yield found


def _squared_mean(products: Float64s) -> tuple[float, Float64s]:
    """Squared norm of the mean of rows, from inner products of different rows alone; and without each [rows]."""
    count = len(products)
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    return float(off / (count * (count - 1))), without


def _trace(products: Float64s) -> tuple[float, Float64s]:
    """Trace of the covariance of rows, from their inner products; and without each [rows]."""
    count, own, total = len(products), np.diag(products), products.sum()
    rest = total - 2 * products.sum(axis=1) + own
    without = (own.sum() - own - rest / (count - 1)) / (count - 2)
    return float((own.sum() - total / count) / (count - 1)), without


def _features(ids: Ints, segments: Segments) -> tuple[int, int, NDArray[np.int32]]:
    """Contexts, choices within each, and the feature of each token [T]: its (previous token, token), hashed if many."""
    size, code = _coded(ids)
    before = np.concatenate([[size], code[:-1]])
    before[segments.offsets[:-1][segments.nonempty]] = size
    if (size + 1) * size <= MOST_FEATURES:
        return size + 1, size, (before * size + code).astype(np.int32)
    mixed = before.view(np.uint64)
    mixed *= np.uint64(size)
    mixed += code.view(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed >>= np.uint64(64 - 15)
    return 1, MOST_FEATURES, mixed.astype(np.int32)


def _coded(ids: Ints) -> tuple[int, Ints]:
    """How many ids there are, and the place of each token's among them, in their order [T]."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > len(ids) + (1 << 20):
        known, code = np.unique(ids, return_inverse=True)
        return len(known), code
    present = np.zeros(high - low + 1, np.bool_)
    present[ids - low] = True
    place = np.cumsum(present) - 1
    return int(place[-1]) + 1, place[ids - low]


def _ranks(log_probs: NDArray[np.floating[Any]]) -> Ints:
    """The part of all tokens, by log-prob, that each is in [T]."""
    bounds = np.quantile(log_probs, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
    return np.searchsorted(bounds, log_probs).astype(np.int64)


def paired(first: Sequence[float] | Float64s, second: Sequence[float] | Float64s) -> tuple[float, float]:
    """Mean of first - second over batches, and its standard error."""
    difference = np.asarray(first) - np.asarray(second)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))
