"""A temperature on one side: recognized, fitted, and whose distribution did the sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.measures import along_drift, calibration, coherence, rare

_SURE, _LIKELY, _UNLIKELY, _WITH_TRUNCATION = 0.85, 0.75, 0.6, 0.4
_LEARNING, _FAR = 0.45, 4.0
_RESAMPLES = 50


@dataclass(frozen=True)
class Tempering:
    """A temperature of the rollout relative to the trainer.

    Attributes:
        temperature: 1 / exponent of the rollout's probabilities by the trainer's.
        interval: 90 %.
        likely, unlikely: coherence of the log ratios of near-certain and of unlikely tokens, -1 to 1.
        excess, z: E[ratio] - 1, 0 where the rollout column sampled.
        inverse_excess, inverse_z: E[1 / ratio] - 1, 0 where the trainer's column sampled.
        sure: whether nothing else looks like this.
    """

    temperature: float
    interval: tuple[float, float]
    likely: float
    unlikely: float
    excess: float
    z: float
    inverse_excess: float
    inverse_z: float
    sure: bool

    @property
    def sampled_by(self) -> str:
        """`rollout` or `train`: whose column is the distribution that sampled; empty where that cannot be told."""
        if (abs(self.z) < _FAR) == (abs(self.inverse_z) < _FAR):
            return ""
        return "rollout" if abs(self.z) < _FAR else "train"


@once
def tempering(case: Case) -> Tempering | None:
    """Find a temperature: likely tokens all go one way and unlikely ones all go the other.

    A colder distribution gives more to tokens that are likely in their context and less to all others.
    """
    if len(case.x) < 200:
        return None
    likely, likely_z, unlikely, unlikely_z = coherence(case)
    if likely * unlikely >= 0 or min(abs(likely_z), abs(unlikely_z)) < 4:
        return None
    truncated = "truncated_sampling" in case.explained
    if abs(likely) < _LIKELY or abs(unlikely) < (_WITH_TRUNCATION if truncated else _UNLIKELY):
        return None
    sure = min(abs(likely), abs(unlikely)) > _SURE
    if not sure and along_drift(case)[0] > _LEARNING:
        return None  # learning sharpens a policy, which looks like a temperature from afar
    exponents, sequence = _exponents(case)
    if len(exponents) < 20:
        return None
    temperature, interval = _envelope(exponents, sequence, colder=likely < 0)
    if interval[0] <= 0:
        return None  # no temperature: likely tokens on one side are unlikely on the other
    return Tempering(temperature, interval, likely, unlikely, *calibration(case), sure=sure and not truncated)


def _exponents(case: Case) -> tuple[Float64s, Ints]:
    """For unlikely tokens, a bound on the exponent b in rollout ~ train^b: logit(rollout) / logit(train).

    With q = p^b / Z and Z between p^b + (1 - p)^b (all the rest on one token) and what a spread-out rest makes of
    it, this is exact in the first case and nearer to 1 in all others: the largest ones are the estimate.
    """
    chosen = rare(case)
    p, q = case.t[chosen], np.minimum(case.r[chosen], -1e-9)
    exponents: Float64s = (q - np.log(-np.expm1(q))) / (p - np.log(-np.expm1(p)))
    return exponents, case.where[chosen]


def _envelope(exponents: Float64s, sequence: Ints, colder: bool) -> tuple[float, tuple[float, float]]:
    """The far end of the exponents as a temperature, with an interval from resampled sequences."""
    level = 0.98 if colder else 0.02
    names, index = np.unique(sequence, return_inverse=True)
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(len(names) + 1))
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(_RESAMPLES):
        chosen = generator.integers(len(names), size=len(names))
        draws.append(np.quantile(np.concatenate([exponents[order[bounds[c] : bounds[c + 1]]] for c in chosen]), level))
    far = float(np.quantile(exponents, 0.998 if colder else 0.002))  # the estimate is a bound: the truth lies beyond it
    ends = sorted(1 / value for value in (*np.quantile(draws, [0.05, 0.95]).tolist(), far))
    return 1 / float(np.quantile(exponents, level)), (ends[0], ends[-1])
