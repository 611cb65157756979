"""What verl computes from two policies and a configuration: weights, the mask that is left, and the logged names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Floats
from mismatchctl.correction.model import Weight
from mismatchctl.frameworks.verl import metrics as names
from mismatchctl.frameworks.verl.metrics import compute
from mismatchctl.frameworks.verl.plan import Plan
from mismatchctl.frameworks.verl.sample import Sample, mean
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted
from mismatchctl.frameworks.verl.versions import Version

_SMALLEST_FACTOR = 1e-8  # below it verl does not divide


@dataclass(frozen=True)
class Computed:
    """Of one batch: final weights of the valid tokens [T] or None, which of them are kept [T], and what is logged."""

    weights: Floats | None
    kept: Bools
    logged: dict[str, float]


def compute_correction(sample: Sample, plan: Plan, version: Version) -> Computed:
    """verl's helper: weights by rollout_is, rejection by rollout_rs and veto, and their metrics."""
    dialects = {"flat": _one_ratio, "ratio": _ratios, "estimator": _estimators}
    return dialects[version.dialect](sample, plan, version)


def off_policy(sample: Sample, version: Version) -> dict[str, float]:
    """How far the policies are apart: logged with every configuration, and by itself in bypass mode of 2025-11."""
    subject = OffPolicy(sample)
    if version.dialect == "flat":
        return compute(names.OFF_POLICY, subject, f"{version.prefix}mismatch_")
    return compute((*names.OFF_POLICY, *names.CHI2), subject, version.prefix)


def _one_ratio(sample: Sample, plan: Plan, version: Version) -> Computed:
    """#3915: one ratio and two thresholds; without a threshold nothing is computed."""
    weight, kept = plan.weight, np.ones(len(sample.policy), np.bool_)
    if weight is None:
        return Computed(None, kept, {})
    low, high = plan.rejections[0].keep if plan.rejections else (weight.watch_low, weight.truncate)
    upper = math.inf if high is None else high
    subject = Weighted(sample, weight.level, 1.0 / upper if low is None else low, upper)
    table = names.GEOMETRIC_WEIGHTS_2025_10 if weight.level == "geometric" else _table(weight.level)
    prefix = f"{version.prefix}rollout_is_"
    logged = compute(table, subject, prefix)
    if plan.rejections:
        kept &= ~subject.rejected
        logged |= compute(names.REJECTED, subject, prefix)
    veto = Vetoed(sample, plan.veto)
    logged |= compute(names.VETO, veto, version.prefix) | off_policy(sample, version)
    return Computed(subject.raw if plan.rejections else subject.applied, kept & ~veto.rejected, logged)


def _ratios(sample: Sample, plan: Plan, version: Version) -> Computed:
    """2025-11: weights and rejection each by a ratio at its own level; veto."""
    weights, logged = _weights(sample, plan.weight, version)
    kept = np.ones(len(sample.policy), np.bool_)
    for gate in plan.rejections:
        low, high = gate.keep
        rejection = Weighted(sample, gate.level, low or 0.0, math.inf if high is None else high)
        logged |= compute((*_table(gate.level), *names.REJECTED), rejection, f"{version.prefix}rollout_rs_")
        kept &= ~rejection.rejected
    veto = Vetoed(sample, plan.veto)
    logged |= compute(names.VETO, veto, version.prefix) | off_policy(sample, version)
    return Computed(weights, kept & ~veto.rejected, logged)


def _estimators(sample: Sample, plan: Plan, version: Version) -> Computed:
    """2026: weights, and any number of rejections by k1, k2, k3."""
    weights, logged = _weights(sample, plan.weight, version)
    prefix = f"{version.prefix}rollout_rs_"
    rejected = np.zeros(len(sample.policy), np.bool_)
    for gate in plan.rejections:
        rule = Estimated(sample, gate)
        table = names.TOKEN_ESTIMATES if gate.level == "token" else names.ROW_ESTIMATES
        if gate.statistic == "k1":
            table = (*table, *names.K1_ESTIMATES)
        option = f"token_{gate.statistic}" if gate.level == "token" else f"seq_{gate.level}_{gate.statistic}"
        logged |= compute(table, rule, f"{prefix}{option}_")
        rejected |= rule.rejected
    if plan.rejections:
        logged |= compute(names.REJECTED_BY_ANY, Rejected(sample, rejected), prefix)
    return Computed(weights, ~rejected, logged | off_policy(sample, version))


def _weights(sample: Sample, weight: Weight | None, version: Version) -> tuple[Floats | None, dict[str, float]]:
    """Final weights and their metrics: measured before they are normalized."""
    if weight is None:
        return None, {}
    low, upper = weight.bounds
    subject = Weighted(
        sample,
        weight.level,
        1.0 / upper if weight.zero is None else low,
        upper,
        zero=weight.zero is not None,
        measures_applied=version.dialect == "estimator",
    )
    prefix = f"{version.prefix}rollout_is_"
    logged = compute(_table(weight.level), subject, prefix)
    if subject.zero:
        logged |= compute(names.ICEPOP, subject, prefix)
    if weight.normalize == "none":
        return subject.applied, logged
    factor = _normalization(sample, subject.applied, weight.level, version)
    divide = factor > _SMALLEST_FACTOR
    logged[f"{prefix}batch_norm_factor"] = float(factor) if divide else 1.0
    return subject.applied / factor if divide else subject.applied, logged


def _normalization(sample: Sample, weights: Floats, level: str, version: Version) -> Floats:
    """Mean weight of the batch before rejection: of all tokens, or of the rows' means."""
    if level == "token":
        return mean(weights)
    rows = sample.row_mean(weights)
    return mean(rows if version.normalizes_empty else rows[sample.segments.nonempty])


def _table(level: str) -> tuple[names.Logged, ...]:
    return names.TOKEN_WEIGHTS if level == "token" else names.ROW_WEIGHTS
