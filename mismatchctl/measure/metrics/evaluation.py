"""Compute the metrics of complete training steps: normalize weights, and evaluate formulas with standard errors."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial, reduce
from operator import add
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mismatchctl.core.batch import Float64s
from mismatchctl.corrections.application import normalization_divisor
from mismatchctl.corrections.model import Correction, Weight
from mismatchctl.measure.columns import MISMATCH_NAME, PAIRS, POLICY_NAMES, Pair
from mismatchctl.measure.metrics.metric import (
    NO_QUANTILE,
    Estimate,
    Metric,
    MetricTails,
    Totals,
    compute_intervals,
    compute_quantiles,
)
from mismatchctl.measure.metrics.registry import (
    BASE_METRICS,
    FACET_METRICS,
    PAIR_METRICS,
    RATIO_Z,
    SPLITS,
    SPREAD_METRICS,
    correction_metrics,
)
from mismatchctl.measure.reduction import MeasurePlan, Sums, check_breakdown_values
from mismatchctl.measure.sums import (
    GROUP_CAP,
    CellSums,
    ClusterTable,
    ColumnSubject,
    Hashes,
    LabelValue,
    PairSums,
    PromptCounter,
    RunSums,
    TableAxis,
    step_hash,
)

_EXCESS_COUNTS = {"weight_excess": "tokens", "kept_excess": "kept"}  # sum of w - 1 -> count of its tokens
_FACTOR_COLUMNS = ("weight_excess", "tokens", "mean_excess", "sequences", "empty_sequences")
_LINEAR_COLUMNS = ("sequence_weight", "loss", "loss_mean", "gradient_product")
"""Sums that double if all weights double. All but `sequence_weight` need current log-probs in the dump."""
_LOSS_COLUMNS = ("loss", "loss_mean", "gradient_product", "squared_gradient")
_CANCELLATION_LIMIT = 1e-14  # if normalization leaves less of the sum of (w - 1)^2, the rest is rounding error
_SQUARED_COLUMNS = ("squared_sequence_weight", "squared_kept_weight", "squared_gradient")


@dataclass(frozen=True)
class ScopeFactors:
    """The divisors that normalize weights, one per micro-batch and correction."""

    scopes: Hashes  # hash of each micro-batch [M], ascending
    factors: Float64s  # a divisor per micro-batch and correction [M, ...]

    def at(self, scopes: Hashes) -> Float64s:
        return self.factors[np.searchsorted(self.scopes, scopes)]


def normalization_factors(rule: Weight, columns: Mapping[str, Float64s], scopes: Hashes) -> ScopeFactors:
    """Compute the divisor that normalizes the weights of each micro-batch. `scopes` is the micro-batch of each row."""
    names = ("weight_excess", "tokens") if rule.normalize == "token" else ("mean_excess", "sequences")
    excess, number = (columns[name] for name in names)
    if counts_empty(rule):  # an empty sequence has weight 0, and w - 1 = -1
        excess, number = excess - columns["empty_sequences"], number + columns["empty_sequences"]
    found, where = np.unique(scopes, return_inverse=True)

    def total(values: Float64s) -> Float64s:
        sums = np.zeros((len(found), *values.shape[1:]))
        np.add.at(sums, where if rule.normalize_over == "micro_batch" else 0 * where, values)
        return sums if rule.normalize_over == "micro_batch" else np.broadcast_to(sums[:1], sums.shape)

    return ScopeFactors(found, normalization_divisor(1 + total(excess) / np.maximum(total(number), 1)))


def counts_empty(rule: Weight | None) -> bool:
    return rule is not None and rule.normalize == "sequence" and rule.normalize_empty == "count"


def group_factors(table: ClusterTable, plan: MeasurePlan) -> ScopeFactors:
    """Return the divisor of the weights for each micro-batch and correction, which is 1 without normalization."""
    scopes = np.unique(table.scopes)
    factors = np.ones((len(scopes), len(plan.corrections)))
    for index, correction in enumerate(plan.corrections):
        rule = correction.weight
        if rule is not None and rule.normalize != "none":
            columns = {name: table.sums[:, plan.sums.position(index, name)] for name in _FACTOR_COLUMNS}
            factors[:, index] = normalization_factors(rule, columns, table.scopes).factors
    return ScopeFactors(scopes, factors)


def close_cell(cell: CellSums, group: ScopeFactors, plan: MeasurePlan) -> CellSums:
    """Return the final sums of one group: normalize its weights, merge its micro-batches, and count its clusters."""
    table, width, corrections = cell.table, len(plan.sums), len(plan.corrections)
    sums = np.zeros((width + 2 * corrections + 1, len(table))).T
    sums[:, :width], maxima = table.sums, table.maxima.copy(order="K")
    factors, tokens = group.at(table.scopes), plan.sums.position(MISMATCH_NAME, "tokens")
    for index, correction in enumerate(plan.corrections):
        factor = factors[:, index]
        sums[:, width + index] = factor * sums[:, tokens]
        if correction.weight is None or correction.weight.normalize == "none":
            continue
        places = plan.sums.owner_columns(index)
        columns = {name: sums[:, place] for name, place in places.items()} | {"tokens": sums[:, tokens]}
        for name, values in normalize_columns(columns, factor, correction).items():
            sums[:, places[name]] = values
        for name in ("weight", "-weight"):
            maxima[:, plan.maxima.position(index, name)] /= factor
    made = ClusterTable(table.clusters, table.scopes, sums, maxima, table.is_folded).merge_scopes()
    if not table.is_folded:  # the rows of a folded table are not single clusters
        counted = (made.sums[:, tokens] > 0).astype(np.float64)
        made.sums[:, width + corrections] = counted
        for index in range(corrections):
            kept = made.sums[:, plan.sums.position(index, "kept")]
            made.sums[:, width + corrections + 1 + index] = counted * (kept == 0)
    return CellSums(made, cell.pairs)


def merge_groups(cells: Sequence[CellSums], salts: Hashes, plan: MeasurePlan) -> CellSums:
    """Combine sums of steps. Rows get the hash of their step (`salts`). Merge rows if there are over `max_clusters`."""
    tables = [cell.table for cell in cells]
    names = dict.fromkeys(name for cell in cells for name in cell.pairs)
    pairs = {name: PairSums.combine([cell.pairs[name] for cell in cells if name in cell.pairs]) for name in names}
    scopes = np.repeat(salts, [len(table) for table in tables])
    return CellSums(ClusterTable.combine(tables, scopes, plan.max_clusters, by_prompt=plan.by_prompt), pairs)


def normalize_columns(columns: Mapping[str, Float64s], factor: Float64s, correction: Correction) -> dict[str, Float64s]:
    """Divide the weights of a correction by `factor`. Return the new values of the columns that change."""
    shift, found = 1 - factor, {}  # w/F - 1 = (w - 1 + shift) / F
    for name, count in _EXCESS_COUNTS.items():
        found[name] = (columns[name] + columns[count] * shift) / factor
    if "squared_weight_excess" in columns:
        before = columns["squared_weight_excess"]
        squares = before + 2 * shift * columns["weight_excess"] + columns["tokens"] * shift**2
        found["squared_weight_excess"] = np.where(squares < _CANCELLATION_LIMIT * before, 0.0, squares / factor**2)
    scaled = (
        columns if correction.weights_loss else {name: columns[name] for name in columns if name not in _LOSS_COLUMNS}
    )
    found |= {name: scaled[name] / factor for name in _LINEAR_COLUMNS if name in scaled}
    return found | {name: scaled[name] / factor**2 for name in _SQUARED_COLUMNS if name in scaled}


def closed_axis(plan: MeasurePlan) -> TableAxis:
    """Return the column names of the tables that `close_cell` returns."""
    numbers = range(len(plan.corrections))
    return TableAxis(
        (
            *plan.sums.names,
            *((index, "factor") for index in numbers),
            (MISMATCH_NAME, "clusters"),
            *((index, "empty_cluster") for index in numbers),
        )
    )


Estimates = dict[str, Estimate]
IMAGINARY_STEP = 1e-100  # step of the complex-step method for derivatives, which avoids cancellation errors


def pair_metrics(pair: Pair) -> tuple[Metric, ...]:
    """Return the metrics of a pair of policies. Most keys begin with the prefix of the pair, such as `drift_`."""
    return tuple(
        replace(
            metric,
            key=pair.key(metric.key),
            title=f"{pair.title}: {_replace_policies(metric.title, pair)}",
            definition=_replace_policies(metric.definition, pair),
            meaning=f"Part of {pair.meaning}. Between trainer and rollout, the same metric is {metric.key}.",
            measure=metric.measure and replace(metric.measure, basis=pair.source),
        )
        for metric in (*PAIR_METRICS, RATIO_Z)
    ) + SPLITS.get(pair.name, ())


def _replace_policies(text: str, pair: Pair) -> str:
    names = {"trainer": POLICY_NAMES[pair.policy], "rollout": POLICY_NAMES[pair.reference]}
    return re.sub("trainer|rollout", lambda match: names[match[0]], text)


def other_metrics() -> tuple[Metric, ...]:
    return sum((*map(pair_metrics, PAIRS[1:]), FACET_METRICS), ())


@dataclass(frozen=True)
class EstimateRow:
    """Metrics of several steps: without a correction, and with each correction."""

    metrics: Estimates
    corrections: list[Estimates]

    @classmethod
    def concatenate(cls, parts: Sequence[EstimateRow]) -> EstimateRow:
        return cls(
            _join_estimates([part.metrics for part in parts]),
            [_join_estimates(own) for own in zip(*(part.corrections for part in parts), strict=True)],
        )


def _join_estimates(parts: Sequence[Estimates]) -> Estimates:
    return {key: Estimate.concatenate([part[key] for part in parts]) for key in parts[0]}


class _GroupSums:
    """Sums of several steps: per cluster, and in total per step."""

    def __init__(self, groups: Sequence[CellSums]) -> None:
        sizes = np.array([len(group.table) for group in groups])
        # index of the first row of each group, and index of the group of each row
        self.starts, self.of_row = np.cumsum(sizes) - sizes, np.repeat(np.arange(len(groups)), sizes)
        self.sums = np.concatenate([group.table.sums for group in groups])  # [R, K] with the columns of `closed_axis`
        maxima = np.concatenate([group.table.maxima for group in groups])
        self.totals = np.add.reduceat(self.sums, self.starts, axis=0)
        self.largest = np.maximum.reduceat(maxima, self.starts, axis=0)
        self.pairs = [group.pairs for group in groups]


_Section = tuple[tuple[Metric, ...], Collection[str]]
"""(metrics of one pair of policies or of one correction, keys of the metrics among them without standard errors)."""


class Evaluator:
    """Computes all metrics of a plan from sums. To save time, it evaluates each formula for many steps at once."""

    def __init__(self, plan: MeasurePlan) -> None:
        self.plan = plan
        self.columns = closed_axis(plan)

    def _sections(self, excluded: frozenset[str] | None) -> Iterator[tuple[ColumnSubject, _Section]]:
        absent = excluded or frozenset()
        unsure = frozenset() if excluded is None else OTHER_PAIR_METRICS - OTHER_METRICS_WITH_ERRORS
        facets = (metric for facet in self.plan.facets for metric in facet.metrics if metric.key not in absent)
        yield MISMATCH_NAME, ((*BASE_METRICS, *PAIR_METRICS, *facets), unsure)
        for pair in self.plan.pairs[1:]:
            own = tuple(metric for metric in PAIR_METRICS if pair.key(metric.key) not in absent)
            own += SPLITS.get(pair.name, ())
            yield pair.name, (own, {metric.key for metric in own if unsure & {metric.key, pair.key(metric.key)}})
        for index, correction in enumerate(self.plan.corrections):
            own = correction_metrics(correction, self.plan.has_losses)
            keys = () if excluded is None else (metric.key for metric in own)
            yield index, (own, {key for key in keys if key not in METRICS_WITH_GROUP_ERRORS})

    def evaluate(self, groups: Sequence[CellSums], excluded: frozenset[str] | None = None) -> EstimateRow:
        cells = _GroupSums([group.merge_scopes() if self.plan.by_prompt else group for group in groups])
        done = {owner: self._section(owner, section, cells) for owner, section in self._sections(excluded)}
        metrics = _add_z(done[MISMATCH_NAME])
        for pair in self.plan.pairs[1:]:
            shares = {metric.key for metric in SPLITS.get(pair.name, ())}
            found = _add_z(done[pair.name])
            metrics |= {key if key in shares else pair.key(key): estimate for key, estimate in found.items()}
        corrections = []
        for index, correction in enumerate(self.plan.corrections):
            estimates = done[index]
            if correction.weight is None or correction.weight.normalize == "none":
                known = estimates["normalization_factor"]
                undefined = np.full(len(groups), np.nan)
                estimates["normalization_factor"] = Estimate.without_error(
                    undefined, known.undefined, np.isinf(undefined)
                )
            corrections.append(estimates)
        return EstimateRow(metrics, corrections)

    def _section(self, owner: ColumnSubject, section: _Section, cells: _GroupSums) -> Estimates:
        @cache
        def read(name: str) -> Float64s:
            return cells.totals[:, self.columns.position(owner, name)]

        def read_cell(cell: int, name: str) -> Any:
            return read(name)[cell]

        def read_rows(name: str) -> Float64s:
            return cells.sums[:, self.columns.position(owner, name)]

        metrics, without_errors = section
        of_maxima = self.plan.maxima.owner_columns(owner)
        maxima = {name: cells.largest[:, position] for name, position in of_maxima.items()}
        tails: list[tuple[Totals, MetricTails]] = []
        if any(metric.tail or metric.quantile for metric in metrics):
            for cell, pairs in enumerate(cells.pairs):
                largest = {name: float(each[cell]) for name, each in maxima.items()}
                tails.append((ColumnReader(partial(read_cell, cell)), MetricTails(largest, pairs.get(str(owner)))))
        found, unknown = dict[str, Estimate](), np.full(len(cells.pairs), np.nan)
        with np.errstate(all="ignore"):
            clusters = np.add.reduceat((read_rows("tokens") != 0).astype(np.float64), cells.starts)
            quantiles = _evaluate_quantiles(section, [own for _, own in tails])
            for metric in metrics:
                se, interval, covers = unknown, np.stack([unknown, unknown], axis=1), unknown
                if metric.quantile is not None:
                    value, *ends = quantiles[metric.key]
                    interval, covers = (interval, covers) if metric.key in without_errors else ends
                elif metric.tail is not None:
                    value = np.array([metric.tail(*own) for own in tails], np.float64)
                else:
                    value = evaluate_metric(metric, ColumnReader(read), maxima, (len(unknown),))
                    if metric.formula and metric.has_error and metric.key not in without_errors:
                        influence = np.zeros(len(cells.of_row))
                        for name, slope in formula_slopes(metric, lambda name: read(name) + 0j):
                            influence += read_rows(name) * np.broadcast_to(slope, len(unknown))[cells.of_row]
                        influence *= influence
                        squares = np.add.reduceat(influence, cells.starts)
                        effective = squares**2 / np.add.reduceat(influence * influence, cells.starts)
                        se = np.sqrt(squares * np.where(clusters < 2, np.nan, clusters / (clusters - 1)))
                        interval, covers = compute_intervals(metric.scale, value, se, effective, clusters)
                found[metric.key] = Estimate(value, metric.undefined, read("tokens") == 0, se, interval, covers)
        return found


def _evaluate_quantiles(section: _Section, tails: Sequence[MetricTails]) -> dict[str, list[NDArray[Any]]]:
    """Evaluate quantile metrics. Return {metric key: [values, intervals, coverage of the intervals]}, by step."""
    quantiles = {metric.key: metric.quantile for metric in section[0] if metric.quantile is not None}
    sure, found = any(key not in section[1] for key in quantiles), []
    for own in tails:
        if own.pair is None:
            found.append([NO_QUANTILE] * len(quantiles))
            continue
        largest = max(own.maxima["log_ratio"], own.maxima["-log_ratio"])
        found.append(compute_quantiles(own.pair, list(quantiles.values()), largest, with_intervals=sure))
    columns = ([np.array(each) for each in zip(*own, strict=True)] for own in zip(*found, strict=True))
    return dict(zip(quantiles, columns, strict=True))


class ColumnReader:
    """Reads columns and records their names. To compute a derivative, it adds i * IMAGINARY_STEP to column `moved`."""

    def __init__(self, read: Callable[[str], Any], moved: str = "") -> None:
        self._read, self._moved = read, moved
        self.names: dict[str, None] = {}

    def __getitem__(self, name: str) -> Any:
        self.names[name] = None
        found = self._read(name)
        return found + 1j * IMAGINARY_STEP if name == self._moved else found


def evaluate_metric(metric: Metric, totals: Totals, maxima: Mapping[str, Any], shape: tuple[int, ...]) -> Float64s:
    """Evaluate a metric from sums and maxima, or return NaN if the metric needs a histogram."""
    value: Any = np.nan
    if metric.formula is not None:
        value = metric.formula(totals)
    elif metric.extreme is not None:
        value = metric.extreme(maxima)
    return np.broadcast_to(np.asarray(value, np.float64), shape)


def formula_slopes(metric: Metric, read: Callable[[str], Any]) -> Iterator[tuple[str, Any]]:
    """For each column that the metric's formula reads, yield its name and the formula's derivative by this column."""
    assert metric.formula is not None
    reader = ColumnReader(read)
    metric.formula(reader)
    for name in reader.names:
        yield name, np.imag(metric.formula(ColumnReader(read, name))) / IMAGINARY_STEP


def _add_z(estimates: Estimates) -> Estimates:
    mean = estimates["ratio_mean"]
    with np.errstate(all="ignore"):
        z = np.where(mean.se > 0, (mean.value - 1) / mean.se, np.nan)
    return estimates | {RATIO_Z.key: Estimate.without_error(z, RATIO_Z.undefined, np.zeros(len(z), np.bool_))}


REPEATED_METRICS = frozenset(
    pair.key(key)
    for pair in PAIRS[1:]
    for key in (
        *(f"khat_{level}_{what}" for level in ("token", "sequence") for what in ("limit", "tail")),
        *(f"{side}_{ppl}" for side in ("train", "rollout") for ppl in ("log_ppl", "ppl")),
        *("ppl_ratio", "log_ppl_diff_min", "log_ppl_diff_max", "khat_token", "khat_sequence"),
    )
)
"""Metrics of other pairs, such as `drift`, that are not stored per step: copies, or metrics that need more tokens."""
_SPREAD_KEYS = frozenset(metric.key for metric in SPREAD_METRICS)
METRICS_NOT_BY_STEP = (
    REPEATED_METRICS
    | frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("autocorr_lag1", "inflation", "k3_worst_share"))
    | _SPREAD_KEYS - {"beyond_2", "parity_tokens"}
)
"""All metrics that are only stored per run, not per step. This saves memory in runs with a thousand steps."""
OTHER_PAIR_METRICS = frozenset(metric.key for pair in PAIRS[1:] for metric in pair_metrics(pair)) | _SPREAD_KEYS
"""Keys of the metrics of all policy pairs except the mismatch, such as `drift_k3`, and keys of SPREAD_METRICS."""
METRICS_WITH_GROUP_ERRORS = frozenset(
    ("rejected_tokens", "rejected_sequences", "ess_token", "ess_sequence", "weight_mean")
)
OTHER_METRICS_WITH_ERRORS = frozenset(pair.key(key) for pair in PAIRS[1:] for key in ("k3", "ratio_mean"))

NormalizationFactors = list[tuple[str, str, int, tuple[float, ...]]]
"""List of (run, step, hash of the micro-batch, divisors of the weights: one per correction)."""

CellT = TypeVar("CellT")
GroupCells = dict[tuple[LabelValue, ...], CellT]


class GroupMerger(ABC, Generic[CellT]):
    """Adds up sums per step, in the order of the input. Evaluates complete steps early to save memory."""

    # Complete steps are evaluated when they contain about this number of sums in total.
    closing_size: ClassVar[int] = 1 << 22

    def __init__(
        self,
        by: Sequence[str],
        size: Callable[[CellT], int],  # returns the approximate number of stored values
        merge: Callable[[CellT, CellT], CellT],  # adds the sums of two batches
    ) -> None:
        self._by, self._size, self._merge_cells = by, size, merge
        self._known_values: dict[tuple[str, str], set[LabelValue]] = {}
        self._open: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._complete: dict[tuple[str, LabelValue], GroupCells[CellT]] = {}
        self._complete_size = 0

    @abstractmethod
    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[CellT]]) -> None:
        """Evaluate steps that are complete. `groups` has a dict per step, which maps `--by` values to sums."""

    def merge(self, run: str, step: LabelValue, values: tuple[LabelValue, ...], cell: CellT) -> None:
        """Add sums to a step. This reopens a step that `close` has marked as complete."""
        key = run, step
        if key not in self._open:
            self._open[key] = self._complete.pop(key, {})
            self._complete_size -= self._size_of(self._open[key])
        cells = self._open[key]
        cells[values] = self._merge_cells(cells[values], cell) if values in cells else cell
        check_breakdown_values(self._by, len(cells))
        for column, value in zip(self._by, values, strict=True):
            known = self._known_values.setdefault((run, column), set())
            known.add(value)
            check_breakdown_values([column], len(known))

    def close(self, may_grow: Callable[[str, LabelValue], bool]) -> None:
        """Mark steps that cannot grow as complete. If complete steps take much memory, keep only final sums."""
        for key in [key for key in self._open if not may_grow(*key)]:
            cells = self._open.pop(key)
            size = self._size_of(cells)
            if self._complete_size + size > self.closing_size:
                self._close_complete()
            self._complete[key] = cells
            self._complete_size += size

    def finish(self) -> None:
        self.close(lambda run, step: False)
        self._close_complete()

    def _close_complete(self) -> None:
        of_run: dict[str, dict[LabelValue, GroupCells[CellT]]] = {}
        for (run, step), cells in self._complete.items():
            of_run.setdefault(run, {})[step] = {values: cells[values] for values in sorted(cells, key=str)}
        self._complete, self._complete_size = {}, 0
        for run, steps in of_run.items():
            self._close_groups(run, list(steps), list(steps.values()))

    def _size_of(self, cells: GroupCells[CellT]) -> int:
        return sum(map(self._size, cells.values()))


@dataclass
class RunTotals:
    """Metrics of each step of a run, and the sums for the metrics of the whole run."""

    steps: list[LabelValue] = field(default_factory=list)  # steps in the order in which they were evaluated
    groups: list[EstimateRow] = field(default_factory=list)  # metrics of these steps, several steps per entry
    # by (column, value): final sums over the sequences with this value of a `--by` column, or over all for ("", None)
    closed: dict[tuple[str, LabelValue], CellSums] = field(default_factory=dict)
    sums: RunSums = field(default_factory=RunSums)  # breakdowns and worst rows of the run
    # the prompts that were counted, with the keys of `closed`
    prompts: dict[tuple[str, LabelValue], PromptCounter] = field(default_factory=dict)

    @property
    def overall(self) -> CellSums:
        return self.closed["", None]


class Accumulator(GroupMerger[CellSums]):
    """Adds up the sums of a dump in input order, and computes a step's metrics when the step is complete."""

    def __init__(self, plan: MeasurePlan) -> None:
        super().__init__(plan.by, lambda cell: cell.size, lambda cell, more: (cell + more).fold(GROUP_CAP))
        self.plan = plan
        self.evaluator = Evaluator(plan)
        self.runs: dict[str, RunTotals] = {}
        self.factors: NormalizationFactors = []

    def add(self, sums: Sums) -> None:
        for (run, (step, values)), cell in sums.cells.items():
            self.merge(run, step, values, cell.fold(GROUP_CAP))
        for run, run_sums in sums.runs.items():
            totals = self.runs.setdefault(run, RunTotals())
            totals.sums = totals.sums + run_sums

    def _close_groups(self, run: str, steps: list[LabelValue], groups: Sequence[GroupCells[CellSums]]) -> None:
        totals, plan = self.runs[run], self.plan
        closed: dict[tuple[str, LabelValue], list[tuple[CellSums, np.uint64]]] = {}
        for step, cells in zip(steps, groups, strict=True):
            whole, salt = reduce(add, cells.values()).fold(GROUP_CAP), step_hash(step)
            factors = group_factors(whole.table, plan)
            if plan.sequences:
                found = zip(factors.scopes.tolist(), map(tuple, factors.factors.tolist()), strict=True)
                self.factors += [(run, str(step), *each) for each in found]
            closed.setdefault(("", None), []).append((close_cell(whole, factors, plan), salt))
            for values, cell in cells.items() if plan.by else ():
                own = close_cell(cell, factors, plan)
                for key in zip(plan.by, values, strict=True):
                    closed.setdefault(key, []).append((own, salt))
        totals.steps += steps
        totals.groups.append(self.evaluator.evaluate([cell for cell, _ in closed["", None]], METRICS_NOT_BY_STEP))
        for name, parts in closed.items():
            self._extend(totals, name, [cell for cell, _ in parts], np.array([salt for _, salt in parts]))

    def _extend(self, totals: RunTotals, key: tuple[str, LabelValue], cells: list[CellSums], salts: Hashes) -> None:
        """Add the sums of several steps to `totals.closed[key]`. If it exceeds `max_clusters` rows, merge clusters."""
        plan, cap = self.plan, self.plan.max_clusters
        if plan.by_prompt:
            prompts = totals.prompts.setdefault(key, PromptCounter())
            cells = [self._count_prompts(cell, prompts) for cell in cells]
        merged = merge_groups(cells, salts, plan)
        if (total := totals.closed.get(key)) is not None:
            if not (total.table.has_scopes and merged.table.has_scopes):  # fold both, so that equal clusters are added
                total, merged = (cell.fold_across_scopes(cap, plan.by_prompt) for cell in (total, merged))
            merged = total + merged
        too_large = len(merged.table) > cap
        totals.closed[key] = merged.fold_across_scopes(cap, plan.by_prompt) if too_large else merged

    def _count_prompts(self, cell: CellSums, prompts: PromptCounter) -> CellSums:
        """Count only the prompts that no earlier step contains, instead of all clusters."""
        names, table = self.evaluator.columns, cell.table
        first = names.position(MISMATCH_NAME, "clusters")
        rest = [names.position(index, "empty_cluster") for index, _ in enumerate(self.plan.corrections)]
        sums = table.sums.copy(order="K")
        sums[:, first], sums[:, rest] = prompts.add(table.clusters, sums[:, first] > 0, sums[:, rest] > 0)
        return replace(cell, table=replace(table, sums=sums))
