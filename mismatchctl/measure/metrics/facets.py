"""Metrics of facets, and metrics that split one pair of policies into two others."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np

from mismatchctl.core.losses import KL_KINDS, LOW_VAR_BOUND
from mismatchctl.core.ratios import BAND, TAUS, compute_k3
from mismatchctl.measure.facets import (
    BEYOND_NAMES,
    KL,
    LAYER_WIDTHS,
    REWARD,
    ROUTING,
    SPREAD,
    TOP_DISTRIBUTIONS,
    VERSIONS,
)
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

_EQUAL_STATUS = "the log-probs are equal"


def _part_share(whole: str, own: str, other: str) -> Callable[[Totals], Number]:
    """Return the formula of sum(w a) / sum(w^2) for w = a + b, from sums of squares: 2 w a = w^2 + a^2 - b^2."""
    return lambda t: (t[whole] + t[own] - t[other]) / (2 * t[whole])


def _correlation(a: str, b: str, whole: str, sign: float) -> Callable[[Totals], Number]:
    """Return the formula of Pearson's correlation of a and b over tokens, given sums of whole^2 = (a + sign b)^2."""

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
        "The interaction of the two, 0 if they are independent.", "mismatchctl", "no valid token",
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
_NO_TOP = "no token has the most likely tokens of both sides"


def _top_metric(key: str, title: str, unit: str, formula: str, meaning: str, better: BetterValue = "low") -> Metric:
    return Metric(
        key, title, unit, formula, meaning, "Cover and Thomas 2006, Elements of Information Theory, ch. 2", _NO_TOP,
        lambda t: t[key] / t["top"], better=better,
    )  # fmt: skip


TOP_METRICS: tuple[Metric, ...] = (
    _top_metric(
        "top_kl", "KL of the recorded distributions", "nats/token",
        "mean of sum of p log(p/q) over the k tokens, and r log(r/s) of the rest; p, r rollout, q, s train",
        "The quantity that K3 estimates, without sampling noise. Exact if the k tokens hold all mass, "
        "a lower bound otherwise.",
    ),
    _top_metric(
        "top_tv", "total variation of the recorded distributions", "fraction",
        "mean of (sum of |p - q| over the k tokens, and |r - s|) / 2",
        "Lower bound of the probability that the two sides sample different tokens.",
    ),
    _top_metric(
        "top_tv_most", "total variation at most", "fraction", "mean of (sum of |p - q| over the k tokens, r and s) / 2",
        "Upper bound of the same.",
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
        "share of tokens for which the most likely token is the same on both sides",
        "Share of positions at which greedy decoding chooses the same token.", better="high",
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


_KL_METRICS = tuple(
    _kl_metric(kind, aggregation, unbiased=unbiased)
    for kind in KL_KINDS
    for unbiased in (False, True)
    for aggregation in AGGREGATIONS
)


def _widest_column(name: str) -> Callable[[Totals], Number]:
    """Return the formula of a column at the widest layer without repeated experts."""

    def value(t: Totals) -> Number:
        found = t[f"{name}@{LAYER_WIDTHS[0]}"]
        for width in LAYER_WIDTHS[1:]:
            found = np.where(np.real(t[f"repeats@{width}"]) == 0, t[f"{name}@{width}"], found)
        return found

    return value


_REROUTED, _REROUTED_K3 = _widest_column("rerouted"), _widest_column("rerouted_k3")
_NO_EXPERTS, _NO_DIFFERENCE = "no token has the experts of both sides", "no experts differ, or K3 is 0"
_ROUTING_METRICS = (
    Metric(
        "routing_differs", "tokens with other experts", "fraction",
        "share of tokens whose experts differ between rollout and train in any layer, of tokens with both",
        "0 with routing replay (R3). Without it, the tokens that router noise flips.",
        "mismatchctl", _NO_EXPERTS, lambda t: _REROUTED(t) / t["routed"],
    ),
    Metric(
        "routing_sequences", "sequences with other experts", "fraction",
        "share of sequences with such a token, of sequences with experts of both sides",
        "Share of affected responses.", "mismatchctl", _NO_EXPERTS,
        lambda t: _widest_column("rerouted_sequences")(t) / t["routed_sequences"],
    ),
    Metric(
        "routing_k3", "K3 where experts differ", "nats/token", "mean of exp(x) - 1 - x over such tokens",
        "Far above the K3 of other tokens if routing causes the mismatch.", "mismatchctl", _NO_DIFFERENCE,
        lambda t: _REROUTED_K3(t) / _REROUTED(t),
    ),
    Metric(
        "routing_k3_elsewhere", "K3 where experts agree", "nats/token", "mean of exp(x) - 1 - x over the others",
        "About the K3 that would remain with routing replay.", "mismatchctl", _NO_EXPERTS,
        lambda t: (t["routed_k3"] - _REROUTED_K3(t)) / (t["routed"] - _REROUTED(t)),
    ),
    Metric(
        "routing_k3_share", "K3 where experts differ, of all", "fraction",
        "sum of exp(x) - 1 - x over such tokens / over all with experts of both sides",
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
_SPREAD_METRICS = (
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
        "The same, with Pinsker's inequality for the distribution of each position.",
        _LI_REFERENCE, NO_TOKEN, tail=_bound_formula(lambda t, largest: largest * t["length^1.5"] * 4 / 3),
    ),
    Metric(
        "bound_mixed", "trust-region bound, of T", "-",
        _BOUND_TEXT.format("2 T sqrt(D S)") + ", S the mean over sequences of their sum of K3",
        "The same, with the divergence of whole sequences. The tightest of the three if that is small.",
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

FACET_METRICS: dict[str, tuple[Metric, ...]] = {
    SPREAD: _SPREAD_METRICS,
    VERSIONS: _VERSION_METRICS,
    REWARD: _REWARD_METRICS,
    KL: _KL_METRICS,
    ROUTING: _ROUTING_METRICS,
    TOP_DISTRIBUTIONS: TOP_METRICS,
}
"""Metrics of each facet by name."""
FACET_SECTIONS = {
    SPREAD: "Spread of ratios",
    VERSIONS: "Weight versions",
    REWARD: "Reward",
    KL: "KL to the reference policy",
    ROUTING: "Routing",
    TOP_DISTRIBUTIONS: "Distributions",
}
"""Headings of the facets."""
