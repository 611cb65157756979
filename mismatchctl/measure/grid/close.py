"""Closing groups of a sweep, many at once: weights are normalized, clusters counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mismatchctl.batch import Bools, Float64s, Ints
from mismatchctl.measure.close import Scopes, normalized, numbered
from mismatchctl.measure.grid.family import Family
from mismatchctl.measure.grid.parts import Arrays
from mismatchctl.measure.grid.sums import FamilySums, Layouts, merged
from mismatchctl.measure.table import OVERALL_CAP, ClusterTable, Hashes, Prompts, add_rows, mix

_VALUES = 1 << 17
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
    prompts: Prompts | None = None

    def add(self, closed: ClosedFamily, salts: Hashes) -> None:
        """Take in more groups [G]; the clusters of each are its own, as its salt tells, unless they are prompts."""
        counts, rows = {}, closed.rows
        if self.prompts is None:
            rows = replace(rows, clusters=mix(rows.clusters, salts[closed.cells]))
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
            self.rows = [merged(self.rows, OVERALL_CAP)]

    def _prompts(self, known: Prompts, closed: ClosedFamily) -> Arrays:
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

    def __init__(self, family: Family, layouts: Layouts, groups: Sequence[ClusterTable]) -> None:
        self.family, self.layouts = family, layouts
        self._scopes = Scopes(groups)
        rule, self._factors = family.correction.weight, None
        if rule is not None and rule.normalize != "none":
            self._factors = self._scopes.factors(rule, layouts.totals.arrays(_stacked([t.sums for t in groups])))

    def close(self, cells: Sequence[FamilySums], groups: Ints, *, keep: bool) -> ClosedFamily:
        """The sums of parts of groups [G], normalized, and their clusters counted.

        Unless cells are to `keep` their rows, which may be wide, those are normalized where they stand.
        """
        layouts, count = self.layouts, len(cells)
        tables = [cell.totals for cell in cells]
        of = numbered(tables)
        factors: Any = self._factors_of(groups[of], tables)
        columns = layouts.totals.arrays(_stacked([table.sums for table in tables]))
        maxima = layouts.maxima.arrays(_stacked([table.maxima for table in tables]))
        if factors is not None:
            columns |= normalized(columns, factors, self.family.correction)
            maxima |= {name: maxima[name] / factors for name in ("weight", "-weight")}
        columns["factor"] = columns["tokens"] * (1.0 if factors is None else factors)
        totals = {name: _summed(values, of, count) for name, values in columns.items()}
        folded = [cell.merged for cell in cells]
        rows, cell_of = self._rows(folded, groups, keep=keep)
        columns = layouts.rows.arrays(rows.sums)
        told_apart = np.array([not table.is_folded for table in folded])
        counted = (columns["tokens"].reshape(len(rows)) > 0) & told_apart[cell_of]
        emptied = counted.reshape(columns["tokens"].shape) & (columns["kept"] == 0)
        totals["clusters"] = np.bincount(cell_of, counted, count).reshape(totals["tokens"].shape)
        totals["empty_cluster"] = _summed(emptied.astype(np.float64), cell_of, count)
        largest = {name: _largest(values, of, count) for name, values in maxima.items()}
        return ClosedFamily(totals, largest, rows, cell_of, counted, emptied)

    def _factors_of(self, groups: Ints, tables: Sequence[ClusterTable]) -> Float64s | None:
        """What the weights of each row are divided by [R, weights, 1, ...]; None where it is nothing."""
        if self._factors is None:
            return None
        return self._factors[self._scopes.at(groups, np.concatenate([table.scopes for table in tables]))]

    def _rows(self, tables: Sequence[ClusterTable], groups: Ints, *, keep: bool) -> tuple[ClusterTable, Ints]:
        """Rows by cell, cluster and micro-batch, normalized, then by cell and cluster alone; and the cell of each."""
        clusters, scopes = (np.concatenate([getattr(own, name) for own in tables]) for name in ("clusters", "scopes"))
        sums, cells = _stacked([table.sums for table in tables]), numbered(tables)
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
        step = max(_VALUES // layout.width, 1)
        for own in (slice(start, start + step) for start in range(0, len(made), step)):
            columns = layout.arrays(made[own])
            for name, values in normalized(columns, factors[own], self.family.correction).items():
                columns[name][...] = values
        return made


def _stacked(tables: Sequence[Float64s]) -> Float64s:
    """Rows one after the other; those of a single table are not copied, as they may be wide."""
    return tables[0] if len(tables) == 1 else np.concatenate(tables)


def _summed(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """Rows that lie in the order of what they are `of`, summed over each of those [count, ...]."""
    firsts = np.flatnonzero(np.append(True, np.diff(of) != 0)[: len(of)])
    if len(firsts) == len(of) == count:
        return values
    found = np.zeros((count, *values.shape[1:]))
    if len(of):
        found[of[firsts]] = add_rows(values, firsts)
    return found


def _largest(values: NDArray[Any], of: Ints, count: int) -> NDArray[Any]:
    """The same of the largest; that of nothing is -inf."""
    found = np.full((count, *values.shape[1:]), -np.inf)
    np.maximum.at(found, of, values)
    return found
