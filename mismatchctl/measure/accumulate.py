"""From the sums of units to estimates: groups are closed as soon as nothing more of them can come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from mismatchctl.measure import CellSums, Plan, RunSums, Sums
from mismatchctl.measure.close import Closing
from mismatchctl.measure.metrics import Estimates, Evaluator
from mismatchctl.measure.reduce import Value, require_few
from mismatchctl.measure.table import GROUP_CAP, hash_values

Factors = list[tuple[str, str, int, tuple[float, ...]]]
"""(run, step, micro-batch hash, normalization factor of each correction)."""
Row = tuple[Estimates, list[Estimates]]
"""Estimates of the metrics, and of each correction in order."""


@dataclass
class RunTotals:
    """What is known of one run: its closed groups, and closed sums of all of them together.

    Attributes:
        groups: estimates by step, in the order in which groups were closed.
        overall: closed sums over groups.
        by: the same for each value of each `--by` column: column -> value -> sums.
        sums: breakdowns and worst of the run.
    """

    groups: dict[Value, Row] = field(default_factory=dict)
    overall: CellSums | None = None
    by: dict[str, dict[Value, CellSums]] = field(default_factory=dict)
    sums: RunSums = field(default_factory=RunSums)


class Accumulator:
    """Adds up units in the order of the input; memory is that of the groups still open."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.evaluator = Evaluator(plan)
        self.runs: dict[str, RunTotals] = {}
        self.factors: Factors = []
        self._open: dict[tuple[str, Value], dict[tuple[Value, ...], CellSums]] = {}

    def add(self, sums: Sums) -> None:
        """Merge the sums of the next unit."""
        for (run, (step, values)), cell in sums.cells.items():
            cells = self._open.setdefault((run, step), {})
            cells[values] = (cells[values] + cell if values in cells else cell).folded(GROUP_CAP)
            require_few(self.plan.by, len(cells))
        for run, run_sums in sums.runs.items():
            totals = self.runs.setdefault(run, RunTotals())
            totals.sums = totals.sums + run_sums

    def close(self, may_grow: Callable[[str, Value], bool] = lambda run, step: False) -> None:
        """Close every open group that cannot grow any more."""
        for run, step in [key for key in self._open if not may_grow(*key)]:
            self._close_group(run, step, self._open.pop((run, step)))

    def _close_group(self, run: str, step: Value, cells: dict[tuple[Value, ...], CellSums]) -> None:
        totals = self.runs[run]
        ordered = [cells[values] for values in sorted(cells, key=str)]
        raw = reduce(add, ordered).folded(GROUP_CAP)
        closing = Closing(raw.table, self.plan)
        if self.plan.sequences:
            for scope, factors in zip(closing.scopes.tolist(), closing.factors.tolist(), strict=True):
                self.factors.append((run, str(step), scope, tuple(factors)))
        group = _closed(raw, closing)
        totals.groups[step] = self.evaluator.evaluate(group)
        scope = step_hash(step)
        totals.overall = _extended(totals.overall, group, scope, self.plan.most_clusters)
        if not self.plan.by:
            return
        for values in sorted(cells, key=str):
            closed = _closed(cells[values], closing)
            for column, value in zip(self.plan.by, values, strict=True):
                sums = totals.by.setdefault(column, {})
                sums[value] = _extended(sums.get(value), closed, scope, self.plan.most_clusters)
                require_few([column], len(sums))


def _closed(cell: CellSums, closing: Closing) -> CellSums:
    return CellSums(closing.close(cell.table), cell.pairs)


def step_hash(step: Value) -> np.uint64:
    """What tells the clusters of a step from those of others."""
    hashed: np.uint64 = hash_values(np.array(["\0missing" if step is None else str(step)]))[0]
    return hashed


def _extended(total: CellSums | None, closed: CellSums, scope: np.uint64, cap: int) -> CellSums:
    """A run's sums with one more group, whose clusters are its own; beyond `cap` rows they are folded."""
    table = closed.table.of_scope(scope)
    if total is None:
        merged = CellSums(table, closed.pairs)
    else:
        across = not total.table.scopes.any()  # folded once: what comes later must meet what was folded before
        merged = total + CellSums(table.folded_across_scopes(cap) if across else table, closed.pairs)
    if len(merged.table) <= cap:
        return merged
    return CellSums(merged.table.folded_across_scopes(cap), merged.pairs)
