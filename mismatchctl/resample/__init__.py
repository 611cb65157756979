"""Resampling clusters of Results: differences and their uncertainty, without the dumps."""

from mismatchctl.resample.bootstrap import REPLICATES, Design, Draws, resample, weights
from mismatchctl.resample.decide import holm, interval, p_above_zero
from mismatchctl.resample.samples import Measure, Sample, find_measure, sample_of_run, sample_of_step, sample_of_value

__all__ = [
    "REPLICATES",
    "Design",
    "Draws",
    "Measure",
    "Sample",
    "find_measure",
    "holm",
    "interval",
    "p_above_zero",
    "resample",
    "sample_of_run",
    "sample_of_step",
    "sample_of_value",
    "weights",
]
