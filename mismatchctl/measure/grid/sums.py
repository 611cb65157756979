"""The pass of a sweep: a batch in, the sums of every family out; they merge as those of `analyze` do."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise

import numpy as np

from mismatchctl.batch import Float64s, Ints, TokenBatch
from mismatchctl.measure import MeasurePlan
from mismatchctl.measure.grid.block import BlockColumns
from mismatchctl.measure.grid.columns import block_columns
from mismatchctl.measure.grid.estimates import asked_by
from mismatchctl.measure.grid.family import Family, Ladder, WeightLadder
from mismatchctl.measure.grid.ladders import LadderColumns, ladder_columns
from mismatchctl.measure.grid.parts import Arrays, BlockParts, as_slice
from mismatchctl.measure.hashes import cluster_hashes, step_hashes
from mismatchctl.measure.losses import PLAIN_LOSS, TokenLoss, plain_loss_columns, token_loss
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.reduce import Cell, cut_runs, gathered, ratios_of, scopes_of
from mismatchctl.measure.table import GROUP_CAP, OVERALL_CAP, ClusterTable, RowsOfBatch, both, mix
from mismatchctl.ratios import Ratios

SHARED = ("tokens", "sequences")
"""Columns that no correction changes and every row holds."""
BY_CLUSTER = (
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
RUNGS = 4
"""So many points of a ladder count for one: its sequences have nothing of every point, only their clusters do."""


Columns = BlockColumns | LadderColumns


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
    families: tuple[Family, ...]
    sought: tuple[tuple[Family, Metric], ...] = ()

    def ladder(self, family: Family) -> Ladder | WeightLadder | None:
        """Its ladder, where there is nothing beside that is measured of each point: no losses."""
        return None if self.base.losses else family.ladder

    def width(self, family: Family) -> int:
        """How many numbers a sequence has in each column of a family, about: one a point, or a cell of bins."""
        points = math.prod(family.grid)
        if self.ladder(family) is not None:
            return points // RUNGS
        return max(points, family.cells) if family.is_binned else points

    def most_bytes(self, sequences: int) -> int:
        """What tables of clusters may come to take of a dump of so many sequences: a group's, and those of its run."""
        columns: int = sum(layouts.rows.width for layouts in (*self.layouts, *self.sought_layouts))
        return 8 * columns * min(sequences, GROUP_CAP + 2 * OVERALL_CAP)

    @cached_property
    def layouts(self) -> tuple[Layouts, ...]:
        """Of each family."""
        return tuple(Layouts.of(family, self.base.losses, BY_CLUSTER) for family in self.families)

    @cached_property
    def sought_layouts(self) -> tuple[Layouts, ...]:
        """Of each family that is sought: the columns that its metric is made of."""
        return tuple(Layouts.of(family, self.base.losses, asked_by(metric)) for family, metric in self.sought)


@dataclass(frozen=True)
class Layouts:
    """How the sums of a family lie in tables: all its columns, the largest, and those that are kept by cluster."""

    totals: GridLayout
    maxima: GridLayout
    rows: GridLayout

    @classmethod
    def of(cls, family: Family, losses: bool, by_cluster: Iterable[str]) -> Layouts:
        """Those of a family, of which some columns are kept by cluster."""
        shapes = {"sum": dict.fromkeys((*SHARED, *(PLAIN_LOSS if losses else ())), (1,) * len(family.grid))}
        for column in family.columns(losses=losses):
            shapes.setdefault(column.merge, {})[column.name] = family.shape(column.along)
        rows = {name: shapes["sum"][name] for name in dict.fromkeys((*SHARED, *by_cluster))}
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
        return self.rows[0] if len(self.rows) == 1 else merged(self.rows, self.cap)

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
        return replace(self, totals=totals, rows=(merged(rows, self.cap),))


def merged(tables: Sequence[ClusterTable], cap: int) -> ClusterTable:
    """One table of several without maxima, in the order given; beyond `cap` clusters they are folded by their hash.

    Rows may be wide, so none is copied before it is added.
    """
    clusters, scopes = (np.concatenate([getattr(table, name) for table in tables]) for name in ("clusters", "scopes"))
    is_folded = any(table.is_folded for table in tables) or len(np.unique(clusters)) > cap
    if is_folded:
        clusters = clusters % np.uint64(cap)
    found = RowsOfBatch(np.zeros(len(clusters), np.int64), clusters, scopes, cap)
    sums = np.zeros((len(found), tables[0].sums.shape[1]))
    for row, values in zip(found.rows.tolist(), chain.from_iterable(table.sums for table in tables), strict=True):
        sums[row] += values
    (made,) = found.cut(1, sums, np.zeros((len(found), 0)))
    return replace(made, is_folded=is_folded)


@dataclass
class CellsOfBatch:
    """The families' sums by run and cell, and by run those that are sought, of one batch or more."""

    cells: dict[tuple[str, Cell], list[FamilySums]] = field(default_factory=dict)
    runs: dict[str, list[FamilySums]] = field(default_factory=dict)
    tokens: int = 0

    def __add__(self, other: CellsOfBatch) -> CellsOfBatch:
        cells, runs = both(self.cells, other.cells, added), both(self.runs, other.runs, added)
        return CellsOfBatch(cells, runs, self.tokens + other.tokens)


def added(some: Sequence[FamilySums], more: Sequence[FamilySums]) -> list[FamilySums]:
    """The sums of every family, of two parts."""
    return [a + b for a, b in zip(some, more, strict=True)]


def reduce_families(batch: TokenBatch, run: str, plan: SweepPlan) -> CellsOfBatch:
    """Sums of one batch; `run` names the rows that carry no run of their own."""
    found = gathered(batch, run, plan.base.by)
    cells = np.repeat(np.arange(len(found.names)), np.diff(found.bounds))
    reduced = _reduce(found.batch, cells, len(found.names), plan)
    runs = {name: _seek(part, plan) for name, part in cut_runs(batch, run)} if plan.sought else {}
    return CellsOfBatch(dict(zip(found.names, map(list, zip(*reduced, strict=True)), strict=True)), runs, batch.tokens)


def _reduce(batch: TokenBatch, cells: Ints, count: int, plan: SweepPlan) -> list[list[FamilySums]]:
    """The sums of each family in each of so many cells; sequences without tokens add nothing to any column."""
    some = batch.segments.nonempty
    if not some.all():
        batch, cells = batch.take(np.flatnonzero(some)), cells[some]
    scopes = scopes_of(batch, plan.base)
    of_all = RowsOfBatch(cells, np.zeros_like(scopes), scopes)
    of_clusters = RowsOfBatch(cells, cluster_hashes(batch), scopes)
    tables = [
        (_Table(of_all, layouts.totals, layouts.maxima), _Table(of_clusters, layouts.rows)) for layouts in plan.layouts
    ]
    for start, block in _blocks(batch, plan.families, plan):
        parts, rows = BlockParts.among(of_all.rows[start : start + len(block.batch)])
        clusters, of = BlockParts.among(of_clusters.rows[start : start + len(block.batch)])
        for family, layouts, (totals, by_cluster) in zip(plan.families, plan.layouts, tables, strict=True):
            made = _columns(plan, family, block, parts, clusters)
            totals.add(rows, made.totals(), made.maxima)
            by_cluster.add(of, made.by(layouts.rows.shapes, clusters))
    return [
        [FamilySums(whole, (rows,)) for whole, rows in zip(totals.cut(count), by_cluster.cut(count), strict=True)]
        for totals, by_cluster in tables
    ]


def _seek(batch: TokenBatch, plan: SweepPlan) -> list[FamilySums]:
    """Sums of what is sought over a run: its groups are told apart by what their clusters are called alone."""
    batch = batch.take(np.flatnonzero(batch.segments.nonempty))
    clusters, none = cluster_hashes(batch), np.zeros(len(batch), np.int64)
    clusters = clusters if plan.base.by_prompt else mix(clusters, step_hashes(batch))
    of_clusters = RowsOfBatch(none, clusters, none.astype(np.uint64), OVERALL_CAP)
    tables = [_Table(of_clusters, layouts.rows) for layouts in plan.sought_layouts]
    for start, block in _blocks(batch, [family for family, _ in plan.sought], plan):
        clusters_of, of = BlockParts.among(of_clusters.rows[start : start + len(block.batch)])
        for (family, _), layouts, table in zip(plan.sought, plan.sought_layouts, tables, strict=True):
            made = _columns(plan, family, block, clusters_of, clusters_of)
            table.add(of, made.by(layouts.rows.shapes, clusters_of))
    found = [rows for table in tables for rows in table.cut(1)]
    return [FamilySums(_whole(rows), (rows,), OVERALL_CAP) for rows in found]


def _whole(rows: ClusterTable) -> ClusterTable:
    """The sums over all clusters."""
    none = np.zeros(1, np.uint64)
    return ClusterTable(none, none, rows.sums.sum(axis=0, keepdims=True), np.zeros((1, 0)))


class _Table:
    """Sums of a family by rows of a batch, added to block by block."""

    def __init__(self, rows: RowsOfBatch, layout: GridLayout, maxima: GridLayout | None = None) -> None:
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
class _Block:
    """A block of a batch, its ratios, and its loss without any correction."""

    batch: TokenBatch
    ratios: dict[str, Ratios]
    plain: TokenLoss | None


def _blocks(batch: TokenBatch, families: Iterable[Family], plan: SweepPlan) -> Iterator[tuple[int, _Block]]:
    width = max((64, *(plan.width(family) for family in families)))
    sequences = max(BLOCK_VALUES // width, min(FEW_SEQUENCES, MOST_VALUES // width), 1)
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        plain = token_loss("ppo", block) if plan.base.losses else None
        yield start, _Block(block, ratios_of(block, plan.base), plain)


def _columns(plan: SweepPlan, family: Family, block: _Block, parts: BlockParts, clusters: BlockParts) -> Columns:
    ladder, batch = plan.ladder(family), block.batch
    if ladder is None:
        made: Columns = block_columns(family, block.ratios, batch, parts, block.plain, plan.base)
    else:
        made = ladder_columns(family, ladder, block.ratios, batch, parts, clusters, plan.base.kernel)
    shared = {"tokens": batch.segments.sizes, "sequences": batch.segments.nonempty.astype(np.float64)}
    if plan.base.losses:
        shared |= plain_loss_columns(block.plain, batch)
    trivial = (1,) * len(family.grid)
    made.fixed |= {name: values.reshape(-1, *trivial) for name, values in shared.items()}
    return made
