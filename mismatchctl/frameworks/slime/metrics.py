"""Metrics that slime and Miles log, without the `train/` prefix, and how each is computed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.losses import exp
from mismatchctl.core.ratios import LOG_RATIO_BOUND
from mismatchctl.frameworks.adapter import Meaning
from mismatchctl.frameworks.slime.arguments import VERSIONS, Arguments, SlimeVersion
from mismatchctl.frameworks.slime.micro_batch import MicroBatchCorrection
from mismatchctl.measure.metrics.metric import (
    BOUNDED_WEIGHTS,
    FINAL_WEIGHTS,
    KEPT_TOKENS,
    RAW_WEIGHTS,
    VALID_TOKENS,
    Quantity,
)

Mask = Literal["original", "kept", "none"]
Basis = Literal["log-probs", "raw weights", "bounded weights", "final weights", "loss"]
TokenFunction = Callable[[Any], NDArray[Any]]


@dataclass(frozen=True)
class Condition:
    """The configurations that log a metric: a description and a test."""

    words: str
    is_met: Callable[[Arguments], bool]


@dataclass(frozen=True)
class LoggedMetric:
    """One logged name.

    Attributes:
        name: the name as logged, without `train/`.
        formula: formula of the quantity, per token or per sequence. p, q, c: trainer's recomputation, rollout, current
            policy. d = p - q. m: mean over the valid tokens of the sequence.
        quantity: computes it for a micro-batch: per token [T], or with mask `none` one number per sequence [S].
        mask: tokens in the reduction: `original` (valid), `kept` (after rejection), or `none`.
        basis: the compared policies, or weights before or after their bound or normalization. `loss` uses the current
            policy and advantages.
        when: the configurations that log it.
        miles_only: True if slime does not log it.
        like: the quantity in the registry of metrics, or None.
        within: reduction of the tokens of a sequence.
        pair: the two policies, if they are not train and rollout.
        without_current: True if it needs no current policy, unless rollout log-probs replace the old ones.
    """

    name: str
    formula: str
    quantity: TokenFunction
    mask: Mask
    basis: Basis
    when: Condition
    miles_only: bool = False
    like: Quantity | None = None
    within: str = "mean"
    pair: str = ""
    without_current: bool = False

    def for_version(self, version: SlimeVersion) -> LoggedMetric | None:
        """Return the metric as a version logs it, or None."""
        name = version.names.get(self.name, self.name)
        if name is None or (self.miles_only and not version.finite):
            return None
        mask = self.mask
        if version.one_mask and mask == "original":
            mask = "kept"
        elif version.zeroes_rejected and mask == "kept" and self.name != "pg_loss":
            mask = "original"
        return replace(self, name=name, mask=mask)


ANY_CONFIGURATION = Condition("", lambda a: True)
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


def _make_extreme(reduce: str) -> TokenFunction:
    def quantity(call: MicroBatchCorrection) -> NDArray[Any]:
        values = call.segments.min(call.weights) if reduce == "min" else call.segments.max(call.weights)
        return call.spread(values.astype(call.dtype))

    return quantity


def _batch_factor(call: MicroBatchCorrection) -> NDArray[Any]:
    return np.full(call.segments.tokens, call.factor if call.normalizes else 1.0, call.dtype)


LoggedMetrics = tuple[LoggedMetric, ...]


def _weight_metric(
    name: str,
    when: Condition,
    basis: Basis,
    like: Quantity | None,
    formula: str,
    quantity: TokenFunction,
    within: str = "mean",
) -> LoggedMetric:
    return LoggedMetric(name, formula, quantity, "original", basis, when, like=like, within=within)


_LOW: tuple[str, TokenFunction] = ("1 where weight < lower bound", lambda c: c.raw_weights < c.weight_bounds[0])
_HIGH: tuple[str, TokenFunction] = ("1 where weight > upper bound", lambda c: c.raw_weights > c.weight_bounds[1])


def _fraction_metrics(mode: str) -> LoggedMetrics:
    when, name = _mode_condition(mode), f"mis_tis_{mode}_fraction"
    low = _weight_metric(f"{name}_low", when, "raw weights", Quantity.BELOW, *_LOW)
    return low, _weight_metric(f"{name}_high", when, "raw weights", Quantity.ABOVE, *_HIGH)


def _policy_metric(name: str, like: Quantity, formula: str, quantity: TokenFunction) -> LoggedMetric:
    return LoggedMetric(name, formula, quantity, "original", "log-probs", MIS_FUNCTION, like=like)


def _loss_metric(
    name: str,
    formula: str,
    quantity: TokenFunction,
    when: Condition = ANY_CONFIGURATION,
    mask: Mask = "kept",
    **rest: Any,
) -> LoggedMetric:
    return LoggedMetric(name, formula, quantity, mask, "loss", when, **rest)


_POLICY_METRICS = (
    _policy_metric("mis_training_log_ppl", Quantity.TRAIN_LOG_PPL, "-m(p)", lambda c: c.spread(-c.mean(c.train))),
    _policy_metric("mis_training_ppl", Quantity.TRAIN_PPL, "exp(-m(p))", lambda c: c.spread(exp(-c.mean(c.train)))),
    _policy_metric("mis_rollout_log_ppl", Quantity.ROLLOUT_LOG_PPL, "-m(q)", lambda c: c.spread(-c.mean(c.rollout))),
    _policy_metric("mis_rollout_ppl", Quantity.ROLLOUT_PPL, "exp(-m(q))", lambda c: c.spread(exp(-c.mean(c.rollout)))),
    _policy_metric("mis_kl", Quantity.K1, "q - p", lambda c: c.rollout - c.train),
    _policy_metric("mis_k3_kl", Quantity.K3, "exp(d) - d - 1, not clamped", _k3),
    _policy_metric("mis_log_ppl_diff", Quantity.LOG_PPL_DIFF, "m(q) - m(p)", _log_ppl_diff),
    _policy_metric(
        "mis_log_ppl_abs_diff", Quantity.LOG_PPL_ABS_DIFF, "|m(q) - m(p)|", lambda c: np.abs(_log_ppl_diff(c))
    ),
    _policy_metric("mis_ppl_ratio", Quantity.PPL_RATIO, "exp(m(q) - m(p))", lambda c: exp(_log_ppl_diff(c))),
    _policy_metric("mis_chi2_token", Quantity.SQUARED_RATIO, "m(exp(2 clamp(d, 20))) - 1", _chi2_token),
    _policy_metric("mis_chi2_seq", Quantity.SQUARED_PRODUCT, "exp(2 clamp(sum of d, 20)) - 1", _chi2_seq),
)

_WEIGHT_METRICS = (
    _weight_metric("mis_tis_weight_before_bound", MIS_WEIGHTS, "raw weights", Quantity.WEIGHT,
                "exp(clamp(d at its level, 20))", lambda c: c.raw_weights),
    _weight_metric("mis_tis_weight_after_bound", MIS_WEIGHTS, "bounded weights", Quantity.WEIGHT,
                "weight", lambda c: c.bounded_weights),
    _weight_metric("mis_is_ratio_mean_after_tis_rs", MIS_WEIGHTS, "bounded weights", Quantity.WEIGHT,
                "weight; rejection does not enter, whatever the name says", lambda c: c.bounded_weights),
    _weight_metric("mis_tis_truncate_fraction", _mode_condition("truncate"), "raw weights", Quantity.ABOVE, *_HIGH),
    *_fraction_metrics("clip"),
    *_fraction_metrics("mask"),
    _weight_metric("mis_rs_mask_fraction_low", MIS_REJECTION, "log-probs", None,
                "1 where ratio at rs_level < lower bound", lambda c: c.rejection_ratios < c.rejection_bounds[0]),
    _weight_metric("mis_rs_mask_fraction_high", MIS_REJECTION, "log-probs", None,
                "1 where ratio at rs_level > upper bound", lambda c: c.rejection_ratios > c.rejection_bounds[1]),
    _weight_metric("mis_rs_catastrophic_token_fraction", MIS_VETO, "log-probs", Quantity.CATASTROPHIC,
                "1 where d < log(veto)", lambda c: c.catastrophic),
    _weight_metric("mis_rs_catastrophic_seq_fraction", MIS_VETO, "log-probs", Quantity.CATASTROPHIC,
                "1 where any token of the sequence has d < log(veto)", lambda c: c.spread(c.vetoed)),
    _weight_metric("mis_batch_norm_factor", MIS_NORMALIZATION, "bounded weights", None,
                "mean weight of the micro-batch before rejection", _batch_factor),
    _weight_metric("mis_is_ratio_mean_final", MIS_WEIGHTS, "final weights", Quantity.WEIGHT,
                "m(weight)", lambda c: c.spread(c.mean(c.weights))),
    _weight_metric("mis_is_ratio_min_final", MIS_WEIGHTS, "final weights", Quantity.WEIGHT,
                "min of weight", _make_extreme("min"), "min"),
    _weight_metric("mis_is_ratio_max_final", MIS_WEIGHTS, "final weights", Quantity.WEIGHT,
                "max of weight", _make_extreme("max"), "max"),
    _weight_metric("tis", BUILT_IN_TIS, "raw weights", Quantity.WEIGHT, "exp(d), not clamped", lambda c: c.raw_weights),
    _weight_metric("tis_abs", BUILT_IN_TIS, "raw weights", None, "|exp(d) - 1|", lambda c: np.abs(c.raw_weights - 1)),
    _weight_metric("tis_clipfrac", BUILT_IN_TIS, "bounded weights", None,
                "1 where weight != exp(d)", lambda c: c.weights != c.raw_weights),
)  # fmt: skip

_LOSS_METRICS = (
    _loss_metric("pg_loss", "clipped surrogate, after OPSM, times the weight", lambda c: c.pg_loss,
             like=Quantity.LOSS, pair="current/anchor"),
    _loss_metric("pg_clipfrac", "1 where the clip decides", lambda c: c.surrogate.clipped,
             like=Quantity.CLIPPED, pair="current/anchor"),
    _loss_metric("ppo_kl", "old - c; GSPO: m(old - c)", lambda c: c.ppo_kl, like=Quantity.K1, pair="current/train"),
    _loss_metric("train_rollout_logprob_abs_diff", "|old - q|", lambda c: c.train_rollout_abs_diff, like=Quantity.ABS,
             without_current=True),
    _loss_metric("ois", "exp(c - old)", lambda c: exp(-c.ppo_kl), ANY_CORRECTION, "original",
             like=Quantity.RATIO, pair="current/train"),
    _loss_metric("kl_loss", "k1, k2 or k3 of c and reference", lambda c: c.kl_loss, KL_LOSS),
    _loss_metric("opsm_clipfrac", "tokens that OPSM masks, masked ones too, over valid tokens",
             lambda c: c.opsm_clipfrac, OPSM, "none"),
    _loss_metric("train_rollout_kl", "exp(old - q) - 1 - (old - q), within 10", lambda c: c.train_rollout_kl,
             miles_only=True, like=Quantity.K3),
    _loss_metric("ess_ratio", "(sum w)^2 / (n sum w^2), w = exp(c - old)", lambda c: c.ess_ratio,
             mask="none", miles_only=True),
)  # fmt: skip

METRICS: LoggedMetrics = (*_POLICY_METRICS, *_WEIGHT_METRICS, *_LOSS_METRICS)
"""All metrics except `loss`, which is pg_loss + kl_loss_coef * kl_loss (a dump does not contain its entropy)."""


def list_metrics(version: SlimeVersion) -> list[LoggedMetric]:
    """List the metrics that a version logs."""
    logged = [item for metric in METRICS if (item := metric.for_version(version)) is not None]
    if not version.zeroes_rejected:
        return logged
    return [*(_ZEROED.get(metric.name, metric) for metric in logged), _VETOED]


def _zeroed_weights(call: MicroBatchCorrection) -> NDArray[Any]:
    low, high = call.weight_bounds
    zeroes = call.arguments.tis_mode == "mask"
    outside = (call.raw_weights < low) | (call.raw_weights > high)
    return np.where(outside & zeroes, 0, call.bounded_weights).astype(call.dtype)


_ZEROED = {
    "mis_ratio_mean_after_mis": _weight_metric("mis_ratio_mean_after_mis", MIS_WEIGHTS, "bounded weights",
                Quantity.WEIGHT, "weight, 0 outside the bounds in mask mode", _zeroed_weights),
}  # fmt: skip
_VETOED = _weight_metric("mis_ratio_mean_after_veto_mask", MIS_VETO, "final weights", Quantity.WEIGHT,
                "weight, 0 where rejected", lambda c: (c.bounded_weights * c.kept).astype(c.dtype))  # fmt: skip
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
"""The metrics in slime's documentation -> the name under which its code logs the documented formula."""

UNLOGGED_NAMES: frozenset[str] = (
    frozenset(DOCUMENTED_NAMES)
    - {metric.name for metric in METRICS}
    - {name for version in VERSIONS for name in version.names.values()}
)
"""Documented names that no version of the code has logged."""


_POPULATION_WORDS = {"original": VALID_TOKENS, "kept": KEPT_TOKENS, "none": "sequences"}
_BASIS_WORDS = {
    "log-probs": "train/rollout",
    "raw weights": RAW_WEIGHTS,
    "bounded weights": BOUNDED_WEIGHTS,
    "final weights": FINAL_WEIGHTS,
    "loss": "train/rollout",
}


def list_meanings(version: SlimeVersion) -> list[Meaning]:
    """List every name that a version can log, with `train/`, then documented names that no version logged."""
    metrics = list_metrics(version)
    logged = [_make_meaning(item, item.name, item.when.words, version) for item in metrics]
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
        item.formula,
        _POPULATION_WORDS[item.mask],
        _describe_reduction(item, version),
        item.like,
        item.pair or _BASIS_WORDS[item.basis],
    )


def _describe_reduction(item: LoggedMetric, version: SlimeVersion) -> str:
    counted = "rollouts" if version.rollout_denominators else "sequences"
    if item.mask == "none":
        return f"sum over sequences / {counted}"
    if version.rollout_denominators:
        return f"{item.within} within each rollout, by its tokens before rejection, then over rollouts"
    return f"{item.within} within each sequence (0 where none is left), then over sequences"
