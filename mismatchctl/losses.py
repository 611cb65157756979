"""Policy losses on ragged tokens: surrogates per token, and how a framework sums them up.

Every function takes flat arrays over the valid tokens [T] and computes in their dtype, as the frameworks
do: a float32 loss decides its clips in float32. Sums are float64. An aggregation is two things, what is done
within a sequence and what the total is divided by; the denominators are the framework's business.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from mismatchctl.batch import Bools, Float64s, Floats, Segments
from mismatchctl.ratios import LOG_RATIO_BOUND

Within = Literal["sum", "mean"]


def exp(values: Floats) -> Floats:
    """Exponential in the dtype of `values`, correctly rounded: numpy's own float32 exp is not."""
    with np.errstate(all="ignore"):
        return np.exp(values.astype(np.float64)).astype(values.dtype)


@dataclass(frozen=True)
class Surrogate:
    """A clipped policy loss per token.

    Attributes:
        losses: what the token contributes, before weights and aggregation [T].
        log_ratio: current minus anchor log-prob, as the loss used it [T].
        clipped: the upper clip decided the loss [T].
        clipped_lower: the dual clip decided it [T].
    """

    losses: Floats
    log_ratio: Floats
    clipped: Bools
    clipped_lower: Bools


def ppo(
    advantages: Floats,
    current: Floats,
    anchor: Floats,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    log_ratio_bound: float = LOG_RATIO_BOUND,
) -> Surrogate:
    """PPO's clipped surrogate on the ratio current / anchor.

    Args:
        advantages: per token [T].
        current: log-probs of the policy being updated [T].
        anchor: log-probs of the policy that the ratio starts from [T].
        clip_low: the ratio is clipped at 1 - clip_low ...
        clip_high: ... and 1 + clip_high.
        dual_clip: bound on the ratio where the advantage is negative (above 1); None: no dual clip.
        log_ratio_bound: log ratios are clamped to plus and minus this first.
    """
    log_ratio = np.clip(current - anchor, -log_ratio_bound, log_ratio_bound)
    ratio = exp(log_ratio)
    plain = -advantages * ratio
    clipped = -advantages * np.clip(ratio, 1 - clip_low, 1 + clip_high)
    losses = np.maximum(plain, clipped)
    lower = np.zeros(len(losses), np.bool_)
    if dual_clip is not None:
        bound = -advantages * dual_clip
        negative = advantages < 0
        lower = (losses > bound) & negative
        losses = np.where(negative, np.minimum(losses, bound), losses)
    return Surrogate(losses, log_ratio, clipped > plain, lower)


def cispo(
    advantages: Floats, current: Floats, log_ratio: Floats, *, clip_low: float = 0.2, clip_high: float = 0.2
) -> Surrogate:
    """CISPO: -clip(ratio) A log pi, the clipped ratio a constant weight that lets every token's gradient through.

    Args:
        advantages: per token [T].
        current: log-probs of the policy being updated [T].
        log_ratio: current minus anchor [T].
        clip_low: the ratio is clipped at 1 - clip_low ...
        clip_high: ... and 1 + clip_high.
    """
    ratio = exp(log_ratio)
    clipped = np.clip(ratio, 1 - clip_low, 1 + clip_high)
    return Surrogate(-clipped * advantages * current, log_ratio, clipped != ratio, np.zeros(len(ratio), np.bool_))


def kl_estimate(log_ratio: Floats, kind: str) -> Floats:
    """KL estimator per token of x = policy minus reference log-prob [T]: k1 x, k2 x^2 / 2, k3 exp(-x) - 1 + x.

    In the dtype of `log_ratio` and without a series near zero, as losses compute it.
    """
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio * log_ratio / 2
    return exp(-log_ratio) - 1 + log_ratio


KL_KINDS = ("k1", "k2", "k3", "low_var")
"""Estimators of the KL to the reference policy; low_var is K3 within LOW_VAR_BOUND."""
LOW_VAR_BOUND = 10.0


def low_variance_kl(log_ratio: Floats, importance: Floats | None = None) -> Floats:
    """K3 per token [T], bounded by LOW_VAR_BOUND; weighted with current / anchor before, unbiased (DeepSeek-V3.2).

    Args:
        log_ratio: policy minus reference log-prob [T].
        importance: ratio of the policy being updated to the one that sampled [T]; None: biased, as sampled.
    """
    estimate = kl_estimate(log_ratio, "k3")
    return np.clip(estimate if importance is None else importance * estimate, -LOW_VAR_BOUND, LOW_VAR_BOUND)


def off_policy_masked(advantages: Floats, drift: Floats, segments: Segments, delta: float) -> Bools:
    """OPSM: the tokens that lose their loss [T], those of negative advantage in sequences that drifted too far.

    Args:
        advantages: per token [T].
        drift: mean of anchor minus current log-prob of each sequence [S].
        segments: the sequences.
        delta: a sequence drifted too far above this, compared in the dtype of `drift`.
    """
    masked: Bools = (advantages < 0) & segments.spread(drift > drift.dtype.type(delta))
    return masked


def reinforce(advantages: Floats, current: Floats) -> Floats:
    """REINFORCE, -A log pi, per token [T]."""
    return -advantages * current


def per_sequence(losses: Floats, segments: Segments, kept: Bools, within: Within) -> Float64s:
    """Sum, or mean over the kept tokens, of the losses of each sequence [S]; 0 where nothing is kept."""
    totals = segments.sum(np.where(kept, losses, 0))
    return totals if within == "sum" else totals / np.maximum(segments.sum(kept), 1)


def aggregate(losses: Floats, segments: Segments, kept: Bools, within: Within, denominator: float) -> float:
    """One number from the losses per token.

    Args:
        losses: per token [T].
        segments: the sequences.
        kept: which tokens contribute [T].
        within: `sum` or `mean` over each sequence's kept tokens.
        denominator: what the total over the sequences is divided by: tokens, sequences, or a constant. NaN comes
            from 0, unless the caller says otherwise.
    """
    total = float(per_sequence(losses, segments, kept, within).sum())
    return total / denominator if denominator else float("nan")
