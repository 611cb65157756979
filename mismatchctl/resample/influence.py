"""How each cluster of a sample moves a metric, and the interval that follows: the same as a Result's own."""

from __future__ import annotations

import math

import numpy as np

from mismatchctl.batch import Float64s
from mismatchctl.measure.metrics.intervals import intervals
from mismatchctl.resample.samples import Sample, TableMetric

_STEP = 1e-4  # of a cluster's weight, over their number


def influence_of(sample: Sample, metric: TableMetric) -> tuple[float, Float64s, Float64s]:
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


def interval_of(sample: Sample, metric: TableMetric) -> tuple[tuple[float, float] | None, float | None]:
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
