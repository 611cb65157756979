"""Levels of the mismatch by step and worker, from the sums of all tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.diagnose.case import Case
from mismatchctl.diagnose.evidence import Value, level_sums

_BINS = 32
Cells = dict[tuple[Value, Value], Float64s]
"""(step, value) -> sequences, sum of levels, of squared levels."""


@dataclass(frozen=True)
class Deviation:
    """How one value of a column differs from the others of the same steps: difference of log levels, and its z."""

    value: Value
    difference: float
    z: float
    sequences: int


def cells_of(case: Case, column: str) -> Cells:
    """The cells of a column, without what is left out of the case: from the sample where that is everything."""
    gone = case.left_out.get(column, frozenset())
    cells = case.evidence.cells
    if case.complete:
        rollout = _flattened(case) if case.reshaped else case.rollout
        cells = level_sums(case.rows, rollout, case.train, case.sound, [column])
    return {(step, value): sums for (name, step, value), sums in cells.items() if name == column and value not in gone}


def _flattened(case: Case) -> Float64s:
    """The rollout's log-probs [T] without what a temperature or truncation usually does at each of the trainer's."""
    rollout = case.rollout.copy()
    edges = np.quantile(case.t, np.linspace(0, 1, _BINS + 1)[1:-1])
    bins = np.searchsorted(edges, case.t)
    for number in range(_BINS):
        inside = bins == number
        if inside.any():
            rollout[case.index[inside]] += np.median(case.x[inside])
    return rollout


def scatter(cells: Iterable[Float64s]) -> float:
    """Variance of the level of a sequence within cells."""
    squares, freedom = 0.0, 0.0
    for count, total, square, *_ in cells:
        squares += float(square - total * total / count)
        freedom += float(count - 1)
    return max(squares, 1e-12) / max(freedom, 1.0)


def deviations(cells: Cells) -> list[Deviation]:
    """Each value of a column against the others, step by step; largest z first."""
    variance = scatter(cells.values())
    steps: dict[Value, dict[Value, Float64s]] = {}
    for (step, value), sums in cells.items():
        steps.setdefault(step, {})[value] = sums
    found: dict[Value, list[float]] = {}
    for values in steps.values():
        whole = np.sum(list(values.values()), axis=0)
        for value, sums in values.items():
            rest = whole - sums
            if rest[0] > 0:
                weight = 1 / (1 / sums[0] + 1 / rest[0])
                row = found.setdefault(value, [0.0, 0.0, 0.0])
                row[0] += weight
                row[1] += weight * (sums[1] / sums[0] - rest[1] / rest[0])
                row[2] += sums[0]
    rows = [
        Deviation(value, total / weight, total / weight * float(np.sqrt(weight / variance)), int(count))
        for value, (weight, total, count) in found.items()
    ]
    return sorted(rows, key=lambda row: -row.z)


def by_value(cells: Cells) -> dict[Value, Float64s]:
    """Sums of each value over the steps."""
    found: dict[Value, Float64s] = {}
    for (_, value), sums in cells.items():
        found[value] = found[value] + sums if value in found else sums
    return found


def series(case: Case) -> tuple[list[Any], Float64s, Float64s]:
    """Steps in order, the mean level of their sequences, and its standard error; rows left out do not count."""
    column = "" if case.complete else next((name for name, gone in case.left_out.items() if gone), "")
    cells = cells_of(case, column)
    steps: dict[Value, Float64s] = {}
    for (step, _), sums in cells.items():
        steps[step] = steps[step] + sums if step in steps else sums
    labels = sorted((step for step in steps if isinstance(step, (int, float))), key=float)
    table = np.array([steps[label][:3] for label in labels]).reshape(-1, 3)
    variance = scatter(cells.values())
    return labels, table[:, 1] / np.maximum(table[:, 0], 1), np.sqrt(variance / np.maximum(table[:, 0], 1))


def slope(points: Mapping[float, Float64s]) -> tuple[float, float]:
    """Slope of the level by a number (a version lag) over sequences, and its z."""
    at = np.array(list(points))
    table = np.array([sums[:3] for sums in points.values()])
    count = table[:, 0]
    centre = (count * at).sum() / count.sum()
    mean = table[:, 1].sum() / count.sum()
    spread = (count * (at - centre) ** 2).sum()
    if spread == 0:
        return 0.0, 0.0
    value = float(((at - centre) * (table[:, 1] - count * mean)).sum() / spread)
    return value, value * float(np.sqrt(spread / scatter(points.values())))
