"""Resampling clusters of Results: differences and their uncertainty, without the dumps."""

from mismatchctl.resample.bootstrap import REPLICATES, Draws, resample, weights
from mismatchctl.resample.decide import holm, interval, p_above_zero
from mismatchctl.resample.samples import (
    Sample,
    TableMetric,
    find_metric,
    sample_of_run,
    sample_of_step,
    sample_of_value,
)

__all__ = [
    "REPLICATES",
    "Draws",
    "Sample",
    "TableMetric",
    "find_metric",
    "holm",
    "interval",
    "p_above_zero",
    "resample",
    "sample_of_run",
    "sample_of_step",
    "sample_of_value",
    "weights",
]
