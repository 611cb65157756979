"""The definition of a metric: quantity, formula, interval scale and aggregation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.bins import fold_signs, magnitude_edges
from mismatchctl.measure.sums import TAIL_VALUES, PairSums

_NORMAL = 1.6448536  # quantile of the normal distribution at 95 %
_FEW_CLUSTERS, _FEW_SHARE = 4.0, 0.25  # clusters that count in effect, and as a share of all: fewer are too few
_MEAN_SQUARE_ERROR = 0.1  # squared relative error of a mean square of weights, were they log-normal


@dataclass(frozen=True)
class IntervalScale:
    """Where an interval is symmetric.

    Attributes:
        to: there from a value.
        slope: by how much a value moves it.
        back: a value from there.
        ess: of metrics of weights, the effective share of them that a value stands for.
        covers: what intervals with the status `heavy_tail` were seen to cover, on dumps that the rule was not made on.
    """

    to: Callable[[Any], Any]
    slope: Callable[[Any], Any]
    back: Callable[[Any], Any]
    ess: Callable[[Any], Any] | None = None
    covers: float = 0.85


def _log_odds(value: Any) -> Any:
    return np.log(value) - np.log1p(-value)


def _log_odds_slope(value: Any) -> Any:
    return 1 / (value * (1 - value))


def _inverse_log_odds(place: Any) -> Any:
    return 1 / (1 + np.exp(-place))


LINEAR_SCALE = IntervalScale(lambda v: v, lambda v: np.ones_like(v), lambda y: y)
LOG_SCALE = IntervalScale(np.log, lambda v: 1 / v, np.exp)
"""Of positive means."""
ODDS_SCALE = IntervalScale(_log_odds, _log_odds_slope, _inverse_log_odds)
"""Of shares."""
ESS_SCALE = IntervalScale(_log_odds, _log_odds_slope, _inverse_log_odds, ess=lambda v: v, covers=0.7)
CHI2_SCALE = IntervalScale(
    np.log1p, lambda v: 1 / (1 + v), np.expm1, ess=lambda v: 1 / (1 + np.maximum(v, 0)), covers=0.7
)


def compute_intervals(
    scale: IntervalScale, value: Float64s, se: Float64s, effective: Float64s, clusters: Float64s
) -> tuple[Float64s, Float64s]:
    """The 90 % intervals [G, 2] of values with their standard errors [G], and what those of a heavy tail cover [G].

    Args:
        scale: of the metric.
        value: NaN where undefined.
        se: over clusters; where it is 0 or unknown, there is no interval (NaN).
        effective: how many clusters count in effect.
        clusters: how many there are.
    """
    with np.errstate(all="ignore"):
        known = (se > 0) & (clusters >= 2)
        width = t_quantile(_NORMAL, np.maximum(effective - 1, 1)) * se * np.abs(scale.slope(value))
        centre = scale.to(value)
        ends = np.stack([scale.back(centre - width), scale.back(centre + width)], axis=-1)
        heavy = is_heavy_tailed(effective, clusters)
        if scale.ess is not None:
            heavy |= (scale.ess(value) ** -4.0 - 1) / clusters > _MEAN_SQUARE_ERROR
    ends[~known | ~np.isfinite(ends).all(axis=-1)] = np.nan
    return ends, np.where(known & heavy, scale.covers, np.nan)


def is_heavy_tailed(effective: Any, clusters: Any) -> Any:
    """Whether so few clusters count in effect, of so many, that no interval covers what it claims."""
    return effective < np.minimum(_FEW_CLUSTERS, _FEW_SHARE * clusters)


def t_quantile(normal: float, degrees: Any) -> Any:
    """The quantile of Student's t where the normal distribution has `normal` (Cornish and Fisher 1937)."""
    cube, fifth = normal**3, normal**5
    with np.errstate(divide="ignore"):
        inverse = 1 / np.maximum(degrees, 0.0)
    return (
        normal
        + inverse * (cube + normal) / 4
        + inverse**2 * (5 * fifth + 16 * cube + 3 * normal) / 96
        + inverse**3 * (3 * normal**7 + 19 * fifth + 17 * cube - 15 * normal) / 384
    )


VALID_TOKENS = "valid tokens"
KEPT_TOKENS = "tokens that rejection leaves"
VALID_SEQUENCES = "sequences with a valid token"

RAW_WEIGHTS, BOUNDED_WEIGHTS, FINAL_WEIGHTS = "weights before their bound", "weights after their bound", "final weights"
ALL_GATES = "all gates"


class Quantity(str, Enum):
    """What is measured on a token or a sequence; x is the log ratio of the pair that the basis names."""

    K1 = "-x"
    K3 = "exp(x) - 1 - x"
    ABS = "|x|"
    RATIO = "exp(x)"
    SQUARED_RATIO = "exp(x)^2 - 1"
    SQUARED_PRODUCT = "exp(sum of x)^2 - 1"
    TRAIN_LOG_PPL = "log-perplexity under train"
    TRAIN_PPL = "perplexity under train"
    ROLLOUT_LOG_PPL = "log-perplexity under rollout"
    ROLLOUT_PPL = "perplexity under rollout"
    LOG_PPL_DIFF = "log-perplexity under train minus under rollout"
    LOG_PPL_ABS_DIFF = "distance of the two log-perplexities"
    PPL_RATIO = "perplexity under train over under rollout"
    PROB_DIFF = "|exp(train) - exp(rollout)|"
    PROBS = "the two probabilities"
    WEIGHT = "weight"
    ABOVE = "whether the weight exceeds the upper bound"
    BELOW = "whether the weight is below the lower bound"
    REJECTED = "whether it is rejected"
    CATASTROPHIC = "whether the veto's bound is undercut"
    LOSS = "policy loss"
    CLIPPED = "whether PPO's clip decides the loss"


@dataclass(frozen=True)
class Measure:
    """Quantity, mask, reduction and basis of a number.

    Attributes:
        quantity: what is measured.
        over: which tokens or sequences it is taken over.
        reduction: how they become one number.
        basis: what it looks at: a pair of policies, or weights at a stage.
    """

    quantity: Quantity
    over: str = VALID_TOKENS
    reduction: str = "mean"
    basis: str = "train/rollout"

    def is_like(self, other: Measure) -> bool:
        """Whether both are the same kind of statistic (mean, max, ...) of the same quantity of the same policies."""
        policies = self.basis == other.basis or "/" not in self.basis + other.basis
        return policies and self.quantity is other.quantity and self._statistic == other._statistic

    def differences(self, other: Measure) -> list[str]:
        """In what this one differs from another: nothing, when both are the same number."""
        return [
            f"{field.name}: {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    @property
    def _statistic(self) -> str:
        return self.reduction.split()[0]


Number = Any
"""An array of floats, one per cell, or of complex ones while a gradient is taken: formulas use arithmetic, np.sqrt,
np.exp and np.where only, never `if`."""


class Totals(Protocol):
    """Sums of columns by name; a name is looked up with the pair's or correction's prefix first."""

    def __getitem__(self, name: str) -> Number: ...


NO_TOKEN = "no valid token"


def value_status(value: float, undefined: str, *, empty: bool) -> str:
    """Why a value is not finite, in a cell that holds no token if it is `empty`; else ok."""
    if math.isfinite(value):
        return "ok"
    if empty:
        return NO_TOKEN
    return "overflow: not a finite number" if math.isinf(value) else undefined


@dataclass(frozen=True)
class Estimate:
    """A metric in some cells: its values with their uncertainty, and the reason where there is none.

    Attributes:
        value: [G]; not finite where it is undefined.
        undefined: why it can be.
        empty: whether the cell holds no token [G], which then is why.
        se: standard errors [G], NaN where there is none.
        interval: [G, 2], NaN where there is none.
        covers: what the interval was seen to cover in place of 90 %, where its tail is heavy [G]; else NaN.
    """

    value: Float64s
    undefined: str
    empty: Bools
    se: Float64s | None = None
    interval: Float64s | None = None
    covers: Float64s | None = None

    @classmethod
    def joined(cls, parts: Sequence[Estimate]) -> Estimate:
        """The cells of all parts, one after the other."""
        errors = [part.se for part in parts if part.se is not None]
        intervals = [part.interval for part in parts if part.interval is not None]
        covers = [part.covers for part in parts if part.covers is not None]
        return cls(
            np.concatenate([part.value for part in parts]),
            parts[0].undefined,
            np.concatenate([part.empty for part in parts]),
            np.concatenate(errors) if errors else None,
            np.concatenate(intervals) if intervals else None,
            np.concatenate(covers) if covers else None,
        )

    def covers_at(self, cell: int) -> float | None:
        """What the interval in one cell covers where its tail is heavy."""
        covers = math.nan if self.covers is None else float(self.covers[cell])
        return covers if math.isfinite(covers) and math.isfinite(self.value[cell]) else None

    def status(self, cell: int) -> str:
        """Whether the value in one cell is ok, or why it is not there."""
        return value_status(float(self.value[cell]), self.undefined, empty=bool(self.empty[cell]))

    def at(self, cell: int) -> tuple[float | None, float | None, tuple[float, float] | None, str]:
        """Value, standard error, interval and status in one cell; None for what is undefined."""
        value, status = float(self.value[cell]), self.status(cell)
        if status != "ok":
            return None, None, None, status
        error = math.nan if self.se is None else float(self.se[cell])
        low, high = (math.nan, math.nan) if self.interval is None else self.interval[cell].tolist()
        return (
            value, error if math.isfinite(error) else None, (low, high) if math.isfinite(low) else None, status,
        )  # fmt: skip


@dataclass(frozen=True)
class MetricTails:
    """What metrics read beside sums: the extremes by name, and the histograms of the pair."""

    maxima: Mapping[str, float]
    pair: PairSums | None


@dataclass(frozen=True)
class Metric:
    """One metric of the registry. Exactly one of `formula`, `extreme`, `quantile` and `tail` computes it.

    Attributes:
        key: stable name in JSON, tables and flags.
        title: a few words for people.
        unit: "nats", "fraction", "ratio", "tokens", ...
        definition: the formula in plain text; x is the log ratio train minus rollout of a token, w = exp(x).
        meaning: what a reader should take from the number.
        source: where the definition comes from.
        undefined: why it can be undefined, for the status.
        formula: a function of sums; its standard error follows by the delta method over clusters.
        uncertain: whether a standard error is meaningful (not for counts).
        extreme: a function of the maxima.
        quantile: the share of tokens below it.
        tail: a function of sums and tails, without a standard error.
        better: which way is good: "low", "high", "one", or "" for neither.
        own_scale: where its interval is symmetric, if not where its unit says.
        measure: the definition in parts, where others give the same or a similar number another name.
    """

    key: str
    title: str
    unit: str
    definition: str
    meaning: str
    source: str = "mismatchctl"
    undefined: str = "undefined"
    formula: Callable[[Totals], Number] | None = None
    uncertain: bool = True
    extreme: Callable[[Mapping[str, Any]], Any] | None = None
    quantile: float | None = None
    tail: Callable[[Totals, MetricTails], float] | None = None
    better: Literal["low", "high", "one", ""] = "low"
    measure: Measure | None = None
    own_scale: IntervalScale | None = None

    @property
    def scale(self) -> IntervalScale:
        """Where its interval is symmetric."""
        return self.own_scale or (ODDS_SCALE if self.unit == "fraction" else LINEAR_SCALE)


AGGREGATIONS = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean")
"""How a loss per token becomes one number, as configurations name it."""
AGGREGATION_SUFFIXES = dict(zip(AGGREGATIONS, ("", "_seq_sum", "_seq_mean"), strict=True))
"""What the key of a metric ends in under each."""
AGGREGATION_TEXTS = {
    "token-mean": "mean over tokens",
    "seq-mean-token-sum": "sum over tokens of a sequence, mean over sequences with a token",
    "seq-mean-token-mean": "mean over tokens of a sequence, mean over sequences with a token",
}
"""The same in words."""


def aggregation_formula(name: str, tokens: str, sequences: str, aggregation: str) -> Callable[[Totals], Number]:
    """A sum over tokens aggregated: of column `name`, of which `name_mean` holds the means of sequences."""
    if aggregation == "token-mean":
        return lambda t: t[name] / t[tokens]
    column = name if aggregation == "seq-mean-token-sum" else f"{name}_mean"
    return lambda t: t[column] / t[sequences]


RELATIVE_TOLERANCES: dict[str, float] = {
    **dict.fromkeys(("k1", "k2", "k3", "abs_diff_mean", "abs_diff_max", "prob_diff_mean", "prob_diff_max"), 1e-10),
    **dict.fromkeys(("rollout_ppl", "rollout_log_ppl", "train_ppl", "train_log_ppl", "ppl_ratio"), 1e-10),
    **dict.fromkeys(("log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_min", "log_ppl_diff_max"), 1e-10),
    **dict.fromkeys(("ratio_mean", "ess_token", "ess_sequence"), 1e-10),
    **dict.fromkeys(("chi2_token", "chi2_sequence", "prob_diff_std", "prob_corr", "autocorr_lag1", "inflation"), 1e-6),
    **dict.fromkeys(("abs_diff_p50", "abs_diff_p90", "abs_diff_p99", "abs_diff_p999"), 0.01),
}
"""Relative error at most, of log ratios from 1e-12 to 1e2 in float64: sums are exact to rounding, differences of sums
lose digits, quantiles are read from a histogram."""
ABSOLUTE_TOLERANCE = 1e-12
"""Below this a metric that is a difference of sums near 1 has no digits."""
EXACT_METRICS = ("tokens", "sequences", "empty_sequences", "prompts", "bitwise_all", "bitwise_share")
"""Counts."""


INTERVAL_LEVEL = 0.90
"""Coverage of the intervals of quantiles."""
COVERAGE, LOWEST_COVERAGE = 0.85, 0.65
"""What the intervals of quantiles with the status `heavy_tail` were seen to cover, and of those with next to nothing
beyond them: docs/gate.md, Intervals."""
_FEW_TAIL_TOKENS, _NO_TAIL_TOKENS = 10, 3  # tokens beyond a quantile: with fewer, it is hardly known, or not at all
_ROUNDING = 1e-9  # of a number of tokens


class Quantile(NamedTuple):
    """A quantile, its interval, and what that covers instead where the tail is heavy; NaN for what there is not."""

    value: float
    interval: tuple[float, float]
    covers: float


NO_QUANTILE = Quantile(np.nan, (np.nan, np.nan), np.nan)


@lru_cache(maxsize=1)
def _bin_middles() -> Float64s:
    edges: Float64s = magnitude_edges()
    middles: Float64s = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = 0.0, edges[-2]
    return middles


def compute_quantiles(pair: PairSums, shares: Sequence[float], largest: float, *, sure: bool = True) -> list[Quantile]:
    """Quantiles of |log ratio| over tokens, and the interval of each from how its share scatters over clusters.

    Args:
        pair: whose histogram is read.
        shares: of the tokens, below each quantile.
        largest: the largest |log ratio|, which no quantile exceeds.
        sure: whether intervals are wanted.

    Returns:
        For each share the quantile, within 0.8 % of its value (NaN when there is no token), and its interval (NaN with
        fewer than two buckets of clusters), which has a heavy tail where few tokens or clusters lie beyond it.
    """
    filled, counts = pair.histogram.by_bucket() if sure else _merge_buckets(pair)
    if not len(filled):
        return [NO_QUANTILE] * len(shares)
    middles, together = np.minimum(_bin_middles()[filled], largest), np.cumsum(counts.sum(axis=0))
    reached = _first_bin_reached(together, np.array(shares))
    low = high = covers = np.full(len(shares), np.nan)
    if len(counts) >= 2:
        ends, covers = _tail_intervals(counts, reached, 1 - np.array(shares))
        low, high = (middles[_first_bin_reached(together, 1 - tail)] for tail in (ends[:, 1], ends[:, 0]))
        covers = np.where(low < high, covers, np.nan)
    found = zip(*(each.tolist() for each in (middles[reached], low, high, covers)), strict=True)
    return [Quantile(value, (lower, upper), covered) for value, lower, upper, covered in found]


def _first_bin_reached(together: Float64s, shares: Float64s) -> Ints:
    """The first bin at which so many of the tokens are reached [shares], given how many are up to each bin."""
    wanted = np.ceil(together[-1] * shares * (1 - _ROUNDING))  # counts are whole
    found: Ints = np.minimum(np.searchsorted(together, wanted), len(together) - 1)
    return found


def _tail_intervals(counts: Float64s, reached: Ints, tails: Float64s) -> tuple[Float64s, Float64s]:
    """Intervals of the shares beyond quantiles [shares, 2], and what they cover where few tokens or buckets count.

    Args:
        counts: tokens by bucket and bin [buckets, bins].
        reached: bin of each quantile [shares].
        tails: share of the tokens beyond each [shares].
    """
    sizes = counts.sum(axis=1)
    total, clusters = sizes.sum(), np.full(len(tails), float(len(sizes)))
    above = np.stack([counts[:, own + 1 :].sum(axis=1) for own in reached.tolist()])
    inside = counts[:, reached].T
    part = (tails * total - above.sum(axis=1)) / inside.sum(axis=1)  # of the bin, what counts as beyond
    apart = (above + np.clip(part, 0.0, 1.0)[:, None] * inside - tails[:, None] * sizes) / total
    squares = np.sum(apart**2, axis=1)
    with np.errstate(all="ignore"):
        effective = squares**2 / np.sum(apart**4, axis=1)
    ends, covers = compute_intervals(
        ODDS_SCALE, tails, np.sqrt(squares * clusters / (clusters - 1)), effective, clusters
    )
    ends = np.where(np.isfinite(ends), ends, tails[:, None])  # nothing scatters
    few = np.isfinite(covers) | (total * tails < _FEW_TAIL_TOKENS)
    return ends, np.select([total * tails < _NO_TAIL_TOKENS, few], [LOWEST_COVERAGE, COVERAGE], np.nan)


def _merge_buckets(pair: PairSums) -> tuple[Ints, Float64s]:
    """As `Histogram.by_bucket`, with all buckets as one."""
    tokens = fold_signs(pair.histogram.by_bin()[0])
    filled = np.flatnonzero(tokens)
    return filled, tokens[None, filled].astype(np.float64)


def worst_share(pair: PairSums, tokens: float) -> float:
    """Share of all K3 that the `tokens` share of tokens with the largest K3 holds; NaN when K3 is 0 or overflows."""
    tokens_of, k3 = pair.histogram.by_bin()
    total = k3.sum()
    if not 0 < total < np.inf:
        return float("nan")
    filled = np.flatnonzero(tokens_of)
    counts, k3 = tokens_of[filled].astype(np.float64), k3[filled]
    order = np.argsort(-k3 / counts, kind="stable")
    counts, k3 = counts[order], k3[order]
    before = np.cumsum(counts) - counts
    part = np.clip((tokens * counts.sum() - before) / counts, 0, 1)
    return float((k3 * part).sum() / total)


_SAFE_LOG_FACTOR = 40.0
"""Log of a factor of which 16 still multiply to a normal float."""


def tail_length(count: int) -> int:
    """How many of `count` ratios form the tail: min(0.2 S, 3 sqrt S), and no more than are kept."""
    return min(math.ceil(min(count / 5, 3 * math.sqrt(count))), TAIL_VALUES - 1)


def khat_limit(count: int) -> float:
    """The k-hat up to which a mean of `count` ratios can be trusted: min(1 - 1/log10 S, 0.7)."""
    return min(1 - 1 / math.log10(count), 0.7) if count > 1 else math.nan


def khat(largest_log_ratios: Float64s, count: int) -> float:
    """Shape of the generalized Pareto distribution fitted to the largest ratios.

    Args:
        largest_log_ratios: ascending; at least the `tail_length(count) + 1` largest of all.
        count: how many ratios there are in all.

    Returns:
        k-hat; NaN where fewer than five ratios lie above the cut (too few, or all equal).

    Source: Zhang and Stephens 2009 for the fit, PSIS for the tail and the weak prior on k.
    """
    length = tail_length(count)
    if len(largest_log_ratios) <= length or length < 5:
        return math.nan
    shifted = largest_log_ratios - largest_log_ratios[-1]
    cut = max(shifted[-length - 1], math.log(np.finfo(np.float64).tiny))
    tail = shifted[-length:]
    tail = tail[tail > cut]
    if len(tail) < 5:
        return math.nan
    return _generalized_pareto_shape(np.exp(cut) * np.expm1(tail - cut))


def _generalized_pareto_shape(excess: Float64s) -> float:
    """Shape of a generalized Pareto distribution from its ascending excesses, with the prior of PSIS."""
    n = len(excess)
    m = 30 + int(math.sqrt(n))
    grid = 1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))
    grid = grid / (3 * excess[int(n / 4 + 0.5) - 1]) + 1 / excess[-1]
    with np.errstate(all="ignore"):
        shape = _mean_logs(grid, excess)
        likelihood = n * (np.log(-grid / shape) - shape - 1)
        weight = 1 / np.exp(likelihood - likelihood[:, None]).sum(axis=1)
    usable = weight >= 10 * np.finfo(np.float64).eps
    weight, grid = weight[usable] / weight[usable].sum(), grid[usable]
    posterior = float(np.log1p(-np.sum(grid * weight) * excess).mean())
    return (n * posterior + 10 * 0.5) / (n + 10)


def _mean_logs(slopes: Float64s, excess: Float64s) -> Float64s:
    """Mean of log(1 - slope * excess) over the excesses, for each slope: a logarithm takes longer than 16 products.

    The largest excess is furthest from a factor of 1; where 16 like it would leave the range of floats,
    each has a logarithm of its own.
    """
    if not (np.abs(np.log(1 - slopes * excess[-1])) < _SAFE_LOG_FACTOR).all():
        return np.log1p(-slopes[:, None] * excess).mean(axis=1)  # type: ignore[no-any-return]
    apart = np.append(excess, np.zeros(-len(excess) % 16)).reshape(16, -1)
    product, factor = 1 - slopes[:, None] * apart[0], np.empty((len(slopes), apart.shape[1]))
    for own in apart[1:]:
        np.multiply(slopes[:, None], own, out=factor)
        np.subtract(1, factor, out=factor)
        product *= factor
    means: Float64s = np.log(product).sum(axis=1) / len(excess)
    return means
