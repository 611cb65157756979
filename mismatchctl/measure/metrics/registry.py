"""Metrics of policy pairs, of corrections and of optional columns. Their definitions are in metrics.yaml."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.core.losses import KL_KINDS, LOW_VAR_BOUND
from mismatchctl.core.ratios import INTERVALS, TAUS, Ratios, compute_k3
from mismatchctl.corrections.labels import gate_label
from mismatchctl.corrections.model import Correction
from mismatchctl.measure.columns import Columns
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
_ROUNDING = 1e-13  # a variance below this share of the mean square is a rounding error


def chi2(excess: str, number: str) -> Formula:
    """Return the formula for the mean of w^2 - 1. It uses sums of w - 1, which are more exact than sums of w near 1."""
    return lambda t: (t[f"squared_{excess}"] + 2 * t[excess]) / t[number]


def std(column: str) -> Formula:
    """Return the formula for the standard deviation of a column over tokens."""

    def value(t: Totals) -> Number:
        variance = _variance(t[f"squared_{column}"] / t["tokens"], t[column] / t["tokens"])
        return np.where(np.real(variance) == 0, 0.0, np.sqrt(variance))

    return value


def _variance(square: Number, mean: Number) -> Number:
    """Return the mean square minus the squared mean, or 0 if this variance is only rounding error."""
    variance = square - mean * mean
    return np.where(np.real(variance) < _ROUNDING * np.real(square), variance * 0.0, variance)


def nonzero_variance(square: Number, mean: Number) -> Number:
    """Compute the variance, but return NaN instead of 0, because the caller divides by it."""
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
"""Counts, such as `prompts`. They do not depend on log-probs."""
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
"""Metrics of a pair of policies. RATIO_Z is computed from `ratio_mean` and its standard error."""
MISMATCH_METRICS: tuple[Metric, ...] = (*BASE_METRICS, *PAIR_METRICS, RATIO_Z)

_SMALLEST_WEIGHT = 1e-13  # if the mean of w is smaller, 1 + mean of (w - 1) has fewer than three correct digits
_NO_BIAS = 1e-15  # if bounds change the mean weight by less, relative to the raw mean or 1, it is a rounding error


def _ess_token(t: Totals) -> Number:
    squares = t["squared_kept_weight"]
    some = np.where(np.real(squares) == 0, np.nan, squares)
    return _reliable_sum(t["kept"] + t["kept_excess"], t["kept"]) ** 2 / (t["tokens"] * some)


def _reliable_sum(weight: Number, count: Number) -> Number:
    """Return a sum of weights, or NaN if it is so small that rounding errors dominate it."""
    return np.where(np.real(weight) < _SMALLEST_WEIGHT * np.real(count), np.nan, weight)


def _weight_bias(t: Totals) -> Number:
    moved = (t["weight_excess"] - t["raw_weight_excess"]) / t["tokens"]
    size = np.maximum(np.abs(np.real(t["raw_weight_excess"]) / t["tokens"]), 1.0)
    return np.where(np.abs(np.real(moved)) < _NO_BIAS * size, moved * 0.0, moved)


_COMMON_METRICS = read_metrics(
    "correction",
    {
        "raw_weight_mean": lambda t: 1 + t["raw_weight_excess"] / t["tokens"],
        "raw_weight_std": std("raw_weight_excess"),
        "weight_mean": lambda t: 1 + t["weight_excess"] / t["tokens"],
        "weight_std": std("weight_excess"),
        "ess_token": _ess_token,
        "ess_sequence": lambda t: (
            _reliable_sum(t["sequence_weight"], t["sequences"]) ** 2 / (t["sequences"] * t["squared_sequence_weight"])
        ),
        "rejected_tokens": lambda t: 1 - t["kept"] / t["tokens"],
        "loss_scale": lambda t: (t["kept"] + t["kept_excess"]) / t["counted"],
    },
)
COST_METRICS = read_metrics("cost", {"weight_bias": _weight_bias, "weight_chi2": chi2("weight_excess", "tokens")})
"""Metrics that only sweeps use: the bias and the variance of bounded weights."""
_VETO_METRICS, _COMPARISON_METRICS = read_metrics("veto"), read_metrics("outcomes")
_LOSS_METRICS = read_metrics(
    "loss",
    {
        "loss_change": lambda t: t["loss"] / t["loss_counted"] - t["plain_loss"] / t["loss_tokens"],
        "gradient_cosine": lambda t: (
            t["gradient_product"] / np.sqrt(t["squared_gradient"] * t["squared_plain_gradient"])
        ),
        "gradient_norm": lambda t: (
            np.sqrt(t["squared_gradient"] / t["squared_plain_gradient"]) * t["loss_tokens"] / t["loss_counted"]
        ),
    },
)


def correction_metrics(correction: Correction, losses: bool = True) -> tuple[Metric, ...]:
    gates = tuple(metric for index, _ in enumerate(correction.gates) for metric in _gate_metrics(index, correction))
    veto = _VETO_METRICS if any(gate.is_veto for gate in correction.gates) else ()
    return (*_COMMON_METRICS, *gates, *veto, *_COMPARISON_METRICS, *(_LOSS_METRICS if losses else ()))


def sweep_metrics(correction: Correction) -> tuple[Metric, ...]:
    return (*correction_metrics(correction, losses=False), *COST_METRICS)


def _gate_metrics(index: int, correction: Correction) -> tuple[Metric, ...]:
    title, ends = gate_label(correction.gates[index]), {"low": "below the lower", "high": "above the upper"}
    of = {"tokens": "the valid tokens that gate {} rejects", "sequences": "sequences with a token that gate {} rejects"}
    return tuple(
        Metric(
            f"gate{index}_{level}_{side}", f"gate {index} ({title}): {level} {ends[side]} bound", "fraction",
            f"share of {of[level].format(index)} because the checked value, such as the ratio, is {ends[side]} bound",
            "The first gate of a correction is gate 0, the second is gate 1.", undefined=NO_TOKEN,
            formula=read_formula(f"gate{index}_{level}_{side} / {level}"),
        )
        for level in ("tokens", "sequences")
        for side in ("low", "high")
    )  # fmt: skip


ROLLOUT_TOP_COLUMN = "rollout_top_log_probs"
OTHER_TOP_COLUMNS = ("train_top_log_probs", "reference_top_log_probs")
"""Top-k columns to compare with ROLLOUT_TOP_COLUMN. Only the first of these columns in the dump is used."""
DISTRIBUTION_NAMES = ("top", "top_kl", "top_tv", "top_tv_most", "top_mass_rollout", "top_mass_train", "top_agrees")
MIN_REST = 1e-6
"""Lower limit for the probability of all tokens outside the top k, because float32 is not more exact."""
MIN_TOP_LOG_PROB = -700.0
"""A lower top-k log-prob is replaced by this value, because exp(-700) is still above 0."""
MAX_ROUNDED_LOG_PROB = 1e-3
"""A log-prob up to this far above 0 is a rounding error. Tokens with a larger top-k log-prob are not compared."""


def distribution_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Compare the top-k log-probs of rollout and trainer at each token, and sum the divergences per sequence."""
    rollout, train = block.extra_columns.get(ROLLOUT_TOP_COLUMN), find_other_top(block.extra_columns)
    if rollout is None or train is None or rollout.shape != train.shape:
        return {name: np.zeros(len(block)) for name in DISTRIBUTION_NAMES}
    known: NDArray[Any] = np.all(
        (rollout <= MAX_ROUNDED_LOG_PROB) & (train <= MAX_ROUNDED_LOG_PROB), axis=1
    )  # the comparison is False for NaN
    values = {"top": np.ones(len(known)), **compare_distributions(rollout, train)}
    segments = block.segments
    return {name: segments.sum(segments.from_host(np.where(known, values[name], 0.0))) for name in DISTRIBUTION_NAMES}


def find_other_top(tokens: Mapping[str, NDArray[Any]]) -> NDArray[Any] | None:
    return next((tokens[name] for name in OTHER_TOP_COLUMNS if name in tokens), None)


def compare_distributions(rollout: NDArray[Any], train: NDArray[Any]) -> dict[str, Float64s]:
    """Compare rollout and trainer at each token by their top-k log-probs [T, k]."""
    a, b = (np.clip(side.astype(np.float64), MIN_TOP_LOG_PROB, MAX_ROUNDED_LOG_PROB) for side in (rollout, train))
    p, q = np.where(rollout == -np.inf, 0.0, np.exp(a)), np.exp(b)
    mass_p, mass_q = p.sum(axis=1), q.sum(axis=1)
    rest_p, rest_q = (np.maximum(1 - mass, MIN_REST) for mass in (mass_p, mass_q))
    apart = np.abs(p - q).sum(axis=1)
    return {
        "top_kl": (p * (a - b)).sum(axis=1) + rest_p * np.log(rest_p / rest_q),
        "top_tv": (apart + np.abs(rest_p - rest_q)) / 2,
        "top_tv_most": (apart + rest_p + rest_q) / 2,
        "top_mass_rollout": mass_p,
        "top_mass_train": mass_q,
        "top_agrees": (np.argmax(a, axis=1) == np.argmax(b, axis=1)).astype(np.float64),
    }


BEYOND_NAMES = tuple(f"beyond@{tau:g}" for tau in TAUS)
SPREAD_NAMES = ("in_band", "means_in_band", "length^1.5", *BEYOND_NAMES)


def spread_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """For each sequence, count the ratios near 1 and far from 1, and check if the mean log ratio is near 0."""
    lengths = block.segments.lengths.astype(np.float64)
    low, high = INTERVALS[:, 0]
    mean = ratios.log_ratio_sum / np.maximum(lengths, 1)
    near = (mean >= low) & (mean <= high) & (lengths > 0)
    outside, *beyond = ratios.outside_counts
    return dict(zip(SPREAD_NAMES, (lengths - outside, near.astype(np.float64), lengths**1.5, *beyond), strict=True))


VERSION_NAMES = ("behind", "aged", "stale", "mixed", "versioned")


def version_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Sum the token ages (train - rollout version) per sequence. Flag sequences with several rollout versions."""
    segments = Segments(block.segments.offsets)  # on the CPU, like the columns with versions
    unknown = np.full(len(block), np.nan)

    def of_tokens(column: str) -> Float64s:
        if column in block.extra_columns:
            return block.extra_columns[column].astype(np.float64)
        of_sequences = block.columns.get(column, unknown)
        return segments.spread(unknown if of_sequences.dtype == object else of_sequences).astype(np.float64)

    versions = of_tokens("rollout_version")
    behind, told = of_tokens("train_version") - versions, np.isfinite(versions)
    aged = np.isfinite(behind)
    newest, oldest = segments.max(np.where(told, versions, -np.inf)), segments.min(np.where(told, versions, np.inf))
    sums = [segments.sum(values) for values in (np.where(aged, behind, 0.0), aged, aged & (behind > 0))]
    flags = [values.astype(np.float64) for values in (newest > oldest, newest >= oldest)]
    return dict(zip(VERSION_NAMES, (*sums, *flags), strict=True))


REWARD_NAMES = ("reward", "rewarded")


def reward_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    rewards = block.columns.get("reward", np.full(len(block), np.nan))
    numbers = np.full(len(block), np.nan) if rewards.dtype == object else rewards.astype(np.float64)
    known = np.isfinite(numbers) & (block.segments.lengths > 0)
    return dict(zip(REWARD_NAMES, (np.where(known, numbers, 0.0), known.astype(np.float64)), strict=True))


KL_NAMES = (
    "kl_tokens", "kl_sequences",
    *(f"kl_{kind}{weight}{mean}" for kind in KL_KINDS for weight in ("", "_unbiased") for mean in ("", "_mean")),
)  # fmt: skip


def kl_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Estimate the KL between `current` and the reference policy per sequence. If `current` is missing, use `train`."""
    policy, reference = block.train if block.current is None else block.current, block.log_probs("ref")
    known = np.zeros(len(block)) if reference is None else block.has_log_probs("ref").astype(np.float64)
    lengths = block.segments.lengths * known
    columns = {"kl_tokens": lengths, "kl_sequences": (lengths > 0).astype(np.float64)}
    if reference is None:
        return columns | {name: np.zeros(len(block)) for name in KL_NAMES[2:]}
    scored = block.segments.spread(known > 0)
    log_ratio = np.where(scored, policy.astype(np.float64) - reference.astype(np.float64), 0.0)
    importance = np.exp(policy.astype(np.float64) - block.train.astype(np.float64))
    for kind in KL_KINDS:
        found = _estimate(log_ratio, kind, None), _estimate(log_ratio, kind, importance)
        for name, values in zip((f"kl_{kind}", f"kl_{kind}_unbiased"), found, strict=True):
            columns[name] = block.segments.sum(values)
            columns[f"{name}_mean"] = columns[name] / np.maximum(lengths, 1)
    return columns


def _estimate(log_ratio: Float64s, kind: str, importance: Float64s | None) -> Float64s:
    """Estimate the KL per token in float64, times `importance` if given. `kind`: k1, k2, k3 or low_var (clipped)."""
    x = log_ratio
    with np.errstate(over="ignore", invalid="ignore"):  # if the mean is not finite, its status shows this
        exact = x if kind == "k1" else x * x / 2 if kind == "k2" else compute_k3(-x)
        weighted = exact if importance is None else importance * exact
    return np.clip(weighted, -LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var" else weighted


LAYER_WIDTHS = (1, 2, 4, 6, 8, 10)
"""Possible numbers of experts per layer. The largest is used, unless a layer would then contain an expert twice."""
WIDTH_NAMES = ("repeats", "rerouted", "rerouted_k3", "rerouted_sequences")
ROUTING_NAMES = (
    "routed",
    "routed_k3",
    "routed_sequences",
    *(f"{name}@{k}" for name in WIDTH_NAMES for k in LAYER_WIDTHS),
)


def routing_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Count tokens that rollout and trainer route differently, and sum their K3, for 1, 2, 4, ... experts per layer."""
    rollout, train = (block.extra_columns.get(f"{side}_experts") for side in ("rollout", "train"))
    lost = rollout is None or train is None or rollout.shape != train.shape
    if rollout is None or train is None or lost:
        return {name: np.zeros(len(block)) for name in ROUTING_NAMES}
    segments = block.segments

    def total(flags: Bools, values: Float64s | None = None) -> Float64s:
        there = segments.from_host(flags)
        return segments.sum(there if values is None else np.where(there, values, 0.0))

    known = ~(np.isnan(rollout).any(axis=1) | np.isnan(train).any(axis=1))
    columns = {"routed": total(known), "routed_k3": total(known, ratios.k3)}
    columns["routed_sequences"] = (columns["routed"] > 0).astype(np.float64)
    for width in LAYER_WIDTHS:
        fits, same = _compare_routing(rollout, train, width)
        rerouted = total(known & ~same)
        columns[f"repeats@{width}"] = total(known & ~fits)
        columns[f"rerouted@{width}"] = rerouted
        columns[f"rerouted_k3@{width}"] = total(known & ~same, ratios.k3)
        columns[f"rerouted_sequences@{width}"] = (rerouted > 0).astype(np.float64)
    return columns


def _compare_routing(rollout: NDArray[Any], train: NDArray[Any], width: int) -> tuple[Bools, Bools]:
    """Return two flags per token: no layer repeats an expert in the rollout, and the trainer chose the same experts."""
    tokens, chosen = rollout.shape
    if chosen % width:
        never = np.zeros(tokens, np.bool_)
        return never, never
    layers = tokens, chosen // width  # explicit, because numpy cannot infer a dimension if there are no tokens
    a, b = (np.sort(side.reshape(*layers, width), axis=2) for side in (rollout, train))
    return (np.diff(a, axis=2) != 0).all(axis=(1, 2)), (a == b).all(axis=(1, 2))


def _part_share(whole: str, own: str, other: str) -> Formula:
    """For w = a + b, return the formula for the share of a, sum(w a) / sum(w^2), from the three sums of squares."""
    return lambda t: (t[whole] + t[own] - t[other]) / (2 * t[whole])


def _correlation(a: str, b: str, whole: str, sign: float) -> Formula:
    """Return the formula for the correlation of a and b. Column `whole` is (a + b)^2, or (a - b)^2 for `sign` -1."""

    def value(t: Totals) -> Number:
        tokens = t["tokens"]
        mean_a, mean_b = t[f"{a}log_ratio"] / tokens, t[f"{b}log_ratio"] / tokens
        squares = t[f"{a}square"] / tokens, t[f"{b}square"] / tokens
        product = sign * (t[whole] / tokens - squares[0] - squares[1]) / 2
        return (product - mean_a * mean_b) / np.sqrt(
            nonzero_variance(squares[0], mean_a) * nonzero_variance(squares[1], mean_b)
        )

    return value


SPLITS = {
    "total": read_metrics(
        "total",
        {
            "total_share_mismatch": _part_share("square", "mismatch_square", "drift_square"),
            "total_share_drift": _part_share("square", "drift_square", "mismatch_square"),
            "total_correlation": _correlation("mismatch_", "drift_", "square", 1.0),
            "total_k3_together": lambda t: (t["k3"] - t["mismatch_k3"] - t["drift_k3"]) / t["tokens"],
        },
    ),
    "train_reference": read_metrics(
        "sides",
        {
            "share_rollout": _part_share("mismatch_square", "rollout_reference_square", "square"),
            "share_train": _part_share("mismatch_square", "square", "rollout_reference_square"),
            "sides_correlation": _correlation("", "rollout_reference_", "mismatch_square", -1.0),
        },
    ),
}
"""Pair of policies -> metrics that split a log ratio into two parts, such as `total` into mismatch and drift."""

_ESTIMATES = {"k1": "x", "k2": "x^2 / 2", "k3": "exp(-x) - 1 + x", "low_var": "exp(-x) - 1 + x"}
_AGGREGATIONS = (
    ("token-mean", "", "{} / kl_tokens", "mean over all valid tokens"),
    ("seq-mean-token-sum", "_seq_sum", "{} / kl_sequences", "mean over all sequences of the sum over tokens"),
    ("seq-mean-token-mean", "_seq_mean", "{}_mean / kl_sequences", "mean over all sequences of the mean over tokens"),
)  # fmt: skip
"""Ways to average the KL of tokens over a batch: (name, suffix of the metric's key, formula, description)."""


def _kl_metrics(kind: str, unbiased: bool) -> Iterator[Metric]:
    suffix = "_unbiased" if unbiased else ""
    weighted = f"w * ({_ESTIMATES[kind]})" if unbiased else _ESTIMATES[kind]
    if kind == "low_var":  # the weighted estimate is clipped
        weighted += f", clipped to [-{LOW_VAR_BOUND:g}, {LOW_VAR_BOUND:g}]"
    for aggregation, ending, formula, words in _AGGREGATIONS:
        yield Metric(
            f"ref_{kind}{suffix}{ending}",
            f"KL to the reference policy: {kind}{', unbiased' if unbiased else ''}, {aggregation}",
            "nats/token" if aggregation != "seq-mean-token-sum" else "nats",
            f"{words} of {weighted}, where x is the current policy's log-prob of a token minus the reference policy's"
            + (", and w is the current policy's probability divided by the trainer's" if unbiased else "")
            + ". If the dump lacks current log-probs, the trainer's are used",
            f"The KL penalty that a trainer computes with the estimator {kind} and the aggregation {aggregation}. " + (
                "Its gradient equals the gradient of the KL (DeepSeek-V3.2)." if unbiased
                else "It is biased if the policy has changed since sampling."
            ),
            "Schulman 2020, Approximating KL Divergence", "no sequence has ref_log_probs",
            read_formula(formula.format(f"kl_{kind}{suffix}")), better="",
        )  # fmt: skip


KL_METRICS = tuple(metric for kind in KL_KINDS for unbiased in (False, True) for metric in _kl_metrics(kind, unbiased))


def _widest_column(name: str) -> Formula:
    """Return a formula for `name@k`. k is the largest number of experts per layer that never repeats an expert."""

    def value(t: Totals) -> Number:
        found = t[f"{name}@{LAYER_WIDTHS[0]}"]
        for width in LAYER_WIDTHS[1:]:
            found = np.where(np.real(t[f"repeats@{width}"]) == 0, t[f"{name}@{width}"], found)
        return found

    return value


_REROUTED, _REROUTED_K3 = _widest_column("rerouted"), _widest_column("rerouted_k3")
_ROUTING_METRICS = read_metrics(
    "routing",
    {
        "routing_differs": lambda t: _REROUTED(t) / t["routed"],
        "routing_sequences": lambda t: _widest_column("rerouted_sequences")(t) / t["routed_sequences"],
        "routing_k3": lambda t: _REROUTED_K3(t) / _REROUTED(t),
        "routing_k3_elsewhere": lambda t: (t["routed_k3"] - _REROUTED_K3(t)) / (t["routed"] - _REROUTED(t)),
        "routing_k3_share": lambda t: _REROUTED_K3(t) / t["routed_k3"],
    },
)


def _largest_k3(maxima: Mapping[str, Any]) -> Any:
    """Return the largest K3 of all tokens, which is the K3 of the token with the lowest or highest log ratio."""
    return compute_k3(np.array([maxima["log_ratio"], -maxima["-log_ratio"]])).max(axis=0)


def _bound_formula(of_lengths: Callable[[Totals, float], Number]) -> Tail:
    return lambda t, tails: float(of_lengths(t, float(_largest_k3(tails.maxima))) / t["sequences"])


SPREAD_METRICS = (
    *(
        Metric(
            f"beyond_{tau:g}".replace(".", "_"),
            f"ratios above {tau:g} or below 1/{tau:g}",
            "fraction",
            f"share of the valid tokens whose ratio is above {tau:g} or below 1/{tau:g}",
            "The ratio is the trainer's probability of a token divided by the rollout's.",
            "mismatchctl",
            NO_TOKEN,
            read_formula(f"{column} / tokens"),
        )
        for tau, column in zip(TAUS, BEYOND_NAMES, strict=True)
    ),
    *read_metrics(
        "spread",
        {"logit_shift": lambda t: t["log_ratio"] / (t["tokens"] - t["reference_prob"])},
        extremes={"k3_max": _largest_k3},
        tails={
            "bound_classical": _bound_formula(lambda t, largest: largest * (t["squared_length"] - t["tokens"])),
            "bound_marginal": _bound_formula(lambda t, largest: largest * t["length^1.5"] * 4 / 3),
            "bound_mixed": _bound_formula(
                lambda t, largest: 2 * t["tokens"] * np.sqrt(largest * t["k3"] / t["sequences"])
            ),
        },
    ),
)


@dataclass(frozen=True)
class Facet:
    """A group of optional metrics, and the columns that they need."""

    section: str  # heading
    needs: frozenset[str]  # required columns of the schema
    names: tuple[str, ...]  # names of the sums that `columns` computes, in the order of the table
    columns: Callable[[TokenBatch, Ratios], Columns]  # function that computes the facet's sums
    metrics: tuple[Metric, ...]
    either: tuple[str, ...] = ()  # if given, one of these columns is also required

    def is_available(self, has: Collection[str]) -> bool:
        return self.needs <= set(has) and (not self.either or any(name in has for name in self.either))


FACETS = (
    Facet("Spread of ratios", frozenset(), SPREAD_NAMES, spread_columns, SPREAD_METRICS),
    Facet("Weight versions", frozenset({"rollout_version"}), VERSION_NAMES, version_columns, read_metrics("versions")),
    Facet("Reward", frozenset({"reward"}), REWARD_NAMES, reward_columns, read_metrics("reward")),
    Facet("KL to the reference policy", frozenset({"ref_log_probs"}), KL_NAMES, kl_columns, KL_METRICS),
    Facet("Routing", frozenset({"rollout_experts", "train_experts"}), ROUTING_NAMES, routing_columns, _ROUTING_METRICS),
    Facet(
        "Distributions",
        frozenset({ROLLOUT_TOP_COLUMN}),
        DISTRIBUTION_NAMES,
        distribution_columns,
        read_metrics("top"),
        either=OTHER_TOP_COLUMNS,
    ),
)
"""All groups of optional metrics. A group is measured if the dump contains its columns."""
FACET_METRICS: tuple[Metric, ...] = sum((facet.metrics for facet in FACETS), ())
