"""Mergeable sums: what the pass over the tokens leaves behind, and the pass itself."""

from mismatchctl.measure.cell import CellSums, PairSums, RunSums
from mismatchctl.measure.columns import DRIFT, MISMATCH
from mismatchctl.measure.kernels.choose import WORTH_COMPILING, Device, kernel_for
from mismatchctl.measure.kernels.kernel import BUCKETS, Kernel
from mismatchctl.measure.reduce import Plan, Sums, reduce_batch
from mismatchctl.measure.table import GROUP_CAP, OVERALL_CAP, ClusterTable

__all__ = [
    "BUCKETS",
    "DRIFT",
    "GROUP_CAP",
    "MISMATCH",
    "OVERALL_CAP",
    "WORTH_COMPILING",
    "CellSums",
    "ClusterTable",
    "Device",
    "Kernel",
    "PairSums",
    "Plan",
    "RunSums",
    "Sums",
    "kernel_for",
    "reduce_batch",
]
