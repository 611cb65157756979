"""Samples: the cluster table of a Result as columns by name; metrics of totals, and how each cluster moves them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.correction import Correction
from mismatchctl.errors import ConfigError, DataError, option, suggestion
from mismatchctl.finite import LARGEST
from mismatchctl.measure import PAIRS
from mismatchctl.measure.metrics import MISMATCH_METRICS, Metric, correction_metrics, pair_metrics
from mismatchctl.measure.metrics.facets import FACET_METRICS
from mismatchctl.measure.metrics.intervals import intervals
from mismatchctl.measure.metrics.metric import Number
from mismatchctl.measure.table import Hashes, hash_values, mix
from mismatchctl.result import Clusters, Groups, RunResult

REDO = "record the log-probs that it compares, and name the dump itself in place of a Result"
"""What helps where a pair of policies is missing."""
ASK_THE_DUMP = "name the dump itself in place of the Result"
"""What helps where a Result was made without what is asked for."""


@dataclass(frozen=True)
class ClusterSample:
    """Sums by cluster, of a run or of a part of it.

    Attributes:
        keys: names each cluster, the same in every Result that holds it [N], ascending.
        names: of the columns [K].
        sums: [N, K].
    """

    keys: Hashes
    names: tuple[str, ...]
    sums: Float64s

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def columns(self) -> dict[str, int]:
        """Position of each column by name."""
        return {name: position for position, name in enumerate(self.names)}

    def column(self, name: str) -> Float64s:
        """One column [N]."""
        return self.sums[:, self.columns[name]]

    def shared(self, other: ClusterSample) -> int:
        """How many clusters both hold."""
        return len(np.intersect1d(self.keys, other.keys, assume_unique=True))

    def has_same_tokens(self, other: ClusterSample) -> bool:
        """Whether both hold the same responses: as many tokens everywhere, and the same log-probs of one policy."""
        return np.array_equal(self.keys, other.keys) and (
            all(self._agrees(other, name) for name in ("tokens", "sequences", "squared_length"))
            and any(self._agrees(other, name) for name in ("policy_log_ppl", "reference_log_ppl"))
        )

    def _agrees(self, other: ClusterSample, name: str) -> bool:
        known = name in self.columns and name in other.columns
        return known and np.allclose(self.column(name), other.column(name), rtol=1e-7, atol=0)


def sample_of_run(run: RunResult) -> ClusterSample:
    """All clusters of a run. A prompt is one cluster in whatever steps it occurs; a sequence belongs to its step."""
    return _sample(run.clusters, run.groups, np.ones(len(run.clusters.hashes), np.bool_))


def sample_of_step(run: RunResult, index: int) -> ClusterSample:
    """The clusters of one step, by its index among the labels.

    Raises:
        DataError: nothing in the table says which step a row belongs to.
    """
    if not run.clusters.groups:
        raise DataError("the Result's cluster table is folded and cannot tell steps apart", remedy=ASK_THE_DUMP)
    return _sample(run.clusters, run.groups, np.array(run.clusters.groups, np.int64) == index)


def sample_of_value(run: RunResult, column: str, index: int) -> ClusterSample:
    """The clusters of one value of a `--by` column, by its index among the labels.

    Raises:
        DataError: the Result was not broken down by that column, or has too many clusters to keep them by value.
    """
    if column not in run.by:
        raise DataError(
            f"the Result is not broken down by {column}", remedy=f"analyze the dump with {option('by', column)}"
        )
    table = run.by[column].clusters
    if table is None:
        raise DataError(f"the Result holds no clusters by {column}: there are too many", remedy=ASK_THE_DUMP)
    return _sample(table, None, np.array(table.groups, np.int64) == index)


def _sample(table: Clusters, steps: Groups | None, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> ClusterSample:
    """Rows of one cluster added up; a cluster that is no prompt goes by its step's label too."""
    keys = np.array([int(text, 16) for text in table.hashes], np.uint64)
    sums = np.array(table.sums, np.float64).reshape(len(keys), len(table.columns))
    sums[np.abs(sums) >= LARGEST] *= np.inf  # as they overflowed
    if table.by != "prompt" and table.groups and steps is not None:
        keys = mix(keys, hash_values(np.array(list(map(str, steps.labels))))[table.groups])
    keys, where = np.unique(keys[rows], return_inverse=True)
    merged = np.zeros((len(keys), len(table.columns)))
    with np.errstate(over="ignore"):
        np.add.at(merged, where, sums[rows])
    return ClusterSample(keys, tuple(table.columns), merged)


@dataclass(frozen=True)
class TableMetric:
    """A metric with the prefix under which its columns stand: none for the mismatch, a pair's, a correction's.

    Attributes:
        metric: of the registry.
        prefix: looked up first; a column that is not there is the one without it.
        needs: a column without which there is no such metric.
    """

    metric: Metric
    prefix: str = ""
    needs: str = ""

    @property
    def is_resampled(self) -> bool:
        """Whether it is a smooth function of sums; maxima, quantiles and counts are not."""
        return self.metric.formula is not None and self.metric.uncertain

    def columns(self, sample: ClusterSample) -> list[int]:
        """Positions of the columns that its formula reads.

        Raises:
            DataError: the sample has no such column.
        """
        assert self.metric.formula is not None
        if self.needs and self.needs not in sample.columns:
            problem = f"no {self.metric.key}: the dump lacks log-probs, or its Result their clusters"
            raise DataError(problem, remedy=REDO)
        asked = _Totals(self.prefix, dict.fromkeys(sample.names, np.float64(1.0)))
        with np.errstate(all="ignore"):
            self.metric.formula(asked)
        return [sample.columns[name] for name in asked.read]

    def of(self, totals: Float64s, sample: ClusterSample, positions: list[int]) -> Float64s:
        """Its value on totals [..., len(positions)] of those columns of a sample; NaN where it is undefined."""
        assert self.metric.formula is not None
        found = {sample.names[position]: totals[..., index] for index, position in enumerate(positions)}
        with np.errstate(all="ignore"):
            value: Float64s = np.asarray(self.metric.formula(_Totals(self.prefix, found)), np.float64)
        return np.broadcast_to(value, totals.shape[:-1])


class _Totals:
    """Totals by name, under the prefix first; `read` are those that a formula has asked for, in its order."""

    def __init__(self, prefix: str, found: Mapping[str, Number]) -> None:
        self.prefix, self.found = prefix, found
        self.read: dict[str, None] = {}

    def __getitem__(self, name: str) -> Number:
        own = self.prefix + name
        known = own if own in self.found else name
        if known not in self.found:
            raise DataError(f"the Result's cluster table has no column {own}", remedy=ASK_THE_DUMP)
        self.read[known] = None
        return self.found[known]


@cache
def _registry() -> dict[str, TableMetric]:
    found = {metric.key: TableMetric(metric) for metric in MISMATCH_METRICS}
    found |= {metric.key: TableMetric(metric) for metrics in FACET_METRICS.values() for metric in metrics}
    for pair in PAIRS[1:]:
        found |= {metric.key: TableMetric(metric, pair.prefix, f"{pair.prefix}tokens") for metric in pair_metrics(pair)}
    return found


def find_metric(key: str, correction: Correction | None = None) -> TableMetric:
    """A metric of the mismatch or another pair by its key, or one of a correction.

    Raises:
        ConfigError: there is none of that key.
    """
    known = _registry()
    if correction is not None:
        known = {m.key: TableMetric(m, f"{correction.name}/") for m in correction_metrics(correction)}
    if key not in known:
        of = f" of correction {correction.name}" if correction is not None else ""
        raise ConfigError(f"no metric{of} is called {key!r}{suggestion(key, known)}; `mismatchctl metrics` lists them")
    return known[key]


_STEP = 1e-4  # of a cluster's weight, over their number


def influence_of(sample: ClusterSample, metric: TableMetric) -> tuple[float, Float64s, Float64s]:
    """A metric's value, how each cluster moves it [N], summing to about 0, and the size of clusters that it counts."""
    columns = metric.columns(sample)
    sums = sample.sums[:, columns]
    totals = sums.sum(axis=0)
    value = float(metric.of(totals, sample, columns))
    step = _STEP / max(len(sample), 1)
    moved = [metric.of(totals + sign * step * (len(sample) * sums - totals), sample, columns) for sign in (1.0, -1.0)]
    names = {sample.names[place] for place in columns}
    by = next((name for name in ("tokens", "sequences") if name in names), sample.names[columns[-1]])
    influence = (moved[0] - moved[1]) / (2 * step * max(len(sample), 1))
    return value, influence, sample.column(by)


def interval_of(sample: ClusterSample, metric: TableMetric) -> tuple[tuple[float, float] | None, float | None]:
    """The 90 % interval of a metric, and what it covers instead where its tail is heavy; None for what there is not."""
    value, influence, _ = influence_of(sample, metric)
    clusters = float(len(sample))
    with np.errstate(all="ignore"):
        squares = np.sum(influence**2)
        effective = squares**2 / np.sum(influence**4)
        se = np.sqrt(squares * clusters / (clusters - 1)) if clusters > 1 else np.float64(np.nan)
    found = (np.array([each]) for each in (value, se, effective, clusters))
    ends, covers = (each[0].tolist() for each in intervals(metric.metric.scale, *found))
    return (None if math.isnan(ends[0]) else (ends[0], ends[1])), (None if math.isnan(covers) else covers)
