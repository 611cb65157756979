"""Evaluate every point of every study in one pass over a dump."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from mismatchctl.api.analyze.builder import describe_input_files, summarize_left_out
from mismatchctl.api.predict import SequenceSample, collect_batch, empty_sample
from mismatchctl.api.scan import DumpReading, check_correction_names, number_micro_batches, whole_step_warning
from mismatchctl.api.sweep.result import (
    GROUP_SCOPE,
    METRICS_WITH_ERRORS,
    NO_FORECASTS,
    OVERALL_SCOPE,
    ForecastRequest,
    Sweep,
    add_pareto_column,
    forecast_points,
    make_forecasts,
    sweep_sentences,
)
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study, ThresholdAxis
from mismatchctl.api.sweep.targets import (
    BracketData,
    GridTables,
    TargetSearch,
    TargetValue,
    ThresholdRule,
    add_grids,
    find_brackets,
    list_searches,
    sum_grid,
)
from mismatchctl.core.batch import Ints, TokenBatch
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.data.engines import Engine, LocalEngine
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError
from mismatchctl.measure.cluster_table import GROUP_CAP, OVERALL_CAP, LabelValue, PromptCounter, merge_parts, step_hash
from mismatchctl.measure.grid.sums import (
    ClosedFamily,
    FamilyCells,
    FamilyCloser,
    FamilyRunSums,
    FamilySums,
    add_families,
    evaluate_metrics,
    merge_tables,
    reduce_families,
    standard_errors,
)
from mismatchctl.measure.grid.thresholds import CorrectionFamily, group_families
from mismatchctl.measure.groups import GroupCells, GroupMerger, group_by_value
from mismatchctl.measure.kernels import choose_kernel
from mismatchctl.measure.metrics.registry import sweep_metrics
from mismatchctl.measure.reduction import MeasurePlan

if TYPE_CHECKING:
    import polars as pl


@dataclass
class _RunSums:
    overall: list[FamilyRunSums]
    by: dict[str, dict[LabelValue, list[FamilyRunSums]]] = field(default_factory=dict)


class SweepAccumulator(GroupMerger[list[FamilySums]]):
    """Sums of the parts of a dump in input order, with the rows of their groups.

    The studies for targets are the last ones in `of_study`.
    """

    closing_size = 1 << 20

    def __init__(
        self,
        plan: MeasurePlan,
        families: Sequence[CorrectionFamily],
        studies: Sequence[Study],
        of_study: Sequence[int],
    ) -> None:
        super().__init__(plan.by)
        self.plan, self.families, self.of_study = plan, families, of_study
        self.runs: dict[str, _RunSums] = {}
        self.table = RowTable(studies)
        self.metrics = [sweep_metrics(family.correction) for family in families]

    def add(self, sums: FamilyCells) -> None:
        for (run, (step, values)), found in sums.items():
            self.merge(run, step, values, found)

    def _size(self, cell: list[FamilySums]) -> int:
        return sum(sums.size for sums in cell)

    def _merge_cells(self, cell: list[FamilySums], more: list[FamilySums]) -> list[FamilySums]:
        return add_families(cell, more)

    def finish(self) -> None:
        super().finish()
        for run, totals in self.runs.items():
            for column, found in totals.by.items():
                for value, sums in found.items():
                    rows = [self._rows(n, closed, run, column, [value]) for n, closed in enumerate(sums)]
                    self.table.add(rows, [value])

    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[list[FamilySums]]]) -> None:
        totals = self.runs.setdefault(run, _RunSums(self._empty_sums()))
        salts = np.array([step_hash(step) for step in steps], np.uint64)
        parts = [cell for cells in groups for cell in cells.values()]
        of_group = np.repeat(np.arange(len(groups)), [len(cells) for cells in groups])
        rows = []
        for number, family in enumerate(self.families):
            whole = [reduce(add, (cell[number] for cell in cells.values())) for cells in groups]
            closing = FamilyCloser(family, whole)
            closed = closing.close(whole, np.arange(len(groups)))
            rows.append(self._rows(number, closed, run, GROUP_SCOPE, steps))
            totals.overall[number].add(closed, salts)
            if not self.plan.by:
                continue
            closed = closing.close([cell[number] for cell in parts], of_group)
            for column, value, cells in group_by_value([values for own in groups for values in own], self.plan.by):
                found = totals.by.setdefault(column, {}).setdefault(value, self._empty_sums())
                found[number].add(closed.take(cells), salts[of_group[cells]])
        self.table.add(rows, steps)

    def _empty_sums(self) -> list[FamilyRunSums]:
        return [FamilyRunSums(prompts=PromptCounter() if self.plan.by_prompt else None) for _ in self.families]

    def overall(self) -> pl.DataFrame:
        import polars as pl

        frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
        for run, totals in self.runs.items():
            for number, closed in enumerate(totals.overall):
                family = self.families[number]
                rows = family.layouts.rows.arrays(merge_tables(closed.rows, OVERALL_CAP).sums)
                wanted = [metric for metric in self.metrics[number] if metric.key in METRICS_WITH_ERRORS]
                errors = standard_errors(wanted, closed.totals, rows, family.grid)
                found = {f"{key}_se": values[family.places] for key, values in errors.items()}
                frame = self.table.frame([self._rows(number, closed, run, OVERALL_SCOPE, [None]) | found])
                frames.setdefault((run, self.of_study[number]), []).append(frame)
        ordered = [
            pl.concat(parts, how="diagonal_relaxed").sort("point", maintain_order=True) for parts in frames.values()
        ]
        return pl.concat(ordered, how="diagonal_relaxed")

    def _rows(
        self, number: int, closed: ClosedFamily | FamilyRunSums, run: str, scope: str, groups: Sequence[LabelValue]
    ) -> dict[str, Any]:
        family = self.families[number]
        found = evaluate_metrics(self.metrics[number], closed.totals, closed.maxima, family.grid)
        weight = family.correction.weight
        if weight is None or weight.normalize == "none":
            found["normalization_factor"] = np.full_like(found["normalization_factor"], np.nan)
        counts = {name: np.repeat(closed.totals[name].ravel(), len(family.points)) for name in ("tokens", "sequences")}
        place = self.table.place(self.of_study[number], family.points, run, scope, groups)
        return place | counts | {key: values[:, family.places].ravel() for key, values in found.items()}


_MOST_WAITING = 200_000
"""Number of rows that are collected before they become a table, which needs less memory."""


class RowTable:
    """Rows of groups."""

    def __init__(self, studies: Sequence[Study]) -> None:
        self._studies = studies
        axes = [axis for study in studies for axis in study.axes]
        self._numeric = {axis.path: all(own.is_numeric for own in axes if own.path == axis.path) for axis in axes}
        self._tables: list[pl.DataFrame] = []
        self._waiting: list[Mapping[str, Any]] = []
        self._order: list[Ints] = []  # index of the group of each waiting row
        self._labels: list[LabelValue] = []

    def place(self, study: int, points: Ints, run: str, scope: str, groups: Sequence[LabelValue]) -> dict[str, Any]:
        """Return the columns that identify each group and point."""
        own, count = self._studies[study], len(groups) * len(points)
        found: dict[str, Any] = {"run": [run] * count, "correction": [own.name] * count}
        found["point"] = np.tile(points, len(groups))
        for path, numeric in self._numeric.items():
            axis = own.paths.index(path) if path in own.paths else None
            values = [None if axis is None else own.points[point][axis] for point in points.tolist()]
            names = [None if value is None else str(value) for value in values]
            found[path] = np.tile(np.array(values, np.float64), len(groups)) if numeric else names * len(groups)
        labels = (None if group is None else str(group) for group in groups)
        return found | {"scope": [scope] * count, "group": [label for label in labels for _ in range(len(points))]}

    def add(self, rows: Sequence[Mapping[str, Any]], groups: Sequence[LabelValue]) -> None:
        for part in rows:
            places = np.repeat(np.arange(len(groups)), len(part["point"]) // len(groups))
            self._order.append(len(self._labels) + places)
        self._labels += groups
        self._waiting += rows
        if sum(map(len, self._order)) > _MOST_WAITING:
            self._gather()

    def _gather(self) -> None:
        self._tables.append(self.frame(self._waiting)[np.argsort(np.concatenate(self._order), kind="stable")])
        self._waiting, self._order = [], []

    def frame(self, parts: Sequence[Mapping[str, Any]]) -> pl.DataFrame:
        """Build one table from the rows, because building a table takes milliseconds. Undefined values are null."""
        import polars as pl

        made: dict[str, Any] = {}
        for name in dict.fromkeys(name for part in parts for name in part):
            columns = [part.get(name, np.full(len(part["point"]), math.nan)) for part in parts]
            is_text = isinstance(columns[0], list)
            made[name] = pl.Series([*chain(*columns)], dtype=pl.String) if is_text else np.concatenate(columns)
        return pl.DataFrame(made, nan_to_null=True)

    def frames(self) -> pl.LazyFrame:
        """Return all rows. Group labels become numbers if all labels are numbers."""
        import polars as pl

        if self._waiting:
            self._gather()
        whole = pl.concat(self._tables).lazy()
        labels = [label for label in self._labels if label is not None]
        kinds = {type(label) for label in labels}
        if not kinds or not kinds <= {int, float}:
            return whole
        is_small = kinds == {int} and all(-(2**63) <= int(label) < 2**63 for label in labels)
        return whole.with_columns(pl.col("group").cast(pl.Int64 if is_small else pl.Float64))


MEMORY_WARNING_BYTES = 1_000_000_000
"""A notice is printed if the estimated memory is at least this number of bytes."""


@dataclass(frozen=True)
class _SweepPart:
    sums: FamilyCells = field(default_factory=dict)
    sequences: SequenceSample = field(default_factory=lambda: empty_sample(0))
    grids: GridTables = field(default_factory=dict)

    def __add__(self, other: _SweepPart) -> _SweepPart:
        sums, grids = merge_parts(self.sums, other.sums, add_families), add_grids(self.grids, other.grids)
        return _SweepPart(sums, self.sequences + other.sequences, grids)


@dataclass(frozen=True)
class _SweepPass:
    plan: MeasurePlan
    families: tuple[CorrectionFamily, ...]
    predicted: tuple[Correction, ...]  # corrections to sample sequences for, if `samples`
    samples: bool
    searches: tuple[tuple[str, ThresholdRule], ...]

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> _SweepPart:
        found = _SweepPart(sequences=empty_sample(len(self.predicted)))
        for batch in batches:
            sampled = collect_batch(batch, run, self.predicted) if self.samples else empty_sample(len(self.predicted))
            grids = sum_grid(batch, run, self.searches, self.plan.by_prompt)
            found = found + _SweepPart(reduce_families(batch, run, self.plan, self.families), sampled, grids)
        return found


def sweep(
    paths: Sequence[DumpSource],  # files, folders, globs. Each is one run, unless a `run` column names the runs.
    chosen: Sequence[Study] = DEFAULT_STUDIES,  # corrections with their axes and unique names
    *,
    rename: Mapping[str, str] | None = None,  # canonical column -> name in the files
    by: Sequence[str] = (),  # columns to break down by
    # "error" stops at bad rows and files, "skip" leaves them out and counts them, "mask" leaves out and counts the
    # tokens that are NaN or null
    on_bad: Literal["error", "skip", "mask"] = "error",
    threads: int | None = None,  # blocks of rows read at the same time in this process, without an `engine`
    progress: Callable[[int, int], None] | None = None,  # called with (tokens read, tokens expected)
    notice: Callable[[str], None] | None = None,  # called with a message before reading if much memory is needed
    wishes: Sequence[TargetValue] = (),  # targets to solve thresholds for, which takes a second pass
    outlook: ForecastRequest = NO_FORECASTS,  # predictions at some points of each study
    engine: Engine | None = None,  # reads the dump. The result does not depend on the engine.
    # rows of a step in each micro-batch for the normalization of weights, if there is no `micro_batch` column. The dump
    # is then read again. None: the whole step, with a warning.
    micro_batch_size: int | None = None,
) -> Sweep:
    """Evaluate every point of every study in one pass."""
    if not chosen:
        raise ConfigError("no study given: a sweep needs at least one study, also with targets")
    check_correction_names([study.correction for study in chosen])
    parts = [(number, family) for number, study in enumerate(chosen) for family in group_families(study.grid)]
    kinds = [
        family.correction.model_copy(update={"name": f"{chosen[study].name} at point {family.points[0]}"})
        for study, family in parts
    ]
    reading = DumpReading.open(paths, kinds, rename or {}, by, on_bad)
    families = tuple(family for _, family in parts)
    plan = MeasurePlan(
        tuple(kinds),
        tuple(by),
        kernel=choose_kernel(reading.expected_tokens),
        by_prompt=reading.dump.has("prompt_id"),
    )
    sequences = sum(unit.sequences for unit in reading.dump.units)
    needed = 8 * sum(family.layouts.rows.width for family in families) * min(sequences, GROUP_CAP + 2 * OVERALL_CAP)
    if notice is not None and needed > MEMORY_WARNING_BYTES:
        notice(
            f"{sum(math.prod(study.shape) for study in chosen):,} points may take {needed / 1e9:.1f} GB of memory "
            "in addition to reading, for the sums of each point by cluster. Fewer values per axis need less"
        )
    accumulator = SweepAccumulator(plan, families, chosen, [number for number, _ in parts])

    points = [(study, point) for study in chosen for point in forecast_points(study) if outlook.needs_sequences]
    predicted = [study.correction_at(point) for study, point in points]
    sample, grids = empty_sample(len(predicted)), GridTables()
    work = _SweepPass(plan, families, tuple(predicted), outlook.needs_sequences, list_searches(wishes))
    engine = engine or LocalEngine(threads)
    unnamed = plan.has_micro_batches and not reading.dump.has("micro_batch")
    micro_batches = number_micro_batches(reading.dump, micro_batch_size) if unnamed and micro_batch_size else None
    for done, may_grow in reading.parts(work, engine, progress, micro_batches):
        accumulator.add(done.sums)
        accumulator.close(may_grow)
        sample, grids = sample + done.sequences, add_grids(grids, done.grids)
    reading.require_tokens()
    accumulator.finish()
    overall = accumulator.overall()
    runs = list(overall["run"].unique(maintain_order=True))
    open_wishes, targets = find_brackets(grids, runs, wishes)
    if open_wishes:
        again = DumpReading.open(paths, (), rename or {}, (), on_bad)
        found = BracketData()
        for more, _ in again.parts(TargetSearch(tuple(open_wishes)), engine, progress):
            found = found + more
        targets += [bracket.solved(found.between[number]) for number, bracket in enumerate(open_wishes)]
    order = list(wishes)
    metrics = {metric.key: metric for known in accumulator.metrics for metric in known}
    groups = accumulator.table.frames()
    made = Sweep(
        studies=tuple(chosen),
        metrics=metrics,
        overall=add_pareto_column(overall, chosen),
        groups=groups,
        inputs=describe_input_files(reading.dump, reading.tokens, reading.problems),
        left_out=summarize_left_out(reading.problems),
        warnings=[*reading.dump.warnings, *([whole_step_warning(kinds)] if unnamed and micro_batches is None else [])],
        targets=tuple(sorted(targets, key=lambda target: order.index((target.wish, target.wanted)))),
        forecasts=make_forecasts(outlook, chosen, runs, sample, groups) if outlook != NO_FORECASTS else (),
        by=tuple(by),
    )
    made.summary = {run: sweep_sentences(made, run) for run in made.runs}
    return made


def price_targets(found: Sweep, paths: Sequence[DumpSource], **options: Any) -> list[dict[str, Any]]:
    """Compute the metrics at each solved threshold in one more pass. A target that cannot be met has no metrics."""
    studies = []
    for number, target in enumerate(found.targets):
        if target.correction is not None:
            correction = parse_correction({**target.correction, "name": f"{number}"}, "target")
            studies.append(Study(correction, (_fixed_axis(correction),)))
    rows = sweep(paths, studies, **options).overall.to_dicts() if studies else []
    own = {(row["run"], row["correction"]): row for row in rows}
    return [own.get((target.run, f"{number}"), {}) for number, target in enumerate(found.targets)]


def _fixed_axis(correction: Correction) -> ThresholdAxis:
    """Return an axis with the single value that a correction has."""
    if correction.weight is not None:
        return ThresholdAxis("weight.level", (correction.weight.level,))
    return ThresholdAxis("gates.0.level", (correction.gates[0].level,))
