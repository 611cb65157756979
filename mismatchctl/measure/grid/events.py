"""A long row of bounds of one gate: a sequence changes only where some of its tokens enter what is kept.

The variants of the gate are put in an order in which each keeps all that the one before it kept: rungs of a ladder.
Each token enters at one of them; what it brings is written there once, and running sums along the rungs follow: upward
over what is kept, downward over what is rejected, so that nothing is subtracted. What does not depend on the rung is
what `analyze` makes of any of the points.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from mismatchctl.measure.grid.parts import Arrays, Parts
from mismatchctl.ratios import Ratios


@dataclass
class EventColumns:
    """Columns of one block along a ladder.

    Attributes:
        family: whose points these are.
        parts: the micro-batches of its cells.
        rungs: how many there are.
        fixed: columns that do not depend on the rung [S, 1, ...].
        sequence, rung: where something enters [P].
        entering: columns that grow by so much there [P].
        leaving: columns to which something belongs at the rungs below its own alone: sequence, rung, how much.
        maxima: the largest of each part [parts, 1, ...].
    """

    family: Family
    parts: Parts
    rungs: int
    fixed: Arrays = field(default_factory=dict)
    sequence: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rung: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    entering: Arrays = field(default_factory=dict)
    leaving: dict[str, tuple[Ints, Ints, NDArray[Any] | None]] = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)

    def totals(self) -> Arrays:
        """As of BlockColumns."""
        return self.by((*self.fixed, *self.entering, *self.leaving), self.parts)

    def by(self, names: Iterable[str], parts: Parts) -> Arrays:
        """As of BlockColumns."""
        enters = parts.at(self.sequence) * self.rungs + self.rung
        return {name: self._sum(name, parts, enters) for name in names}

    def _sum(self, name: str, parts: Parts, enters: Ints) -> NDArray[Any]:
        if name in self.fixed:
            return parts.sum(self.fixed[name])
        if name in self.entering:
            brought = np.bincount(enters, self.entering[name], parts.count * self.rungs)
            return self._along(np.cumsum(brought.reshape(parts.count, -1), axis=1))
        sequence, rung, values = self.leaving[name]
        where = parts.at(sequence) * (self.rungs + 1) + rung
        left = np.bincount(where, values, parts.count * (self.rungs + 1)).reshape(parts.count, -1)
        return self._along(np.cumsum(left[:, ::-1], axis=1)[:, ::-1][:, 1:])

    def _along(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values by rung [R, rungs] along the grid of the family [R, ...]."""
        ladder = self.family.ladder
        assert ladder is not None
        shape = [variants if axis == ladder.axis else 1 for axis, variants in enumerate(self.family.grid)]
        return values[:, ladder.rungs].astype(np.float64).reshape(len(values), *shape)


def _running(values: Float64s, sequence: Ints) -> Float64s:
    """Sums of values [P] up to each, within its sequence; sequences lie together. Nothing of others is ever added."""
    sums, step = values, 1
    longest = int(np.bincount(sequence).max(initial=0))
    while step < longest:
        more = np.where(sequence[step:] == sequence[:-step], sums[:-step], 0.0)
        sums = np.concatenate([sums[:step], sums[step:] + more])
        step *= 2
    return sums


def event_columns(
    family: Family, ladder: Ladder, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: Parts
) -> EventColumns:
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

    made, every = EventColumns(family, parts, count), np.arange(len(batch))
    for side, of_bin in (("low", ladder.low), ("high", ladder.high)):
        until = np.concatenate([of_bin[bins], of_bin[usual]])
        tokens = np.concatenate([np.ones(len(bins)), held])
        late = np.flatnonzero(until)
        sequence_of = np.concatenate([of_token, every])[late]
        made.leaving[f"gate{ladder.gate}_tokens_{side}"] = sequence_of, until[late], tokens[late]
        made.leaving[f"gate{ladder.gate}_sequences_{side}"] = every, latest(of_bin), None
    enters = np.maximum(ladder.low, ladder.high)
    last = np.where(left.counts == lengths, latest(enters), count)

    # What enters, by sequence and rung.
    kept = left.expanded()
    rule = correction.weight
    weights = None if rule is None else Weights(rule, ratios[rule.source])
    each_brings: dict[str, NDArray[Any]] = {"kept": kept.astype(np.float64)}
    each_brings["kept_k3"] = np.where(kept, ratios["train/rollout"].k3, 0.0)
    if weights is not None:
        for name, each in (("kept_excess", weights.excess), ("squared_kept_weight", weights.bounded**2)):
            each_brings[name] = np.where(kept, each if weights.per_token else segments.spread(each), 0.0)
    keys = np.concatenate([of_token * (count + 1) + enters[bins], every * (count + 1) + enters[usual]])
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)) if len(keys) else np.zeros(0, np.int64)
    sequence, rung = np.divmod(keys[order][starts], count + 1)
    sums = {}
    for name, each in each_brings.items():
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

    if correction.gates[0].effect == "mask":
        entering["counted"] = entering["kept"]
    first = np.full(len(batch), count)
    first[sequence[begins]] = rung[begins]
    made.leaving |= {"touched": (every, last, None), "emptied": (every, first, None)}
    never = lengths - np.bincount(sequence, entering["kept"], len(batch))
    ends = np.concatenate([sequence, every]), np.concatenate([rung, np.full(len(batch), count)])
    for name, (known, values) in batch.outcomes.items():
        for key, each in ((name, values), (f"{name}_known", known)):
            entering[f"kept_{key}"] = brought = entering["kept"] * (each / n)[sequence]
            made.leaving[f"rejected_{key}"] = *ends, np.concatenate([brought, never * (each / n)])
    for name, each in columns.items():
        if name not in entering and name not in made.leaving:
            made.fixed[name] = each.reshape(-1, *trivial)
    made.maxima = {name: parts.largest(each).reshape(-1, *trivial) for name, each in maxima.items()}
    return made
