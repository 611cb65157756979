"""A temperature on one side: recognized, fitted, and whose distribution did the sampling."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Float64s, Ints
from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.distributions import scale
from mismatchctl.diagnose.measures import along_drift, calibration, coherence, rare, related

_SURE, _LIKELY, _UNLIKELY, _WITH_TRUNCATION = 0.85, 0.75, 0.6, 0.4
_LEARNING, _FAR = 0.45, 4.0
_CERTAIN, _MANY, _UNRELATED = -0.5, 0.1, 0.6
_RESAMPLES, _BEYOND = 50, 3.0
_TAIL, _STEEP = (-12.0, -3.0), 0.75


@dataclass(frozen=True)
class Tempering:
    """A temperature of the rollout relative to the trainer.

    Attributes:
        temperature: 1 / exponent of the rollout's probabilities by the trainer's.
        interval: 95 %.
        likely, unlikely: coherence of the log ratios of near-certain and of unlikely tokens, -1 to 1.
        excess, z: E[ratio] - 1, 0 where the rollout column sampled.
        inverse_excess, inverse_z: E[1 / ratio] - 1, 0 where the trainer's column sampled.
        steepness: how far r falls with t among unlikely tokens, as a temperature's would (1) or not at all (0: logits
            that are bounded or shifted, but not scaled).
        steepness_error: its standard error.
        certain: whether the model is sure of many tokens, which a bound on logits would move first.
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
    steepness: float
    steepness_error: float
    certain: bool
    sure: bool

    @property
    def scaled(self) -> bool:
        """Whether unlikely tokens are scaled against each other too, as by a temperature."""
        return self.steepness + 2 * self.steepness_error > _STEEP

    @property
    def plainly_scaled(self) -> bool:
        """Whether nothing but a temperature is that steep."""
        return self.certain and self.steepness - self.steepness_error > _STEEP

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
    if len(case.x) < 200 or related(case) < _UNRELATED:
        return None
    likely, likely_z, unlikely, unlikely_z = coherence(case)
    read = scale(case)
    if read is not None:
        return Tempering(
            read.temperature, read.interval, likely, unlikely, *calibration(case),
            steepness=1.0, steepness_error=0.0, certain=True, sure=True,
        )  # fmt: skip
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
    steepness, error = _steepness(case, temperature)
    certain = float((case.t > _CERTAIN).mean()) > _MANY
    return Tempering(
        temperature,
        interval,
        likely,
        unlikely,
        *calibration(case),
        steepness,
        error,
        certain,
        sure=sure and not truncated,
    )


def _steepness(case: Case, temperature: float) -> tuple[float, float]:
    """Slope of r by t among unlikely tokens, between 1 (0) and that of the temperature (1), and its standard error."""
    chosen = (case.t < _TAIL[1]) & (case.t > _TAIL[0])
    t, r = case.t[chosen], case.r[chosen]
    expected = 1 / temperature - 1
    if len(t) < 10 or t.std() == 0 or expected == 0:
        return 0.0, float("inf")
    across = t - t.mean()
    spread = float(across @ across)
    slope = float(across @ r) / spread
    error = float(np.sqrt(np.mean((r - r.mean() - slope * across) ** 2) / spread))
    return (slope - 1) / expected, error / abs(expected)


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
    """The far end of the exponents as a temperature, with an interval from resampled sequences.

    The exponents are bounds: the truth lies beyond nearly all of them, by about as much as the last are apart.
    """
    level, last = (0.98, 0.99) if colder else (0.02, 0.01)
    names, index = np.unique(sequence, return_inverse=True)
    order = np.argsort(index, kind="stable")
    bounds = np.searchsorted(index[order], np.arange(len(names) + 1))
    generator = np.random.default_rng(0)
    draws = []
    for _ in range(_RESAMPLES):
        chosen = generator.integers(len(names), size=len(names))
        draws.append(np.quantile(np.concatenate([exponents[order[bounds[c] : bounds[c + 1]]] for c in chosen]), level))
    near, far = (float(np.quantile(exponents, at)) for at in (level, last))
    beyond = far + _BEYOND * (far - near)
    reached = sorted([*np.quantile(draws, [0.025, 0.975]).tolist(), beyond])
    low, high = (near, reached[-1]) if colder else (reached[0], near)
    inner = float(np.quantile(draws, 0.025 if colder else 0.975))
    low, high = (min(low, inner), high) if colder else (low, max(high, inner))
    return 1 / far, (1 / high if high > 0 else 0.0, 1 / low if low > 0 else 0.0)
