"""Estimates of temperature and truncation on one side, from sampled tokens or top-k lists."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.diagnosis.case import Case, cached_on_case
from mismatchctl.diagnosis.measures import (
    calibration,
    coherence,
    column_correlation,
    drift_correlation,
    mark_rare_tokens,
)
from mismatchctl.measure.facets import OTHER_TOP_COLUMNS, ROLLOUT_TOP_COLUMN, find_other_top
from mismatchctl.measure.metrics.metric import t_quantile

TOP_COLUMNS = (ROLLOUT_TOP_COLUMN, *OTHER_TOP_COLUMNS)
_LISTS_MIN_TOKENS, _GONE_LOG_PROB = 100, -1e3
"""Minimum positions, and the log-prob of a token that cannot be chosen."""
_SCALE_MIN_EXPLAINED, _SCALE_Z, _SCALE_MIN_CHANGE = 0.9, 4.0, 0.003
_TRUNCATION_QUANTILE, _TOP_K_MIN_SHARE, _MAX_CONTRADICTION = 0.005, 0.99, 0.02


@dataclass(frozen=True)
class LogitScale:
    """One factor between the log-probs of the rollout and of the trainer, relative to the most likely token.

    Attributes:
        temperature: of the rollout relative to the trainer, 1 / factor.
        interval: 95%, by the scatter between clusters.
        explained: share of the squared difference of both that the factor accounts for.
    """

    temperature: float
    interval: tuple[float, float]
    explained: float


@dataclass(frozen=True)
class Truncation:
    """A truncation of the rollout.

    Attributes:
        setting: which, in words.
        name: `top_k`, `top_p`, `min_p`; empty: none of these.
        value: of the setting.
        interval: within which every place agrees with the setting.
        mass: mean of the mass that was kept, by the trainer's distribution.
    """

    setting: str
    name: str
    value: float
    interval: tuple[float, float]
    mass: float


def _read_lists(case: Case) -> tuple[Float64s, Float64s, Ints] | None:
    """Log-probs of both sides [N, k] at the sound tokens that have them, and the sequences of these [N]."""
    a, b = case.rows.tokens.get(ROLLOUT_TOP_COLUMN), find_other_top(case.rows.tokens)
    if a is None or b is None or a.shape != b.shape or a.ndim != 2:
        return None
    a, b = a[case.index].astype(np.float64), b[case.index].astype(np.float64)
    known = ~(np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1))
    return (a[known], b[known], case.where[known]) if known.sum() >= _LISTS_MIN_TOKENS else None


@cached_on_case
def estimate_scale(case: Case) -> LogitScale | None:
    """The factor between both sides, where it is not 1 and little else is between them."""
    lists = _read_lists(case)
    if lists is None:
        return None
    a, b, where = lists
    there = (a > _GONE_LOG_PROB) & (b > _GONE_LOG_PROB)
    there &= there[:, :1]
    da, db = (np.where(there, side - side[:, :1], 0.0) for side in (a, b))
    sums = np.array([(da * da).sum(axis=1), (db * db).sum(axis=1)])
    (whole_a, whole_b), apart = sums.sum(axis=1), ((da - db) ** 2).sum()
    if not (whole_a > 0 and whole_b > 0 and apart > 0):
        return None
    factor = float(np.sqrt(whole_a / whole_b))  # both have noise: neither is regressed on the other
    explained = 1 - float(((da - factor * db) ** 2).sum() / apart)
    own = np.bincount(case.clusters[where], weights=sums[0] - factor**2 * sums[1], minlength=1)
    used = max(len(np.unique(case.clusters[where])), 2)
    error = float(np.sqrt((own**2).sum() * used / (used - 1))) / (2 * factor * whole_b)
    if explained < _SCALE_MIN_EXPLAINED or abs(factor - 1) < max(_SCALE_Z * error, _SCALE_MIN_CHANGE):
        return None
    return LogitScale(1 / factor, (1 / (factor + 2 * error), 1 / max(factor - 2 * error, 1e-9)), explained)


@cached_on_case
def estimate_truncation(case: Case) -> Truncation | None:
    """The truncation of the rollout, where it gives no probability to tokens that the trainer could choose."""
    lists = _read_lists(case)
    if lists is None:
        return None
    a, b, _ = lists
    kept, gone = a > _GONE_LOG_PROB, (a <= _GONE_LOG_PROB) & (b > _GONE_LOG_PROB)
    cut_here = gone.any(axis=1) & kept.any(axis=1)
    if cut_here.mean() < _TRUNCATION_QUANTILE:
        return None
    a, b, kept, gone = a[cut_here], b[cut_here], kept[cut_here], gone[cut_here]
    mass = float(np.where(kept, np.exp(b), 0.0).sum(axis=1).mean())
    k = _find_top_k(a, kept)
    if k is not None:
        return Truncation(f"top-k of {k}, the length of each of its lists", "top_k", k, (k, k), mass)
    contradiction, name, low, high = _estimate_top_p(b, kept)
    if (
        contradiction > _MAX_CONTRADICTION
    ):  # else top-p: of min-p one end alone is sharp, as any of those cut off may be listed
        contradiction, name, low, high = _estimate_min_p(a, b, kept, gone)
    if contradiction > _MAX_CONTRADICTION:
        return Truncation("by a rule other than top-k, top-p and min-p", "", mass, (mass, mass), mass)
    low, high = sorted((low, high))
    said = f"{name.replace('_', '-')} between {low:.3g} and {high:.3g}, which every list agrees with"
    return Truncation(said, name, (low + high) / 2, (low, high), mass)


def _find_top_k(a: Float64s, kept: Bools) -> int | None:
    """Top-k: so many are kept, or more where those after are as likely as the last of them, as in bfloat16 some are."""
    counts = kept.sum(axis=1)
    k = int(np.quantile(counts, _TRUNCATION_QUANTILE))
    ranked = -np.sort(-a, axis=1)
    tied = (counts >= k) & (ranked[:, k - 1] == np.take_along_axis(ranked, counts[:, None] - 1, axis=1)[:, 0])
    return k if tied.mean() > _TOP_K_MIN_SHARE else None


def _estimate_top_p(b: Float64s, kept: Bools) -> tuple[float, str, float, float]:
    """Top-p: below what the kept tokens hold together, not below what they hold without the least of them."""
    p = np.where(kept, np.exp(b), 0.0)
    whole = p.sum(axis=1)
    without = whole - np.where(kept, p, np.inf).min(axis=1)
    low, high = float(np.quantile(without, 1 - _TRUNCATION_QUANTILE)), float(np.quantile(whole, _TRUNCATION_QUANTILE))
    return low - high, "top_p", low, high


def _estimate_min_p(a: Float64s, b: Float64s, kept: Bools, gone: Bools) -> tuple[float, str, float, float]:
    """Min-p: between what those cut off have at most, and the kept at least, of the most likely token's probability.

    The kept are told by the rollout itself: their ratios are what was decided by.
    """
    least = np.where(kept, a, np.inf).min(axis=1) - np.where(kept, a, -np.inf).max(axis=1)
    most = np.where(gone, b, -np.inf).max(axis=1) - np.where(kept, b, -np.inf).max(axis=1)
    low, high = (
        float(np.exp(np.quantile(most, 1 - _TRUNCATION_QUANTILE))),
        float(np.exp(np.quantile(least, _TRUNCATION_QUANTILE))),
    )
    return (low - high) / max(high, 1e-9), "min_p", low, high


_SURE_COHERENCE, _LIKELY_COHERENCE, _UNLIKELY_COHERENCE, _TRUNCATED_COHERENCE = 0.85, 0.75, 0.6, 0.4
_LEARNING_CORRELATION, _FAR_Z, _BIASED_Z = 0.45, 4.0, 3.0
_CERTAIN_LOG_PROB, _MIN_CERTAIN_SHARE, _UNRELATED_CORRELATION = -0.5, 0.1, 0.6
_TAIL_RANGE, _MIN_STEEPNESS = (-12.0, -3.0), 0.75
_SMALL_NOISE, _MIN_STEEPNESS_IN_NOISE = 0.044, 0.25
"""If bfloat16 makes half of the noise of the logits, the exponent is so far from 1 that the slope shows
less of it, and no context fits."""
_NORMAL_QUANTILE, _MAX_INTERVAL_FACTOR = 1.96, 3.0
"""Normal quantile of a 95% interval, and the maximum factor between the ends of a useful interval."""
_FITS, _ENOUGH_TO_FIT, _STEEP_IN_FIT, _FLAT, _PLAIN, _LESS_UNLIKELY = 0.125, 2000, 0.25, 0.0, 0.02, 0.4
"""Maximum misfit of one temperature. On 12 random models temperatures had 0.11 at most, and bounds on logits
of this steepness at least 0.18."""
_LOGIT_NOISE = 0.05
"""Noise of the logits that low precision makes at most, tails and all: it draws an exponent away from 1."""
_CONTEXT_QUANTILES = (0.15, 0.3, 0.5)
_REFUTED_Z, _REFUTED_MISFIT, _FITTING_Z, _DOUBTFUL_Z, _FIT_MIN_TOKENS = 6.0, 0.5, 5.0, 3.0, 3000


@dataclass(frozen=True)
class PowerFit:
    """The distribution that sampled, as a power of the other side's.

    Attributes:
        exponent: of the other side's probabilities.
        interval: 95%, with all that noise of low precision may do; None: the tokens are too few to bound it.
        misfit: how far one exponent for all contexts is from the truth: |mean| of ratio - 1 in the group of contexts
            where it is largest, over the mean of |ratio - 1| in all.
        misfit_z: the largest such mean in standard errors.
    """

    exponent: float
    interval: tuple[float, float] | None
    misfit: float
    misfit_z: float


def fit_power(other: Float64s, sampled: Float64s, case: Case) -> PowerFit | None:
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
    noise = float((np.expm1(np.minimum(other, 0.0)) ** 2).sum()) * _LOGIT_NOISE**2
    ends = [_confidence_bounds(moved, seen, case, a - drawn) for drawn in (0.0, noise)]
    interval = None
    if all(end is not None for end in ends):
        low, high = (choose(end[side] for end in ends if end) for side, choose in ((0, min), (1, max)))
        interval = (low, high) if low > 0 and high < _MAX_INTERVAL_FACTOR * low else None
    return PowerFit(b / a, interval, *_misfit(other * (b / a) - sampled, ratio))


def _confidence_bounds(moved: Float64s, seen: Float64s, case: Case, a: float) -> tuple[float, float] | None:
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
    z = t_quantile(_NORMAL_QUANTILE, used - 1)
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
    groups = np.searchsorted(np.quantile(context, _CONTEXT_QUANTILES), context)
    counts, sums = np.bincount(groups), np.bincount(groups, ratio)
    z = np.abs(sums) / np.maximum(np.sqrt(np.bincount(groups, ratio * ratio)), 1e-300)
    means = np.abs(sums) / np.maximum(counts, 1)
    return float(means.max() / max(float(np.abs(ratio).mean()), 1e-300)), float(z.max())


@dataclass(frozen=True)
class TemperatureFit:
    """A temperature of the rollout relative to the trainer.

    Attributes:
        temperature: 1 / exponent of the rollout's probabilities by the trainer's.
        interval: 95%; None: nothing bounds it.
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
        return not self.small and not self.fits and self.misfit_z > _REFUTED_Z and self.misfit > _REFUTED_MISFIT

    @property
    def fits(self) -> bool:
        """Whether one temperature fits all contexts, and none of 1 does."""
        ends = self.interval
        told = ends is not None and not ends[0] <= 1 <= ends[1] and abs(math.log(self.temperature)) > _PLAIN
        steep = self.steepness > (_FLAT if self.listed else _STEEP_IN_FIT)
        return told and self.misfit_z > 0 and self.misfit < _FITS and self.tokens >= _ENOUGH_TO_FIT and steep

    @property
    def scaled(self) -> bool:
        """Whether unlikely tokens are scaled against each other too, as by a temperature."""
        if self.fits:
            return True
        least = _MIN_STEEPNESS_IN_NOISE if self.small else _MIN_STEEPNESS
        return not self.refuted and self.steepness + 2 * self.steepness_error > least

    @property
    def bounded(self) -> bool:
        """Whether likely tokens move as by a temperature, and others do not follow."""
        return self.refuted or (not self.scaled and not 0 < self.misfit_z < _DOUBTFUL_Z)

    @property
    def plainly_scaled(self) -> bool:
        """Whether nothing but a temperature is that steep, or fits all contexts where others would have shown."""
        fits = self.fits or (0 < self.misfit_z < _FITTING_Z and self.tokens >= _FIT_MIN_TOKENS)
        return not self.refuted and (fits or (self.certain and self.steepness - self.steepness_error > _MIN_STEEPNESS))

    @property
    def sampled_by(self) -> str:
        """`rollout` or `train`: whose column is the distribution that sampled; empty where that cannot be told."""
        return _find_sampler(self.z, self.inverse_z)

    @property
    def likelier(self) -> str:
        """The same where one of both is off by three standard errors, and the other by less than half of that."""
        less, more = sorted((abs(self.z), abs(self.inverse_z)))
        if self.sampled_by or more < _BIASED_Z or less > more / 2:
            return self.sampled_by
        return "rollout" if abs(self.z) < abs(self.inverse_z) else "train"


def _find_sampler(z: float, inverse_z: float) -> str:
    if (abs(z) < _FAR_Z) == (abs(inverse_z) < _FAR_Z):
        return ""
    return "rollout" if abs(z) < _FAR_Z else "train"


def estimate_temperature(case: Case) -> TemperatureFit | None:
    """Find a temperature: likely tokens all go one way and unlikely ones all go the other.

    A colder distribution gives more to tokens that are likely in their context and less to all others.
    """
    if len(case.x) < 200 or column_correlation(case) < _UNRELATED_CORRELATION:
        return None
    likely, likely_z, unlikely, unlikely_z = coherence(case)
    read = estimate_scale(case)
    if read is not None:
        return TemperatureFit(
            read.temperature, read.interval, likely, unlikely, *calibration(case),
            steepness=1.0, steepness_error=0.0, misfit=0.0, misfit_z=0.0, small=False, tokens=len(case.x), certain=True,
            sure=True, listed=True,
        )  # fmt: skip
    if likely * unlikely >= 0 or min(abs(likely_z), abs(unlikely_z)) < 4:
        return None
    truncated = "truncated_sampling" in case.explained
    if abs(likely) < _LIKELY_COHERENCE or abs(unlikely) < (_TRUNCATED_COHERENCE if truncated else _LESS_UNLIKELY):
        return None
    sure = min(abs(likely), abs(unlikely)) > _SURE_COHERENCE
    if not sure and drift_correlation(case)[0] > _LEARNING_CORRELATION:
        return None  # learning sharpens a policy, which looks like a temperature from afar
    colder = likely < 0
    fitted = None if truncated else _fit_case(case)
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
    found = TemperatureFit(
        temperature,
        interval,
        likely,
        unlikely,
        *calibration(case),
        steepness,
        error,
        misfit=0.0 if fitted is None else fitted.misfit,
        misfit_z=0.0 if fitted is None else fitted.misfit_z,
        small=case.noise < _SMALL_NOISE,
        tokens=len(case.x),
        certain=float((case.t > _CERTAIN_LOG_PROB).mean()) > _MIN_CERTAIN_SHARE,
        sure=sure and not truncated,
        listed=False,
    )
    if found.fits:
        return replace(found, sure=True)
    return found if truncated or abs(unlikely) >= _UNLIKELY_COHERENCE else None


@cached_on_case
def _fit_case(case: Case) -> PowerFit | None:
    """The rollout as a power of the trainer's distribution; None: neither column is what sampled."""
    _, z, _, inverse_z = calibration(case)
    by = _find_sampler(z, inverse_z)
    if not by and abs(z) >= _FAR_Z:
        return None
    one = None if by == "train" else fit_power(case.t, case.r, case)
    other = None if by == "rollout" else fit_power(case.r, case.t, case)
    if other is not None:
        ends = other.interval
        turned = None if ends is None else (1 / ends[1], 1 / ends[0])
        other = PowerFit(1 / other.exponent, turned, other.misfit, other.misfit_z)
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
    chosen = (case.t < _TAIL_RANGE[1]) & (case.t > _TAIL_RANGE[0])
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
    chosen = mark_rare_tokens(case)
    p, q = case.t[chosen], np.minimum(case.r[chosen], -1e-9)
    return (q - np.log(-np.expm1(q))) / (p - np.log(-np.expm1(p)))
