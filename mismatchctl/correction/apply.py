"""The pure application of a Correction to a block of tokens: weights and what is kept, nothing summed yet.

Decisions made per sequence stay per sequence (no token is touched again for a sequence-level, geometric,
min or max rule); only token-level rules make token arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Segments, TokenBatch
from mismatchctl.correction.model import Correction, Gate, Weight
from mismatchctl.ratios import LOG_RATIO_BOUND, STATISTICS, Ratios, bounded_excess


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

    def sum(self, values: Float64s) -> Float64s:
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
        log_ratio: the log ratio at the rule's level, not clamped.
        raw_excess: the weights before their bound, minus 1: weights lie near 1, and what they exceed it by
            keeps the digits of their spread.
    """

    rule: Weight
    log_ratio: Float64s
    raw_excess: Float64s

    @property
    def per_token(self) -> bool:
        """Whether there is one weight per token, not per sequence."""
        return self.rule.level == "token"

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
            return over.sum(np.asarray(values, np.float64))
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
            return np.ones(self.kept.segments.tokens)
        bounded = self.weights.bounded
        return bounded if self.weights.per_token else self.kept.segments.spread(bounded)


def apply(correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch) -> Applied:
    """Apply `correction` to a block.

    Args:
        correction: the rules.
        ratios: one `Ratios` per source that the correction names (`train/rollout`, ...).
        batch: the block; gives positions (segments) and advantages (advantage-dependent gates).

    Raises:
        KeyError: a source of the correction is missing from `ratios`.
    """
    everything = Selection.everything(batch.segments)
    weights = None if correction.weight is None else weigh(correction.weight, ratios[correction.weight.source])
    kept = counted = everything
    outcomes = []
    for gate in correction.gates:
        outcome = judge(gate, ratios[gate.source], batch, kept if gate.sees == "remaining" else everything)
        outcomes.append(outcome)
        kept = kept.without(outcome.low).without(outcome.high)
        if gate.effect == "mask":
            counted = counted.without(outcome.low).without(outcome.high)
    return Applied(weights, tuple(outcomes), kept, counted)


def weigh(rule: Weight, ratios: Ratios) -> Weights:
    """The weights of one block under a weight rule, before normalization."""
    if rule.level == "token":
        return Weights(rule, ratios.log_ratio, ratios.excess)
    log_ratio = _aggregate(rule.level, ratios.log_ratio, Selection.everything(ratios.segments))
    return Weights(rule, log_ratio, bounded_excess(log_ratio))


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
    if gate.statistic == "ratio":
        measured = _aggregate(gate.level, ratios.log_ratio, view)
        return np.clip(measured, -LOG_RATIO_BOUND, LOG_RATIO_BOUND) if gate.clamp == "aggregate" else measured
    return _aggregate(gate.level, STATISTICS[gate.statistic](ratios), view)


def _aggregate(level: str, values: Float64s, view: Selection) -> Float64s:
    """Aggregate per-token values over the view: `token` leaves them, the rest give one value per segment."""
    if level == "token":
        return values
    segments = view.segments
    if level in ("min", "max"):
        reduce, neutral = (segments.min, np.inf) if level == "min" else (segments.max, -np.inf)
        return reduce(values if view.tokens is None else np.where(view.tokens, values, neutral))
    total = view.sum(values)
    return total / np.maximum(view.counts, 1) if level in ("mean", "geometric") else total


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
    clamped = Ratios(ratios.policy, ratios.reference, ratios.segments)
    clamped.log_ratio = np.clip(ratios.log_ratio, -LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return clamped


def _adjacent_runs(batch: TokenBatch) -> Segments:
    """Each run of adjacent valid tokens as a segment of its own."""
    starts = np.ones(batch.tokens, np.bool_)
    starts[1:] = np.diff(batch.positions) != 1
    starts[batch.segments.offsets[:-1][batch.segments.nonempty]] = True
    return Segments(np.append(np.flatnonzero(starts), batch.tokens))
