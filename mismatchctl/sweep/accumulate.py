"""From the sums of units to rows of a table: a group is closed, and its rows are written, as soon as it is complete."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.batch import Bools, Float64s
from mismatchctl.measure import GROUP_CAP, OVERALL_CAP
from mismatchctl.measure.close import normalization_factor, normalized
from mismatchctl.measure.grid import estimates
from mismatchctl.measure.grid.columns import Arrays
from mismatchctl.measure.grid.family import Family
from mismatchctl.measure.grid.sums import CellsOfBatch, FamilySums, Layout, SweepPlan, both, merged
from mismatchctl.measure.hashes import Value, step_hash
from mismatchctl.measure.metrics import correction_metrics
from mismatchctl.measure.metrics.corrections import AGGREGATED, COSTS
from mismatchctl.measure.reduce import BreakdownValues, require_few
from mismatchctl.measure.table import ClusterTable, Hashes, Prompts, mix
from mismatchctl.sweep.model import GROUP, OVERALL, WITH_ERRORS, Folder
from mismatchctl.sweep.study import Axis, Study

if TYPE_CHECKING:
    import polars as pl

ROWS_IN_MEMORY = 200_000
"""Rows of groups beyond which they are written to disk."""
TOGETHER = 256
"""Families of groups of which a table is made at once: polars takes milliseconds for one, however small it is."""
_NAMED = ("run", "correction", "scope", "group")


@dataclass
class Closed:
    """Closed sums of one family: weights are normalized, clusters counted.

    Attributes:
        totals: columns along the grid.
        maxima: the largest.
        rows: those kept by cluster, in parts.
        counted: whether each cluster of a group holds a token and is told apart from others [R].
        emptied: whether nothing is left of it, along the grid [R, ...].
        prompts: of a run, where the dump names them.
        held: how many rows the parts have.
    """

    totals: Arrays
    maxima: Arrays
    rows: list[ClusterTable]
    counted: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    emptied: Bools = field(default_factory=lambda: np.zeros(0, np.bool_))
    prompts: Prompts | None = None
    held: int = 0

    def add(self, group: Closed, salt: np.uint64) -> None:
        """Take in one more group; its clusters are its own, unless they are prompts."""
        counts: Arrays = {}
        if self.prompts is not None:
            fresh, emptied = self.prompts.add(group.rows[0].clusters, group.counted, group.emptied)
            counts = {"clusters": fresh.sum(axis=0), "empty_cluster": emptied.sum(axis=0)}
        for name, sums in (dict(group.totals) | counts).items():
            self.totals[name] = self.totals[name] + sums if name in self.totals else sums
        for name, largest in group.maxima.items():
            self.maxima[name] = np.maximum(self.maxima[name], largest) if name in self.maxima else largest
        self.rows += [
            part if self.prompts is not None else replace(part, clusters=mix(part.clusters, salt))
            for part in group.rows
        ]
        self.held += sum(map(len, group.rows))
        if self.held > 2 * OVERALL_CAP:
            self.rows = [merged(self.rows, OVERALL_CAP)]
            self.held = len(self.rows[0])


@dataclass
class _Run:
    overall: list[Closed]
    by: dict[str, dict[Value, list[Closed]]] = field(default_factory=dict)


class SweepAccumulator:
    """Adds up units in the order of the input; memory is that of the open groups, and of one run's overall sums."""

    def __init__(self, plan: SweepPlan, studies: Sequence[Study], of_study: Sequence[int]) -> None:
        """Start with nothing.

        Args:
            plan: the pass.
            studies: all of them.
            of_study: the study of each family of the plan, those that are sought last.
        """
        self.plan, self.of_study = plan, of_study
        self.runs: dict[str, _Run] = {}
        self.table = RowTable(studies)
        self._breakdown = BreakdownValues(plan.base.by)
        self._open: dict[tuple[str, Value], dict[tuple[Value, ...], list[FamilySums]]] = {}
        self._sought: dict[str, list[FamilySums]] = {}
        self._empty: dict[int, tuple[Closed, dict[str, Any]]] = {}
        known = (correction_metrics(family.correction, plan.base.losses) for family in plan.families)
        self.metrics = [(*(each for each in own if each not in AGGREGATED), *COSTS) for own in known]

    def add(self, sums: CellsOfBatch) -> None:
        """Merge the sums of the next unit."""
        for (run, (step, values)), found in sums.cells.items():
            cells = self._open.setdefault((run, step), {})
            known = cells.get(values)
            cells[values] = found if known is None else [a + b for a, b in zip(known, found, strict=True)]
            require_few(self.plan.base.by, len(cells))
            self._breakdown.add(run, values)
        self._sought = both(self._sought, sums.runs)

    def close(self, may_grow: Callable[[str, Value], bool] = lambda run, step: False) -> None:
        """Close every open group that cannot grow any more."""
        for run, step in [key for key in self._open if not may_grow(*key)]:
            self._close_group(run, step, self._open.pop((run, step)))

    def _close_group(self, run: str, step: Value, cells: dict[tuple[Value, ...], list[FamilySums]]) -> None:
        totals = self.runs.setdefault(run, _Run(self._nothing()))
        salt = step_hash(step)
        ordered = sorted(cells, key=str)
        for number, family in enumerate(self.plan.families):
            parts = [cells[values][number] for values in ordered]
            whole = reduce(add, parts)
            empty = not self.plan.layouts[number][0].arrays(whole.totals.sums)["tokens"].any()
            if empty and not self.plan.base.by:
                group, rows = self._empty_group(number, whole)
                self.table.add(rows | {"run": run, "group": step})
                totals.overall[number].add(group, salt)
                continue
            closing = _Closing(family, self.plan.layouts[number], whole.totals)
            group = closing.close(whole)
            self.table.add(self._rows(number, group, run, GROUP, step))
            totals.overall[number].add(group, salt)
            if not self.plan.base.by:
                continue
            for values, part in zip(ordered, parts, strict=True):
                closed = closing.close(part)
                for column, value in zip(self.plan.base.by, values, strict=True):
                    found = totals.by.setdefault(column, {})
                    found.setdefault(value, self._nothing())[number].add(closed, salt)

    def _empty_group(self, number: int, whole: FamilySums) -> tuple[Closed, dict[str, Any]]:
        """A group of a family without tokens, and its rows: all are alike but for what their clusters are called."""
        if number not in self._empty:
            group = _Closing(self.plan.families[number], self.plan.layouts[number], whole.totals).close(whole)
            self._empty[number] = group, self._rows(number, group, "", GROUP, None)
        group, rows = self._empty[number]
        clusters = whole.rows[0] if len(whole.rows) == 1 else merged(whole.rows, GROUP_CAP)
        none = np.zeros((len(clusters), *group.emptied.shape[1:]), np.bool_)
        return replace(group, rows=[clusters], counted=np.zeros(len(clusters), np.bool_), emptied=none), rows

    def _nothing(self) -> list[Closed]:
        """Nothing yet of each family."""
        named = self.plan.base.by_prompt
        return [Closed({}, {}, [], prompts=Prompts() if named else None) for _ in self.plan.families]

    def finish_by(self) -> None:
        """Write the rows of every value of `--by` columns."""
        for run, totals in self.runs.items():
            for column, found in totals.by.items():
                for value, sums in found.items():
                    for number, closed in enumerate(sums):
                        self.table.add(self._rows(number, closed, run, column, value))

    def overall(self) -> pl.DataFrame:
        """The overall rows of every run, with errors."""
        import polars as pl

        frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
        for run, totals in self.runs.items():
            for number, closed in enumerate(totals.overall):
                family, layout = self.plan.families[number], self.plan.layouts[number][2]
                rows = layout.arrays(merged(closed.rows, OVERALL_CAP).sums)
                wanted = [metric for metric in self.metrics[number] if metric.key in WITH_ERRORS]
                errors = estimates.errors(wanted, closed.totals, rows, family.grid)
                found = {f"{key}_se": values[family.places] for key, values in errors.items()}
                frame = self.table.frame([self._rows(number, closed, run, OVERALL, None) | found])
                frames.setdefault((run, self.of_study[number]), []).append(frame)
        for run in self.runs:
            for number, frame in enumerate(self._solving(run), len(self.plan.families)):
                frames.setdefault((run, self.of_study[number]), []).append(frame)
        ordered = [
            pl.concat(parts, how="diagonal_relaxed").sort("point", maintain_order=True) for parts in frames.values()
        ]
        return pl.concat(ordered, how="diagonal_relaxed")

    def _solving(self, run: str) -> Iterator[pl.DataFrame]:
        """What is sought over a run, with errors."""
        sought = zip(self.plan.sought, self.plan.sought_layouts, self._sought.get(run, ()), strict=False)
        for number, ((family, metric), layout, sums) in enumerate(sought, len(self.plan.families)):
            totals = {name: values.sum(axis=0) for name, values in layout.arrays(sums.totals.sums).items()}
            rows = layout.arrays(merged(sums.rows, OVERALL_CAP).sums)
            found = estimates.values([metric], totals, {}, family.grid)
            error = estimates.errors([metric], totals, rows, family.grid)[metric.key]
            place = {"run": run, "study": self.of_study[number], "point": family.points, "scope": OVERALL}
            values = {metric.key: found[metric.key], f"{metric.key}_se": error}
            yield self.table.frame(
                [place | {"group": None} | {key: each[family.places] for key, each in values.items()}]
            )

    def _rows(self, number: int, closed: Closed, run: str, scope: str, group: Value) -> dict[str, Any]:
        """One row per point of a family, by column."""
        family, study = self.plan.families[number], self.of_study[number]
        found = estimates.values(self.metrics[number], closed.totals, closed.maxima, family.grid)
        weight = family.correction.weight
        if weight is None or weight.normalize == "none":
            found["normalization_factor"] = np.full_like(found["normalization_factor"], np.nan)
        counts = {name: float(closed.totals[name].item()) for name in ("tokens", "sequences")}
        return {
            "run": run,
            "study": study,
            "point": family.points,
            "scope": scope,
            "group": group,
            **counts,
            **{key: values[family.places] for key, values in found.items()},
        }


class _Closing:
    """Normalizes weights by the factors of a group, whatever part of it is closed."""

    def __init__(self, family: Family, layouts: tuple[Layout, Layout, Layout], group: ClusterTable) -> None:
        self.family, self.layouts = family, layouts
        self.scopes: Hashes = group.scopes
        self.factors = self._factors(layouts[0].arrays(group.sums))

    def _factors(self, totals: Arrays) -> Float64s:
        """The factor of each weight in each micro-batch, [N, weights, 1, ...]."""
        rule, grid = self.family.correction.weight, self.family.grid
        factors = np.ones((len(self.scopes), grid[0], *(1,) * (len(grid) - 1)))
        if rule is None or rule.normalize == "none":
            return factors
        token = rule.normalize == "token"
        total = totals["weight_excess" if token else "mean_excess"]
        count = totals["tokens" if token else "sequences"]
        if rule.normalize_over == "group":
            total, count = total.sum(axis=0, keepdims=True), count.sum(axis=0, keepdims=True)
        return factors * normalization_factor(total, count)

    def close(self, part: FamilySums) -> Closed:
        """The sums of a part of the group, normalized, and its clusters counted."""
        all_of, largest, by_cluster = self.layouts
        factors = self.factors[np.searchsorted(self.scopes, part.totals.scopes)]
        columns = all_of.arrays(part.totals.sums)
        columns |= normalized(columns, factors, self.family.correction) | {"factor": factors * columns["tokens"]}
        maxima = largest.arrays(part.totals.maxima)
        maxima |= {name: maxima[name] / factors for name in ("weight", "-weight")}
        rows = self._rows(merged(part.rows, GROUP_CAP), by_cluster)
        totals = {name: values.sum(axis=0) for name, values in columns.items()}
        of_rows = by_cluster.arrays(rows.sums)
        counted = (of_rows["tokens"] > 0) & (not rows.is_folded)
        emptied = counted & (of_rows["kept"] == 0)
        totals["clusters"], totals["empty_cluster"] = (
            flags.astype(np.float64).sum(axis=0) for flags in (counted, emptied)
        )
        extremes = {name: values.max(axis=0) for name, values in maxima.items()}
        return Closed(totals, extremes, [rows], counted.reshape(len(rows)), emptied)

    def _rows(self, rows: ClusterTable, layout: Layout) -> ClusterTable:
        """Rows by cluster and micro-batch, normalized, then by cluster alone."""
        if np.any(self.factors != 1):
            columns = layout.arrays(rows.sums)
            factors = self.factors[np.searchsorted(self.scopes, rows.scopes)]
            columns |= normalized(columns, factors, self.family.correction)
            rows = replace(rows, sums=layout.flat(columns))
        return merged([replace(rows, scopes=np.zeros_like(rows.scopes))], GROUP_CAP) if rows.scopes.any() else rows


def _laid_out(values: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    """Arrays of so many values, or one value that stands for as many, end to end."""
    if not any(isinstance(one, np.ndarray) and one.ndim for one in values):
        return np.repeat(np.array(values), lengths)
    wide = (
        one if isinstance(one, np.ndarray) and one.ndim and len(one) == length else np.full(length, one)
        for one, length in zip(values, lengths, strict=True)
    )
    return np.concatenate([*wide])


class RowTable:
    """Rows of groups: in memory up to a limit, beyond it in Parquet files of a temporary folder."""

    def __init__(self, studies: Sequence[Study]) -> None:
        self._studies = studies
        axes: dict[str, list[Axis]] = {}
        for study in studies:
            for axis in study.axes:
                axes.setdefault(axis.path, []).append(axis)
        self._numeric = {path: all(axis.is_numeric for axis in found) for path, found in axes.items()}
        self._frames: list[pl.DataFrame] = []
        self._held = 0
        self._waiting: list[Mapping[str, Any]] = []
        self._labels: list[Value] = []
        self.folder: Folder | None = None
        self._parts: list[Path] = []

    def add(self, columns: Mapping[str, Any]) -> None:
        """Add the rows of one family in one group."""
        self._labels.append(columns["group"])
        self._waiting.append(columns)
        self._held += len(columns["point"])
        if len(self._waiting) == TOGETHER or self._held > ROWS_IN_MEMORY:
            self._gather()
        if self._held > ROWS_IN_MEMORY:
            self._spill()

    def _gather(self) -> None:
        self._frames.append(self.frame(self._waiting))
        self._waiting = []

    def frame(self, parts: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        """Rows of families as a table: axes by path, groups as text, undefined values null."""
        import polars as pl

        places, lengths = [self._place(part) for part in parts], [len(part["point"]) for part in parts]
        made: dict[str, Any] = {}
        for name in dict.fromkeys(name for place in places for name in place):
            found = [place.get(name, math.nan) for place in places]
            if name in _NAMED or self._numeric.get(name) is False:
                known = ([one] * len(part["point"]) if isinstance(one, (str, NoneType)) else one
                         for one, part in zip(found, parts, strict=True))  # fmt: skip
                made[name] = pl.Series([*chain.from_iterable(known)], dtype=pl.String)
            else:
                made[name] = _laid_out(found, lengths)
        return pl.DataFrame(made, nan_to_null=True)

    def _place(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of one family's rows in their order; those of its axes beside them."""
        study = self._studies[columns["study"]]
        points = [study.points[point] for point in columns["point"].tolist()]
        own = {axis.path: [point[number] for point in points] for number, axis in enumerate(study.axes)}
        label = None if columns["group"] is None else str(columns["group"])
        place = {"run": columns["run"], "correction": study.name, "point": columns["point"]}
        for path, numeric in self._numeric.items():
            if numeric:
                place[path] = np.array(own[path], np.float64) if path in own else math.nan
            else:
                place[path] = [None if v is None else str(v) for v in own[path]] if path in own else None
        place |= {"scope": columns["scope"], "group": label}
        return place | {name: values for name, values in columns.items() if name not in (*place, "study")}

    def _spill(self) -> None:
        import polars as pl

        self.folder = self.folder or Folder()
        part = self.folder.path / f"{len(self._parts):06d}.parquet"
        pl.concat(self._frames, how="diagonal_relaxed").write_parquet(part, compression="lz4")
        self._parts.append(part)
        self._frames, self._held = [], 0

    def frames(self) -> pl.LazyFrame:
        """All rows; groups as numbers where all of them are."""
        import polars as pl

        if self._waiting:
            self._gather()
        parts = [pl.scan_parquet(part) for part in self._parts]
        parts += [pl.concat(self._frames, how="diagonal_relaxed").lazy()] if self._frames else []
        whole = pl.concat(parts, how="diagonal_relaxed")
        labels = [label for label in self._labels if label is not None]
        kinds = {type(label) for label in labels}
        if not kinds or not kinds <= {int, float}:
            return whole
        is_small = kinds == {int} and all(-(2**63) <= int(label) < 2**63 for label in labels)
        return whole.with_columns(pl.col("group").cast(pl.Int64 if is_small else pl.Float64))
