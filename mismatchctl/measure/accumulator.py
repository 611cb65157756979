"""Accumulate the sums of a run and turn complete groups into estimates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add

import numpy as np

from mismatchctl.measure.cluster_table import GROUP_CAP, Hashes, LabelValue, PromptCounter, step_hash
from mismatchctl.measure.columns import MISMATCH_NAME
from mismatchctl.measure.groups import ClosedSums, GroupCells, GroupMerger, SumsCloser, group_by_value
from mismatchctl.measure.metrics.evaluation import METRICS_NOT_BY_STEP, EstimateRow, Evaluator
from mismatchctl.measure.reduction import MeasurePlan, Sums
from mismatchctl.measure.sums import CellSums, RunSums

NormalizationFactors = list[tuple[str, str, int, tuple[float, ...]]]
"""(run, step, micro-batch hash, normalization factor of each correction)."""


@dataclass
class RunTotals:
    """Closed groups of one run, and closed sums over all of them."""

    steps: list[LabelValue] = field(default_factory=list)  # the groups, in the order in which they were closed
    groups: list[EstimateRow] = field(default_factory=list)  # their estimates, in the same order, in parts
    overall: CellSums | None = None  # closed sums over groups
    by: dict[str, dict[LabelValue, CellSums]] = field(default_factory=dict)  # closed sums by `--by` column and value
    sums: RunSums = field(default_factory=RunSums)  # breakdowns and worst rows of the run
    # prompts of the run (column "") and of each value of a column
    prompts: dict[tuple[str, LabelValue], PromptCounter] = field(default_factory=dict)


class Accumulator(GroupMerger[CellSums]):
    """Adds units in input order and closes their groups."""

    def __init__(self, plan: MeasurePlan) -> None:
        super().__init__(plan.by)
        self.plan = plan
        self.evaluator = Evaluator(plan)
        self.runs: dict[str, RunTotals] = {}
        self.factors: NormalizationFactors = []

    def add(self, sums: Sums) -> None:
        for (run, (step, values)), cell in sums.cells.items():
            self.merge(run, step, values, cell.fold(GROUP_CAP))
        for run, run_sums in sums.runs.items():
            totals = self.runs.setdefault(run, RunTotals())
            totals.sums = totals.sums + run_sums

    def _size(self, cell: CellSums) -> int:
        return cell.size

    def _merge_cells(self, cell: CellSums, more: CellSums) -> CellSums:
        return (cell + more).fold(GROUP_CAP)

    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[CellSums]]) -> None:
        totals = self.runs[run]
        whole = [reduce(add, cells.values()).fold(GROUP_CAP) for cells in groups]
        closing = SumsCloser([cell.table for cell in whole], self.plan)
        if self.plan.sequences:
            for number, step in enumerate(steps):
                self.factors += [(run, str(step), *found) for found in closing.factors(number)]
        closed = closing.close(whole, np.arange(len(whole)))
        totals.steps += steps
        totals.groups.append(self.evaluator.evaluate(closed, METRICS_NOT_BY_STEP))
        salts = np.array([step_hash(step) for step in steps], np.uint64)
        self._extend(totals, "", None, closed, salts)
        if not self.plan.by:
            return
        of_group = np.repeat(np.arange(len(groups)), [len(cells) for cells in groups])
        closed = closing.close([cell for cells in groups for cell in cells.values()], of_group)
        for column, value, cells in group_by_value([values for own in groups for values in own], self.plan.by):
            self._extend(totals, column, value, closed.take(cells), salts[of_group[cells]])

    def _extend(self, totals: RunTotals, column: str, value: LabelValue, closed: ClosedSums, salts: Hashes) -> None:
        plan, names = self.plan, self.evaluator.columns
        if plan.by_prompt:
            prompts = totals.prompts.setdefault((column, value), PromptCounter())
            emptied = [names.position(index, "empty_cluster") for index, _ in enumerate(plan.corrections)]
            closed = closed.count_prompts(prompts, np.array([names.position(MISMATCH_NAME, "clusters"), *emptied]))
        if not column:
            totals.overall = _extend_total(totals.overall, closed, salts, plan)
        else:
            sums = totals.by.setdefault(column, {})
            sums[value] = _extend_total(sums.get(value), closed, salts, plan)


def _extend_total(total: CellSums | None, closed: ClosedSums, salts: Hashes, plan: MeasurePlan) -> CellSums:
    """Add groups to the sums of a run as separate rows. Above the maximum number of rows, clusters are folded."""
    merged, cap = closed.merge(salts), plan.max_clusters
    if total is not None:
        across = not total.table.scopes.any()  # once folded, always folded, so that clusters meet
        table = merged.table.fold_across_scopes(cap, by_prompt=plan.by_prompt) if across else merged.table
        merged = total + CellSums(table, merged.pairs)
    if len(merged.table) <= cap:
        return merged
    return CellSums(merged.table.fold_across_scopes(cap, by_prompt=plan.by_prompt), merged.pairs)
