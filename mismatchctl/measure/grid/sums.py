"""Sums of every family along the grid: reduce batches, close groups, evaluate metrics."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Bools, Float64s, Ints, TokenBatch
from mismatchctl.core.ratios import Ratios
from mismatchctl.measure.cluster_table import (
    GROUP_CAP,
    OVERALL_CAP,
    BatchRows,
    ClusterTable,
    Hashes,
    PromptCounter,
    add_rows,
    cluster_hashes,
    merge_parts,
    mix_hashes,
    step_hashes,
)
from mismatchctl.measure.columns import PLAIN_LOSS_NAMES, TokenLoss, compute_token_loss, plain_loss_columns
from mismatchctl.measure.grid.columns import NestedColumns, block_columns, nested_columns
from mismatchctl.measure.grid.thresholds import (
    Arrays,
    BlockColumns,
    BlockParts,
    CorrectionFamily,
    NestedGates,
    NestedWeights,
    as_slice,
)
from mismatchctl.measure.groups import GroupScopes, normalize_columns, table_numbers
from mismatchctl.measure.metrics.evaluation import IMAGINARY_STEP
from mismatchctl.measure.metrics.metric import Metric
from mismatchctl.measure.reduction import (
    CellKey,
    MeasurePlan,
    correction_ratios,
    gather_cells,
    scope_hashes,
    split_runs,
)


def metric_columns(metric: Metric) -> list[str]:
    """The columns that a metric is made of."""
    assert metric.formula is not None
    reader = RecordingColumns(defaultdict(lambda: np.ones(1)))
    metric.formula(reader)
    return [*reader.asked]


class RecordingColumns(Mapping[str, Any]):
    """Columns that note which of them were asked for."""

    def __init__(self, totals: Arrays) -> None:
        self.totals = totals
        self.asked: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.asked[name] = None
        return self.totals[name]

    def __iter__(self) -> Any:
        return iter(self.totals)

    def __len__(self) -> int:
        return len(self.totals)


class _PerturbedColumns(RecordingColumns):
    """Columns of which one moves along the imaginary axis."""

    def __init__(self, totals: Arrays, moved: str = "") -> None:
        super().__init__(totals)
        self.moved = moved

    def __getitem__(self, name: str) -> Any:
        found = super().__getitem__(name)
        return found + 1j * IMAGINARY_STEP if name == self.moved else found


def evaluate_metrics(
    metrics: Iterable[Metric], totals: Arrays, maxima: Arrays, grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Each metric in every cell at every point of a grid, flattened [cells, points]; NaN where it is undefined."""
    found, cells = {}, len(totals["tokens"])
    with np.errstate(all="ignore"):
        for metric in metrics:
            value: Any = np.nan
            if metric.formula is not None:
                value = metric.formula(totals)
            elif metric.extreme is not None:
                value = metric.extreme(maxima)
            found[metric.key] = np.broadcast_to(np.asarray(value, np.float64), (cells, *grid)).reshape(cells, -1)
    return found


def standard_errors(
    metrics: Iterable[Metric], totals: Arrays, rows: Mapping[str, NDArray[Any]], grid: tuple[int, ...]
) -> dict[str, Float64s]:
    """Standard errors by the delta method, from the scatter of the clusters' `rows` [R, ...] about totals [1, ...]."""
    clusters = int(np.count_nonzero(rows["tokens"]))
    if clusters < 2:
        return {metric.key: np.full(int(np.prod(grid)), np.nan) for metric in metrics}
    found = {}
    with np.errstate(all="ignore"):
        for metric in metrics:
            assert metric.formula is not None
            reader = _PerturbedColumns(totals)
            metric.formula(reader)
            moved: Any = 0.0
            for name in reader.asked:
                slope = np.imag(metric.formula(_PerturbedColumns(totals, name))) / IMAGINARY_STEP
                moved = moved + rows[name] * slope
            error = np.sqrt((moved**2).sum(axis=0) * clusters / (clusters - 1))
            found[metric.key] = np.broadcast_to(error, grid).ravel()
    return found


SHARED_COLUMNS = ("tokens", "sequences")
"""Columns that no correction changes and every row holds."""
CLUSTER_COLUMNS = (
    "kept",
    "touched",
    "weight_excess",
    "kept_excess",
    "squared_kept_weight",
    "sequence_weight",
    "squared_sequence_weight",
)
"""Columns that are kept by cluster too: standard errors of the main metrics, and prompts left empty, need them."""
BLOCK_TOKENS, BLOCK_VALUES = 1 << 18, 1 << 17
"""Larger than elsewhere: the calls that a block of every family takes cost more than what the cache would save. But
what its sequences have of every point should fit there."""
FEW_SEQUENCES, MOST_VALUES = 1024, 1 << 20
"""So many sequences pay for these calls where they do not fit, but memory has its bound: 8 MiB a column."""
NESTED_POINTS_PER_POINT = 4
"""So many points of a ladder count for one: its sequences have nothing of every point, only their clusters do."""


FamilyColumns = BlockColumns | NestedColumns


class GridLayout:
    """How arrays along a grid lie side by side in the columns of a table."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in shapes.values())]).tolist()
        self.width = ends[-1]
        self._places = {name: slice(*place) for name, place in zip(shapes, pairwise(ends), strict=True)}

    def arrays(self, table: Float64s) -> Arrays:
        """The arrays of a table, [R, ...] each."""
        return {name: table[:, self._places[name]].reshape(len(table), *shape) for name, shape in self.shapes.items()}


@dataclass(frozen=True)
class SweepPlan:
    """What one pass computes: the points of every study, as families.

    Attributes:
        families: those that are measured in every cell.
        sought: those of which nothing is wanted but one metric over each run; their weights are not normalized.
    """

    base: MeasurePlan
    families: tuple[CorrectionFamily, ...]
    sought: tuple[tuple[CorrectionFamily, Metric], ...] = ()

    def ladder(self, family: CorrectionFamily) -> NestedGates | NestedWeights | None:
        """Its ladder, where there is nothing beside that is measured of each point: no losses."""
        return None if self.base.losses else family.ladder

    def width(self, family: CorrectionFamily) -> int:
        """How many numbers a sequence has in each column of a family, about: one a point, or a cell of bins."""
        points = math.prod(family.grid)
        if self.ladder(family) is not None:
            return points // NESTED_POINTS_PER_POINT
        return max(points, family.cells) if family.is_binned else points

    def most_bytes(self, sequences: int) -> int:
        """What tables of clusters may come to take of a dump of so many sequences: a group's, and those of its run."""
        columns: int = sum(layouts.rows.width for layouts in (*self.layouts, *self.sought_layouts))
        return 8 * columns * min(sequences, GROUP_CAP + 2 * OVERALL_CAP)

    @cached_property
    def layouts(self) -> tuple[FamilyLayouts, ...]:
        """Of each family."""
        return tuple(FamilyLayouts.of(family, self.base.losses, CLUSTER_COLUMNS) for family in self.families)

    @cached_property
    def sought_layouts(self) -> tuple[FamilyLayouts, ...]:
        """Of each family that is sought: the columns that its metric is made of."""
        return tuple(
            FamilyLayouts.of(family, self.base.losses, metric_columns(metric)) for family, metric in self.sought
        )


@dataclass(frozen=True)
class FamilyLayouts:
    """How the sums of a family lie in tables: all its columns, the largest, and those that are kept by cluster."""

    totals: GridLayout
    maxima: GridLayout
    rows: GridLayout

    @classmethod
    def of(cls, family: CorrectionFamily, losses: bool, by_cluster: Iterable[str]) -> FamilyLayouts:
        """Those of a family, of which some columns are kept by cluster."""
        shapes = {
            "sum": dict.fromkeys((*SHARED_COLUMNS, *(PLAIN_LOSS_NAMES if losses else ())), (1,) * len(family.grid))
        }
        for column in family.columns(losses=losses):
            shapes.setdefault(column.merge, {})[column.name] = family.shape(column.along)
        rows = {name: shapes["sum"][name] for name in dict.fromkeys((*SHARED_COLUMNS, *by_cluster))}
        return cls(GridLayout(shapes["sum"]), GridLayout(shapes["largest"]), GridLayout(rows))


@dataclass(frozen=True)
class FamilySums:
    """Sums of one family in one cell.

    Attributes:
        totals: all columns, one row per micro-batch where weights are normalized within one, else one row.
        rows: those that are kept by cluster, in parts that have not been merged yet.
        cap: clusters that are kept apart.
    """

    totals: ClusterTable
    rows: tuple[ClusterTable, ...]
    cap: int = GROUP_CAP

    @property
    def merged(self) -> ClusterTable:
        """Those that are kept by cluster, each once."""
        return self.rows[0] if len(self.rows) == 1 else merge_tables(self.rows, self.cap)

    @property
    def size(self) -> int:
        """How many numbers it holds, about."""
        return self.totals.sums.size + sum(table.sums.size for table in self.rows)

    def __add__(self, other: FamilySums) -> FamilySums:
        """Both; rows are merged once half as many as there are have come to them, so that they stay few."""
        totals = self.totals + other.totals
        first, *more = rows = self.rows + other.rows
        if 2 * sum(map(len, more)) <= len(first):
            return replace(self, totals=totals, rows=rows)
        return replace(self, totals=totals, rows=(merge_tables(rows, self.cap),))


def merge_tables(tables: Sequence[ClusterTable], cap: int) -> ClusterTable:
    """One table of several without maxima, in the order given; beyond `cap` clusters they are folded by their hash.

    Rows may be wide, so none is copied before it is added.
    """
    clusters, scopes = (np.concatenate([getattr(table, name) for table in tables]) for name in ("clusters", "scopes"))
    is_folded = any(table.is_folded for table in tables) or len(np.unique(clusters)) > cap
    if is_folded:
        clusters = clusters % np.uint64(cap)
    found = BatchRows(np.zeros(len(clusters), np.int64), clusters, scopes, cap)
    sums = np.zeros((len(found), tables[0].sums.shape[1]))
    for row, values in zip(found.rows.tolist(), chain.from_iterable(table.sums for table in tables), strict=True):
        sums[row] += values
    (made,) = found.cut(1, sums, np.zeros((len(found), 0)))
    return replace(made, is_folded=is_folded)


@dataclass
class BatchFamilySums:
    """The families' sums by run and cell, and by run those that are sought, of one batch or more."""

    cells: dict[tuple[str, CellKey], list[FamilySums]] = field(default_factory=dict)
    runs: dict[str, list[FamilySums]] = field(default_factory=dict)
    tokens: int = 0

    def __add__(self, other: BatchFamilySums) -> BatchFamilySums:
        cells, runs = (
            merge_parts(self.cells, other.cells, add_families),
            merge_parts(self.runs, other.runs, add_families),
        )
        return BatchFamilySums(cells, runs, self.tokens + other.tokens)


def add_families(some: Sequence[FamilySums], more: Sequence[FamilySums]) -> list[FamilySums]:
    """The sums of every family, of two parts."""
    return [a + b for a, b in zip(some, more, strict=True)]


def reduce_families(batch: TokenBatch, run: str, plan: SweepPlan) -> BatchFamilySums:
    """Sums of one batch; `run` names the rows that carry no run of their own."""
    found = gather_cells(batch, run, plan.base.by)
    cells = np.repeat(np.arange(len(found.names)), np.diff(found.bounds))
    reduced = _reduce_cells(found.batch, cells, len(found.names), plan)
    runs = {name: _reduce_search(part, plan) for name, part in split_runs(batch, run)} if plan.sought else {}
    return BatchFamilySums(
        dict(zip(found.names, map(list, zip(*reduced, strict=True)), strict=True)), runs, batch.tokens
    )


def _reduce_cells(batch: TokenBatch, cells: Ints, count: int, plan: SweepPlan) -> list[list[FamilySums]]:
    """The sums of each family in each of so many cells; sequences without tokens add nothing to any column."""
    some = batch.segments.nonempty
    if not some.all():
        batch, cells = batch.take(np.flatnonzero(some)), cells[some]
    scopes = scope_hashes(batch, plan.base)
    of_all = BatchRows(cells, np.zeros_like(scopes), scopes)
    of_clusters = BatchRows(cells, cluster_hashes(batch), scopes)
    tables = [
        (_FamilyTable(of_all, layouts.totals, layouts.maxima), _FamilyTable(of_clusters, layouts.rows))
        for layouts in plan.layouts
    ]
    for start, block in _split_blocks(batch, plan.families, plan):
        parts, rows = BlockParts.among(of_all.rows[start : start + len(block.batch)])
        clusters, of = BlockParts.among(of_clusters.rows[start : start + len(block.batch)])
        for family, layouts, (totals, by_cluster) in zip(plan.families, plan.layouts, tables, strict=True):
            made = _family_columns(plan, family, block, parts, clusters)
            totals.add(rows, made.totals(), made.maxima)
            by_cluster.add(of, made.by(layouts.rows.shapes, clusters))
    return [
        [FamilySums(whole, (rows,)) for whole, rows in zip(totals.cut(count), by_cluster.cut(count), strict=True)]
        for totals, by_cluster in tables
    ]


def _reduce_search(batch: TokenBatch, plan: SweepPlan) -> list[FamilySums]:
    """Sums of what is sought over a run: its groups are told apart by what their clusters are called alone."""
    batch = batch.take(np.flatnonzero(batch.segments.nonempty))
    clusters, none = cluster_hashes(batch), np.zeros(len(batch), np.int64)
    clusters = clusters if plan.base.by_prompt else mix_hashes(clusters, step_hashes(batch))
    of_clusters = BatchRows(none, clusters, none.astype(np.uint64), OVERALL_CAP)
    tables = [_FamilyTable(of_clusters, layouts.rows) for layouts in plan.sought_layouts]
    for start, block in _split_blocks(batch, [family for family, _ in plan.sought], plan):
        clusters_of, of = BlockParts.among(of_clusters.rows[start : start + len(block.batch)])
        for (family, _), layouts, table in zip(plan.sought, plan.sought_layouts, tables, strict=True):
            made = _family_columns(plan, family, block, clusters_of, clusters_of)
            table.add(of, made.by(layouts.rows.shapes, clusters_of))
    found = [rows for table in tables for rows in table.cut(1)]
    return [FamilySums(_sum_clusters(rows), (rows,), OVERALL_CAP) for rows in found]


def _sum_clusters(rows: ClusterTable) -> ClusterTable:
    """The sums over all clusters."""
    none = np.zeros(1, np.uint64)
    return ClusterTable(none, none, rows.sums.sum(axis=0, keepdims=True), np.zeros((1, 0)))


class _FamilyTable:
    """Sums of a family by rows of a batch, added to block by block."""

    def __init__(self, rows: BatchRows, layout: GridLayout, maxima: GridLayout | None = None) -> None:
        self._rows, self._layout, self._largest = rows, layout, maxima
        self._sums = np.zeros((len(rows), layout.width))
        self._maxima = np.full((len(rows), 0 if maxima is None else maxima.width), -np.inf)

    def add(self, rows: Ints, sums: Arrays, maxima: Arrays | None = None) -> None:
        """Add to some rows, each named once."""
        where = as_slice(rows)
        for name, known in self._layout.arrays(self._sums).items():
            known[where] += sums[name]
        if self._largest is not None and maxima is not None:
            for name, known in self._largest.arrays(self._maxima).items():
                known[where] = np.maximum(known[where], maxima[name])

    def cut(self, cells: int) -> Iterator[ClusterTable]:
        """The table of each cell."""
        return self._rows.cut(cells, self._sums, self._maxima)


@dataclass(frozen=True)
class _RatioBlock:
    """A block of a batch, its ratios, and its loss without any correction."""

    batch: TokenBatch
    ratios: dict[str, Ratios]
    plain: TokenLoss | None


def _split_blocks(
    batch: TokenBatch, families: Iterable[CorrectionFamily], plan: SweepPlan
) -> Iterator[tuple[int, _RatioBlock]]:
    width = max((64, *(plan.width(family) for family in families)))
    sequences = max(BLOCK_VALUES // width, min(FEW_SEQUENCES, MOST_VALUES // width), 1)
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        plain = compute_token_loss("ppo", block) if plan.base.losses else None
        yield start, _RatioBlock(block, correction_ratios(block, plan.base), plain)


def _family_columns(
    plan: SweepPlan, family: CorrectionFamily, block: _RatioBlock, parts: BlockParts, clusters: BlockParts
) -> FamilyColumns:
    ladder, batch = plan.ladder(family), block.batch
    if ladder is None:
        made: FamilyColumns = block_columns(family, block.ratios, batch, parts, block.plain, plan.base)
    else:
        made = nested_columns(family, ladder, block.ratios, batch, parts, clusters, plan.base.kernel)
    shared = {"tokens": batch.segments.sizes, "sequences": batch.segments.nonempty.astype(np.float64)}
    if plan.base.losses:
        shared |= plain_loss_columns(block.plain, batch)
    trivial = (1,) * len(family.grid)
    made.fixed |= {name: values.reshape(-1, *trivial) for name, values in shared.items()}
    return made


_BLOCK_VALUES = 1 << 17
"""Numbers of rows that are worked on at once, so that they and what is made of them stay in the cache."""


@dataclass(frozen=True)
class ClosedFamily:
    """Closed sums of one family in some cells.

    Attributes:
        totals, maxima: columns along the grid [G, ...].
        rows: those kept by cluster, cell after cell [R].
        cells: the cell of each row [R].
        counted: whether the cluster of each row holds a token and is told apart from others [R].
        emptied: whether nothing is left of it, along the grid [R, ...].
    """

    totals: Arrays
    maxima: Arrays
    rows: ClusterTable
    cells: Ints
    counted: Bools
    emptied: Bools

    def take(self, cells: Ints) -> ClosedFamily:
        """Some of the cells, in ascending order."""
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
    """Closed sums of one family over the groups of a run, or those of one value of a column.

    Attributes:
        totals, maxima: columns along the grid [1, ...].
        rows: those kept by cluster, in parts.
        prompts: those so far, where the dump names them.
    """

    totals: Arrays = field(default_factory=dict)
    maxima: Arrays = field(default_factory=dict)
    rows: list[ClusterTable] = field(default_factory=list)
    prompts: PromptCounter | None = None

    def add(self, closed: ClosedFamily, salts: Hashes) -> None:
        """Take in more groups [G]; the clusters of each are its own, as its salt tells, unless they are prompts."""
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
        """The counts of clusters, each prompt counted once."""
        found: dict[str, list[NDArray[Any]]] = {"clusters": [], "empty_cluster": []}
        for cell in range(len(closed.totals["tokens"])):
            own = np.flatnonzero(closed.cells == cell)
            fresh, emptied = known.add(closed.rows.clusters[own], closed.counted[own], closed.emptied[own])
            found["clusters"].append(fresh.sum(axis=0).reshape(closed.totals["clusters"].shape[1:]))
            found["empty_cluster"].append(emptied.sum(axis=0))
        return {name: np.stack(values) for name, values in found.items()}


class FamilyCloser:
    """Turns raw sums of groups into closed ones, many at once: factors are the group's, whatever part is closed."""

    def __init__(self, family: CorrectionFamily, layouts: FamilyLayouts, groups: Sequence[ClusterTable]) -> None:
        self.family, self.layouts = family, layouts
        self._scopes = GroupScopes(groups)
        rule, self._factors = family.correction.weight, None
        if rule is not None and rule.normalize != "none":
            self._factors = self._scopes.factors(rule, layouts.totals.arrays(_stack_rows([t.sums for t in groups])))

    def close(self, cells: Sequence[FamilySums], groups: Ints, *, keep: bool) -> ClosedFamily:
        """The sums of parts of groups [G], normalized, and their clusters counted.

        Unless cells are to `keep` their rows, which may be wide, those are normalized where they stand.
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
        """What the weights of each row are divided by [R, weights, 1, ...]; None where it is nothing."""
        if self._factors is None:
            return None
        return self._factors[self._scopes.at(groups, np.concatenate([table.scopes for table in tables]))]

    def _rows(self, tables: Sequence[ClusterTable], groups: Ints, *, keep: bool) -> tuple[ClusterTable, Ints]:
        """Rows by cell, cluster and micro-batch, normalized, then by cell and cluster alone; and the cell of each."""
        clusters, scopes = (np.concatenate([getattr(own, name) for own in tables]) for name in ("clusters", "scopes"))
        sums, cells = _stack_rows([table.sums for table in tables]), table_numbers(tables)
        factors = self._factors_of(groups[cells], tables)
        if factors is not None:
            sums = self._normalized(sums, factors, keep=keep)
        if scopes.any():  # of one cluster, the rows of all micro-batches lie together
            first = np.flatnonzero(np.append(True, (clusters[1:] != clusters[:-1]) | (cells[1:] != cells[:-1])))
            sums, clusters, cells = add_rows(sums, first), clusters[first], cells[first]
        folded = any(table.is_folded for table in tables)
        return ClusterTable(clusters, np.zeros_like(clusters), sums, np.zeros((len(clusters), 0)), folded), cells

    def _normalized(self, rows: Float64s, factors: Float64s, *, keep: bool) -> Float64s:
        """Rows that are kept by cluster, their weights divided: as many at once as stay in the cache."""
        layout = self.layouts.rows
        made = rows.copy() if keep or not rows.flags.writeable else rows  # what another process sent may be read only
        step = max(_BLOCK_VALUES // layout.width, 1)
        for own in (slice(start, start + step) for start in range(0, len(made), step)):
            columns = layout.arrays(made[own])
            for name, values in normalize_columns(columns, factors[own], self.family.correction).items():
                columns[name][...] = values
        return made


def _stack_rows(tables: Sequence[Float64s]) -> Float64s:
    """Rows one after the other; those of a single table are not copied, as they may be wide."""
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


def _sum_rows(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """Rows that lie in the order of what they are `of`, summed over each of those [count, ...]."""
    firsts = np.flatnonzero(np.append(True, np.diff(of) != 0)[: len(of)])
    if len(firsts) == len(of) == count:
        return values
    found = np.zeros((count, *values.shape[1:]))
    if len(of):
        found[of[firsts]] = add_rows(values, firsts)
    return found


def _largest_rows(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """The same of the largest; that of nothing is -inf."""
    found = np.full((count, *values.shape[1:]), -np.inf)
    np.maximum.at(found, of, values)
    return found
