"""Metrics: one registry of definitions, and their evaluation on closed sums."""

from mismatchctl.measure.metrics.corrections import correction_metrics
from mismatchctl.measure.metrics.evaluate import EstimateRow, Estimates, Evaluator, other_metrics, pair_metrics
from mismatchctl.measure.metrics.metric import Estimate, Metric
from mismatchctl.measure.metrics.mismatch import BASE, PAIR, RATIO_Z
from mismatchctl.measure.metrics.quantity import Measure, Quantity

MISMATCH_METRICS: tuple[Metric, ...] = (*BASE, *PAIR, RATIO_Z)
"""Every metric of the mismatch, in the order of tables."""

__all__ = [
    "MISMATCH_METRICS",
    "Estimate",
    "EstimateRow",
    "Estimates",
    "Evaluator",
    "Measure",
    "Metric",
    "Quantity",
    "correction_metrics",
    "other_metrics",
    "pair_metrics",
]
