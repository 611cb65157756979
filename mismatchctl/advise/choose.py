"""From errors of gradients to a ranking: what beats nothing beyond noise, what ties, and how stable that is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.advise.gradient import Moments, moments, paired
from mismatchctl.batch import Float64s

SURE = 2.0
"""Standard errors by which a correction must beat none, batch against batch, to be advised."""
SPLITS = 20
_FEWEST_BATCHES = 8


@dataclass(frozen=True)
class Choice:
    """Candidates from best to worst, by name; those of `better` beat no correction beyond noise.

    Errors and moments are also those of what was looked at beside them.
    """

    order: tuple[str, ...]
    better: frozenset[str]
    mse: Mapping[str, float]
    moments: Mapping[str, Moments]

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

    def ties(self, name: str) -> bool:
        """Whether a candidate cannot be told from the first: within the noise of the batches."""
        if name == self.first:
            return True
        difference, error = paired(self.moments[name].errors, self.moments[self.first].errors)
        return difference <= SURE * error


def choose(
    gradients: Mapping[str, Float64s], reference: Float64s, scale: float, beside: Mapping[str, Float64s] | None = None
) -> Choice:
    """Rank candidates by the mean squared error of their gradient.

    Args:
        gradients: of each batch, by candidate [batches, features]; `none` among them.
        reference: those of the correction that stands for no bias.
        scale: sequences of one batch here over those of one update.
        beside: gradients of what is measured without being ranked.
    """
    found = {name: moments(own, reference) for name, own in {**gradients, **(beside or {})}.items()}
    mse = {name: max(own.bias2, 0.0) + own.variance * scale for name, own in found.items()}
    better = frozenset(name for name in found if mse[name] < mse["none"] and _surely_better(found, name))

    def rank(name: str) -> tuple[int, float]:
        return (0 if name in better else 1 if name == "none" else 2), mse[name]

    return Choice(tuple(sorted(gradients, key=rank)), better, mse, found)


def _surely_better(found: Mapping[str, Moments], name: str) -> bool:
    difference, error = paired(found["none"].errors, found[name].errors)
    return difference > SURE * error


def stability(gradients: Mapping[str, Float64s], reference: Float64s, scale: float) -> float | None:
    """Share of random halves of the batches that advise the same on either side, ties counted as the same.

    None where the halves are too small to choose from. Batches are of whole prompts, in an order that a hash gives, and
    the draws are the same for the same number of them.
    """
    count = len(reference)
    if count < 2 * _FEWEST_BATCHES:
        return None
    random = np.random.default_rng(count)
    agreed = 0
    for _ in range(SPLITS):
        order = random.permutation(count)
        parts = np.sort(order[: count // 2]), np.sort(order[count // 2 :])
        first, second = (
            choose({name: own[part] for name, own in gradients.items()}, reference[part], scale) for part in parts
        )
        agreed += first.ties(second.first) or second.ties(first.first)
    return agreed / SPLITS
