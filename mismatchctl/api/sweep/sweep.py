"""Evaluate every point of every study in one pass over a dump."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from mismatchctl.api.analyze.builder import describe_input_files, summarize_left_out
from mismatchctl.api.predict import SequenceSample, collect_batch, empty_sample
from mismatchctl.api.scan import DumpReading, ReadOptions, check_correction_names
from mismatchctl.api.sweep.result import (
    GROUP_SCOPE,
    MAX_FORECAST_POINTS,
    METRICS_WITH_ERRORS,
    NO_FORECASTS,
    OVERALL_SCOPE,
    ForecastRequest,
    Sweep,
    add_pareto_column,
    make_forecasts,
    sweep_sentences,
    thin_rows,
)
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study
from mismatchctl.api.sweep.targets import (
    GridTables,
    TargetSearch,
    TargetValue,
    ThresholdRule,
    add_grids,
    find_brackets,
    list_searches,
    sum_grid,
)
from mismatchctl.core.batch import TokenBatch
from mismatchctl.corrections.model import Correction
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError
from mismatchctl.measure.cluster_table import GROUP_CAP, OVERALL_CAP, LabelValue, PromptCounter, merge_parts, step_hash
from mismatchctl.measure.grid.sums import (
    ClosedFamily,
    FamilyCells,
    FamilyRunSums,
    FamilySums,
    add_families,
    close_family,
    evaluate_metrics,
    family_factors,
    merge_tables,
    reduce_families,
    standard_errors,
)
from mismatchctl.measure.grid.thresholds import CorrectionFamily, group_families
from mismatchctl.measure.kernels import choose_kernel
from mismatchctl.measure.metrics.evaluation import GroupCells, GroupMerger
from mismatchctl.measure.metrics.registry import sweep_metrics
from mismatchctl.measure.reduction import MeasurePlan

if TYPE_CHECKING:
    from typing_extensions import Unpack


@dataclass
class _RunSums:
    overall: list[FamilyRunSums]
    by: dict[str, dict[LabelValue, list[FamilyRunSums]]] = field(default_factory=dict)


class SweepAccumulator(GroupMerger[list[FamilySums]]):
    """Adds up the sums of a dump in input order, and keeps the rows of complete groups."""

    closing_size = 1 << 20

    def __init__(
        self,
        plan: MeasurePlan,
        families: Sequence[CorrectionFamily],
        studies: Sequence[Study],
        of_study: Sequence[int],
    ) -> None:
        super().__init__(plan.by, lambda cell: sum(sums.size for sums in cell), add_families)
        self.plan, self.families, self.studies, self.of_study = plan, families, studies, of_study
        self.runs: dict[str, _RunSums] = {}
        axes = [axis for study in studies for axis in study.axes]
        numeric = {axis.path: all(own.is_numeric for own in axes if own.path == axis.path) for axis in axes}
        self._axes = {path: pl.Float64 if is_numeric else pl.String for path, is_numeric in numeric.items()}
        self._tables: list[pl.DataFrame] = []
        self._labels: list[LabelValue] = []
        self.metrics = [sweep_metrics(family.correction) for family in families]

    def add(self, sums: FamilyCells) -> None:
        for (run, (step, values)), found in sums.items():
            self.merge(run, step, values, found)

    def finish(self) -> None:
        super().finish()
        for run, totals in self.runs.items():
            for column, found in totals.by.items():
                for value, sums in found.items():
                    self._add([self._rows(n, [closed], run, column, [value]) for n, closed in enumerate(sums)], [value])

    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[list[FamilySums]]]) -> None:
        totals = self.runs.setdefault(run, _RunSums(self._empty_sums()))
        rows = []
        for number, family in enumerate(self.families):
            closed = []
            for step, cells in zip(steps, groups, strict=True):
                whole, salt = reduce(add, (cell[number] for cell in cells.values())), step_hash(step)
                factors = family_factors(family, whole)
                closed.append(close_family(family, whole, factors))
                totals.overall[number].add(closed[-1], salt)
                for values, cell in cells.items() if self.plan.by else ():
                    own = close_family(family, cell[number], factors)
                    for column, value in zip(self.plan.by, values, strict=True):
                        found = totals.by.setdefault(column, {}).setdefault(value, self._empty_sums())
                        found[number].add(own, salt)
            rows.append(self._rows(number, closed, run, GROUP_SCOPE, steps))
        self._add(rows, steps)

    def _empty_sums(self) -> list[FamilyRunSums]:
        return [FamilyRunSums(prompts=PromptCounter() if self.plan.by_prompt else None) for _ in self.families]

    def _add(self, rows: Sequence[pl.DataFrame], labels: Sequence[LabelValue]) -> None:
        """Store the rows of all families, ordered by group."""
        order = np.concatenate([np.repeat(np.arange(len(labels)), len(own) // len(labels)) for own in rows])
        self._tables.append(pl.concat(rows, how="diagonal_relaxed")[np.argsort(order, kind="stable")])
        self._labels += labels

    def overall(self) -> pl.DataFrame:
        frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
        for run, totals in self.runs.items():
            for number, closed in enumerate(totals.overall):
                family = self.families[number]
                rows = family.layouts.rows.arrays(merge_tables(closed.rows, OVERALL_CAP).sums)
                wanted = [metric for metric in self.metrics[number] if metric.key in METRICS_WITH_ERRORS]
                errors = standard_errors(wanted, closed.totals, rows, family.grid)
                found = {f"{key}_se": values[family.places] for key, values in errors.items()}
                frame = self._rows(number, [closed], run, OVERALL_SCOPE, [None]).hstack(
                    pl.DataFrame(found, nan_to_null=True)
                )
                frames.setdefault((run, self.of_study[number]), []).append(frame)
        ordered = [
            pl.concat(parts, how="diagonal_relaxed").sort("point", maintain_order=True) for parts in frames.values()
        ]
        return pl.concat(ordered, how="diagonal_relaxed")

    def groups(self) -> pl.LazyFrame:
        """Return the rows of steps and values. Labels become numbers if all labels are numbers."""
        whole = pl.concat(self._tables, how="diagonal_relaxed").lazy()
        numbers = [label for label in self._labels if isinstance(label, (int, float)) and not isinstance(label, bool)]
        if not numbers or len(numbers) + self._labels.count(None) < len(self._labels):
            return whole
        is_small = all(isinstance(number, int) and -(2**63) <= number < 2**63 for number in numbers)
        return whole.with_columns(pl.col("group").cast(pl.Int64 if is_small else pl.Float64))

    def _rows(
        self,
        number: int,
        closed: Sequence[ClosedFamily | FamilyRunSums],
        run: str,
        scope: str,
        groups: Sequence[LabelValue],
    ) -> pl.DataFrame:
        """Return one row per group and point of a family. Undefined values are null."""
        family, study = self.families[number], self.studies[self.of_study[number]]
        points, count = family.points.tolist(), len(groups) * len(family.points)
        columns: dict[str, Any] = {"run": [run] * count, "correction": [study.name] * count}
        columns["point"] = np.tile(family.points, len(groups))
        for path, kind in self._axes.items():
            axis = study.paths.index(path) if path in study.paths else None
            values = [None if axis is None else study.points[point][axis] for point in points]
            texts = [None if value is None else str(value) for value in values]
            columns[path] = pl.Series((values if kind == pl.Float64 else texts) * len(groups), dtype=kind)
        labels = (None if group is None else str(group) for group in groups)
        columns["scope"] = [scope] * count
        columns["group"] = pl.Series([label for label in labels for _ in points], dtype=pl.String)
        totals, maxima = (
            {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
            for parts in ([own.totals for own in closed], [own.maxima for own in closed])
        )
        for name in ("tokens", "sequences"):
            columns[name] = np.repeat(totals[name].ravel(), len(points))
        found = evaluate_metrics(self.metrics[number], totals, maxima, family.grid)
        weight = family.correction.weight
        if weight is None or weight.normalize == "none":
            found["normalization_factor"] = np.full_like(found["normalization_factor"], np.nan)
        columns |= {key: values[:, family.places].ravel() for key, values in found.items()}
        return pl.DataFrame(columns, nan_to_null=True)


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
    predicted: tuple[Correction, ...]  # corrections to sample sequences for
    searches: tuple[tuple[str, ThresholdRule], ...]

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> _SweepPart:
        found = _SweepPart(sequences=empty_sample(len(self.predicted)))
        for batch in batches:
            sampled = collect_batch(batch, run, self.predicted) if self.predicted else empty_sample(0)
            grids = sum_grid(batch, run, self.searches, self.plan.by_prompt)
            found = found + _SweepPart(reduce_families(batch, run, self.plan, self.families), sampled, grids)
        return found


def sweep(
    paths: Sequence[DumpSource],  # files, folders, globs. Each is one run, unless a `run` column names the runs.
    chosen: Sequence[Study] = DEFAULT_STUDIES,  # corrections with their axes and unique names
    *,
    by: Sequence[str] = (),  # columns to break down by
    notice: Callable[[str], None] | None = None,  # called with a message before reading if much memory is needed
    wishes: Sequence[TargetValue] = (),  # targets to solve thresholds for, which takes a second pass
    outlook: ForecastRequest = NO_FORECASTS,  # predictions at some points of each study
    **options: Unpack[ReadOptions],
) -> Sweep:
    """Evaluate every point of every study in one pass."""
    if not chosen:
        raise ConfigError("no correction given: a sweep needs at least one correction with varying thresholds")
    check_correction_names([study.correction for study in chosen])
    parts = [(number, family) for number, study in enumerate(chosen) for family in group_families(study.grid)]
    kinds = [
        family.correction.model_copy(update={"name": f"{chosen[study].name} at point {family.points[0]}"})
        for study, family in parts
    ]
    reading = DumpReading.open(paths, kinds, by, **options)
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

    points = [(study, point) for study in chosen for point in thin_rows(range(len(study.points)), MAX_FORECAST_POINTS)]
    sampled = points if outlook.batch is not None or outlook.lengths else ()
    predicted = [study.correction_at(point) for study, point in sampled]
    sample, grids = empty_sample(len(predicted)), GridTables()
    work = _SweepPass(plan, families, tuple(predicted), list_searches(wishes))
    for done, may_grow in reading.parts(work):
        accumulator.add(done.sums)
        accumulator.close(may_grow)
        sample, grids = sample + done.sequences, add_grids(grids, done.grids)
    reading.require_tokens()
    accumulator.finish()
    overall = accumulator.overall()
    runs = list(overall["run"].unique(maintain_order=True))
    open_wishes, targets = find_brackets(grids, runs, wishes)
    if open_wishes:
        again = DumpReading.open(paths, (), (), **options)
        search = TargetSearch(tuple(open_wishes))
        targets += search.solve([one for found, _ in again.parts(search) for one in found])
    order = list(wishes)
    metrics = {metric.key: metric for known in accumulator.metrics for metric in known}
    groups = accumulator.groups()
    made = Sweep(
        studies=tuple(chosen),
        metrics=metrics,
        overall=add_pareto_column(overall, chosen),
        groups=groups,
        inputs=describe_input_files(reading),
        left_out=summarize_left_out(reading.problems),
        warnings=[*reading.dump.warnings, *reading.warnings],
        targets=tuple(sorted(targets, key=lambda target: order.index((target.wish, target.wanted)))),
        forecasts=make_forecasts(outlook, points, runs, sample, groups) if outlook != NO_FORECASTS else (),
        by=tuple(by),
    )
    made.summary = {run: sweep_sentences(made, run) for run in made.runs}
    return made


def price_targets(found: Sweep, paths: Sequence[DumpSource], **options: Unpack[ReadOptions]) -> list[dict[str, Any]]:
    """Compute the metrics at each solved threshold in one more pass. Targets that cannot be met get empty metrics."""
    studies = []
    for number, target in enumerate(found.targets):
        if target.correction is not None:
            correction = parse_correction({**target.correction, "name": f"{number}"}, "target")
            studies.append(Study(correction, ()))
    rows = sweep(paths, studies, **options).overall.to_dicts() if studies else []
    own = {(row["run"], row["correction"]): row for row in rows}
    return [own.get((target.run, f"{number}"), {}) for number, target in enumerate(found.targets)]
