"""Groups (training steps): collect their sums, and normalize weights once all tokens of a group are in."""

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
from mismatchctl.measure.columns import CLUSTERS_COLUMN, EMPTY_CLUSTER_COLUMN, FACTOR_COLUMN, MISMATCH_NAME
from mismatchctl.measure.reduction import BreakdownValues, MeasurePlan, check_breakdown_values
from mismatchctl.measure.sums import CellSums, PairSums

_EXCESS_COUNTS = {"weight_excess": "tokens", "kept_excess": "kept"}  # sums of w - 1, and over how many tokens
_LINEAR_COLUMNS = ("sequence_weight", "loss", "loss_mean", "gradient_product")
"""In the weights; losses only where the dump has them."""
_LOSS_COLUMNS = ("loss", "loss_mean", "gradient_product", "squared_gradient")
_CANCELLATION_LIMIT = 1e-14  # a sum of squares about a mean, below this share of that about 1, is rounding
_SQUARED_COLUMNS = ("squared_sequence_weight", "squared_kept_weight", "squared_gradient")


@dataclass(frozen=True)
class ClosedSums:
    """Closed sums of some cells, side by side.

    Attributes:
        clusters: hash of the cluster of each row [R], ascending within a cell.
        sums, maxima: columns of `closed_axis` and of the plan's maxima [R, ...].
        starts: the first row of each cell [G].
        is_folded: whether a row of the cell may stand for several clusters [G].
        pairs: histograms and tails of each cell [G].
    """

    clusters: Hashes
    sums: Float64s
    maxima: Float64s
    starts: Ints
    is_folded: Bools
    pairs: Sequence[Mapping[str, PairSums]]

    def __len__(self) -> int:
        return len(self.starts)

    @property
    def sizes(self) -> Ints:
        """Rows of each cell [G]."""
        return np.diff(np.append(self.starts, len(self.clusters)))

    @classmethod
    def one(cls, cell: CellSums, *, by_prompt: bool) -> ClosedSums:
        """A cell of many steps that is closed already; a prompt is one cluster of all of them."""
        table = cell.table.of_scope(np.uint64(0)) if by_prompt else cell.table
        folded = np.array([table.is_folded])
        return cls(table.clusters, table.sums, table.maxima, np.zeros(1, np.int64), folded, [cell.pairs])

    def merged(self, salts: Hashes) -> CellSums:
        """All cells as one, the clusters of each kept apart by its salt, in the order given."""
        folded = bool(self.is_folded.any())
        scopes = np.repeat(salts, self.sizes)
        names = dict.fromkeys(name for own in self.pairs for name in own)
        pairs = {name: PairSums.together([own[name] for own in self.pairs if name in own]) for name in names}
        return CellSums(ClusterTable.of(self.clusters, scopes, self.sums, self.maxima, folded), pairs)

    def counted(self, prompts: PromptCounter, places: Ints) -> ClosedSums:
        """The same with what each row adds to the counts of a run's prompts in place of the counts of its step.

        Args:
            prompts: those before; they are added to.
            places: of the columns `clusters` and `empty_cluster` of each correction [1 + corrections].
        """
        sums, first, rest = self.sums.copy(order="K"), int(places[0]), places[1:]
        for start, size in zip(self.starts.tolist(), self.sizes.tolist(), strict=True):
            rows = slice(start, start + size)
            new, emptied = prompts.add(self.clusters[rows], sums[rows, first] > 0, sums[rows][:, rest] > 0)
            sums[rows, first] = new
            sums[start : start + size, rest] = emptied
        return replace(self, sums=sums)

    def take(self, cells: Ints) -> ClosedSums:
        """Some of the cells, in the order given."""
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
    """The micro-batches of groups: which of them occur in which."""

    def __init__(self, groups: Sequence[ClusterTable]) -> None:
        scopes = np.concatenate([table.scopes for table in groups])
        within = table_numbers(groups)
        self._scopes = np.unique(scopes)
        self._keys, self._rows = np.unique(self._key(within, scopes), return_inverse=True)
        self._groups = self._keys // max(len(self._scopes), 1)

    def __len__(self) -> int:
        return len(self._keys)

    def of(self, group: int) -> Iterator[tuple[int, int]]:
        """The number of each micro-batch of a group, and its hash."""
        for number in np.flatnonzero(self._groups == group).tolist():
            yield number, int(self._scopes[self._keys[number] % len(self._scopes)])

    def at(self, groups: Ints, scopes: Hashes) -> Ints:
        """The number of the micro-batch of each row, given its group."""
        return np.searchsorted(self._keys, self._key(groups, scopes))

    def _key(self, groups: Ints, scopes: Hashes) -> Ints:
        return groups * len(self._scopes) + np.searchsorted(self._scopes, scopes)

    def factors(self, rule: Weight, columns: Mapping[str, Float64s]) -> Float64s:
        """What the weights of each micro-batch are divided by, from columns of all groups' rows [rows, ...]."""
        excess, number = ("weight_excess", "tokens") if rule.normalize == "token" else ("mean_excess", "sequences")
        apart = rule.normalize_over == "micro_batch"
        where = self._rows if apart else self._groups[self._rows]
        factor = normalization_factor(*(_sum_by_index(columns[name], where) for name in (excess, number)))
        return factor if apart else factor[self._groups]


def table_numbers(tables: Sequence[ClusterTable]) -> Ints:
    """Which table each row of all of them is of."""
    return np.repeat(np.arange(len(tables)), [len(table) for table in tables])


def _sum_by_index(values: Float64s, where: Ints) -> Float64s:
    """Sums of values [rows, ...] by where they belong."""
    found = np.zeros((where.max(initial=-1) + 1, *values.shape[1:]))
    np.add.at(found, where, values)
    return found


class SumsCloser:
    """Turns raw sums of groups into closed ones, many at once: factors are the group's, whatever part is closed."""

    def __init__(self, groups: Sequence[ClusterTable], plan: MeasurePlan) -> None:
        self.plan = plan
        self._scopes = GroupScopes(groups)
        self._factors = self._normalization(groups)

    def factors(self, group: int) -> Iterator[tuple[int, tuple[float, ...]]]:
        """Each micro-batch of a group (a single 0 where they do not matter), and the factor of each correction."""
        for number, scope in self._scopes.of(group):
            yield scope, tuple(self._factors[number].tolist())

    def close(self, cells: Sequence[CellSums], groups: Ints) -> ClosedSums:
        """Parts of groups [G], normalized, one row per cluster, with the closed columns appended."""
        tables = [cell.table for cell in cells]
        clusters = np.concatenate([table.clusters for table in tables])
        maxima = np.concatenate([table.maxima for table in tables])
        width, corrections = len(self.plan.sums), len(self.plan.corrections)
        sums = np.zeros((width + 2 * corrections + 1, len(clusters))).T  # of closed_axis: what is not summed is behind
        np.concatenate([table.sums for table in tables], out=sums[:, :width])
        scopes = np.concatenate([table.scopes for table in tables])
        cell = table_numbers(tables)
        factors = self._factors[self._scopes.at(groups[cell], scopes)]
        for index in range(corrections):
            factor = factors[:, index]
            self._normalize(sums, maxima, index, factor)
            sums[:, width + index] = factor * sums[:, self.plan.sums.place(index, "tokens")]
        first = np.append(True, (clusters[1:] != clusters[:-1]) | (cell[1:] != cell[:-1]))
        if not first.all():  # of one cluster, the rows of all micro-batches lie together
            sums, maxima = merge_rows(sums, maxima, np.arange(len(first)), first)
            clusters, cell = clusters[first], cell[first]
        folded = np.array([table.is_folded for table in tables])
        told_apart = ~folded[cell]  # else clusters are not counted at all, rather than wrongly
        counted = (sums[:, self.plan.sums.place(MISMATCH_NAME, "tokens")] > 0).astype(np.float64) * told_apart
        sums[:, width + corrections] = counted
        for index in range(corrections):
            kept = sums[:, self.plan.sums.place(index, "kept")]
            sums[:, width + corrections + 1 + index] = counted * (kept == 0)
        starts = np.searchsorted(cell, np.arange(len(tables)))
        return ClosedSums(clusters, sums, maxima, starts, folded, [own.pairs for own in cells])

    def _normalization(self, groups: Sequence[ClusterTable]) -> Float64s:
        """The factor of each correction in each micro-batch: [keys, corrections]; 1 where nothing is normalized."""
        factors = np.ones((len(self._scopes), len(self.plan.corrections)))
        for index, correction in enumerate(self.plan.corrections):
            rule = correction.weight
            if rule is not None and rule.normalize != "none":
                names = ("weight_excess", "tokens", "mean_excess", "sequences")
                places = {name: self.plan.sums.place(index, name) for name in names}
                columns = {
                    name: np.concatenate([table.sums[:, place] for table in groups]) for name, place in places.items()
                }
                factors[:, index] = self._scopes.factors(rule, columns)
        return factors

    def _normalize(self, sums: Float64s, maxima: Float64s, correction: int, factor: Float64s) -> None:
        """Divide the weights of each row by its factor, in place."""
        axis = self.plan.sums
        places = axis.own(correction)
        columns = {name: sums[:, place] for name, place in places.items()}
        columns["tokens"] = sums[:, axis.place(correction, "tokens")]
        for name, values in normalize_columns(columns, factor, self.plan.corrections[correction]).items():
            sums[:, places[name]] = values
        for name in ("weight", "-weight"):
            maxima[:, self.plan.maxima.place(correction, name)] /= factor


def normalization_factor(total_excess: Float64s, count: Float64s) -> Float64s:
    """What weights are divided by, from a total of w - 1."""
    return normalization_divisor(1 + total_excess / np.maximum(count, 1))


def normalize_columns(columns: Mapping[str, Float64s], factor: Float64s, correction: Correction) -> dict[str, Float64s]:
    """The columns of one correction that change when its weights w are divided by a factor F.

    Args:
        columns: sums of w - 1 and (w - 1)^2, of w and w^2, with `tokens` and `kept`; others stay as they are.
        factor: F, shaped so that it can be broadcast against each column.
        correction: whose loss may not take the weights.
    """
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
    """The columns of a closed table that add."""
    numbers = range(len(plan.corrections))
    return TableAxis(
        (
            *plan.sums.names,
            *((index, FACTOR_COLUMN.name) for index in numbers),
            (MISMATCH_NAME, CLUSTERS_COLUMN.name),
            *((index, EMPTY_CLUSTER_COLUMN.name) for index in numbers),
        )
    )


CellT = TypeVar("CellT")
GroupCells = dict[tuple[LabelValue, ...], CellT]
"""The parts of a group, by one value per `--by` column."""


def group_by_value(
    cells: Sequence[tuple[LabelValue, ...]], by: Sequence[str]
) -> Iterator[tuple[str, LabelValue, Ints]]:
    """Each value of each column to break down by, and which of the cells have it."""
    for place, column in enumerate(by):
        chosen: dict[LabelValue, list[int]] = {}
        for number, values in enumerate(cells):
            chosen.setdefault(values[place], []).append(number)
        for value, numbers in chosen.items():
            yield column, value, np.array(numbers)


class GroupMerger(ABC, Generic[CellT]):
    """Adds up the cells of groups in the order of the input; memory is that of open groups, and of some complete ones.

    A subclass says what a cell is.

    Attributes:
        at_once: sums that are closed at once, about: their formulas are evaluated together.
    """

    at_once: ClassVar[int] = 1 << 22

    def __init__(self, by: Sequence[str]) -> None:
        """Nothing yet, to be broken down by some columns."""
        self._by, self._breakdown = by, BreakdownValues(by)
        self._open: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._complete: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._held = 0

    @abstractmethod
    def _size(self, cell: CellT) -> int:
        """How many numbers a cell holds, about."""

    @abstractmethod
    def _both(self, cell: CellT, more: CellT) -> CellT:
        """Two parts of a cell as one."""

    @abstractmethod
    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[CellT]]) -> None:
        """Take a run, the steps of some of its complete groups, and their cells, ordered by their values as text."""

    def merge(self, run: str, step: LabelValue, values: tuple[LabelValue, ...], cell: CellT) -> None:
        """Add to a cell of a group, which grows again if it was complete.

        Raises:
            ConfigError: the columns to break down by have too many values.
        """
        key = run, step
        if key not in self._open:
            self._open[key] = self._complete.pop(key, {})
            self._held -= self._size_of(self._open[key])
        cells = self._open[key]
        cells[values] = self._both(cells[values], cell) if values in cells else cell
        check_breakdown_values(self._by, len(cells))
        self._breakdown.add(run, values)

    def close(self, may_grow: Callable[[str, LabelValue], bool]) -> None:
        """Close groups that cannot grow any more, once there are enough of them."""
        for key in [key for key in self._open if not may_grow(*key)]:
            cells = self._open.pop(key)
            size = self._size_of(cells)
            if self._held + size > self.at_once:
                self._close_complete()
            self._complete[key] = cells
            self._held += size

    def finish(self) -> None:
        """Close all groups: nothing more comes."""
        self.close(lambda run, step: False)
        self._close_complete()

    def _close_complete(self) -> None:
        of_run: dict[str, dict[LabelValue, GroupCells[CellT]]] = {}
        for (run, step), cells in self._complete.items():
            of_run.setdefault(run, {})[step] = {values: cells[values] for values in sorted(cells, key=str)}
        self._complete, self._held = {}, 0
        for run, steps in of_run.items():
            self._close_groups(run, list(steps), list(steps.values()))

    def _size_of(self, cells: GroupCells[CellT]) -> int:
        return sum(map(self._size, cells.values()))
