"""A long row of bounds of one gate: a sequence changes only where some of its tokens enter what is kept.

The variants of the gate are put in an order in which each keeps all that the one before it kept: rungs of a ladder.
Each token enters at one of them; what it brings is written there once, and running sums along the rungs follow: upward
over what is kept, downward over what is rejected, so that nothing is subtracted. What does not depend on the rung is
what `analyze` makes of any of the points.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.correction import Selection
from mismatchctl.correction.apply import Weights, measure
from mismatchctl.correction.gates import judge
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.grid.family import Family, Ladder
from mismatchctl.ratios import Ratios

Arrays = dict[str, NDArray[Any]]


@dataclass
class EventColumns:
    """Columns of one block along a ladder.

    Attributes:
        family: whose points these are.
        rungs: how many there are.
        fixed: columns that do not depend on the rung [S, 1, ...].
        summed: the others, summed over the sequences [rungs].
        maxima: the largest over the block [1, ...].
        first, sequence, rung: where what enters begins in each sequence; its sequence and rung [P].
        entering: columns that are kept by cluster too, as what enters adds to them [P].
        last: the rung from which on all of a sequence is kept [S].
    """

    family: Family
    rungs: int
    fixed: Arrays = field(default_factory=dict)
    summed: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)
    sequence: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rung: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    entering: Arrays = field(default_factory=dict)
    last: Ints = field(default_factory=lambda: np.zeros(0, np.int64))

    def totals(self) -> Arrays:
        """As of BlockColumns."""
        made = {name: values.sum(axis=0) for name, values in self.fixed.items()}
        return made | {name: self._along(values[None])[0] for name, values in self.summed.items()}

    def by_cluster(self, name: str, order: Ints, firsts: Ints) -> NDArray[Any]:
        """As of BlockColumns."""
        number, cluster = len(firsts), np.empty(len(order), np.int64)
        cluster[order] = np.repeat(np.arange(number), np.diff(np.append(firsts, len(order))))
        if name in self.fixed:
            found = np.bincount(cluster, self.fixed[name].ravel(), number)
            return found.reshape(-1, *(1,) * len(self.family.grid))
        if name == "touched":
            some = self.fixed["tokens"].ravel() > 0
            where = cluster[some] * (self.rungs + 1) + self.last[some]
            return self._along(_after(np.bincount(where, minlength=number * (self.rungs + 1)).reshape(number, -1)))
        where = cluster[self.sequence] * self.rungs + self.rung
        made = np.bincount(where, self.entering[name], number * self.rungs)
        return self._along(np.cumsum(made.reshape(number, -1), axis=1))

    def _along(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values by rung [R, rungs] along the grid of the family [R, ...]."""
        ladder = self.family.ladder
        assert ladder is not None
        shape = [variants if axis == ladder.axis else 1 for axis, variants in enumerate(self.family.grid)]
        return values[:, ladder.rungs].astype(np.float64).reshape(len(values), *shape)


def _after(counts: NDArray[Any]) -> NDArray[Any]:
    """Sums of what lies behind each but the last entry along the last axis."""
    behind: NDArray[Any] = np.cumsum(counts[..., ::-1], axis=-1)[..., ::-1][..., 1:]
    return behind


def _running(values: Float64s, sequence: Ints) -> Float64s:
    """Sums of values [P] up to each, within its sequence; sequences lie together. Nothing of others is ever added."""
    sums, step = values, 1
    longest = int(np.bincount(sequence).max(initial=0))
    while step < longest:
        more = np.where(sequence[step:] == sequence[:-step], sums[:-step], 0.0)
        sums = np.concatenate([sums[:step], sums[step:] + more])
        step *= 2
    return sums


def event_columns(family: Family, ladder: Ladder, ratios: Mapping[str, Ratios], batch: TokenBatch) -> EventColumns:
    """The columns of a block of a family whose points are rungs of a ladder."""
    correction, segments, count = family.correction, batch.segments, ladder.count
    columns, maxima = correction_columns(correction, ratios, ratios["train/rollout"].k3_sum, batch)
    trivial = (1,) * len(family.grid)
    own, lengths = correction.gates[ladder.gate], segments.lengths
    n, everything = np.maximum(lengths, 1).astype(np.float64), Selection.everything(segments)
    left = everything
    for number, gate in enumerate(correction.gates):
        if number != ladder.gate:
            outcome = judge(gate, ratios[gate.source], batch, everything)
            left = left.without(outcome.low).without(outcome.high)

    # All tokens of a sequence lie in one bin where it is judged as a whole; else most do, and the others are looked up.
    values, bin_of = measure(own, ratios[own.source], everything, batch), ladder.thresholds.bin
    if own.level == "token":
        common, lowest, highest = ladder.thresholds.usual(values)
        searched = np.flatnonzero(~((values >= lowest) & (values < highest)))
        usual, bins = np.full(len(batch), common), bin_of(values[searched])
    else:
        searched, usual, bins = np.zeros(0, np.int64), bin_of(values), np.zeros(0, np.int64)
    of_token = np.searchsorted(segments.offsets, searched, side="right") - 1
    held = lengths - np.bincount(of_token, minlength=len(batch))  # tokens in the usual bin

    def latest(of_bin: Ints) -> Ints:
        """The last rung at which some token of each sequence enters [S], given those of bins."""
        found = np.where(held > 0, of_bin[usual], 0)
        np.maximum.at(found, of_token, of_bin[bins])
        return found

    made = EventColumns(family, count)
    for side, of_bin in (("low", ladder.low), ("high", ladder.high)):
        tokens = np.bincount(of_bin[bins], minlength=count + 1) + np.bincount(of_bin[usual], held, count + 1)
        sequences = np.bincount(latest(of_bin)[lengths > 0], minlength=count + 1)
        made.summed[f"gate{ladder.gate}_tokens_{side}"] = _after(tokens)
        made.summed[f"gate{ladder.gate}_sequences_{side}"] = _after(sequences)
    enters = np.maximum(ladder.low, ladder.high)
    made.last = last = np.where(left.counts == lengths, latest(enters), count)

    # What enters, by sequence and rung.
    kept = left.expanded()
    rule = correction.weight
    weights = None if rule is None else Weights(rule, ratios[rule.source])
    parts: dict[str, NDArray[Any]] = {"kept": kept.astype(np.float64)}
    parts["kept_k3"] = np.where(kept, ratios["train/rollout"].k3, 0.0)
    if weights is not None:
        for name, each in (("kept_excess", weights.excess), ("squared_kept_weight", weights.bounded**2)):
            parts[name] = np.where(kept, each if weights.per_token else segments.spread(each), 0.0)
    keys = np.concatenate([of_token * (count + 1) + enters[bins], np.arange(len(batch)) * (count + 1) + enters[usual]])
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)) if len(keys) else np.zeros(0, np.int64)
    sequence, rung = np.divmod(keys[order][starts], count + 1)
    sums = {}
    for name, each in parts.items():
        rest = each[searched]
        each[searched] = 0.0
        sums[name] = np.add.reduceat(np.concatenate([rest, segments.sum(each)])[order], starts)
    some = (sums["kept"] > 0) & (rung < count)
    made.sequence, made.rung = sequence, rung = sequence[some], rung[some]
    made.entering = entering = {name: values[some] for name, values in sums.items()}
    if weights is None:
        entering |= {"kept_excess": np.zeros(len(rung)), "squared_kept_weight": entering["kept"]}
    weight = (entering["kept"] + entering["kept_excess"]) / n[sequence]
    upto = _running(weight, sequence)
    before = np.append(0.0, upto[:-1])[: len(upto)]
    begins = np.append(True, sequence[1:] != sequence[:-1])[: len(sequence)]
    entering["sequence_weight"] = weight
    entering["squared_sequence_weight"] = weight * (upto + np.where(begins, 0.0, before))

    # Summed over the sequences.
    def up(brought: Float64s) -> Float64s:
        found: Float64s = np.cumsum(np.bincount(rung, brought, count))
        return found

    made.summed |= {name: up(brought) for name, brought in entering.items()}
    first = np.full(len(batch), count)
    first[sequence[begins]] = rung[begins]
    for name, from_on in (("touched", last), ("emptied", first)):
        made.summed[name] = _after(np.bincount(from_on[lengths > 0], minlength=count + 1))
    if correction.gates[0].effect == "mask":
        made.summed["counted"] = made.summed["kept"]
    never = lengths - np.bincount(sequence, entering["kept"], len(batch))
    for name, (known, values) in batch.outcomes.items():
        for key, each in ((name, values), (f"{name}_known", known)):
            brought = entering["kept"] * (each / n)[sequence]
            made.summed[f"kept_{key}"] = up(brought)
            made.summed[f"rejected_{key}"] = _after(
                np.append(np.bincount(rung, brought, count), (never * (each / n)).sum())
            )
    for name, each in columns.items():
        if name not in made.summed:
            made.fixed[name] = each.reshape(-1, *trivial)
    made.maxima = {name: np.full(trivial, each.max(initial=-np.inf)) for name, each in maxima.items()}
    return made
