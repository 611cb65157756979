"""Metrics of verl's helper: tables of logged names, weights, rejection and their values."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from statistics import fmean

import numpy as np

from mismatchctl.core.batch import Bools, Floats
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Weight
from mismatchctl.frameworks.adapter import LoggedMetric, Meaning
from mismatchctl.frameworks.verl.configuration import VerlPlan, find_rs_option
from mismatchctl.frameworks.verl.statistics import (
    REDUCTIONS,
    EstimatorStatistics,
    OffPolicyStatistics,
    PolicyPair,
    RejectionStatistics,
    Values,
    VetoStatistics,
    WeightStatistics,
    clamp_log_ratio,
    clamped_ratio,
)
from mismatchctl.frameworks.verl.versions import VerlVersion
from mismatchctl.measure.metrics.metric import ALL_GATES, RAW_WEIGHTS, VALID_TOKENS, Quantity

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
"""Logged since #3984."""

VETO: Metrics = (
    LoggedMetric("rollout_is_veto_fraction", lambda s: s.row_vetoed, "Whether the row has such a token", "rows",
                 like=Quantity.CATASTROPHIC),
    LoggedMetric("rollout_is_catastrophic_token_fraction", lambda s: s.catastrophic,
                 "1 if the token's unclamped ratio is below the veto threshold, 0 without a veto",
                 "tokens", like=Quantity.CATASTROPHIC),
)  # fmt: skip
"""Logged until 2026, as 0 if the veto is off."""


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
"""Names by level."""
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
"""Logged until 2026, without the veto."""
ANY_REJECTION: Metrics = (
    LoggedMetric("masked_fraction", lambda s: s.flags.astype(s.sample.policy.dtype),
                 "1 if any option rejects the token, else 0, in the data's dtype", "tokens",
                 like=Quantity.REJECTED, basis=ALL_GATES),
    LoggedMetric("seq_masked_fraction", lambda s: s.sample.any_in_row(s.flags),
                 "1 if any option rejects any token of the row", "rows", like=Quantity.REJECTED, basis=ALL_GATES),
)  # fmt: skip
"""Logged since 2026, over all options. Each option's own share leaves empty rows out."""

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


_DEBUG_PREFIX, _DEBUG_WHEN, _DEBUG_QUANTITY = (
    "training/rollout_",
    "not in bypass mode",
    "distance of the token's two probabilities",
)
DEBUG_MEANINGS: tuple[Meaning, ...] = (
    Meaning(f"{_DEBUG_PREFIX}probs_diff_valid", _DEBUG_WHEN, "1 where any token is valid, else 0", VALID_TOKENS, "max"),
    Meaning(f"{_DEBUG_PREFIX}probs_diff_max", _DEBUG_WHEN, _DEBUG_QUANTITY, VALID_TOKENS, "max", Quantity.PROB_DIFF),
    Meaning(f"{_DEBUG_PREFIX}probs_diff_mean", _DEBUG_WHEN, _DEBUG_QUANTITY, VALID_TOKENS, "mean", Quantity.PROB_DIFF),
    Meaning(f"{_DEBUG_PREFIX}probs_diff_std", _DEBUG_WHEN, _DEBUG_QUANTITY, VALID_TOKENS, "standard deviation (n - 1)",
            Quantity.PROB_DIFF),
    Meaning(f"{_DEBUG_PREFIX}actor_probs_pearson_corr", _DEBUG_WHEN,
            "probabilities of the token under train and rollout", VALID_TOKENS, "Pearson correlation", Quantity.PROBS),
)  # fmt: skip
"""Meanings of the names in calculate_debug_metrics, before any rejection."""


def compute_debug_metrics(train: Floats, rollout: Floats) -> dict[str, float]:
    """Compute differences of probabilities and their Pearson correlation, over the valid tokens [T].

    Undefined values are nan, like in verl: the deviation of one token, the correlation of constants.
    """
    if not len(train):
        return {item.name: float("nan") for item in DEBUG_MEANINGS} | {f"{_DEBUG_PREFIX}probs_diff_valid": 0}
    ours, theirs = exp(train), exp(rollout)
    differences = np.abs(ours - theirs).astype(np.float64)
    return {
        f"{_DEBUG_PREFIX}probs_diff_valid": 1,
        f"{_DEBUG_PREFIX}probs_diff_max": float(differences.max()),
        f"{_DEBUG_PREFIX}probs_diff_mean": float(differences.mean()),
        f"{_DEBUG_PREFIX}probs_diff_std": float(differences.std(ddof=1)) if len(differences) > 1 else float("nan"),
        f"{_DEBUG_PREFIX}actor_probs_pearson_corr": _pearson(ours.astype(np.float64), theirs.astype(np.float64)),
    }


def _pearson(a: Floats, b: Floats) -> float:
    a, b = a - a.mean(), b - b.mean()
    scale = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / scale if scale else float("nan")


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
