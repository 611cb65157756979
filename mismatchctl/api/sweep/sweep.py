"""Evaluate all points (combinations of thresholds) in one pass over a dump, and find thresholds that meet targets."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from mismatchctl.api.analyze.analyze import describe_input_files, summarize_left_out
from mismatchctl.api.predict import SequenceSample, collect_batch, empty_sample
from mismatchctl.api.scan import DumpReading, ReadOptions, check_correction_names
from mismatchctl.api.sweep.result import (
    GROUP_SCOPE,
    MAX_FORECAST_POINTS,
    MET_EVERYWHERE,
    METRICS_WITH_ERRORS,
    OVERALL_SCOPE,
    ForecastRequest,
    SolvedThreshold,
    Sweep,
    add_pareto_column,
    make_forecasts,
    sweep_sentences,
    thin_rows,
)
from mismatchctl.api.sweep.study import DEFAULT_STUDIES, Study, ThresholdAxis
from mismatchctl.core.batch import Float64s, TokenBatch
from mismatchctl.core.formatting import INTERVAL_Z
from mismatchctl.core.ratios import LOG_RATIO_BOUND, Ratios
from mismatchctl.corrections.application import Selection, Weights, measure_gate
from mismatchctl.corrections.model import Correction, Gate, Weight
from mismatchctl.corrections.presets import parse_correction
from mismatchctl.data.paths import DumpSource
from mismatchctl.errors import ConfigError
from mismatchctl.measure.grid import sums as grid_sums
from mismatchctl.measure.grid.sums import ClosedFamily, FamilyCells, FamilyRunSums, FamilySums
from mismatchctl.measure.grid.thresholds import CorrectionFamily, group_families
from mismatchctl.measure.kernels import choose_kernel
from mismatchctl.measure.metrics.evaluation import GroupCells, GroupMerger
from mismatchctl.measure.metrics.registry import sweep_metrics
from mismatchctl.measure.reduction import MeasurePlan, split_runs
from mismatchctl.measure.sums import (
    GROUP_CAP,
    OVERALL_CAP,
    ClusterTable,
    LabelValue,
    PromptCounter,
    cluster_hashes,
    merge_parts,
    mix_hashes,
    step_hash,
    step_hashes,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack


TargetValue = tuple[str, float]
"""A target: the key of a metric, and the wanted value. Example: `("rejected_tokens", 0.01)`."""
TARGET_REJECTIONS = {"tokens": "rejected_tokens", "sequences": "rejected_sequences"}
ESS_METRIC = "ess_token"

_DISTANCE_GRID = np.geomspace(1e-7, LOG_RATIO_BOUND, 400)  # values of |log(threshold)| that the first pass tries


@dataclass(frozen=True)
class ThresholdRule:
    """A rule with a threshold x, such as "ratio within [1/x, x]". A sweep finds x for a target such as 1% rejection."""

    words: str  # description for tables, such as "token weights truncated at x"
    correction: Correction  # a correction that consists of this rule, with any threshold
    path: str  # field of `correction` that contains the threshold
    threshold: Callable[[float], float]  # converts a distance, |log(threshold)|, to the threshold

    def distances(self, batch: TokenBatch, ratios: Ratios, key: str) -> tuple[Float64s, Float64s]:
        """Return the values to compare with |log(threshold)|, and the number of tokens or sequences with each value."""
        everything = Selection.everything(batch.segments)
        if self.correction.weight is not None:
            weights = Weights(self.correction.weight, ratios, impossible=batch.impossible)
            return weights.log_ratio, np.ones(batch.tokens)
        gate = self.correction.gates[0]
        measured = measure_gate(gate, ratios, everything, batch)
        distance = -measured if gate.level == "min" else np.abs(measured)
        lengths = batch.segments.lengths.astype(np.float64)
        if gate.level == "token":
            if key == "rejected_tokens":
                return distance, np.ones(batch.tokens)
            distance = batch.segments.max(distance)
        some = batch.segments.nonempty
        return distance[some], (lengths if key == "rejected_tokens" else np.ones(len(batch)))[some]


def _symmetric_rule(level: str, words: str) -> ThresholdRule:
    gate = Gate.model_validate({"level": level, "keep": (0.5, 2.0)})
    return ThresholdRule(words, Correction(name=level, gates=(gate,)), "gates.0.keep", _upper_threshold)


def _upper_threshold(distance: float) -> float:
    """Return the smallest x such that [1/x, x] contains the ratios exp(distance) and exp(-distance)."""
    x = math.exp(distance)
    while math.log(x) < distance or math.log(1 / x) > -distance:
        x = math.nextafter(x, math.inf)
    return x


def _lower_threshold(distance: float) -> float:
    """Return the largest veto threshold that does not reject a token with the ratio exp(-distance)."""
    x = math.exp(-distance)
    while math.log(x) > -distance:
        x = math.nextafter(x, 0.0)
    return x


REJECTION_RULES = (
    _symmetric_rule("token", "token ratio within [1/x, x]"),
    _symmetric_rule("sequence", "sequence ratio within [1/x, x]"),
    _symmetric_rule("geometric", "geometric ratio within [1/x, x]"),
    ThresholdRule(
        "veto: no token ratio below x",
        Correction(name="veto", gates=(Gate(level="min", keep=(1e-4, None)),)),
        "gates.0.keep.0",
        _lower_threshold,
    ),
)
WEIGHT_RULES = (
    ThresholdRule(
        "token weights truncated at x",
        Correction(name="token", weight=Weight(truncate=2.0)),
        "weight.truncate",
        math.exp,
    ),
)


def rules_for_metric(key: str) -> tuple[ThresholdRule, ...]:
    return WEIGHT_RULES if key == ESS_METRIC else REJECTION_RULES


def list_searches(wishes: Iterable[TargetValue]) -> tuple[tuple[str, ThresholdRule], ...]:
    return tuple((key, rule) for key in dict.fromkeys(key for key, _ in wishes) for rule in rules_for_metric(key))


GridTables = dict[str, list[ClusterTable]]
"""Run -> one table per search (a metric and a rule). A row contains the number of tokens or sequences of one cluster in
each bin of _DISTANCE_GRID. For the ESS, each bin also has a sum of weights and a sum of squared weights."""
_BINS = len(_DISTANCE_GRID) + 1


def sum_grid(batch: TokenBatch, run: str, searches: Sequence[tuple[str, ThresholdRule]], by_prompt: bool) -> GridTables:
    """For each search (metric, rule), count tokens or sequences between neighboring thresholds of _DISTANCE_GRID."""
    found = {}
    for name, part in split_runs(batch, run) if searches else ():
        part = part.take(np.flatnonzero(part.segments.nonempty))
        clusters = cluster_hashes(part)
        clusters = clusters if by_prompt else mix_hashes(clusters, step_hashes(part))
        folded = len(np.unique(clusters)) > OVERALL_CAP
        hashes, rows = np.unique(clusters % np.uint64(OVERALL_CAP) if folded else clusters, return_inverse=True)
        tables = [np.zeros((3 if key == ESS_METRIC else 1, len(hashes) * _BINS)) for key, _ in searches]
        for start, block in part.blocks(1 << 18):
            ratios, of = Ratios(block.train, block.rollout, block.segments), rows[start : start + len(block)]
            for table, (key, rule) in zip(tables, searches, strict=True):
                distances, mass = rule.distances(block, ratios, key)
                row = of if len(distances) == len(of) else block.segments.spread(of)
                where = row * _BINS + np.searchsorted(_DISTANCE_GRID, distances)
                weights = np.exp(np.clip(distances, -LOG_RATIO_BOUND, LOG_RATIO_BOUND))
                for total, values in zip(table, (mass, weights, weights * weights), strict=False):
                    total += np.bincount(where, values, len(total))
        sums = [
            table.reshape(len(table), len(hashes), _BINS).swapaxes(0, 1).reshape(len(hashes), len(table) * _BINS)
            for table in tables
        ]
        none = np.zeros_like(hashes), np.zeros((len(hashes), 0))
        found[name] = [ClusterTable(hashes, none[0], each, none[1], folded) for each in sums]
    return found


def add_grids(some: GridTables, more: GridTables) -> GridTables:
    return merge_parts(some, more, lambda a, b: [(x + y).fold(OVERALL_CAP) for x, y in zip(a, b, strict=True)])


def _evaluate_grid(key: str, sums: Float64s) -> tuple[Float64s, Float64s]:
    """Return the metric `key` at each threshold of _DISTANCE_GRID, and its standard error by the delta method."""
    mass = sums[:, :_BINS]
    total, beyond = mass.sum(axis=1, keepdims=True), mass[:, ::-1].cumsum(axis=1)[:, -2::-1]
    with np.errstate(all="ignore"):
        if key == ESS_METRIC:
            bound = np.exp(_DISTANCE_GRID)
            first, second = (
                moment.cumsum(axis=1)[:, :-1] + beyond * bound**power
                for power, moment in enumerate((sums[:, _BINS : 2 * _BINS], sums[:, 2 * _BINS :]), 1)
            )
            whole = [each.sum(axis=0) for each in (total, first, second)]
            values = whole[1] ** 2 / (whole[0] * whole[2])
            influence = values * (2 * first / whole[1] - total / whole[0] - second / whole[2])
        else:
            values = beyond.sum(axis=0) / total.sum()
            influence = (beyond - values * total) / total.sum()
        clusters = len(sums)
        factor = clusters / (clusters - 1) if clusters > 1 else np.nan
        return values, np.sqrt((influence**2).sum(axis=0) * factor)


BracketValues = list[tuple[int, Float64s, Float64s]]
"""(index of a bracket, distances within it, number of tokens or sequences at each distance), one tuple per block."""


@dataclass(frozen=True)
class TargetBracket:
    """Two neighboring points of _DISTANCE_GRID. The threshold that meets the target `wanted` is between them."""

    run: str
    key: str
    wanted: float
    rule: ThresholdRule
    place: int  # the target is met at grid point `place` - 1 or `place`, but not at the other one
    bins: Float64s  # tokens or sequences per bin, [1, BINS]. For the ESS, also sums of w and w^2, [3, BINS]
    reached: float  # value of the metric at the grid point that meets the target
    # 95% interval of the threshold, as distances. Ends outside the grid are None. With one cluster, `interval` is None.
    interval: tuple[float | None, float | None] | None

    def select(self, distances: Float64s, mass: Float64s) -> tuple[Float64s, Float64s]:
        within = (distances > _DISTANCE_GRID[self.place - 1]) & (distances <= _DISTANCE_GRID[self.place])
        return distances[within], mass[within]

    def solve(self, distances: Float64s, mass: Float64s) -> SolvedThreshold:
        order = np.argsort(distances, kind="stable")
        distances, mass = distances[order], mass[order]
        total, above = self.bins[0].sum(), self.bins[0, self.place + 1 :].sum()
        if self.key == ESS_METRIC:  # the largest distance at which the ESS is at least `wanted`
            weights = np.exp(distances)
            below = self.bins[:, : self.place].sum(axis=1)
            beyond = total - below[0] - np.arange(1, len(weights) + 1)
            first = below[1] + np.cumsum(weights) + beyond * weights
            reached = first**2 / (total * (below[2] + np.cumsum(weights**2) + beyond * weights**2))
            met = np.flatnonzero(reached >= self.wanted)[::-1]
        else:  # the smallest distance that rejects at most `wanted`. Equal distances are rejected together
            beyond = above + np.append(np.cumsum(mass[::-1])[::-1][1:], 0.0)[: len(mass)]
            reached = beyond / total
            met = np.flatnonzero((reached <= self.wanted) & np.append(np.diff(distances) > 0, True)[: len(mass)])
        if len(met):
            return self._at(float(distances[met[0]]), float(reached[met[0]]))
        return self._at(_DISTANCE_GRID[self.place - (self.key == ESS_METRIC)], self.reached)

    def _at(self, distance: float, reached: float) -> SolvedThreshold:
        threshold, interval = self.rule.threshold(distance), None
        if self.interval is not None:
            low, high = (None if end is None else self.rule.threshold(end) for end in self.interval)
            interval = (low, high) if self.rule.threshold(1.0) > 1 else (high, low)
        study = Study(self.rule.correction, (ThresholdAxis(self.rule.path, (threshold,)),))
        return SolvedThreshold(
            run=self.run, wish=self.key, wanted=self.wanted, rule=self.rule.words,
            correction=study.correction_at(0).to_mapping(), threshold=threshold, interval=interval, reached=reached,
        )  # fmt: skip


def find_brackets(
    grids: GridTables, runs: Iterable[str], wishes: Sequence[TargetValue]
) -> tuple[list[TargetBracket], list[SolvedThreshold]]:
    """Find the two thresholds between which each target is met. Also list targets that all or no thresholds meet."""
    found, missed, searches, unknown = [], [], list_searches(wishes), np.full(1, np.nan)
    for run in runs:
        measured = {
            (key, rule.words): (*_evaluate_grid(key, table.sums), table.sums.sum(axis=0).reshape(-1, _BINS))
            for (key, rule), table in zip(searches, grids.get(run, ()), strict=False)
        }
        for key, wanted in wishes:
            for rule in rules_for_metric(key):
                values, errors, bins = measured.get((key, rule.words), (unknown, unknown, unknown))
                met = values >= wanted if key == ESS_METRIC else values <= wanted
                if not met.any() or met.all():
                    shown = (
                        "undefined" if np.isnan(values).all() else f"{np.nanmin(values):.3g} to {np.nanmax(values):.3g}"
                    )
                    status = f"{MET_EVERYWHERE if met.all() else 'met at no threshold'}: {shown}"
                    missed.append(SolvedThreshold(run=run, wish=key, wanted=wanted, rule=rule.words, status=status))
                    continue
                first = int(np.flatnonzero(~met)[0]) if key == ESS_METRIC else int(np.flatnonzero(met)[0])
                inside = np.abs(values - wanted) <= INTERVAL_Z * np.nan_to_num(errors)
                ends = None if np.isnan(errors[first - 1 : first + 1]).any() else _bracket_ends(inside, first)
                reached = float(values[first - 1 if key == ESS_METRIC else first])
                found.append(TargetBracket(run, key, wanted, rule, first, bins, reached, ends))
    return found, missed


def _bracket_ends(inside: np.ndarray, first: int) -> tuple[float | None, float | None]:
    """Return the 95% interval of a threshold, on the scale of _DISTANCE_GRID. An end outside the grid is `None`."""
    places = np.flatnonzero(inside)
    low, high = (min(int(places[0]), first - 1), max(int(places[-1]), first)) if len(places) else (first - 1, first)
    return (None if low == 0 else float(_DISTANCE_GRID[low])), (
        None if high == len(_DISTANCE_GRID) - 1 else float(_DISTANCE_GRID[high])
    )


@dataclass(frozen=True)
class TargetSearch:
    """The second pass over the dump. It finds the exact threshold between the two grid points of each bracket."""

    brackets: tuple[TargetBracket, ...]

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> BracketValues:
        found: BracketValues = []
        for batch in batches:
            for name, part in split_runs(batch, run):
                for _, block in part.blocks():
                    ratios = Ratios(block.train, block.rollout, block.segments)
                    for number, one in enumerate(self.brackets):
                        if one.run == name:
                            found.append((number, *one.select(*one.rule.distances(block, ratios, one.key))))
        return found

    def solve(self, found: BracketValues) -> list[SolvedThreshold]:
        none = np.zeros(0)
        values = [
            [np.concatenate([none, *(part[which] for part in found if part[0] == number)]) for which in (1, 2)]
            for number in range(len(self.brackets))
        ]
        return [one.solve(*own) for one, own in zip(self.brackets, values, strict=True)]


@dataclass
class _RunSums:
    overall: list[FamilyRunSums]
    by: dict[str, dict[LabelValue, list[FamilyRunSums]]] = field(default_factory=dict)


class SweepAccumulator(GroupMerger[list[FamilySums]]):
    """Adds up the sums of all parts of a dump. When a step is complete, computes the step's rows of the table."""

    closing_size = 1 << 20

    def __init__(
        self, plan: MeasurePlan, families: Sequence[CorrectionFamily], studies: Sequence[Study], of_study: Sequence[int]
    ) -> None:
        super().__init__(plan.by, lambda cell: sum(sums.size for sums in cell), grid_sums.add_families)
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
                factors = grid_sums.family_factors(family, whole)
                closed.append(grid_sums.close_family(family, whole, factors))
                totals.overall[number].add(closed[-1], salt)
                for values, cell in cells.items() if self.plan.by else ():
                    own = grid_sums.close_family(family, cell[number], factors)
                    for column, value in zip(self.plan.by, values, strict=True):
                        found = totals.by.setdefault(column, {}).setdefault(value, self._empty_sums())
                        found[number].add(own, salt)
            rows.append(self._rows(number, closed, run, GROUP_SCOPE, steps))
        self._add(rows, steps)

    def _empty_sums(self) -> list[FamilyRunSums]:
        return [FamilyRunSums(prompts=PromptCounter() if self.plan.by_prompt else None) for _ in self.families]

    def _add(self, rows: Sequence[pl.DataFrame], labels: Sequence[LabelValue]) -> None:
        """Append the rows of each CorrectionFamily, ordered by `labels` (steps or values of a `--by` column)."""
        order = np.concatenate([np.repeat(np.arange(len(labels)), len(own) // len(labels)) for own in rows])
        self._tables.append(pl.concat(rows, how="diagonal_relaxed")[np.argsort(order, kind="stable")])
        self._labels += labels

    def overall(self) -> pl.DataFrame:
        frames: dict[tuple[str, int], list[pl.DataFrame]] = {}
        for run, totals in self.runs.items():
            for number, closed in enumerate(totals.overall):
                family = self.families[number]
                rows = family.layouts.rows.arrays(grid_sums.merge_tables(closed.rows, OVERALL_CAP).sums)
                wanted = [metric for metric in self.metrics[number] if metric.key in METRICS_WITH_ERRORS]
                errors = grid_sums.standard_errors(wanted, closed.totals, rows, family.grid)
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
        """Return the rows of all steps and `--by` values. The column `group` is numeric if all labels are numbers."""
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
        """Return one row per group and per correction (point) of family `number`. Undefined values are null."""
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
        found = grid_sums.evaluate_metrics(self.metrics[number], totals, maxima, family.grid)
        weight = family.correction.weight
        if weight is None or weight.normalize == "none":
            found["normalization_factor"] = np.full_like(found["normalization_factor"], np.nan)
        columns |= {key: values[:, family.places].ravel() for key, values in found.items()}
        return pl.DataFrame(columns, nan_to_null=True)


MEMORY_WARNING_BYTES = 1_000_000_000
"""If a sweep probably needs more memory than this, it warns the user through `notice`."""


@dataclass(frozen=True)
class _SweepPart:
    sums: FamilyCells = field(default_factory=dict)
    sequences: SequenceSample = field(default_factory=lambda: empty_sample(0))
    grids: GridTables = field(default_factory=dict)

    def __add__(self, other: _SweepPart) -> _SweepPart:
        sums, grids = merge_parts(self.sums, other.sums, grid_sums.add_families), add_grids(self.grids, other.grids)
        return _SweepPart(sums, self.sequences + other.sequences, grids)


@dataclass(frozen=True)
class _SweepPass:
    plan: MeasurePlan
    families: tuple[CorrectionFamily, ...]
    predicted: tuple[Correction, ...]  # corrections that predictions are made for
    searches: tuple[tuple[str, ThresholdRule], ...]

    def __call__(self, batches: Iterable[TokenBatch], run: str) -> _SweepPart:
        found = _SweepPart(sequences=empty_sample(len(self.predicted)))
        for batch in batches:
            sampled = collect_batch(batch, run, self.predicted) if self.predicted else empty_sample(0)
            grids = sum_grid(batch, run, self.searches, self.plan.by_prompt)
            found = found + _SweepPart(grid_sums.reduce_families(batch, run, self.plan, self.families), sampled, grids)
        return found


def sweep(
    paths: Sequence[DumpSource],  # files, folders, globs. Each is one run, unless its rows have a column `run`
    chosen: Sequence[Study] = DEFAULT_STUDIES,  # studies with unique names
    *,
    by: Sequence[str] = (),  # columns of the dump to break the metrics down by
    notice: Callable[[str], None] | None = None,  # called with a warning if much memory is needed
    wishes: Sequence[TargetValue] = (),  # targets. A second pass finds thresholds that meet them
    outlook: ForecastRequest | None = None,  # predictions to make, at a few points of each study
    **options: Unpack[ReadOptions],
) -> Sweep:
    """Compute the metrics at every point of every study, in one pass over the dumps."""
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
        tuple(kinds), tuple(by), kernel=choose_kernel(reading.expected_tokens), by_prompt=reading.dump.has("prompt_id")
    )
    sequences = sum(unit.sequences for unit in reading.dump.units)
    needed = 8 * sum(family.layouts.rows.width for family in families) * min(sequences, GROUP_CAP + 2 * OVERALL_CAP)
    if notice is not None and needed > MEMORY_WARNING_BYTES:
        notice(
            f"{sum(math.prod(study.shape) for study in chosen):,} points may take {needed / 1e9:.1f} GB of memory "
            "in addition to reading, for the sums of each point by cluster. Sweep fewer thresholds to use less"
        )
    accumulator = SweepAccumulator(plan, families, chosen, [number for number, _ in parts])

    outlook = outlook or ForecastRequest()
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
        forecasts=make_forecasts(outlook, points, runs, sample, groups),
        by=tuple(by),
    )
    made.summary = {run: sweep_sentences(made, run) for run in made.runs}
    return made


def price_targets(found: Sweep, paths: Sequence[DumpSource], **options: Unpack[ReadOptions]) -> list[dict[str, Any]]:
    """Read the dumps again to compute the metrics at the threshold of each target ({} without a threshold)."""
    studies = []
    for number, target in enumerate(found.targets):
        if target.correction is not None:
            correction = parse_correction({**target.correction, "name": f"{number}"}, "target")
            studies.append(Study(correction, ()))
    rows = sweep(paths, studies, **options).overall.to_dicts() if studies else []
    own = {(row["run"], row["correction"]): row for row in rows}
    return [own.get((target.run, f"{number}"), {}) for number, target in enumerate(found.targets)]
