"""Sums of each family of corrections along the grid: reduce batches, finish groups, evaluate metrics."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.measure.cluster_table import (
    GROUP_CAP,
    OVERALL_CAP,
    BatchRows,
    ClusterTable,
    Hashes,
    PromptCounter,
    add_rows,
    cluster_hashes,
    mix_hashes,
)
from mismatchctl.measure.columns import list_columns
from mismatchctl.measure.grid.columns import block_columns
from mismatchctl.measure.grid.thresholds import (
    Arrays,
    BlockColumns,
    BlockParts,
    CorrectionFamily,
    as_slice,
)
from mismatchctl.measure.groups import GroupScopes, normalize_columns, table_numbers
from mismatchctl.measure.metrics.evaluation import evaluate_metric, formula_slopes
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.reduction import (
    CellKey,
    MeasurePlan,
    correction_ratios,
    gather_cells,
    scope_hashes,
)


def evaluate_metrics(
    metrics: Iterable[Metric], totals: Arrays, maxima: Arrays, grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Evaluate each metric in each cell at each point of a grid [cells, points]. NaN if undefined."""
    cells = len(totals["tokens"])
    with np.errstate(all="ignore"):
        return {
            metric.key: evaluate_metric(metric, totals, maxima, (cells, *grid)).reshape(cells, -1) for metric in metrics
        }


def standard_errors(
    metrics: Iterable[Metric], totals: Arrays, rows: Arrays, grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Compute standard errors by the delta method, from the rows of clusters and the totals."""
    clusters, found = int(np.count_nonzero(rows["tokens"])), {}
    with np.errstate(all="ignore"):
        for metric in metrics:
            influence: Any = sum(rows[name] * slope for name, slope in formula_slopes(metric, totals.__getitem__))
            factor = clusters / (clusters - 1) if clusters > 1 else np.nan
            found[metric.key] = np.broadcast_to(np.sqrt((influence**2).sum(axis=0) * factor), grid).ravel()
    return found


SHARED_COLUMNS = ("tokens", "sequences")
"""Columns of every table that corrections do not change."""
EMPTY_COLUMN = "empty_sequences"
"""Column with the number of sequences without tokens, in the tables of totals."""
CLUSTER_COLUMNS = (
    "kept",
    "touched",
    "weight_excess",
    "kept_excess",
    "squared_kept_weight",
    "sequence_weight",
    "squared_sequence_weight",
)
"""Columns that are also stored by cluster, for standard errors of the main metrics and for empty prompts."""
BLOCK_TOKENS, BLOCK_VALUES = 1 << 18, 1 << 17
"""Blocks are larger than elsewhere, because a block causes many calls per family. Values per point fit the cache."""
FEW_SEQUENCES, MOST_VALUES = 1024, 1 << 20
"""Minimum number of sequences per block, and the limit of memory: 8 MiB per column."""


class GridLayout:
    """Positions of the arrays of a grid in the columns of a table."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())]).tolist()
        self.width = ends[-1]
        self._places = {name: slice(*place) for name, place in zip(shapes, pairwise(ends), strict=True)}

    def arrays(self, table: Float64s) -> Arrays:
        return {name: table[:, self._places[name]].reshape(len(table), *shape) for name, shape in self.shapes.items()}


@dataclass(frozen=True)
class SweepPlan:
    """The settings of one pass: the points of all studies, divided into families."""

    base: MeasurePlan  # settings shared with `analyze`
    families: tuple[CorrectionFamily, ...]  # measured in every cell

    def width(self, family: CorrectionFamily) -> int:
        """Return the approximate number of values per sequence in each column of a family."""
        points = math.prod(family.grid)
        return max(points, family.cells) if family.is_binned else points

    def most_bytes(self, sequences: int) -> int:
        """Return the maximum memory of cluster tables for this number of sequences."""
        columns: int = sum(layouts.rows.width for layouts in self.layouts)
        return 8 * columns * min(sequences, GROUP_CAP + 2 * OVERALL_CAP)

    @cached_property
    def layouts(self) -> tuple[FamilyLayouts, ...]:
        return tuple(FamilyLayouts.build(family) for family in self.families)


@dataclass(frozen=True)
class FamilyLayouts:
    """Layouts of the tables of a family: sums, maxima, and columns by cluster."""

    totals: GridLayout
    maxima: GridLayout
    rows: GridLayout

    @classmethod
    def build(cls, family: CorrectionFamily) -> FamilyLayouts:
        shapes = {"sum": dict.fromkeys((*SHARED_COLUMNS, EMPTY_COLUMN), (1,) * len(family.grid))}
        for column in list_columns(family.correction, losses=False):
            shapes.setdefault(column.merge, {})[column.name] = family.shape(column.depends_on)
        rows = {name: shapes["sum"][name] for name in (*SHARED_COLUMNS, *CLUSTER_COLUMNS)}
        return cls(GridLayout(shapes["sum"]), GridLayout(shapes["largest"]), GridLayout(rows))


@dataclass(frozen=True)
class FamilySums:
    """Sums of one family in one group."""

    totals: ClusterTable  # all columns: one row per micro-batch if weights are normalized, else one
    rows: tuple[ClusterTable, ...]  # columns stored by cluster, in parts that are not merged yet

    @property
    def merged(self) -> ClusterTable:
        return self.rows[0] if len(self.rows) == 1 else merge_tables(self.rows, GROUP_CAP)

    @property
    def size(self) -> int:
        return self.totals.sums.size + sum(table.sums.size for table in self.rows)

    def __add__(self, other: FamilySums) -> FamilySums:
        """Add two sums. To save time, rows are merged only if the new parts are large."""
        totals = self.totals + other.totals
        first, *more = rows = self.rows + other.rows
        if 2 * sum(map(len, more)) <= len(first):
            return replace(self, totals=totals, rows=rows)
        return replace(self, totals=totals, rows=(merge_tables(rows, GROUP_CAP),))


def merge_tables(tables: Sequence[ClusterTable], cap: int) -> ClusterTable:
    """Merge tables in order, without a copy.

    If there are more than `cap` clusters, clusters are merged by their hash.
    """
    clusters, scopes = (np.concatenate([getattr(table, name) for table in tables]) for name in ("clusters", "scopes"))
    is_folded = any(table.is_folded for table in tables) or len(np.unique(clusters)) > cap
    if is_folded:
        clusters = clusters % np.uint64(cap)
    found = BatchRows(np.zeros(len(clusters), np.int64), clusters, scopes, cap)
    sums = np.zeros((len(found), tables[0].sums.shape[1]))
    for row, values in zip(found.rows.tolist(), chain.from_iterable(table.sums for table in tables), strict=True):
        sums[row] += values
    (made,) = found.split(1, sums, np.zeros((len(found), 0)))
    return replace(made, is_folded=is_folded)


FamilyCells = dict[tuple[str, CellKey], list[FamilySums]]
"""Sums of each family, by run and cell."""


def add_families(some: Sequence[FamilySums], more: Sequence[FamilySums]) -> list[FamilySums]:
    return [a + b for a, b in zip(some, more, strict=True)]


def reduce_families(batch: TokenBatch, run: str, plan: SweepPlan) -> FamilyCells:
    batch, names, bounds = gather_cells(batch, run, plan.base.by)
    reduced = _reduce_cells(batch, np.repeat(np.arange(len(names)), np.diff(bounds)), len(names), plan)
    return dict(zip(names, map(list, zip(*reduced, strict=True)), strict=True))


def _reduce_cells(batch: TokenBatch, cells: Ints, count: int, plan: SweepPlan) -> list[list[FamilySums]]:
    """Sum each family over its groups. Empty sequences contribute zero."""
    some, scopes = batch.segments.nonempty, scope_hashes(batch, plan.base)
    of_all = BatchRows(cells, np.zeros_like(scopes), scopes)
    empty, all_rows = np.bincount(of_all.rows[~some], minlength=len(of_all)), of_all.rows[some]
    if not some.all():
        batch, cells, scopes = batch.take(np.flatnonzero(some)), cells[some], scopes[some]
    of_clusters = BatchRows(cells, cluster_hashes(batch), scopes)
    tables = [
        (_FamilyTable(of_all, layouts.totals, layouts.maxima, empty), _FamilyTable(of_clusters, layouts.rows))
        for layouts in plan.layouts
    ]
    width = max((64, *(plan.width(family) for family in plan.families)))
    sequences = max(BLOCK_VALUES // width, min(FEW_SEQUENCES, MOST_VALUES // width), 1)
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        ratios = correction_ratios(block, plan.base)
        parts, rows = BlockParts.from_rows(all_rows[start : start + len(block)])
        clusters, of = BlockParts.from_rows(of_clusters.rows[start : start + len(block)])
        within = BlockParts(parts.index[clusters.order[clusters.firsts]], parts.count)
        for family, layouts, (totals, by_cluster) in zip(plan.families, plan.layouts, tables, strict=True):
            made, trivial = block_columns(family, ratios, block, parts), (-1, *(1,) * len(family.grid))
            made.fixed["tokens"] = block.segments.sizes.reshape(trivial)
            made.fixed["sequences"] = block.segments.nonempty.astype(np.float64).reshape(trivial)
            own = made.sum_by(layouts.rows.shapes, clusters)
            by_cluster.add(of, own, made)
            totals.add(rows, made.totals(own, within), made)
    return [
        [FamilySums(whole, (rows,)) for whole, rows in zip(totals.split(count), by_cluster.split(count), strict=True)]
        for totals, by_cluster in tables
    ]


class _FamilyTable:
    """Sums of a family by the rows of a batch, and the number of `empty` sequences in each row."""

    def __init__(
        self, rows: BatchRows, layout: GridLayout, maxima: GridLayout | None = None, empty: Ints | None = None
    ) -> None:
        self._rows, self._layout, self._largest = rows, layout, maxima
        self._sums = np.zeros((len(rows), layout.width))
        self._maxima = np.full((len(rows), 0 if maxima is None else maxima.width), -np.inf)
        if empty is not None:
            layout.arrays(self._sums)[EMPTY_COLUMN].T[...] = empty

    def add(self, rows: Ints, sums: Arrays, block: BlockColumns) -> None:
        where = as_slice(rows)
        for name, known in self._layout.arrays(self._sums).items():
            if name != EMPTY_COLUMN:
                known[where] += block.expand(name, sums)
        if self._largest is not None:
            for name, known in self._largest.arrays(self._maxima).items():
                known[where] = np.maximum(known[where], block.maxima[name])

    def split(self, cells: int) -> Iterator[ClusterTable]:
        return self._rows.split(cells, self._sums, self._maxima)


_BLOCK_VALUES = 1 << 17
"""Number of values that are processed together, so that the values and their temporaries fit the cache."""


@dataclass(frozen=True)
class ClosedFamily:
    """Final sums of one family in several groups."""

    # totals, maxima: columns along the grid [G, ...]
    totals: Arrays
    maxima: Arrays
    rows: ClusterTable  # columns stored by cluster, sorted by cell [R]
    cells: Ints  # cell of each row [R]
    counted: Bools  # True if the cluster of the row has a token and is exact [R]
    emptied: Bools  # True if the correction rejects the whole cluster, along the grid [R, ...]

    def take(self, cells: Ints) -> ClosedFamily:
        chosen = np.flatnonzero(np.isin(self.cells, cells))
        rows, totals = self.rows, {name: values[cells] for name, values in self.totals.items()}
        return ClosedFamily(
            totals,
            {name: values[cells] for name, values in self.maxima.items()},
            replace(rows, clusters=rows.clusters[chosen], scopes=rows.scopes[chosen], sums=rows.sums[chosen]),
            np.searchsorted(cells, self.cells[chosen]),
            self.counted[chosen],
            self.emptied[chosen],
        )


@dataclass
class FamilyRunSums:
    """Final sums of one family over the groups of a run, or of one value of a column."""

    # totals, maxima: columns along the grid [1, ...]
    totals: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)
    rows: list[ClusterTable] = field(default_factory=list)  # columns stored by cluster, in parts
    prompts: PromptCounter | None = None  # prompts so far, if the dump has prompt ids

    def add(self, closed: ClosedFamily, salts: Hashes) -> None:
        """Add groups [G]. Clusters of different groups stay separate, unless they are prompts."""
        counts, rows = {}, closed.rows
        if self.prompts is None:
            rows = replace(rows, clusters=mix_hashes(rows.clusters, salts[closed.cells]))
        else:
            counts = self._prompts(self.prompts, closed)
        for name, sums in (closed.totals | counts).items():
            known = [self.totals[name], sums] if name in self.totals else [sums]
            self.totals[name] = np.concatenate(known).sum(axis=0, keepdims=True)
        for name, largest in closed.maxima.items():
            known = [self.maxima[name], largest] if name in self.maxima else [largest]
            self.maxima[name] = np.concatenate(known).max(axis=0, keepdims=True)
        self.rows.append(rows)
        if sum(map(len, self.rows)) > 2 * OVERALL_CAP:
            self.rows = [merge_tables(self.rows, OVERALL_CAP)]

    def _prompts(self, known: PromptCounter, closed: ClosedFamily) -> Arrays:
        """Count each prompt once over all groups."""
        found: dict[str, list[NDArray[Any]]] = {"clusters": [], "empty_cluster": []}
        for cell in range(len(closed.totals["tokens"])):
            own = np.flatnonzero(closed.cells == cell)
            fresh, emptied = known.add(closed.rows.clusters[own], closed.counted[own], closed.emptied[own])
            found["clusters"].append(fresh.sum(axis=0).reshape(closed.totals["clusters"].shape[1:]))
            found["empty_cluster"].append(emptied.sum(axis=0))
        return {name: np.stack(values) for name, values in found.items()}


class FamilyCloser:
    """Computes the final sums of many groups at once. Normalization factors belong to whole groups."""

    def __init__(self, family: CorrectionFamily, layouts: FamilyLayouts, groups: Sequence[ClusterTable]) -> None:
        self.family, self.layouts = family, layouts
        self._scopes = GroupScopes(groups)
        rule, self._factors = family.correction.weight, None
        if rule is not None and rule.normalize != "none":
            self._factors = self._scopes.factors(rule, layouts.totals.arrays(_stack_rows([t.sums for t in groups])))

    def close(self, cells: Sequence[FamilySums], groups: Ints, *, keep: bool) -> ClosedFamily:
        """Normalize the sums of groups [G] and count their clusters.

        Rows are changed in place unless `keep` is set.
        """
        layouts, count = self.layouts, len(cells)
        tables = [cell.totals for cell in cells]
        of = table_numbers(tables)
        factors: Any = self._factors_of(groups[of], tables)
        columns = layouts.totals.arrays(_stack_rows([table.sums for table in tables]))
        maxima = layouts.maxima.arrays(_stack_rows([table.maxima for table in tables]))
        if factors is not None:
            columns |= normalize_columns(columns, factors, self.family.correction)
            maxima |= {name: maxima[name] / factors for name in ("weight", "-weight")}
        columns["factor"] = columns["tokens"] * (1.0 if factors is None else factors)
        totals = {name: _sum_rows(values, of, count) for name, values in columns.items()}
        folded = [cell.merged for cell in cells]
        rows, cell_of = self._rows(folded, groups, keep=keep)
        columns = layouts.rows.arrays(rows.sums)
        told_apart = np.array([not table.is_folded for table in folded])
        counted = (columns["tokens"].reshape(len(rows)) > 0) & told_apart[cell_of]
        emptied = counted.reshape(columns["tokens"].shape) & (columns["kept"] == 0)
        totals["clusters"] = np.bincount(cell_of, counted, count).reshape(totals["tokens"].shape)
        totals["empty_cluster"] = _sum_rows(emptied.astype(np.float64), cell_of, count)
        largest = {name: _largest_rows(values, of, count) for name, values in maxima.items()}
        return ClosedFamily(totals, largest, rows, cell_of, counted, emptied)

    def _factors_of(self, groups: Ints, tables: Sequence[ClusterTable]) -> Float64s | None:
        """Return the divisors of the weights in each row, if weights are normalized."""
        if self._factors is None:
            return None
        return self._factors[self._scopes.find(groups, np.concatenate([table.scopes for table in tables]))]

    def _rows(self, tables: Sequence[ClusterTable], groups: Ints, *, keep: bool) -> tuple[ClusterTable, Ints]:
        """Normalize rows by group, cluster and micro-batch, and merge micro-batches."""
        clusters, scopes = (np.concatenate([getattr(own, name) for own in tables]) for name in ("clusters", "scopes"))
        sums, cells = _stack_rows([table.sums for table in tables]), table_numbers(tables)
        factors = self._factors_of(groups[cells], tables)
        if factors is not None:
            sums = self._normalized(sums, factors, keep=keep)
        if scopes.any():  # the rows of a cluster's micro-batches are adjacent
            first = np.flatnonzero(np.append(True, (clusters[1:] != clusters[:-1]) | (cells[1:] != cells[:-1])))
            sums, clusters, cells = add_rows(sums, first), clusters[first], cells[first]
        folded = any(table.is_folded for table in tables)
        return ClusterTable(clusters, np.zeros_like(clusters), sums, np.zeros((len(clusters), 0)), folded), cells

    def _normalized(self, rows: Float64s, factors: Float64s, *, keep: bool) -> Float64s:
        layout = self.layouts.rows
        made = rows.copy() if keep or not rows.flags.writeable else rows  # arrays from another process may be read-only
        step = max(_BLOCK_VALUES // layout.width, 1)
        for own in (slice(start, start + step) for start in range(0, len(made), step)):
            columns = layout.arrays(made[own])
            for name, values in normalize_columns(columns, factors[own], self.family.correction).items():
                columns[name][...] = values
        return made


def _stack_rows(tables: Sequence[Float64s]) -> Float64s:
    """Concatenate rows. A single table is not copied, because rows can be wide."""
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


def _sum_rows(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """Sum rows by their index `of` [count, ...]. The rows are sorted."""
    firsts = np.flatnonzero(np.append(True, np.diff(of) != 0)[: len(of)])
    if len(firsts) == len(of) == count:
        return values
    found = np.zeros((count, *values.shape[1:]))
    if len(of):
        found[of[firsts]] = add_rows(values, firsts)
    return found


def _largest_rows(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """Return the maximum of rows by their index `of` [count, ...], or -inf."""
    found = np.full((count, *values.shape[1:]), -np.inf)
    np.maximum.at(found, of, values)
    return found
