"""The definition of a metric, and the computation of intervals, quantiles and tail statistics."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import Enum
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.core.bins import fold_signs, magnitude_edges
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.io.yaml import read_data
from mismatchctl.measure.sums import TAIL_VALUES, PairSums

# the tail is heavy if the effective number of clusters is below both limits: a number, and a share of all clusters
_FEW_CLUSTERS, _FEW_SHARE = 4.0, 0.25
_MEAN_SQUARE_ERROR = 0.1  # or if the squared relative error of the mean of w^2 is larger (for log-normal w)


@dataclass(frozen=True)
class IntervalScale:
    """A scale that makes the confidence intervals of a metric symmetric, such as a logarithmic scale."""

    transform: Callable[[Any], Any]  # converts a value to the scale
    slope: Callable[[Any], Any]  # derivative of `transform`
    inverse: Callable[[Any], Any]  # converts back from the scale
    ess: Callable[[Any], Any] | None = None  # for metrics of weights: converts the metric to an ESS (0 to 1)
    covers: float = 0.9  # share of `heavy_tail` intervals that contain the true value, on held-out dumps


def _log_odds(value: Any) -> Any:
    return np.log(value) - np.log1p(-value)


def _log_odds_slope(value: Any) -> Any:
    return 1 / (value * (1 - value))


def _inverse_log_odds(place: Any) -> Any:
    return 1 / (1 + np.exp(-place))


LINEAR_SCALE = IntervalScale(lambda v: v, lambda v: np.ones_like(v), lambda y: y)
LOG_SCALE = IntervalScale(np.log, lambda v: 1 / v, np.exp)
"""Intervals of positive means are computed for their logarithm."""
ODDS_SCALE = IntervalScale(_log_odds, _log_odds_slope, _inverse_log_odds)
"""Intervals of shares are computed for their log odds."""
ESS_SCALE = IntervalScale(_log_odds, _log_odds_slope, _inverse_log_odds, ess=lambda v: v, covers=0.75)
CHI2_SCALE = IntervalScale(
    np.log1p, lambda v: 1 / (1 + v), np.expm1, ess=lambda v: 1 / (1 + np.maximum(v, 0)), covers=0.75
)


_SCALES = {"": None, "log": LOG_SCALE, "ess": ESS_SCALE, "chi2": CHI2_SCALE}


def compute_intervals(
    scale: IntervalScale, value: Float64s, se: Float64s, effective: Float64s, clusters: Float64s
) -> tuple[Float64s, Float64s]:
    """Return the 95% intervals, and their actual coverage (`scale.covers`) if a heavy tail reduces it, else NaN."""
    with np.errstate(all="ignore"):
        known = (se > 0) & (clusters >= 2)
        width = t_quantile(INTERVAL_Z, np.maximum(effective - 1, 1)) * se * np.abs(scale.slope(value))
        centre = scale.transform(value)
        ends = np.stack([scale.inverse(centre - width), scale.inverse(centre + width)], axis=-1)
        heavy = effective < np.minimum(_FEW_CLUSTERS, _FEW_SHARE * clusters)  # a few clusters dominate the error
        if scale.ess is not None:
            heavy |= (scale.ess(value) ** -4.0 - 1) / clusters > _MEAN_SQUARE_ERROR
    ends[~known | ~np.isfinite(ends).all(axis=-1)] = np.nan
    return ends, np.where(known & heavy, scale.covers, np.nan)


def t_quantile(normal: float, degrees: Any) -> Any:
    """Convert a normal quantile, such as 1.96, to Student's t with `degrees` of freedom (Cornish and Fisher 1937)."""
    cube, fifth = normal**3, normal**5
    with np.errstate(divide="ignore"):
        inverse = 1 / np.maximum(degrees, 0.0)
    return (
        normal
        + inverse * (cube + normal) / 4
        + inverse**2 * (5 * fifth + 16 * cube + 3 * normal) / 96
        + inverse**3 * (3 * normal**7 + 19 * fifth + 17 * cube - 15 * normal) / 384
    )


def normal_z(t: float, degrees: float) -> float:
    """Convert a t statistic to the z of a normal distribution with the same p-value (Wallace 1959)."""
    if degrees <= 0:
        return 0.0
    z = math.sqrt(degrees * math.log1p(t * t / degrees)) * (8 * degrees + 1) / (8 * degrees + 3)
    return math.copysign(z, t)


VALID_TOKENS = "valid tokens"
KEPT_TOKENS = "tokens that no gate rejects"
VALID_SEQUENCES = "sequences with a valid token"

BOUNDED_WEIGHTS, FINAL_WEIGHTS = "weights after their bound", "final weights"


class Quantity(str, Enum):
    """The value that a metric measures per token or sequence. x is the log ratio of two policies."""

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
    REJECTED = "whether the token is rejected"
    CATASTROPHIC = "whether the ratio is below the veto's bound"
    LOSS = "policy loss"
    CLIPPED = "whether PPO's clip decides the loss"


@dataclass(frozen=True)
class Measure:
    """The definition of a metric. Two metrics are the same if all four fields are equal."""

    quantity: Quantity  # what is measured
    over: str = VALID_TOKENS  # the tokens or sequences that are measured
    reduction: str = "mean"  # how the values of tokens or sequences become one number
    basis: str = "train/rollout"  # a pair of policies, or the kind of weights, such as "final weights"

    def is_like(self, other: Measure) -> bool:
        """Return True if two metrics apply the same statistic (such as the mean) to the same quantity and policies."""
        policies = self.basis == other.basis or "/" not in self.basis + other.basis
        return policies and self.quantity is other.quantity and self._statistic == other._statistic

    def differences(self, other: Measure) -> list[str]:
        return [
            f"{field.name}: {getattr(self, field.name)}"
            for field in fields(self)
            if getattr(self, field.name) != getattr(other, field.name)
        ]

    @property
    def _statistic(self) -> str:
        return self.reduction.split()[0]


Number = Any
"""An array with one number per step. Numbers are complex when derivatives are computed, so formulas may only use
arithmetic, np.sqrt, np.exp and np.where."""


class Totals(Protocol):
    """Reads sums by column name. If a correction or pair lacks a column, read the column of the mismatch."""

    def __getitem__(self, name: str) -> Number: ...


class RecordingTotals:
    """Totals that read the column `prefix + name`, or `name` if it does not exist. `read` lists the columns read."""

    def __init__(self, found: Mapping[str, Number], prefix: str = "") -> None:
        self.found, self.prefix, self.read = found, prefix, dict[str, None]()

    def __getitem__(self, name: str) -> Number:
        known = self.prefix + name if self.prefix + name in self.found else name
        self.read[known] = None
        return self.found[known]


NO_TOKEN = "no valid token"


def value_status(value: float, undefined: str, *, empty: bool) -> str:
    """Return "ok", or why the value is not finite. `empty` means that no tokens were measured."""
    if math.isfinite(value):
        return "ok"
    if empty:
        return NO_TOKEN
    return "overflow: not a finite number" if math.isinf(value) else undefined


@dataclass(frozen=True)
class Estimate:
    """Values of one metric for several groups of sequences (such as steps), with standard errors and intervals."""

    value: Float64s  # [G], NaN or infinite if undefined
    undefined: str  # status of groups with an undefined value
    empty: Bools  # True for groups without tokens [G], whose status is NO_TOKEN
    # standard errors [G], intervals [G, 2], and the coverage of intervals if the tail is heavy [G], else NaN
    se: Float64s
    interval: Float64s
    covers: Float64s

    @classmethod
    def without_error(cls, value: Float64s, undefined: str, empty: Bools) -> Estimate:
        unknown = np.full(len(value), np.nan)
        return cls(value, undefined, empty, unknown, np.stack([unknown, unknown], axis=1), unknown)

    @classmethod
    def concatenate(cls, parts: Sequence[Estimate]) -> Estimate:
        names = ("value", "empty", "se", "interval", "covers")
        joined = {name: np.concatenate([getattr(part, name) for part in parts]) for name in names}
        return cls(undefined=parts[0].undefined, **joined)

    def covers_at(self, cell: int) -> float | None:
        return float(self.covers[cell]) if math.isfinite(self.covers[cell] + self.value[cell]) else None

    def status(self, cell: int) -> str:
        return value_status(float(self.value[cell]), self.undefined, empty=bool(self.empty[cell]))

    def at(self, cell: int) -> tuple[float | None, float | None, tuple[float, float] | None, str]:
        """Return the value of the group with the index `cell`, and its standard error, interval and status."""
        value, status = float(self.value[cell]), self.status(cell)
        if status != "ok":
            return None, None, None, status
        error, (low, high) = float(self.se[cell]), self.interval[cell].tolist()
        return (
            value, error if math.isfinite(error) else None, (low, high) if math.isfinite(low) else None, status,
        )  # fmt: skip


@dataclass(frozen=True)
class MetricTails:
    """Maxima and a histogram of one group, for metrics such as `abs_diff_max` and `abs_diff_p99`."""

    maxima: Mapping[str, float]
    pair: PairSums | None


@dataclass(frozen=True)
class Metric:
    """A metric. Its value is computed by one of the fields `formula`, `extreme`, `quantile` and `tail`."""

    key: str  # stable name in JSON, tables and options
    title: str  # short label
    unit: str  # "nats", "fraction", "ratio", "tokens" or another
    definition: str  # formula in plain text that explains its letters
    meaning: str  # interpretation for the reader
    source: str = "mismatchctl"  # origin of the definition
    undefined: str = "undefined"  # status of an undefined value
    # function of sums. Its standard error follows by the delta method over clusters.
    formula: Callable[[Totals], Number] | None = None
    has_error: bool = True  # False for counts, which have no standard error
    extreme: Callable[[Mapping[str, Any]], Any] | None = None  # function of the maxima of columns
    quantile: float | None = None  # share of tokens below the quantile
    tail: Callable[[Totals, MetricTails], float] | None = None  # function of sums and tails, without a standard error
    better: Literal["low", "high", "one", ""] = "low"  # desirable direction: "low", "high", "one", or "" for neither
    measure: Measure | None = None  # to find metrics of frameworks with the same definition
    own_scale: IntervalScale | None = None  # scale of the interval, None for the default of the unit

    @property
    def scale(self) -> IntervalScale:
        return self.own_scale or (ODDS_SCALE if self.unit == "fraction" else LINEAR_SCALE)


Formula = Callable[[Totals], Number]
Extreme = Callable[[Mapping[str, Any]], Any]
Tail = Callable[[Totals, MetricTails], float]


def read_formula(text: str) -> Formula:
    """Return the formula for the text `A / B` (sum of column A divided by sum of column B) or `A`."""
    column, _, number = text.partition(" / ")
    return (lambda t: t[column] / t[number]) if number else lambda t: t[column]


def _read_extreme(column: str) -> Extreme:
    sign = -1.0 if column.startswith("-") else 1.0
    return lambda maxima: sign * maxima[column] + 0.0  # avoids -0


@cache
def _read_tables() -> dict[str, dict[str, dict[str, Any]]]:
    found: dict[str, dict[str, dict[str, Any]]] = read_data(Path(__file__).with_name("metrics.yaml"))
    return found


def read_metrics(
    table: str,
    formulas: Mapping[str, Formula] | None = None,
    *,
    extremes: Mapping[str, Extreme] | None = None,
    tails: Mapping[str, Tail] | None = None,
) -> tuple[Metric, ...]:
    """Read a table of metrics.yaml. The mappings contain functions by key, for metrics without a simple formula."""
    rows = dict(_read_tables()[table])
    defaults, metrics = {"undefined": NO_TOKEN} | rows.pop("defaults", {}), []
    for key, row in rows.items():
        fields = defaults | row
        formula, extreme, measure = (fields.pop(name, None) for name in ("formula", "extreme", "measure"))
        if measure is not None:
            parts = {"quantity": measure} if isinstance(measure, str) else measure
            fields["measure"] = Measure(**parts | {"quantity": Quantity[parts["quantity"]]})
        fields["formula"] = (formulas or {}).get(key) if formula is None else read_formula(formula)
        fields["extreme"] = (extremes or {}).get(key) if extreme is None else _read_extreme(extreme)
        scale = _SCALES[fields.pop("scale", "")]
        metrics.append(Metric(key, **fields, tail=(tails or {}).get(key), own_scale=scale))
    return tuple(metrics)


COVERAGE, LOWEST_COVERAGE = 0.85, 0.6
"""Share of `heavy_tail` intervals of quantiles that contain the true value: 0.85, or 0.6 with under 3 tail tokens."""
_FEW_TAIL_TOKENS, _NO_TAIL_TOKENS = 10, 3  # with fewer tokens above a quantile: COVERAGE, LOWEST_COVERAGE
_ROUNDING = 1e-9  # relative rounding error of a share times the number of tokens


class Quantile(NamedTuple):
    """A quantile. `covers` is how often `interval` contains the true value (NaN if the tail is not heavy)."""

    value: float
    interval: tuple[float, float]
    covers: float


NO_QUANTILE = Quantile(np.nan, (np.nan, np.nan), np.nan)


@cache
def _bin_middles() -> Float64s:
    edges: Float64s = magnitude_edges()
    middles: Float64s = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = 0.0, edges[-2]
    return middles


def compute_quantiles(
    pair: PairSums, shares: Sequence[float], largest: float, *, with_intervals: bool = True
) -> list[Quantile]:
    """Compute quantiles of |log ratio| over tokens, and their intervals. Binning causes errors of at most 0.8%."""
    if with_intervals:
        filled, counts = pair.histogram.by_bucket()
    else:
        tokens = fold_signs(pair.histogram.by_bin()[0])
        filled = np.flatnonzero(tokens)
        counts = tokens[None, filled].astype(np.float64)
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
    wanted = np.ceil(together[-1] * shares * (1 - _ROUNDING))  # the number of tokens up to the quantile, an integer
    found: Ints = np.minimum(np.searchsorted(together, wanted), len(together) - 1)
    return found


def _tail_intervals(counts: Float64s, reached: Ints, tails: Float64s) -> tuple[Float64s, Float64s]:
    """Return an interval for the share of tokens above each quantile, and the actual coverage of each interval."""
    sizes = counts.sum(axis=1)
    total, clusters = sizes.sum(), np.full(len(tails), float(len(sizes)))
    above = np.stack([counts[:, own + 1 :].sum(axis=1) for own in reached.tolist()])
    inside = counts[:, reached].T
    part = (tails * total - above.sum(axis=1)) / inside.sum(axis=1)  # the part of the bin that is above the quantile
    apart = (above + np.clip(part, 0.0, 1.0)[:, None] * inside - tails[:, None] * sizes) / total
    squares = np.sum(apart**2, axis=1)
    with np.errstate(all="ignore"):
        effective = squares**2 / np.sum(apart**4, axis=1)
    ends, covers = compute_intervals(
        ODDS_SCALE, tails, np.sqrt(squares * clusters / (clusters - 1)), effective, clusters
    )
    ends = np.where(np.isfinite(ends), ends, tails[:, None])  # an end is NaN if all buckets have the same share
    few = np.isfinite(covers) | (total * tails < _FEW_TAIL_TOKENS)
    return ends, np.select([total * tails < _NO_TAIL_TOKENS, few], [LOWEST_COVERAGE, COVERAGE], np.nan)


def worst_share(pair: PairSums, tokens: float) -> float:
    """Return which share of the total K3 the tokens with the highest K3 have. `tokens`=0.001 means the top 0.1%."""
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


def tail_length(count: int) -> int:
    """Return how many of `count` ratios k-hat uses: the largest 20%, but at most 3 sqrt(count) and TAIL_VALUES - 1."""
    return min(math.ceil(min(count / 5, 3 * math.sqrt(count))), TAIL_VALUES - 1)


def khat_limit(count: int) -> float:
    """Return the largest k-hat that allows a reliable mean of S = `count` ratios: min(1 - 1/log10 S, 0.7)."""
    return min(1 - 1 / math.log10(count), 0.7) if count > 1 else math.nan


def khat(largest_log_ratios: Float64s, count: int) -> float:
    """Fit a generalized Pareto distribution to the largest ratios, and return its shape (Zhang and Stephens 2009)."""
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
    """Fit a generalized Pareto distribution to the ascending values `excess`, as in PSIS. Return its shape."""
    n = len(excess)
    m = 30 + int(math.sqrt(n))
    grid = 1 - np.sqrt(m / (np.arange(1, m + 1) - 0.5))
    grid = grid / (3 * excess[int(n / 4 + 0.5) - 1]) + 1 / excess[-1]
    with np.errstate(all="ignore"):
        shape = np.log1p(-grid[:, None] * excess).mean(axis=1)
        likelihood = n * (np.log(-grid / shape) - shape - 1)
        weight = 1 / np.exp(likelihood - likelihood[:, None]).sum(axis=1)
    usable = weight >= 10 * np.finfo(np.float64).eps
    weight, grid = weight[usable] / weight[usable].sum(), grid[usable]
    posterior = float(np.log1p(-np.sum(grid * weight) * excess).mean())
    return (n * posterior + 10 * 0.5) / (n + 10)
