"""Error of the policy gradient under each correction, and the choice of the best one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.advise.advice import TippingPoint
from mismatchctl.api.advise.candidates import CorrectedSample
from mismatchctl.api.advise.sample import MIN_SEQUENCES, RunSample
from mismatchctl.core.batch import Float64s, Ints, Segments

MAX_FEATURES = 1 << 15
"""Pairs of (previous token, token) beyond which they are hashed into so many."""


PROBABILITY_BINS = 8
"""What stands for token ids where there are none: as many equal parts of the trainer's log-probs."""


@dataclass(frozen=True)
class GradientMoments:
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
class GradientProducts:
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

    def part(self, batches: Ints) -> GradientProducts:
        """Of some of the batches alone."""
        rows = np.ix_(batches, batches)
        return GradientProducts(self.own[rows], self.across[rows], self.apart[rows], self.reference[rows])

    def moments(self) -> GradientMoments:
        """Bias and variance against the reference."""
        bias2, bias2_without = _squared_norm_of_mean(self.apart)
        variance, variance_without = _covariance_trace(self.own)
        errors = np.diag(self.own) - 2 * self.across.mean(axis=1) + self.reference.mean()
        return GradientMoments(bias2, variance, bias2_without, variance_without, errors)


@dataclass(frozen=True)
class GradientReference:
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
    def of(cls, gradients: Float64s, counts: float = 1.0) -> GradientReference:
        """From gradients."""
        return cls(gradients, counts, gradients @ gradients.T)

    def against(self, gradients: Float64s) -> GradientProducts:
        """The inner products of a correction's gradients, all from their difference: where it is small, it is exact."""
        difference = gradients - self.gradients
        apart, across = difference @ difference.T, difference @ self.gradients.T
        own = apart + across + across.T + self.squares
        return GradientProducts(own, across + self.squares, self.counts * apart, self.squares)


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
        ids = sample.token_ids if sample.token_ids is not None else _probability_ranks(train)
        self._segments = segments
        self._coefficient = sample.advantages * -np.expm1(np.minimum(train.astype(np.float64), 0.0))
        self._contexts, self._choices, self._feature = _token_features(ids, segments)

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


def _squared_norm_of_mean(products: Float64s) -> tuple[float, Float64s]:
    """Squared norm of the mean of rows, from inner products of different rows alone; and without each [rows]."""
    count = len(products)
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    return float(off / (count * (count - 1))), without


def _covariance_trace(products: Float64s) -> tuple[float, Float64s]:
    """Trace of the covariance of rows, from their inner products; and without each [rows]."""
    count, own, total = len(products), np.diag(products), products.sum()
    rest = total - 2 * products.sum(axis=1) + own
    without = (own.sum() - own - rest / (count - 1)) / (count - 2)
    return float((own.sum() - total / count) / (count - 1)), without


def _token_features(ids: Ints, segments: Segments) -> tuple[int, int, NDArray[np.int32]]:
    """Contexts, choices within each, and the feature of each token [T]: its (previous token, token), hashed if many."""
    size, code = _encode_ids(ids)
    before = np.concatenate([[size], code[:-1]])
    before[segments.offsets[:-1][segments.nonempty]] = size
    if (size + 1) * size <= MAX_FEATURES:
        return size + 1, size, (before * size + code).astype(np.int32)
    mixed = before.view(np.uint64)
    mixed *= np.uint64(size)
    mixed += code.view(np.uint64)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed >>= np.uint64(64 - 15)
    return 1, MAX_FEATURES, mixed.astype(np.int32)


def _encode_ids(ids: Ints) -> tuple[int, Ints]:
    """How many ids there are, and the place of each token's among them, in their order [T]."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > len(ids) + (1 << 20):
        known, code = np.unique(ids, return_inverse=True)
        return len(known), code
    present = np.zeros(high - low + 1, np.bool_)
    present[ids - low] = True
    place = np.cumsum(present) - 1
    return int(place[-1]) + 1, place[ids - low]


def _probability_ranks(log_probs: NDArray[np.floating[Any]]) -> Ints:
    """The part of all tokens, by log-prob, that each is in [T]."""
    bounds = np.quantile(log_probs, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
    return np.searchsorted(bounds, log_probs).astype(np.int64)


def paired_difference(first: Sequence[float] | Float64s, second: Sequence[float] | Float64s) -> tuple[float, float]:
    """Mean of first - second over batches, and its standard error."""
    difference = np.asarray(first) - np.asarray(second)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Standard errors by which some correction must beat none, batch against batch, for any to be advised."""
_CAUTION_FACTOR = 0.5
"""Of them, what is added to the error of each before the least is taken (docs/advise.md: what else was tried)."""
RELIABLE_SEQUENCES = 320
"""Sequences below which advice broke where the truth is known (docs/advise.md)."""
MAX_BIAS_UNDERESTIMATE = 10.0
"""Times that a squared bias may be larger than estimated: four in five are within it where the truth is known."""
RANDOM_SPLITS = 20
_MISS_RATE, _NOISE_DRAWS = 0.05, 4000
"""Share of samples on which the most regret may be too little, and draws of their noise."""
_MIN_BATCHES = 8
_MIN_GAIN = 1e-3
"""Share of the uncorrected error below which less of it is no reason to correct, however sure it is."""


@dataclass(frozen=True)
class CandidateRanking:
    """Candidates from best to worst, by name; those of `better` beat no correction beyond noise.

    Whether to correct and what with are two questions. The first is a test: something must beat no correction for
    sure. To the second a test is no answer: it sets what surely gains little before what gains much by all that the
    sample shows, where few sequences carry the gain. There the least error counts, each with its own uncertainty.

    Errors and moments are also those of what was looked at beside them; `scale` takes the variance of a batch to that
    of one update, and `sure` are the standard errors that count.
    """

    order: tuple[str, ...]
    better: frozenset[str]
    mse: Mapping[str, float]
    moments: Mapping[str, GradientMoments]
    scale: float
    sure: float

    @property
    def first(self) -> str:
        """The advice."""
        return self.order[0]

    def gain(self, name: str) -> tuple[float, float]:
        """Share of the uncorrected error that a candidate takes away, and its standard error."""
        none = self.mse["none"]
        _, error = paired_difference(self.moments["none"].errors, self.moments[name].errors)
        scale = float(self.moments["none"].errors.mean())
        return (1 - self.mse[name] / none if none else 0.0), (error / scale if scale else 0.0)

    def most_regret(self) -> float:
        """Times the error of the best candidate that the first may have as far as sampling noise goes, at 95 %.

        Of all differences to the first at once, since it was chosen among them. Their noise is that of the estimates
        without one batch at a time, bias and variance together: only variance shrinks with the size of an update.
        """
        found = [self.moments[name] for name in self.order]
        errors = np.array([own.bias2 + own.variance * self.scale for own in found])
        without = np.array([own.bias2_without + own.variance_without * self.scale for own in found])
        own = max(found[0].bias2, 0.0) + found[0].variance * self.scale
        spare = float(
            (errors[0] - errors + self.sure / SIGNIFICANT_STANDARD_ERRORS * _noise_bound(without[0] - without)).max()
        )
        return 1.0 if spare <= 0 else own / (own - spare) if spare < own else math.inf

    def tipping(self, counts: float) -> TippingPoint | None:
        """From how many times the squared biases estimated another candidate has less error than the first.

        Once is where the whole estimates are bias, their noise and all. Looked for up to `UNDERRATED` times, of which
        the estimates of lower bounds hold `counts` already.
        """
        most, own = MAX_BIAS_UNDERESTIMATE / counts, max(self.moments[self.first].bias2, 0.0)
        found = []
        for name in self.order[1:]:
            bias2, more = max(self.moments[name].bias2, 0.0), self.variance(name) - self.variance(self.first)
            if bias2 < own and 0 < more <= most * (own - bias2) and self.mse[name] >= self.mse[self.first]:
                factor = max(more / (own - bias2), 1.0)
                found.append((factor, factor * bias2 + more, name))
        factor, _, instead = min(found, default=(0.0, 0.0, ""))
        return TippingPoint(factor=factor, instead=instead) if instead else None

    def variance(self, name: str) -> float:
        """Of the gradient of one update."""
        return self.moments[name].variance * self.scale

    def ties(self, name: str) -> bool:
        """Whether a candidate cannot be told from the first: within the noise of the batches."""
        if name == self.first:
            return True
        difference, error = paired_difference(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= self.sure * error


def choose_correction(
    products: Mapping[str, GradientProducts],
    scale: float,
    sure: float = SIGNIFICANT_STANDARD_ERRORS,
    beside: Mapping[str, GradientProducts] | None = None,
) -> CandidateRanking:
    """Rank candidates by the mean squared error of their gradient.

    Args:
        products: of the gradients of batches, by candidate; `none` among them.
        scale: sequences of one batch here over those of one update.
        sure: standard errors from which a difference counts.
        beside: of what is measured without being ranked.
    """
    found = {name: own.moments() for name, own in {**products, **(beside or {})}.items()}
    mse = {name: own.bias2_counted + own.variance * scale for name, own in found.items()}
    gains = {name: paired_difference(found["none"].errors, own.errors) for name, own in found.items()}
    least = _MIN_GAIN * float(found["none"].errors.mean())
    better = frozenset(
        name for name, (gain, error) in gains.items() if mse[name] < mse["none"] and gain > max(sure * error, least)
    )

    def rank(name: str) -> tuple[bool, float]:
        stays = name == "none" and better.isdisjoint(products)
        return not stays, mse[name] + _CAUTION_FACTOR * sure * gains[name][1] * scale

    return CandidateRanking(tuple(sorted(products, key=rank)), better, mse, found, scale, sure)


def _noise_bound(without: Float64s) -> Float64s:
    """How much of each difference is noise at most, all at once, from those without one batch [differences, batches].

    As many standard errors as the largest of all has in all but a twentieth of draws that give each batch a random
    sign, so differences that vary together count as few.
    """
    count = without.shape[1]
    noise = (without - without.mean(axis=1, keepdims=True)) * (count - 1)
    error = noise.std(axis=1, ddof=1) / math.sqrt(count)
    signs = np.random.default_rng(count).choice((-1.0, 1.0), (count, _NOISE_DRAWS))
    drawn = noise @ signs / count
    beyond = np.divide(drawn, error[:, None], out=np.zeros_like(drawn), where=error[:, None] > 0)
    return np.asarray(error * np.quantile(beyond.max(axis=0), 1 - _MISS_RATE))


def required_standard_errors(sequences: int) -> float:
    """Standard errors from which a difference counts: more of them where there are fewer sequences than enough."""
    return SIGNIFICANT_STANDARD_ERRORS * max(1.0, math.sqrt(MIN_SEQUENCES / max(sequences, 1)))


def split_stability(
    products: Mapping[str, GradientProducts], scale: float, sure: float = SIGNIFICANT_STANDARD_ERRORS
) -> float | None:
    """Share of random halves of the batches that advise the same on either side, ties counted as the same.

    None where the halves are too small to choose from. Batches are of whole prompts, in an order that a hash gives, and
    the draws are the same for the same number of them.
    """
    count = len(products["none"])
    random = np.random.default_rng(count)
    orders = (random.permutation(count) for _ in range(RANDOM_SPLITS))
    return _split_agreement(
        products, ((np.sort(o[: count // 2]), np.sort(o[count // 2 :])) for o in orders), scale, sure
    )


def time_stability(
    products: Mapping[str, GradientProducts], scale: float, sure: float = SIGNIFICANT_STANDARD_ERRORS
) -> float | None:
    """The same with batches in the order of the steps, cut into earlier and later ones at one place after another."""
    count = len(products["none"])
    places = np.unique(np.linspace(_MIN_BATCHES, count - _MIN_BATCHES, RANDOM_SPLITS).astype(np.int64))
    return _split_agreement(products, ((np.arange(at), np.arange(at, count)) for at in places), scale, sure)


def _split_agreement(
    products: Mapping[str, GradientProducts], halves: Iterable[tuple[Ints, Ints]], scale: float, sure: float
) -> float | None:
    if len(products["none"]) < 2 * _MIN_BATCHES:
        return None
    agreed = []
    for parts in halves:
        first, second = (
            choose_correction({name: own.part(part) for name, own in products.items()}, scale, sure) for part in parts
        )
        agreed.append(first.ties(second.first) or second.ties(first.first))
    return float(np.mean(agreed))
