"""Error of the policy gradient under each correction, and the choice of the best correction."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from mismatchctl.api.advise.candidates import CorrectedSample
from mismatchctl.api.advise.sample import MIN_SEQUENCES, RunSample
from mismatchctl.core.batch import Float64s, Ints, Segments

MAX_CONTEXTS, MAX_CHOICES = 256, 128
"""Size of the table of logits: previous tokens and tokens. Larger numbers of ids are hashed to this size."""


_SMALLEST_ALTERNATIVE = 1e-9
_PROJECTION_CAUTION = 0.5
"""Standard errors that are subtracted from an estimated projection."""
_MIN_PROJECTION = 0.1
"""Smallest projection. This limits the factor by which noisy gradients are multiplied."""
PROBABILITY_BINS = 8
"""Number of quantile bins of the trainer's log-probs that replace missing token ids."""


@dataclass(frozen=True)
class GradientMoments:
    """Moments of the gradients of the batches under one correction, relative to a reference gradient."""

    bias2: float  # unbiased estimate of the squared norm of the mean difference. It may be slightly negative.
    variance: float  # trace of the covariance of the gradient of one batch
    bias2_se: float  # jackknife standard error
    errors: Float64s  # squared distance of each batch's gradient to the reference mean [batches]


@dataclass(frozen=True)
class GradientProducts:
    """Inner products [batches, batches] of the gradients of batches, which determine all moments.

    `own` contains products of the correction's gradients, and `reference` of the reference gradients. `across` contains
    products of one gradient of each kind, and `apart` of differences between the two kinds.
    """

    own: Float64s
    across: Float64s
    apart: Float64s
    reference: Float64s

    def __len__(self) -> int:
        return len(self.own)

    def part(self, batches: Ints) -> GradientProducts:
        rows = np.ix_(batches, batches)
        return GradientProducts(self.own[rows], self.across[rows], self.apart[rows], self.reference[rows])

    def scaled(self, factor: float) -> GradientProducts:
        """Return the products after the correction's gradients are multiplied by `factor`."""
        # from the difference, so that small differences stay exact
        mixed = self.across - self.reference
        apart = factor**2 * self.apart + factor * (factor - 1) * (mixed + mixed.T) + (factor - 1) ** 2 * self.reference
        return GradientProducts(factor**2 * self.own, factor * self.across, apart, self.reference)

    def estimate_projection(self) -> float:
        """Estimate the mean gradient's projection on the reference gradient, relative to the reference's length.

        The estimate is noisy if batches are small. The estimate is therefore shrunk towards 1 and reduced by half of
        its standard error. Otherwise, a correction that may lose the signal could win by its small variance.
        """
        length, length_without = _squared_norm_of_mean(self.reference)
        along, along_without = _squared_norm_of_mean((self.across + self.across.T) / 2)
        sure_length = max(length, _jackknife_error(length_without))
        if not sure_length > 0:
            return 1.0
        noise = _jackknife_error(along_without - length_without) / sure_length
        spread = float(np.trace(self.apart) / np.trace(self.reference))
        trust = spread / (spread + noise**2) if spread > 0 else 0.0
        change = trust * (along - length) / sure_length - _PROJECTION_CAUTION * math.sqrt(trust) * noise
        return max(1 + change, _MIN_PROJECTION)

    def moments(self) -> GradientMoments:
        bias2, without = _squared_norm_of_mean(self.apart)
        count, total = len(self), self.own.sum()
        variance = float((np.trace(self.own) - total / count) / (count - 1))
        errors = np.diag(self.own) - 2 * self.across.mean(axis=1) + self.reference.mean()
        return GradientMoments(bias2, variance, _jackknife_error(without), errors)


@dataclass(frozen=True)
class GradientReference:
    """Gradients [batches, features] under the least biased correction, and the inner products of these gradients."""

    gradients: Float64s
    squares: Float64s

    @classmethod
    def of(cls, gradients: Float64s) -> GradientReference:
        return cls(gradients, gradients @ gradients.T)

    def inner_products(self, gradients: Float64s) -> GradientProducts:
        """Return the inner products of a correction's gradients.

        To avoid rounding errors, the products are computed from the small difference to the reference.
        """
        difference = gradients - self.gradients
        apart, across = difference @ difference.T, difference @ self.gradients.T
        own = apart + across + across.T + self.squares
        return GradientProducts(own, across + self.squares, apart, self.squares)


class Surrogate:
    """Policy gradients of the batches of a sample, for any token weights.

    The policy is a table of logits by (previous token, token). The score of a token is (1 - p) at the logit of the
    token, and -(1 - p) in total at the other logits. As in a real policy, the mean score is nearly 0.
    """

    def __init__(self, sample: RunSample, batch: Ints) -> None:
        """Divide the sample into batches.

        `batch` contains the batch number of each sequence [S], in ascending order.
        """
        assert sample.advantages is not None
        segments, train = sample.batch.segments, sample.batch.train
        ids = sample.token_ids
        if ids is None:
            bounds = np.quantile(train, np.arange(1, PROBABILITY_BINS) / PROBABILITY_BINS)
            ids = np.searchsorted(bounds, train).astype(np.int64)
        self._batch = batch
        self._bounds = np.concatenate([[0], np.cumsum(np.bincount(batch, segments.lengths))]).astype(np.int64).tolist()
        uncertainty = -np.expm1(np.minimum(train.astype(np.float64), 0.0))
        self._coefficient = sample.advantages * uncertainty
        self._contexts, self._choices, self.feature = _token_features(ids, segments)
        table = np.bincount(self.feature, uncertainty, self._contexts * self._choices)
        self._alternatives = table.reshape(self._contexts, self._choices) + 1e-12
        self._others = self._alternatives.sum(axis=1, keepdims=True) - self._alternatives

    def gradients(self, applied: CorrectedSample) -> Float64s:
        """Return the gradient of each batch [batches, features], divided by the loss scale of the correction.

        The gradient is the sum of weight x advantage x score, divided by the number of tokens in the denominator of the
        loss.
        """
        scale = applied.loss_scale
        terms = applied.weights / (scale if scale > 0 else 1.0) * self._coefficient
        counted = np.maximum(np.bincount(self._batch, applied.counted), 1)
        found = np.empty((len(counted), self._contexts * self._choices))
        for row, (start, stop) in enumerate(pairwise(self._bounds)):
            flat = np.bincount(self.feature[start:stop], terms[start:stop], found.shape[1]) / counted[row]
            table = flat.reshape(self._contexts, self._choices)
            share = table / np.maximum(self._others, _SMALLEST_ALTERNATIVE)
            # the sum over each context's logits moves to the logits of other tokens
            found[row] = (table - self._alternatives * (share.sum(axis=1, keepdims=True) - share)).ravel()
        return found


def _jackknife_error(without: Float64s) -> float:
    """Return the jackknife standard error, given the estimates without each batch."""
    return float(np.sqrt((len(without) - 1) * without.var()))


def _squared_norm_of_mean(products: Float64s) -> tuple[float, Float64s]:
    """Estimate the squared norm of the mean row from products of different rows, also without each row [rows]."""
    count = len(products)
    own = np.diag(products)
    off = products.sum() - own.sum()
    without = (off - 2 * (products.sum(axis=1) - own)) / ((count - 1) * (count - 2))
    return float(off / (count * (count - 1))), without


def _token_features(ids: Ints, segments: Segments) -> tuple[int, int, NDArray[np.int32]]:
    """Return the numbers of contexts and choices, and the feature (previous token, token) of each token [T]."""
    known, code = np.unique(ids, return_inverse=True)
    size = len(known)
    before = np.concatenate([[size], code[:-1]])
    before[segments.offsets[:-1][segments.nonempty]] = size
    contexts, choices = size + 1, size
    if contexts * choices > MAX_CONTEXTS * MAX_CHOICES:
        contexts, choices = MAX_CONTEXTS, MAX_CHOICES
        mixed = [part.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) for part in (before, code)]
        before, code = (
            (part >> np.uint64(64 - size.bit_length() + 1)).astype(np.int64)
            for part, size in zip(mixed, (contexts, choices), strict=True)
        )
    return contexts, choices, (before * choices + code).astype(np.int32)


def paired_difference(first: Float64s, second: Float64s) -> tuple[float, float]:
    """Return the mean over batches of first - second, and the standard error of this mean."""
    difference = first - second
    return float(difference.mean()), float(difference.std(ddof=1) / np.sqrt(len(difference)))


SIGNIFICANT_STANDARD_ERRORS = 2.0
"""Minimum advantage over "no correction" in a paired comparison, in standard errors."""
_CAUTION_FACTOR = 0.5
"""Share of the standard error that is added to each error before errors are compared (docs/methods/advice.md)."""
RELIABLE_SEQUENCES = 320
"""With fewer sequences, the advice was wrong in simulations with a known best correction (docs/methods/advice.md)."""
RANDOM_SPLITS = 20
_MIN_BATCHES = 8
_MIN_GAIN = 1e-3
"""Minimum gain as a share of the uncorrected error."""


@dataclass(frozen=True)
class CandidateRanking:
    """Candidates by name from best to worst.

    The candidates in `better` have a significantly smaller error than no correction.

    Before errors are compared, each gradient is multiplied by a factor, so that its mean has the same component along
    the reference as the reference gradient. A correction therefore cannot reduce its error by shrinking the loss.

    A significance test decides whether a correction is needed. The test does not choose the correction, because it
    would prefer a small certain gain to a large likely gain. The chosen correction has the smallest sum of its error
    and a share of the uncertainty of the error.

    `mse` and `moments` also include corrections that are not ranked. `scale` converts the variance of a batch to the
    variance of an update. `critical` is the number of standard errors that counts as significant.
    """

    order: tuple[str, ...]
    better: frozenset[str]
    mse: Mapping[str, float]
    moments: Mapping[str, GradientMoments]
    scale: float
    critical: float

    @property
    def first(self) -> str:
        return self.order[0]

    def gain(self, name: str) -> tuple[float, float]:
        """Return the share of the uncorrected error that a candidate removes, and its standard error."""
        none = self.mse["none"]
        _, error = paired_difference(self.moments["none"].errors, self.moments[name].errors)
        scale = float(self.moments["none"].errors.mean())
        return (1 - self.mse[name] / none if none else 0.0), (error / scale if scale else 0.0)

    def variance(self, name: str) -> float:
        return self.moments[name].variance * self.scale

    def ties(self, name: str) -> bool:
        """Return True if a candidate's error does not differ significantly from the error of the first candidate."""
        if name == self.first:
            return True
        difference, error = paired_difference(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= self.critical * error


def choose_correction(
    products: Mapping[str, GradientProducts],
    scale: float,
    critical: float = SIGNIFICANT_STANDARD_ERRORS,
    *,
    shrinking: Collection[str] = (),
    unranked: Mapping[str, GradientProducts] | None = None,
) -> CandidateRanking:
    """Rank candidates by the mean squared error of their gradient, after each gradient is scaled by the best factor.

    `scale` is the size of a batch divided by the size of an update. Candidates in `shrinking` rank last because of
    their loss scale. Corrections in `unranked` are measured but not ranked.
    """
    found = {
        name: own.scaled(1 / own.estimate_projection()).moments()
        for name, own in {**products, **(unranked or {})}.items()
    }
    mse = {name: max(own.bias2, 0.0) + own.variance * scale for name, own in found.items()}
    gains = {name: paired_difference(found["none"].errors, own.errors) for name, own in found.items()}
    least = _MIN_GAIN * float(found["none"].errors.mean())
    better = frozenset(
        name
        for name, (gain, error) in gains.items()
        if name not in shrinking and mse[name] < mse["none"] and gain > max(critical * error, least)
    )

    def rank(name: str) -> tuple[bool, bool, float]:
        stays = name == "none" and better.isdisjoint(products)
        return name in shrinking, not stays, mse[name] + _CAUTION_FACTOR * critical * gains[name][1] * scale

    return CandidateRanking(tuple(sorted(products, key=rank)), better, mse, found, scale, critical)


def required_standard_errors(sequences: int) -> float:
    """Return the number of standard errors that counts as significant, which is larger for small samples."""
    return SIGNIFICANT_STANDARD_ERRORS * max(1.0, math.sqrt(MIN_SEQUENCES / max(sequences, 1)))


def split_stability(
    products: Mapping[str, GradientProducts], scale: float, critical: float, shrinking: Collection[str] = ()
) -> float | None:
    """Return the share of random halves of the batches that give the same first correction or a tie with it.

    Batches contain whole prompts in the order of their hashes. The random halves only depend on the number of batches.
    """
    count = len(products["none"])
    if count < 2 * _MIN_BATCHES:
        return None
    random, agreed = np.random.default_rng(count), []
    for _ in range(RANDOM_SPLITS):
        order = random.permutation(count)
        first, second = (
            choose_correction(
                {name: own.part(np.sort(half)) for name, own in products.items()}, scale, critical, shrinking=shrinking
            )
            for half in (order[: count // 2], order[count // 2 :])
        )
        agreed.append(first.ties(second.first) or second.ties(first.first))
    return float(np.mean(agreed))
