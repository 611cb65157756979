"""Importance weights per token or per sequence, before normalization."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Segments
from mismatchctl.correction.model import Weight
from mismatchctl.correction.selection import Selection
from mismatchctl.ratios import LOG_RATIO_BOUND, Ratios, bounded_excess

_SMALLEST_MEAN = 1e-8


@dataclass(frozen=True)
class Weights:
    """Importance weights per token [T] or per sequence [S], before normalization.

    Attributes:
        rule: what made them.
        ratios: what they were made from.
        calm: whether it is known that no weight per token lies beyond a bound.
        view: tokens that are aggregated; None: all.
        runs: segments that weights of level segment are made over.
        bounded_at: sequences whose weights are bounded [S]; None: all.
    """

    rule: Weight
    ratios: Ratios
    calm: bool = False
    view: Selection | None = None
    runs: Segments | None = None
    bounded_at: Bools | None = None

    @property
    def per_token(self) -> bool:
        """Whether there is one weight per token, not per sequence."""
        return self.rule.per_token

    @property
    def are_ratios(self) -> bool:
        """Whether they are, before their bound, the token ratios that `ratios` has sums of."""
        return self.rule.level == "token" and self.rule.is_usual

    @cached_property
    def log_ratio(self) -> Float64s:
        """The log ratio at the rule's level, not clamped."""
        rule, ratios = self.rule, self.ratios
        if rule.level == "token":
            return ratios.log_ratio
        if self.runs is not None:
            view = Selection.everything(self.runs) if self.view is None else self.view.over(self.runs)
            return self.runs.spread(view.sum_log_ratio(ratios.log_ratio) / np.maximum(view.counts, 1))
        view = self.view or Selection.everything(ratios.segments)
        total = ratios.log_ratio_sum if self.view is None else view.sum_log_ratio(ratios.log_ratio)
        return total / (np.maximum(view.counts, 1) if rule.level == "geometric" else 1)

    @cached_property
    def _limit(self) -> float:
        return self.rule.limit if self.rule.clamp == "aggregate" else np.inf

    @cached_property
    def raw_excess(self) -> Float64s:
        """The weights before their bound, minus 1: near 1, what they exceed it by keeps the digits of their spread."""
        if self.are_ratios:
            return self.ratios.excess
        if self._limit == LOG_RATIO_BOUND:
            return self._sanitized(bounded_excess(self.log_ratio), 1.0)
        with np.errstate(over="ignore"):
            return self._sanitized(np.expm1(np.clip(self.log_ratio, -self._limit, self._limit)), 1.0)

    @cached_property
    def raw(self) -> Float64s:
        """The weights before their bound."""
        with np.errstate(over="ignore"):
            return self._sanitized(np.exp(np.clip(self.log_ratio, -self._limit, self._limit)), 0.0)

    @cached_property
    def low(self) -> Bools:
        """Which weights lie below the lower bound, or the one that is watched in its stead."""
        return self.raw_excess + 1.0 < (self.rule.watch_low or self.rule.bounds[0])

    @cached_property
    def high(self) -> Bools:
        """Which weights lie above the upper bound."""
        return self.raw_excess + 1.0 > self.rule.bounds[1]

    @cached_property
    def excess(self) -> Float64s:
        """The bounded weights minus 1."""
        return self._bound(self.raw_excess, 1.0)

    @cached_property
    def bounded(self) -> Float64s:
        """The bounded weights."""
        return self._bound(self.raw, 0.0)

    def _bound(self, values: Float64s, origin: float) -> Float64s:
        """Bound weights that are counted from `origin`."""
        if self.rule.zero is not None:
            bounded: Float64s = np.where(self.low | self.high, -origin, values)
        else:
            lower, upper = self.rule.bounds
            bounded = np.clip(values, lower - origin, upper - origin)
        if self.bounded_at is None:
            return bounded
        where = self.ratios.segments.spread(self.bounded_at) if self.per_token else self.bounded_at
        return np.where(where, bounded, values)

    def _sanitized(self, values: Float64s, origin: float) -> Float64s:
        """Weights counted from `origin`, NaN and infinity made 0 where the rule says so."""
        return np.where(np.isfinite(values), values, -origin) if self.rule.nonfinite == "zero" else values

    def total(self, values: NDArray[Any], over: Selection) -> Float64s:
        """Sum over the selected tokens of each sequence of `values`, shaped like the weights, [S]."""
        if self.per_token:
            return over.sum(values)
        return np.where(over.counts > 0, values, 0.0) * over.counts


def divisor(mean: Float64s) -> Float64s:
    """What normalization divides weights by: their mean; 1 where that is so small that trainers leave them."""
    return np.where(mean > _SMALLEST_MEAN, mean, 1.0)
