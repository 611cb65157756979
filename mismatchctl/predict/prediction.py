"""What a prediction is: a value with its interval, the model in one sentence, and how the model fared on the dump."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure.table import Hashes

LEVEL = 0.90
"""Every interval is a central one of this level."""


@dataclass(frozen=True)
class BackTest:
    """The model tried on the dump itself: the rest of long responses predicted from the first tokens of all.

    Attributes:
        start: tokens that were shown.
        lengths: lengths that were predicted [K].
        predicted: rejected fraction that was predicted [K].
        observed: what the responses of that length show [K].
        sequences: how many responses that is [K].
        noise: standard error of `observed` from their number alone [K].
    """

    start: int
    lengths: tuple[int, ...]
    predicted: tuple[float, ...]
    observed: tuple[float, ...]
    sequences: tuple[int, ...]
    noise: tuple[float, ...]

    @property
    def error(self) -> float:
        """Mean absolute difference of predicted and observed."""
        return float(np.abs(np.subtract(self.predicted, self.observed)).mean())

    @property
    def excess(self) -> float:
        """Root of the mean squared difference beyond what the noise of the observed explains."""
        squares = np.subtract(self.predicted, self.observed) ** 2 - np.square(self.noise)
        return float(np.sqrt(max(squares.mean(), 0.0)))

    @property
    def miss(self) -> float:
        """The same on the scale of the standard normal, for each doubling of the length."""
        predicted, observed, noise = (np.asarray(values) for values in (self.predicted, self.observed, self.noise))
        least = 0.5 / np.asarray(self.sequences)
        scores = [_score(np.clip(values, least, 1 - least)) for values in (predicted, observed)]
        error = noise / _density(scores[1])
        doublings = np.log2(np.asarray(self.lengths) / self.start)
        squares = ((scores[0] - scores[1]) ** 2 - error**2) / doublings**2
        return float(np.sqrt(max(squares.mean(), 0.0)))


def _score(fractions: Float64s) -> Float64s:
    return np.array([NormalDist().inv_cdf(fraction) for fraction in fractions.tolist()])


def _density(scores: Float64s) -> Float64s:
    return np.asarray(np.exp(-(scores**2) / 2) / np.sqrt(2 * np.pi))


@dataclass(frozen=True)
class Prediction:
    """One predicted number.

    Attributes:
        question: of what, in a few words: "a batch of 64 sequences".
        quantity: registry key of what is predicted, `rejected_sequences` for instance.
        value: None where nothing can be said; `status` says why.
        interval: central interval of LEVEL, None with the value.
        status: "ok", or what must be known before it is believed.
        model: what was assumed, in one sentence.
        check: how the model fared on the dump, where it can be tried.
    """

    question: str
    quantity: str
    value: float | None
    interval: tuple[float, float] | None
    status: str
    model: str
    check: BackTest | None = None


def unknown(question: str, quantity: str, status: str, model: str, check: BackTest | None = None) -> Prediction:
    """A prediction that cannot be made."""
    return Prediction(question, quantity, None, None, status, model, check)


def middle(draws: Float64s) -> tuple[float, float]:
    """The central interval of LEVEL of draws; ends are values that were drawn."""
    low, high = np.quantile(draws, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="inverted_cdf")
    return float(low), float(high)


def generator(keys: Hashes, purpose: str) -> np.random.Generator:
    """Random numbers that depend on the set of clusters alone, not on their order."""
    return np.random.default_rng([int(np.bitwise_xor.reduce(np.unique(keys))), *purpose.encode()])
