"""A long row of upper bounds of token weights: a token is left as it is from one bound on, and is that bound before.

The sum of what bounded weights make at a bound b is P(b) + f(b) C(b): P is the sum over tokens that b leaves as they
are, C that over the others, with f what they become. Each token is written to both once; running sums follow, upward
for P and downward for C, so that nothing is subtracted. The square of a sequence's weight alone is worked out at every
bound. What does not depend on the bound is what `analyze` makes of any of the points.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from mismatchctl.batch import Bools, Float64s, TokenBatch
from mismatchctl.correction.apply import Weights
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.grid.events import EventColumns, left_by, sequences_of, summed_apart
from mismatchctl.measure.grid.family import Family, WeightLadder
from mismatchctl.measure.grid.parts import Parts
from mismatchctl.measure.grid.thresholds import token_weights
from mismatchctl.ratios import Ratios


def truncated_columns(
    family: Family, ladder: WeightLadder, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: Parts
) -> EventColumns:
    """The columns of a block of a family whose points are upper bounds of token weights."""
    correction, segments = family.correction, batch.segments
    rule = correction.weight
    assert rule is not None
    columns, maxima = correction_columns(family.loosest, ratios, ratios["train/rollout"].k3_sum, batch)
    made = EventColumns(family, parts, ladder.rungs)
    n, every = np.maximum(segments.sizes, 1.0), np.arange(len(batch))

    weights = Weights(rule, ratios[rule.source])
    excess, ratio, weight = weights.raw_excess, weights.raw_excess + 1.0, token_weights(weights)
    below = ratio < ladder.low
    if below.any():
        lowest = 0.0 if ladder.zeroes else ladder.low
        excess, weight = np.where(below, lowest - 1.0, excess), np.where(below, lowest, weight)
    moving = np.flatnonzero(ratio >= ladder.edges[0])
    of_token = sequences_of(moving, batch)
    sequence = np.concatenate([every, of_token])
    rung = np.concatenate([np.zeros_like(every), np.searchsorted(ladder.edges, ratio[moving], side="right")])

    def written(values: Float64s, kept: Bools | None) -> Float64s:
        """Values of tokens where they are written: those that every bound leaves as they are, and each of the rest."""
        return summed_apart(values, kept, moving, segments)

    def outside(kept: Bools | None) -> Float64s:
        return np.concatenate([np.zeros(len(batch)), np.ones(len(moving)) if kept is None else kept[moving] * 1.0])

    kept = left_by(correction.gates, ratios, batch).expanded() if correction.gates else None
    bound = ladder.high
    share, all_of = (1 / n)[sequence], outside(None)
    left = all_of if kept is None else outside(kept)
    share_outside = all_of * share
    made.sequence, made.rung = sequence, rung
    of_all, of_left = written(excess, None), written(weight, kept)
    made.bounded = {
        "weight_excess": (of_all, all_of, bound - 1.0),
        "squared_weight_excess": (written(excess * excess, None), all_of, (bound - 1.0) ** 2),
        "mean_excess": (of_all * share, share_outside, bound - 1.0),
        "kept_excess": (of_all if kept is None else written(excess, kept), left, bound - 1.0),
        "squared_kept_weight": (written(weight * weight, kept), left, bound**2),
        "sequence_weight": (of_left * share, share_outside if kept is None else left * share, bound),
    }
    made.leaving["weight_high"] = sequence, rung, all_of
    of_sequences = made.of_sequences((of_left, left, bound))
    of_sequences /= n[:, None]
    of_sequences *= of_sequences
    made.fixed["squared_sequence_weight"] = made.along(of_sequences)
    of_weights = family.bounds.maxima(weights, segments, parts)
    made.maxima = {name: each.reshape(parts.count, -1, *family.grid[1:]) for name, each in of_weights.items()}
    made.take_rest(columns, maxima)
    return made
