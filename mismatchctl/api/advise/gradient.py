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
"""Maximum number of features. More pairs of (previous token, token) are hashed to this number."""


PROBABILITY_BINS = 8
"""Number of quantile bins of the trainer's log-probs that replace missing token ids."""


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradients of batches for one correction relative to a reference, in units of the surrogate.

    Attributes:
        bias2: unbiased estimate of the squared norm of the mean difference. It may be slightly negative.
        variance: trace of the covariance of the gradient of one batch.
        bias2_without: `bias2` without each of the batches [batches].
        variance_without: `variance` without each of the batches [batches].
        errors: squared distance of each batch's gradient to the reference mean [batches], for paired comparisons.
    """

    bias2: float
    variance: float
    bias2_without: Float64s
    variance_without: Float64s
    errors: Float64s

    @property
    def bias2_se(self) -> float:
        """Jackknife standard error of the squared bias."""
        return float(np.sqrt((len(self.bias2_without) - 1) * self.bias2_without.var()))

    @property
    def bias2_counted(self) -> float:
        """Part of the squared bias above its standard error.

        For long responses an estimate is mostly noise, which grows with the variance of the weights. Counting all of it
        would randomly penalize corrections that reject data (docs/methods/advice.md shows the cost and alternatives).
        """
        return max(self.bias2 - self.bias2_se, 0.0)


@dataclass(frozen=True)
class GradientProducts:
    """Inner products [batches, batches] of the gradients of batches, which determine all moments.

    Attributes:
        own: between gradients of the correction.
        across: between gradients of the correction and of the reference.
        apart: between differences of the two, scaled by the reference's factor on squared biases.
        reference: between gradients of the reference.
    """

    own: Float64s
    across: Float64s
    apart: Float64s
    reference: Float64s

    def __len__(self) -> int:
        return len(self.own)

    def part(self, batches: Ints) -> GradientProducts:
        """Return the products of some of the batches."""
        rows = np.ix_(batches, batches)
        return GradientProducts(self.own[rows], self.across[rows], self.apart[rows], self.reference[rows])

    def moments(self) -> GradientMoments:
        """Compute bias and variance relative to the reference."""
        bias2, bias2_without = _squared_norm_of_mean(self.apart)
        variance, variance_without = _covariance_trace(self.own)
        errors = np.diag(self.own) - 2 * self.across.mean(axis=1) + self.reference.mean()
        return GradientMoments(bias2, variance, bias2_without, variance_without, errors)


@dataclass(frozen=True)
class GradientReference:
    """Gradients [batches, features] of the least biased correction.

    Attributes:
        gradients: gradient of each batch.
        counts: factor on squared biases relative to them.
        squares: their inner products.
    """

    gradients: Float64s
    counts: float
    squares: Float64s

    @classmethod
    def of(cls, gradients: Float64s, counts: float = 1.0) -> GradientReference:
        return cls(gradients, counts, gradients @ gradients.T)

    def inner_products(self, gradients: Float64s) -> GradientProducts:
        """Compute the inner products of a correction's gradients from the difference, which is exact if it is small."""
        difference = gradients - self.gradients
        apart, across = difference @ difference.T, difference @ self.gradients.T
        own = apart + across + across.T + self.squares
        return GradientProducts(own, across + self.squares, self.counts * apart, self.squares)


@dataclass(frozen=True)
class SampleLayout:
    """Tokens of a sample ordered by batch.

    Attributes:
        batch: batch of each sequence [S].
        picker: reorders per-token values by batch, if necessary.
        feature: feature of each token [T], in this order.
        bounds: first and last token of each batch.
    """

    batch: Ints
    picker: Callable[[NDArray[Any]], NDArray[Any]] | None
    feature: NDArray[np.int32]
    bounds: list[tuple[int, int]]


class Surrogate:
    """Gradients of a sample's batches for any weights."""

    def __init__(self, sample: RunSample) -> None:
        if sample.advantages is None:
            raise ValueError("a gradient needs advantages")
        segments, train = sample.batch.segments, sample.batch.train
        ids = sample.token_ids if sample.token_ids is not None else _probability_ranks(train)
        self._segments = segments
        self._coefficient = sample.advantages * -np.expm1(np.minimum(train.astype(np.float64), 0.0))
        self._contexts, self._choices, self._feature = _token_features(ids, segments)

    def layout(self, batch: Ints) -> SampleLayout:
        """Order the tokens by the batch of each sequence [S]."""
        order = np.argsort(batch, kind="stable")
        picker = None if (order[1:] > order[:-1]).all() else self._segments.token_selector(order)
        feature = self._feature if picker is None else picker(self._feature)
        bounds = np.concatenate([[0], np.cumsum(np.bincount(batch, self._segments.lengths))]).astype(np.int64)
        return SampleLayout(batch, picker, feature, list(pairwise(bounds.tolist())))

    def gradients(self, applied: CorrectedSample, layouts: Sequence[SampleLayout]) -> Iterator[Float64s]:
        """Yield the gradient of each batch [batches, features] per layout.

        The gradient is the sum of weight x advantage x score, divided by the number of counted tokens.
        """
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
    """Estimate the squared norm of the mean row from products of different rows, and without each row [rows]."""
    count = len(products)
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    return float(off / (count * (count - 1))), without


def _covariance_trace(products: Float64s) -> tuple[float, Float64s]:
    """Return the trace of the covariance of rows from their inner products, and without each row [rows]."""
    count, own, total = len(products), np.diag(products), products.sum()
    rest = total - 2 * products.sum(axis=1) + own
    without = (own.sum() - own - rest / (count - 1)) / (count - 2)
    return float((own.sum() - total / count) / (count - 1)), without


def _token_features(ids: Ints, segments: Segments) -> tuple[int, int, NDArray[np.int32]]:
    """Return the number of contexts and choices, and the feature of each token [T]: (previous token, token)."""
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
    """Return the number of ids, and the rank of each token's id [T]."""
    low, high = int(ids.min()), int(ids.max())
    if high - low > len(ids) + (1 << 20):
        known, code = np.unique(ids, return_inverse=True)
        return len(known), code
    present = np.zeros(high - low + 1, np.bool_)
    present[ids - low] = True
    place = np.cumsum(present) - 1
    return int(place[-1]) + 1, place[ids - low]


def _probability_ranks(log_probs: NDArray[np.floating[Any]]) -> Ints:
    """Return the quantile bin of each token's log-prob [T]."""
    bounds = np.quantile(log_probs, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
    return np.searchsorted(bounds, log_probs).astype(np.int64)


def paired_difference(first: Sequence[float] | Float64s, second: Sequence[float] | Float64s) -> tuple[float, float]:
    """Return the mean of first - second over batches, and its standard error."""
    difference = np.asarray(first) - np.asarray(second)
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Standard errors by which a correction must beat "no correction" in a paired comparison."""
_CAUTION_FACTOR = 0.5
"""Share of them added to each error before the least is chosen (docs/methods/advice.md shows alternatives)."""
RELIABLE_SEQUENCES = 320
"""Number of sequences below which the advice failed in cases with a known truth (docs/methods/advice.md)."""
MAX_BIAS_UNDERESTIMATE = 10.0
"""Factor by which a squared bias may be underestimated, not exceeded in four of five cases with a known truth."""
RANDOM_SPLITS = 20
_MISS_RATE, _NOISE_DRAWS = 0.05, 4000
"""Share of samples in which the regret bound may be too small, and draws of the noise."""
_MIN_BATCHES = 8
_MIN_GAIN = 1e-3
"""Minimum gain as a share of the uncorrected error."""


@dataclass(frozen=True)
class CandidateRanking:
    """Candidates by name from best to worst. Candidates in `better` significantly beat no correction.

    Whether to correct and with which correction are two questions. The first is a significance test. A test is not
    suited to the second: it would prefer a small certain gain to a large likely one if few sequences contribute the
    gain. So the second chooses the least error plus a share of its uncertainty.

    Errors and moments include corrections that were measured without ranking them. `scale` converts the variance of a
    batch to an update, and `critical` is the number of standard errors that is significant.
    """

    order: tuple[str, ...]
    better: frozenset[str]
    mse: Mapping[str, float]
    moments: Mapping[str, GradientMoments]
    scale: float
    critical: float

    @property
    def first(self) -> str:
        """The advised correction."""
        return self.order[0]

    def gain(self, name: str) -> tuple[float, float]:
        """Return the share of the uncorrected error that a candidate removes, and its standard error."""
        none = self.mse["none"]
        _, error = paired_difference(self.moments["none"].errors, self.moments[name].errors)
        scale = float(self.moments["none"].errors.mean())
        return (1 - self.mse[name] / none if none else 0.0), (error / scale if scale else 0.0)

    def most_regret(self) -> float:
        """Bound the error of the first candidate relative to the best one, at 95% confidence.

        The bound covers all differences to the first at once, because the first was chosen among them. The noise is
        estimated by leaving out one batch at a time, for bias and variance together: only variance shrinks with the
        size of an update.
        """
        found = [self.moments[name] for name in self.order]
        errors = np.array([own.bias2 + own.variance * self.scale for own in found])
        without = np.array([own.bias2_without + own.variance_without * self.scale for own in found])
        own = max(found[0].bias2, 0.0) + found[0].variance * self.scale
        spare = float(
            (
                errors[0] - errors + self.critical / SIGNIFICANT_STANDARD_ERRORS * _noise_bound(without[0] - without)
            ).max()
        )
        return 1.0 if spare <= 0 else own / (own - spare) if spare < own else math.inf

    def find_tipping_point(self, counts: float) -> TippingPoint | None:
        """Find the smallest factor on the squared biases at which another candidate has less error than the first.

        A factor of 1 counts the whole estimates, including noise. The search ends at `MAX_BIAS_UNDERESTIMATE`, of which
        lower bounds already include `counts`.
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
        """Return the variance of the gradient of one update."""
        return self.moments[name].variance * self.scale

    def ties(self, name: str) -> bool:
        """Return True if a candidate does not differ significantly from the first."""
        if name == self.first:
            return True
        difference, error = paired_difference(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= self.critical * error


def choose_correction(
    products: Mapping[str, GradientProducts],
    scale: float,
    critical: float = SIGNIFICANT_STANDARD_ERRORS,
    unranked: Mapping[str, GradientProducts] | None = None,
) -> CandidateRanking:
    """Rank candidates by the mean squared error of their gradient.

    Args:
        products: inner products of the gradients of batches, by candidate, including `none`.
        scale: sequences of one batch divided by sequences of one update.
        critical: number of standard errors that is significant.
        unranked: inner products of corrections that are measured but not ranked.
    """
    found = {name: own.moments() for name, own in {**products, **(unranked or {})}.items()}
    mse = {name: own.bias2_counted + own.variance * scale for name, own in found.items()}
    gains = {name: paired_difference(found["none"].errors, own.errors) for name, own in found.items()}
    least = _MIN_GAIN * float(found["none"].errors.mean())
    better = frozenset(
        name for name, (gain, error) in gains.items() if mse[name] < mse["none"] and gain > max(critical * error, least)
    )

    def rank(name: str) -> tuple[bool, float]:
        stays = name == "none" and better.isdisjoint(products)
        return not stays, mse[name] + _CAUTION_FACTOR * critical * gains[name][1] * scale

    return CandidateRanking(tuple(sorted(products, key=rank)), better, mse, found, scale, critical)


def _noise_bound(without: Float64s) -> Float64s:
    """Return simultaneous upper bounds on the noise of differences, from leave-one-out values [differences, batches].

    The bound is the quantile of the largest standardized difference over draws that give each batch a random sign, so
    correlated differences count as few.
    """
    count = without.shape[1]
    noise = (without - without.mean(axis=1, keepdims=True)) * (count - 1)
    error = noise.std(axis=1, ddof=1) / math.sqrt(count)
    signs = np.random.default_rng(count).choice((-1.0, 1.0), (count, _NOISE_DRAWS))
    drawn = noise @ signs / count
    beyond = np.divide(drawn, error[:, None], out=np.zeros_like(drawn), where=error[:, None] > 0)
    return np.asarray(error * np.quantile(beyond.max(axis=0), 1 - _MISS_RATE))


def required_standard_errors(sequences: int) -> float:
    """Return how many standard errors are significant. Small samples need more."""
    return SIGNIFICANT_STANDARD_ERRORS * max(1.0, math.sqrt(MIN_SEQUENCES / max(sequences, 1)))


def split_stability(
    products: Mapping[str, GradientProducts], scale: float, critical: float = SIGNIFICANT_STANDARD_ERRORS
) -> float | None:
    """Return the share of random halves of the batches that give the same advice, counting ties as equal.

    None if the halves are too small. Batches contain whole prompts in hash order, and the random splits only depend on
    the number of batches.
    """
    count = len(products["none"])
    random = np.random.default_rng(count)
    orders = (random.permutation(count) for _ in range(RANDOM_SPLITS))
    return _split_agreement(
        products, ((np.sort(o[: count // 2]), np.sort(o[count // 2 :])) for o in orders), scale, critical
    )


def time_stability(
    products: Mapping[str, GradientProducts], scale: float, critical: float = SIGNIFICANT_STANDARD_ERRORS
) -> float | None:
    """Return the same share for splits of time-ordered batches into earlier and later ones."""
    count = len(products["none"])
    places = np.unique(np.linspace(_MIN_BATCHES, count - _MIN_BATCHES, RANDOM_SPLITS).astype(np.int64))
    return _split_agreement(products, ((np.arange(at), np.arange(at, count)) for at in places), scale, critical)


def _split_agreement(
    products: Mapping[str, GradientProducts], halves: Iterable[tuple[Ints, Ints]], scale: float, critical: float
) -> float | None:
    if len(products["none"]) < 2 * _MIN_BATCHES:
        return None
    agreed = []
    for parts in halves:
        first, second = (
            choose_correction({name: own.part(part) for name, own in products.items()}, scale, critical)
            for part in parts
        )
        agreed.append(first.ties(second.first) or second.ties(first.first))
    return float(np.mean(agreed))
