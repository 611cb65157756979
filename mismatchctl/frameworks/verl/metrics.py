"""Metrics of verl's helper: tables of logged names, weights, rejection and their values."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean
from typing import Any, Literal

import numpy as np

from mismatchctl.core.batch import Bools, Floats
from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.corrections.model import Weight
from mismatchctl.frameworks.adapter import Meaning
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
Population = Literal["tokens", "rows", "filled"]


@dataclass(frozen=True)
class MeasuredQuantity:
    """A quantity before its reduction.

    Attributes:
        words: its description.
        of: computes its values.
        like: the quantity in the registry of metrics, or None.
        basis: the compared policies, or weights at a stage.
    """

    words: str
    of: Callable[[Any], Values]
    like: Quantity | None = None
    basis: str = "train/rollout"


@dataclass(frozen=True)
class LoggedName:
    """One name that verl logs.

    Attributes:
        name: the name without the prefixes of its version and its rule.
        quantity: the reduced quantity.
        over: all valid tokens, all rows (empty rows count, with 0/0 as 0), or only non-empty rows.
        reduction: one of `REDUCTIONS`.
    """

    name: str
    quantity: MeasuredQuantity
    over: Population
    reduction: str = "mean"


_LOG_PPL_DIFF = MeasuredQuantity(
    "Log perplexity of the row under train minus under rollout", lambda s: s.log_ppl_diff, Quantity.LOG_PPL_DIFF
)
OFF_POLICY: tuple[LoggedName, ...] = (
    LoggedName("training_ppl", MeasuredQuantity(
        "Perplexity of the row under train", lambda s: exp(s.policy_log_ppl), Quantity.TRAIN_PPL), "rows"),
    LoggedName("training_log_ppl", MeasuredQuantity(
        "Minus the mean log-prob of the row under train", lambda s: s.policy_log_ppl, Quantity.TRAIN_LOG_PPL), "rows"),
    LoggedName("kl", MeasuredQuantity(
        "Log-prob of rollout minus train, per token: its mean estimates KL(rollout, train)",
        lambda s: -s.sample.log_ratio, Quantity.K1), "tokens"),
    LoggedName("k3_kl", MeasuredQuantity(
        "exp(x) - x - 1 of the log ratio x, per token, not clamped; the formula cancels in float32",
        lambda s: exp(s.sample.log_ratio) - s.sample.log_ratio - 1, Quantity.K3), "tokens"),
    LoggedName("rollout_ppl", MeasuredQuantity(
        "Perplexity of the row under rollout", lambda s: exp(s.reference_log_ppl), Quantity.ROLLOUT_PPL), "rows"),
    LoggedName("rollout_log_ppl", MeasuredQuantity(
        "Minus the mean log-prob of the row under rollout", lambda s: s.reference_log_ppl, Quantity.ROLLOUT_LOG_PPL),
        "rows"),
    LoggedName("log_ppl_diff", _LOG_PPL_DIFF, "rows"),
    LoggedName("log_ppl_abs_diff", MeasuredQuantity(
        "Distance of the row's two log perplexities", lambda s: np.abs(s.log_ppl_diff), Quantity.LOG_PPL_ABS_DIFF),
        "rows"),
    LoggedName("log_ppl_diff_max", _LOG_PPL_DIFF, "rows", "max"),
    LoggedName("log_ppl_diff_min", _LOG_PPL_DIFF, "rows", "min"),
    LoggedName("ppl_ratio", MeasuredQuantity(
        "Perplexity of the row under train over the one under rollout", lambda s: exp(s.log_ppl_diff),
        Quantity.PPL_RATIO), "rows"),
)  # fmt: skip

CHI2: tuple[LoggedName, ...] = (
    LoggedName("chi2_token", MeasuredQuantity(
        "Square of the ratio, per token, clamped to exp(+-20) before it is squared",
        lambda s: clamped_ratio(s.sample.log_ratio) ** 2, Quantity.SQUARED_RATIO), "tokens", "mean - 1"),
    LoggedName("chi2_seq", MeasuredQuantity(
        "Square of the ratio of the whole row, its logarithm clamped to +-20 before it is doubled",
        lambda s: exp(2 * clamp_log_ratio(s.sample.level("sequence"))), Quantity.SQUARED_PRODUCT), "rows", "mean - 1"),
)  # fmt: skip
"""Logged since #3984."""

VETO: tuple[LoggedName, ...] = (
    LoggedName("rollout_is_veto_fraction", MeasuredQuantity(
        "Whether the row has such a token", lambda s: s.row_vetoed, Quantity.CATASTROPHIC), "rows"),
    LoggedName("rollout_is_catastrophic_token_fraction", MeasuredQuantity(
        "Whether the token's unclamped ratio lies below the veto threshold; never when the veto is off",
        lambda s: s.catastrophic, Quantity.CATASTROPHIC), "tokens"),
)  # fmt: skip
"""Logged until 2026, as 0 if the veto is off."""


def _weight_quantity(words: str, of: Callable[[WeightStatistics], Values]) -> MeasuredQuantity:
    return MeasuredQuantity(words, of, None, RAW_WEIGHTS)


def _extreme_names(over: Population, largest: MeasuredQuantity, smallest: MeasuredQuantity) -> tuple[LoggedName, ...]:
    return LoggedName("max", largest, over, "max"), LoggedName("min", smallest, over, "min")


def _fraction_names(
    over: Population, prefix: str, sides: tuple[MeasuredQuantity, MeasuredQuantity]
) -> tuple[LoggedName, ...]:
    return LoggedName(f"{prefix}_high", sides[0], over), LoggedName(f"{prefix}_low", sides[1], over)


WEIGHT_QUANTITY = MeasuredQuantity(
    "Weight of the token: since 2026 after its bound, until then before",
    lambda s: s.weight,
    Quantity.WEIGHT,
    RAW_WEIGHTS,
)
_CLAMPED_WEIGHT = MeasuredQuantity(
    "Weight of the token, clamped into the thresholds: since 2026 at the upper one only",
    lambda s: np.clip(s.weight, 0 if s.measures_applied else s.lower, s.upper),
    Quantity.WEIGHT, "weights clamped into their thresholds",
)  # fmt: skip
_ROW_WEIGHT = _weight_quantity("Mean weight of the row's tokens, 0 without any", lambda s: s.row_weight)
_COMMON_WEIGHT_NAMES: tuple[LoggedName, ...] = (
    LoggedName("mean", WEIGHT_QUANTITY, "tokens"),
    LoggedName("std", _CLAMPED_WEIGHT, "tokens", "spread"),
    LoggedName("eff_sample_size", _CLAMPED_WEIGHT, "tokens", "ess"),
    LoggedName("seq_mean", _ROW_WEIGHT, "rows"),
    LoggedName("seq_std", _ROW_WEIGHT, "rows", "std"),
    LoggedName("seq_max", _ROW_WEIGHT, "rows", "max"),
    LoggedName("seq_min", _ROW_WEIGHT, "rows", "min"),
    LoggedName("seq_max_deviation", _weight_quantity(
        "Distance of the row's mean weight from 1", lambda s: np.abs(s.row_weight - 1)), "rows", "max"),
    *_fraction_names("rows", "seq_fraction", (
        _weight_quantity("Whether the row's mean weight, before the bound, is above the upper threshold",
                    lambda s: s.row_of_fractions > s.upper),
        _weight_quantity("Whether the row's mean weight, before the bound, is below the lower threshold",
                    lambda s: s.row_of_fractions < s.lower),
    )),
)  # fmt: skip
HIGH_QUANTITY = MeasuredQuantity(
    "Whether the ratio is above the upper threshold; rows compare logarithms, the threshold's in float32",
    lambda s: s.high,
    Quantity.ABOVE,
    RAW_WEIGHTS,
)
_RATIO_SIDES = (
    HIGH_QUANTITY,
    _weight_quantity(
        "Whether the ratio is below the lower threshold; rows compare logarithms, the threshold's in float32",
        lambda s: s.low,
    ),
)
_TOKEN_RATIO_SIDES = (
    _weight_quantity("Whether the ratio of the token's row is above the upper threshold",
                lambda s: s.sample.over_tokens(s.high, s.level)),
    _weight_quantity("Whether the ratio of the token's row is below the lower threshold",
                lambda s: s.sample.over_tokens(s.low, s.level)),
)  # fmt: skip
_LARGEST_RATIO = _weight_quantity("Ratio at the rule's level, per row, clamped above: so verl takes the largest",
                       lambda s: exp(np.minimum(s.log_ratio, LOG_RATIO_BOUND)))  # fmt: skip
_SMALLEST_RATIO = _weight_quantity("Ratio at the rule's level, per row, not clamped: so verl takes the smallest",
                        lambda s: exp(s.log_ratio))  # fmt: skip
_ROW_WEIGHT_NAMES = (*_COMMON_WEIGHT_NAMES, *_extreme_names("rows", _LARGEST_RATIO, _SMALLEST_RATIO))
_ROW_LEVEL_NAMES = (*_ROW_WEIGHT_NAMES, *_fraction_names("rows", "ratio_fraction", _RATIO_SIDES))
WEIGHTS: dict[str, tuple[LoggedName, ...]] = {
    "token": (
        *_COMMON_WEIGHT_NAMES,
        *_extreme_names("tokens", WEIGHT_QUANTITY, WEIGHT_QUANTITY),
        *_fraction_names("tokens", "ratio_fraction", _RATIO_SIDES),
    ),
    "sequence": _ROW_LEVEL_NAMES,
    "geometric": _ROW_LEVEL_NAMES,
}
"""Names by level."""
WEIGHTS_2025_10 = WEIGHTS | {
    "geometric": (*_ROW_WEIGHT_NAMES, *_fraction_names("tokens", "ratio_fraction", _TOKEN_RATIO_SIDES))
}
"""Names in 2025-10. #3915 weights the geometric fractions by tokens, and #3984 counts rows."""

ICEPOP: tuple[LoggedName, ...] = (
    LoggedName(
        "oob_ratio",
        _weight_quantity("Whether the token's ratio lies outside the thresholds", lambda s: s.outside_raw),
        "tokens",
    ),
)

_ROW_BOUNDED_WEIGHT = _weight_quantity(
    "Mean of the row's weights after their bound, 0 without tokens", lambda s: s.sample.row_mean(s.applied)
)
NORMALIZATION: dict[str, LoggedName] = {
    "token": LoggedName(
        "batch_norm_factor",
        _weight_quantity("Weight of the token after its bound", lambda s: s.applied),
        "tokens",
    ),
    "sequence": LoggedName("batch_norm_factor", _ROW_BOUNDED_WEIGHT, "filled"),
}
"""The mean that weights are divided by, before rejection, by level."""

NORMALIZATION_2025_11 = NORMALIZATION | {"sequence": LoggedName("batch_norm_factor", _ROW_BOUNDED_WEIGHT, "rows")}
"""The mean in 2025-11. #4070 includes empty rows, which lower the mean. #3980 leaves them out."""


def _masked_fraction_names(token: MeasuredQuantity, row: MeasuredQuantity) -> tuple[LoggedName, ...]:
    return LoggedName("masked_fraction", token, "tokens"), LoggedName("seq_masked_fraction", row, "rows")


_RATIO_REJECTION_BASIS = "rejection without the veto"
REJECTION = _masked_fraction_names(
    MeasuredQuantity("Whether the clamped ratio of the token (or of its row) lies outside the thresholds, "
             "both inclusive",
             lambda s: s.rejected, Quantity.REJECTED, _RATIO_REJECTION_BASIS),
    MeasuredQuantity("Whether any token of the row is rejected; a row without tokens goes by its ratio of 1",
             lambda s: s.sample.any_in_row(s.rejected) if s.level == "token" else s.rejected_at_level,
             Quantity.REJECTED, _RATIO_REJECTION_BASIS),
)  # fmt: skip
"""Logged until 2026, without the veto."""
ANY_REJECTION = _masked_fraction_names(
    MeasuredQuantity("1 where any option rejects the token, else 0, in the data's dtype",
             lambda s: s.flags.astype(s.sample.policy.dtype), Quantity.REJECTED, ALL_GATES),
    MeasuredQuantity("Whether any option rejects any token of the row",
             lambda s: s.sample.any_in_row(s.flags), Quantity.REJECTED, ALL_GATES),
)  # fmt: skip
"""Logged since 2026, over all options. Each option's own share leaves empty rows out."""


def _outside_quantities(
    what: str, of: Callable[[EstimatorStatistics], Values]
) -> tuple[MeasuredQuantity, MeasuredQuantity]:
    above = MeasuredQuantity(f"Whether {what} is above the upper bound", lambda s: of(s) > s.upper)
    return above, MeasuredQuantity(
        f"Whether {what} is below the lower bound; k2 and k3 have none", lambda s: of(s) < s.lower
    )


_STATISTIC, _ROW_STATISTIC = (
    MeasuredQuantity(
        "The statistic at the option's level: a row's value stands for each of its tokens", lambda s: s.statistic
    ),
    MeasuredQuantity("The row's statistic: of a token option, the mean over its tokens", lambda s: s.row_statistic),
)
_TOKEN_SIDES = _outside_quantities("the token's statistic", lambda s: s.statistic)
_ROW_SIDES = _outside_quantities("the row's statistic", lambda s: s.row_statistic)
_COMMON_ESTIMATE_NAMES: tuple[LoggedName, ...] = (
    LoggedName("mean", _STATISTIC, "tokens"),
    LoggedName("std", MeasuredQuantity(
        "The statistic of the token, clamped into the bounds",
        lambda s: np.clip(s.statistic, s.gate.keep[0] or 0.0, s.upper)), "tokens", "spread"),
    LoggedName("seq_mean", _ROW_STATISTIC, "filled"),
    LoggedName("seq_std", _ROW_STATISTIC, "filled", "std"),
    LoggedName("seq_max", _ROW_STATISTIC, "filled", "max"),
    LoggedName("seq_min", _ROW_STATISTIC, "filled", "min"),
    LoggedName("seq_max_deviation", MeasuredQuantity(
        "Absolute value of the row's statistic", lambda s: np.abs(s.row_statistic)), "filled", "max"),
    LoggedName("seq_fraction_high", _ROW_SIDES[0], "filled"),
    LoggedName("masked_fraction", MeasuredQuantity(
        "1 where the token is rejected, else 0, in the data's dtype, in which verl averages it",
        lambda s: s.rejected.astype(s.statistic.dtype)), "tokens"),
    LoggedName("seq_masked_fraction", MeasuredQuantity(
        "1 where any token of the row is rejected, else 0, in the data's dtype",
        lambda s: s.sample.any_in_row(s.rejected).astype(s.statistic.dtype)), "filled"),
)  # fmt: skip
_TOKEN_ESTIMATE_NAMES = (
    *_extreme_names("tokens", _STATISTIC, _STATISTIC),
    *_fraction_names("tokens", "fraction", _TOKEN_SIDES),
)
_ROW_ESTIMATE_NAMES = (
    *_extreme_names("filled", _ROW_STATISTIC, _ROW_STATISTIC),
    *_fraction_names("filled", "fraction", _ROW_SIDES),
)
_K1_NAMES = (LoggedName("seq_fraction_low", _ROW_SIDES[1], "filled"),)


def estimator_names(statistic: str, level: str) -> tuple[LoggedName, ...]:
    """Return the names of one option of rollout_rs since 2026."""
    return (
        *_COMMON_ESTIMATE_NAMES,
        *(_TOKEN_ESTIMATE_NAMES if level == "token" else _ROW_ESTIMATE_NAMES),
        *(_K1_NAMES if statistic == "k1" else ()),
    )


def compute_values(names: Iterable[LoggedName], subject: Statistics, prefix: str) -> dict[str, float]:
    """Compute the values of `names`, each under `prefix` + its name."""
    logged = {}
    for name in names:
        values = name.quantity.of(subject)
        if name.over == "filled":
            values = values[subject.sample.segments.nonempty]
        logged[prefix + name.name] = float(REDUCTIONS[name.reduction](values))
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


Measurement = tuple[Iterable[LoggedName], Statistics, str]
"""Names, the statistics to reduce, and the names' prefix."""


@dataclass(frozen=True)
class CorrectionOutcome:
    """Outcome of verl's helper on one batch.

    Attributes:
        weights: final weights of the valid tokens [T], or None without weights.
        kept: kept valid tokens [T].
        measured: the logged measurements.
        factor: the mean that weights were divided by, under its name. Empty without normalization.
    """

    weights: Floats | None
    kept: Bools
    measured: tuple[Measurement, ...]
    factor: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def logged(self) -> dict[str, float]:
        """Compute every logged value."""
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
    """Compute weights by rollout_is, rejection by rollout_rs and veto, and their metrics."""
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
    """Compute the tokens that rollout_rs and the veto keep."""
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
