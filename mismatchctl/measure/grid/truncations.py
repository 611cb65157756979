"""A long row of upper bounds of token weights: a token is left as it is from one bound on, and is that bound before.

The kernel sums what the bounds move over the finest parts, clusters; what does not depend on them is what `analyze`
makes of any of the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from mismatchctl.batch import TokenBatch
from mismatchctl.correction.apply import Weights
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.grid.events import left_by
from mismatchctl.measure.grid.family import Family, WeightLadder
from mismatchctl.measure.grid.parts import Arrays, Parts
from mismatchctl.measure.grid.thresholds import as_slice, token_weights
from mismatchctl.measure.kernels.kernel import TRUNCATED, Truncate
from mismatchctl.ratios import Ratios


@dataclass
class TruncatedColumns:
    """Columns of one block.

    Attributes:
        parts: the micro-batches of its cells.
        clusters: within those.
        fixed: columns that do not depend on the bound [S, 1, ...].
        moved: those that do, summed over each cluster [clusters, bounds, 1, ...].
        maxima: the largest of each part [parts, ...].
    """

    parts: Parts
    clusters: Parts
    fixed: Arrays
    moved: Arrays
    maxima: Arrays

    def totals(self) -> Arrays:
        """As of BlockColumns."""
        within = Parts(self.parts.of[self.clusters.order[self.clusters.firsts]], self.parts.count)
        sums = {name: self.parts.sum(values) for name, values in self.fixed.items()}
        return sums | {name: within.sum(values) for name, values in self.moved.items()}

    def by(self, names: Iterable[str], parts: Parts) -> Arrays:
        """As of BlockColumns; the parts are its clusters."""
        return {name: self.moved[name] if name in self.moved else parts.sum(self.fixed[name]) for name in names}


def truncated_columns(
    family: Family,
    ladder: WeightLadder,
    ratios: Mapping[str, Ratios],
    batch: TokenBatch,
    parts: Parts,
    clusters: Parts,
    truncate: Truncate,
) -> TruncatedColumns:
    """The columns of a block of a family whose points are upper bounds of token weights."""
    correction, segments = family.correction, batch.segments
    rule, trivial = correction.weight, (1,) * (len(family.grid) - 1)
    assert rule is not None
    weights = Weights(rule, ratios[rule.source])
    excess, weight = weights.raw_excess, token_weights(weights)
    if ladder.low > 0:
        below = excess + 1.0 < ladder.low
        lowest = 0.0 if ladder.zeroes else ladder.low
        excess, weight = np.where(below, lowest - 1.0, excess), np.where(below, lowest, weight)
    kept = left_by(correction.gates, ratios, batch).expanded() if correction.gates else None
    within = clusters.of, clusters.count
    moved = truncate((excess, weight), kept, segments, within, ladder.edges, ladder.high)[..., as_slice(ladder.rungs)]
    columns, maxima = correction_columns(family.loosest, ratios, ratios["train/rollout"].k3_sum, batch)
    largest = {name: parts.largest(values).reshape(-1, 1) for name, values in maxima.items()}
    largest |= family.bounds.maxima(weights, segments, parts)
    return TruncatedColumns(
        parts,
        clusters,
        {name: each.reshape(-1, 1, *trivial) for name, each in columns.items() if name not in TRUNCATED},
        {name: moved[:, place].reshape(clusters.count, -1, *trivial) for place, name in enumerate(TRUNCATED)},
        {name: values.reshape(parts.count, -1, *trivial) for name, values in largest.items()},
    )
