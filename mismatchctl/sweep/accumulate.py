"""From the sums of units to rows of a table: a group is closed, and its rows are written, as soon as it is complete."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import add
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

import numpy as np

from mismatchctl.batch import Ints
from mismatchctl.measure import OVERALL_CAP
from mismatchctl.measure.grid import estimates
from mismatchctl.measure.grid.close import ClosedFamily, FamilyCloser, FamilyRunSums
from mismatchctl.measure.grid.sums import CellsOfBatch, FamilySums, SweepPlan, added, merged
from mismatchctl.measure.groups import Cells, GroupMerger, by_value
from mismatchctl.measure.hashes import Value, step_hash
from mismatchctl.measure.metrics import correction_metrics
from mismatchctl.measure.metrics.corrections import AGGREGATED, COSTS
from mismatchctl.measure.table import Prompts, both
from mismatchctl.sweep.model import GROUP, OVERALL, WITH_ERRORS, TemporaryFolder
from mismatchctl.sweep.study import Study, ThresholdAxis

if TYPE_CHECKING:
    import polars as pl

ROWS_IN_MEMORY = 200_000
"""Rows of groups beyond which they are written to disk."""
TOGETHER = 256
"""Families of groups of which a table is made at once: polars takes milliseconds for one, however small it is."""
_NAMED = ("run", "correction", "scope", "group")


@dataclass
class _RunSums:
    overall: list[FamilyRunSums]
    by: dict[str, dict[Value, list[FamilyRunSums]]] = field(default_factory=dict)


class SweepAccumulator(GroupMerger[list[FamilySums]]):
    """Adds up units in the order of the input, and writes the rows of their groups; memory holds runs' sums too.

    Fewer are closed at once than elsewhere: putting wide rows of several groups side by side costs more than calls do.
    """

    at_once = 1 << 20

    def __init__(self, plan: SweepPlan, studies: Sequence[Study], of_study: Sequence[int]) -> None:
        """Start with nothing.

        Args:
            plan: the pass.
            studies: all of them.
            of_study: the study of each family of the plan, those that are sought last.
        """
        super().__init__(plan.base.by)
        self.plan, self.of_study = plan, of_study
        self.runs: dict[str, _RunSums] = {}
        self.table = RowTable(studies)
        self._sought: dict[str, list[FamilySums]] = {}
        known = (correction_metrics(family.correction, plan.base.losses) for family in plan.families)
        self.metrics = [(*(each for each in own if each not in AGGREGATED), *COSTS) for own in known]

    def add(self, sums: CellsOfBatch) -> None:
        """Merge the sums of the next unit."""
        for (run, (step, values)), found in sums.cells.items():
            self.merge(run, step, values, found)
        self._sought = both(self._sought, sums.runs, added)

    def _size(self, cell: list[FamilySums]) -> int:
        return sum(sums.size for sums in cell)

    def _both(self, cell: list[FamilySums], more: list[FamilySums]) -> list[FamilySums]:
        return added(cell, more)

    def finish(self) -> None:
        """Close all groups and write the rows of every value of `--by` columns: nothing more comes."""
        super().finish()
        for run, totals in self.runs.items():
            for column, found in totals.by.items():
                for value, sums in found.items():
                    self.table.add([self._rows(n, closed, run, column, [value]) for n, closed in enumerate(sums)])

    def _close_groups(self, run: str, steps: list[Value], groups: Sequence[Cells[list[FamilySums]]]) -> None:
        totals = self.runs.setdefault(run, _RunSums(self._nothing()))
        salts = np.array([step_hash(step) for step in steps], np.uint64)
        names = [(group, values) for group, cells in enumerate(groups) for values in cells]
        of_group = np.array([group for group, _ in names])
        rows = []
        for number, family in enumerate(self.plan.families):
            parts = [groups[group][values][number] for group, values in names]
            whole = [reduce(add, own) for own in _by(of_group, parts)]
            closing = FamilyCloser(family, self.plan.layouts[number], [one.totals for one in whole])
            closed = closing.close(whole, np.arange(len(groups)), keep=bool(self.plan.base.by))
            rows.append(self._rows(number, closed, run, GROUP, steps))
            totals.overall[number].add(closed, salts)
            if not self.plan.base.by:
                continue
            closed = closing.close(parts, of_group, keep=False)
            for column, value, cells in by_value([values for _, values in names], self.plan.base.by):
                found = totals.by.setdefault(column, {}).setdefault(value, self._nothing())
                found[number].add(closed.take(cells), salts[of_group[cells]])
        self.table.add(rows)

    def _nothing(self) -> list[FamilyRunSums]:
        """Nothing yet of each family."""
        return [FamilyRunSums(prompts=Prompts() if self.plan.base.by_prompt else None) for _ in self.plan.families]

    def overall(self) -> pl.DataFrame:
        """The overall rows of every run, with errors."""
        import polars as pl

        frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
        for run, totals in self.runs.items():
            for number, closed in enumerate(totals.overall):
                family, layout = self.plan.families[number], self.plan.layouts[number].rows
                rows = layout.arrays(merged(closed.rows, OVERALL_CAP).sums)
                wanted = [metric for metric in self.metrics[number] if metric.key in WITH_ERRORS]
                errors = estimates.errors(wanted, closed.totals, rows, family.grid)
                found = {f"{key}_se": values[family.places] for key, values in errors.items()}
                frame = self.table.frame([self._rows(number, closed, run, OVERALL, [None]) | found])
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
            totals = layout.rows.arrays(sums.totals.sums)
            rows = layout.rows.arrays(sums.merged.sums)
            found = estimates.values([metric], totals, {}, family.grid)[metric.key][0]
            error = estimates.errors([metric], totals, rows, family.grid)[metric.key]
            place = {"run": run, "study": self.of_study[number], "point": family.points, "scope": OVERALL}
            values = {metric.key: found, f"{metric.key}_se": error}
            yield self.table.frame(
                [place | {"group": [None]} | {key: each[family.places] for key, each in values.items()}]
            )

    def _rows(
        self, number: int, closed: ClosedFamily | FamilyRunSums, run: str, scope: str, groups: Sequence[Value]
    ) -> dict[str, Any]:
        """One row per group and point of a family, by column."""
        family, study = self.plan.families[number], self.of_study[number]
        found = estimates.values(self.metrics[number], closed.totals, closed.maxima, family.grid)
        weight = family.correction.weight
        if weight is None or weight.normalize == "none":
            found["normalization_factor"] = np.full_like(found["normalization_factor"], np.nan)
        counts = {name: np.repeat(closed.totals[name].ravel(), len(family.points)) for name in ("tokens", "sequences")}
        return {
            "run": run,
            "study": study,
            "point": family.points,
            "scope": scope,
            "group": groups,
            **counts,
            **{key: values[:, family.places].ravel() for key, values in found.items()},
        }


def _by(numbers: Ints, parts: Sequence[FamilySums]) -> list[list[FamilySums]]:
    """Parts by the ascending numbers that they have."""
    found: list[list[FamilySums]] = [[] for _ in range(int(numbers[-1]) + 1)]
    for number, part in zip(numbers.tolist(), parts, strict=True):
        found[number].append(part)
    return found


def _laid_out(values: Sequence[Any], lengths: Sequence[int]) -> np.ndarray:
    """Arrays of so many values, or one value that stands for as many, end to end."""
    if not any(isinstance(one, np.ndarray) and one.ndim for one in values):
        return np.repeat(np.array(values), lengths)
    wide = (
        one if isinstance(one, np.ndarray) and one.ndim and len(one) == length else np.full(length, one)
        for one, length in zip(values, lengths, strict=True)
    )
    return np.concatenate([*wide])


def _length(rows: Mapping[str, Any]) -> int:
    """How many rows those of a family in some groups are."""
    return len(rows["group"]) * len(rows["point"])


class RowTable:
    """Rows of groups: in memory up to a limit, beyond it in Parquet files of a temporary folder."""

    def __init__(self, studies: Sequence[Study]) -> None:
        self._studies = studies
        axes: dict[str, list[ThresholdAxis]] = {}
        for study in studies:
            for axis in study.axes:
                axes.setdefault(axis.path, []).append(axis)
        self._numeric = {path: all(axis.is_numeric for axis in found) for path, found in axes.items()}
        self._frames: list[pl.DataFrame] = []
        self._held = 0
        self._waiting: list[Sequence[Mapping[str, Any]]] = []
        self._labels: list[Value] = []
        self.folder: TemporaryFolder | None = None
        self._parts: list[Path] = []

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add the rows of each family in some groups, the same of all; group by group is how they will lie."""
        self._labels += rows[0]["group"]
        self._waiting.append(rows)
        self._held += sum(map(_length, rows))
        families = sum(len(of["group"]) for waiting in self._waiting for of in waiting)
        if families >= TOGETHER or self._held > ROWS_IN_MEMORY:
            self._gather()
        if self._held > ROWS_IN_MEMORY:
            self._spill()

    def _gather(self) -> None:
        parts: list[Mapping[str, Any]] = []
        groups, before = [], 0
        for rows in self._waiting:
            parts += rows
            groups += [before + np.repeat(np.arange(len(of["group"])), len(of["point"])) for of in rows]
            before += len(rows[0]["group"])
        order = np.argsort(np.concatenate(groups), kind="stable")
        self._frames.append(self.frame(parts)[order])
        self._waiting = []

    def frame(self, parts: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        """Rows of families as a table: axes by path, groups as text, undefined values null."""
        import polars as pl

        places, lengths = [self._place(part) for part in parts], [_length(part) for part in parts]
        made: dict[str, Any] = {}
        for name in dict.fromkeys(name for place in places for name in place):
            found = [place.get(name, math.nan) for place in places]
            if name in _NAMED or self._numeric.get(name) is False:
                known = ([one] * length if isinstance(one, (str, NoneType)) else one
                         for one, length in zip(found, lengths, strict=True))  # fmt: skip
                made[name] = pl.Series([*chain.from_iterable(known)], dtype=pl.String)
            else:
                made[name] = _laid_out(found, lengths)
        return pl.DataFrame(made, nan_to_null=True)

    def _place(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        """The columns of one family's rows in their order; those of its axes beside them."""
        study, groups, points = self._studies[columns["study"]], columns["group"], columns["point"].tolist()
        own = {axis.path: [study.points[p][number] for p in points] for number, axis in enumerate(study.axes)}
        place = {"run": columns["run"], "correction": study.name, "point": np.tile(columns["point"], len(groups))}
        for path, numeric in self._numeric.items():
            if numeric:
                place[path] = np.tile(np.array(own[path], np.float64), len(groups)) if path in own else math.nan
            else:
                texts = [None if v is None else str(v) for v in own.get(path, ())]
                place[path] = texts * len(groups) if path in own else None
        labels = (None if group is None else str(group) for group in groups)
        place |= {"scope": columns["scope"], "group": [label for label in labels for _ in points]}
        return place | {name: values for name, values in columns.items() if name not in (*place, "study")}

    def _spill(self) -> None:
        import polars as pl

        self.folder = self.folder or TemporaryFolder()
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
