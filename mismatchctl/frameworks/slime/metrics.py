"""Metrics that slime and Miles log, without the `train/` prefix, and how each is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.frameworks.adapter import Condition, LoggedMetric, Meaning
from mismatchctl.frameworks.slime.arguments import VERSIONS, SlimeVersion
from mismatchctl.frameworks.slime.micro_batch import MicroBatchCorrection
from mismatchctl.measure.metrics.metric import (
    BOUNDED_WEIGHTS,
    FINAL_WEIGHTS,
    KEPT_TOKENS,
    RAW_WEIGHTS,
    VALID_TOKENS,
    Quantity,
)

LoggedMetrics = tuple[LoggedMetric, ...]
"""In the formulas, p, q and c are the trainer's recomputation, rollout and current policy, d = p - q, and m is the mean
over the valid tokens of the sequence. Scopes: `original` (valid tokens), `kept` (after rejection), `none` (one number
per sequence)."""


def _in_version(metric: LoggedMetric, version: SlimeVersion) -> LoggedMetric | None:
    name = version.names.get(metric.name, metric.name)
    if name is None:
        return None
    scope = metric.scope
    if version.one_mask and scope == "original":
        scope = "kept"
    elif version.zeroes_rejected and scope == "kept" and metric.name != "pg_loss":
        scope = "original"
    return replace(metric, name=name, scope=scope)


MIS_FUNCTION = Condition("mis.py, with use_tis or get_mismatch_metrics", lambda a: a.function == "mis")
MIS_WEIGHTS = Condition("mis.py, use_tis", lambda a: a.function == "mis" and a.use_tis)
BUILT_IN_TIS = Condition("use_tis, built-in function or IcePop", lambda a: a.function in ("vanilla", "icepop"))
MIS_REJECTION = Condition("mis.py, use_tis, use_rs", lambda a: a.rejects)
MIS_VETO = Condition("mis.py, use_tis, use_rs, rs_veto_threshold", lambda a: a.vetoes)
MIS_NORMALIZATION = Condition(
    "mis.py, use_tis, tis_batch_normalize", lambda a: MIS_WEIGHTS.is_met(a) and a.tis_batch_normalize
)
ANY_CORRECTION = Condition("use_tis or get_mismatch_metrics", lambda a: a.function != "none")
KL_LOSS = Condition("use_kl_loss", lambda a: a.use_kl_loss)
OPSM = Condition("use_opsm", lambda a: a.use_opsm)


def _mode_condition(mode: str) -> Condition:
    return Condition(f"mis.py, use_tis, tis_mode: {mode}", lambda a: MIS_WEIGHTS.is_met(a) and a.tis_mode == mode)


def _log_ppl_diff(call: MicroBatchCorrection) -> NDArray[Any]:
    return call.spread(call.mean(call.rollout) - call.mean(call.train))


def _chi2_token(call: MicroBatchCorrection) -> NDArray[Any]:
    ratio = call.ratio("token")
    return call.spread(call.mean(ratio * ratio) - call.dtype.type(1))


def _chi2_seq(call: MicroBatchCorrection) -> NDArray[Any]:
    log_ratio = np.clip(call.log_ratio_sum, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return call.spread(exp(2 * log_ratio) - call.dtype.type(1))


def _k3(call: MicroBatchCorrection) -> NDArray[Any]:
    # Not the series that is right near zero: slime's own rounding is wanted.
    k3: NDArray[Any] = exp(call.log_ratio) - call.log_ratio - call.dtype.type(1)
    return k3


def _make_extreme(reduce: str) -> Callable[[Any], NDArray[Any]]:
    def quantity(call: MicroBatchCorrection) -> NDArray[Any]:
        values = call.segments.min(call.weights) if reduce == "min" else call.segments.max(call.weights)
        return call.spread(values.astype(call.dtype))

    return quantity


def _batch_factor(call: MicroBatchCorrection) -> NDArray[Any]:
    return np.full(call.segments.tokens, call.factor if call.normalizes else 1.0, call.dtype)


_metric = partial(LoggedMetric, scope="original")
_on_mis = partial(_metric, condition=MIS_FUNCTION)
_on_raw = partial(_metric, basis=RAW_WEIGHTS, condition=MIS_WEIGHTS)
_on_bounded = partial(_on_raw, basis=BOUNDED_WEIGHTS)
_on_final = partial(_on_raw, basis=FINAL_WEIGHTS)
_of_loss = partial(LoggedMetric, scope="kept", needs="current")
_below = partial(
    _on_raw, quantity=lambda c: c.raw_weights < c.weight_bounds[0], words="1 where weight < lower bound",
    like=Quantity.BELOW,
)  # fmt: skip
_above = partial(
    _on_raw, quantity=lambda c: c.raw_weights > c.weight_bounds[1], words="1 where weight > upper bound",
    like=Quantity.ABOVE,
)  # fmt: skip


def _fraction_metrics(mode: str) -> LoggedMetrics:
    when, name = _mode_condition(mode), f"mis_tis_{mode}_fraction"
    return _below(f"{name}_low", condition=when), _above(f"{name}_high", condition=when)


_POLICY_METRICS: LoggedMetrics = (
    _on_mis("mis_training_log_ppl", lambda c: c.spread(-c.mean(c.train)), "-m(p)", like=Quantity.TRAIN_LOG_PPL),
    _on_mis("mis_training_ppl", lambda c: c.spread(exp(-c.mean(c.train))), "exp(-m(p))", like=Quantity.TRAIN_PPL),
    _on_mis("mis_rollout_log_ppl", lambda c: c.spread(-c.mean(c.rollout)), "-m(q)", like=Quantity.ROLLOUT_LOG_PPL),
    _on_mis("mis_rollout_ppl", lambda c: c.spread(exp(-c.mean(c.rollout))), "exp(-m(q))", like=Quantity.ROLLOUT_PPL),
    _on_mis("mis_kl", lambda c: c.rollout - c.train, "q - p", like=Quantity.K1),
    _on_mis("mis_k3_kl", _k3, "exp(d) - d - 1, not clamped", like=Quantity.K3),
    _on_mis("mis_log_ppl_diff", _log_ppl_diff, "m(q) - m(p)", like=Quantity.LOG_PPL_DIFF),
    _on_mis(
        "mis_log_ppl_abs_diff", lambda c: np.abs(_log_ppl_diff(c)), "|m(q) - m(p)|", like=Quantity.LOG_PPL_ABS_DIFF
    ),
    _on_mis("mis_ppl_ratio", lambda c: exp(_log_ppl_diff(c)), "exp(m(q) - m(p))", like=Quantity.PPL_RATIO),
    _on_mis("mis_chi2_token", _chi2_token, "m(exp(2 clamp(d, 20))) - 1", like=Quantity.SQUARED_RATIO),
    _on_mis("mis_chi2_seq", _chi2_seq, "exp(2 clamp(sum of d, 20)) - 1", like=Quantity.SQUARED_PRODUCT),
)

_WEIGHT_METRICS: LoggedMetrics = (
    _on_raw("mis_tis_weight_before_bound", lambda c: c.raw_weights, "exp(clamp(d at its level, 20))",
            like=Quantity.WEIGHT),
    _on_bounded("mis_tis_weight_after_bound", lambda c: c.bounded_weights, "weight", like=Quantity.WEIGHT),
    _on_bounded("mis_is_ratio_mean_after_tis_rs", lambda c: c.bounded_weights,
                "weight, which does not depend on rejection in spite of the name", like=Quantity.WEIGHT),
    _above("mis_tis_truncate_fraction", condition=_mode_condition("truncate")),
    *_fraction_metrics("clip"),
    *_fraction_metrics("mask"),
    _metric("mis_rs_mask_fraction_low", lambda c: c.rejection_ratios < c.rejection_bounds[0],
            "1 where ratio at rs_level < lower bound", condition=MIS_REJECTION),
    _metric("mis_rs_mask_fraction_high", lambda c: c.rejection_ratios > c.rejection_bounds[1],
            "1 where ratio at rs_level > upper bound", condition=MIS_REJECTION),
    _metric("mis_rs_catastrophic_token_fraction", lambda c: c.catastrophic, "1 where d < log(veto)",
            like=Quantity.CATASTROPHIC, condition=MIS_VETO),
    _metric("mis_rs_catastrophic_seq_fraction", lambda c: c.spread(c.vetoed),
            "1 if any token of the sequence has d < log(veto)", like=Quantity.CATASTROPHIC, condition=MIS_VETO),
    _on_bounded("mis_batch_norm_factor", _batch_factor, "mean weight of the micro-batch before rejection",
                condition=MIS_NORMALIZATION),
    _on_final("mis_is_ratio_mean_final", lambda c: c.spread(c.mean(c.weights)), "m(weight)", like=Quantity.WEIGHT),
    _on_final("mis_is_ratio_min_final", _make_extreme("min"), "min of weight", reduction="min", like=Quantity.WEIGHT),
    _on_final("mis_is_ratio_max_final", _make_extreme("max"), "max of weight", reduction="max", like=Quantity.WEIGHT),
    _on_raw("tis", lambda c: c.raw_weights, "exp(d), not clamped", like=Quantity.WEIGHT, condition=BUILT_IN_TIS),
    _on_raw("tis_abs", lambda c: np.abs(c.raw_weights - 1), "|exp(d) - 1|", condition=BUILT_IN_TIS),
    _on_bounded("tis_clipfrac", lambda c: c.weights != c.raw_weights, "1 where weight != exp(d)",
                condition=BUILT_IN_TIS),
)  # fmt: skip

_LOSS_METRICS: LoggedMetrics = (
    _of_loss("pg_loss", lambda c: c.pg_loss, "clipped surrogate, after OPSM, times the weight", like=Quantity.LOSS,
             basis="current/anchor"),
    _of_loss("pg_clipfrac", lambda c: c.surrogate.clipped, "1 where the clip decides", like=Quantity.CLIPPED,
             basis="current/anchor"),
    _of_loss("ppo_kl", lambda c: c.ppo_kl, "old - c; GSPO: m(old - c)", like=Quantity.K1, basis="current/train"),
    _of_loss("train_rollout_logprob_abs_diff", lambda c: c.train_rollout_abs_diff, "|old - q|", like=Quantity.ABS,
             needs="anchor"),
    _of_loss("ois", lambda c: exp(-c.ppo_kl), "exp(c - old)", scope="original", like=Quantity.RATIO,
             basis="current/train", condition=ANY_CORRECTION),
    _of_loss("kl_loss", lambda c: c.kl_loss, "k1, k2 or k3 of c and reference", condition=KL_LOSS),
    _of_loss("opsm_clipfrac", lambda c: c.opsm_clipfrac, "tokens that OPSM masks, masked ones too, over valid tokens",
             scope="none", condition=OPSM),
)  # fmt: skip
MILES_METRICS: LoggedMetrics = (
    _of_loss("train_rollout_kl", lambda c: c.train_rollout_kl, "exp(old - q) - 1 - (old - q), within 10",
             like=Quantity.K3),
    _of_loss("ess_ratio", lambda c: c.ess_ratio, "(sum w)^2 / (n sum w^2), w = exp(c - old)", scope="none"),
)  # fmt: skip
"""Metrics that slime does not log."""

METRICS: LoggedMetrics = (*_POLICY_METRICS, *_WEIGHT_METRICS, *_LOSS_METRICS, *MILES_METRICS)
"""All metrics except `loss`, which is pg_loss + kl_loss_coef * kl_loss (a dump does not contain its entropy)."""


def list_metrics(version: SlimeVersion) -> list[LoggedMetric]:
    known = METRICS if version.finite else METRICS[: -len(MILES_METRICS)]
    logged = [item for metric in known if (item := _in_version(metric, version)) is not None]
    if not version.zeroes_rejected:
        return logged
    return [*(_ZEROED.get(metric.name, metric) for metric in logged), _VETOED]


def _zeroed_weights(call: MicroBatchCorrection) -> NDArray[Any]:
    low, high = call.weight_bounds
    zeroes = call.arguments.tis_mode == "mask"
    outside = (call.raw_weights < low) | (call.raw_weights > high)
    return np.where(outside & zeroes, 0, call.bounded_weights).astype(call.dtype)


_ZEROED = {
    "mis_ratio_mean_after_mis": _on_bounded("mis_ratio_mean_after_mis", _zeroed_weights,
                "weight, 0 outside the bounds in mask mode", like=Quantity.WEIGHT),
}  # fmt: skip
_VETOED = _on_final("mis_ratio_mean_after_veto_mask", lambda c: (c.bounded_weights * c.kept).astype(c.dtype),
                    "weight, 0 where rejected", like=Quantity.WEIGHT, condition=MIS_VETO)  # fmt: skip
"""Only logged in October 2025, when rejected tokens got weight 0."""


DOCUMENTED_NAMES: dict[str, str] = {
    **{f"mismatch_{name}": f"mis_{name}" for name in (
        "training_log_ppl", "training_ppl", "rollout_log_ppl", "rollout_ppl", "kl", "k3_kl", "log_ppl_diff",
        "log_ppl_abs_diff", "ppl_ratio",
    )},
    "train_rollout_logprob_abs_diff": "train_rollout_logprob_abs_diff",
    "ois": "ois",
    "mis_mean_is_weight_before_clip": "mis_tis_weight_before_bound",
    "mis_ratio_mean_after_mis": "mis_is_ratio_mean_after_tis_rs",
    "mis_truncate_fraction": "mis_tis_truncate_fraction",
    "mis_clip_fraction_low": "mis_tis_clip_fraction_low",
    "mis_clip_fraction_high": "mis_tis_clip_fraction_high",
    "mis_mask_fraction_low": "mis_tis_mask_fraction_low",
    "mis_mask_fraction_high": "mis_tis_mask_fraction_high",
    "mis_catastrophic_token_fraction": "mis_rs_catastrophic_token_fraction",
    "mis_catastrophic_seq_fraction": "mis_rs_catastrophic_seq_fraction",
    "mis_batch_norm_factor": "mis_batch_norm_factor",
}  # fmt: skip
"""The metrics in slime's documentation -> the name in its code for the documented formula."""

UNLOGGED_NAMES: frozenset[str] = (
    frozenset(DOCUMENTED_NAMES)
    - {metric.name for metric in METRICS}
    - {name for version in VERSIONS for name in version.names.values()}
)
"""Documented names that no version of the code has logged."""


_POPULATION_WORDS = {"original": VALID_TOKENS, "kept": KEPT_TOKENS, "none": "sequences"}


def list_meanings(version: SlimeVersion) -> list[Meaning]:
    """List every name that a version can log, with `train/`, then documented names that no version logged."""
    metrics = list_metrics(version)
    logged = [_make_meaning(item, item.name, item.condition.words, version) for item in metrics]
    whole = Meaning("train/loss", "", "pg_loss + kl_loss_coef * kl_loss", KEPT_TOKENS, "as each of the two")
    return [
        *logged,
        whole,
        *(
            _make_unlogged_meaning(name, version)
            for name in DOCUMENTED_NAMES
            if name not in {item.name for item in metrics}
        ),
    ]


def _make_unlogged_meaning(name: str, version: SlimeVersion) -> Meaning:
    item = next(item for item in METRICS if item.name == DOCUMENTED_NAMES[name])
    until = next((item.label for item in reversed(VERSIONS) if name in item.names.values()), "")
    when = f"{f'until {until}' if until else 'never: only documented'}, the code logs train/{item.name}"
    return replace(_make_meaning(item, name, when, version), logged_as=f"train/{item.name}", until=until)


def _make_meaning(item: LoggedMetric, name: str, when: str, version: SlimeVersion) -> Meaning:
    return Meaning(
        f"train/{name}",
        when,
        item.words,
        _POPULATION_WORDS[item.scope],
        _describe_reduction(item, version),
        item.like,
        item.basis,
    )


def _describe_reduction(item: LoggedMetric, version: SlimeVersion) -> str:
    counted = "rollouts" if version.rollout_denominators else "sequences"
    if item.scope == "none":
        return f"sum over sequences / {counted}"
    if version.rollout_denominators:
        return f"{item.reduction} within each rollout, by its tokens before rejection, then over rollouts"
    return f"{item.reduction} within each sequence (0 if no token is left), then over sequences"
