"""Prediction of what a dump does not show: batches yet to come, longer responses, later steps."""

from mismatchctl.predict.batch import batch_rejection
from mismatchctl.predict.length import at_length
from mismatchctl.predict.prediction import BackTest, Prediction
from mismatchctl.predict.sample import SequenceSample, collect, sample_of
from mismatchctl.predict.trend import at_step

__all__ = [
    "BackTest",
    "Prediction",
    "SequenceSample",
    "at_length",
    "at_step",
    "batch_rejection",
    "collect",
    "sample_of",
]
