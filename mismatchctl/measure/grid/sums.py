"""The pass of a sweep: a batch in, the sums of every family out; they merge as those of `analyze` do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain, pairwise
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Float64s, Ints, Segments, TokenBatch
from mismatchctl.measure import Plan
from mismatchctl.measure.grid.columns import Arrays, BlockColumns, asked_by, block_columns
from mismatchctl.measure.grid.events import EventColumns, event_columns
from mismatchctl.measure.grid.family import Family, Ladder
from mismatchctl.measure.hashes import cluster_hashes, step_hashes
from mismatchctl.measure.losses import TokenLoss, plain_loss_columns, token_loss
from mismatchctl.measure.metrics import Metric
from mismatchctl.measure.reduce import Cell, cut, cut_runs, ratios_of, scopes_of
from mismatchctl.measure.table import GROUP_CAP, OVERALL_CAP, ClusterTable, Hashes, mix
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
BLOCK_TOKENS, BLOCK_SEQUENCES = 1 << 18, 256
"""Larger than elsewhere: the calls that a block of every family takes cost more than what the cache would save. But
what a sequence has of every point should fit there."""
LADDER_SEQUENCES = 1 << 10
"""Of families that are ladders: their sequences have nothing of every point, only their clusters do."""


Columns = BlockColumns | EventColumns
Key = TypeVar("Key")


class Layout:
    """How arrays along a grid lie side by side in the columns of a table."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        self.shapes = {name: values.shape for name, values in arrays.items()}
        ends = np.cumsum([0, *(int(np.prod(shape)) for shape in self.shapes.values())]).tolist()
        self.width = ends[-1]
        self._places = {name: slice(*place) for name, place in zip(self.shapes, pairwise(ends), strict=True)}

    def flat(self, arrays: Mapping[str, NDArray[Any]]) -> Float64s:
        """Arrays [R, ...] side by side, [R, columns]; one that is the same along an axis may have length 1 there."""
        number = len(next(iter(arrays.values())))
        table = np.empty((number, self.width))
        for name, values in self.arrays(table).items():
            values[...] = arrays[name]
        return table

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

    base: Plan
    families: tuple[Family, ...]
    sought: tuple[tuple[Family, Metric], ...] = ()

    def ladder(self, family: Family) -> Ladder | None:
        """Its ladder, where there is nothing beside that is measured of each point: no losses."""
        return None if self.base.losses else family.ladder

    @cached_property
    def layouts(self) -> tuple[tuple[Layout, Layout, Layout], ...]:
        """Of each family: totals, maxima, and rows by cluster. What one token gives is what all give."""
        return tuple(
            (Layout(made.totals()), Layout(made.maxima), _rows_of(made, (*SHARED, *BY_CLUSTER)))
            for made in map(self._of_one_token, self.families)
        )

    @cached_property
    def nothing(self) -> list[FamilySums]:
        """Sums of a sequence without tokens."""
        none = np.zeros(0)
        return _reduce(
            TokenBatch(
                Segments(np.zeros(2, np.int64)), none, none, current=none, advantages=none, rows=np.zeros(1, np.int64)
            ),
            np.uint64(0),
            self,
        )

    @cached_property
    def sought_layouts(self) -> tuple[Layout, ...]:
        """Of each family that is sought: the columns that its metric is made of."""
        made = [(self._of_one_token(family), metric) for family, metric in self.sought]
        return tuple(
            _rows_of(one, tuple(dict.fromkeys((*SHARED, *asked_by(metric, one.totals()))))) for one, metric in made
        )

    def _of_one_token(self, family: Family) -> Columns:
        one = np.zeros(1)
        block = TokenBatch(
            Segments(np.array([0, 1])), one, one, current=one, advantages=one, rows=np.zeros(1, np.int64)
        )
        plain = token_loss("ppo", block) if self.base.losses else None
        return _columns(self, family, block, ratios_of(block, self.base), plain)


def _rows_of(made: Columns, names: Sequence[str]) -> Layout:
    first = np.zeros(1, np.int64)
    return Layout({name: made.by_cluster(name, first, first)[0] for name in names})


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
    keys, places = np.unique(np.stack([clusters, scopes], axis=1), axis=0, return_inverse=True)
    sums = np.zeros((len(keys), tables[0].sums.shape[1]))
    for place, row in zip(places.tolist(), chain.from_iterable(table.sums for table in tables), strict=True):
        sums[place] += row
    return ClusterTable(keys[:, 0].copy(), keys[:, 1].copy(), sums, np.zeros((len(keys), 0)), is_folded)


@dataclass
class CellsOfBatch:
    """The families' sums by run and cell, and by run those that are sought, of one batch or more."""

    cells: dict[tuple[str, Cell], list[FamilySums]] = field(default_factory=dict)
    runs: dict[str, list[FamilySums]] = field(default_factory=dict)
    tokens: int = 0

    def __add__(self, other: CellsOfBatch) -> CellsOfBatch:
        return CellsOfBatch(both(self.cells, other.cells), both(self.runs, other.runs), self.tokens + other.tokens)


def both(some: Mapping[Key, list[FamilySums]], more: Mapping[Key, list[FamilySums]]) -> dict[Key, list[FamilySums]]:
    """Sums by key, added up where both have them."""
    found = dict(some)
    for key, sums in more.items():
        found[key] = [a + b for a, b in zip(found[key], sums, strict=True)] if key in found else sums
    return found


def reduce_families(batch: TokenBatch, run: str, plan: SweepPlan) -> CellsOfBatch:
    """Sums of one batch; `run` names the rows that carry no run of their own."""
    done = CellsOfBatch(tokens=batch.tokens)
    for name, cell, part in cut(batch, run, plan.base.by):
        if not part.tokens:
            done = done + CellsOfBatch({(name, cell): _nothing(part, plan)})
            continue
        parts = [_reduce(piece, scope, plan) for scope, piece in _by_scope(_with_tokens(part), plan)]
        done = done + CellsOfBatch({(name, cell): parts[0]})
        for more in parts[1:]:
            done = done + CellsOfBatch({(name, cell): more})
    for name, part in cut_runs(batch, run) if plan.sought else ():
        done = done + CellsOfBatch(runs={name: _seek(_with_tokens(part), plan)})
    return done


def _nothing(batch: TokenBatch, plan: SweepPlan) -> list[FamilySums]:
    """Sums of sequences without tokens, which add nothing to any column: as of one of them."""
    first = batch.sequences(0, 1)
    clusters, scopes = cluster_hashes(first), scopes_of(first, plan.base)
    return [
        replace(
            one,
            totals=replace(one.totals, scopes=scopes),
            rows=tuple(replace(rows, clusters=clusters, scopes=scopes) for rows in one.rows),
        )
        for one in plan.nothing
    ]


def _with_tokens(batch: TokenBatch) -> TokenBatch:
    """The sequences that have tokens, else one: the others add nothing to any column."""
    some = batch.segments.nonempty
    return batch if some.all() else batch.take(np.flatnonzero(some) if some.any() else np.zeros(1, np.int64))


def _by_scope(batch: TokenBatch, plan: SweepPlan) -> Iterator[tuple[np.uint64, TokenBatch]]:
    """The sequences of each micro-batch, where weights are normalized within one."""
    scopes = scopes_of(batch, plan.base)
    if not plan.base.scoped or len(np.unique(scopes)) == 1:
        yield scopes[0], batch
        return
    for scope in np.unique(scopes):
        yield scope, batch.take(np.flatnonzero(scopes == scope))


@dataclass(frozen=True)
class _Block:
    """A block of a batch, its ratios, and which of its sequences are of one cluster."""

    batch: TokenBatch
    ratios: dict[str, Ratios]
    plain: TokenLoss | None
    clusters: Hashes
    order: Ints
    firsts: Ints

    def rows(self, made: Columns, layout: Layout, scope: np.uint64) -> ClusterTable:
        """Columns summed over the sequences of each cluster."""
        sums = {name: made.by_cluster(name, self.order, self.firsts) for name in layout.shapes}
        return _table(self.clusters[self.order][self.firsts], scope, layout.flat(sums))


def _blocks(batch: TokenBatch, clusters: Hashes, families: Iterable[Family], plan: SweepPlan) -> Iterator[_Block]:
    sequences = BLOCK_SEQUENCES if any(plan.ladder(family) is None for family in families) else LADDER_SEQUENCES
    for start, block in batch.blocks(BLOCK_TOKENS, sequences):
        keys = clusters[start : start + len(block)]
        order = np.argsort(keys, kind="stable")
        firsts = np.flatnonzero(np.append(True, np.diff(keys[order].view(np.int64)) != 0))
        plain = token_loss("ppo", block) if plan.base.losses else None
        yield _Block(block, ratios_of(block, plan.base), plain, keys, order, firsts)


def _reduce(batch: TokenBatch, scope: np.uint64, plan: SweepPlan) -> list[FamilySums]:
    done: list[FamilySums] = []
    for block in _blocks(batch, cluster_hashes(batch), plan.families, plan):
        found = []
        for family, (all_of, largest, by_cluster) in zip(plan.families, plan.layouts, strict=True):
            made = _columns(plan, family, block.batch, block.ratios, block.plain)
            totals, maxima = all_of.flat(_one_row(made.totals())), largest.flat(_one_row(made.maxima))
            rows = block.rows(made, by_cluster, scope)
            found.append(FamilySums(_table(np.zeros(1, np.uint64), scope, totals, maxima), (rows,)))
        done = [a + b for a, b in zip(done, found, strict=True)] if done else found
    return done


def _seek(batch: TokenBatch, plan: SweepPlan) -> list[FamilySums]:
    """Sums of what is sought over a run: its groups are told apart by what their clusters are called alone."""
    scope, clusters = np.uint64(0), cluster_hashes(batch)
    clusters = clusters if plan.base.by_prompt else mix(clusters, step_hashes(batch))
    done: list[FamilySums] = []
    for block in _blocks(batch, clusters, [family for family, _ in plan.sought], plan):
        found = []
        for (family, _), layout in zip(plan.sought, plan.sought_layouts, strict=True):
            rows = block.rows(_columns(plan, family, block.batch, block.ratios, block.plain), layout, scope)
            totals = _table(np.zeros(1, np.uint64), scope, rows.sums.sum(axis=0, keepdims=True))
            found.append(FamilySums(totals, (rows,), OVERALL_CAP))
        done = [a + b for a, b in zip(done, found, strict=True)] if done else found
    return done


def _columns(
    plan: SweepPlan, family: Family, block: TokenBatch, ratios: dict[str, Ratios], plain: TokenLoss | None
) -> Columns:
    ladder = plan.ladder(family)
    if ladder is not None:
        made: Columns = event_columns(family, ladder, ratios, block)
    else:
        made = block_columns(family, ratios, block, plain, losses=plan.base.losses)
    shared = {"tokens": block.segments.lengths.astype(np.float64)}
    shared |= {"sequences": block.segments.nonempty.astype(np.float64)}
    if plan.base.losses:
        shared |= plain_loss_columns(plain, block)
    trivial = (1,) * len(family.grid)
    made.fixed |= {name: values.reshape(-1, *trivial) for name, values in shared.items()}
    return made


def _one_row(arrays: Arrays) -> Arrays:
    return {name: values[None] for name, values in arrays.items()}


def _table(clusters: Hashes, scope: np.uint64, sums: Float64s, maxima: Float64s | None = None) -> ClusterTable:
    empty = np.zeros((len(clusters), 0)) if maxima is None else maxima
    return ClusterTable(clusters, np.full(len(clusters), scope), sums, empty)
