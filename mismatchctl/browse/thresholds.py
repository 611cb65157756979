"""Bounds of corrections that can move: which tokens go at each value, and the exact totals over the whole dump."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mismatchctl.analyze.trims import trims_of
from mismatchctl.browse.read import OnBad, SequenceRow
from mismatchctl.correction import Correction
from mismatchctl.correction.apply import CorrectedBlock, apply
from mismatchctl.dumps import open_dump
from mismatchctl.errors import ConfigError
from mismatchctl.frameworks import column_aliases
from mismatchctl.ratios import ratios_of
from mismatchctl.sweep import Study, ThresholdAxis, sweep

POINTS = 41
"""Values of a bound, the one that is set in the middle."""
MOST = 8
"""Bounds that can move on one page."""
_REACH = 30.0
"""How many times nearer to, and farther from, keeping nothing or all the ends lie."""
KEPT, REJECTED, BOUNDED = range(3)
TOTALS = ("rejected_tokens", "rejected_sequences", "ess_token", "weight_bounded_low", "weight_bounded_high")


@dataclass(frozen=True)
class Threshold:
    """One bound of one correction.

    Attributes:
        correction: as it is set.
        path: which of its fields moves.
        values: in rising order.
        start: the place of the value that is set.
        states: per sequence, what becomes of each valid token at each value, [P, T]: kept, rejected, or bounded.
        weights: per sequence, the weight of each valid token as set, before normalization, [T].
        reasons: per sequence, which gates reject each valid token as set, in words; empty: it is kept.
        totals: by run, a mapping of `TOTALS` for each value; None where undefined.
    """

    correction: Correction
    path: str
    values: tuple[float, ...]
    start: int
    states: tuple[NDArray[np.uint8], ...]
    weights: tuple[NDArray[np.float64], ...]
    reasons: tuple[list[str], ...]
    totals: Mapping[str, Sequence[Mapping[str, float | None]]]


def thresholds_of(
    paths: Sequence[str],
    corrections: Sequence[Correction],
    rows: Sequence[SequenceRow],
    rename: Mapping[str, str],
    on_bad: OnBad = "error",
) -> list[Threshold]:
    """Every bound that can move, over the sequences shown and over the whole dump."""
    axes = [(correction, axis) for correction in corrections for axis in _axes(correction)][:MOST]
    if not axes:
        return []
    studies = [
        Study(correction.model_copy(update={"name": f"{correction.name} {axis.path}"}), (axis,))
        for correction, axis in axes
    ]
    table = sweep(paths, studies, rename=rename, on_bad=on_bad).overall
    rows = _trimmed([point for study in studies for point in study.corrections], paths, rows, rename, on_bad)
    found = []
    for (correction, axis), study in zip(axes, studies, strict=True):
        own = table.filter(table["correction"] == study.name).sort("run", "point")
        totals: dict[str, list[dict[str, float | None]]] = {}
        for line in own.iter_rows(named=True):
            totals.setdefault(line["run"], []).append({name: line.get(name) for name in TOTALS})
        at_each = [[_applied(point, row) for row in rows] for point in study.corrections]
        values = [float(value) for value in axis.values]  # type: ignore[arg-type]
        start = len(values) // 2
        states = [np.stack([_states(applied[place]) for applied in at_each]) for place in range(len(rows))]
        as_set = at_each[start]
        found.append(
            Threshold(
                correction, axis.path, tuple(values), start, tuple(states),
                tuple(applied.token_weights() for applied in as_set), tuple(_reasons(applied) for applied in as_set),
                totals,
            )
        )  # fmt: skip
    return found


def _axes(correction: Correction) -> Iterator[ThresholdAxis]:
    """The finite bounds of gates, then of the weight."""
    for number, gate in enumerate(correction.gates):
        for side, bound in enumerate(gate.keep):
            if bound is not None and math.isfinite(bound):
                yield _axis(f"gates.{number}.keep.{side}", bound, gate.statistic == "ratio", gate.keep, side)
    rule = correction.weight
    if rule is not None and rule.truncate is not None:
        yield _axis("weight.truncate", rule.truncate, True, (None, rule.truncate), 1)
    for name, interval in (("clip", rule.clip), ("zero", rule.zero)) if rule is not None else ():
        for side, bound in enumerate(interval or ()):
            if bound is not None and math.isfinite(bound):
                yield _axis(f"weight.{name}.{side}", bound, True, interval, side)  # type: ignore[arg-type]


def _axis(path: str, bound: float, ratio: bool, interval: Sequence[float | None], side: int) -> ThresholdAxis:
    """Values about a bound: of a ratio as far from 1, of others as far from 0; never beyond the other bound."""
    factors = np.geomspace(1 / _REACH, _REACH, POINTS)
    if ratio and bound > 0 and bound != 1:
        values = np.exp(np.clip(math.log(bound) * factors, -30, 30))
    else:
        values = (bound or 1.0) * factors
    values[POINTS // 2] = bound
    other = interval[1 - side]
    if other is not None:
        values = np.minimum(values, other) if side == 0 else np.maximum(values, other)
    rising = sorted({float(value) for value in values})
    if bound in rising:  # as many on either side, so that the one that is set stays in the middle
        place = rising.index(bound)
        reach = min(place, len(rising) - 1 - place) or 0
        rising = rising[place - reach : place + reach + 1]
    return ThresholdAxis(path, tuple(float(f"{value:.10g}") if value != bound else bound for value in rising))


def _trimmed(
    corrections: Sequence[Correction],
    paths: Sequence[str],
    rows: Sequence[SequenceRow],
    rename: Mapping[str, str],
    on_bad: OnBad,
) -> Sequence[SequenceRow]:
    """The sequences, knowing what gates over: batch drop of their steps."""
    if not any(gate.over == "batch" for correction in corrections for gate in correction.gates):
        return rows
    dump = open_dump(paths, rename=rename, aliases=column_aliases(), wanted=("run", "step"), on_bad=on_bad)
    trims = trims_of(dump, corrections)
    return [replace(row, batch=trims.on(row.batch, row.run)) for row in rows]


def _applied(correction: Correction, row: SequenceRow) -> CorrectedBlock:
    if lacking := row.batch.lacking(correction.columns):
        raise ConfigError(f"{correction.name} needs {', '.join(lacking)}, which the dump has not")
    return apply(correction, ratios_of(row.batch, correction.sources), row.batch)


def _states(applied: CorrectedBlock) -> NDArray[np.uint8]:
    states = np.where(applied.kept.expanded(), KEPT, REJECTED).astype(np.uint8)
    if applied.weights is not None:
        beyond = applied.weights.low | applied.weights.high
        if not applied.weights.per_token:
            beyond = applied.kept.segments.spread(beyond)
        states[beyond & (states == KEPT)] = BOUNDED
    return states


def _reasons(applied: CorrectedBlock) -> list[str]:
    said = [""] * applied.kept.segments.tokens
    for number, outcome in enumerate(applied.gates):
        gate = outcome.gate
        for rejected, word, bound in ((outcome.low, "below", gate.keep[0]), (outcome.high, "above", gate.keep[1])):
            text = f"gate {number}: {gate.statistic} ({gate.level}) {word} {bound:g}" if bound is not None else ""
            for index in np.flatnonzero(rejected.expanded()):
                said[index] = f"{said[index]}; {text}" if said[index] else text
    return said
