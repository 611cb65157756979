"""Ratios: the log ratio of two policies on the same tokens, and statistics computed from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any

import numpy as np

from mismatchctl.core.batch import Float64s, Floats, Ints, Segments, TokenBatch

LOG_RATIO_BOUND = 20.0
"""Log ratios are clamped to +-20 before they become ratios, as in trainers."""

BAND = (0.999, 1.002)
"""Range of ratios that the metric `parity_tokens` counts as equal to 1."""
TAUS = (1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Factors tau. `Ratios.outside_counts` counts the tokens whose ratio is outside of [1/tau, tau]."""
INTERVALS = np.log([[BAND[0], *(1 / tau for tau in TAUS)], [BAND[1], *TAUS]])
"""Log ratio bounds of BAND and of [1/tau, tau] for each tau: the lower bounds in row 0, the upper bounds in row 1."""

DENSE_RANGE = (1e-5, 1e-3)
"""Typical K3 of dense models: 1e-5 to 1e-3."""
MOE_RANGE = (1e-3, 1e-1)
"""Typical K3 of mixture-of-experts models."""
K3_SCALE = (1e-8, 1.0)
"""Lower and upper end of the scale for drawing K3."""

_SERIES_LIMIT = 1e-2  # below this |x|, expm1(x) - x loses digits. Above it, the series would need more terms.
_SERIES = [1 / math.factorial(power) for power in range(2, 8)]


def k3_scale_position(k3: float) -> float:
    """Return the position of a K3 on the logarithmic scale K3_SCALE, from 0 (low end) to 1 (high end)."""
    low, high = (math.log10(end) for end in K3_SCALE)
    return min(max((math.log10(k3) - low) / (high - low), 0.0), 1.0) if k3 > 0 else 0.0


def compute_k3(log_ratio: Float64s, exp_minus_one: Float64s | None = None) -> Float64s:
    """Compute K3 = exp(x) - 1 - x of log ratios x. K3 is never negative, and its relative error is at most 1e-13."""
    x = log_ratio
    if exp_minus_one is None:
        with np.errstate(over="ignore"):
            exp_minus_one = np.expm1(x)
    k3 = exp_minus_one - x
    small = np.abs(x) < _SERIES_LIMIT
    if small.any():
        np.copyto(k3, _k3_series(x), where=small)
    return k3


def _k3_series(x: Float64s) -> Float64s:
    """Compute exp(x) - 1 - x for small x as the series x^2/2 + x^3/6 + ... + x^7/5040."""
    terms = x * _SERIES[-1]
    with np.errstate(over="ignore", invalid="ignore"):
        for coefficient in _SERIES[-2::-1]:
            terms += coefficient
            terms *= x
        terms *= x
    return terms


def bounded_excess(log_ratio: Float64s) -> Float64s:
    """Return the ratio minus 1. The log ratio is clamped to +-20, so that the result cannot overflow."""
    return np.expm1(np.clip(log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))


class Ratios:
    """Log ratios per token: the log-probs of `policy` minus the log-probs of `reference`."""

    def __init__(self, policy: Floats, reference: Floats, segments: Segments) -> None:
        self.log_probs = policy, reference
        self.segments = segments

    @cached_property
    def policy(self) -> Float64s:
        return self.log_probs[0].astype(np.float64)

    @cached_property
    def reference(self) -> Float64s:
        return self.log_probs[1].astype(np.float64)

    @cached_property
    def log_ratio(self) -> Float64s:
        return self.policy - self.reference

    def log_ratio_at(self, tokens: Ints) -> Float64s:
        policy, reference = (values[tokens].astype(np.float64) for values in self.log_probs)
        return policy - reference

    @cached_property
    def exp_minus_one(self) -> Float64s:
        """Return exp(x) - 1 of each log ratio x. The log ratios are not clamped."""
        with np.errstate(over="ignore"):
            return np.expm1(self.log_ratio)

    @cached_property
    def excess(self) -> Float64s:
        """Return ratio - 1 per token. Log ratios below -20 count as -20, and above 20 as 20."""
        within = np.abs(self.extent).max() <= LOG_RATIO_BOUND if len(self.log_probs[0]) else True
        return self.exp_minus_one if within else bounded_excess(self.log_ratio)

    @cached_property
    def max_log_ratio(self) -> Float64s:
        return self.segments.max(self.log_ratio)

    @cached_property
    def min_log_ratio(self) -> Float64s:
        return self.segments.min(self.log_ratio)

    @cached_property
    def extent(self) -> Float64s:
        """Return the smallest and the largest log ratio of all tokens. Without tokens, return +inf and -inf."""
        return np.array([self.min_log_ratio.min(initial=np.inf), self.max_log_ratio.max(initial=-np.inf)])

    @cached_property
    def outside_counts(self) -> Float64s:
        found = np.zeros((INTERVALS.shape[1], len(self.segments)))
        for tokens, low, high in zip(found, *INTERVALS, strict=True):
            if self.extent[0] < low or self.extent[1] > high:
                tokens += self.segments.sum((self.log_ratio < low) | (self.log_ratio > high))
        return found

    @cached_property
    def ratio_range(self) -> tuple[Float64s, Float64s]:
        """Return the smallest and largest ratio per sequence [S], with log ratios clamped to +-20."""
        low, high = (
            np.exp(np.clip(own, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)) for own in (self.min_log_ratio, self.max_log_ratio)
        )
        return low, high

    @cached_property
    def abs_log_ratio(self) -> Float64s:
        return np.abs(self.log_ratio)

    @cached_property
    def k3(self) -> Float64s:
        return compute_k3(self.log_ratio, self.exp_minus_one)

    @cached_property
    def policy_prob(self) -> Float64s:
        return np.exp(self.policy)

    @cached_property
    def reference_prob(self) -> Float64s:
        return np.exp(self.reference)

    @cached_property
    def prob_diff(self) -> Float64s:
        return self.policy_prob - self.reference_prob

    @cached_property
    def log_ratio_sum(self) -> Float64s:
        return self.segments.sum(self.log_ratio)

    @cached_property
    def absolute_sum(self) -> Float64s:
        return self.segments.sum(self.abs_log_ratio)

    @cached_property
    def square_sum(self) -> Float64s:
        return self.segments.sum(self.log_ratio * self.log_ratio)

    @cached_property
    def k3_sum(self) -> Float64s:
        return self.segments.sum(self.k3)

    @cached_property
    def excess_sum(self) -> Float64s:
        return self.segments.sum(self.excess)

    @cached_property
    def squared_excess_sum(self) -> Float64s:
        return self.segments.sum(self.excess * self.excess)

    def take(self, chosen: Ints) -> Ratios:
        policy, reference = map(self.segments.token_selector(chosen), self.log_probs)
        return type(self)(policy, reference, self.segments.take(chosen))


def compute_ratios(batch: TokenBatch, sources: Iterable[str]) -> dict[str, Ratios]:
    """Compute the ratios for sources such as `train/rollout`. Raise KeyError if a policy lacks log-probs."""
    made = {}
    for source in sources:
        policy, reference = (batch.log_probs(name) for name in source.split("/"))
        if policy is None or reference is None:
            raise KeyError(source)
        made[source] = Ratios(policy, reference, batch.segments)
    return made


class Float32Ratios(Ratios):
    """Ratios in float32, as in trainers. Exponentials are computed in float64 and rounded to float32."""

    @cached_property
    def policy(self) -> Any:
        return self.log_probs[0].astype(np.float32)

    @cached_property
    def reference(self) -> Any:
        return self.log_probs[1].astype(np.float32)

    @cached_property
    def policy_prob(self) -> Any:
        return np.exp(self.policy.astype(np.float64)).astype(np.float32)

    @cached_property
    def reference_prob(self) -> Any:
        return np.exp(self.reference.astype(np.float64)).astype(np.float32)


_PROBABILITY_MARGIN = 1e-8  # probabilities are clamped to this distance from 0 and 1


def _binary_kl(p: Any, q: Any) -> Any:
    """Compute KL(p || q) per token for two outcomes: the sampled token (probabilities p, q) or another token."""
    p, q = (
        np.clip(values, *np.array([_PROBABILITY_MARGIN, 1 - _PROBABILITY_MARGIN], values.dtype)) for values in (p, q)
    )
    with np.errstate(divide="ignore", invalid="ignore"):
        return p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))


def _maximum(a: Any, b: Any) -> Any:
    """Return the larger value per token [T], or NaN if either value is NaN."""
    return np.where((a > b) | np.isnan(a), a, b)


STATISTICS: dict[str, Callable[[Ratios], Float64s]] = {
    "k1": lambda r: -r.log_ratio,
    "k2": lambda r: 0.5 * r.log_ratio * r.log_ratio,
    "k3": lambda r: r.k3,
    "k3_reversed": lambda r: compute_k3(-r.log_ratio),
    "abs_log_ratio": lambda r: r.abs_log_ratio,
    "mult_error": lambda r: np.exp(np.minimum(r.abs_log_ratio, 700.0)),
    "ratio_gap": lambda r: np.abs(r.exp_minus_one),
    "prob_diff": lambda r: r.prob_diff,
    "abs_prob_diff": lambda r: np.abs(r.prob_diff),
    "train_prob": lambda r: r.policy_prob,
    "rollout_prob": lambda r: r.reference_prob,
    "binary_kl": lambda r: _binary_kl(r.reference_prob, r.policy_prob),
    "binary_kl_max": lambda r: _maximum(
        _binary_kl(r.reference_prob, r.policy_prob), _binary_kl(r.policy_prob, r.reference_prob)
    ),
}
"""Statistics of a token that a gate can use instead of the ratio: name -> function."""

STATISTIC_SUMS: dict[str, Callable[[Ratios], Float64s]] = {
    "ratio": lambda r: r.log_ratio_sum,
    "k1": lambda r: -r.log_ratio_sum,
    "k2": lambda r: 0.5 * r.square_sum,
    "k3": lambda r: r.k3_sum,
    "abs_log_ratio": lambda r: r.absolute_sum,
}
"""Statistic -> function for its sum per sequence [S], which uses sums that `Ratios` has already computed."""
