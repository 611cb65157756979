"""What verl computes from two policies and a configuration: weights, the mask that is left, and the logged names."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from statistics import fmean

import numpy as np

from mismatchctl.batch import Bools, Floats
from mismatchctl.correction.model import Weight
from mismatchctl.frameworks.verl import metrics as names
from mismatchctl.frameworks.verl.metrics import Logged, Subject, compute
from mismatchctl.frameworks.verl.plan import VerlPlan, option_of
from mismatchctl.frameworks.verl.sample import PolicyPair
from mismatchctl.frameworks.verl.subjects import Estimated, OffPolicy, Rejected, Vetoed, Weighted
from mismatchctl.frameworks.verl.versions import VerlVersion

_SMALLEST_MEAN = 1e-8  # verl does not divide weights by less


Measurement = tuple[Iterable[Logged], Subject, str]
"""Names, what they measure, and their prefix."""


@dataclass(frozen=True)
class Computed:
    """What verl makes of one batch.

    Attributes:
        weights: final weights of the valid tokens [T]; None when there are none.
        kept: which valid tokens are left [T].
        measured: what is logged about it.
        factor: the mean that weights were divided by, under its name; empty when they were not.
    """

    weights: Floats | None
    kept: Bools
    measured: tuple[Measurement, ...]
    factor: Mapping[str, float] = field(default_factory=dict)

    @cached_property
    def logged(self) -> dict[str, float]:
        """Every name that verl logs."""
        with np.errstate(over="ignore", invalid="ignore"):
            values = {name: value for part in self.measured for name, value in compute(*part).items()}
            return values | dict(self.factor)


def over_micro_batches(parts: Sequence[Mapping[str, float]], version: VerlVersion) -> dict[str, float]:
    """What an actor logs for a step, from what it logs for each micro-batch: means, until 2026 extremes by name."""
    found: dict[str, float] = {}
    for name in parts[0] if parts else ():
        values = [part[name] for part in parts]
        extremes = {} if version.dialect == "estimator" else {"max": max, "min": min}
        reduce = next((extreme for word, extreme in extremes.items() if word in name), fmean)
        found[name] = reduce(values)
    return found


def off_policy(sample: PolicyPair, version: VerlVersion) -> Measurement:
    """How far the policies are apart: logged with every configuration, and by itself in bypass mode of 2025-11."""
    if version.dialect == "flat":
        return names.OFF_POLICY, OffPolicy(sample), f"{version.prefix}mismatch_"
    return (*names.OFF_POLICY, *names.CHI2), OffPolicy(sample), version.prefix


def compute_correction(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> Computed:
    """verl's helper: weights by rollout_is, rejection by rollout_rs and veto, and their metrics."""
    if version.dialect == "flat":
        return _one_ratio(sample, plan, version)
    weights, weighted, factor = _weights(sample, plan.weight, version)
    kept, rejected = _rejections(sample, plan, version)
    return Computed(weights, kept, (*weighted, *rejected, off_policy(sample, version)), factor)


def _one_ratio(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> Computed:
    """2025-10: one ratio and two thresholds; without a threshold nothing is computed."""
    weight, kept = plan.weight, np.ones(len(sample.policy), np.bool_)
    if weight is None:
        return Computed(None, kept, ())
    low, high = plan.rejections[0].keep if plan.rejections else (weight.watch_low, weight.truncate)
    upper = math.inf if high is None else high
    subject = Weighted(sample, weight.level, 1.0 / upper if low is None else low, upper)
    table = names.WEIGHTS_2025_10[weight.level]
    veto = Vetoed(sample, plan.veto)
    if plan.rejections:
        table = (*table, *names.REJECTED)
        kept &= ~subject.rejected
    kept &= ~veto.rejected
    weights = subject.raw if plan.rejections else subject.applied
    return Computed(
        weights * kept if version.zeroes_rejected else weights,
        np.ones_like(kept) if version.zeroes_rejected else kept,
        (
            (table, subject, f"{version.prefix}rollout_is_"),
            (names.VETO, veto, version.prefix),
            off_policy(sample, version),
        ),
    )


def _rejections(sample: PolicyPair, plan: VerlPlan, version: VerlVersion) -> tuple[Bools, list[Measurement]]:
    """What rollout_rs and the veto leave."""
    kept = np.ones(len(sample.policy), np.bool_)
    prefix = f"{version.prefix}rollout_rs_"
    measured: list[Measurement] = []
    for gate in plan.rejections:
        if version.dialect == "estimator":
            rule: Weighted | Estimated = Estimated(sample, gate)
            measured.append((names.estimates(gate.statistic, gate.level), rule, f"{prefix}{option_of(gate)}_"))
        else:
            low, high = gate.keep
            rule = Weighted(sample, gate.level, low or 0.0, math.inf if high is None else high)
            measured.append(((*names.WEIGHTS[gate.level], *names.REJECTED), rule, prefix))
        kept &= ~rule.rejected
    if version.dialect == "ratio":
        veto = Vetoed(sample, plan.veto)
        return kept & ~veto.rejected, [*measured, (names.VETO, veto, version.prefix)]
    if plan.rejections:
        measured.append((names.REJECTED_BY_ANY, Rejected(sample, ~kept), prefix))
    return kept, measured


def _weights(
    sample: PolicyPair, weight: Weight | None, version: VerlVersion
) -> tuple[Floats | None, list[Measurement], dict[str, float]]:
    """Final weights, what is logged about them before they are normalized, and by what they are."""
    if weight is None:
        return None, [], {}
    low, upper = weight.bounds
    zero = weight.zero is not None
    subject = Weighted(
        sample,
        weight.level,
        low if zero else 1.0 / upper,
        upper,
        zero=zero,
        measures_applied=version.dialect == "estimator",
    )
    prefix = f"{version.prefix}rollout_is_"
    measured: list[Measurement] = [((*names.WEIGHTS[weight.level], *(names.ICEPOP if zero else ())), subject, prefix)]
    if weight.normalize == "none":
        return subject.applied, measured, {}
    name = names.NORMALIZATION_2025_11 if version.normalizes_empty else names.NORMALIZATION
    ((key, mean),) = compute((name[weight.level],), subject, prefix).items()
    if not mean > _SMALLEST_MEAN:
        return subject.applied, measured, {key: 1.0}
    return subject.applied / np.asarray(mean, subject.applied.dtype), measured, {key: mean}
