"""Levels of the mismatch by step and worker, from sums over all tokens."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from mismatchctl.core.batch import Float64s, Ints
from mismatchctl.diagnosis.case import Case
from mismatchctl.diagnosis.evidence import LEVEL_TERMS, GroupValue, sum_levels
from mismatchctl.diagnosis.evidence import LevelSums as AllCells
from mismatchctl.diagnosis.measures import quantile_bins
from mismatchctl.measure.metrics.metric import normal_z

_PROBABILITY_BINS = 32
_MIN_FREEDOM = 12
_KNOWN_STEPS, _USUAL_SCATTER = 8, 0.1
"""Prior for the scatter of steps: 10%, with the weight of 8 steps."""
_MAX_LOG_WAYS = 500.0
MIN_ROWS = 4
"""Minimum number of sequences from which the level of a group is estimated."""
StepCells = dict[tuple[GroupValue, GroupValue], Float64s]
"""(step, value) -> sums of `sum_levels`."""


@dataclass(frozen=True)
class Levels:
    """The mean log mismatch (level) of groups of sequences, at equal length and uncertainty.

    `by_step` has the number of sequences and the summed levels by step and value. `variance` is the variance between
    the sequences of a group.
    """

    by_step: dict[GroupValue, dict[GroupValue, tuple[float, float]]]
    variance: float
    freedom: float

    @classmethod
    def of(cls, cells: StepCells) -> Levels:
        """Remove the effects of length and uncertainty by regression within groups."""
        table = np.array(list(cells.values())).reshape(len(cells), -1)
        groups = np.arange(len(cells))
        if table[:, 0].sum() - len(cells) < max(_MIN_FREEDOM, 0.5 * len(cells)):
            groups = _number_steps(cells)
        within, freedom = _sum_within_groups(table, groups)
        slopes = np.zeros(len(LEVEL_TERMS) - 1)
        if freedom >= _MIN_FREEDOM:
            size = np.diag(within)[1:].copy()
            used = size > 1e-9 * table[:, 0].sum()
            chosen = np.flatnonzero(used) + 1
            slopes[used] = np.linalg.lstsq(within[np.ix_(chosen, chosen)], within[chosen, 0], rcond=1e-6)[0]
            freedom -= int(used.sum())
        left = within[0, 0] - 2 * slopes @ within[1:, 0] + slopes @ within[1:, 1:] @ slopes
        levels = table[:, 1] - table[:, 2 : 1 + len(LEVEL_TERMS)] @ slopes
        found: dict[GroupValue, dict[GroupValue, tuple[float, float]]] = {}
        for (step, value), count, total in zip(cells, table[:, 0].tolist(), levels.tolist(), strict=True):
            found.setdefault(step, {})[value] = count, total
        return cls(found, max(float(left), 1e-12) / max(freedom, 1), max(freedom, 0))


def _number_steps(cells: Iterable[tuple[GroupValue, GroupValue]]) -> Ints:
    names: dict[GroupValue, int] = {}
    return np.array([names.setdefault(step, len(names)) for step, _ in cells], np.int64)


def _sum_within_groups(table: Float64s, groups: Any) -> tuple[Float64s, float]:
    """Return the products of deviations from group means, and the degrees of freedom."""
    number = int(groups.max()) + 1 if len(groups) else 0
    summed = np.zeros((number, table.shape[1]))
    np.add.at(summed, groups, table)
    k = math.isqrt(2 * table.shape[1]) - 1  # of 1 + k + k (k + 1) / 2 columns
    found = np.zeros((k, k))
    column = 1 + k
    for i in range(k):
        for j in range(i, k):
            product = summed[:, column] - summed[:, 1 + i] * summed[:, 1 + j] / summed[:, 0]
            found[i, j] = found[j, i] = product.sum()
            column += 1
    return found, float(summed[:, 0].sum() - number)


@dataclass(frozen=True)
class Deviation:
    """The difference in the level of one value of a column from the other values in the same steps, and its z-score."""

    value: GroupValue
    difference: float
    z: float
    sequences: int


def correct_for_tests(z: float, tests: int) -> float:
    """Reduce the largest z-score of several tests (Bonferroni)."""
    return math.copysign(math.sqrt(max(z * z - 2 * math.log(max(tests, 1)), 0.0)), z)


def select_cells(case: Case, column: str) -> StepCells:
    """Return the groups of a column without the values left out, from the sample if it is complete."""
    gone = case.left_out.get(column, frozenset())
    cells = _sum_sample(case, case.reshaped) if case.complete else case.evidence.cells
    return {(step, value): sums for (name, step, value), sums in cells.items() if name == column and value not in gone}


def _sum_sample(case: Case, reshaped: bool) -> AllCells:
    """Sum the levels of the sample, without the effect of a temperature or a truncation."""
    rollout = case.rollout
    if reshaped:
        rollout, bins = rollout.copy(), quantile_bins(case.t, _PROBABILITY_BINS)
        for number in np.unique(bins):
            rollout[case.index[bins == number]] += np.median(case.x[bins == number])
    columns = dict.fromkeys(name for name, _, _ in case.evidence.cells)
    return sum_levels(case.rows, rollout, case.train, case.sound, columns)


def find_deviations(cells: StepCells) -> list[Deviation]:
    """Compare each value of a column with the other values step by step, the largest z-score first."""
    if not cells:
        return []
    levels = Levels.of(cells)
    found: dict[GroupValue, list[float]] = {}
    for values in levels.by_step.values():
        count, total = (sum(row[part] for row in values.values()) for part in (0, 1))
        for value, (own, own_sum) in values.items():
            rest = count - own
            if rest > 0:
                weight = 1 / (1 / own + 1 / rest)
                row = found.setdefault(value, [0.0, 0.0, 0.0])
                row[0] += weight
                row[1] += weight * (own_sum / own - (total - own_sum) / rest)
                row[2] += own
    tests = sum(row[2] >= MIN_ROWS for row in found.values())
    rows = []
    for value, (weight, total, count) in found.items():
        t = total / weight * math.sqrt(weight / levels.variance)
        z = correct_for_tests(normal_z(t, levels.freedom), tests) if count >= MIN_ROWS else 0.0
        rows.append(Deviation(value, total / weight, z, int(count)))
    return sorted(rows, key=lambda row: -row.z)


@dataclass(frozen=True)
class StepLevels:
    """The mean level of each numbered step, and its standard error."""

    steps: list[Any]
    level: Float64s
    error: Float64s
    counts: Float64s
    freedom: float


def measure_steps(case: Case) -> StepLevels:
    column = "" if case.complete else next((name for name, gone in case.left_out.items() if gone), "")
    cells = {key: sums for key, sums in select_cells(case, column).items() if isinstance(key[0], (int, float))}
    if not cells:
        none = np.zeros(0)
        return StepLevels([], none, none, none, 0.0)
    levels = Levels.of(cells)
    steps = {step: np.sum(list(values.values()), axis=0) for step, values in levels.by_step.items()}
    labels = sorted(steps, key=lambda step: float(step or 0))
    table = np.array([steps[label] for label in labels])
    counts = np.maximum(table[:, 0], 1)
    return StepLevels(labels, table[:, 1] / counts, np.sqrt(levels.variance / counts), counts, levels.freedom)


def fit_slope(cells: Mapping[tuple[GroupValue, GroupValue], Float64s]) -> tuple[float, float]:
    """Return the slope of the level by a number such as the version lag, and its z-score.

    Within steps, this is a regression with length and uncertainty. Its z-score is limited by a permutation test. If the
    number is constant within steps, the error includes the scatter between steps.
    """
    groups = _number_steps(cells)
    table, at = np.array(list(cells.values())), np.array([float(value or 0.0) for _, value in cells])
    at -= np.average(at, weights=table[:, 0])
    products, freedom = _sum_within_groups(_add_term(table, at), groups)
    if products[-1, -1] > 0.02 * float((table[:, 0] * at * at).sum()):
        value, z = _regress(products, freedom)
        counts = table[:, 0]
        ways = sum(map(math.lgamma, np.bincount(groups, counts) + 1)) - sum(map(math.lgamma, counts + 1))
        most = -NormalDist().inv_cdf(math.exp(-ways)) if ways < _MAX_LOG_WAYS else math.inf
        return value, math.copysign(min(abs(z), most), z)  # at most as sure as one of all permutations
    levels = Levels.of(dict(cells))
    totals = np.array([own for values in levels.by_step.values() for own in values.values()])
    y, error = totals[:, 1] / totals[:, 0], levels.variance / totals[:, 0]
    shapes = [_fit_across_steps(form, y, error, levels.freedom) for form in (at, np.minimum(at - at.min(), 1.0))]
    (value, z), (_, any_z) = shapes
    return value, max(z, correct_for_tests(any_z, 2), key=abs)


def _add_term(table: Float64s, at: Float64s) -> Float64s:
    """Add a variable with one value per group to the sums."""
    terms = len(LEVEL_TERMS)
    sums = np.column_stack([table[:, : 1 + terms], table[:, 0] * at])
    rows, column = [sums], 1 + terms
    for index in range(terms):
        rows += [table[:, column : column + terms - index], sums[:, [1 + index]] * at[:, None]]
        column += terms - index
    return np.column_stack([*rows, table[:, 0] * at * at])


def _regress(products: Float64s, freedom: float) -> tuple[float, float]:
    """Regress the first variable on the last, and on the others if there is enough data. Return slope and z-score."""
    last = len(products) - 1
    others = np.arange(1, last) if freedom >= _MIN_FREEDOM else np.zeros(0, np.int64)
    ends = np.array([0, last])
    taken = np.linalg.lstsq(products[np.ix_(others, others)], products[np.ix_(others, ends)], rcond=1e-6)[0]
    left = products[np.ix_(ends, ends)] - products[np.ix_(ends, others)] @ taken
    freedom -= len(others) + 1
    if freedom <= 0 or left[1, 1] <= 1e-6 * products[last, last]:
        return 0.0, 0.0
    value = float(left[0, 1] / left[1, 1])
    variance = max(float(left[0, 0]) - value * float(left[0, 1]), 1e-12) / freedom
    return value, normal_z(value * math.sqrt(float(left[1, 1]) / variance), freedom)


def _fit_across_steps(at: Float64s, y: Float64s, error: Float64s, freedom: float) -> tuple[float, float]:
    """Regress the levels of steps on a number. The error includes a scatter between steps of about 10%."""
    weights = 1 / error
    across = at - np.average(at, weights=weights)
    if len(at) < 3 or not (weights * across * across).sum() > 0:
        return 0.0, 0.0
    value = float((weights * across * y).sum() / (weights * across * across).sum())
    left = y - np.average(y, weights=weights) - value * across
    between = float(len(at) - 2)
    scatter = float((left * left).sum()) / between
    extra = max(0.0, scatter - float(error.mean())) * between
    known: float = _KNOWN_STEPS + between
    if freedom < between:
        weights, known = np.full(len(at), 1 / max(scatter, 1e-12)), between
    else:
        weights, known = 1 / (error + (extra + _KNOWN_STEPS * _USUAL_SCATTER**2) / known), min(known, freedom)
    across = at - np.average(at, weights=weights)
    spread = float((weights * across * across).sum())
    value = float((weights * across * y).sum()) / spread
    return value, normal_z(value * math.sqrt(spread), known)
