"""Resampling clusters of Results: differences and their uncertainty, without the dumps."""

from mismatchctl.resample.bootstrap import Draws, holm, interval, p_above_zero, resample, weights
from mismatchctl.resample.layers import Layers, merged_bins
from mismatchctl.resample.permute import Exchange, relabelings, shares_above, smallest_of_family
from mismatchctl.resample.samples import (
    ClusterSample,
    TableMetric,
    find_metric,
    influence_of,
    interval_of,
    sample_of_run,
    sample_of_step,
    sample_of_value,
)

__all__ = [
    "ClusterSample",
    "Draws",
    "Exchange",
    "Layers",
    "TableMetric",
    "find_metric",
    "holm",
    "influence_of",
    "interval",
    "interval_of",
    "merged_bins",
    "p_above_zero",
    "relabelings",
    "resample",
    "sample_of_run",
    "sample_of_step",
    "sample_of_value",
    "shares_above",
    "smallest_of_family",
    "weights",
]
