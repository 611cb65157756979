"""Metrics of corrections."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.columns import COMPARED_COLUMNS
from mismatchctl.measure.metrics.metric import (
    AGGREGATION_SUFFIXES,
    AGGREGATION_TEXTS,
    AGGREGATIONS,
    ALL_GATES,
    CHI2_SCALE,
    ESS_SCALE,
    FINAL_WEIGHTS,
    KEPT_TOKENS,
    NO_TOKEN,
    RAW_WEIGHTS,
    VALID_SEQUENCES,
    Measure,
    Metric,
    Number,
    Quantity,
    Totals,
    aggregation_formula,
)
from mismatchctl.measure.metrics.mismatch import NOT_COUNTED, chi2, extreme_value, sequence_mean, std, token_mean

NOTHING_KEPT = "no token is kept"
_ROUNDING = 1e-13  # a smaller mean weight, computed as 1 + (w - 1), has fewer than three correct digits
_NO_BIAS = 1e-15  # relative to the raw mean or 1: a smaller difference is rounding


def _weight_mean(excess: str) -> Callable[[Totals], Number]:
    return lambda t: 1 + t[excess] / t["tokens"]


def _ess_token(t: Totals) -> Number:
    squares = t["squared_kept_weight"]
    some = np.where(np.real(squares) == 0, np.nan, squares)
    return _reliable_sum(t["kept"] + t["kept_excess"], t["kept"]) ** 2 / (t["tokens"] * some)


def _reliable_sum(weight: Number, count: Number) -> Number:
    """Return a sum of weights computed from w - 1, or NaN if the mean is below the rounding error."""
    return np.where(np.real(weight) < _ROUNDING * np.real(count), np.nan, weight)


def _weight_bias(t: Totals) -> Number:
    moved = (t["weight_excess"] - t["raw_weight_excess"]) / t["tokens"]
    size = np.maximum(np.abs(np.real(t["raw_weight_excess"]) / t["tokens"]), 1.0)
    return np.where(np.abs(np.real(moved)) < _NO_BIAS * size, moved * 0.0, moved)


def _weight_metrics(name: str, title: str, words: str, meaning: str, basis: str) -> tuple[Metric, ...]:
    def of(reduction: str) -> Measure:
        return Measure(Quantity.WEIGHT, reduction=reduction, basis=basis)

    return (
        Metric(
            f"{name}_mean", f"mean {title}", "ratio", f"mean of {words} over valid tokens", meaning,
            undefined=NO_TOKEN, formula=_weight_mean(f"{name}_excess"), better="one", measure=of("mean"),
        ),
        Metric(
            f"{name}_std", f"std of the {title}", "ratio",
            f"population standard deviation of {words} over valid tokens",
            "The noise that weighting adds to the gradient.", undefined=NO_TOKEN, formula=std(f"{name}_excess"),
            measure=of("standard deviation (n)"),
        ),
        Metric(
            f"{name}_min", f"smallest {title}", "ratio", f"min of {words} over valid tokens",
            "The token with the smallest weight.", undefined=NO_TOKEN,
            extreme=extreme_value(f"-{name}", -1.0), better="",
            measure=of("min"),
        ),
        Metric(
            f"{name}_max", f"largest {title}", "ratio", f"max of {words} over valid tokens",
            "The token with the largest weight.", undefined=NO_TOKEN, extreme=extreme_value(name), better="",
            measure=of("max"),
        ),
    )  # fmt: skip


_COMMON_METRICS: tuple[Metric, ...] = (
    *_weight_metrics(
        "raw_weight", "weight before the bound", "the weight before its bound and normalization",
        "1 up to noise if the log-probs are right.", RAW_WEIGHTS,
    ),
    *_weight_metrics(
        "weight", "weight", "the weight as applied (bounded, normalized), rejected tokens included",
        "Below 1, the bound lowers the weights: the bias of bounding.", FINAL_WEIGHTS,
    ),
    Metric(
        "weight_bounded_low", "weights bounded below", "fraction",
        "share of valid tokens with a weight below the lower bound, or below watch_low if there is no lower bound",
        "Weights below the lower bound become the bound, or 0. Below watch_low they stay as they are.",
        undefined=NO_TOKEN, formula=token_mean("weight_low"),
        measure=Measure(Quantity.BELOW, basis=RAW_WEIGHTS),
    ),
    Metric(
        "weight_bounded_high", "weights bounded above", "fraction",
        "share of valid tokens with a weight above the upper bound",
        "Share of tokens at the upper bound.", undefined=NO_TOKEN, formula=token_mean("weight_high"),
        measure=Measure(Quantity.ABOVE, basis=RAW_WEIGHTS),
    ),
    Metric(
        "normalization_factor", "normalization factor", "ratio",
        "the mean weight that weights are divided by, over the group or micro-batch, mask before rejection; "
        "averaged over tokens if there are several, 1 if that mean is at most 1e-8",
        "1 means no change. Standard errors of weights treat it as a constant.",
        "as trainers log",
        "weights are not normalized", formula=lambda t: t["factor"] / t["tokens"], better="one",
    ),
    Metric(
        "ess_token", "effective sample size of tokens after", "fraction",
        "(sum of w)^2 / (n * sum of w^2), w the applied weight, 0 on rejected tokens, n all valid tokens; "
        "undefined if the mean of w is below 1e-13",
        "Share of the tokens' information that rejection and weighting leave. 1 means no cost.", "Kish 1965",
        NOTHING_KEPT, _ess_token, better="high", own_scale=ESS_SCALE,
    ),
    Metric(
        "ess_sequence", "effective sample size of sequences after", "fraction",
        "(sum of W)^2 / (n * sum of W^2), W the sum of a sequence's applied weights on kept tokens over its length, "
        "n all sequences; undefined as for tokens",
        "The same for sequences.", "Kish 1965",
        NOTHING_KEPT, lambda t: _reliable_sum(t["sequence_weight"], t["sequences"]) ** 2 / (
            t["sequences"] * t["squared_sequence_weight"]), better="high", own_scale=ESS_SCALE,
    ),
    Metric(
        "rejected_tokens", "rejected tokens", "fraction", "share of valid tokens that some gate rejects",
        "The data that the correction discards.", undefined=NO_TOKEN, formula=lambda t: 1 - t["kept"] / t["tokens"],
        measure=Measure(Quantity.REJECTED, basis=ALL_GATES),
    ),
    Metric(
        "rejected_sequences", "sequences with rejections", "fraction",
        "share of sequences that lose at least one token",
        "Share of affected responses.", undefined=NO_TOKEN, formula=sequence_mean("touched"),
        measure=Measure(Quantity.REJECTED, VALID_SEQUENCES, basis=ALL_GATES),
    ),
    Metric(
        "fully_rejected_sequences", "fully rejected sequences", "fraction", "share of sequences that lose all tokens",
        "Share of responses that are lost.", undefined=NO_TOKEN, formula=sequence_mean("emptied"),
    ),
    Metric(
        "empty_prompts", "prompts left empty", "fraction",
        "share of prompts (clusters) that lose all their valid tokens",
        "Groups without a response, which lose their advantage baseline.",
        undefined=NOT_COUNTED, formula=lambda t: t["empty_cluster"] / t["clusters"],
    ),
    Metric(
        "kept_tokens", "kept tokens", "tokens", "number of tokens that every gate keeps",
        "Tokens that contribute to the loss.", formula=lambda t: t["kept"], has_error=False, better="",
    ),
    Metric(
        "loss_scale", "loss scale", "ratio",
        "sum of the applied weights of kept tokens / tokens in the loss's denominator "
        "(all valid tokens except rejected ones of gates with effect mask)",
        "Factor on a token-mean loss of equal terms. Below 1 the policy learns more slowly.",
        undefined=NOTHING_KEPT, formula=lambda t: (t["kept"] + t["kept_excess"]) / t["counted"], better="one",
    ),
    Metric(
        "k3_kept", "K3 of kept tokens", "nats/token", "mean of exp(x) - 1 - x over kept tokens",
        "The mismatch that remains in the training data.",
        undefined=NOTHING_KEPT, formula=lambda t: t["kept_k3"] / t["kept"],
    ),
)  # fmt: skip


COST_METRICS: tuple[Metric, ...] = (
    Metric(
        "weight_bias", "bias of the bound", "ratio",
        "mean weight as applied (bounded, normalized) minus mean weight before, over valid tokens",
        "Change of the mean weight by bounding and normalizing. 0 means no bias.",
        undefined=NO_TOKEN, formula=_weight_bias, better="",
    ),
    Metric(
        "weight_chi2", "chi2 of the weights", "-",
        "mean of w^2 over valid tokens minus 1, w the weight as applied (bounded, normalized)",
        "Variance of the weights after the bound.",
        undefined=NO_TOKEN, formula=chi2("weight_excess", "tokens"), better="", own_scale=CHI2_SCALE,
    ),
)  # fmt: skip
"""Metrics of the cost and effect of bounds, for sweeps. Means and deviations in a Result determine these metrics."""


def correction_metrics(correction: Correction, losses: bool = True) -> tuple[Metric, ...]:
    gates = tuple(metric for index, _ in enumerate(correction.gates) for metric in _gate_metrics(index, correction))
    veto = _VETO_METRICS if any(gate.is_veto for gate in correction.gates) else ()
    return (
        *_COMMON_METRICS,
        *gates,
        *veto,
        *_COMPARISON_METRICS,
        *((*_LOSS_METRICS, *_AGGREGATED_LOSS_METRICS) if losses else ()),
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
            formula=(token_mean if level == "tokens" else sequence_mean)(f"gate{index}_{level}_{side}"),
        )
        for level in ("tokens", "sequences")
        for side in ("low", "high")
    )  # fmt: skip


_VETO_METRICS = (
    Metric(
        "catastrophic_tokens", "catastrophic tokens", "fraction",
        "share of valid tokens with a ratio (not clamped) below the bound of the first veto, ratio 0 included",
        "Tokens that reject their whole sequence.", "as trainers log",
        NO_TOKEN, lambda t: t["catastrophic_tokens"] / t["veto_tokens"],
        measure=Measure(Quantity.CATASTROPHIC),
    ),
    Metric(
        "catastrophic_sequences", "catastrophic sequences", "fraction", "share of sequences with a catastrophic token",
        "Sequences that the veto rejects.", "as trainers log", NO_TOKEN, sequence_mean("catastrophic_sequences"),
        measure=Measure(Quantity.CATASTROPHIC, VALID_SEQUENCES),
    ),
)  # fmt: skip

_UNITS = {"reward": "reward", "advantage": "reward", "length": "tokens"}
_UNKNOWN_REASONS = {
    "reward": "no reward in the dump, or no such sequences",
    "advantage": "no advantages in the dump, or no such sequences",
    "length": "no such sequences",
}


def _comparison_metric(side: str, name: str) -> Metric:
    column = f"{side}_{name}"
    return Metric(
        column, f"mean {name} of {side} sequences", _UNITS[name],
        f"mean {name} over sequences{' (of each, the mean over its valid tokens)' * (name == 'advantage')}, "
        f"each counted by its share of {side} tokens",
        "If kept and rejected sequences differ, rejection selects and changes the training objective.",
        undefined=_UNKNOWN_REASONS[name], formula=lambda t: t[column] / t[f"{column}_known"], better="",
    )  # fmt: skip


_COMPARISON_METRICS = tuple(
    _comparison_metric(side, name) for name in COMPARED_COLUMNS for side in ("kept", "rejected")
)

_NO_LOSS = "no current log-probs or advantages in the dump, or no token is kept"


def _gradient_norm(t: Totals) -> Number:
    relative = t["squared_gradient"] / t["squared_plain_gradient"]
    return np.sqrt(relative) * t["loss_tokens"] / t["loss_counted"]


_LOSS_METRICS = (
    Metric(
        "loss", "policy loss", "loss",
        "sum of the applied weight times the token's loss over kept tokens / tokens in the loss's denominator; PPO "
        "anchored on train, or on rollout for ppo_bypass (its ratio is current/rollout, so such weights are not "
        "applied again), with clips 0.8 and 1.2. Weighted REINFORCE for policy_gradient",
        "The trainer's objective with this correction, as a token mean.", "as trainers log", _NO_LOSS,
        lambda t: t["loss"] / t["loss_counted"], better="",
        measure=Measure(Quantity.LOSS, KEPT_TOKENS, basis="current/anchor"),
    ),
    Metric(
        "loss_change", "change of the policy loss", "loss", "loss minus the PPO loss without any correction",
        "Change of the objective by the correction.", "mismatchctl", _NO_LOSS,
        lambda t: t["loss"] / t["loss_counted"] - t["plain_loss"] / t["loss_tokens"], better="",
    ),
    Metric(
        "loss_clip_fraction", "tokens clipped by PPO", "fraction", "share of kept tokens whose loss PPO's clip decides",
        "Tokens without a gradient.", "as trainers log", _NO_LOSS,
        lambda t: t["loss_clipped"] / t["loss_kept"], better="",
        measure=Measure(Quantity.CLIPPED, KEPT_TOKENS, basis="current/anchor"),
    ),
    Metric(
        "gradient_cosine", "direction of the gradient", "correlation",
        "cosine between the per-token gradients of the loss (by current log-probs) with the correction and without "
        "any; 0 on rejected tokens",
        "1 if the correction only rescales the gradient, lower if it changes its direction.", "mismatchctl", _NO_LOSS,
        lambda t: t["gradient_product"] / np.sqrt(t["squared_gradient"] * t["squared_plain_gradient"]), better="one",
    ),
    Metric(
        "gradient_norm", "size of the gradient", "ratio",
        "norm of the per-token gradient of the token-mean loss with the correction / without any",
        "Below 1 the correction shrinks the gradient, above 1 it enlarges it.", "mismatchctl", _NO_LOSS,
        _gradient_norm, better="one",
    ),
)  # fmt: skip

_AGGREGATED_LOSS_METRICS = tuple(
    Metric(
        f"loss{AGGREGATION_SUFFIXES[aggregation]}", f"policy loss, {aggregation}", "loss",
        f"loss with the {AGGREGATION_TEXTS[aggregation]} in the denominator",
        "The trainer's objective with this correction and aggregation.", "mismatchctl",
        _NO_LOSS, aggregation_formula("loss", "loss_counted", "loss_sequences", aggregation), better="",
    )
    for aggregation in AGGREGATIONS[1:]
)  # fmt: skip
