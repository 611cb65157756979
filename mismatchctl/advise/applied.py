"""A correction on a sample: final weights, what is kept, and what that costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mismatchctl.advise.sample import RunSample
from mismatchctl.analyze.trims import trimmed
from mismatchctl.batch import Float64s
from mismatchctl.correction import Correction, divisor
from mismatchctl.correction.apply import apply
from mismatchctl.measure.table import hash_values, mix
from mismatchctl.ratios import ratios_of


@dataclass(frozen=True)
class CorrectedSample:
    """A correction on a sample.

    Attributes:
        weights: final ones [T]; 0 where the token is rejected.
        kept: tokens of each sequence that contribute to the loss [S].
        counted: those that stay in its denominator [S].
    """

    weights: Float64s
    kept: Float64s
    counted: Float64s


@dataclass(frozen=True)
class Candidate:
    """A correction with what it costs on a sample: shares, and the tokens that it keeps of each sequence [S]."""

    correction: Correction
    rejected_tokens: float
    rejected_sequences: float
    ess: float
    kept: Float64s


def correct(correction: Correction, sample: RunSample) -> CorrectedSample:
    """Apply a correction as the trainer would: weights bounded and normalized, gates in order."""
    batch, sequences = trimmed(sample.batch, [correction]), len(sample)
    found = CorrectedSample(np.empty(batch.tokens), np.empty(sequences), np.empty(sequences))
    of_all = np.empty(sequences)  # sum of the weights of each sequence, those too that are rejected
    for start, block in batch.blocks():
        own = apply(correction, ratios_of(block, correction.sources), block)
        weights, rows = own.token_weights(), slice(start, start + len(block))
        first = batch.segments.offsets[start]
        of_all[rows] = block.segments.sum(weights)
        found.weights[first : first + block.tokens] = np.where(own.kept.expanded(), weights, 0.0)
        found.kept[rows], found.counted[rows] = own.kept.counts, own.counted.counts
    means = _means(correction, of_all, sample)
    return (
        found
        if means is None
        else CorrectedSample(found.weights / batch.segments.spread(means), found.kept, found.counted)
    )


def candidate(correction: Correction, sample: RunSample) -> tuple[Candidate, CorrectedSample]:
    """A correction with its costs, and its weights."""
    applied = correct(correction, sample)
    filled, tokens = sample.batch.segments.nonempty, sample.batch.tokens
    gone = float(((applied.kept == 0) & filled).sum() / max(int(filled.sum()), 1))
    ess = ess_of(float(applied.weights.sum()), float(applied.weights @ applied.weights), tokens)
    return Candidate(correction, 1 - float(applied.kept.sum()) / tokens, gone, ess, applied.kept), applied


def ess_of(total: float, squares: float, tokens: float) -> float:
    """Effective sample size as a share of the tokens, from the sums of their weights and of the squares."""
    return total**2 / squares / tokens if squares > 0 and math.isfinite(squares) else 0.0


def _means(correction: Correction, sums: Float64s, sample: RunSample) -> Float64s | None:
    """What the weights of each sequence are divided by [S]: their mean over the step, or the micro-batch."""
    rule, segments = correction.weight, sample.batch.segments
    if rule is None or rule.normalize == "none":
        return None
    scope, given = sample.step, sample.batch.columns.get("micro_batch")
    if rule.normalize_over == "micro_batch" and given is not None:
        _, scope = np.unique(mix(hash_values(given), hash_values(sample.step)), return_inverse=True)
    by_token = rule.normalize == "token"
    own, count = (sums, segments.lengths) if by_token else (sums / np.maximum(segments.lengths, 1), segments.nonempty)
    return divisor(np.bincount(scope, own) / np.maximum(np.bincount(scope, count), 1))[scope]
