"""The metrics of the mismatch and of corrections: tables of metrics.yaml, and formulas that are no ratio of sums."""

from __future__ import annotations

import numpy as np

from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.metrics.metric import (
    NO_TOKEN,
    Formula,
    Metric,
    MetricTails,
    Number,
    Tail,
    Totals,
    khat,
    khat_limit,
    read_formula,
    read_metrics,
    tail_length,
    worst_share,
)

WORST_TOKENS = 0.001
"""Share of tokens that count as the worst tokens."""
_ROUNDING = 1e-13  # a smaller variance, relative to the mean square, is rounding


def chi2(excess: str, number: str) -> Formula:
    """Return the formula of the mean of w^2 - 1 from sums of w - 1, which keeps the digits of ratios near 1."""
    return lambda t: (t[f"squared_{excess}"] + 2 * t[excess]) / t[number]


def std(column: str) -> Formula:
    """Return the formula of the standard deviation over tokens, from sums of a column and its squares."""

    def value(t: Totals) -> Number:
        variance = _variance(t[f"squared_{column}"] / t["tokens"], t[column] / t["tokens"])
        return np.where(np.real(variance) == 0, 0.0, np.sqrt(variance))

    return value


def _variance(square: Number, mean: Number) -> Number:
    """Return mean square minus squared mean, or exactly 0 if only rounding remains."""
    variance = square - mean * mean
    return np.where(np.real(variance) < _ROUNDING * np.real(square), variance * 0.0, variance)


def nonzero_variance(square: Number, mean: Number) -> Number:
    """Return a variance that is used as a denominator, with NaN instead of 0."""
    variance = _variance(square, mean)
    return np.where(np.real(variance) == 0, np.nan, variance)


def _prob_corr(t: Totals) -> Number:
    n = t["tokens"]
    policy, reference = t["policy_prob"] / n, t["reference_prob"] / n
    squares = t["squared_policy_prob"] / n, t["squared_reference_prob"] / n
    product = (squares[0] + squares[1] - t["squared_prob_diff"] / n) / 2
    return (product - policy * reference) / np.sqrt(
        nonzero_variance(squares[0], policy) * nonzero_variance(squares[1], reference)
    )


def _autocorrelation(t: Totals) -> Number:
    mean = t["log_ratio"] / t["tokens"]
    pairs = t["neighbours"]
    covariance = (t["neighbour_product"] - mean * t["neighbour_sum"]) / pairs + mean * mean
    return covariance / nonzero_variance(t["square"] / t["tokens"], mean)


def _inflation(t: Totals) -> Number:
    mean = t["log_ratio"] / t["tokens"]
    sequences = t["squared_log_ratio_sum"] - 2 * mean * t["log_ratio_sum_length"] + mean * mean * t["squared_length"]
    return sequences / (t["tokens"] * nonzero_variance(t["square"] / t["tokens"], mean))


def _khat_formula(level: str) -> Tail:
    def value(t: Totals, tails: MetricTails) -> float:
        if tails.pair is None:
            return float("nan")
        values = tails.pair.token_tail if level == "tokens" else tails.pair.sequence_tail
        return khat(values, int(t[level]))

    return value


def _tail_formulas(level: str, name: str) -> dict[str, Tail]:
    return {
        f"khat_{name}": _khat_formula(level),
        f"khat_{name}_limit": lambda t, _: khat_limit(int(t[level])),
        f"khat_{name}_tail": lambda t, _: tail_length(int(t[level])),
    }


BASE_METRICS = read_metrics("counts", {"prompts": lambda t: np.where(t["clusters"] > 0, t["clusters"], np.nan)})
"""Counts that do not depend on a pair of policies."""
*PAIR_METRICS, RATIO_Z = read_metrics(
    "pair",
    {
        "k1": lambda t: -t["log_ratio"] / t["tokens"],
        "k2": lambda t: t["square"] / t["tokens"] / 2,
        "prob_diff_std": std("prob_diff"),
        "prob_corr": _prob_corr,
        "ratio_mean": lambda t: 1 + t["excess"] / t["tokens"],
        "chi2_token": chi2("excess", "tokens"),
        "chi2_sequence": chi2("product_excess", "sequences"),
        "ess_token": lambda t: (t["tokens"] + t["excess"]) ** 2 / (t["tokens"] * t["squared_ratio"]),
        "ess_sequence": lambda t: t["product"] ** 2 / (t["sequences"] * t["squared_product"]),
        "autocorr_lag1": _autocorrelation,
        "inflation": _inflation,
        "bitwise_all": lambda t: np.where(t["tokens"] > 0, (t["identical"] == t["tokens"]) * 1.0, np.nan),
    },
    extremes={"abs_diff_max": lambda maxima: np.maximum(maxima["log_ratio"], maxima["-log_ratio"])},
    tails=_tail_formulas("tokens", "token")
    | _tail_formulas("sequences", "sequence")
    | {"k3_worst_share": lambda _, tails: np.nan if tails.pair is None else worst_share(tails.pair, WORST_TOKENS)},
)
"""Metrics of one pair of policies, such as train against rollout or current against train, and `ratio_mean_z`, which is
computed from the estimate of `ratio_mean` instead of sums.
"""
MISMATCH_METRICS: tuple[Metric, ...] = (*BASE_METRICS, *PAIR_METRICS, RATIO_Z)
"""Every metric of the mismatch, in the order of tables."""

_SMALLEST_WEIGHT = 1e-13  # a smaller mean weight, computed as 1 + (w - 1), has fewer than three correct digits
_NO_BIAS = 1e-15  # relative to the raw mean or 1: a smaller difference is rounding


def _ess_token(t: Totals) -> Number:
    squares = t["squared_kept_weight"]
    some = np.where(np.real(squares) == 0, np.nan, squares)
    return _reliable_sum(t["kept"] + t["kept_excess"], t["kept"]) ** 2 / (t["tokens"] * some)


def _reliable_sum(weight: Number, count: Number) -> Number:
    """Return a sum of weights computed from w - 1, or NaN if the mean is below the rounding error."""
    return np.where(np.real(weight) < _SMALLEST_WEIGHT * np.real(count), np.nan, weight)


def _weight_bias(t: Totals) -> Number:
    moved = (t["weight_excess"] - t["raw_weight_excess"]) / t["tokens"]
    size = np.maximum(np.abs(np.real(t["raw_weight_excess"]) / t["tokens"]), 1.0)
    return np.where(np.abs(np.real(moved)) < _NO_BIAS * size, moved * 0.0, moved)


def _ess_sequence(t: Totals) -> Number:
    return _reliable_sum(t["sequence_weight"], t["sequences"]) ** 2 / (t["sequences"] * t["squared_sequence_weight"])


def _gradient_norm(t: Totals) -> Number:
    return np.sqrt(t["squared_gradient"] / t["squared_plain_gradient"]) * t["loss_tokens"] / t["loss_counted"]


_COMMON_METRICS = read_metrics(
    "correction",
    {
        "raw_weight_mean": lambda t: 1 + t["raw_weight_excess"] / t["tokens"],
        "raw_weight_std": std("raw_weight_excess"),
        "weight_mean": lambda t: 1 + t["weight_excess"] / t["tokens"],
        "weight_std": std("weight_excess"),
        "ess_token": _ess_token,
        "ess_sequence": _ess_sequence,
        "rejected_tokens": lambda t: 1 - t["kept"] / t["tokens"],
        "loss_scale": lambda t: (t["kept"] + t["kept_excess"]) / t["counted"],
    },
)
COST_METRICS = read_metrics("cost", {"weight_bias": _weight_bias, "weight_chi2": chi2("weight_excess", "tokens")})
"""Metrics of the cost and effect of bounds, for sweeps. Means and deviations in a Result determine these metrics."""
_VETO_METRICS, _COMPARISON_METRICS = read_metrics("veto"), read_metrics("outcomes")
_LOSS_METRICS = read_metrics(
    "loss",
    {
        "loss_change": lambda t: t["loss"] / t["loss_counted"] - t["plain_loss"] / t["loss_tokens"],
        "gradient_cosine": lambda t: (
            t["gradient_product"] / np.sqrt(t["squared_gradient"] * t["squared_plain_gradient"])
        ),
        "gradient_norm": _gradient_norm,
    },
)


def correction_metrics(correction: Correction, losses: bool = True) -> tuple[Metric, ...]:
    gates = tuple(metric for index, _ in enumerate(correction.gates) for metric in _gate_metrics(index, correction))
    veto = _VETO_METRICS if any(gate.is_veto for gate in correction.gates) else ()
    return (
        *_COMMON_METRICS,
        *gates,
        *veto,
        *_COMPARISON_METRICS,
        *(_LOSS_METRICS if losses else ()),
    )


def sweep_metrics(correction: Correction) -> tuple[Metric, ...]:
    return (*correction_metrics(correction, losses=False), *COST_METRICS)


def _gate_metrics(index: int, correction: Correction) -> tuple[Metric, ...]:
    title = gate_label(correction.gates[index])
    return tuple(
        Metric(
            f"gate{index}_{level}_{side}", f"gate {index} ({title}): {level} too {side}", "fraction",
            f"share of valid {level} that gate {index} rejects because the statistic is too {side}"
            + ("" if level == "tokens" else " (any token of the sequence)"),
            "Rejections by gate and side.", undefined=NO_TOKEN,
            formula=read_formula(f"gate{index}_{level}_{side} / {level}"),
        )
        for level in ("tokens", "sequences")
        for side in ("low", "high")
    )  # fmt: skip
