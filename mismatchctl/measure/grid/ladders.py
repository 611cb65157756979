"""A long row of bounds of one rule: rungs, each of which lets in all that the one before it does.

Bounds of a gate, or upper bounds of token weights. A token is written once, where it enters, and running sums along the
rungs follow: upward over what is in, downward over what is not, so that nothing is subtracted. What does not depend on
the rung is what `analyze` makes of any of the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Ints, Segments, TokenBatch
from mismatchctl.correction import Correction, Gate, Selection
from mismatchctl.correction.apply import Weights, measure
from mismatchctl.correction.gates import judge
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.facts import kept_k3
from mismatchctl.measure.grid.family import Family, Ladder, WeightLadder
from mismatchctl.measure.grid.parts import Arrays, BlockParts, as_slice
from mismatchctl.measure.grid.thresholds import bounded_weights, token_weights
from mismatchctl.measure.kernels.kernel import CLIMBED, CLIMBED_BY_ALL, TRUNCATED, Kernel
from mismatchctl.ratios import Ratios


@dataclass
class LadderColumns:
    """Columns of one block along a ladder.

    Attributes:
        parts: the micro-batches of its cells.
        clusters: within those.
        fixed: columns that do not depend on the rung [S, 1, ...].
        moved: those that do, summed over each cluster [clusters, ...].
        summed: those that clusters are not told of, summed over each part [parts, ...].
        maxima: the largest of each part [parts, ...].
    """

    parts: BlockParts
    clusters: BlockParts
    fixed: Arrays
    moved: Arrays
    summed: Arrays
    maxima: Arrays

    def totals(self) -> Arrays:
        """As of BlockColumns."""
        within = BlockParts(self.parts.of[self.clusters.order[self.clusters.firsts]], self.parts.count)
        sums = {name: self.parts.sum(values) for name, values in self.fixed.items()}
        return sums | self.summed | {name: within.sum(values) for name, values in self.moved.items()}

    def by(self, names: Iterable[str], parts: BlockParts) -> Arrays:
        """As of BlockColumns; the parts are its clusters."""
        known = self.summed | self.moved
        return {name: known[name] if name in known else parts.sum(self.fixed[name]) for name in names}


def ladder_columns(
    family: Family,
    ladder: Ladder | WeightLadder,
    ratios: Mapping[str, Ratios],
    batch: TokenBatch,
    parts: BlockParts,
    clusters: BlockParts,
    kernel: Kernel,
) -> LadderColumns:
    """The columns of a block of a family whose points are rungs of a ladder."""
    columns, maxima = correction_columns(family.loosest, ratios, ratios["train/rollout"].k3_sum, batch)
    largest, rule = {name: parts.largest(values) for name, values in maxima.items()}, family.correction.weight
    weights = None if rule is None else Weights(rule, ratios[rule.source])
    summed: Arrays = {}
    if isinstance(ladder, WeightLadder):
        assert weights is not None
        gates = family.correction.gates
        kept = _left_by(gates, ratios, batch).expanded() if gates else None
        moved = truncated(weights, ladder, kept, batch.segments, clusters, kernel)
        largest |= family.bounds.maxima(weights, batch.segments, parts)
    else:
        moved, summed = _climbed(family.correction, weights, ladder, ratios, batch, parts, clusters, kernel)

    longest = family.longest
    shape = [-1 if axis == longest else 1 for axis in range(len(family.grid))]

    def wide(values: NDArray[Any], places: Ints | slice = slice(None)) -> NDArray[Any]:
        """Values [R] or [R, V] along the grid [R, ...]."""
        return values.reshape(len(values), -1)[:, places].reshape(len(values), *shape)

    places = as_slice(ladder.places)
    return LadderColumns(
        parts,
        clusters,
        {name: wide(values) for name, values in columns.items() if name not in moved and name not in summed},
        {name: wide(values, places) for name, values in moved.items()},
        {name: wide(values, places) for name, values in summed.items()},
        {name: wide(values) for name, values in largest.items()},
    )


def _left_by(gates: Iterable[Gate], ratios: Mapping[str, Ratios], batch: TokenBatch) -> Selection:
    """What is left by gates that each judge by themselves."""
    left = everything = Selection.everything(batch.segments)
    for gate in gates:
        outcome = judge(gate, ratios[gate.source], batch, everything)
        left = left.without(outcome.low).without(outcome.high)
    return left


def truncated(
    weights: Weights, ladder: WeightLadder, kept: Bools | None, segments: Segments, parts: BlockParts, kernel: Kernel
) -> Arrays:
    """What upper bounds of token weights move, by rung [parts, rungs], where gates leave `kept`; None: all."""
    within, floor = (parts.of, parts.count), (ladder.low, 0.0 if ladder.zeroes else ladder.low)
    given = weights.raw_excess, token_weights(weights)
    moved = kernel.truncate(given, kept, segments, within, ladder.edges, ladder.high, floor)
    return {name: moved[:, place] for place, name in enumerate(TRUNCATED)}


def _climbed(
    correction: Correction,
    weights: Weights | None,
    ladder: Ladder,
    ratios: Mapping[str, Ratios],
    batch: TokenBatch,
    parts: BlockParts,
    clusters: BlockParts,
    kernel: Kernel,
) -> tuple[Arrays, Arrays]:
    """What bounds of a gate move, by rung: of clusters [clusters, rungs], and of parts [parts, rungs]."""
    own, segments, mismatch = correction.gates[ladder.gate], batch.segments, ratios["train/rollout"]
    left = _left_by((gate for number, gate in enumerate(correction.gates) if number != ladder.gate), ratios, batch)
    values = measure(own, ratios[own.source], Selection.everything(segments), batch)
    if own.level == "token":
        items, k3, kept = (
            segments,
            mismatch.k3,
            None if left.tokens is None and left.sequences.all() else left.expanded(),
        )
        excess = np.zeros_like(k3) if weights is None else _of_tokens(weights.excess, weights, segments)
        square = np.ones_like(k3) if weights is None else _of_tokens(bounded_weights(weights), weights, segments) ** 2
        count = None if kept is None else kept.astype(np.float64)
        if kept is not None:
            k3, excess, square = (np.where(kept, each, 0.0) for each in (k3, excess, square))
    else:
        items = Segments(np.arange(len(batch) + 1))
        excess = np.zeros(len(batch)) if weights is None else weights.total(weights.excess, left)
        count, k3 = left.counts, kept_k3(left, ratios, mismatch.k3_sum)
        square = count if weights is None else weights.total(bounded_weights(weights) ** 2, left)
    outcomes = {name: each for name, (_, each) in batch.outcomes.items()}
    outcomes |= {f"{name}_known": known for name, (known, _) in batch.outcomes.items()}
    gains = np.stack([each / segments.sizes for each in outcomes.values()], axis=1)
    within, of = (clusters.of, clusters.count), (parts.of, parts.count)
    rows, sums = kernel.climb(
        values, (count, k3, excess, square), items, segments.sizes, gains, within, of, ladder.rungs
    )
    moved = dict(zip(CLIMBED, rows, strict=True))
    if own.effect == "mask":
        moved["counted"] = moved["kept"]
    by_all = [name if name in ("kept_k3", "emptied") else f"gate{ladder.gate}_{name}" for name in CLIMBED_BY_ALL]
    names = *by_all, *(f"{side}_{name}" for side in ("kept", "rejected") for name in outcomes)
    return moved, dict(zip(names, sums, strict=True))


def _of_tokens(values: Float64s, weights: Weights, segments: Segments) -> Float64s:
    """What is shaped like the weights, of each token [T]."""
    return values if weights.per_token else segments.spread(values)
