"""A temperature on one side: recognized, fitted, and whose distribution did the sampling."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case, once
from mismatchctl.diagnose.distributions import scale
from mismatchctl.diagnose.measures import along_drift, calibration, coherence, rare, related
from mismatchctl.measure.metrics.intervals import t_quantile

_SURE, _LIKELY, _UNLIKELY, _WITH_TRUNCATION = 0.85, 0.75, 0.6, 0.4
_LEARNING, _FAR, _OFF = 0.45, 4.0, 3.0
_CERTAIN, _MANY, _UNRELATED = -0.5, 0.1, 0.6
_TAIL, _STEEP = (-12.0, -3.0), 0.75
_SMALL, _STEEP_IN_NOISE = 0.044, 0.25
"""Where bfloat16 may make half of the noise of the logits, it draws the exponent so far from 1 that the slope shows
less of it, and no context fits."""
_NORMAL, _WIDEST = 1.96, 3.0
"""Of an interval of 95 %; and the factor between its ends beyond which it says nothing."""
_NOISE = 0.05
"""Noise of the logits that low precision makes at most, tails and all: it draws an exponent away from 1."""
_GROUPS = (0.15, 0.3, 0.5)
_REFUTED_Z, _REFUTED, _FITS_Z, _DOUBTED_Z, _ENOUGH = 6.0, 0.5, 5.0, 3.0, 3000


@dataclass(frozen=True)
class Power:
    """The distribution that sampled, as a power of the other side's.

    Attributes:
        exponent: of the other side's probabilities.
        interval: 95 %, with all that noise of low precision may do; None: the tokens are too few to bound it.
        misfit: how far one exponent for all contexts is from the truth: |mean| of ratio - 1 in the group of contexts
            where it is largest, over the mean of |ratio - 1| in all.
        misfit_z: the largest such mean in standard errors.
    """

    exponent: float
    interval: tuple[float, float] | None
    misfit: float
    misfit_z: float


def power(other: Float64s, sampled: Float64s, case: Case) -> Power | None:
    """The exponent b in q = p^b / Z from sampled tokens, whatever their contexts.

    Z is of the context. Sampled from q, p / q averages to 1 in every context: p / q - 1 is an instrument that no
    function of the context moves, and log q = b log p - log Z gives b = E[(p / q - 1) log q] / E[(p / q - 1) log p].
    The interval holds all b that the scatter between clusters does not refute (Anderson and Rubin), which is right
    for weak instruments too. For the same reason ratios average to 1 among contexts of equal Z, if b is right for all.

    Args:
        other: log p of each sound token [N].
        sampled: log q of each, the side that sampled [N].
        case: whose clusters they are of.
    """
    ratio = np.expm1(np.clip(other - sampled, -20, 20))
    weights = ratio * ratio
    whole = float(weights.sum())
    if not whole > 0:
        return None
    moved = ratio * (other - float((weights * other).sum()) / whole)
    seen = ratio * (sampled - float((weights * sampled).sum()) / whole)
    a, b = float(moved.sum()), float(seen.sum())
    if a == 0 or b / a <= 0:
        return None
    noise = float((np.expm1(np.minimum(other, 0.0)) ** 2).sum()) * _NOISE**2
    ends = [_not_refuted(moved, seen, case, a - drawn) for drawn in (0.0, noise)]
    interval = None
    if all(end is not None for end in ends):
        low, high = (choose(end[side] for end in ends if end) for side, choose in ((0, min), (1, max)))
        interval = (low, high) if low > 0 and high < _WIDEST * low else None
    return Power(b / a, interval, *_misfit(other * (b / a) - sampled, ratio))


def _not_refuted(moved: Float64s, seen: Float64s, case: Case, a: float) -> tuple[float, float] | None:
    """Ends of the set of b whose sum of b moved - seen is within its error of 0; None: unbounded. `a` sums `moved`."""
    clusters = np.bincount(case.clusters, weights=case.counts) > 0
    used = int(clusters.sum())
    if used < 2:
        return None
    sums = np.array([np.bincount(case.clusters, case.sums(part))[clusters] for part in (moved, seen)])
    products = sums @ sums.T * used / (used - 1)
    tokens = np.array([moved, seen])
    single = tokens @ tokens.T  # as if tokens were alone: of few clusters the scatter may be small by chance
    b = float(seen.sum())
    z = t_quantile(_NORMAL, used - 1)
    ends = []
    for (aa, ab), (_, bb) in (products, single):
        square, linear, constant = a * a - z * z * aa, a * b - z * z * ab, b * b - z * z * bb
        root = linear * linear - square * constant
        if square <= 0 or root < 0:
            return None
        ends += [(linear - math.sqrt(root)) / square, (linear + math.sqrt(root)) / square]
    return float(min(ends)), float(max(ends))


def _misfit(context: Float64s, ratio: Float64s) -> tuple[float, float]:
    """Largest |mean| of ratio - 1 in a group of contexts (by log Z), over its usual size; and in standard errors."""
    groups = np.searchsorted(np.quantile(context, _GROUPS), context)
    counts, sums = np.bincount(groups), np.bincount(groups, ratio)
    z = np.abs(sums) / np.maximum(np.sqrt(np.bincount(groups, ratio * ratio)), 1e-300)
    means = np.abs(sums) / np.maximum(counts, 1)
    return float(means.max() / max(float(np.abs(ratio).mean()), 1e-300)), float(z.max())


@dataclass(frozen=True)
class Tempering:
    """A temperature of the rollout relative to the trainer.

    Attributes:
        temperature: 1 / exponent of the rollout's probabilities by the trainer's.
        interval: 95 %; None: nothing bounds it.
        likely, unlikely: coherence of the log ratios of near-certain and of unlikely tokens, -1 to 1.
        excess, z: E[ratio] - 1, 0 where the rollout column sampled.
        inverse_excess, inverse_z: E[1 / ratio] - 1, 0 where the trainer's column sampled.
        steepness: how far r falls with t among unlikely tokens, as a temperature's would (1) or not at all (0: logits
            that are bounded or shifted, but not scaled).
        steepness_error: its standard error.
        misfit, misfit_z: how far one temperature for all contexts is from the truth; 0 where that is not known.
        small: whether bfloat16 may make half of it.
        tokens: how many it was told from.
        certain: whether the model is sure of many tokens, which a bound on logits would move first.
        sure: whether nothing else looks like this.
        listed: whether it was read from recorded lists, which the contract wants as they were sampled from.
    """

    temperature: float
    interval: tuple[float, float] | None
    likely: float
    unlikely: float
    excess: float
    z: float
    inverse_excess: float
    inverse_z: float
    steepness: float
    steepness_error: float
    misfit: float
    misfit_z: float
    small: bool
    tokens: int
    certain: bool
    sure: bool
    listed: bool

    @property
    def refuted(self) -> bool:
        """Whether no temperature fits all contexts."""
        return not self.small and self.misfit_z > _REFUTED_Z and self.misfit > _REFUTED

    @property
    def scaled(self) -> bool:
        """Whether unlikely tokens are scaled against each other too, as by a temperature."""
        least = _STEEP_IN_NOISE if self.small else _STEEP
        return not self.refuted and self.steepness + 2 * self.steepness_error > least

    @property
    def bounded(self) -> bool:
        """Whether likely tokens move as by a temperature, and others do not follow."""
        return self.refuted or (not self.scaled and not 0 < self.misfit_z < _DOUBTED_Z)

    @property
    def plainly_scaled(self) -> bool:
        """Whether nothing but a temperature is that steep, or fits all contexts where others would have shown."""
        fits = 0 < self.misfit_z < _FITS_Z and self.tokens >= _ENOUGH
        return not self.refuted and (fits or (self.certain and self.steepness - self.steepness_error > _STEEP))

    @property
    def sampled_by(self) -> str:
        """`rollout` or `train`: whose column is the distribution that sampled; empty where that cannot be told."""
        return _sampled_by(self.z, self.inverse_z)

    @property
    def likelier(self) -> str:
        """The same where one of both is off by three standard errors, and the other by less than half of that."""
        less, more = sorted((abs(self.z), abs(self.inverse_z)))
        if self.sampled_by or more < _OFF or less > more / 2:
            return self.sampled_by
        return "rollout" if abs(self.z) < abs(self.inverse_z) else "train"


def _sampled_by(z: float, inverse_z: float) -> str:
    if (abs(z) < _FAR) == (abs(inverse_z) < _FAR):
        return ""
    return "rollout" if abs(z) < _FAR else "train"


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
            steepness=1.0, steepness_error=0.0, misfit=0.0, misfit_z=0.0, small=False, tokens=len(case.x), certain=True,
            sure=True, listed=True,
        )  # fmt: skip
    if likely * unlikely >= 0 or min(abs(likely_z), abs(unlikely_z)) < 4:
        return None
    truncated = "truncated_sampling" in case.explained
    if abs(likely) < _LIKELY or abs(unlikely) < (_WITH_TRUNCATION if truncated else _UNLIKELY):
        return None
    sure = min(abs(likely), abs(unlikely)) > _SURE
    if not sure and along_drift(case)[0] > _LEARNING:
        return None  # learning sharpens a policy, which looks like a temperature from afar
    colder = likely < 0
    fitted = None if truncated else _fitted(case)
    if fitted is not None and (fitted.exponent > 1) == colder:
        temperature = 1 / fitted.exponent
        interval = None if fitted.interval is None else (1 / fitted.interval[1], 1 / fitted.interval[0])
        if interval is not None:  # which way it goes is known
            interval = (interval[0], min(interval[1], 1.0)) if colder else (max(interval[0], 1.0), interval[1])
    else:
        interval, exponents = None, _exponents(case)
        if len(exponents) < 20:
            return None
        temperature = 1 / float(np.quantile(exponents, 0.99 if colder else 0.01))
    if not temperature > 0:
        return None  # no temperature: likely tokens on one side are unlikely on the other
    steepness, error = _steepness(case, temperature)
    return Tempering(
        temperature,
        interval,
        likely,
        unlikely,
        *calibration(case),
        steepness,
        error,
        misfit=0.0 if fitted is None else fitted.misfit,
        misfit_z=0.0 if fitted is None else fitted.misfit_z,
        small=case.noise < _SMALL,
        tokens=len(case.x),
        certain=float((case.t > _CERTAIN).mean()) > _MANY,
        sure=sure and not truncated,
        listed=False,
    )


@once
def _fitted(case: Case) -> Power | None:
    """The rollout as a power of the trainer's distribution; None: neither column is what sampled."""
    _, z, _, inverse_z = calibration(case)
    by = _sampled_by(z, inverse_z)
    if not by and abs(z) >= _FAR:
        return None
    one = None if by == "train" else power(case.t, case.r, case)
    other = None if by == "rollout" else power(case.r, case.t, case)
    if other is not None:
        ends = other.interval
        turned = None if ends is None else (1 / ends[1], 1 / ends[0])
        other = Power(1 / other.exponent, turned, other.misfit, other.misfit_z)
    if one is None or other is None:
        return one or other
    if one.interval is None or other.interval is None:
        return one
    return replace(  # either may have sampled: the interval is of both
        one,
        interval=(min(one.interval[0], other.interval[0]), max(one.interval[1], other.interval[1])),
        misfit=min(one.misfit, other.misfit),
        misfit_z=min(one.misfit_z, other.misfit_z),
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


def _exponents(case: Case) -> Float64s:
    """For unlikely tokens, a bound on the exponent b in rollout ~ train^b: logit(rollout) / logit(train).

    With q = p^b / Z and Z between p^b + (1 - p)^b (all the rest on one token) and what a spread-out rest makes of
    it, this is exact in the first case and nearer to 1 in all others: the largest ones are the estimate.
    """
    chosen = rare(case)
    p, q = case.t[chosen], np.minimum(case.r[chosen], -1e-9)
    return (q - np.log(-np.expm1(q))) / (p - np.log(-np.expm1(p)))
