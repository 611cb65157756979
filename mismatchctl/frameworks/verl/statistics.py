"""Statistics that verl's helper computes, and the configurations of verl's preset factories."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Gate
from mismatchctl.errors import ConfigError, DataError, suggestion
from mismatchctl.io.scripts import UNPACKING_NOT_READ, PythonCall

CONFIG_CLASS = "RolloutCorrectionConfig"
Keys = dict[str, Any]


@dataclass(frozen=True)
class Factory:
    """A factory: its parameters with their defaults, and the keys that it sets."""

    defaults: Mapping[str, Any]
    keys: Callable[[Mapping[str, Any]], Keys]


def _weight_factory(level: str, **more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        return {"rollout_is": level, "rollout_is_threshold": given["threshold"], "rollout_rs": None, **more}

    return Factory({"threshold": 2.0}, keys)


def _ratio_rejection_factory(is_level: str | None, level: str, defaults: Keys, **more: Any) -> Factory:
    """Create a factory for rejection by the ratio, until 2026."""

    def keys(given: Mapping[str, Any]) -> Keys:
        upper = given.get("rs_threshold", given.get("threshold"))
        said: Keys = {"rollout_is": is_level, "rollout_rs": level, "rollout_rs_threshold": upper}
        said["rollout_rs_threshold_lower"] = given.get("rs_threshold_lower", 0 if "threshold" in given else None)
        if is_level is not None:
            said["rollout_is_threshold"] = given.get("is_threshold", given.get("threshold"))
        if "veto_threshold" in given:
            said["rollout_token_veto_threshold"] = given["veto_threshold"]
        return said | more

    return Factory(defaults, keys)


def _option_rejection_factory(is_level: str | None, option: str, threshold: Any, **more: Any) -> Factory:
    """Create a factory for rejection by an estimator, since 2026."""

    def keys(given: Mapping[str, Any]) -> Keys:
        said: Keys = {"rollout_is": is_level, "rollout_rs": option, "rollout_rs_threshold": given["rs_threshold"]}
        return said | ({"rollout_is_threshold": given["is_threshold"]} if is_level else {}) | more

    return Factory({"rs_threshold": threshold} | ({"is_threshold": 2.0} if is_level else {}), keys)


def _icepop_factory(**more: Any) -> Factory:
    def keys(given: Mapping[str, Any]) -> Keys:
        threshold = f"{given['threshold_lower']}_{given['threshold']}"
        return {"rollout_is": "token", "rollout_is_threshold": threshold, "rollout_rs": None, **more}

    return Factory({"threshold": 5.0, "threshold_lower": 0.5}, keys)


def _empty_factory(**more: Any) -> Factory:
    return Factory({}, lambda given: {"rollout_is": None, "rollout_rs": None, **more})


_VETO_DEFAULTS = {"rs_threshold": 1.001, "rs_threshold_lower": None, "veto_threshold": 1e-4}
_SEQUENCE_DEFAULTS = {"is_threshold": 2.0, "rs_threshold": 2.0, "rs_threshold_lower": None}
_OLD_PPO_KEYS: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": False}
_OLD_PURE_KEYS: Keys = {"bypass_old_logprob_for_rollout": True, "use_pure_rollout_correction": True}
_PPO_KEYS: Keys = {"bypass_mode": True, "use_policy_gradient": False}
_PURE_KEYS: Keys = {"bypass_mode": True, "use_policy_gradient": True}
_CLIP_KEYS: Keys = {"bypass_mode": True, "loss_type": "ppo_clip"}
_REINFORCE_KEYS: Keys = {"bypass_mode": True, "loss_type": "reinforce"}
_GEOMETRIC_REJECTION = "seq_mean_k1", "0.999_1.001"
_K3_REJECTION = "seq_mean_k3", 0.01

FACTORIES: dict[str, dict[str, Factory]] = {
    "2026-08": {
        "decoupled_token_is": _weight_factory("token"),
        "decoupled_seq_is": _weight_factory("sequence"),
        "decoupled_token_icepop": _icepop_factory(),
        "decoupled_seq_is_rs": _option_rejection_factory("sequence", "seq_sum_k1", "0.5_2.0"),
        "decoupled_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION),
        "decoupled_geo_rs_seq_tis": _option_rejection_factory("sequence", *_GEOMETRIC_REJECTION),
        "decoupled_geo_rs_token_tis": _option_rejection_factory("token", *_GEOMETRIC_REJECTION),
        "decoupled_k3_rs": _option_rejection_factory(None, *_K3_REJECTION),
        "decoupled_k3_rs_seq_tis": _option_rejection_factory("sequence", *_K3_REJECTION),
        "decoupled_k3_rs_token_tis": _option_rejection_factory("token", *_K3_REJECTION),
        "bypass_ppo_clip": _empty_factory(**_CLIP_KEYS),
        "bypass_ppo_clip_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION, **_CLIP_KEYS),
        "bypass_ppo_clip_k3_rs": _option_rejection_factory(None, *_K3_REJECTION, **_CLIP_KEYS),
        "bypass_pg_is": _weight_factory("sequence", **_REINFORCE_KEYS),
        "bypass_pg_token_icepop": _icepop_factory(**_REINFORCE_KEYS),
        "bypass_pg_geo_rs": _option_rejection_factory(None, *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "bypass_pg_geo_rs_seq_tis": _option_rejection_factory("sequence", *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "bypass_pg_geo_rs_token_tis": _option_rejection_factory("token", *_GEOMETRIC_REJECTION, **_REINFORCE_KEYS),
        "disabled": _empty_factory(),
    },
    "2025-11-25": {
        "decoupled_token_is": _weight_factory("token"),
        "decoupled_seq_is": _weight_factory("sequence"),
        "decoupled_seq_is_rs": _ratio_rejection_factory("sequence", "sequence", _SEQUENCE_DEFAULTS),
        "decoupled_geo_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS),
        "ppo_is_bypass": _weight_factory("token", **_PPO_KEYS),
        "pg_is": _weight_factory("sequence", **_PURE_KEYS),
        "pg_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS, **_PURE_KEYS),
        "disabled": _empty_factory(),
    },
    "2025-11-07": {
        "token_is": _weight_factory("token"),
        "token_tis": _weight_factory("token"),
        "seq_is": _weight_factory("sequence"),
        "seq_is_rs": _ratio_rejection_factory("sequence", "sequence", _SEQUENCE_DEFAULTS),
        "seq_mis": _ratio_rejection_factory("sequence", "sequence", {"threshold": 2.0}),
        "geo_rs": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS),
        "geo_mis": _ratio_rejection_factory(None, "geometric", _VETO_DEFAULTS | {"rs_threshold_lower": 0.999}),
        "ppo_is_bypass": _weight_factory("token", **_OLD_PPO_KEYS),
        "pure_is": _weight_factory("sequence", **_OLD_PURE_KEYS),
        "disabled": _empty_factory(),
    },
}
"""Factories by version, newest first. 2025-11-12 has the factories of 2025-11-25."""


def expand_factory(version: str, name: str) -> Keys:
    """Return the configuration that a factory sets at a version."""
    factory = FACTORIES[version][name]
    return {"rollout_correction": factory.keys(factory.defaults)}


def read_call(call: PythonCall) -> Keys:
    """Return the configuration that a call sets.

    Raises:
        ConfigError: no version has this factory with these parameters, or a parameter is computed.
    """
    if call.computed:
        raise ConfigError(f"line {call.line}: {call.computed[0]} is no plain value with a name")
    if call.brings_more:
        raise ConfigError(f"line {call.line}: {UNPACKING_NOT_READ}")
    return {"rollout_correction": _expand_call(call)}


def _expand_call(call: PythonCall) -> Keys:
    if not call.function:
        return call.given if call.partial else {"rollout_is": "sequence"} | call.given  # the default in Python
    known = [factories[call.function] for factories in FACTORIES.values() if call.function in factories]
    if not known:
        names = {name for factories in FACTORIES.values() for name in factories}
        raise ConfigError(f"line {call.line}: {CONFIG_CLASS} has no {call.function}{suggestion(call.function, names)}")
    for factory in known:
        if call.given.keys() <= factory.defaults.keys():
            return factory.keys(dict(factory.defaults) | call.given)
    wanted = ", ".join(known[0].defaults)
    raise ConfigError(f"line {call.line}: {CONFIG_CLASS}.{call.function} takes {wanted or 'nothing'}")


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
    """Two policies on the valid tokens of one batch.

    Attributes:
        policy: log-probs of the trainer [T]: its recomputation, in bypass mode the policy being updated.
        reference: log-probs of the rollout engine [T].
        segments: one per row [S], including empty rows if verl counts them.
    """

    policy: Floats
    reference: Floats
    segments: Segments

    def __post_init__(self) -> None:
        if not len(self.policy):
            raise DataError("response_mask must contain at least one valid token (1)", column="response_mask")

    @cached_property
    def log_ratio(self) -> Floats:
        """Policy minus reference [T]."""
        return self.policy - self.reference

    def row_sum(self, values: Floats) -> Floats:
        """Sum over each row's valid tokens [S]."""
        return self.segments.sum(values).astype(values.dtype)

    def row_mean(self, values: Floats) -> Floats:
        """Compute the mean over each row's valid tokens [S], or 0 for an empty row."""
        return self.row_sum(values) / np.maximum(self.segments.lengths, 1).astype(values.dtype)

    def row_max(self, values: Floats) -> Floats:
        """Return the maximum over each row's valid tokens [S], or 0 for an empty row."""
        return np.where(self.segments.nonempty, self.segments.max(values), 0).astype(values.dtype)

    def any_in_row(self, flags: Bools) -> Bools:
        """Return True for rows with a flagged valid token [S]."""
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
    """Compute exp of a log ratio clamped to ±20."""
    return exp(clamp_log_ratio(log_ratio))


@dataclass(frozen=True)
class OffPolicyStatistics:
    """Distance between the two policies. Values are not clamped unless stated."""

    sample: PolicyPair

    @cached_property
    def policy_log_ppl(self) -> Floats:
        """Negative mean log-prob of the row under train."""
        return -self.sample.row_mean(self.sample.policy)

    @cached_property
    def reference_log_ppl(self) -> Floats:
        """Negative mean log-prob of the row under rollout."""
        return -self.sample.row_mean(self.sample.reference)

    @cached_property
    def log_ppl_diff(self) -> Floats:
        """Log perplexity of the row under train minus under rollout."""
        return self.policy_log_ppl - self.reference_log_ppl


@dataclass(frozen=True)
class WeightStatistics:
    """The ratio at a level with two thresholds, for importance weights or rejection by the ratio.

    Attributes:
        level: token, sequence or geometric.
        lower: weights below this count as low.
        upper: weights above this count as high, and `applied` may truncate them.
        zero: weights outside become 0 (IcePop) instead of being truncated.
        measures_applied: True to measure bounded weights (since 2026), False to measure raw weights.
        fractions_applied: True if the fractions of rows outside describe bounded weights too (0.8.0).
    """

    sample: PolicyPair
    level: str
    lower: float
    upper: float
    zero: bool = False
    measures_applied: bool = False
    fractions_applied: bool = False

    @cached_property
    def log_ratio(self) -> Floats:
        """Unclamped log ratio at the level: [T] or [S]."""
        return self.sample.level(self.level)

    @cached_property
    def at_level(self) -> Floats:
        """Clamped ratio at the level: [T] or [S]."""
        return clamped_ratio(self.log_ratio)

    @cached_property
    def raw(self) -> Floats:
        """Ratio at the rule's level, per token, clamped to exp(±20)."""
        return self.sample.over_tokens(self.at_level, self.level)

    @cached_property
    def outside_raw(self) -> Bools:
        """True if the token's ratio is outside the thresholds."""
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
        """Mean weight of the row's tokens, or 0 for an empty row."""
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
        """True if the clamped ratio of the token (or of its row) is outside the inclusive thresholds."""
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
        """True if the row has a catastrophic token."""
        return self.sample.any_in_row(self.catastrophic)

    @cached_property
    def rejected(self) -> Bools:
        """True if the token's row is vetoed."""
        return self.sample.segments.spread(self.row_vetoed)


@dataclass(frozen=True)
class EstimatorStatistics:
    """Rejection by k1, k2 or k3 (since 2026). Log ratios are clamped per token, then aggregated."""

    sample: PolicyPair
    gate: Gate

    @property
    def lower(self) -> float:
        """Lower bound on k1, or -inf for k2 and k3."""
        return self.gate.bounds[0]

    @property
    def upper(self) -> float:
        """Upper bound on the statistic."""
        return self.gate.bounds[1]

    @cached_property
    def _per_token(self) -> Floats:
        y = clamp_log_ratio(self.sample.log_ratio)
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
        """The statistic at the option's level, per token. A row's value is repeated on its tokens."""
        return self.sample.over_tokens(self.at_level, self.gate.level)

    @cached_property
    def row_statistic(self) -> Floats:
        """The row's statistic. For a token option, the mean over its tokens."""
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
