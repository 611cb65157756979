"""What verl measures: every quantity that a logged name reduces, per token [T] or per row [S]."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatchctl.batch import Bools, Floats
from mismatchctl.correction.model import Gate
from mismatchctl.frameworks.verl.sample import Sample, clamp, float32_log, ratio
from mismatchctl.losses import exp
from mismatchctl.ratios import LOG_RATIO_BOUND


@dataclass(frozen=True)
class OffPolicy:
    """How far the two policies are apart; nothing is clamped unless it says so."""

    sample: Sample

    @cached_property
    def reference_minus_policy(self) -> Floats:
        """Per token: its mean estimates KL(rollout, train)."""
        return -self.sample.log_ratio

    @cached_property
    def k3(self) -> Floats:
        """Per token, by the naive formula, which cancels in float32."""
        x = self.sample.log_ratio
        with np.errstate(over="ignore"):
            estimate: Floats = exp(x) - x - 1
        return estimate

    @cached_property
    def squared_ratio(self) -> Floats:
        """Per token, clamped."""
        return ratio(self.sample.log_ratio) ** 2

    @cached_property
    def squared_row_ratio(self) -> Floats:
        """Per row, clamped before it is doubled."""
        return exp(2 * clamp(self.sample.level("sequence")))

    @cached_property
    def policy_log_ppl(self) -> Floats:
        """Per row."""
        return -self.sample.row_mean(self.sample.policy)

    @cached_property
    def reference_log_ppl(self) -> Floats:
        """Per row."""
        return -self.sample.row_mean(self.sample.reference)

    @cached_property
    def policy_ppl(self) -> Floats:
        """Per row."""
        return exp(self.policy_log_ppl)

    @cached_property
    def reference_ppl(self) -> Floats:
        """Per row."""
        return exp(self.reference_log_ppl)

    @cached_property
    def log_ppl_diff(self) -> Floats:
        """Per row, policy minus reference."""
        return self.policy_log_ppl - self.reference_log_ppl

    @cached_property
    def log_ppl_abs_diff(self) -> Floats:
        """Per row."""
        return np.abs(self.log_ppl_diff)

    @cached_property
    def ppl_ratio(self) -> Floats:
        """Per row."""
        return exp(self.log_ppl_diff)


@dataclass(frozen=True)
class Weighted:
    """The ratio at a level against two thresholds: importance weights, or rejection by the ratio.

    Attributes:
        level: token, sequence or geometric.
        lower: below it a weight counts as low.
        upper: above it a weight counts as high; truncation bound where `applied` differs from `raw`.
        zero: weights outside become 0 (IcePop) instead of being truncated.
        measures_applied: since 2026 the bounded weights are measured, before that the raw ones.
    """

    sample: Sample
    level: str
    lower: float
    upper: float
    zero: bool = False
    measures_applied: bool = False

    @cached_property
    def log_ratio(self) -> Floats:
        """Log ratio at the level, not clamped: [T] or [S]."""
        return self.sample.level(self.level)

    @cached_property
    def level_ratio(self) -> Floats:
        """Per row, not clamped: so verl takes the smallest."""
        return exp(self.log_ratio)

    @cached_property
    def level_ratio_capped(self) -> Floats:
        """Per row, clamped above: so verl takes the largest."""
        return exp(np.minimum(self.log_ratio, LOG_RATIO_BOUND))

    @cached_property
    def at_level(self) -> Floats:
        """Ratio, clamped: [T] or [S]."""
        return ratio(self.log_ratio)

    @cached_property
    def raw(self) -> Floats:
        """Per token: the ratio at the level, clamped."""
        return self.sample.over_tokens(self.at_level, self.level)

    @cached_property
    def outside_raw(self) -> Bools:
        """Per token: the ratio lies outside the thresholds."""
        return (self.raw < self.lower) | (self.raw > self.upper)

    @cached_property
    def applied(self) -> Floats:
        """Per token: the bounded weight."""
        if self.zero:
            return np.where(self.outside_raw, 0, self.raw).astype(self.raw.dtype)
        return np.minimum(self.raw, np.asarray(self.upper, self.raw.dtype))

    @cached_property
    def weight(self) -> Floats:
        """Per token: what this version measures."""
        return self.applied if self.measures_applied else self.raw

    @cached_property
    def clamped(self) -> Floats:
        """Per token: the measured weight inside the thresholds, for spread and effective size."""
        return np.clip(self.weight, 0 if self.measures_applied else self.lower, self.upper)

    @cached_property
    def row_weight(self) -> Floats:
        """Per row: mean of the measured weight over its tokens, 0 without any."""
        return self.sample.row_mean(self.weight)

    @cached_property
    def deviation(self) -> Floats:
        """Per row: distance of its mean weight from 1."""
        return np.abs(self.row_weight - 1)

    @cached_property
    def row_high(self) -> Bools:
        """Per row: the mean of its raw weights is above the upper threshold."""
        return self.sample.row_mean(self.raw) > self.upper

    @cached_property
    def row_low(self) -> Bools:
        """Per row: the mean of its raw weights is below the lower threshold."""
        return self.sample.row_mean(self.raw) < self.lower

    @cached_property
    def high(self) -> Bools:
        """At the level: tokens by the ratio, rows by its logarithm against a float32 one."""
        return self.at_level > self.upper if self.level == "token" else self.log_ratio > float32_log(self.upper)

    @cached_property
    def low(self) -> Bools:
        """At the level, as `high`."""
        return self.at_level < self.lower if self.level == "token" else self.log_ratio < float32_log(self.lower)

    @cached_property
    def token_high(self) -> Bools:
        """Per token: `high` of its row."""
        return self.sample.over_tokens(self.high, self.level)

    @cached_property
    def token_low(self) -> Bools:
        """Per token: `low` of its row."""
        return self.sample.over_tokens(self.low, self.level)

    @cached_property
    def _rejected_at_level(self) -> Bools:
        return ~((self.at_level >= self.lower) & (self.at_level <= self.upper))

    @cached_property
    def rejected(self) -> Bools:
        """Per token: the clamped ratio lies outside the thresholds, both inclusive."""
        return self.sample.over_tokens(self._rejected_at_level, self.level)

    @cached_property
    def row_rejected(self) -> Bools:
        """Per row: any token rejected; a row without tokens goes by its ratio of 1."""
        return self.sample.any_in_row(self.rejected) if self.level == "token" else self._rejected_at_level


@dataclass(frozen=True)
class Vetoed:
    """Tokens whose unclamped ratio lies below a threshold; one of them rejects its row."""

    sample: Sample
    threshold: float | None

    @cached_property
    def catastrophic(self) -> Bools:
        """Per token; none when the veto is off."""
        if self.threshold is None:
            return np.zeros(len(self.sample.log_ratio), np.bool_)
        return self.sample.log_ratio < float32_log(self.threshold)

    @cached_property
    def row_vetoed(self) -> Bools:
        """Per row."""
        return self.sample.any_in_row(self.catastrophic)

    @cached_property
    def rejected(self) -> Bools:
        """Per token."""
        return self.sample.segments.spread(self.row_vetoed)


@dataclass(frozen=True)
class Estimated:
    """Rejection by k1, k2 or k3 (since 2026): log ratios are clamped per token, then aggregated."""

    sample: Sample
    gate: Gate

    @property
    def lower(self) -> float | None:
        """Bound on k1; k2 and k3 have none."""
        return self.gate.keep[0]

    @property
    def upper(self) -> float:
        """Bound on the statistic."""
        return math.inf if self.gate.keep[1] is None else self.gate.keep[1]

    @cached_property
    def _per_token(self) -> Floats:
        y = clamp(self.sample.log_ratio)
        if self.gate.statistic == "k1":
            return -y
        estimate: Floats = 0.5 * y**2 if self.gate.statistic == "k2" else exp(y) - 1 - y
        return estimate

    @cached_property
    def at_level(self) -> Floats:
        """The statistic: [T] or [S]."""
        sample, level = self.sample, self.gate.level
        if level == "token":
            return self._per_token
        reduce = {"sum": sample.row_sum, "mean": sample.row_mean, "max": sample.row_max}[level]
        return reduce(self._per_token)

    @cached_property
    def statistic(self) -> Floats:
        """Per token: that of its row, if the level is a row's."""
        return self.sample.over_tokens(self.at_level, self.gate.level)

    @cached_property
    def row_statistic(self) -> Floats:
        """Per row: the mean of its tokens, if the level is a token's."""
        return self.sample.row_mean(self.at_level) if self.gate.level == "token" else self.at_level

    @cached_property
    def row_magnitude(self) -> Floats:
        """Per row."""
        return np.abs(self.row_statistic)

    @cached_property
    def clamped(self) -> Floats:
        """Per token: inside the bounds, for the spread."""
        return np.clip(self.statistic, self.lower or 0.0, self.upper)

    @cached_property
    def high(self) -> Bools:
        """Per token."""
        return self.statistic > self.upper

    @cached_property
    def low(self) -> Bools:
        """Per token; k2 and k3 are never low."""
        return self.statistic < (-math.inf if self.lower is None else self.lower)

    @cached_property
    def row_high(self) -> Bools:
        """Per row."""
        return self.row_statistic > self.upper

    @cached_property
    def row_low(self) -> Bools:
        """Per row; k2 and k3 are never low."""
        return self.row_statistic < (-math.inf if self.lower is None else self.lower)

    @cached_property
    def rejected(self) -> Bools:
        """Per token: outside the bounds, both inclusive; a bound that is nan rejects everything."""
        inside = self.statistic <= self.upper
        return ~(inside if self.lower is None else inside & (self.statistic >= self.lower))

    @cached_property
    def rejection(self) -> Floats:
        """Per token: `rejected` as 0 and 1 in the data's dtype, in which verl averages it."""
        return self.rejected.astype(self.statistic.dtype)

    @cached_property
    def row_rejection(self) -> Floats:
        """Per row: any token rejected, as 0 and 1 in the data's dtype."""
        return self.sample.any_in_row(self.rejected).astype(self.statistic.dtype)


@dataclass(frozen=True)
class Rejected:
    """What all rejections together leave out."""

    sample: Sample
    rejected: Bools

    @cached_property
    def rejection(self) -> Floats:
        """Per token: `rejected` as 0 and 1 in the data's dtype, in which verl averages it."""
        return self.rejected.astype(self.sample.policy.dtype)

    @cached_property
    def row_rejected(self) -> Bools:
        """Per row: any token rejected."""
        return self.sample.any_in_row(self.rejected)
