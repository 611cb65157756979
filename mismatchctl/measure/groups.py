"""Groups (training steps): collect their sums, and normalize weights when a group is complete."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Generic, TypeVar

import numpy as np

from mismatchctl.core.batch import Bools, Float64s, Ints
from mismatchctl.corrections.application import normalization_divisor
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.measure.cluster_table import (
    ClusterTable,
    Hashes,
    LabelValue,
    PromptCounter,
    TableAxis,
    merge_rows,
    take_rows,
)
from mismatchctl.measure.columns import MISMATCH_NAME
from mismatchctl.measure.reduction import MeasurePlan, check_breakdown_values
from mismatchctl.measure.sums import CellSums, PairSums

_EXCESS_COUNTS = {"weight_excess": "tokens", "kept_excess": "kept"}  # sums of w - 1 -> column with the number of tokens
_LINEAR_COLUMNS = ("sequence_weight", "loss", "loss_mean", "gradient_product")
"""Columns that are linear in the weights. Columns of the loss only exist if the dump allows losses."""
_LOSS_COLUMNS = ("loss", "loss_mean", "gradient_product", "squared_gradient")
_CANCELLATION_LIMIT = 1e-14  # a smaller sum of squares, relative to the one around 1, is rounding
_SQUARED_COLUMNS = ("squared_sequence_weight", "squared_kept_weight", "squared_gradient")


@dataclass(frozen=True)
class ClosedSums:
    """Final sums of several groups."""

    clusters: Hashes  # hash of the cluster of each row [R], ascending within a cell
    # sums, maxima: columns of `closed_axis` and of the plan's maxima [R, ...]
    sums: Float64s
    maxima: Float64s
    starts: Ints  # first row of each cell [G]
    is_folded: Bools  # True if a row of the cell may contain several clusters [G]
    pairs: Sequence[Mapping[str, PairSums]]  # histograms and tails of each cell [G]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Ints:
        return np.diff(np.append(self.starts, len(self.clusters)))

    @classmethod
    def from_cell(cls, cell: CellSums, *, by_prompt: bool) -> ClosedSums:
        """Create final sums from one group. A prompt is one cluster over all steps."""
        table = cell.table.with_scope(np.uint64(0)) if by_prompt else cell.table
        folded = np.array([table.is_folded])
        return cls(table.clusters, table.sums, table.maxima, np.zeros(1, np.int64), folded, [cell.pairs])

    def merge(self, salts: Hashes) -> CellSums:
        """Merge all groups in the given order. Clusters of different groups stay separate."""
        folded = bool(self.is_folded.any())
        scopes = np.repeat(salts, self.sizes)
        names = dict.fromkeys(name for own in self.pairs for name in own)
        pairs = {name: PairSums.combine([own[name] for own in self.pairs if name in own]) for name in names}
        return CellSums(ClusterTable.from_rows(self.clusters, scopes, self.sums, self.maxima, folded), pairs)

    def count_prompts(self, prompts: PromptCounter, places: Ints) -> ClosedSums:
        """Replace the number of clusters in each step by the number of prompts that were not in earlier steps."""
        sums, first, rest = self.sums.copy(order="K"), int(places[0]), places[1:]
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            rows = slice(start, start + size)
            new, emptied = prompts.add(self.clusters[rows], sums[rows, first] > 0, sums[rows][:, rest] > 0)
            sums[rows, first] = new
            sums[start : start + size, rest] = emptied
        return replace(self, sums=sums)

    def take(self, cells: Ints) -> ClosedSums:
        sizes = self.sizes[cells]
        ends = np.cumsum(sizes)
        rows = np.arange(sizes.sum()) + np.repeat(self.starts[cells] - ends + sizes, sizes)
        return ClosedSums(
            self.clusters[rows],
            take_rows(self.sums, rows),
            take_rows(self.maxima, rows),
            ends - sizes,
            self.is_folded[cells],
            [self.pairs[cell] for cell in cells.tolist()],
        )


class GroupScopes:
    """Micro-batches of groups."""

    def __init__(self, groups: Sequence[ClusterTable]) -> None:
        scopes = np.concatenate([table.scopes for table in groups])
        within = table_numbers(groups)
        self._scopes = np.unique(scopes)
        self._keys, self._rows = np.unique(self._key(within, scopes), return_inverse=True)
        self._groups = self._keys // max(len(self._scopes), 1)

    def __len__(self) -> int:
        return len(self._keys)

    def of_group(self, group: int) -> Iterator[tuple[int, int]]:
        """Yield the index and hash of each micro-batch of a group."""
        for number in np.flatnonzero(self._groups == group).tolist():
            yield number, int(self._scopes[self._keys[number] % len(self._scopes)])

    def find(self, groups: Ints, scopes: Hashes) -> Ints:
        return np.searchsorted(self._keys, self._key(groups, scopes))

    def _key(self, groups: Ints, scopes: Hashes) -> Ints:
        return groups * len(self._scopes) + np.searchsorted(self._scopes, scopes)

    def factors(self, rule: Weight, columns: Mapping[str, Float64s]) -> Float64s:
        """Return the divisor of the weights in each micro-batch, from the columns of all rows."""
        names = ("weight_excess", "tokens") if rule.normalize == "token" else ("mean_excess", "sequences")
        excess, number = (columns[name] for name in names)
        if counts_empty(rule):  # the weight of the added rows is 0
            excess, number = excess - columns["empty_sequences"], number + columns["empty_sequences"]
        apart = rule.normalize_over == "micro_batch"
        where = self._rows if apart else self._groups[self._rows]
        factor = normalization_factor(_sum_by_index(excess, where), _sum_by_index(number, where))
        return factor if apart else factor[self._groups]


def counts_empty(rule: Weight | None) -> bool:
    return rule is not None and rule.normalize == "sequence" and rule.normalize_empty == "count"


def table_numbers(tables: Sequence[ClusterTable]) -> Ints:
    return np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def _sum_by_index(values: Float64s, where: Ints) -> Float64s:
    found = np.zeros((where.max(initial=-1) + 1, *values.shape[1:]))
    np.add.at(found, where, values)
    return found


class SumsCloser:
    """Computes the final sums of many groups at once. Normalization factors belong to whole groups."""

    def __init__(self, groups: Sequence[ClusterTable], plan: MeasurePlan) -> None:
        self.plan = plan
        self._scopes = GroupScopes(groups)
        self._factors = self._normalization(groups)

    def factors(self, group: int) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Yield each micro-batch of a group with the factor of each correction."""
        for number, scope in self._scopes.of_group(group):
            yield scope, tuple(self._factors[number].tolist())

    def close(self, cells: Sequence[CellSums], groups: Ints) -> ClosedSums:
        """Normalize groups, merge their rows to one row per cluster, and add the final columns."""
        tables = [cell.table for cell in cells]
        clusters = np.concatenate([table.clusters for table in tables])
        maxima = np.concatenate([table.maxima for table in tables])
        width, corrections = len(self.plan.sums), len(self.plan.corrections)
        sums = np.zeros((width + 2 * corrections + 1, len(clusters))).T  # of closed_axis, where added columns are last
        np.concatenate([table.sums for table in tables], out=sums[:, :width])
        scopes = np.concatenate([table.scopes for table in tables])
        cell = table_numbers(tables)
        factors = self._factors[self._scopes.find(groups[cell], scopes)]
        for index in range(corrections):
            factor = factors[:, index]
            self._normalize(sums, maxima, index, factor)
            sums[:, width + index] = factor * sums[:, self.plan.sums.position(index, "tokens")]
        first = np.append(True, (clusters[1:] != clusters[:-1]) | (cell[1:] != cell[:-1]))
        if not first.all():  # the rows of a cluster's micro-batches are adjacent
            sums, maxima = merge_rows(sums, maxima, np.arange(len(first)), first)
            clusters, cell = clusters[first], cell[first]
        folded = np.array([table.is_folded for table in tables])
        told_apart = ~folded[cell]  # folded clusters are not counted, since the count would be wrong
        counted = (sums[:, self.plan.sums.position(MISMATCH_NAME, "tokens")] > 0).astype(np.float64) * told_apart
        sums[:, width + corrections] = counted
        for index in range(corrections):
            kept = sums[:, self.plan.sums.position(index, "kept")]
            sums[:, width + corrections + 1 + index] = counted * (kept == 0)
        starts = np.searchsorted(cell, np.arange(len(tables)))
        return ClosedSums(clusters, sums, maxima, starts, folded, [own.pairs for own in cells])

    def _normalization(self, groups: Sequence[ClusterTable]) -> Float64s:
        """Return the factor of each correction in each micro-batch, 1 without normalization."""
        factors = np.ones((len(self._scopes), len(self.plan.corrections)))
        for index, correction in enumerate(self.plan.corrections):
            rule = correction.weight
            if rule is not None and rule.normalize != "none":
                names = ("weight_excess", "tokens", "mean_excess", "sequences", "empty_sequences")
                places = {name: self.plan.sums.position(index, name) for name in names}
                columns = {
                    name: np.concatenate([table.sums[:, place] for table in groups]) for name, place in places.items()
                }
                factors[:, index] = self._scopes.factors(rule, columns)
        return factors

    def _normalize(self, sums: Float64s, maxima: Float64s, correction: int, factor: Float64s) -> None:
        axis = self.plan.sums
        places = axis.owner_columns(correction)
        columns = {name: sums[:, place] for name, place in places.items()}
        columns["tokens"] = sums[:, axis.position(correction, "tokens")]
        for name, values in normalize_columns(columns, factor, self.plan.corrections[correction]).items():
            sums[:, places[name]] = values
        for name in ("weight", "-weight"):
            maxima[:, self.plan.maxima.position(correction, name)] /= factor


def normalization_factor(total_excess: Float64s, count: Float64s) -> Float64s:
    return normalization_divisor(1 + total_excess / np.maximum(count, 1))


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


def group_by_value(
    cells: Sequence[tuple[LabelValue, ...]], by: Sequence[str]
) -> Iterator[tuple[str, LabelValue, Ints]]:
    for place, column in enumerate(by):
        chosen: dict[LabelValue, list[int]] = {}
        for number, values in enumerate(cells):
            chosen.setdefault(values[place], []).append(number)
        for value, numbers in chosen.items():
            yield column, value, np.array(numbers)


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
