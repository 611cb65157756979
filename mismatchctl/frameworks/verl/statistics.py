"""Statistics that verl's helper computes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Gate
from mismatchctl.errors import DataError

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
