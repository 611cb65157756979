"""The pure application of a Correction to a block of tokens: weights and what is kept, nothing summed yet.

Decisions made per sequence stay per sequence (no token is touched again for a sequence-level, geometric,
min or max rule); only token-level rules make token arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.correction.model import Correction, Gate, Weight
from mismatchctl.ratios import LOG_RATIO_BOUND, STATISTICS, SUMS, Ratios, bounded_excess


@dataclass(frozen=True)
class Selection:
    """Selected tokens: those of the selected `sequences` [S] that are in `tokens` [T] (None: all of them)."""

    segments: Segments
    sequences: Bools
    tokens: Bools | None = None

    @classmethod
    def everything(cls, segments: Segments) -> Selection:
        """All tokens of all sequences."""
        return cls(segments, np.ones(len(segments), np.bool_))

    @cached_property
    def counts(self) -> Float64s:
        """Selected tokens of each sequence, [S]."""
        within = self.segments.lengths.astype(np.float64) if self.tokens is None else self.segments.sum(self.tokens)
        return within * self.sequences

    def sum(self, values: NDArray[Any]) -> Float64s:
        """Sum of per-token `values` [T] over the selected tokens of each sequence, [S]."""
        masked = values if self.tokens is None else np.where(self.tokens, values, 0.0)
        return np.where(self.sequences, self.segments.sum(masked), 0.0)

    def expanded(self) -> Bools:
        """One flag per token, [T]."""
        spread = self.segments.spread(self.sequences)
        return spread if self.tokens is None else spread & self.tokens

    def without(self, rejected: Selection) -> Selection:
        """What is left when `rejected` is taken out."""
        if rejected.tokens is None:
            return Selection(self.segments, self.sequences & ~rejected.sequences, self.tokens)
        left = ~rejected.expanded()
        return Selection(self.segments, self.sequences, left if self.tokens is None else self.tokens & left)


@dataclass(frozen=True)
class Weights:
    """Importance weights per token [T] or per sequence [S], before normalization.

    Attributes:
        rule: what made them.
        ratios: what they were made from.
        calm: whether it is known that no weight per token lies beyond a bound.
    """

    rule: Weight
    ratios: Ratios
    calm: bool = False

    @property
    def per_token(self) -> bool:
        """Whether there is one weight per token, not per sequence."""
        return self.rule.level == "token"

    @cached_property
    def log_ratio(self) -> Float64s:
        """The log ratio at the rule's level, not clamped."""
        if self.per_token:
            return self.ratios.log_ratio
        lengths = self.ratios.segments.lengths if self.rule.level == "geometric" else 1
        return self.ratios.log_ratio_sum / np.maximum(lengths, 1)

    @cached_property
    def raw_excess(self) -> Float64s:
        """The weights before their bound, minus 1: near 1, what they exceed it by keeps the digits of their spread."""
        return self.ratios.excess if self.per_token else bounded_excess(self.log_ratio)

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
        return self._bound(np.exp(np.clip(self.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)), 0.0)

    def _bound(self, values: Float64s, origin: float) -> Float64s:
        """Bound weights that are counted from `origin`."""
        if self.rule.zero is not None:
            return np.where(self.low | self.high, -origin, values)
        lower, upper = self.rule.bounds
        return np.clip(values, lower - origin, upper - origin)

    def total(self, values: NDArray[Any], over: Selection) -> Float64s:
        """Sum over the selected tokens of each sequence of `values`, shaped like the weights, [S]."""
        if self.per_token:
            return over.sum(values)
        return np.where(over.counts > 0, values, 0.0) * over.counts


@dataclass(frozen=True)
class GateOutcome:
    """What one gate rejects for being too low and too high."""

    gate: Gate
    low: Selection
    high: Selection


@dataclass(frozen=True)
class Applied:
    """A Correction applied to a block: weights, each gate's verdict, and what remains.

    Attributes:
        weights: None when the correction has no weight rule (every weight is 1).
        gates: one outcome per gate, in order.
        kept: tokens that contribute to the loss.
        counted: tokens that stay in the loss's denominator: `kept` plus what gates of effect `zero` rejected.
    """

    weights: Weights | None
    gates: tuple[GateOutcome, ...]
    kept: Selection
    counted: Selection

    def token_weights(self) -> Float64s:
        """Bounded weight of every token [T], before normalization; rejected tokens keep theirs."""
        if self.weights is None:
            return self.kept.segments.spread(np.ones(len(self.kept.segments)))
        bounded = self.weights.bounded
        return bounded if self.weights.per_token else self.kept.segments.spread(bounded)


def apply(correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch, *, calm: bool = False) -> Applied:
    """Apply `correction` to a block.

    Args:
        correction: the rules.
        ratios: one `Ratios` per source that the correction names (`train/rollout`, ...).
        batch: the block; gives positions (segments) and advantages (advantage-dependent gates).
        calm: take it that no token lies beyond a bound of a rule on tokens: then none is looked at.

    Raises:
        KeyError: a source of the correction is missing from `ratios`.
    """
    everything = Selection.everything(batch.segments)
    nothing = Selection(batch.segments, np.zeros(len(batch), np.bool_))
    rule = correction.weight
    weights = None if rule is None else Weights(rule, ratios[rule.source], calm)
    kept = counted = everything
    outcomes = []
    for gate in correction.gates:
        if calm and gate.level == "token":
            outcome = GateOutcome(gate, nothing, nothing)
        else:
            outcome = judge(gate, ratios[gate.source], batch, kept if gate.sees == "remaining" else everything)
        outcomes.append(outcome)
        kept = kept.without(outcome.low).without(outcome.high)
        if gate.effect == "mask":
            counted = counted.without(outcome.low).without(outcome.high)
    return Applied(weights, tuple(outcomes), kept, counted)


def judge(gate: Gate, ratios: Ratios, batch: TokenBatch, seen: Selection) -> GateOutcome:
    """What `gate` rejects, aggregating over the tokens it has `seen`; empty sequences are never rejected."""
    segments = _adjacent_runs(batch) if gate.over == "segment" else batch.segments
    view = seen if gate.over == "sequence" else Selection(segments, np.ones(len(segments), np.bool_), seen.expanded())
    measured = measure(gate, ratios, view)
    lower, upper = gate_bounds(gate)
    low = measured < lower if gate.inclusive[0] else measured <= lower
    high = measured > upper if gate.inclusive[1] else measured >= upper
    return GateOutcome(gate, *(_rejected(gate, flags, segments, view, batch) for flags in (low, high)))


def measure(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    """The statistic that a gate compares: of each token [T] at token level, else of each of the view's segments."""
    if gate.clamp == "token":
        ratios = _clamped(ratios)
    measured = _aggregate(gate, ratios, view)
    bounded = gate.statistic == "ratio" and gate.clamp == "aggregate"
    return np.clip(measured, -LOG_RATIO_BOUND, LOG_RATIO_BOUND) if bounded else measured


def _aggregate(gate: Gate, ratios: Ratios, view: Selection) -> Float64s:
    """Aggregate over the view: `token` leaves values as they are, the rest give one value per segment."""
    segments, level = view.segments, gate.level
    whole = view.tokens is None and segments is ratios.segments  # then what is at hand will do
    if whole and gate.statistic == "ratio" and level in ("min", "max"):
        return ratios.lowest if level == "min" else ratios.highest
    if whole and level not in ("token", "min", "max") and gate.statistic in SUMS:
        total = SUMS[gate.statistic](ratios)
    else:
        values = ratios.log_ratio if gate.statistic == "ratio" else STATISTICS[gate.statistic](ratios)
        if level == "token":
            return values
        if level in ("min", "max"):
            reduce, neutral = (segments.min, np.inf) if level == "min" else (segments.max, -np.inf)
            return reduce(values if view.tokens is None else np.where(view.tokens, values, neutral))
        total = view.sum(values)
    return total / np.maximum(view.counts, 1) if level in ("mean", "geometric") else total


_NEAR = 1e-9
"""Log ratios that are nearer to a bound than this count as beyond it, until the rule itself has looked."""


def reaching(correction: Correction, ratios: Mapping[str, Ratios]) -> Bools:
    """Sequences [S] that may hold a token beyond a bound of a rule on tokens; all, where extremes can't tell."""
    segments = next(iter(ratios.values())).segments
    found = np.zeros(len(segments), np.bool_)
    rule = correction.weight
    if rule is not None and rule.level == "token":
        found |= _beyond(ratios[rule.source], rule.watch_low or rule.bounds[0], rule.bounds[1])
    for gate in correction.gates:
        if gate.level == "token" and gate.statistic == "ratio":
            low, high = gate.keep
            found |= _beyond(ratios[gate.source], low or 0.0, math.inf if high is None else high)
        elif gate.level == "token" or gate.over == "segment" or gate.when != "always":
            found |= True
    return found


def _beyond(ratios: Ratios, low: float, high: float) -> Bools:
    """Sequences [S] of which an extreme reaches the interval's ends, which are ratios."""
    lower, upper = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    if not (lower <= LOG_RATIO_BOUND and upper >= -LOG_RATIO_BOUND):  # NaN, or clamped ratios never lie within
        return np.ones(len(ratios.segments), np.bool_)
    reached: Bools = (ratios.lowest <= lower + _NEAR) | (ratios.highest >= upper - _NEAR)
    return reached & ratios.segments.nonempty


def gate_bounds(gate: Gate) -> tuple[float, float]:
    """The interval in the space where the statistic is compared: the log of it for ratios."""
    low, high = (
        (-math.inf if gate.keep[0] is None else gate.keep[0]),
        (math.inf if gate.keep[1] is None else gate.keep[1]),
    )
    if math.isnan(low) or math.isnan(high):  # some frameworks accept it: nothing lies within
        return math.inf, -math.inf
    if gate.statistic == "ratio":
        low, high = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    return low, high


def _rejected(gate: Gate, flags: Bools, segments: Segments, view: Selection, batch: TokenBatch) -> Selection:
    """The tokens that `flags` (per token, or per segment) reject, as a selection over the batch's sequences."""
    if gate.level == "token":
        tokens = flags & view.expanded() if gate.sees == "remaining" else flags
    elif gate.over == "segment":
        tokens = segments.spread(flags & (view.counts > 0))
    else:
        flags = flags & (view.counts > 0)
        if gate.when == "always":
            return Selection(batch.segments, flags)
        tokens = batch.segments.spread(flags)
    if gate.when != "always":
        if batch.advantages is None:
            raise KeyError("advantages")
        tokens = tokens & (batch.advantages > 0 if gate.when == "positive_advantage" else batch.advantages < 0)
    return Selection(batch.segments, batch.segments.sum(tokens) > 0, tokens)


def _clamped(ratios: Ratios) -> Ratios:
    if np.abs(ratios.extent).max() <= LOG_RATIO_BOUND:
        return ratios
    clamped = Ratios(ratios.policy, ratios.reference, ratios.segments)
    clamped.log_ratio = np.clip(ratios.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clamped


def _adjacent_runs(batch: TokenBatch) -> Segments:
    """Each run of adjacent valid tokens as a segment of its own."""
    gaps = np.flatnonzero(np.diff(batch.positions) != 1) + 1
    return replace(batch.segments, offsets=np.union1d(gaps, batch.segments.offsets))
