"""What the k most likely tokens of both sides tell at each place, where a dump has them: a scale, and where it was cut.

From sampled tokens alone a temperature and a truncation are estimated; from distributions they are read.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s, Ints
from mismatchctl.diagnose.case import Case, once
from mismatchctl.measure.distributions import OTHERS, ROLLOUT_TOP, other

COLUMNS = (ROLLOUT_TOP, *OTHERS)
_LEAST_TOKENS, _GONE = 100, -1e3
"""Places that it takes; and the log-prob below which a token could not be chosen."""
_EXPLAINED, _Z, _LEAST_CHANGE = 0.9, 4.0, 0.003
_OFTEN, _MOST, _SLACK = 0.005, 0.99, 0.02


@dataclass(frozen=True)
class LogitScale:
    """One factor between the log-probs of the rollout and of the trainer, relative to the most likely token.

    Attributes:
        temperature: of the rollout relative to the trainer, 1 / factor.
        interval: 95 %, by the scatter between clusters.
        explained: share of the squared difference of both that the factor accounts for.
    """

    temperature: float
    interval: tuple[float, float]
    explained: float


@dataclass(frozen=True)
class Cut:
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


def _lists(case: Case) -> tuple[Float64s, Float64s, Ints] | None:
    """Log-probs of both sides [N, k] at the sound tokens that have them, and the sequences of these [N]."""
    a, b = case.rows.tokens.get(ROLLOUT_TOP), other(case.rows.tokens)
    if a is None or b is None or a.shape != b.shape or a.ndim != 2:
        return None
    a, b = a[case.index].astype(np.float64), b[case.index].astype(np.float64)
    known = ~(np.isnan(a).any(axis=1) | np.isnan(b).any(axis=1))
    return (a[known], b[known], case.where[known]) if known.sum() >= _LEAST_TOKENS else None


@once
def scale(case: Case) -> LogitScale | None:
    """The factor between both sides, where it is not 1 and little else is between them."""
    lists = _lists(case)
    if lists is None:
        return None
    a, b, where = lists
    there = (a > _GONE) & (b > _GONE)
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
    if explained < _EXPLAINED or abs(factor - 1) < max(_Z * error, _LEAST_CHANGE):
        return None
    return LogitScale(1 / factor, (1 / (factor + 2 * error), 1 / max(factor - 2 * error, 1e-9)), explained)


@once
def cut(case: Case) -> Cut | None:
    """The truncation of the rollout, where it gives no probability to tokens that the trainer could choose."""
    lists = _lists(case)
    if lists is None:
        return None
    a, b, _ = lists
    kept, gone = a > _GONE, (a <= _GONE) & (b > _GONE)
    cut_here = gone.any(axis=1) & kept.any(axis=1)
    if cut_here.mean() < _OFTEN:
        return None
    a, b, kept, gone = a[cut_here], b[cut_here], kept[cut_here], gone[cut_here]
    mass = float(np.where(kept, np.exp(b), 0.0).sum(axis=1).mean())
    k = _least_kept(a, kept)
    if k is not None:
        return Cut(f"top-k of {k}, as many as each of its lists holds", "top_k", k, (k, k), mass)
    contradiction, name, low, high = _nucleus(b, kept)
    if contradiction > _SLACK:  # else top-p: of min-p one end alone is sharp, as any of those cut off may be listed
        contradiction, name, low, high = _floor(a, b, kept, gone)
    if contradiction > _SLACK:
        return Cut("by a rule that is neither top-k, top-p nor min-p", "", mass, (mass, mass), mass)
    low, high = sorted((low, high))
    said = f"{name.replace('_', '-')} between {low:.3g} and {high:.3g}, which every list agrees with"
    return Cut(said, name, (low + high) / 2, (low, high), mass)


def _least_kept(a: Float64s, kept: Bools) -> int | None:
    """Top-k: so many are kept, or more where those after are as likely as the last of them, as in bfloat16 some are."""
    counts = kept.sum(axis=1)
    k = int(np.quantile(counts, _OFTEN))
    ranked = -np.sort(-a, axis=1)
    tied = (counts >= k) & (ranked[:, k - 1] == np.take_along_axis(ranked, counts[:, None] - 1, axis=1)[:, 0])
    return k if tied.mean() > _MOST else None


def _nucleus(b: Float64s, kept: Bools) -> tuple[float, str, float, float]:
    """Top-p: below what the kept tokens hold together, not below what they hold without the least of them."""
    p = np.where(kept, np.exp(b), 0.0)
    whole = p.sum(axis=1)
    without = whole - np.where(kept, p, np.inf).min(axis=1)
    low, high = float(np.quantile(without, 1 - _OFTEN)), float(np.quantile(whole, _OFTEN))
    return low - high, "top_p", low, high


def _floor(a: Float64s, b: Float64s, kept: Bools, gone: Bools) -> tuple[float, str, float, float]:
    """Min-p: between what those cut off have at most, and the kept at least, of the most likely token's probability.

    The kept are told by the rollout itself: their ratios are what was decided by.
    """
    least = np.where(kept, a, np.inf).min(axis=1) - np.where(kept, a, -np.inf).max(axis=1)
    most = np.where(gone, b, -np.inf).max(axis=1) - np.where(kept, b, -np.inf).max(axis=1)
    low, high = float(np.exp(np.quantile(most, 1 - _OFTEN))), float(np.exp(np.quantile(least, _OFTEN)))
    return (low - high) / max(high, 1e-9), "min_p", low, high
