"""How the log ratio of one pair of policies splits into those of two others: whose part is how large."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mismatchctl.measure.metrics.metric import Metric, Number, Totals
from mismatchctl.measure.metrics.mismatch import spread

_EQUAL = "the log-probs of the whole are equal"


def _share(whole: str, own: str, other: str) -> Callable[[Totals], Number]:
    """Of w = a + b, the share sum(w a) / sum(w^2) of a; from sums of squares, as 2 w a = w^2 + a^2 - b^2."""
    return lambda t: (t[whole] + t[own] - t[other]) / (2 * t[whole])


def _correlation(a: str, b: str, whole: str, sign: float) -> Callable[[Totals], Number]:
    """Pearson's, of a and b over tokens, given the sums of whole^2 = (a + sign b)^2."""

    def value(t: Totals) -> Number:
        tokens = t["tokens"]
        mean_a, mean_b = t[f"{a}log_ratio"] / tokens, t[f"{b}log_ratio"] / tokens
        squares = t[f"{a}square"] / tokens, t[f"{b}square"] / tokens
        product = sign * (t[whole] / tokens - squares[0] - squares[1]) / 2
        return (product - mean_a * mean_b) / np.sqrt(spread(squares[0], mean_a) * spread(squares[1], mean_b))

    return value


_TOTAL = (
    Metric(
        "total_share_mismatch", "the mismatch's share of the total", "fraction",
        "sum of g t / sum of t^2; g = train minus rollout, d = current minus train, t = g + d = current minus rollout",
        "How much of the distance from the sampler is the engine's and the trainer's disagreement. The two shares add "
        "up to 1; one is below 0 where it undoes the other.",
        "mismatchctl", _EQUAL, _share("square", "mismatch_square", "drift_square"), better="",
    ),
    Metric(
        "total_share_drift", "the update's share of the total", "fraction", "sum of d t / sum of t^2",
        "How much of it is what the policy has learned since.",
        "mismatchctl", _EQUAL, _share("square", "drift_square", "mismatch_square"), better="",
    ),
    Metric(
        "total_correlation", "correlation of both drifts", "correlation", "Pearson correlation of g and d over tokens",
        "Below 0 the update undoes some of the mismatch, above 0 it adds to it.",
        "mismatchctl", "one of the two is constant",
        _correlation("mismatch_", "drift_", "square", 1.0), better="",
    ),
    Metric(
        "total_k3_together", "K3 of both drifts together", "nats/token",
        "K3 of the total minus K3 of the mismatch minus K3 of the drift, on the same tokens",
        "What neither has alone: 0 where they are independent.", "mismatchctl", "no valid token",
        lambda t: (t["k3"] - t["mismatch_k3"] - t["drift_k3"]) / t["tokens"], better="",
    ),
)  # fmt: skip

_SIDES = (
    Metric(
        "share_rollout", "the rollout's share of the gap", "fraction",
        "sum of -r g / sum of g^2; r = rollout minus reference, e = train minus reference, g = e - r = train minus "
        "rollout",
        "How much of the disagreement is the engine's error. The two shares add up to 1; what both sides err alike is "
        "in neither.",
        "mismatchctl", _EQUAL, _share("mismatch_square", "rollout_reference_square", "square"), better="",
    ),
    Metric(
        "share_train", "the trainer's share of the gap", "fraction", "sum of e g / sum of g^2",
        "How much of it is the trainer's error.",
        "mismatchctl", _EQUAL, _share("mismatch_square", "square", "rollout_reference_square"), better="",
    ),
    Metric(
        "sides_correlation", "correlation of both errors", "correlation",
        "Pearson correlation of r and e over tokens",
        "Noise that both sides share, as bfloat16 on both does (0.6 to 0.9), is in no gap.",
        "mismatchctl", "one of the two is constant",
        _correlation("", "rollout_reference_", "mismatch_square", -1.0), better="",
    ),
)  # fmt: skip

SPLITS: dict[str, tuple[Metric, ...]] = {"total": _TOTAL, "train_reference": _SIDES}
"""By the name of the pair under whose prefix their columns stand, or without any."""
