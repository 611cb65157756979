"""From errors of gradients to a ranking: what beats nothing beyond noise, what ties, and how stable that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.advise.gradient import Moments, Products, paired
from mismatchctl.advise.model import Tipping
from mismatchctl.advise.sample import ENOUGH
from mismatchctl.batch import Float64s, Ints

SURE = 2.0
"""Standard errors by which some correction must beat none, batch against batch, for any to be advised."""
_CAUTION = 0.5
"""Of them, what is added to the error of each before the least is taken (docs/advise.md: what else was tried)."""
FEWEST = 320
"""Sequences below which advice broke where the truth is known (docs/advise.md)."""
UNDERRATED = 10.0
"""Times that a squared bias may be larger than estimated: four in five are within it where the truth is known."""
SPLITS = 20
_MISSES, _DRAWS = 0.05, 4000
"""Share of samples on which the most regret may be too little, and draws of their noise."""
_FEWEST_BATCHES = 8
_LEAST_GAIN = 1e-3
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
    moments: Mapping[str, Moments]
    scale: float
    sure: float

    @property
    def first(self) -> str:
        """The advice."""
        return self.order[0]

    def gain(self, name: str) -> tuple[float, float]:
        """Share of the uncorrected error that a candidate takes away, and its standard error."""
        none = self.mse["none"]
        _, error = paired(self.moments["none"].errors, self.moments[name].errors)
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
        spare = float((errors[0] - errors + self.sure / SURE * _most_noise(without[0] - without)).max())
        return 1.0 if spare <= 0 else own / (own - spare) if spare < own else math.inf

    def tipping(self, counts: float) -> Tipping | None:
        """From how many times the squared biases estimated another candidate has less error than the first.

        Once is where the whole estimates are bias, their noise and all. Looked for up to `UNDERRATED` times, of which
        the estimates of lower bounds hold `counts` already.
        """
        most, own = UNDERRATED / counts, max(self.moments[self.first].bias2, 0.0)
        found = []
        for name in self.order[1:]:
            bias2, more = max(self.moments[name].bias2, 0.0), self.variance(name) - self.variance(self.first)
            if bias2 < own and 0 < more <= most * (own - bias2) and self.mse[name] >= self.mse[self.first]:
                factor = max(more / (own - bias2), 1.0)
                found.append((factor, factor * bias2 + more, name))
        factor, _, instead = min(found, default=(0.0, 0.0, ""))
        return Tipping(factor=factor, instead=instead) if instead else None

    def variance(self, name: str) -> float:
        """Of the gradient of one update."""
        return self.moments[name].variance * self.scale

    def ties(self, name: str) -> bool:
        """Whether a candidate cannot be told from the first: within the noise of the batches."""
        if name == self.first:
            return True
        difference, error = paired(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= self.sure * error


def choose(
    products: Mapping[str, Products], scale: float, sure: float = SURE, beside: Mapping[str, Products] | None = None
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
    gains = {name: paired(found["none"].errors, own.errors) for name, own in found.items()}
    least = _LEAST_GAIN * float(found["none"].errors.mean())
    better = frozenset(
        name for name, (gain, error) in gains.items() if mse[name] < mse["none"] and gain > max(sure * error, least)
    )

    def rank(name: str) -> tuple[bool, float]:
        stays = name == "none" and better.isdisjoint(products)
        return not stays, mse[name] + _CAUTION * sure * gains[name][1] * scale

    return CandidateRanking(tuple(sorted(products, key=rank)), better, mse, found, scale, sure)


def _most_noise(without: Float64s) -> Float64s:
    """How much of each difference is noise at most, all at once, from those without one batch [differences, batches].

    As many standard errors as the largest of all has in all but a twentieth of draws that give each batch a random
    sign, so differences that vary together count as few.
    """
    count = without.shape[1]
    noise = (without - without.mean(axis=1, keepdims=True)) * (count - 1)
    error = noise.std(axis=1, ddof=1) / math.sqrt(count)
    signs = np.random.default_rng(count).choice((-1.0, 1.0), (count, _DRAWS))
    drawn = noise @ signs / count
    beyond = np.divide(drawn, error[:, None], out=np.zeros_like(drawn), where=error[:, None] > 0)
    return np.asarray(error * np.quantile(beyond.max(axis=0), 1 - _MISSES))


def widened(sequences: int) -> float:
    """Standard errors from which a difference counts: more of them where there are fewer sequences than enough."""
    return SURE * max(1.0, math.sqrt(ENOUGH / max(sequences, 1)))


def stability(products: Mapping[str, Products], scale: float, sure: float = SURE) -> float | None:
    """Share of random halves of the batches that advise the same on either side, ties counted as the same.

    None where the halves are too small to choose from. Batches are of whole prompts, in an order that a hash gives, and
    the draws are the same for the same number of them.
    """
    count = len(products["none"])
    random = np.random.default_rng(count)
    orders = (random.permutation(count) for _ in range(SPLITS))
    return _agreement(products, ((np.sort(o[: count // 2]), np.sort(o[count // 2 :])) for o in orders), scale, sure)


def stability_in_time(products: Mapping[str, Products], scale: float, sure: float = SURE) -> float | None:
    """The same with batches in the order of the steps, cut into earlier and later ones at one place after another."""
    count = len(products["none"])
    places = np.unique(np.linspace(_FEWEST_BATCHES, count - _FEWEST_BATCHES, SPLITS).astype(np.int64))
    return _agreement(products, ((np.arange(at), np.arange(at, count)) for at in places), scale, sure)


def _agreement(
    products: Mapping[str, Products], halves: Iterable[tuple[Ints, Ints]], scale: float, sure: float
) -> float | None:
    if len(products["none"]) < 2 * _FEWEST_BATCHES:
        return None
    agreed = []
    for parts in halves:
        first, second = (
            choose({name: own.part(part) for name, own in products.items()}, scale, sure) for part in parts
        )
        agreed.append(first.ties(second.first) or second.ties(first.first))
    return float(np.mean(agreed))
