"""Metrics of verl's helper: statistics of a batch, tables of logged names, weights, rejection and their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Gate, Weight
from mismatchctl.errors import DataError
from mismatchctl.frameworks.adapter import LoggedMetric, Meaning
from mismatchctl.frameworks.verl.configuration import VerlPlan, find_rs_option
from mismatchctl.frameworks.verl.versions import VerlVersion
from mismatchctl.measure.metrics.metric import ALL_GATES, RAW_WEIGHTS, VALID_TOKENS, Quantity

Values = NDArray[Any]


def clamp_log_ratio(log_ratio: Floats) -> Floats:
    """Clamp to ±20 (verl's SAFETY_BOUND)."""
    return np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def float32_log(threshold: float) -> float:
    """Compute the logarithm of a ratio threshold in float32 regardless of the data's dtype, like verl."""
    rounded = float(np.float32(threshold))
    if not rounded > 0:
        return -math.inf if rounded == 0 else math.nan
    return float(np.float32(math.log(rounded)))


@dataclass(frozen=True)
class PolicyPair:
    """Two policies on the valid tokens of one batch."""

    policy: Floats  # log-probs of the trainer [T]: its recomputation, in bypass mode the policy being updated
    reference: Floats  # log-probs of the rollout engine [T]
    segments: Segments  # one per row [S], including empty rows if verl counts them

    def __post_init__(self) -> None:
        if not len(self.policy):
            raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")

    @cached_property
    def log_ratio(self) -> Floats:
        return self.policy - self.reference

    def row_sum(self, values: Floats) -> Floats:
        return self.segments.sum(values).astype(values.dtype)

    def row_mean(self, values: Floats) -> Floats:
        return self.row_sum(values) / np.maximum(self.segments.lengths, 1).astype(values.dtype)

    def row_max(self, values: Floats) -> Floats:
        """Return the maximum over each row's valid tokens [S], or 0 for an empty row."""
        return np.where(self.segments.nonempty, self.segments.max(values), 0).astype(values.dtype)

    def any_in_row(self, flags: Bools) -> Bools:
        return self.segments.sum(flags) > 0

    def level(self, level: str) -> Floats:
        """Compute the unclamped log ratio at a level: [T] for tokens, else [S]."""
        if level == "token":
            return self.log_ratio
        return self.row_sum(self.log_ratio) if level == "sequence" else self.row_mean(self.log_ratio)

    def over_tokens(self, values: Values, level: str) -> Values:
        """Repeat the values of rows [S] over their tokens [T]. Values of tokens are returned unchanged."""
        return values if level == "token" else self.segments.spread(values)


def mean_in_dtype(values: Values) -> Floats:
    """Compute the mean in the dtype of the values, 0-d. Booleans are averaged in float32, like in verl."""
    dtype = np.dtype(np.float32) if values.dtype == np.bool_ else values.dtype
    total = np.asarray(values.sum(dtype=np.float64), dtype)
    return np.asarray(total / np.asarray(max(len(values), 1), dtype))


def _mean_minus_one(values: Floats) -> Floats:
    return mean_in_dtype(values) - np.asarray(1, values.dtype)


def _sample_std(values: Floats) -> float:
    """Compute the sample standard deviation (n - 1), or 0 of a single value."""
    return float(np.std(values, ddof=1, dtype=np.float64)) if len(values) > 1 else 0.0


def _population_std(values: Floats) -> float:
    """Compute the population standard deviation from the mean of squares. Small values cancel, like in verl."""
    if len(values) <= 1:
        return 0.0
    variance = mean_in_dtype(values * values) - mean_in_dtype(values) ** 2
    return math.sqrt(max(float(variance), 0.0))


def _ess(values: Floats) -> float:
    """Compute the ESS as a share of the tokens: 1 / mean of the squared weights, after division by their mean."""
    normalized = values / (mean_in_dtype(values) + np.asarray(1e-8, values.dtype))
    squares = float(mean_in_dtype(normalized * normalized))
    if squares == 0:
        raise DataError("verl divides by zero here: every weight of the batch is 0")
    return 1.0 / squares


REDUCTIONS: dict[str, Callable[[Values], Any]] = {
    "mean": mean_in_dtype,
    "mean - 1": _mean_minus_one,
    "max": np.max,
    "min": np.min,
    "std": _sample_std,
    "spread": _population_std,
    "ess": _ess,
}


def clamped_ratio(log_ratio: Floats) -> Floats:
    return exp(clamp_log_ratio(log_ratio))


@dataclass(frozen=True)
class OffPolicyStatistics:
    """Distance between the two policies. Values are not clamped unless stated."""

    sample: PolicyPair

    @cached_property
    def policy_log_ppl(self) -> Floats:
        return -self.sample.row_mean(self.sample.policy)

    @cached_property
    def reference_log_ppl(self) -> Floats:
        return -self.sample.row_mean(self.sample.reference)

    @cached_property
    def log_ppl_diff(self) -> Floats:
        return self.policy_log_ppl - self.reference_log_ppl


@dataclass(frozen=True)
class WeightStatistics:
    """The ratio at a level with two thresholds, for importance weights or rejection by the ratio."""

    sample: PolicyPair
    level: str  # token, sequence or geometric
    lower: float  # weights below this count as low
    upper: float  # weights above this count as high, and `applied` may truncate them
    zero: bool = False  # weights outside become 0 (IcePop) instead of being truncated
    measures_applied: bool = False  # True to measure bounded weights (since 2026), False to measure raw weights
    fractions_applied: bool = False  # True if the fractions of rows outside describe bounded weights too (0.8.0)

    @cached_property
    def log_ratio(self) -> Floats:
        return self.sample.level(self.level)

    @cached_property
    def at_level(self) -> Floats:
        return clamped_ratio(self.log_ratio)

    @cached_property
    def raw(self) -> Floats:
        """Ratio at the rule's level, per token, clamped to exp(±20)."""
        return self.sample.over_tokens(self.at_level, self.level)

    @cached_property
    def outside_raw(self) -> Bools:
        return (self.raw < self.lower) | (self.raw > self.upper)

    @cached_property
    def applied(self) -> Floats:
        if self.zero:
            return np.where(self.outside_raw, 0, self.raw).astype(self.raw.dtype)
        return np.minimum(self.raw, np.asarray(self.upper, self.raw.dtype))

    @cached_property
    def weight(self) -> Floats:
        """Weight of the token: since 2026 after its bound, until then before."""
        return self.applied if self.measures_applied else self.raw

    @cached_property
    def row_weight(self) -> Floats:
        return self.sample.row_mean(self.weight)

    @cached_property
    def row_of_fractions(self) -> Floats:
        """Mean weight of the row's tokens, which seq_fraction_* compare with the thresholds."""
        return self.row_weight if self.fractions_applied else self.sample.row_mean(self.raw)

    @cached_property
    def high(self) -> Bools:
        """True if the ratio is above the upper threshold. Rows compare logarithms, with a float32 threshold."""
        return self.at_level > self.upper if self.level == "token" else self.log_ratio > float32_log(self.upper)

    @cached_property
    def low(self) -> Bools:
        """True if the ratio is below the lower threshold. Rows compare logarithms, with a float32 threshold."""
        return self.at_level < self.lower if self.level == "token" else self.log_ratio < float32_log(self.lower)

    @cached_property
    def rejected_at_level(self) -> Bools:
        """True if the clamped ratio at the level is outside the inclusive thresholds: [T] or [S]."""
        return ~((self.at_level >= self.lower) & (self.at_level <= self.upper))

    @cached_property
    def rejected(self) -> Bools:
        return self.sample.over_tokens(self.rejected_at_level, self.level)


@dataclass(frozen=True)
class VetoStatistics:
    """Tokens whose unclamped ratio is below a threshold. One such token rejects its row."""

    sample: PolicyPair
    threshold: float | None

    @cached_property
    def catastrophic(self) -> Bools:
        """True if the token's unclamped ratio is below the veto threshold. Always False without a veto."""
        if self.threshold is None:
            return np.zeros(len(self.sample.log_ratio), np.bool_)
        return self.sample.log_ratio < float32_log(self.threshold)

    @cached_property
    def row_vetoed(self) -> Bools:
        return self.sample.any_in_row(self.catastrophic)

    @cached_property
    def rejected(self) -> Bools:
        return self.sample.segments.spread(self.row_vetoed)


@dataclass(frozen=True)
class EstimatorStatistics:
    """Rejection by k1, k2 or k3 (since 2026). Log ratios are clamped per token, then aggregated."""

    sample: PolicyPair
    gate: Gate

    @property
    def lower(self) -> float:
        return self.gate.bounds[0]

    @property
    def upper(self) -> float:
        return self.gate.bounds[1]

    @cached_property
    def _per_token(self) -> Floats:
        y = clamp_log_ratio(self.sample.log_ratio)
        if self.gate.statistic == "k1":
            return -y
        return 0.5 * y**2 if self.gate.statistic == "k2" else exp(y) - 1 - y

    @cached_property
    def at_level(self) -> Floats:
        sample, level = self.sample, self.gate.level
        if level == "token":
            return self._per_token
        reduce = {"sum": sample.row_sum, "mean": sample.row_mean, "max": sample.row_max}[level]
        return reduce(self._per_token)

    @cached_property
    def statistic(self) -> Floats:
        """The statistic at the option's level, per token. A row's value is repeated on its tokens."""
        return self.sample.over_tokens(self.at_level, self.gate.level)

    @cached_property
    def row_statistic(self) -> Floats:
        return self.sample.row_mean(self.at_level) if self.gate.level == "token" else self.at_level

    @cached_property
    def rejected(self) -> Bools:
        """True if the token's statistic is outside the inclusive bounds. nan rejects all tokens."""
        return ~((self.statistic <= self.upper) & (self.statistic >= self.lower))


@dataclass(frozen=True)
class RejectionStatistics:
    """Tokens that any rejection drops."""

    sample: PolicyPair
    flags: Bools


Statistics = OffPolicyStatistics | WeightStatistics | VetoStatistics | EstimatorStatistics | RejectionStatistics
Metrics = tuple[LoggedMetric, ...]
"""Scopes: all valid tokens, all `rows` (empty rows count, with 0/0 as 0), or only `filled` rows."""

_LOG_PPL_DIFF = partial(
    LoggedMetric, quantity=lambda s: s.log_ppl_diff, scope="rows", like=Quantity.LOG_PPL_DIFF,
    words="Log perplexity of the row under train minus under rollout",
)  # fmt: skip
OFF_POLICY: Metrics = (
    LoggedMetric("training_ppl", lambda s: exp(s.policy_log_ppl), "Perplexity of the row under train", "rows",
                 like=Quantity.TRAIN_PPL),
    LoggedMetric("training_log_ppl", lambda s: s.policy_log_ppl, "Minus the mean log-prob of the row under train",
                 "rows", like=Quantity.TRAIN_LOG_PPL),
    LoggedMetric("kl", lambda s: -s.sample.log_ratio,
                 "Log-prob of rollout minus train, per token: its mean estimates KL(rollout, train)", "tokens",
                 like=Quantity.K1),
    LoggedMetric("k3_kl", lambda s: exp(s.sample.log_ratio) - s.sample.log_ratio - 1,
                 "exp(x) - x - 1 of the log ratio x, per token, not clamped; the formula cancels in float32", "tokens",
                 like=Quantity.K3),
    LoggedMetric("rollout_ppl", lambda s: exp(s.reference_log_ppl), "Perplexity of the row under rollout", "rows",
                 like=Quantity.ROLLOUT_PPL),
    LoggedMetric("rollout_log_ppl", lambda s: s.reference_log_ppl, "Minus the mean log-prob of the row under rollout",
                 "rows", like=Quantity.ROLLOUT_LOG_PPL),
    _LOG_PPL_DIFF("log_ppl_diff"),
    LoggedMetric("log_ppl_abs_diff", lambda s: np.abs(s.log_ppl_diff), "Distance of the row's two log perplexities",
                 "rows", like=Quantity.LOG_PPL_ABS_DIFF),
    _LOG_PPL_DIFF("log_ppl_diff_max", reduction="max"),
    _LOG_PPL_DIFF("log_ppl_diff_min", reduction="min"),
    LoggedMetric("ppl_ratio", lambda s: exp(s.log_ppl_diff),
                 "Perplexity of the row under train over the one under rollout", "rows", like=Quantity.PPL_RATIO),
)  # fmt: skip
CHI2: Metrics = (
    LoggedMetric("chi2_token", lambda s: clamped_ratio(s.sample.log_ratio) ** 2,
                 "Square of the ratio, per token, clamped to exp(+-20) before it is squared", "tokens", "mean - 1",
                 Quantity.SQUARED_RATIO),
    LoggedMetric("chi2_seq", lambda s: exp(2 * clamp_log_ratio(s.sample.level("sequence"))),
                 "Square of the ratio of the whole row, its logarithm clamped to +-20 before it is doubled", "rows",
                 "mean - 1", Quantity.SQUARED_PRODUCT),
)  # fmt: skip
"""Metrics logged since #3984."""

VETO: Metrics = (
    LoggedMetric("rollout_is_veto_fraction", lambda s: s.row_vetoed, "Whether the row has such a token", "rows",
                 like=Quantity.CATASTROPHIC),
    LoggedMetric("rollout_is_catastrophic_token_fraction", lambda s: s.catastrophic,
                 "1 if the token's unclamped ratio is below the veto threshold, 0 without a veto",
                 "tokens", like=Quantity.CATASTROPHIC),
)  # fmt: skip
"""Metrics logged until 2026, as 0 if the veto is off."""


def weight_of_token(statistics: WeightStatistics) -> Values:
    """Return the measured weights, which `list_meanings` describes by version."""
    return statistics.weight


def is_high(statistics: WeightStatistics) -> Values:
    """Return the flags of ratios above the upper threshold, which `list_meanings` describes by version."""
    return statistics.high


_on_weights = partial(LoggedMetric, basis=RAW_WEIGHTS)
_WEIGHT = partial(
    _on_weights, quantity=weight_of_token, scope="tokens", like=Quantity.WEIGHT,
    words="Weight of the token: since 2026 after its bound, until then before",
)  # fmt: skip
_CLAMPED_WEIGHT = partial(
    LoggedMetric, quantity=lambda s: np.clip(s.weight, 0 if s.measures_applied else s.lower, s.upper), scope="tokens",
    words="Weight of the token, clamped into the thresholds: since 2026 at the upper one only", like=Quantity.WEIGHT,
    basis="weights clamped into their thresholds",
)  # fmt: skip
_ROW_WEIGHT = partial(
    _on_weights, quantity=lambda s: s.row_weight, words="Mean weight of the row's tokens, 0 without any", scope="rows"
)
_COMMON_WEIGHT_NAMES: Metrics = (
    _WEIGHT("mean"),
    _CLAMPED_WEIGHT("std", reduction="spread"),
    _CLAMPED_WEIGHT("eff_sample_size", reduction="ess"),
    _ROW_WEIGHT("seq_mean"),
    _ROW_WEIGHT("seq_std", reduction="std"),
    _ROW_WEIGHT("seq_max", reduction="max"),
    _ROW_WEIGHT("seq_min", reduction="min"),
    _on_weights("seq_max_deviation", lambda s: np.abs(s.row_weight - 1), "Distance of the row's mean weight from 1",
                "rows", "max"),
    _on_weights("seq_fraction_high", lambda s: s.row_of_fractions > s.upper,
                "1 if the row's mean weight before the bound is above the upper threshold", "rows"),
    _on_weights("seq_fraction_low", lambda s: s.row_of_fractions < s.lower,
                "1 if the row's mean weight before the bound is below the lower threshold", "rows"),
)  # fmt: skip


def _ratio_fractions(scope: str) -> Metrics:
    which = "the {} threshold; rows compare logarithms, the threshold's in float32"
    high = f"1 if the ratio is above {which.format('upper')}"
    return (
        _on_weights("ratio_fraction_high", is_high, high, scope, like=Quantity.ABOVE),
        _on_weights("ratio_fraction_low", lambda s: s.low, f"1 if the ratio is below {which.format('lower')}", scope),
    )


_ROW_WEIGHT_NAMES: Metrics = (
    *_COMMON_WEIGHT_NAMES,
    _on_weights("max", lambda s: exp(np.minimum(s.log_ratio, LOG_RATIO_BOUND)),
                "Ratio at the rule's level, per row, clamped above: so verl takes the largest", "rows", "max"),
    _on_weights("min", lambda s: exp(s.log_ratio),
                "Ratio at the rule's level, per row, not clamped: so verl takes the smallest", "rows", "min"),
)  # fmt: skip
_ROW_LEVEL_NAMES = (*_ROW_WEIGHT_NAMES, *_ratio_fractions("rows"))
WEIGHTS: dict[str, Metrics] = {
    "token": (
        *_COMMON_WEIGHT_NAMES,
        _WEIGHT("max", reduction="max"),
        _WEIGHT("min", reduction="min"),
        *_ratio_fractions("tokens"),
    ),
    "sequence": _ROW_LEVEL_NAMES,
    "geometric": _ROW_LEVEL_NAMES,
}
"""Metrics of the weights, with their names, by level."""
WEIGHTS_2025_10 = WEIGHTS | {
    "geometric": (
        *_ROW_WEIGHT_NAMES,
        _on_weights("ratio_fraction_high", lambda s: s.sample.over_tokens(s.high, s.level),
                    "1 if the ratio of the token's row is above the upper threshold", "tokens"),
        _on_weights("ratio_fraction_low", lambda s: s.sample.over_tokens(s.low, s.level),
                    "1 if the ratio of the token's row is below the lower threshold", "tokens"),
    )
}  # fmt: skip
"""Names in 2025-10. #3915 weights the geometric fractions by tokens, and #3984 counts rows."""

ICEPOP: Metrics = (
    _on_weights(
        "oob_ratio", lambda s: s.outside_raw, "Whether the token's ratio lies outside the thresholds", "tokens"
    ),
)
_ROW_FACTOR = partial(
    _on_weights, "batch_norm_factor", lambda s: s.sample.row_mean(s.applied),
    "Mean of the row's weights after their bound, 0 without tokens",
)  # fmt: skip
NORMALIZATION: dict[str, LoggedMetric] = {
    "token": _on_weights("batch_norm_factor", lambda s: s.applied, "Weight of the token after its bound", "tokens"),
    "sequence": _ROW_FACTOR("filled"),
}
"""The mean that weights are divided by, before rejection, by level."""
NORMALIZATION_2025_11 = NORMALIZATION | {"sequence": _ROW_FACTOR("rows")}
"""The mean in 2025-11. #4070 includes empty rows, which lower the mean. #3980 leaves them out."""

_on_rejection = partial(LoggedMetric, like=Quantity.REJECTED, basis="rejection without the veto")
REJECTION: Metrics = (
    _on_rejection("masked_fraction", lambda s: s.rejected,
                  "1 if the clamped ratio of the token (or of its row) is outside the thresholds, which are inclusive",
                  "tokens"),
    _on_rejection("seq_masked_fraction",
                  lambda s: s.sample.any_in_row(s.rejected) if s.level == "token" else s.rejected_at_level,
                  "1 if any token of the row is rejected. A row without tokens has a ratio of 1", "rows"),
)  # fmt: skip
"""Metrics logged until 2026, without the veto."""
ANY_REJECTION: Metrics = (
    LoggedMetric("masked_fraction", lambda s: s.flags.astype(s.sample.policy.dtype),
                 "1 if any option rejects the token, else 0, in the data's dtype", "tokens",
                 like=Quantity.REJECTED, basis=ALL_GATES),
    LoggedMetric("seq_masked_fraction", lambda s: s.sample.any_in_row(s.flags),
                 "1 if any option rejects any token of the row", "rows", like=Quantity.REJECTED, basis=ALL_GATES),
)  # fmt: skip
"""Metrics logged since 2026, over all options. Each option's own share leaves empty rows out."""

_STATISTIC = partial(
    LoggedMetric, quantity=lambda s: s.statistic, scope="tokens",
    words="The statistic at the option's level. Each token has the value of its row",
)  # fmt: skip
_ROW_STATISTIC = partial(
    LoggedMetric, quantity=lambda s: s.row_statistic, scope="filled",
    words="The row's statistic, or the mean over its tokens for a token option",
)  # fmt: skip
_LOWER = "is below the lower bound, which k2 and k3 do not have"
_row_above = partial(
    LoggedMetric, quantity=lambda s: s.row_statistic > s.upper, scope="filled",
    words="1 if the row's statistic is above the upper bound",
)  # fmt: skip
_row_below = partial(
    LoggedMetric, quantity=lambda s: s.row_statistic < s.lower, scope="filled",
    words=f"1 if the row's statistic {_LOWER}",
)  # fmt: skip
_COMMON_ESTIMATE_NAMES: Metrics = (
    _STATISTIC("mean"),
    LoggedMetric("std", lambda s: np.clip(s.statistic, s.gate.keep[0] or 0.0, s.upper),
                 "The statistic of the token, clamped into the bounds", "tokens", "spread"),
    _ROW_STATISTIC("seq_mean"),
    _ROW_STATISTIC("seq_std", reduction="std"),
    _ROW_STATISTIC("seq_max", reduction="max"),
    _ROW_STATISTIC("seq_min", reduction="min"),
    LoggedMetric("seq_max_deviation", lambda s: np.abs(s.row_statistic), "Absolute value of the row's statistic",
                 "filled", "max"),
    _row_above("seq_fraction_high"),
    LoggedMetric("masked_fraction", lambda s: s.rejected.astype(s.statistic.dtype),
                 "1 if the token is rejected, else 0, averaged in the data's dtype", "tokens"),
    LoggedMetric("seq_masked_fraction", lambda s: s.sample.any_in_row(s.rejected).astype(s.statistic.dtype),
                 "1 if any token of the row is rejected, else 0, in the data's dtype", "filled"),
)  # fmt: skip
_TOKEN_ESTIMATE_NAMES: Metrics = (
    _STATISTIC("max", reduction="max"),
    _STATISTIC("min", reduction="min"),
    LoggedMetric("fraction_high", lambda s: s.statistic > s.upper,
                 "1 if the token's statistic is above the upper bound", "tokens"),
    LoggedMetric("fraction_low", lambda s: s.statistic < s.lower, f"Whether the token's statistic {_LOWER}", "tokens"),
)  # fmt: skip
_ROW_ESTIMATE_NAMES: Metrics = (
    _ROW_STATISTIC("max", reduction="max"),
    _ROW_STATISTIC("min", reduction="min"),
    _row_above("fraction_high"),
    _row_below("fraction_low"),
)


def estimator_names(statistic: str, level: str) -> Metrics:
    by_level = _TOKEN_ESTIMATE_NAMES if level == "token" else _ROW_ESTIMATE_NAMES
    return (*_COMMON_ESTIMATE_NAMES, *by_level, *((_row_below("seq_fraction_low"),) if statistic == "k1" else ()))


def compute_values(metrics: Iterable[LoggedMetric], subject: Statistics, prefix: str) -> dict[str, float]:
    logged = {}
    for metric in metrics:
        values = metric.quantity(subject)
        if metric.scope == "filled":
            values = values[subject.sample.segments.nonempty]
        logged[prefix + metric.name] = float(REDUCTIONS[metric.reduction](values))
    return logged


_DEBUG_PREFIX = "training/rollout_"
_APART = "distance of the token's two probabilities"
DEBUG_MEANINGS: tuple[Meaning, ...] = tuple(
    Meaning(f"{_DEBUG_PREFIX}{name}", "not in bypass mode", quantity, VALID_TOKENS, how, like)
    for name, quantity, how, like in (
        ("probs_diff_valid", "1 where any token is valid, else 0", "max", None),
        ("probs_diff_max", _APART, "max", Quantity.PROB_DIFF),
        ("probs_diff_mean", _APART, "mean", Quantity.PROB_DIFF),
        ("probs_diff_std", _APART, "standard deviation (n - 1)", Quantity.PROB_DIFF),
        ("actor_probs_pearson_corr", "probabilities of the token under train and rollout", "Pearson correlation",
         Quantity.PROBS),
    )
)  # fmt: skip
"""Meanings of the names in calculate_debug_metrics, before any rejection."""


def compute_debug_metrics(train: Floats, rollout: Floats) -> dict[str, float]:
    """Compute differences of probabilities and their Pearson correlation, over the valid tokens [T].

    Undefined values are nan, like in verl: the deviation of one token, the correlation of constants.
    """
    values = [0.0, *[math.nan] * 4]
    if len(train):
        ours, theirs = exp(train), exp(rollout)
        apart = np.abs(ours - theirs).astype(np.float64)
        a, b = (side.astype(np.float64) - side.astype(np.float64).mean() for side in (ours, theirs))
        scale = float(np.sqrt((a @ a) * (b @ b)))
        values = [1.0, float(apart.max()), float(apart.mean())]
        values += [
            float(apart.std(ddof=1)) if len(apart) > 1 else math.nan,
            float(a @ b) / scale if scale else math.nan,
        ]
    return {meaning.name: value for meaning, value in zip(DEBUG_MEANINGS, values, strict=True)}


_MIN_MEAN_WEIGHT = 1e-8  # verl does not divide weights by less


Measurement = tuple[Iterable[LoggedMetric], Statistics, str]
"""Names, the statistics to reduce, and the names' prefix."""


@dataclass(frozen=True)
class CorrectionOutcome:
    """Outcome of verl's helper on one batch."""

    weights: Floats | None  # final weights of the valid tokens [T], or None without weights
    kept: Bools  # kept valid tokens [T]
    measured: tuple[Measurement, ...]  # the logged measurements
    # the mean that weights were divided by, under its name. Empty without normalization.
    factor: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def logged(self) -> dict[str, float]:
        with np.errstate(over="ignore", invalid="ignore"):
            values = {name: value for part in self.measured for name, value in compute_values(*part).items()}
            return values | dict(self.factor)


def reduce_micro_batches(parts: Sequence[Mapping[str, float]], version: VerlVersion) -> dict[str, float]:
    """Reduce an actor's values of micro-batches to a step's: means, and until 2026 extremes by name."""
    found: dict[str, float] = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        extremes = {} if version.dialect == "estimator" else {"max": max, "min": min}
        reduce = next((extreme for word, extreme in extremes.items() if word in name), fmean)
        found[name] = reduce(values)
    return found


def measure_off_policy(sample: PolicyPair, version: VerlVersion) -> Measurement:
    """Measure the distance of the policies, which all configurations log. Bypass mode of 2025-11 logs it separately."""
    if version.dialect == "flat":
        return OFF_POLICY, OffPolicyStatistics(sample), f"{version.prefix}mismatch_"
    return (*OFF_POLICY, *CHI2), OffPolicyStatistics(sample), version.prefix


def compute_correction(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> CorrectionOutcome:
    if version.dialect == "flat":
        return _compute_flat(sample, plan, version)
    weights, weighted, factor = _compute_weights(sample, plan.weight, version)
    kept, rejected = _compute_rejections(sample, plan, version)
    return CorrectionOutcome(weights, kept, (*weighted, *rejected, measure_off_policy(sample, version)), factor)


def _compute_flat(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> CorrectionOutcome:
    """Compute the correction of 2025-10: one ratio and two thresholds, or no correction without a threshold."""
    weight, kept = plan.weight, np.ones(len(sample.policy), np.bool_)
    if weight is None:
        return CorrectionOutcome(None, kept, ())
    low, high = plan.rejections[0].keep if plan.rejections else (weight.watch_low, weight.truncate)
    upper = math.inf if high is None else high
    subject = WeightStatistics(sample, weight.level, 1.0 / upper if low is None else low, upper)
    table = WEIGHTS_2025_10[weight.level]
    veto = VetoStatistics(sample, plan.veto)
    if plan.rejections:
        table = (*table, *REJECTION)
        kept &= ~subject.rejected
    kept &= ~veto.rejected
    weights = subject.raw if plan.rejections else subject.applied
    return CorrectionOutcome(
        weights * kept if version.zeroes_rejected else weights,
        np.ones_like(kept) if version.zeroes_rejected else kept,
        (
            (table, subject, f"{version.prefix}rollout_is_"),
            (VETO, veto, version.prefix),
            measure_off_policy(sample, version),
        ),
    )


def _compute_rejections(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> tuple[Bools, list[Measurement]]:
    kept = np.ones(len(sample.policy), np.bool_)
    prefix = f"{version.prefix}rollout_rs_"
    measured: list[Measurement] = []
    for gate in plan.rejections:
        if version.dialect == "estimator":
            rule: WeightStatistics | EstimatorStatistics = EstimatorStatistics(sample, gate)
            measured.append((estimator_names(gate.statistic, gate.level), rule, f"{prefix}{find_rs_option(gate)}_"))
        else:
            low, high = gate.keep
            rule = WeightStatistics(sample, gate.level, low or 0.0, math.inf if high is None else high)
            measured.append(((*WEIGHTS[gate.level], *REJECTION), rule, prefix))
        kept &= ~rule.rejected
    if version.dialect == "ratio":
        veto = VetoStatistics(sample, plan.veto)
        return kept & ~veto.rejected, [*measured, (VETO, veto, version.prefix)]
    if plan.rejections:
        measured.append((ANY_REJECTION, RejectionStatistics(sample, ~kept), prefix))
    return kept, measured


def _compute_weights(
    sample: PolicyPair, weight: Weight | None, version: VerlVersion
) -> tuple[Floats | None, list[Measurement], dict[str, float]]:
    """Compute the final weights, their measurements before normalization, and the normalization factor."""
    if weight is None:
        return None, [], {}
    low, upper = weight.bounds
    zero = weight.zero is not None
    subject = WeightStatistics(
        sample,
        weight.level,
        low if zero else 1.0 / upper,
        upper,
        zero=zero,
        measures_applied=version.measures_applied,
        fractions_applied=version.fractions_applied,
    )
    prefix = f"{version.prefix}rollout_is_"
    measured: list[Measurement] = [((*WEIGHTS[weight.level], *(ICEPOP if zero else ())), subject, prefix)]
    if weight.normalize == "none":
        return subject.applied, measured, {}
    name = NORMALIZATION_2025_11 if version.normalizes_empty else NORMALIZATION
    ((key, mean),) = compute_values((name[weight.level],), subject, prefix).items()
    if not mean > _MIN_MEAN_WEIGHT:
        return subject.applied, measured, {key: 1.0}
    return subject.applied / np.asarray(mean, subject.applied.dtype), measured, {key: mean}
