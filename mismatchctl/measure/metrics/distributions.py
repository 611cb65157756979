"""The registry, fourth part: metrics of distributions, as the k most likely tokens tell them."""

from __future__ import annotations

from typing import Literal

from mismatchctl.measure.metrics.metric import Metric

Better = Literal["low", "high", "one", ""]
_NO_TOP = "no token has the most likely tokens of both sides"


def _top(key: str, title: str, unit: str, formula: str, meaning: str, better: Better = "low") -> Metric:
    return Metric(
        key, title, unit, formula, meaning, "Cover and Thomas 2006, Elements of Information Theory, ch. 2", _NO_TOP,
        lambda t: t[key] / t["top"], better=better,
    )  # fmt: skip


TOP_METRICS: tuple[Metric, ...] = (
    _top(
        "top_kl", "KL of the recorded distributions", "nats/token",
        "mean of sum of p log(p/q) over the k tokens, and r log(r/s) of the rest; p, r rollout, q, s train",
        "What K3 estimates from the sampled token alone, without its noise: all of the KL where the k hold all mass, "
        "else at most as much.",
    ),
    _top(
        "top_tv", "total variation of the recorded distributions", "fraction",
        "mean of (sum of |p - q| over the k tokens, and |r - s|) / 2",
        "How often both would part if they sampled as alike as they can: at least so much.",
    ),
    _top(
        "top_tv_most", "total variation at most", "fraction", "mean of (sum of |p - q| over the k tokens, r and s) / 2",
        "The bound from above: what the rest hides is the difference.",
    ),
    _top(
        "top_mass_rollout", "mass of the recorded tokens, rollout", "fraction", "mean of the sum of p",
        "1 where the k tokens are all that can be sampled.", better="",
    ),
    _top(
        "top_mass_train", "mass of the recorded tokens, train", "fraction", "mean of the sum of q",
        "Below the rollout's where that was truncated and made to sum to 1 again.", better="",
    ),
    _top(
        "top_agrees", "same most likely token", "fraction",
        "share of tokens where one of the k is the most likely for both",
        "How often greedy decoding would go the same way.", better="high",
    ),
)  # fmt: skip
