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

from mismatchctl.batch import Bools, Float64s, Ints, Segments, TokenBatch
from mismatchctl.correction import Gate, Selection
from mismatchctl.correction.apply import Weights, measure
from mismatchctl.correction.gates import judge
from mismatchctl.measure.columns import correction_columns
from mismatchctl.measure.grid.family import Family, Ladder
from mismatchctl.measure.grid.parts import Arrays, Parts
from mismatchctl.measure.grid.thresholds import as_slice
from mismatchctl.ratios import Ratios


@dataclass
class EventColumns:
    """Columns of one block along a ladder.

    Attributes:
        family: whose points these are.
        parts: the micro-batches of its cells.
        rungs: the rung of each variant [V].
        fixed: columns that do not depend on the rung [S, 1, ...].
        sequence, rung: where something enters; the rung V where it never does [P].
        entering: columns that grow by so much there [P].
        leaving: columns to which something belongs there alone: sequence, rung, how much.
        maxima: the largest of each part [parts, ...].
    """

    family: Family
    parts: Parts
    rungs: Ints
    fixed: Arrays = field(default_factory=dict)
    sequence: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    rung: Ints = field(default_factory=lambda: np.zeros(0, np.int64))
    entering: Arrays = field(default_factory=dict)
    leaving: dict[str, tuple[Ints, Ints, NDArray[Any] | None]] = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)

    def take_rest(self, columns: Mapping[str, Float64s], maxima: Mapping[str, Float64s]) -> None:
        """Take as fixed what is not known otherwise, of columns [S]."""
        known, trivial = {*self.entering, *self.leaving}, (1,) * len(self.family.grid)
        self.fixed = {name: each.reshape(-1, *trivial) for name, each in columns.items() if name not in known}
        self.maxima = {name: self.parts.largest(each).reshape(-1, *trivial) for name, each in maxima.items()}

    def totals(self) -> Arrays:
        """As of BlockColumns."""
        return self.by((*self.fixed, *self.entering, *self.leaving), self.parts)

    def by(self, names: Iterable[str], parts: Parts) -> Arrays:
        """As of BlockColumns."""
        where = self._where(self.sequence, self.rung, parts)
        found: Arrays = {}
        for name in names:
            if name in self.fixed:
                found[name] = parts.sum(self.fixed[name])
            elif name in self.entering:
                found[name] = self.along(self._upward(where, self.entering[name], parts))
            else:
                sequence, rung, values = self.leaving[name]
                found[name] = self.along(self._downward(self._where(sequence, rung, parts), values, parts))
        return found

    def along(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values by rung [R, rungs] along the grid of the family [R, ...]."""
        shape = [variants if axis == self.family.longest else 1 for axis, variants in enumerate(self.family.grid)]
        return values[:, as_slice(self.rungs)].astype(np.float64, copy=False).reshape(len(values), *shape)

    def _where(self, sequence: Ints, rung: Ints, parts: Parts) -> Ints:
        return parts.at(sequence) * (len(self.rungs) + 1) + rung

    def _written(self, where: Ints, values: NDArray[Any] | None, parts: Parts) -> NDArray[Any]:
        width = len(self.rungs) + 1
        return np.bincount(where, values, parts.count * width).reshape(parts.count, width)

    def _upward(self, where: Ints, values: NDArray[Any], parts: Parts) -> NDArray[Any]:
        found: NDArray[Any] = np.cumsum(self._written(where, values, parts)[:, :-1], axis=1)
        return found

    def _downward(self, where: Ints, values: NDArray[Any] | None, parts: Parts) -> NDArray[Any]:
        found: NDArray[Any] = np.cumsum(self._written(where, values, parts)[:, :0:-1], axis=1)[:, ::-1]
        return found


def _running(values: Float64s, sequence: Ints) -> Float64s:
    """Sums of values [P] up to each, within its sequence; sequences lie together. Nothing of others is ever added."""
    sums, step = values, 1
    longest = int(np.bincount(sequence).max(initial=0))
    while step < longest:
        more = np.where(sequence[step:] == sequence[:-step], sums[:-step], 0.0)
        sums = np.concatenate([sums[:step], sums[step:] + more])
        step *= 2
    return sums


def sequences_of(tokens: Ints, batch: TokenBatch) -> Ints:
    """The sequence of each of some tokens, which ascend."""
    return np.repeat(np.arange(len(batch)), np.diff(np.searchsorted(tokens, batch.segments.offsets)))


def left_by(gates: Iterable[Gate], ratios: Mapping[str, Ratios], batch: TokenBatch) -> Selection:
    """What is left by gates that each judge by themselves."""
    left = everything = Selection.everything(batch.segments)
    for gate in gates:
        outcome = judge(gate, ratios[gate.source], batch, everything)
        left = left.without(outcome.low).without(outcome.high)
    return left


def summed_apart(values: Float64s, kept: Bools | None, apart: Ints, segments: Segments) -> Float64s:
    """Kept values [T] summed over each sequence, but for some tokens, which stand behind by themselves [S + apart]."""
    values = values.copy() if kept is None else np.where(kept, values, 0.0)
    alone = values[apart]
    values[apart] = 0.0
    return np.concatenate([segments.sum(values), alone])


def event_columns(
    family: Family, ladder: Ladder, ratios: Mapping[str, Ratios], batch: TokenBatch, parts: Parts
) -> EventColumns:
    """The columns of a block of a family whose points are rungs of a ladder."""
    correction, segments, count = family.correction, batch.segments, ladder.count
    columns, maxima = correction_columns(family.loosest, ratios, ratios["train/rollout"].k3_sum, batch)
    own, lengths = correction.gates[ladder.gate], segments.lengths
    n, everything = np.maximum(lengths, 1).astype(np.float64), Selection.everything(segments)
    left = left_by((gate for number, gate in enumerate(correction.gates) if number != ladder.gate), ratios, batch)

    # All tokens of a sequence lie in one bin where it is judged as a whole; else most do, and the others are looked up.
    values, bin_of = measure(own, ratios[own.source], everything, batch), ladder.thresholds.bin
    if own.level == "token":
        common, lowest, highest = ladder.thresholds.usual(values)
        searched = np.flatnonzero(~((values >= lowest) & (values < highest)))
        usual, bins = np.full(len(batch), common), bin_of(values[searched])
    else:
        searched, usual, bins = np.zeros(0, np.int64), bin_of(values), np.zeros(0, np.int64)
    of_token = sequences_of(searched, batch)
    held = lengths - np.bincount(of_token, minlength=len(batch))  # tokens in the usual bin

    def latest(of_bin: Ints) -> Ints:
        """The last rung at which some token of each sequence enters [S], given those of bins."""
        found = np.where(held > 0, of_bin[usual], 0)
        np.maximum.at(found, of_token, of_bin[bins])
        return found

    made, every = EventColumns(family, parts, ladder.rungs), np.arange(len(batch))
    looked_at, tokens = np.concatenate([every, of_token]), np.concatenate([held, np.ones(len(searched))])
    for side, of_bin in (("low", ladder.low), ("high", ladder.high)):
        until = np.concatenate([of_bin[usual], of_bin[bins]])
        late = np.flatnonzero(until)
        made.leaving[f"gate{ladder.gate}_tokens_{side}"] = looked_at[late], until[late], tokens[late]
        made.leaving[f"gate{ladder.gate}_sequences_{side}"] = every, latest(of_bin), None
    enters = np.maximum(ladder.low, ladder.high)
    last = np.where(left.counts == lengths, latest(enters), count)

    # What enters, by sequence and rung.
    kept = None if left.tokens is None else left.expanded()
    rule = correction.weight
    weights = None if rule is None else Weights(rule, ratios[rule.source])
    brought = {"kept": tokens if kept is None else summed_apart(np.ones(batch.tokens), kept, searched, segments)}
    brought["kept_k3"] = summed_apart(ratios["train/rollout"].k3, kept, searched, segments)
    if weights is not None:
        for name, each in (("kept_excess", weights.excess), ("squared_kept_weight", weights.bounded**2)):
            values = each if weights.per_token else segments.spread(each)
            brought[name] = summed_apart(values, kept, searched, segments)
    keys = looked_at * (count + 1) + np.concatenate([enters[usual], enters[bins]])
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.append(True, np.diff(keys[order]) != 0)) if len(keys) else np.zeros(0, np.int64)
    sequence, rung = np.divmod(keys[order][starts], count + 1)
    sums = {name: np.add.reduceat(each[order], starts) for name, each in brought.items()}
    some = (sums["kept"] > 0) & (rung < count) & (left.counts > 0)[sequence]
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
            entering[f"kept_{key}"] = own_part = entering["kept"] * (each / n)[sequence]
            made.leaving[f"rejected_{key}"] = *ends, np.concatenate([own_part, never * (each / n)])
    made.take_rest(columns, maxima)
    return made
