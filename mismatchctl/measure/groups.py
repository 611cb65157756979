"""Groups (training steps): collect their sums, and normalize weights when a group is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Generic, TypeVar

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.corrections.application import normalization_divisor
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.measure.cluster_table import ClusterTable, Hashes, LabelValue, TableAxis
from mismatchctl.measure.columns import MISMATCH_NAME
from mismatchctl.measure.reduction import MeasurePlan, check_breakdown_values
from mismatchctl.measure.sums import CellSums, PairSums

_EXCESS_COUNTS = {"weight_excess": "tokens", "kept_excess": "kept"}  # sums of w - 1 -> column with the number of tokens
_FACTOR_COLUMNS = ("weight_excess", "tokens", "mean_excess", "sequences", "empty_sequences")
_LINEAR_COLUMNS = ("sequence_weight", "loss", "loss_mean", "gradient_product")
"""Columns that are linear in the weights. Columns of the loss only exist if the dump allows losses."""
_LOSS_COLUMNS = ("loss", "loss_mean", "gradient_product", "squared_gradient")
_CANCELLATION_LIMIT = 1e-14  # a smaller sum of squares, relative to the one around 1, is rounding
_SQUARED_COLUMNS = ("squared_sequence_weight", "squared_kept_weight", "squared_gradient")


@dataclass(frozen=True)
class ScopeFactors:
    """Divisors of the weights in each micro-batch of a group."""

    scopes: Hashes  # hash of each micro-batch [M], ascending
    factors: Float64s  # by correction, or along a grid [M, ...]

    def at(self, scopes: Hashes) -> Float64s:
        return self.factors[np.searchsorted(self.scopes, scopes)]


def normalization_factors(rule: Weight, columns: Mapping[str, Float64s], scopes: Hashes) -> ScopeFactors:
    """Return the divisor of the weights in each micro-batch, from the columns of a group's rows [R, ...]."""
    names = ("weight_excess", "tokens") if rule.normalize == "token" else ("mean_excess", "sequences")
    excess, number = (columns[name] for name in names)
    if counts_empty(rule):  # the weight of the added rows is 0
        excess, number = excess - columns["empty_sequences"], number + columns["empty_sequences"]
    found, where = np.unique(scopes, return_inverse=True)

    def total(values: Float64s) -> Float64s:
        sums = np.zeros((len(found), *values.shape[1:]))
        np.add.at(sums, where if rule.normalize_over == "micro_batch" else 0 * where, values)
        return sums if rule.normalize_over == "micro_batch" else np.broadcast_to(sums[:1], sums.shape)

    return ScopeFactors(found, normalization_divisor(1 + total(excess) / np.maximum(total(number), 1)))


def counts_empty(rule: Weight | None) -> bool:
    return rule is not None and rule.normalize == "sequence" and rule.normalize_empty == "count"


def group_factors(table: ClusterTable, plan: MeasurePlan) -> ScopeFactors:
    """Return the divisor of each correction in each micro-batch of a group, 1 without normalization."""
    scopes = np.unique(table.scopes)
    factors = np.ones((len(scopes), len(plan.corrections)))
    for index, correction in enumerate(plan.corrections):
        rule = correction.weight
        if rule is not None and rule.normalize != "none":
            columns = {name: table.sums[:, plan.sums.position(index, name)] for name in _FACTOR_COLUMNS}
            factors[:, index] = normalization_factors(rule, columns, table.scopes).factors
    return ScopeFactors(scopes, factors)


def close_cell(cell: CellSums, group: ScopeFactors, plan: MeasurePlan) -> CellSums:
    """Normalize a part of a group, merge its rows to one row per cluster, and add the columns of `closed_axis`."""
    table, width, corrections = cell.table, len(plan.sums), len(plan.corrections)
    sums = np.zeros((width + 2 * corrections + 1, len(table))).T
    sums[:, :width], maxima = table.sums, table.maxima.copy(order="K")
    factors, tokens = group.at(table.scopes), plan.sums.position(MISMATCH_NAME, "tokens")
    for index, correction in enumerate(plan.corrections):
        places, factor = plan.sums.owner_columns(index), factors[:, index]
        columns = {name: sums[:, place] for name, place in places.items()} | {"tokens": sums[:, tokens]}
        for name, values in normalize_columns(columns, factor, correction).items():
            sums[:, places[name]] = values
        for name in ("weight", "-weight"):
            maxima[:, plan.maxima.position(index, name)] /= factor
        sums[:, width + index] = factor * sums[:, tokens]
    made = ClusterTable(table.clusters, table.scopes, sums, maxima, table.is_folded).merge_scopes()
    if not table.is_folded:  # the count of folded clusters would be wrong
        counted = (made.sums[:, tokens] > 0).astype(np.float64)
        made.sums[:, width + corrections] = counted
        for index in range(corrections):
            kept = made.sums[:, plan.sums.position(index, "kept")]
            made.sums[:, width + corrections + 1 + index] = counted * (kept == 0)
    return CellSums(made, cell.pairs)


def merge_groups(cells: Sequence[CellSums], salts: Hashes) -> CellSums:
    """Merge groups in the given order. Clusters of different groups stay separate."""
    tables = [cell.table for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell.pairs)
    pairs = {name: PairSums.combine([cell.pairs[name] for cell in cells if name in cell.pairs]) for name in names}
    return CellSums(ClusterTable.combine(tables, np.repeat(salts, [len(table) for table in tables])), pairs)


def normalize_columns(columns: Mapping[str, Float64s], factor: Float64s, correction: Correction) -> dict[str, Float64s]:
    """Return the columns of a correction that change if its weights are divided by a factor."""
    shift, found = 1 - factor, {}  # w/F - 1 = (w - 1 + shift) / F
    for name, count in _EXCESS_COUNTS.items():
        found[name] = (columns[name] + columns[count] * shift) / factor
    if "squared_weight_excess" in columns:
        before = columns["squared_weight_excess"]
        squares = before + 2 * shift * columns["weight_excess"] + columns["tokens"] * shift**2
        found["squared_weight_excess"] = np.where(squares < _CANCELLATION_LIMIT * before, 0.0, squares / factor**2)
    scaled = (
        columns if correction.weights_loss else {name: columns[name] for name in columns if name not in _LOSS_COLUMNS}
    )
    found |= {name: scaled[name] / factor for name in _LINEAR_COLUMNS if name in scaled}
    return found | {name: scaled[name] / factor**2 for name in _SQUARED_COLUMNS if name in scaled}


def closed_axis(plan: MeasurePlan) -> TableAxis:
    """Return the columns of a final table: tokens times factor, clusters with a token, and empty clusters are added."""
    numbers = range(len(plan.corrections))
    return TableAxis(
        (
            *plan.sums.names,
            *((index, "factor") for index in numbers),
            (MISMATCH_NAME, "clusters"),
            *((index, "empty_cluster") for index in numbers),
        )
    )


CellT = TypeVar("CellT")
GroupCells = dict[tuple[LabelValue, ...], CellT]
"""The cells of a group, by the values of the `--by` columns."""


class GroupMerger(ABC, Generic[CellT]):
    """Merges the sums of groups in input order. To limit memory, metrics of a complete group replace its sums."""

    # approximate number of sums that are closed together, so that formulas are evaluated together
    closing_size: ClassVar[int] = 1 << 22

    def __init__(self, by: Sequence[str]) -> None:
        self._by = by
        self._known_values: dict[tuple[str, str], set[LabelValue]] = {}
        self._open: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._complete: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._complete_size = 0

    @abstractmethod
    def _size(self, cell: CellT) -> int:
        """Return the approximate number of stored values of a group."""

    @abstractmethod
    def _merge_cells(self, cell: CellT, more: CellT) -> CellT:
        """Merge two parts of a group."""

    @abstractmethod
    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[CellT]]) -> None:
        """Compute the final sums of a run's complete groups, ordered by the text of their labels."""

    def merge(self, run: str, step: LabelValue, values: tuple[LabelValue, ...], cell: CellT) -> None:
        """Add sums to a group. A complete group becomes open again."""
        key = run, step
        if key not in self._open:
            self._open[key] = self._complete.pop(key, {})
            self._complete_size -= self._size_of(self._open[key])
        cells = self._open[key]
        cells[values] = self._merge_cells(cells[values], cell) if values in cells else cell
        check_breakdown_values(self._by, len(cells))
        for column, value in zip(self._by, values, strict=True):
            known = self._known_values.setdefault((run, column), set())
            known.add(value)
            check_breakdown_values([column], len(known))

    def close(self, may_grow: Callable[[str, LabelValue], bool]) -> None:
        """Compute the final sums of groups that cannot grow, if there are enough such groups."""
        for key in [key for key in self._open if not may_grow(*key)]:
            cells = self._open.pop(key)
            size = self._size_of(cells)
            if self._complete_size + size > self.closing_size:
                self._close_complete()
            self._complete[key] = cells
            self._complete_size += size

    def finish(self) -> None:
        self.close(lambda run, step: False)
        self._close_complete()

    def _close_complete(self) -> None:
        of_run: dict[str, dict[LabelValue, GroupCells[CellT]]] = {}
        for (run, step), cells in self._complete.items():
            of_run.setdefault(run, {})[step] = {values: cells[values] for values in sorted(cells, key=str)}
        self._complete, self._complete_size = {}, 0
        for run, steps in of_run.items():
            self._close_groups(run, list(steps), list(steps.values()))

    def _size_of(self, cells: GroupCells[CellT]) -> int:
        return sum(map(self._size, cells.values()))
