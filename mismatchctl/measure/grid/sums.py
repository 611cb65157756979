"""Sums of each family of corrections along the grid: reduce batches, finish groups, evaluate metrics."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
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
from mismatchctl.measure.grid.columns import block_columns
from mismatchctl.measure.grid.thresholds import (
    EMPTY_COLUMN,
    Arrays,
    BlockColumns,
    BlockParts,
    CorrectionFamily,
    GridLayout,
    as_slice,
)
from mismatchctl.measure.groups import GroupScopes, normalize_columns, table_numbers
from mismatchctl.measure.metrics.evaluation import evaluate_metric, formula_slopes
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.reduction import CellKey, MeasurePlan, correction_ratios, gather_cells, scope_hashes

BLOCK_TOKENS, BLOCK_VALUES = 1 << 18, 1 << 17
"""Blocks are larger than elsewhere, because a block causes many calls per family. Values per point fit the cache."""
FEW_SEQUENCES, MOST_VALUES = 1024, 1 << 20
"""Minimum number of sequences per block, and the limit of memory: 8 MiB per column."""


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
    factor = clusters / (clusters - 1) if clusters > 1 else np.nan
    with np.errstate(all="ignore"):
        for metric in metrics:
            influence: Any = sum(rows[name] * slope for name, slope in formula_slopes(metric, totals.__getitem__))
            found[metric.key] = np.broadcast_to(np.sqrt((influence**2).sum(axis=0) * factor), grid).ravel()
    return found


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
        first, *more = rows = self.rows + other.rows
        if 2 * sum(map(len, more)) > len(first):
            rows = (merge_tables(rows, GROUP_CAP),)
        return FamilySums(self.totals + other.totals, rows)


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


def reduce_families(
    batch: TokenBatch, run: str, plan: MeasurePlan, families: Sequence[CorrectionFamily]
) -> FamilyCells:
    """Sum each family over the groups of a batch. Empty sequences contribute zero."""
    batch, names, bounds = gather_cells(batch, run, plan.by)
    cells, scopes = np.repeat(np.arange(len(names)), np.diff(bounds)), scope_hashes(batch, plan)
    of_all, some = BatchRows(cells, np.zeros_like(scopes), scopes), batch.segments.nonempty
    empty, all_rows = np.bincount(of_all.rows[~some], minlength=len(of_all)), of_all.rows[some]
    if not some.all():
        batch, cells, scopes = batch.take(np.flatnonzero(some)), cells[some], scopes[some]
    of_clusters = BatchRows(cells, cluster_hashes(batch), scopes)
    tables = [
        (_FamilyTable(of_all, layouts.totals, layouts.maxima), _FamilyTable(of_clusters, layouts.rows))
        for layouts in (family.layouts for family in families)
    ]
    width = max((64, *(family.width for family in families)))
    sequences = max(BLOCK_VALUES // width, min(FEW_SEQUENCES, MOST_VALUES // width), 1)
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        ratios = correction_ratios(block, plan)
        parts, rows = BlockParts.from_rows(all_rows[start : start + len(block)])
        clusters, of = BlockParts.from_rows(of_clusters.rows[start : start + len(block)])
        within = BlockParts(parts.index[clusters.order[clusters.firsts]], parts.count)
        for family, (totals, by_cluster) in zip(families, tables, strict=True):
            made, trivial = block_columns(family, ratios, block, parts), (-1, *(1,) * len(family.grid))
            made.fixed["tokens"] = block.segments.sizes.reshape(trivial)
            made.fixed["sequences"] = block.segments.nonempty.astype(np.float64).reshape(trivial)
            own = made.sum_by(family.layouts.rows.shapes, clusters)
            by_cluster.add(of, own, made)
            totals.add(rows, made.totals(own, within), made)
    found: list[list[FamilySums]] = [[] for _ in names]
    for totals, by_cluster in tables:
        totals.layout.arrays(totals.sums)[EMPTY_COLUMN].T[...] = empty
        for cell, whole, table in zip(found, totals.split(len(names)), by_cluster.split(len(names)), strict=True):
            cell.append(FamilySums(whole, (table,)))
    return dict(zip(names, found, strict=True))


_NO_COLUMNS = GridLayout({})


class _FamilyTable:
    """Sums of a family by the rows of a batch."""

    def __init__(self, rows: BatchRows, layout: GridLayout, maxima: GridLayout = _NO_COLUMNS) -> None:
        self._rows, self.layout, self._largest = rows, layout, maxima
        self.sums = np.zeros((len(rows), layout.width))
        self._maxima = np.full((len(rows), maxima.width), -np.inf)

    def add(self, rows: Ints, sums: Arrays, block: BlockColumns) -> None:
        where = as_slice(rows)
        for name, known in self.layout.arrays(self.sums).items():
            if name != EMPTY_COLUMN:
                known[where] += block.expand(name, sums)
        for name, known in self._largest.arrays(self._maxima).items():
            known[where] = np.maximum(known[where], block.maxima[name])

    def split(self, cells: int) -> Iterator[ClusterTable]:
        return self._rows.split(cells, self.sums, self._maxima)


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
        chosen, rows = np.flatnonzero(np.isin(self.cells, cells)), self.rows
        return ClosedFamily(
            {name: values[cells] for name, values in self.totals.items()},
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

    def __init__(self, family: CorrectionFamily, groups: Sequence[FamilySums]) -> None:
        self.family, tables = family, [group.totals for group in groups]
        self._scopes, rule, self._factors = GroupScopes(tables), family.correction.weight, None
        if rule is not None and rule.normalize != "none":
            self._factors = self._scopes.factors(rule, family.layouts.totals.stack([table.sums for table in tables]))

    def close(self, cells: Sequence[FamilySums], groups: Ints) -> ClosedFamily:
        """Normalize the sums of cells [G] of some groups [G], and count their clusters."""
        layouts, count, tables = self.family.layouts, len(cells), [cell.totals for cell in cells]
        of = table_numbers(tables)
        columns, factors = self._normalized(layouts.totals, tables, groups[of])
        maxima = layouts.maxima.stack([table.maxima for table in tables])
        if factors is not None:
            maxima |= {name: maxima[name] / factors for name in ("weight", "-weight")}
        columns["factor"] = columns["tokens"] * (1.0 if factors is None else factors)
        totals = {name: _sum_rows(values, of, count) for name, values in columns.items()}
        folded = [cell.merged for cell in cells]
        rows, cell_of = self._rows(folded, groups)
        columns = layouts.rows.arrays(rows.sums)
        told_apart = np.array([not table.is_folded for table in folded])
        counted = (columns["tokens"].reshape(len(rows)) > 0) & told_apart[cell_of]
        emptied = counted.reshape(columns["tokens"].shape) & (columns["kept"] == 0)
        totals["clusters"] = np.bincount(cell_of, counted, count).reshape(totals["tokens"].shape)
        totals["empty_cluster"] = _sum_rows(emptied.astype(np.float64), cell_of, count)
        largest = {name: np.full((count, *values.shape[1:]), -np.inf) for name, values in maxima.items()}
        for name, values in maxima.items():
            np.maximum.at(largest[name], of, values)
        return ClosedFamily(totals, largest, rows, cell_of, counted, emptied)

    def _rows(self, tables: Sequence[ClusterTable], groups: Ints) -> tuple[ClusterTable, Ints]:
        """Normalize rows by group, cluster and micro-batch, and merge micro-batches."""
        clusters, scopes = (np.concatenate([getattr(own, name) for own in tables]) for name in ("clusters", "scopes"))
        cells = table_numbers(tables)
        columns, factors = self._normalized(self.family.layouts.rows, tables, groups[cells])
        sums = tables[0].sums if len(tables) == 1 else np.concatenate([table.sums for table in tables])
        if factors is not None:
            sums = np.concatenate([values.reshape(len(sums), -1) for values in columns.values()], axis=1)
        if scopes.any():  # the rows of a cluster's micro-batches are adjacent
            first = np.flatnonzero(np.append(True, (clusters[1:] != clusters[:-1]) | (cells[1:] != cells[:-1])))
            sums, clusters, cells = add_rows(sums, first), clusters[first], cells[first]
        folded = any(table.is_folded for table in tables)
        return ClusterTable(clusters, np.zeros_like(clusters), sums, np.zeros((len(clusters), 0)), folded), cells

    def _normalized(
        self, layout: GridLayout, tables: Sequence[ClusterTable], groups: Ints
    ) -> tuple[Arrays, Float64s | None]:
        """Return the columns of tables, and the divisors of the weights in each row if weights are normalized."""
        columns = layout.stack([table.sums for table in tables])
        if self._factors is None:
            return columns, None
        scopes = np.concatenate([table.scopes for table in tables])
        factors: Float64s = self._factors[self._scopes.find(groups, scopes)]
        return columns | normalize_columns(columns, factors, self.family.correction), factors


def _sum_rows(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """Sum rows by their index `of` [count, ...]. The rows are sorted."""
    firsts = np.flatnonzero(np.append(True, np.diff(of) != 0)[: len(of)])
    if len(firsts) == len(of) == count:
        return values
    found = np.zeros((count, *values.shape[1:]))
    if len(of):
        found[of[firsts]] = add_rows(values, firsts)
    return found
