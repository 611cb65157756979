"""Estimate the temperature or truncation (such as top-p) that only one side applies, from sampled or listed tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.diagnosis.case import UNRELATED_CORRELATION, Calibration, Case, cached_on_case
from mismatchctl.measure.metrics.metric import t_quantile
from mismatchctl.measure.metrics.registry import OTHER_TOP_COLUMNS, ROLLOUT_TOP_COLUMN, find_other_top

TOP_COLUMNS = (ROLLOUT_TOP_COLUMN, *OTHER_TOP_COLUMNS)
_LISTS_MIN_TOKENS, _GONE_LOG_PROB = 100, -1e3
"""Minimum number of positions with lists of likely tokens. A sampler removed the tokens with a log-prob <= -1000."""
_TRUNCATION_QUANTILE, _MAX_CONTRADICTION = 0.005, 0.02


@dataclass(frozen=True)
class Truncation:
    """A truncation of the rollout (top-k, top-p or min-p), estimated from recorded lists of the most likely tokens."""

    setting: str  # for users, such as "top-k of 20, because each list has 20 tokens"
    name: str
    value: float
    interval: tuple[float, float]
    mass: float  # mean probability mass that the truncation keeps


def _read_lists(case: Case) -> tuple[Float64s, Float64s, Ints] | None:
    """Return top-k log-probs [N, k] of the rollout and of the trainer (or the reference), and sequence indices [N]."""
    a, b = case.rows.extra_columns.get(ROLLOUT_TOP_COLUMN), find_other_top(case.rows.extra_columns)
    if a is None or b is None or a.shape != b.shape or a.ndim != 2:
        return None
    a, b = a[case.index].astype(np.float64), b[case.index].astype(np.float64)
    known = ~(np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1))
    return (a[known], b[known], case.where[known]) if known.sum() >= _LISTS_MIN_TOKENS else None


@cached_on_case
def estimate_scale(case: Case) -> tuple[float, tuple[float, float]] | None:
    """Estimate the rollout temperature / train temperature and its 95% interval from top-k log-probs, or `None`."""
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
    factor = float(np.sqrt(whole_a / whole_b))  # noise on both sides would bias a regression
    explained = 1 - float(((da - factor * db) ** 2).sum() / apart)
    own = np.bincount(case.clusters[where], weights=sums[0] - factor**2 * sums[1], minlength=1)
    used = max(len(np.unique(case.clusters[where])), 2)
    error = float(np.sqrt((own**2).sum() * used / (used - 1))) / (2 * factor * whole_b)
    if explained < 0.9 or abs(factor - 1) < max(4.0 * error, 0.003):
        return None
    return 1 / factor, (1 / (factor + 2 * error), 1 / max(factor - 2 * error, 1e-9))


@cached_on_case
def estimate_truncation(case: Case) -> Truncation | None:
    """Find the sampler's truncation from lists of likely tokens: the rollout gives some of them probability 0."""
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
        return Truncation(f"top-k of {k}, because each list has {k} tokens", "top_k", k, (k, k), mass)
    contradiction, name, low, high = _estimate_top_p(b, kept)
    if contradiction > _MAX_CONTRADICTION:  # min-p comes last, because its test is less exact
        contradiction, name, low, high = _estimate_min_p(a, b, kept, gone)
    if contradiction > _MAX_CONTRADICTION:
        return Truncation("a rule other than top-k, top-p and min-p", "", mass, (mass, mass), mass)
    low, high = sorted((low, high))
    said = f"{name.replace('_', '-')} between {low:.3g} and {high:.3g}, which fits every list"
    return Truncation(said, name, (low + high) / 2, (low, high), mass)


def _find_top_k(a: Float64s, kept: Bools) -> int | None:
    """Return k if the sampler kept exactly the k most likely tokens (and equally likely ones) of nearly all lists."""
    counts = kept.sum(axis=1)
    k = int(np.quantile(counts, _TRUNCATION_QUANTILE))
    ranked = -np.sort(-a, axis=1)
    tied = (counts >= k) & (ranked[:, k - 1] == np.take_along_axis(ranked, counts[:, None] - 1, axis=1)[:, 0])
    return k if tied.mean() > 0.99 else None


def _estimate_top_p(b: Float64s, kept: Bools) -> tuple[float, str, float, float]:
    p = np.where(kept, np.exp(b), 0.0)
    whole = p.sum(axis=1)
    without = whole - np.where(kept, p, np.inf).min(axis=1)
    low, high = float(np.quantile(without, 1 - _TRUNCATION_QUANTILE)), float(np.quantile(whole, _TRUNCATION_QUANTILE))
    return low - high, "top_p", low, high


def _estimate_min_p(a: Float64s, b: Float64s, kept: Bools, gone: Bools) -> tuple[float, str, float, float]:
    least = np.where(kept, a, np.inf).min(axis=1) - np.where(kept, a, -np.inf).max(axis=1)
    most = np.where(gone, b, -np.inf).max(axis=1) - np.where(kept, b, -np.inf).max(axis=1)
    ends = np.quantile(most, 1 - _TRUNCATION_QUANTILE), np.quantile(least, _TRUNCATION_QUANTILE)
    low, high = (float(np.exp(end)) for end in ends)
    return (low - high) / max(high, 1e-9), "min_p", low, high


_FAR_Z = 4.0
_TAIL_RANGE, _MIN_STEEPNESS = (-12.0, -3.0), 0.75
_SMALLEST_DOUBT = 1e-3


@dataclass(frozen=True)
class PowerFit:
    """A fit q = p^`exponent` / Z (constant Z per context). q: side that sampled the tokens. p: the other side."""

    exponent: float
    interval: tuple[float, float] | None
    misfit: float  # largest |mean(ratio - 1)| of a group of contexts, divided by mean |ratio - 1| (exact fit: 0)
    misfit_z: float  # largest |z-score| of the means of these groups
    impossible: float  # share of tokens whose p and q are impossible with this exponent


def fit_power(other: Float64s, sampled: Float64s, case: Case) -> PowerFit | None:
    """Fit the exponent b in q = p^b / Z to tokens that were sampled from q.

    `other` contains log p, and `sampled` contains log q. Sampling with a temperature gives b = 1 / temperature. The
    estimate is E[(p / q - 1) log q] / E[(p / q - 1) log p]. It does not need Z, which differs between contexts (prompt
    and prefix). The interval of b (Anderson-Rubin) is also valid if p and q are nearly equal.
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
    noise = float((np.expm1(np.minimum(other, 0.0)) ** 2).sum()) * 0.05**2  # low precision has noise up to 0.05
    ends = [_confidence_bounds(moved, seen, case, a - drawn) for drawn in (0.0, noise)]
    interval = None
    if all(end is not None for end in ends):
        low, high = (choose(end[side] for end in ends if end) for side, choose in ((0, min), (1, max)))
        interval = (low, high) if low > 0 and high < 3.0 * low else None
    exponents = [b / a, *([] if interval is None else np.linspace(*interval, 9))]
    misfit = min(_misfit(other * exponent - sampled, ratio) for exponent in exponents)
    return PowerFit(b / a, interval, *misfit, _impossible_share(other, sampled, b / a))


def _impossible_share(other: Float64s, sampled: Float64s, exponent: float) -> float:
    """Return the share of tokens that no temperature can cause: q < p^b / (p^b + (1 - p)^b), where b = `exponent`."""
    known = (other < -_SMALLEST_DOUBT) & (sampled < -_SMALLEST_DOUBT)
    if not known.any():
        return 1.0
    flatter, sharper = (values[known] - np.log(-np.expm1(values[known])) for values in (other, sampled))
    if exponent < 1:  # the formula is for b > 1, so exchange the two sides
        flatter, sharper, exponent = sharper, flatter, 1 / exponent
    # in random models, at most 0.004 if only the temperature differs, and at least 0.1 if the weights differ
    return float((sharper < exponent * flatter - 0.1).mean())


def _confidence_bounds(moved: Float64s, seen: Float64s, case: Case, a: float) -> tuple[float, float] | None:
    """Return the 95% interval (Anderson-Rubin) of sum(`seen`) / `a`. `a` is sum(`moved`) without the noise's part."""
    clusters = np.bincount(case.clusters, weights=case.counts) > 0
    used = int(clusters.sum())
    if used < 2:
        return None
    sums = np.array([np.bincount(case.clusters, case.sums(part))[clusters] for part in (moved, seen)])
    products = sums @ sums.T * used / (used - 1)
    tokens = np.array([moved, seen])
    single = tokens @ tokens.T  # as if tokens were independent, because a few clusters may agree by chance
    b = float(seen.sum())
    z = t_quantile(INTERVAL_Z, used - 1)
    ends = []
    for (aa, ab), (_, bb) in (products, single):
        square, linear, constant = a * a - z * z * aa, a * b - z * z * ab, b * b - z * z * bb
        root = linear * linear - square * constant
        if square <= 0 or root < 0:
            return None
        ends += [(linear - math.sqrt(root)) / square, (linear + math.sqrt(root)) / square]
    return float(min(ends)), float(max(ends))


def _misfit(context: Float64s, ratio: Float64s) -> tuple[float, float]:
    """Return `misfit` and `misfit_z` of a PowerFit, from groups of tokens whose contexts have a similar log Z."""
    groups = np.searchsorted(np.quantile(context, (0.15, 0.3, 0.5)), context)
    counts, sums = np.bincount(groups), np.bincount(groups, ratio)
    z = np.abs(sums) / np.maximum(np.sqrt(np.bincount(groups, ratio * ratio)), 1e-300)
    means = np.abs(sums) / np.maximum(counts, 1)
    return float(means.max() / max(float(np.abs(ratio).mean()), 1e-300)), float(z.max())


@dataclass(frozen=True)
class TemperatureFit:
    """The temperature of the rollout relative to the trainer."""

    case: Case
    temperature: float
    interval: tuple[float, float] | None
    steepness: float = 1.0  # log-probs of unlikely tokens: 1 if they scale with 1 / temperature, 0 if they shift
    steepness_error: float = 0.0
    misfit: float = 0.0
    misfit_z: float = 0.0
    impossible: float = 1.0
    small: bool = False  # True if the noise is at most twice the noise of bfloat16
    certain: bool = True
    sure: bool = True
    listed: bool = True  # False if estimated only from sampled tokens in different contexts

    @property
    def refuted(self) -> bool:
        return not self.small and not self.fits and self.misfit_z > 6.0 and self.misfit > 0.5

    @property
    def fits(self) -> bool:
        """Return True if one temperature other than 1 explains the log-probs in all contexts."""
        ends = self.interval
        # in 12 random models, the misfit is at most 0.11 with a temperature, and at least 0.45 with bounded logits
        told = ends is not None and not ends[0] <= 1 <= ends[1] and abs(math.log(self.temperature)) > 0.02
        fits = self.misfit_z > 0 and (self.misfit < 0.125 or self.misfit_z < 2.5)
        steep = self.steepness > 0.25 and self.impossible < 0.02
        return told and fits and steep and len(self.case.x) >= 300

    @property
    def scaled(self) -> bool:
        """Return True if the log-probs of unlikely tokens differ in the way that a temperature predicts."""
        if self.fits:
            return True
        least = 0.25 if self.small else _MIN_STEEPNESS  # bfloat16 noise makes `steepness` too small
        return not self.refuted and self.steepness + 2 * self.steepness_error > least

    @property
    def bounded(self) -> bool:
        """Return True if a temperature fits likely tokens but not unlikely ones, as after a softcap on the logits."""
        bounded = self.refuted or (not self.scaled and not 0 < self.misfit_z < 3.0)
        return bounded and self.steepness < 0.9

    @property
    def clearly_scaled(self) -> bool:
        fits = self.fits or (0 < self.misfit_z < 5.0 and len(self.case.x) >= 3000)
        return not self.refuted and (fits or (self.certain and self.steepness - self.steepness_error > _MIN_STEEPNESS))

    @property
    def likely_sampler(self) -> str:
        """Return the side that probably sampled the tokens: "rollout", "train", or "" if unknown."""
        sampled_by, ratio = _find_sampler(self.case.calibration), self.case.calibration
        less, more = sorted((abs(ratio.z), abs(ratio.inverse_z)))
        if sampled_by or more < 3.0 or less > more / 2:
            return sampled_by
        return "rollout" if abs(ratio.z) < abs(ratio.inverse_z) else "train"


def _find_sampler(ratio: Calibration) -> str:
    fits = [side for side, z in (("rollout", ratio.z), ("train", ratio.inverse_z)) if abs(z) < _FAR_Z]
    return fits[0] if len(fits) == 1 else ""


def estimate_temperature(case: Case) -> TemperatureFit | None:
    """Estimate the rollout's temperature relative to the trainer's, or return `None` if no difference is visible."""
    if len(case.x) < 200 or case.column_correlation < UNRELATED_CORRELATION:
        return None
    read, same = estimate_scale(case), compare_same_contexts(case)
    if read is not None:
        return TemperatureFit(case, *read)
    if same is not None and same[2] > SAME_SURE_EXPLAINED:
        return TemperatureFit(case, 1 / same[0], _invert(same[1]))
    truncated = "truncated_sampling" in case.explained
    fitted = None if truncated else _fit_case(case)
    known = TemperatureFit(case, 1.0, None, small=case.noise < 0.044, listed=False)
    if fitted is not None:
        known = replace(
            known, interval=_invert(fitted.interval), misfit=fitted.misfit, misfit_z=fitted.misfit_z,
            impossible=fitted.impossible,
        )  # fmt: skip
        known = _at_temperature(known, 1 / fitted.exponent)
        if known.fits:
            return known
    likely, likely_z, unlikely, unlikely_z = case.coherence
    if likely * unlikely >= 0 or min(abs(likely_z), abs(unlikely_z)) < 4:
        return None
    if abs(likely) < 0.75 or abs(unlikely) < (0.4 if truncated else 0.6):
        return None
    sure, colder, interval = min(abs(likely), abs(unlikely)) > 0.85, likely < 0, known.interval
    if not sure and case.drift_correlation[0] > 0.45:
        return None  # learning sharpens a policy as a lower temperature does
    if fitted is None or (fitted.exponent > 1) != colder:
        interval, exponents = None, _exponents(case)
        estimate = 1 / float(np.quantile(exponents, 0.99 if colder else 0.01)) if len(exponents) >= 20 else 0.0
        if estimate <= 0:
            return None  # too few unlikely tokens, or tokens that are likely on one side only
        known = _at_temperature(known, estimate)
    elif interval is not None:  # the temperature cannot be on the other side of 1
        interval = (interval[0], min(interval[1], 1.0)) if colder else (max(interval[0], 1.0), interval[1])
    certain = float((case.t > -0.5).mean()) > 0.1
    return replace(known, interval=interval, certain=certain, sure=sure and not truncated)


def _invert(interval: tuple[float, float] | None) -> tuple[float, float] | None:
    return None if interval is None else (1 / interval[1], 1 / interval[0])


@cached_on_case
def _fit_case(case: Case) -> PowerFit | None:
    ratio = case.calibration
    by = _find_sampler(ratio)
    if not by and abs(ratio.z) >= _FAR_Z:
        return None
    one = None if by == "train" else fit_power(case.t, case.r, case)
    other = None if by == "rollout" else fit_power(case.r, case.t, case)
    if other is not None:
        other = replace(other, exponent=1 / other.exponent, interval=_invert(other.interval))
    if one is None or other is None:
        return one or other
    if one.interval is None or other.interval is None:
        return one
    return replace(  # either side may be the sampler, so the interval covers both cases
        one,
        interval=(min(one.interval[0], other.interval[0]), max(one.interval[1], other.interval[1])),
        misfit=min(one.misfit, other.misfit),
        misfit_z=min(one.misfit_z, other.misfit_z),
        impossible=min(one.impossible, other.impossible),
    )


def _at_temperature(found: TemperatureFit, temperature: float) -> TemperatureFit:
    """Return a copy of the fit with another `temperature`, and with the `steepness` that this temperature gives."""
    case, expected = found.case, 1 / temperature - 1
    chosen = (case.t < _TAIL_RANGE[1]) & (case.t > _TAIL_RANGE[0])
    t, r = case.t[chosen], case.r[chosen]
    if len(t) < 10 or t.std() == 0 or expected == 0:
        return replace(found, temperature=temperature, steepness=0.0, steepness_error=math.inf)
    across = t - t.mean()
    spread = float(across @ across)
    slope = float(across @ r) / spread
    error = float(np.sqrt(np.mean((r - r.mean() - slope * across) ** 2) / spread)) / abs(expected)
    return replace(found, temperature=temperature, steepness=(slope - 1) / expected, steepness_error=error)


def _exponents(case: Case) -> Float64s:
    """Return one estimate of the exponent b per unlikely token: logit(rollout) / logit(train).

    b = 2 means that the rollout's probabilities are proportional to the squares of the trainer's probabilities. The
    estimates farthest from 1 are the most accurate. Top-p and top-k sampling change the estimates little.
    """
    p, q = case.t[case.rare], np.minimum(case.r[case.rare], -1e-9)
    return (q - np.log(-np.expm1(q))) / (p - np.log(-np.expm1(p)))


SAME_SURE_EXPLAINED = 0.95
"""A temperature explains at least this share of the variance of log ratios within contexts. Penalties explain less."""
_TAIL_SPREAD, _TAIL_MEAN = 0.5, -1.0
"""Assumed log(p / threshold) of tokens that a truncation removes: mean -1, variance 1 (2 * _TAIL_SPREAD)."""


@cached_on_case
def compare_same_contexts(case: Case) -> tuple[float, tuple[float, float], float] | None:
    """Fit (rollout log-prob) = b * (train log-prob) + c, with a separate c for each context (prompt and prefix).

    Return b, its 95% interval, and the share of the log ratio's variance that it explains, or `None` if b may be 1.
    """
    ids = case.rows.extra_columns.get("token_ids")
    if ids is None:
        return None
    offsets, lengths = case.rows.segments.offsets, case.rows.segments.lengths
    context, used = np.full(len(case.sound), -1), 0
    rows, key, place = np.arange(case.size), case.clusters, 0
    while True:
        rows, key = rows[lengths[rows] > place], key[lengths[rows] > place]
        _, key, counts = np.unique(key, return_inverse=True, return_counts=True)
        shared = counts[key] > 1
        rows, key = rows[shared], key[shared]
        if not len(rows):
            break
        tokens = offsets[rows] + place
        context[tokens] = used + key
        used += len(counts)
        given = ~np.isnan(ids[tokens])  # without a token id, the context of the next token is unknown
        rows, key, own = rows[given], key[given], ids[tokens[given]].astype(np.int64)
        key = key * (int(own.max(initial=0)) + 1) + own
        place += 1
    known = context[case.index] >= 0
    _, where, counts = np.unique(context[case.index][known], return_inverse=True, return_counts=True)
    if len(where) < 40 or len(counts) < 2:
        return None
    t, r = (side - (np.bincount(where, side) / counts)[where] for side in (case.t[known], case.r[known]))
    whole, apart = float(t @ t), float((r - t) @ (r - t))
    if not (whole > 0 and apart > 0):
        return None
    b = float(t @ r) / whole
    left = r - b * t
    error = float(np.sqrt((np.bincount(where, t * left) ** 2).sum() * len(counts) / (len(counts) - 1))) / whole
    half, explained = error * t_quantile(INTERVAL_Z, len(counts) - 1), 1 - float(left @ left) / apart
    related = float(left @ left) < 0.1 * float(r @ r)  # if not, one side may contain another token's log-prob
    changed = related and b > half and abs(b - 1) > max(2 * half, 0.03)
    return (b, (b - half, b + half), explained) if changed and explained > 0.6 else None


def estimate_kept_mass(case: Case, b: float) -> tuple[Float64s, Float64s]:
    """Estimate the probability mass that a truncation such as top-p keeps, after a temperature of 1 / `b`.

    Return the kept mass per token [N], and estimates of top-p from several groups of tokens.

    In a context, p^b / q is the same for all kept tokens (p: trainer, q: rollout). Tokens with a similar p^b / q form a
    group. The mean of p / q in a group estimates the trainer's mass of its kept tokens. If the entropy was recorded, it
    gives the mean log-prob of the removed tokens. Estimates of top-p subtract half of the smallest kept probability.
    """
    entropy = case.token_column("entropy")
    order = np.argsort((b * case.t - case.r) / (b - 1), kind="stable")
    mass, flat = np.ones(len(order)), []
    for part in np.array_split(order, int(np.clip(len(order) // 300, 1, 24))):
        t, r = case.t[part], case.r[part]
        ratio = np.exp(t - r)
        cut = 1 - float(ratio.mean())
        if cut <= 0:
            continue
        least = float(np.quantile(t, 0.02))
        tail = least + _TAIL_MEAN
        if entropy is not None and np.isfinite(entropy[part]).all():
            tail = min(-(float(entropy[part].mean()) + float((ratio * t).mean())) / cut, least)
        own = float(np.exp(b * t - r).mean())
        mass[part] = own / (own + cut * math.exp((b - 1) * tail + (b - 1) ** 2 * _TAIL_SPREAD))
        if float(np.exp(-r).mean()) > 4.0:
            flat.append(float(mass[part[0]]) - float(np.exp(np.quantile(r, 0.02))) / 2)
    return mass, np.array(flat)
