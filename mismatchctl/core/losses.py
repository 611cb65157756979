"""Policy losses per token with their derivatives (PPO, CISPO, GSPO, ...), and KL penalties."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Floats, Segments

Array = NDArray[Any]


def exp(values: Floats) -> Floats:
    """Compute exp in float64, and convert the result to the dtype of `values`. numpy's float32 exp is less exact."""
    with np.errstate(all="ignore"):
        return np.exp(values.astype(np.float64)).astype(values.dtype)


@dataclass(frozen=True)
class LossTerm:
    """A loss per token, with its derivative."""

    losses: Array  # loss of each token [T]
    slope: Array  # derivative of each loss [T] with respect to its log ratio (own or mean, see `mean_over`) or log-prob
    # sequences, if the gradient of a loss goes to all tokens of its sequence (mean log ratio). None: to its own token.
    mean_over: Segments | None = None
    # with `mean_over`: tokens whose log-prob changes this mean [T]. Default: all.
    gradient_tokens: NDArray[np.bool_] | None = None
    clipped: NDArray[np.bool_] | None = None  # tokens that the loss clips or masks [T]
    # tokens whose loss is the bound of the dual clip [T]. None if there is no dual clip.
    clipped_lower: NDArray[np.bool_] | None = None

    def gradient(self, factors: Array) -> Array:
        """Return the gradient of sum(factors * losses) with respect to log-probs [T]. `factors` are constants."""
        own: Array = np.where(factors == 0, 0.0, factors * self.slope)
        if self.mean_over is None:
            return own
        passed: Array = self.mean_over.spread(self.mean_over.mean(own))
        return passed if self.gradient_tokens is None else np.where(self.gradient_tokens, passed, 0.0)


def ppo_loss(
    advantages: Array,  # per token [T]
    x: Array,  # log ratio [T]
    low: float,  # lower bound of the ratio
    high: float,  # upper bound of the ratio
    *,
    cap: float | None = None,  # optional upper bound of r in the term r A (two-sided clipping)
    dual: float | None = None,  # optional dual clip: if A < 0, the loss is at most -dual A
    mean_over: Segments | None = None,  # see `LossTerm`
) -> LossTerm:
    """Compute the PPO loss -min(r A, clip(r, low, high) A) from the ratio r and the advantage A."""
    ratio = exp(x)
    with np.errstate(invalid="ignore", over="ignore"):
        free = ratio if cap is None else np.minimum(ratio, cap)
        plain, clipped = -advantages * free, -advantages * np.clip(ratio, low, high)
        losses, over = np.maximum(plain, clipped), None
        flat = clipped > plain
        if cap is not None:  # with `cap`, each of the two terms can be constant
            flat = np.where(flat, (ratio < low) | (ratio > high), ratio > cap)
        slope = np.where(flat, 0.0, -advantages * ratio)
        if dual is not None:
            bound = -advantages * dual
            over = (advantages < 0) & (losses > bound)
            losses, slope = np.where(over, bound, losses), np.where(over, 0.0, slope)
    return LossTerm(losses, slope, mean_over, clipped=flat, clipped_lower=over)


def factor_loss(advantages: Array, log_probs: Array, factors: Array | float) -> LossTerm:
    """Compute -factor * advantage * log-prob with a constant factor (no gradient), as in CISPO, VESPO and REINFORCE."""
    slope = -factors * advantages
    return LossTerm(slope * log_probs, slope)


def cispo_loss(advantages: Array, x: Array, log_probs: Array, low: float, high: float) -> LossTerm:
    """Compute the CISPO loss: the REINFORCE loss, multiplied by the ratio clipped to `low` and `high`."""
    ratio = exp(x)
    bounded = np.clip(ratio, low, high)
    return replace(factor_loss(advantages, log_probs, bounded), clipped=bounded != ratio)


def weighted_loss(advantages: Array, x: Array, bound: float | None = None) -> LossTerm:
    """Compute the loss -r A (ratio r, advantage A). With `bound`, loss and gradient use min(r, bound) instead of r."""
    ratio = exp(x)
    if bound is not None:
        ratio = np.minimum(ratio, bound)
    slope = -advantages * ratio
    return LossTerm(slope, slope)


def sapo_loss(
    advantages: Array, x: Array, positive: float, negative: float, mean_over: Segments | None = None
) -> LossTerm:
    """Compute the SAPO loss -A (4 / tau) sigmoid(tau (r - 1)) with tau = `positive` if A > 0, else `negative`."""
    ratio = exp(x)
    tau = np.where(advantages > 0, positive, negative).astype(x.dtype)
    with np.errstate(over="ignore"):
        gate = 1 / (1 + np.exp(-tau * (ratio - 1)))
    losses = -advantages * gate * (4.0 / tau)
    return LossTerm(losses, -advantages * 4.0 * gate * (1 - gate) * ratio, mean_over)


def gmpo_loss(advantages: Array, x: Array, low: float, high: float, sequences: Segments) -> LossTerm:
    """Compute the GMPO loss -A exp(mean x). Each log ratio x is at most `high` if A > 0, and at least `low` if not."""
    up = advantages > 0
    clipped = np.where(up, np.minimum(x, high), np.maximum(x, low))
    ratio = exp(sequences.spread(sequences.mean(clipped)))
    slope = -advantages * ratio
    return LossTerm(slope, slope, sequences, clipped == x)


def topr_loss(advantages: Array, x: Array, log_probs: Array, low: float, high: float) -> LossTerm:
    """Compute the TOPR loss: the REINFORCE loss, multiplied by the clipped ratio if the advantage is negative."""
    weights = np.where(advantages < 0, np.clip(exp(x), low, high), 1.0)
    return factor_loss(advantages, log_probs, weights)


def quadratic_penalty(x: Array, tau: float) -> LossTerm:
    return LossTerm(tau * x * x, 2 * tau * x)


def vespo_gate(log_weight: Array, k: float, rate: float) -> Array:
    """Compute VESPO's factor exp(rate + k ln W - rate W) from ln W, the log weight of each sequence [S]."""
    return np.exp(rate + k * log_weight - rate * np.exp(log_weight))


def sum_terms(terms: list[tuple[LossTerm, Array]]) -> tuple[float, Array]:
    """Multiply each loss term by its factors [T] and add up. Return the total loss and its gradient per token."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = (np.where(factors == 0, 0.0, factors * term.losses) for term, factors in terms)
        value = sum(float(np.sum(each, dtype=np.float64)) for each in values)
        gradient: Array = np.sum([term.gradient(factors) for term, factors in terms], axis=0)
    return value, gradient


def kl_estimate(log_ratio: Floats, kind: str) -> Floats:
    """Estimate the KL per token from x = log(policy / reference): k1 is x, k2 is x^2 / 2, k3 is exp(-x) - 1 + x."""
    if kind == "k1":
        return log_ratio
    if kind == "k2":
        return log_ratio * log_ratio / 2
    return exp(-log_ratio) - 1 + log_ratio


KL_KINDS = ("k1", "k2", "k3", "low_var")
"""Estimators of the KL to the reference policy. low_var is K3, limited to the range from -10 to 10."""
LOW_VAR_BOUND = 10.0


def low_variance_kl(log_ratio: Floats, importance: Floats | None = None) -> Floats:
    """Return K3 per token, times the importance weights if given, clipped to ±LOW_VAR_BOUND (DeepSeek-V3.2)."""
    estimate = kl_estimate(log_ratio, "k3")
    return np.clip(estimate if importance is None else importance * estimate, -LOW_VAR_BOUND, LOW_VAR_BOUND)


def off_policy_mask(advantages: Floats, drift: Floats, segments: Segments, delta: float) -> Bools:
    """Flag tokens with advantage < 0 in sequences whose `drift` (mean old - current log-prob [S]) > `delta` (OPSM)."""
    masked: Bools = (advantages < 0) & segments.spread(drift > drift.dtype.type(delta))
    return masked
