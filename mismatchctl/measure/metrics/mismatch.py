"""Metrics of the mismatch, which other pairs of policies use under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from mismatchctl.measure.cluster_table import GROUP_CAP
from mismatchctl.measure.metrics.metric import (
    CHI2_SCALE,
    ESS_SCALE,
    LOG_SCALE,
    NO_TOKEN,
    VALID_SEQUENCES,
    Measure,
    Metric,
    MetricTails,
    Number,
    Quantity,
    Totals,
    khat,
    khat_limit,
    tail_length,
    worst_share,
)

WORST_TOKENS = 0.001
"""Share of tokens that count as the worst tokens."""
QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p999": 0.999}

_ROUNDING = 1e-13  # a smaller variance, relative to the mean square, is rounding

NOT_COUNTED = f"more than {GROUP_CAP:,} clusters in a group: not counted"
_OFF_POLICY = "off-policy metrics, as trainers log them"
_SCHULMAN = "Schulman 2020, Approximating KL Divergence"


def token_mean(column: str) -> Callable[[Totals], Number]:
    return lambda t: t[column] / t["tokens"]


def sequence_mean(column: str) -> Callable[[Totals], Number]:
    return lambda t: t[column] / t["sequences"]


def extreme_value(column: str, sign: float = 1.0) -> Callable[[Mapping[str, float]], float]:
    """Return a function that returns the largest value of a maximum column.

    With sign -1 and a negated column, the function returns the smallest value.
    """
    return lambda maxima: sign * maxima[column] + 0.0  # avoids -0


def _ess_token(t: Totals) -> Number:
    return (t["tokens"] + t["excess"]) ** 2 / (t["tokens"] * t["squared_ratio"])


def chi2(excess: str, number: str) -> Callable[[Totals], Number]:
    """Return the formula of the mean of w^2 - 1 from sums of w - 1, which keeps the digits of ratios near 1."""
    return lambda t: (t[f"squared_{excess}"] + 2 * t[excess]) / t[number]


def std(column: str) -> Callable[[Totals], Number]:
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


def _khat_formula(level: str) -> Callable[[Totals, MetricTails], float]:
    def value(t: Totals, tails: MetricTails) -> float:
        if tails.pair is None:
            return float("nan")
        values = tails.pair.token_tail if level == "tokens" else tails.pair.sequence_tail
        return khat(values, int(t[level]))

    return value


def _log_ppl_metrics(which: str, name: str, log_ppl: Quantity, ppl: Quantity) -> tuple[Metric, Metric]:
    who = {"train": "trainer"}.get(which, which)
    policy = f"the {who}'s log-prob"
    return (
        Metric(
            f"{which}_log_ppl", f"{who} log-perplexity", "nats",
            f"mean over sequences of minus the mean of {policy}",
            f"The surprise of the {who} at the responses. Both sides should agree.",
            _OFF_POLICY, NO_TOKEN, sequence_mean(f"{name}_log_ppl"), better="",
            measure=Measure(log_ppl, VALID_SEQUENCES),
        ),
        Metric(
            f"{which}_ppl", f"{who} perplexity", "perplexity",
            f"mean over sequences of exp(minus the mean of {policy})",
            "The perplexity, averaged over sequences.",
            _OFF_POLICY, NO_TOKEN, sequence_mean(f"{name}_ppl"), better="", measure=Measure(ppl, VALID_SEQUENCES),
        ),
    )  # fmt: skip


BASE_METRICS: tuple[Metric, ...] = (
    Metric(
        "tokens", "valid tokens", "tokens", "number of tokens with mask 1",
        "The amount of data.", formula=lambda t: t["tokens"], has_error=False, better="",
    ),
    Metric(
        "sequences", "sequences", "sequences", "number of sequences with at least one valid token",
        "The number of responses.", formula=lambda t: t["sequences"], has_error=False, better="",
    ),
    Metric(
        "empty_sequences", "empty sequences", "sequences", "number of sequences without a valid token",
        "Rows without a token. Some frameworks count them in their means.",
        formula=lambda t: t["empty_sequences"], has_error=False,
    ),
    Metric(
        "prompts", "clusters", "clusters",
        "number of prompts with a valid token, or of such sequences if the dump has no prompt ids",
        "The clusters of all standard errors, because tokens of one prompt are not independent.",
        "mismatchctl", NOT_COUNTED, lambda t: np.where(t["clusters"] > 0, t["clusters"], np.nan), False, better="",
    ),
)  # fmt: skip
"""Counts that do not depend on a pair of policies."""

PAIR_METRICS: tuple[Metric, ...] = (
    Metric(
        "k1", "K1 (direct KL)", "nats/token", "mean of -x over tokens",
        "Unbiased estimate of KL(rollout || train). It is noisy and can be negative.",
        _SCHULMAN, NO_TOKEN, lambda t: -t["log_ratio"] / t["tokens"],
        measure=Measure(Quantity.K1),
    ),
    Metric(
        "k2", "K2 KL", "nats/token", "mean of x^2 / 2 over tokens",
        "Half the mean squared log ratio: the size of the noise, without sign.",
        _SCHULMAN, NO_TOKEN, lambda t: t["square"] / t["tokens"] / 2, own_scale=LOG_SCALE,
    ),
    Metric(
        "k3", "K3 KL", "nats/token", "mean of exp(x) - 1 - x over tokens",
        "Estimate of KL(rollout || train) with the least variance, never negative. The main measure of the mismatch. "
        "Dense models usually have 1e-5 to 1e-3, mixtures of experts 1e-3 to 1e-1.",
        _SCHULMAN, NO_TOKEN, token_mean("k3"),
        measure=Measure(Quantity.K3), own_scale=LOG_SCALE,
    ),
    Metric(
        "abs_diff_mean", "mean |log-prob difference|", "nats", "mean of |x| over tokens",
        "The typical disagreement of one token.", "as trainers log it", NO_TOKEN, token_mean("abs"),
        measure=Measure(Quantity.ABS), own_scale=LOG_SCALE,
    ),
    *(
        Metric(
            f"abs_diff_{name}", f"{name.replace('p999', 'p99.9')} |log-prob difference|", "nats",
            f"quantile {share:g} of |x| over tokens",
            "Computed from a fixed histogram, within 0.8% of the value (0 below 9e-13). The interval is "
            "that of the share of tokens above it.",
            undefined=NO_TOKEN, quantile=share,
        )
        for name, share in QUANTILES.items()
    ),
    Metric(
        "abs_diff_max", "largest |log-prob difference|", "nats", "max of |x| over tokens",
        "The worst single token.", undefined=NO_TOKEN,
        extreme=lambda maxima: np.maximum(maxima["log_ratio"], maxima["-log_ratio"]),
        measure=Measure(Quantity.ABS, reduction="max"),
    ),
    *_log_ppl_metrics("train", "policy", Quantity.TRAIN_LOG_PPL, Quantity.TRAIN_PPL),
    *_log_ppl_metrics("rollout", "reference", Quantity.ROLLOUT_LOG_PPL, Quantity.ROLLOUT_PPL),
    Metric(
        "ppl_ratio", "perplexity ratio", "ratio", "mean over sequences of exp(mean of -x)",
        "Train perplexity divided by rollout perplexity of each sequence, 1 if they agree.",
        _OFF_POLICY, NO_TOKEN, sequence_mean("ppl_ratio"), better="one",
        measure=Measure(Quantity.PPL_RATIO, VALID_SEQUENCES),
    ),
    Metric(
        "log_ppl_diff", "log-perplexity difference", "nats", "mean over sequences of the mean of -x",
        "Signed drift of sequences: positive if the trainer finds them less likely.",
        _OFF_POLICY, NO_TOKEN, sequence_mean("log_ppl_diff"),
        measure=Measure(Quantity.LOG_PPL_DIFF, VALID_SEQUENCES),
    ),
    Metric(
        "log_ppl_abs_diff", "mean |log-perplexity difference|", "nats", "mean over sequences of |mean of x|",
        "Size of the drift, regardless of its sign.", _OFF_POLICY, NO_TOKEN, sequence_mean("log_ppl_abs_diff"),
        measure=Measure(Quantity.LOG_PPL_ABS_DIFF, VALID_SEQUENCES), own_scale=LOG_SCALE,
    ),
    Metric(
        "log_ppl_diff_min", "smallest log-perplexity difference", "nats", "min over sequences of the mean of -x",
        "The sequence that is most likely to the trainer compared with the rollout.", _OFF_POLICY, NO_TOKEN,
        extreme=extreme_value("-log_ppl_diff", -1.0), better="",
        measure=Measure(Quantity.LOG_PPL_DIFF, VALID_SEQUENCES, "min"),
    ),
    Metric(
        "log_ppl_diff_max", "largest log-perplexity difference", "nats", "max over sequences of the mean of -x",
        "The sequence that is least likely to the trainer compared with the rollout.", _OFF_POLICY, NO_TOKEN,
        extreme=extreme_value("log_ppl_diff"),
        measure=Measure(Quantity.LOG_PPL_DIFF, VALID_SEQUENCES, "max"),
    ),
    Metric(
        "prob_diff_mean", "mean probability difference", "probability",
        "mean of |exp(train) - exp(rollout)| over tokens",
        "Disagreement in probability. Rare tokens count little.", "debug metrics of trainers",
        NO_TOKEN, token_mean("prob_diff"),
        measure=Measure(Quantity.PROB_DIFF), own_scale=LOG_SCALE,
    ),
    Metric(
        "prob_diff_max", "largest probability difference", "probability", "max of |exp(train) - exp(rollout)|",
        "The worst token in probability.", "debug metrics of trainers", NO_TOKEN, extreme=extreme_value("prob_diff"),
        measure=Measure(Quantity.PROB_DIFF, reduction="max"),
    ),
    Metric(
        "prob_diff_std", "std of the probability difference", "probability",
        "population standard deviation of |exp(train) - exp(rollout)| over tokens",
        "The spread of the disagreement.", "debug metrics of trainers (dividing by n - 1)",
        NO_TOKEN, std("prob_diff"),
        measure=Measure(Quantity.PROB_DIFF, reduction="standard deviation (n)"),
    ),
    Metric(
        "prob_corr", "correlation of the probabilities", "correlation",
        "Pearson correlation of exp(train) and exp(rollout) over tokens",
        "Near 1 in a healthy run, far below 1 for a misaligned or wrong column.", "debug metrics of trainers",
        "one of the two probabilities is constant", _prob_corr, better="high",
        measure=Measure(Quantity.PROBS, reduction="Pearson correlation"),
    ),
    Metric(
        "ratio_mean", "mean ratio", "ratio", "mean of exp(x), x clamped to +-20, over tokens",
        "1 up to noise if the rollout log-probs belong to the sampling distribution. A bias means wrong log-probs.",
        "change of measure", NO_TOKEN, lambda t: 1 + t["excess"] / t["tokens"], better="one",
        measure=Measure(Quantity.RATIO),
    ),
    Metric(
        "chi2_token", "chi-square of tokens", "-", "mean of exp(x)^2, x clamped to +-20, over tokens, minus 1",
        "Variance of the token ratio: the price of token importance sampling.", _OFF_POLICY, NO_TOKEN,
        chi2("excess", "tokens"),
        measure=Measure(Quantity.SQUARED_RATIO), own_scale=CHI2_SCALE,
    ),
    Metric(
        "chi2_sequence", "chi-square of sequences", "-",
        "mean over sequences of exp(sum of x, clamped to +-20)^2, minus 1",
        "Variance of the sequence ratio: the price of sequence importance sampling.", _OFF_POLICY, NO_TOKEN,
        chi2("product_excess", "sequences"),
        measure=Measure(Quantity.SQUARED_PRODUCT, VALID_SEQUENCES), own_scale=CHI2_SCALE,
    ),
    Metric(
        "ess_token", "effective sample size of tokens", "fraction", "(sum of w)^2 / (n * sum of w^2) over token ratios",
        "Share of tokens with the same information as all tokens weighted by their ratios.", "Kish 1965",
        NO_TOKEN, _ess_token, better="high", own_scale=ESS_SCALE,
    ),
    Metric(
        "ess_sequence", "effective sample size of sequences", "fraction",
        "(sum of W)^2 / (n * sum of W^2), W the product of a sequence's ratios",
        "The share of sequences that counts. It collapses long before the value for tokens.", "Kish 1965",
        NO_TOKEN, lambda t: t["product"] ** 2 / (t["sequences"] * t["squared_product"]), better="high",
        own_scale=ESS_SCALE,
    ),
    Metric(
        "khat_token", "Pareto k-hat of tokens", "-",
        "shape of the generalized Pareto fitted to the largest token ratios, khat_token_tail of them, "
        "measured from the next smaller one",
        "Above its limit, means of token ratios are unreliable at this sample size.", "Vehtari et al. 2024, PSIS",
        "fewer than five ratios in the tail, or above the next one", tail=_khat_formula("tokens"),
    ),
    Metric(
        "khat_token_limit", "limit of k-hat of tokens", "-", "min(1 - 1/log10 S, 0.7), S tokens",
        "The heaviest tail with reliable means of this many tokens.", "Vehtari et al. 2024, PSIS", NO_TOKEN,
        tail=lambda t, _: khat_limit(int(t["tokens"])), better="",
    ),
    Metric(
        "khat_token_tail", "tail of k-hat of tokens", "tokens", "ceil(min(0.2 S, 3 sqrt S)), at most 4,096",
        "Number of the largest ratios in the fit.", "Vehtari et al. 2024, PSIS", NO_TOKEN,
        tail=lambda t, _: tail_length(int(t["tokens"])), better="",
    ),
    Metric(
        "khat_sequence", "Pareto k-hat of sequences", "-",
        "khat_token of the products of sequences, with the largest khat_sequence_tail of them",
        "Above its limit, sequence importance sampling does not converge in practice.",
        "Vehtari et al. 2024, PSIS", "fewer than five ratios in the tail, or above the next one",
        tail=_khat_formula("sequences"),
    ),
    Metric(
        "khat_sequence_limit", "limit of k-hat of sequences", "-", "min(1 - 1/log10 S, 0.7), S sequences",
        "The heaviest tail with reliable means of this many sequences.", "Vehtari et al. 2024, PSIS",
        "fewer than two sequences", tail=lambda t, _: khat_limit(int(t["sequences"])), better="",
    ),
    Metric(
        "khat_sequence_tail", "tail of k-hat of sequences", "sequences", "ceil(min(0.2 S, 3 sqrt S)), at most 4,096",
        "Number of the largest ratios in the fit.", "Vehtari et al. 2024, PSIS", NO_TOKEN,
        tail=lambda t, _: tail_length(int(t["sequences"])), better="",
    ),
    Metric(
        "autocorr_lag1", "lag-1 autocorrelation", "correlation",
        "mean of (x - m)(x' - m) over pairs of adjacent tokens (next positions, both valid, one sequence) "
        "/ mean of (x - m)^2 over tokens; m the mean of x over tokens",
        "Near 0 for numerical noise, positive for drift and context errors.", "mismatchctl",
        "no adjacent tokens, or all log ratios equal", _autocorrelation,
    ),
    Metric(
        "inflation", "variance inflation of sequences", "ratio",
        "sum over sequences of (S - n m)^2 / sum over tokens of (x - m)^2; S the sum of x, m its mean over tokens",
        "Variance of sequence ratios relative to independent tokens, 1 if tokens are independent.", "mismatchctl",
        "all log ratios equal", _inflation,
    ),
    Metric(
        "k3_worst_share", "K3 in the worst 0.1% of tokens", "fraction",
        "share of the sum of K3 in the 0.1% of tokens with the largest K3, with a fractional last token, "
        "from a histogram with bins of 1.6%",
        "Near 0.01 for noise, near 1 if a few tokens cause the mismatch.", "mismatchctl",
        "K3 is 0", tail=lambda _, tails: float("nan") if tails.pair is None else worst_share(tails.pair, WORST_TOKENS),
    ),
    Metric(
        "bitwise_share", "bit-identical tokens", "fraction", "share of tokens with equal log-probs on both sides",
        "1 for a true on-policy engine, near 0 by chance.", "mismatchctl", NO_TOKEN, token_mean("identical"),
        better="high",
    ),
    Metric(
        "bitwise_all", "all tokens bit-identical", "0/1", "1 if every token has equal log-probs on both sides",
        "1 for a run that is on-policy to the bit.", "mismatchctl", NO_TOKEN,
        formula=lambda t: np.where(t["tokens"] > 0, (t["identical"] == t["tokens"]) * 1.0, np.nan),
        has_error=False, better="high",
    ),
)  # fmt: skip
"""Metrics of one pair of policies, such as train against rollout or current against train."""

RATIO_Z = Metric(
    "ratio_mean_z", "z of the mean ratio", "standard errors", "(ratio_mean - 1) / its standard error",
    "Beyond ±4 the rollout log-probs do not belong to the sampling distribution. Find the cause before you correct.",
    "change of measure", "no standard error",
)  # fmt: skip
"""Metric that is computed from the estimate of `ratio_mean` instead of sums."""
MISMATCH_METRICS: tuple[Metric, ...] = (*BASE_METRICS, *PAIR_METRICS, RATIO_Z)
"""Every metric of the mismatch, in the order of tables."""
