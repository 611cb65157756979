"""What verl measures, each once for all the names that reduce it; per token [T] or per row [S]."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mismatchctl.batch import Bools, Floats
from mismatchctl.correction.model import Gate
from mismatchctl.frameworks.verl.sample import PolicyPair, clamp, float32_log, ratio
from mismatchctl.surrogates import exp


@dataclass(frozen=True)
class OffPolicy:
    """How far the two policies are apart; nothing is clamped unless it says so."""

    sample: PolicyPair

    @cached_property
    def policy_log_ppl(self) -> Floats:
        """Minus the mean log-prob of the row under train."""
        return -self.sample.row_mean(self.sample.policy)

    @cached_property
    def reference_log_ppl(self) -> Floats:
        """Minus the mean log-prob of the row under rollout."""
        return -self.sample.row_mean(self.sample.reference)

    @cached_property
    def log_ppl_diff(self) -> Floats:
        """Log perplexity of the row under train minus under rollout."""
        return self.policy_log_ppl - self.reference_log_ppl


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

    sample: PolicyPair
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
    def at_level(self) -> Floats:
        """Ratio, clamped: [T] or [S]."""
        return ratio(self.log_ratio)

    @cached_property
    def raw(self) -> Floats:
        """Ratio at the rule's level, per token, clamped to exp(+-20)."""
        return self.sample.over_tokens(self.at_level, self.level)

    @cached_property
    def outside_raw(self) -> Bools:
        """Whether the token's ratio lies outside the thresholds."""
        return (self.raw < self.lower) | (self.raw > self.upper)

    @cached_property
    def applied(self) -> Floats:
        """Weight of the token after its bound."""
        if self.zero:
            return np.where(self.outside_raw, 0, self.raw).astype(self.raw.dtype)
        return np.minimum(self.raw, np.asarray(self.upper, self.raw.dtype))

    @cached_property
    def weight(self) -> Floats:
        """Weight of the token: since 2026 after its bound, until then before."""
        return self.applied if self.measures_applied else self.raw

    @cached_property
    def row_weight(self) -> Floats:
        """Mean weight of the row's tokens, 0 without any."""
        return self.sample.row_mean(self.weight)

    @cached_property
    def high(self) -> Bools:
        """Whether the ratio is above the upper threshold; rows compare logarithms, the threshold's in float32."""
        return self.at_level > self.upper if self.level == "token" else self.log_ratio > float32_log(self.upper)

    @cached_property
    def low(self) -> Bools:
        """Whether the ratio is below the lower threshold; rows compare logarithms, the threshold's in float32."""
        return self.at_level < self.lower if self.level == "token" else self.log_ratio < float32_log(self.lower)

    @cached_property
    def rejected_at_level(self) -> Bools:
        """Whether the clamped ratio at the level lies outside the thresholds, both inclusive: [T] or [S]."""
        return ~((self.at_level >= self.lower) & (self.at_level <= self.upper))

    @cached_property
    def rejected(self) -> Bools:
        """Whether the clamped ratio of the token (or of its row) lies outside the thresholds, both inclusive."""
        return self.sample.over_tokens(self.rejected_at_level, self.level)


@dataclass(frozen=True)
class Vetoed:
    """Tokens whose unclamped ratio lies below a threshold; one of them rejects its row."""

    sample: PolicyPair
    threshold: float | None

    @cached_property
    def catastrophic(self) -> Bools:
        """Whether the token's unclamped ratio lies below the veto threshold; never when the veto is off."""
        if self.threshold is None:
            return np.zeros(len(self.sample.log_ratio), np.bool_)
        return self.sample.log_ratio < float32_log(self.threshold)

    @cached_property
    def row_vetoed(self) -> Bools:
        """Whether the row has such a token."""
        return self.sample.any_in_row(self.catastrophic)

    @cached_property
    def rejected(self) -> Bools:
        """Whether the token's row is vetoed."""
        return self.sample.segments.spread(self.row_vetoed)


@dataclass(frozen=True)
class Estimated:
    """Rejection by k1, k2 or k3 (since 2026): log ratios are clamped per token, then aggregated."""

    sample: PolicyPair
    gate: Gate

    @property
    def lower(self) -> float:
        """Bound on k1; k2 and k3 have none."""
        return self.gate.bounds[0]

    @property
    def upper(self) -> float:
        """Bound on the statistic."""
        return self.gate.bounds[1]

    @cached_property
    def _per_token(self) -> Floats:
        y = clamp(self.sample.log_ratio)
        if self.gate.statistic == "k1":
            return -y
        return 0.5 * y**2 if self.gate.statistic == "k2" else exp(y) - 1 - y

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
        """The statistic at the option's level: a row's value stands for each of its tokens."""
        return self.sample.over_tokens(self.at_level, self.gate.level)

    @cached_property
    def row_statistic(self) -> Floats:
        """The row's statistic: of a token option, the mean over its tokens."""
        return self.sample.row_mean(self.at_level) if self.gate.level == "token" else self.at_level

    @cached_property
    def rejected(self) -> Bools:
        """Whether the token's statistic lies outside the bounds, both inclusive; nan rejects everything."""
        return ~((self.statistic <= self.upper) & (self.statistic >= self.lower))


@dataclass(frozen=True)
class Rejected:
    """What all rejections together leave out."""

    sample: PolicyPair
    flags: Bools
