"""The pure application of a Correction to a block of tokens: weights and what is kept, nothing summed yet.

Decisions made per sequence stay per sequence (no token is touched again for a sequence-level, geometric,
min or max rule); only token-level rules make token arrays.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import Bools, Float64s, TokenBatch
from mismatchctl.correction.gates import (
    GateOutcome,
    adjacent_runs,
    agreeing,
    clamped,
    gate_bounds,
    judge,
    measure,
)
from mismatchctl.correction.model import Correction, Weight
from mismatchctl.correction.selection import Selection
from mismatchctl.correction.weights import Weights
from mismatchctl.ratios import LOG_RATIO_BOUND, Ratios

__all__ = ["CorrectedBlock", "Selection", "Weights", "apply", "gate_bounds", "measure", "reaching"]


@dataclass(frozen=True)
class CorrectedBlock:
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


def apply(
    correction: Correction, ratios: Mapping[str, Ratios], batch: TokenBatch, *, calm: bool = False
) -> CorrectedBlock:
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
    kept = counted = everything
    outcomes = []
    for gate in correction.gates:
        if calm and gate.per_token:
            outcome = GateOutcome(gate, nothing, nothing)
        else:
            outcome = judge(gate, ratios[gate.source], batch, kept if gate.sees == "remaining" else everything)
        outcomes.append(outcome)
        kept = kept.without(outcome.low).without(outcome.high)
        if gate.effect == "mask":
            counted = counted.without(outcome.low).without(outcome.high)
    rule = correction.weight
    weights = None if rule is None else _weigh(rule, ratios, batch, kept, calm)
    return CorrectedBlock(weights, tuple(outcomes), kept, counted)


def _weigh(rule: Weight, ratios: Mapping[str, Ratios], batch: TokenBatch, kept: Selection, calm: bool) -> Weights:
    """The weights of a block of which the gates left `kept`."""
    own = ratios[rule.source]
    if rule.is_usual:
        return Weights(rule, own, calm)
    if rule.nonfinite == "one":
        own = agreeing(own)
    own = clamped(own, rule.clamp, rule.limit)
    where = None
    if rule.bound_where is not None:
        seen = kept if rule.bound_where.sees == "remaining" else Selection.everything(batch.segments)
        found = judge(rule.bound_where, ratios[rule.bound_where.source], batch, seen)
        where = found.low.sequences | found.high.sequences
    runs = adjacent_runs(batch) if rule.over == "segment" else None
    return Weights(rule, own, calm, kept if rule.sees == "remaining" else None, runs, where)


_NEAR = 1e-9
"""Log ratios that are nearer to a bound than this count as beyond it, until the rule itself has looked."""


def reaching(correction: Correction, ratios: Mapping[str, Ratios]) -> Bools:
    """Sequences [S] that may hold a token beyond a bound of a rule on tokens; all, where extremes can't tell."""
    segments = next(iter(ratios.values())).segments
    found = np.zeros(len(segments), np.bool_)
    rule = correction.weight
    if rule is not None and rule.per_token and not rule.is_usual:
        found |= True
    elif rule is not None and rule.level == "token":
        found |= _beyond(ratios[rule.source], rule.watch_low or rule.bounds[0], rule.bounds[1])
    for gate in correction.gates:
        if gate.level == "token" and gate.statistic == "ratio" and gate.is_usual:
            low, high = gate.keep
            found |= _beyond(ratios[gate.source], low or 0.0, math.inf if high is None else high)
        elif gate.level == "token" or gate.over != "sequence" or gate.when != "always":
            found |= True
    return found


def _beyond(ratios: Ratios, low: float, high: float) -> Bools:
    """Sequences [S] of which an extreme reaches the interval's ends, which are ratios."""
    lower, upper = (math.log(bound) if bound > 0 else -math.inf for bound in (low, high))
    if not (lower <= LOG_RATIO_BOUND and upper >= -LOG_RATIO_BOUND):  # NaN, or clamped ratios never lie within
        return np.ones(len(ratios.segments), np.bool_)
    reached: Bools = (ratios.lowest <= lower + _NEAR) | (ratios.highest >= upper - _NEAR)
    return reached & ratios.segments.nonempty
