"""Arrays of the cluster tables in Results, metrics computed from them, and sums of K3 with an upper limit per token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, cached_property

import numpy as np

from mismatchctl.core.batch import Float64s
from mismatchctl.core.bins import CAP_EXPONENTS, K3_CAPS, LAYER_K3, LAYER_TOKENS, PROBABILITY_BINS
from mismatchctl.core.validation import LARGEST_SUM
from mismatchctl.corrections.model import Correction
from mismatchctl.errors import ConfigError, DataError, option, suggestion
from mismatchctl.measure.columns import PAIRS
from mismatchctl.measure.metrics.evaluation import pair_metrics
from mismatchctl.measure.metrics.metric import Metric, RecordingTotals, compute_intervals
from mismatchctl.measure.metrics.registry import FACET_METRICS, MISMATCH_METRICS, correction_metrics
from mismatchctl.measure.sums import Hashes, hash_values, mix_hashes
from mismatchctl.results.model import Clusters, Groups, RunResult

RECORD_REMEDY = "record the log-probs that the metric compares, and pass the dump instead of a Result"
"""Remedy to show if the log-probs of a pair of policies are missing."""
DUMP_REMEDY = "pass the dump instead of the Result"
"""Remedy to show if a Result does not contain the requested data."""


@dataclass(frozen=True)
class ClusterSample:
    """Sums per cluster over a run, over a step, or over the sequences with one value of a `--by` column."""

    keys: Hashes  # ascending hashes [N]. A cluster has the same hash in all Results
    names: tuple[str, ...]  # names of the columns [K]
    sums: Float64s  # [N, K]

    def __len__(self) -> int:
        return len(self.keys)

    @cached_property
    def columns(self) -> dict[str, int]:
        return {name: position for position, name in enumerate(self.names)}

    def column(self, name: str) -> Float64s:
        return self.sums[:, self.columns[name]]

    @classmethod
    def merge(cls, keys: Hashes, names: tuple[str, ...], sums: Float64s) -> ClusterSample:
        """Add up the rows with equal keys."""
        keys, where = np.unique(keys, return_inverse=True)
        merged = np.zeros((len(keys), len(names)))
        with np.errstate(over="ignore"):
            np.add.at(merged, where, sums)
        return cls(keys, names, merged)

    def count_common(self, other: ClusterSample) -> int:
        return len(np.intersect1d(self.keys, other.keys, assume_unique=True))

    def equal_sides(self, other: ClusterSample) -> list[str]:
        """Return the sides ("rollout", "train") with equal log-probs in two samples of the same responses, or []."""
        sizes = ("tokens", "sequences", "squared_length")
        if not (np.array_equal(self.keys, other.keys) and all(self._agrees(other, name) for name in sizes)):
            return []
        columns = {"rollout": "reference_log_ppl", "train": "policy_log_ppl"}
        return [side for side, column in columns.items() if self._agrees(other, column)]

    def _agrees(self, other: ClusterSample, name: str) -> bool:
        known = name in self.columns and name in other.columns
        return known and np.allclose(self.column(name), other.column(name), rtol=1e-7, atol=0)


def build_run_sample(run: RunResult) -> ClusterSample:
    """Return the clusters of a run. A prompt is one cluster in all steps. Other clusters belong to one step."""
    return _build_sample(run.clusters, run.groups, np.ones(len(run.clusters.hashes), np.bool_))


def build_step_sample(run: RunResult, index: int) -> ClusterSample:
    if not run.clusters.groups:
        raise DataError("the Result lacks the clusters of each step, because there were too many", remedy=DUMP_REMEDY)
    return _build_sample(run.clusters, run.groups, np.array(run.clusters.groups, np.int64) == index)


def build_value_sample(run: RunResult, column: str, index: int) -> ClusterSample:
    if column not in run.by:
        remedy = f"analyze the dump with {option('by', column)}"
        raise DataError(f"the Result does not contain a breakdown by {column}", remedy=remedy)
    table = run.by[column].clusters
    if table is None:
        problem = f"the Result lacks the clusters of each {column}, because there were too many"
        raise DataError(problem, remedy=DUMP_REMEDY)
    return _build_sample(table, None, np.array(table.groups, np.int64) == index)


def _build_sample(
    table: Clusters, steps: Groups | None, rows: np.ndarray[tuple[int], np.dtype[np.bool_]]
) -> ClusterSample:
    """Add up the rows of each cluster. A prompt is one cluster in all steps. Other clusters belong to one step."""
    keys = np.array([int(text, 16) for text in table.hashes], np.uint64)
    sums = np.array(table.sums, np.float64).reshape(len(keys), len(table.columns))
    sums[np.abs(sums) >= LARGEST_SUM] *= np.inf  # Results contain LARGEST_SUM instead of infinity
    if table.by != "prompt" and table.groups and steps is not None:
        keys = mix_hashes(keys, hash_values(np.array(list(map(str, steps.labels))))[table.groups])
    return ClusterSample.merge(keys[rows], tuple(table.columns), sums[rows])


@dataclass(frozen=True)
class TableMetric:
    """A metric that is computed from a cluster table."""

    metric: Metric
    prefix: str = ""  # of its columns, such as `drift_`. A column that only exists without prefix is also read
    needs: str = ""  # a column that the table must contain

    @property
    def is_resampled(self) -> bool:
        """Return True if the bootstrap can resample the metric, which maxima, quantiles and counts do not allow."""
        return self.metric.formula is not None and self.metric.has_error

    def of(self, sample: ClusterSample) -> float:
        columns = self.columns(sample)
        with np.errstate(all="ignore"):
            return float(self.evaluate(sample.sums[:, columns].sum(axis=0), sample, columns))

    def columns(self, sample: ClusterSample) -> list[int]:
        assert self.metric.formula is not None
        if self.needs and self.needs not in sample.columns:
            problem = f"{self.metric.key} is missing: the dump lacks log-probs, or its Result lacks clusters"
            raise DataError(problem, remedy=RECORD_REMEDY)
        asked = RecordingTotals(dict.fromkeys(sample.names, np.float64(1.0)), self.prefix)
        try:
            with np.errstate(all="ignore"):
                self.metric.formula(asked)
        except KeyError as error:
            problem = f"the table of clusters in the Result lacks the column {self.prefix}{error.args[0]}"
            raise DataError(problem, remedy=DUMP_REMEDY) from None
        return [sample.columns[name] for name in asked.read]

    def evaluate(self, totals: Float64s, sample: ClusterSample, positions: list[int]) -> Float64s:
        """Compute the metric. `totals` [..., P] contains the sums of the P columns of `sample` at `positions`."""
        assert self.metric.formula is not None
        found = {sample.names[position]: totals[..., index] for index, position in enumerate(positions)}
        with np.errstate(all="ignore"):
            value: Float64s = np.asarray(self.metric.formula(RecordingTotals(found, self.prefix)), np.float64)
        return np.broadcast_to(value, totals.shape[:-1])


@cache
def _build_registry() -> dict[str, TableMetric]:
    found = {metric.key: TableMetric(metric) for metric in MISMATCH_METRICS}
    found |= {metric.key: TableMetric(metric) for metric in FACET_METRICS}
    for pair in PAIRS[1:]:
        found |= {metric.key: TableMetric(metric, pair.prefix, f"{pair.prefix}tokens") for metric in pair_metrics(pair)}
    return found


def find_metric(key: str, correction: Correction | None = None) -> TableMetric:
    known = _build_registry()
    if correction is not None:
        known = {m.key: TableMetric(m, f"{correction.name}/") for m in correction_metrics(correction)}
    if key not in known:
        of = " of corrections" if correction is not None else ""
        raise ConfigError(f"no metric{of} is called {key!r}{suggestion(key, known)}; `mismatchctl metrics` lists them")
    return known[key]


_SLOPE_STEP = 1e-4  # change of a cluster's weight for numerical derivatives, before division by the number of clusters


def compute_influence(sample: ClusterSample, metric: TableMetric) -> tuple[float, Float64s, Float64s]:
    """Return the metric, its derivative by the weight of each cluster, and the clusters' sizes (usually tokens)."""
    columns = metric.columns(sample)
    sums = sample.sums[:, columns]
    totals = sums.sum(axis=0)
    value = float(metric.evaluate(totals, sample, columns))
    step = _SLOPE_STEP / max(len(sample), 1)
    moved = [
        metric.evaluate(totals + sign * step * (len(sample) * sums - totals), sample, columns) for sign in (1.0, -1.0)
    ]
    names = {sample.names[place] for place in columns}
    by = next((name for name in ("tokens", "sequences") if name in names), sample.names[columns[-1]])
    influence = (moved[0] - moved[1]) / (2 * step * max(len(sample), 1))
    return value, influence, sample.column(by)


def compute_interval(sample: ClusterSample, metric: TableMetric) -> tuple[tuple[float, float] | None, float | None]:
    value, influence, _ = compute_influence(sample, metric)
    clusters = float(len(sample))
    with np.errstate(all="ignore"):
        squares = np.sum(influence**2)
        effective = squares**2 / np.sum(influence**4)
        se = np.sqrt(squares * clusters / (clusters - 1)) if clusters > 1 else np.float64(np.nan)
    found = (np.array([each]) for each in (value, se, effective, clusters))
    ends, covers = (each[0].tolist() for each in compute_intervals(metric.metric.scale, *found))
    return (None if math.isnan(ends[0]) else (ends[0], ends[1])), (None if math.isnan(covers) else covers)


_CAP_STEPS = np.diff(K3_CAPS)
_LOWEST_K3 = K3_CAPS[0] / 4.0**8  # nearly all tokens exceed this K3
_SCARCE_SHARE = 0.005  # minimum share of tokens in a bin


@dataclass(frozen=True)
class K3Layers:
    """Sums per cluster (N), bin of the rollout probability (B) and K3 cap (C). A cap limits the K3 of each token."""

    k3: Float64s  # sum of K3 over all tokens [N]
    tokens: Float64s  # number of tokens by bin [N, B]
    capped: Float64s  # sum of min(K3, cap) by bin and cap [N, B, C]

    @classmethod
    def from_sample(cls, sample: ClusterSample) -> K3Layers | None:
        if not set(LAYER_TOKENS + LAYER_K3 + ("k3",)) <= sample.columns.keys():
            return None
        take = [sample.columns[name] for name in LAYER_TOKENS], [sample.columns[name] for name in LAYER_K3]
        capped = sample.sums[:, take[1]].reshape(len(sample), PROBABILITY_BINS, len(K3_CAPS))
        return cls(sample.column("k3"), sample.sums[:, take[0]], capped)

    @cached_property
    def share_above(self) -> Float64s:
        """Estimate the share of tokens with K3 above each cap (except the last), from sums of capped K3."""
        found: Float64s = np.diff(self.capped.sum(axis=(0, 1))) / (_CAP_STEPS * max(self.tokens.sum(), 1.0))
        return found

    def find_cap(self, share: float, least: int = CAP_EXPONENTS[0]) -> int:
        """Return the index of the lowest cap, with exponents from `least` on, that at most `share` of tokens exceed."""
        first = least - CAP_EXPONENTS[0]
        reached = np.flatnonzero(self.share_above[first:] <= share)
        return first + int(reached[0]) if len(reached) else len(K3_CAPS) - 2  # the share above the last cap is unknown

    def count_above(self, cap: int) -> Float64s:
        """Estimate the number of tokens above a cap per cluster. Tokens between this cap and the next count partly."""
        found: Float64s = np.diff(self.capped[:, :, cap : cap + 2].sum(axis=1), axis=1)[:, 0] / _CAP_STEPS[cap]
        return found

    def scale(self, factor: float) -> K3Layers:
        """Multiply the K3 of each token by `factor`. The sums of capped K3 are then interpolated between the caps."""
        below = self.capped[:, :, :1] * (_LOWEST_K3 / K3_CAPS[0])
        known = np.concatenate([below, self.capped], axis=2)
        caps, wanted = np.concatenate([[_LOWEST_K3], K3_CAPS]), np.maximum(K3_CAPS / factor, _LOWEST_K3)
        at = np.clip(np.searchsorted(caps, wanted) - 1, 0, len(K3_CAPS) - 1)
        total = known.sum(axis=0)
        low, high = total[:, at], total[:, at + 1]
        share = np.log(wanted / caps[at]) / np.log(caps[at + 1] / caps[at])
        with np.errstate(all="ignore"):
            logs = np.log(total)
            rises = np.diff(logs, axis=1)
            # The slope at a cap is the mean of the slopes on its two sides. The lowest cap uses only the upper side,
            # because nearly all tokens are there.
            slopes = np.concatenate([rises[:, :1], (rises[:, :-1] + rises[:, 1:]) / 2, rises[:, -1:]], axis=1)
            slopes[:, 1] = rises[:, 1]
            first, last = (np.where(at > 0, slopes[:, place], rises[:, at]) for place in (at, at + 1))
            bend = (1 - share) * (first - rises[:, at]) - share * (last - rises[:, at])
            moved_logs = logs[:, at] + share * rises[:, at] + share * (1 - share) * bend
            part = np.clip(np.nan_to_num((np.exp(moved_logs) - low) / (high - low)), 0.0, 1.0)
        moved = known[:, :, at] * (1 - part) + known[:, :, at + 1] * part
        return K3Layers(self.k3 * factor, self.tokens, moved * factor)


def merge_bins(tokens: Float64s) -> list[slice]:
    """Merge neighboring probability bins until each bin has at least 0.5% of the tokens (_SCARCE_SHARE)."""
    found, start, least = [], 0, _SCARCE_SHARE * tokens.sum()
    for stop in range(1, len(tokens) + 1):
        if tokens[start:stop].sum() >= least and tokens[stop:].sum() >= least:
            found.append(slice(start, stop))
            start = stop
    return [*found, slice(start, len(tokens))]
