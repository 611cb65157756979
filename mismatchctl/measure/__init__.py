"""Mergeable sums: what the pass over the tokens leaves behind, and the pass itself."""

from mismatchctl.measure.cell import CellSums, PairSums, RunSums
from mismatchctl.measure.columns import MISMATCH
from mismatchctl.measure.kernels.choose import Device, kernel_for, worth_compiling
from mismatchctl.measure.kernels.kernel import Kernel
from mismatchctl.measure.pairs import PAIRS, Pair
from mismatchctl.measure.reduce import MeasurePlan, Sums, reduce_batch
from mismatchctl.measure.table import GROUP_CAP, OVERALL_CAP, ClusterTable

__all__ = [
    "GROUP_CAP",
    "MISMATCH",
    "OVERALL_CAP",
    "PAIRS",
    "CellSums",
    "ClusterTable",
    "Device",
    "Kernel",
    "MeasurePlan",
    "Pair",
    "PairSums",
    "RunSums",
    "Sums",
    "kernel_for",
    "reduce_batch",
    "worth_compiling",
]
