"""Metrics of optional data, such as weight versions, reference KL, experts and recorded distributions.

Some of these metrics split one pair of policies into two other pairs.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.core.losses import KL_KINDS, LOW_VAR_BOUND
from mismatchctl.core.ratios import BAND, INTERVALS, TAUS, Ratios, compute_k3
from mismatchctl.measure.columns import Columns
from mismatchctl.measure.metrics.metric import (
    AGGREGATION_SUFFIXES,
    AGGREGATION_TEXTS,
    AGGREGATIONS,
    NO_TOKEN,
    Metric,
    MetricTails,
    Number,
    Totals,
    aggregation_formula,
)
from mismatchctl.measure.metrics.mismatch import nonzero_variance, sequence_mean, token_mean

ROLLOUT_TOP_COLUMN = "rollout_top_log_probs"
OTHER_TOP_COLUMNS = ("train_top_log_probs", "reference_top_log_probs")
"""Columns that the rollout is compared with: the trainer's, or else those of a scorer with the same weights."""
DISTRIBUTION_NAMES = ("top", "top_kl", "top_tv", "top_tv_most", "top_mass_rollout", "top_mass_train", "top_agrees")
MIN_REST = 1e-6
"""Minimum probability of the remaining tokens, because a sum of float32 probabilities is only this precise."""
MIN_TOP_LOG_PROB = -700.0
"""Smaller log-probs count as this value, whose exp is still above 0."""
MAX_ROUNDED_LOG_PROB = 1e-3
"""Largest log-prob that counts as rounding. A larger log-prob makes the distribution at its position invalid."""


def distribution_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Count tokens with two distributions and sum their divergences, per sequence [S]."""
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
    """Return the log-probs of the rollout's most likely tokens on the other side."""
    return next((tokens[name] for name in OTHER_TOP_COLUMNS if name in tokens), None)


def compare_distributions(rollout: NDArray[Any], train: NDArray[Any]) -> dict[str, Float64s]:
    """Compute divergences [T] of rollout and trainer from the log-probs of k tokens [T, k]."""
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
    """Count tokens and sequences with ratios close to 1, tokens with ratios far from 1, and sum lengths^1.5."""
    lengths = block.segments.lengths.astype(np.float64)
    low, high = INTERVALS[:, 0]
    mean = ratios.log_ratio_sum / np.maximum(lengths, 1)
    near = (mean >= low) & (mean <= high) & (lengths > 0)
    outside, *beyond = ratios.outside_counts
    return dict(zip(SPREAD_NAMES, (lengths - outside, near.astype(np.float64), lengths**1.5, *beyond), strict=True))


VERSION_NAMES = ("behind", "aged", "stale", "mixed", "versioned")


def version_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Sum the age of tokens. Count tokens with a known age, tokens with a positive age and sequences with versions."""
    segments = Segments(block.segments.offsets)  # versions stay on the host
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
    """Sum the rewards of sequences with tokens, and count the sequences with a reward."""
    rewards = block.columns.get("reward", np.full(len(block), np.nan))
    numbers = np.full(len(block), np.nan) if rewards.dtype == object else rewards.astype(np.float64)
    known = np.isfinite(numbers) & (block.segments.lengths > 0)
    return dict(zip(REWARD_NAMES, (np.where(known, numbers, 0.0), known.astype(np.float64)), strict=True))


KL_NAMES = (
    "kl_tokens", "kl_sequences",
    *(f"kl_{kind}{weight}{mean}" for kind in KL_KINDS for weight in ("", "_unbiased") for mean in ("", "_mean")),
)  # fmt: skip


def kl_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Estimate the KL of the current policy (or else the trainer's recomputation) to the reference policy."""
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
    """Compute `kl_estimate` in float64. The kind low_var is multiplied by the importance weight and then clipped."""
    x = log_ratio
    with np.errstate(over="ignore", invalid="ignore"):  # a mean that is not finite has a status
        exact = x if kind == "k1" else x * x / 2 if kind == "k2" else compute_k3(-x)
        weighted = exact if importance is None else importance * exact
    return np.clip(weighted, -LOW_VAR_BOUND, LOW_VAR_BOUND) if kind == "low_var" else weighted


LAYER_WIDTHS = (1, 2, 4, 6, 8, 10)
"""Possible numbers of experts per layer. The largest number without a repeated expert in a layer is used."""
WIDTH_NAMES = ("repeats", "rerouted", "rerouted_k3", "rerouted_sequences")
ROUTING_NAMES = (
    "routed",
    "routed_k3",
    "routed_sequences",
    *(f"{name}@{k}" for name in WIDTH_NAMES for k in LAYER_WIDTHS),
)


def routing_columns(block: TokenBatch, ratios: Ratios) -> Columns:
    """Count tokens with known experts, and sum their K3.

    For each possible number of experts per layer, tokens with different experts on the two sides are counted.

    A token is rerouted if the sets of experts differ in a layer.
    """
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
    """Return two flags per token [T]: no layer repeats an expert, and rollout and trainer have the same experts."""
    tokens, chosen = rollout.shape
    if chosen % width:
        never = np.zeros(tokens, np.bool_)
        return never, never
    layers = tokens, chosen // width  # the shape is explicit, because numpy cannot infer it without tokens
    a, b = (np.sort(side.reshape(*layers, width), axis=2) for side in (rollout, train))
    return (np.diff(a, axis=2) != 0).all(axis=(1, 2)), (a == b).all(axis=(1, 2))


_EQUAL_STATUS = "the log-probs are equal"


def _part_share(whole: str, own: str, other: str) -> Callable[[Totals], Number]:
    """Return the formula of sum(w a) / sum(w^2) for w = a + b, from sums of squares."""
    return lambda t: (t[whole] + t[own] - t[other]) / (2 * t[whole])


def _correlation(a: str, b: str, whole: str, sign: float) -> Callable[[Totals], Number]:
    """Return the formula of Pearson's correlation of a and b over tokens, from sums of squares."""

    def value(t: Totals) -> Number:
        tokens = t["tokens"]
        mean_a, mean_b = t[f"{a}log_ratio"] / tokens, t[f"{b}log_ratio"] / tokens
        squares = t[f"{a}square"] / tokens, t[f"{b}square"] / tokens
        product = sign * (t[whole] / tokens - squares[0] - squares[1]) / 2
        return (product - mean_a * mean_b) / np.sqrt(
            nonzero_variance(squares[0], mean_a) * nonzero_variance(squares[1], mean_b)
        )

    return value


_TOTAL_METRICS = (
    Metric(
        "total_share_mismatch", "the mismatch's share of the total", "fraction",
        "sum of g t / sum of t^2; g = train minus rollout, d = current minus train, t = g + d = current minus rollout",
        "Share of the distance from the sampler that is the mismatch between engine and trainer. The two shares add "
        "up to 1. A share below 0 partly cancels the other.",
        "mismatchctl", _EQUAL_STATUS, _part_share("square", "mismatch_square", "drift_square"), better="",
    ),
    Metric(
        "total_share_drift", "the update's share of the total", "fraction", "sum of d t / sum of t^2",
        "Share of the distance that is the update of the policy.",
        "mismatchctl", _EQUAL_STATUS, _part_share("square", "drift_square", "mismatch_square"), better="",
    ),
    Metric(
        "total_correlation", "correlation of mismatch and update", "correlation",
        "Pearson correlation of g and d over tokens",
        "Below 0 the update cancels part of the mismatch, above 0 it adds to it.",
        "mismatchctl", "one of the two is constant",
        _correlation("mismatch_", "drift_", "square", 1.0), better="",
    ),
    Metric(
        "total_k3_together", "K3 of the interaction of mismatch and update", "nats/token",
        "K3 of the total minus K3 of the mismatch minus K3 of the drift, on the same tokens",
        "The interaction of mismatch and update, 0 if they are independent.", "mismatchctl", "no valid token",
        lambda t: (t["k3"] - t["mismatch_k3"] - t["drift_k3"]) / t["tokens"], better="",
    ),
)  # fmt: skip

_SIDE_METRICS = (
    Metric(
        "share_rollout", "the rollout's share of the gap", "fraction",
        "sum of -r g / sum of g^2; r = rollout minus reference, e = train minus reference, g = e - r = train minus "
        "rollout",
        "Share of the disagreement that is the engine's error. The two shares add up to 1 and do not include "
        "errors that both sides share.",
        "mismatchctl", _EQUAL_STATUS, _part_share("mismatch_square", "rollout_reference_square", "square"), better="",
    ),
    Metric(
        "share_train", "the trainer's share of the gap", "fraction", "sum of e g / sum of g^2",
        "Share of the disagreement that is the trainer's error.",
        "mismatchctl", _EQUAL_STATUS, _part_share("mismatch_square", "square", "rollout_reference_square"), better="",
    ),
    Metric(
        "sides_correlation", "correlation of the two errors", "correlation",
        "Pearson correlation of r and e over tokens",
        "Shared noise does not show in the log ratios. bfloat16 on both sides gives 0.6 to 0.9.",
        "mismatchctl", "one of the two is constant",
        _correlation("", "rollout_reference_", "mismatch_square", -1.0), better="",
    ),
)  # fmt: skip

SPLITS: dict[str, tuple[Metric, ...]] = {"total": _TOTAL_METRICS, "train_reference": _SIDE_METRICS}
"""Metrics by the name of the pair whose columns they use."""
BetterValue = Literal["low", "high", "one", ""]
_NO_TOP = "no token has the most likely tokens of each side"


def _top_metric(key: str, title: str, unit: str, formula: str, meaning: str, better: BetterValue = "low") -> Metric:
    return Metric(
        key, title, unit, formula, meaning, "Cover and Thomas 2006, Elements of Information Theory, ch. 2", _NO_TOP,
        lambda t: t[key] / t["top"], better=better,
    )  # fmt: skip


TOP_METRICS: tuple[Metric, ...] = (
    _top_metric(
        "top_kl", "KL of the recorded distributions", "nats/token",
        "mean of sum of p log(p/q) over the k tokens, and r log(r/s) of the rest; p, r rollout, q, s train",
        "The quantity that K3 estimates, without sampling noise. Exact if the k tokens contain all mass, "
        "a lower bound otherwise.",
    ),
    _top_metric(
        "top_tv", "total variation of the recorded distributions", "fraction",
        "mean of (sum of |p - q| over the k tokens, and |r - s|) / 2",
        "Lower bound of the probability that the two sides sample different tokens.",
    ),
    _top_metric(
        "top_tv_most", "total variation at most", "fraction", "mean of (sum of |p - q| over the k tokens, r and s) / 2",
        "Upper bound of the total variation.",
    ),
    _top_metric(
        "top_mass_rollout", "mass of the recorded tokens, rollout", "fraction", "mean of the sum of p",
        "1 if the k tokens are all tokens that can be sampled.", better="",
    ),
    _top_metric(
        "top_mass_train", "mass of the recorded tokens, train", "fraction", "mean of the sum of q",
        "Below the rollout's if the rollout was truncated and renormalized.", better="",
    ),
    _top_metric(
        "top_agrees", "same most likely token", "fraction",
        "share of tokens with the same most likely token on both sides",
        "Share of positions with the same greedy token.", better="high",
    ),
)  # fmt: skip


_ESTIMATES = {
    "k1": "x",
    "k2": "x^2 / 2",
    "k3": "exp(-x) - 1 + x",
    "low_var": "exp(-x) - 1 + x",
}
_SCHULMAN = "Schulman 2020, Approximating KL Divergence"
_NO_REFERENCE = "no sequence has ref_log_probs"


def kl_key(kind: str, aggregation: str = "token-mean", *, unbiased: bool = False) -> str:
    return f"ref_{kind}{'_unbiased' if unbiased else ''}{AGGREGATION_SUFFIXES[aggregation]}"


def _kl_metric(kind: str, aggregation: str, *, unbiased: bool) -> Metric:
    column = f"kl_{kind}{'_unbiased' if unbiased else ''}"
    weighted = f"exp(current - train) * ({_ESTIMATES[kind]})" if unbiased else _ESTIMATES[kind]
    if kind == "low_var":  # the bound applies to the weighted estimate
        weighted += f" within +-{LOW_VAR_BOUND:g}"
    return Metric(
        kl_key(kind, aggregation, unbiased=unbiased),
        f"KL to the reference policy: {kind}{', unbiased' if unbiased else ''}, {aggregation}",
        "nats/token" if aggregation != "seq-mean-token-sum" else "nats",
        f"{weighted}, x = current (train without it) minus ref log-prob: {AGGREGATION_TEXTS[aggregation]}",
        "The penalty that the trainer would compute" + (
            ", weighted by current / train so that its gradient is that of the KL (DeepSeek-V3.2)." if unbiased
            else ", biased if the policy has moved since sampling."
        ),
        _SCHULMAN,
        _NO_REFERENCE, aggregation_formula(column, "kl_tokens", "kl_sequences", aggregation), better="",
    )  # fmt: skip


KL_METRICS = tuple(
    _kl_metric(kind, aggregation, unbiased=unbiased)
    for kind in KL_KINDS
    for unbiased in (False, True)
    for aggregation in AGGREGATIONS
)


def _widest_column(name: str) -> Callable[[Totals], Number]:
    """Return the formula of a column at the largest number of layers without repeated experts."""

    def value(t: Totals) -> Number:
        found = t[f"{name}@{LAYER_WIDTHS[0]}"]
        for width in LAYER_WIDTHS[1:]:
            found = np.where(np.real(t[f"repeats@{width}"]) == 0, t[f"{name}@{width}"], found)
        return found

    return value


_REROUTED, _REROUTED_K3 = _widest_column("rerouted"), _widest_column("rerouted_k3")
_NO_EXPERTS, _NO_DIFFERENCE = "no token has the experts of each side", "no experts differ, or K3 is 0"
_ROUTING_METRICS = (
    Metric(
        "routing_differs", "tokens with other experts", "fraction",
        "share of tokens whose experts differ between rollout and train in any layer, of tokens with both",
        "0 with routing replay (R3). Without it, the tokens that router noise flips.",
        "mismatchctl", _NO_EXPERTS, lambda t: _REROUTED(t) / t["routed"],
    ),
    Metric(
        "routing_sequences", "sequences with other experts", "fraction",
        "share of sequences with a token whose experts differ, among sequences with experts of each side",
        "Share of affected responses.", "mismatchctl", _NO_EXPERTS,
        lambda t: _widest_column("rerouted_sequences")(t) / t["routed_sequences"],
    ),
    Metric(
        "routing_k3", "K3 where experts differ", "nats/token", "mean of exp(x) - 1 - x over tokens whose "
        "experts differ",
        "Far above the K3 of other tokens if routing causes the mismatch.", "mismatchctl", _NO_DIFFERENCE,
        lambda t: _REROUTED_K3(t) / _REROUTED(t),
    ),
    Metric(
        "routing_k3_elsewhere", "K3 where experts agree", "nats/token", "mean of exp(x) - 1 - x over tokens "
        "whose experts agree",
        "About the K3 that would remain with routing replay.", "mismatchctl", _NO_EXPERTS,
        lambda t: (t["routed_k3"] - _REROUTED_K3(t)) / (t["routed"] - _REROUTED(t)),
    ),
    Metric(
        "routing_k3_share", "K3 where experts differ, of all", "fraction",
        "sum of exp(x) - 1 - x over tokens whose experts differ / over all tokens with experts of each side",
        "Share of the mismatch that comes from routing.", "mismatchctl", _NO_DIFFERENCE,
        lambda t: _REROUTED_K3(t) / t["routed_k3"],
    ),
)  # fmt: skip


def _largest_k3(maxima: Mapping[str, Any]) -> Any:
    """Return the largest K3 of a token, which is at an extreme of the log ratio."""
    return compute_k3(np.array([maxima["log_ratio"], -maxima["-log_ratio"]])).max(axis=0)


def _bound_formula(of_lengths: Callable[[Totals, float], Number]) -> Callable[[Totals, MetricTails], float]:
    return lambda t, tails: float(of_lengths(t, float(_largest_k3(tails.maxima))) / t["sequences"])


_LI_REFERENCE = "Li et al. 2025, Trust Region Masking for Long-Horizon LLM Reinforcement Learning"
_BOUND_TEXT = "mean over sequences of {}, with T its tokens and D the largest K3 of a token (instead of the largest KL)"
SPREAD_METRICS = (
    *(
        Metric(
            f"beyond_{tau:g}".replace(".", "_"), f"F({tau:g}), ratios more than {tau:g} times off", "fraction",
            f"share of tokens with max(exp(x), exp(-x)) > {tau:g}",
            f"Share of tokens outside bounds of {tau:g} and its inverse.", "mismatchctl", NO_TOKEN, token_mean(column),
        )
        for tau, column in zip(TAUS, BEYOND_NAMES, strict=True)
    ),
    Metric(
        "parity_tokens", "tokens at parity", "fraction", f"share of tokens with exp(x) in [{BAND[0]}, {BAND[1]}]",
        "Near 1 if both sides compute alike. The band of parity recipes.", "parity recipes (MLPerf band)",
        NO_TOKEN, token_mean("in_band"), better="high",
    ),
    Metric(
        "parity_sequences", "sequences at parity", "fraction",
        f"share of sequences with exp(mean of x) in [{BAND[0]}, {BAND[1]}]",
        "Noise averages out over a sequence, and a bias does not.", "parity recipes (MLPerf band)",
        NO_TOKEN, sequence_mean("means_in_band"), better="high",
    ),
    Metric(
        "logit_shift", "shift of the sampled logit", "nats",
        "sum of x / sum of 1 - p, p the rollout's probability: the mean of x / (1 - p) with weights 1 - p",
        "The trainer's logit of the sampled token minus the rollout's, to first order. Near 0 for noise. "
        "By bin of probability it shows which tokens are shifted.", "d log p = (1 - p) d logit",
        "every token is certain", lambda t: t["log_ratio"] / (t["tokens"] - t["reference_prob"]), better="",
    ),
    Metric(
        "k3_max", "largest K3 of a token", "nats", "max of exp(x) - 1 - x over tokens",
        "The largest divergence of a sampled token.", undefined=NO_TOKEN, extreme=_largest_k3,
    ),
    Metric(
        "bound_classical", "trust-region bound, of T^2", "-", _BOUND_TEXT.format("T (T - 1) D"),
        "Upper bound of the distance between surrogate and true objective for a reward of at most 1. Not informative "
        "above 1.",
        _LI_REFERENCE, NO_TOKEN, tail=_bound_formula(lambda t, largest: largest * (t["squared_length"] - t["tokens"])),
    ),
    Metric(
        "bound_marginal", "trust-region bound, of T^1.5", "-", _BOUND_TEXT.format("4/3 T^1.5 D"),
        "A bound by Pinsker's inequality for the distribution of each position.",
        _LI_REFERENCE, NO_TOKEN, tail=_bound_formula(lambda t, largest: largest * t["length^1.5"] * 4 / 3),
    ),
    Metric(
        "bound_mixed", "trust-region bound, of T", "-",
        _BOUND_TEXT.format("2 T sqrt(D S)") + ", S the mean over sequences of their sum of K3",
        "A bound by the divergence of whole sequences. The tightest of the three bounds if this divergence is small.",
        _LI_REFERENCE, NO_TOKEN,
        tail=_bound_formula(lambda t, largest: 2 * t["tokens"] * np.sqrt(largest * t["k3"] / t["sequences"])),
    ),
)  # fmt: skip

_NO_VERSIONS = "no token has both versions"
_VERSION_METRICS = (
    Metric(
        "staleness", "staleness", "updates", "mean over tokens of train_version minus rollout_version",
        "Age of the tokens in updates. Long responses count more.",
        "asynchronous trainers (logged by sequence or group)", _NO_VERSIONS, lambda t: t["behind"] / t["aged"],
    ),
    Metric(
        "stale_tokens", "stale tokens", "fraction", "share of tokens with a rollout_version below train_version",
        "Share of tokens that were sampled with older weights.", "mismatchctl", _NO_VERSIONS,
        lambda t: t["stale"] / t["aged"],
    ),
    Metric(
        "mixed_versions", "responses that mix versions", "fraction",
        "share of sequences whose tokens have more than one rollout_version, of those with any",
        "Responses that continued after a weight update, 0 if each response uses one version.",
        "mismatchctl", "no sequence has a rollout_version", lambda t: t["mixed"] / t["versioned"],
    ),
)  # fmt: skip

_REWARD_METRICS = (
    Metric(
        "reward_mean", "mean reward", "reward", "mean over sequences with a reward and a valid token",
        "Shows if training improves while the mismatch changes.", "mismatchctl", "no sequence has a reward",
        lambda t: t["reward"] / t["rewarded"], better="",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Facet:
    """Optional metrics that need certain columns."""

    section: str  # heading
    needs: frozenset[str]  # required columns of the schema
    names: tuple[str, ...]  # names of the facet's sums, in order
    columns: Callable[[TokenBatch, Ratios], Columns]  # function that computes the facet's sums
    metrics: tuple[Metric, ...]
    either: tuple[str, ...] = ()  # one of these columns is also required, unless empty

    def is_available(self, has: Collection[str]) -> bool:
        return self.needs <= set(has) and (not self.either or any(name in has for name in self.either))


FACETS = (
    Facet("Spread of ratios", frozenset(), SPREAD_NAMES, spread_columns, SPREAD_METRICS),
    Facet("Weight versions", frozenset({"rollout_version"}), VERSION_NAMES, version_columns, _VERSION_METRICS),
    Facet("Reward", frozenset({"reward"}), REWARD_NAMES, reward_columns, _REWARD_METRICS),
    Facet("KL to the reference policy", frozenset({"ref_log_probs"}), KL_NAMES, kl_columns, KL_METRICS),
    Facet("Routing", frozenset({"rollout_experts", "train_experts"}), ROUTING_NAMES, routing_columns, _ROUTING_METRICS),
    Facet(
        "Distributions",
        frozenset({ROLLOUT_TOP_COLUMN}),
        DISTRIBUTION_NAMES,
        distribution_columns,
        TOP_METRICS,
        either=OTHER_TOP_COLUMNS,
    ),
)
"""All groups of optional metrics. A dump has the facets whose columns it contains."""
FACET_METRICS: tuple[Metric, ...] = sum((facet.metrics for facet in FACETS), ())
